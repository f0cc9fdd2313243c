"""Handle what happens outside of the engine's methods: bare backwards, writes to parameters, dropped gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onefold.comm import Ledger
from onefold.engine.offloaded_states import OffloadedStates
from onefold.engine.train_state import TrainState
from onefold.runtime import Hooks, ParamHandle, Unit


class ModelEvents:
    """The owner of an engine's hooks and parameter handles, which report events to it (`runtime.Owner`).

    Hooks and handles hold it by weak references, and only the engine holds it by a strong one.
    """

    def __init__(self, state: TrainState, offloaded: OffloadedStates, ledger: Ledger, engine: weakref.ref[Any]) -> None:
        self.state = state
        self.offloaded_states = offloaded
        self.is_closed = False
        self.engine = engine
        """The engine, for callers that keep it alive."""
        self._scaled_backward: weakref.ref[Callable[[], None]] | None = None
        self.handles = [ParamHandle.of_unit(unit, ledger, self) for unit in state.schedule.units]
        # After a step that overlaps with the next forward, parameters may be in flight from other ranks or the host.
        plan, schedule = state.plan, state.schedule
        arrives = state.group.size > 1 or any(param.store.is_offloaded for param in schedule.trained_params())
        watch = bool(schedule.sharded_units) or (plan.overlap and plan.shards_states and arrives)
        self.hooks = Hooks(state.model, schedule, self, watch=watch)

    def expect_scaled_backward(self, scaled: torch.Tensor) -> None:
        """Allow a bare backward through a loss that was multiplied by the loss scale."""
        if scaled.grad_fn is not None:
            scaled.grad_fn.register_prehook(partial(_note_scaled_backward, weakref.ref(self)))

    def note_scaled_backward(self) -> None:
        """Record that autograd runs a backward through a scaled loss, until that backward ends."""

        def backward() -> None:
            """Do nothing. Autograd holds this function until the backward ends."""

        self._scaled_backward = weakref.ref(backward)
        torch.autograd.Variable._execution_engine.queue_callback(backward)  # type: ignore[attr-defined]

    def begin_bare_backward(self) -> None:
        """Begin a backward that was called on a loss without the engine."""
        in_scaled_backward = self._scaled_backward is not None and self._scaled_backward() is not None
        if self.state.decision.scales_loss and not in_scaled_backward:
            raise RuntimeError(
                "Loss scaling is required: fp16 gradients underflow without a loss scale. Call engine.backward(loss) "
                "or engine.scale(loss).backward()."
            )
        self.state.begin_backward(divisor=self.state.window.batch.accumulation)

    def abort_backward(self) -> None:
        """Drop the gradients of the accumulation window of a backward that raised, and restart the window."""
        self.state.abort_backward()

    def about_to_write(self) -> None:
        """Finish the last step before parameters are written from outside."""
        self.state.schedule.check_awake()
        self.state.flush()
        self.state.schedule.wait_for_step()
        if self.state.step is not None:
            self.state.step.about_to_write()

    def parameters_loaded(self, units: list[Unit]) -> None:
        """Copy parameters that `load_state_dict` has written into their masters."""
        if self.state.step is not None:
            self.state.step.pull_masters(units)

    def gradient_dropped(self) -> None:
        """End the accumulation window once the `grad` of all parameters is None, as after `model.zero_grad()`."""
        if not any(param.grad.is_held for param in self.state.schedule.trained_params()):
            self.state.drop_gradients()

    def model_moved(self) -> None:
        """Have the next forward or step raise unless the parameters are back on their device by then."""
        self.hooks.model_moved()


def _note_scaled_backward(reference: weakref.ref[ModelEvents], gradients: Any) -> None:
    """Run as a hook of autograd, which must not keep the engine alive."""
    events = reference()
    if events is not None:
        events.note_scaled_backward()
