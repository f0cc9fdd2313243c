"""The engine that a training loop calls: forward, backward, step, checkpoints, memory and reports."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from onefold.comm import Disagreement, Group, Ledger, is_backend_error, local_rank
from onefold.config import Batch
from onefold.engine.build_state import build_state
from onefold.engine.checkpoint_loader import CheckpointLoader
from onefold.engine.checkpoint_saver import CheckpointSaver
from onefold.engine.closing import EngineParts, close_engine_of, close_unreachable, pause_collector, register_engine
from onefold.engine.compiled_units import CompiledUnits
from onefold.engine.job_stop import JobStop
from onefold.engine.memory_errors import MemoryErrors
from onefold.engine.model_events import ModelEvents
from onefold.engine.model_memory import ModelMemory
from onefold.engine.offloaded_states import OffloadedStates
from onefold.engine.peer_copies import PeerCopies
from onefold.engine.shared_parameters import SharedParameters
from onefold.engine.stall_guard import StallGuard
from onefold.engine.step_guards import StepGuards
from onefold.engine.step_replay import StepReplay
from onefold.engine.step_reports import EngineReports, learning_rates, open_record
from onefold.engine.take_step import StepTaker
from onefold.optim.chosen import ChosenOptimizer
from onefold.optim.schedules import check_step_arguments
from onefold.optim.sharded import ShardedOptimizer
from onefold.plan import Plan
from onefold.report.memory_usage import memory_status
from onefold.report.monitors import MonitorMaster
from onefold.report.timeline import Timeline
from onefold.report.trace_window import TraceWindow
from onefold.runtime.torch_internals import cast_floats


def _of_state(name: str, doc: str) -> Any:
    """Return a property that reads and writes an attribute of the engine's train state."""
    return property(
        lambda engine: getattr(engine.state, name), lambda engine, value: setattr(engine.state, name, value), doc=doc
    )


class Engine(nn.Module):
    """A model with its optimizer, laid out by a plan. `onefold.initialize` returns it.

    `engine.close()`, the end of `with engine:` and `del engine` close it.
    """

    _optimizer_type = ShardedOptimizer

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batch: Batch,
        chosen: ChosenOptimizer | None,
        group: Group,
        device: torch.device,
        *,
        config: dict[str, Any],
        other_plans: Mapping[str, Plan] | None = None,
        plans_with_less: Mapping[str, Plan] | None = None,
    ) -> None:
        super().__init__()
        close_engine_of(model)
        self.monitor, record = MonitorMaster(plan.loop.monitoring), open_record(plan.loop, group)
        self.device = device
        self.ledger = Ledger()
        self.is_compiled = False
        self._shared = SharedParameters(model, plan, chosen.group_of_each() if chosen is not None else {})
        self.state = build_state(
            model, plan, batch, chosen, group, device, self.ledger, config=config, shared=self._shared.ids
        )
        self.plan = plan = self.state.plan
        schedule, step, decision = self.state.schedule, self.state.step, self.state.decision
        self.optimizer: ShardedOptimizer | None = None
        if step is not None:
            drop: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(self.zero_grad)
            self.optimizer = self._optimizer_type(step, decision.loss_scale, drop)
            self.optimizer.engine = weakref.ref(self)
        self.offloaded_states = OffloadedStates(self.state)
        self._events = ModelEvents(self.state, self.offloaded_states, self.ledger, weakref.ref(self))
        self._hooks = self._events.hooks
        self._shared.watch(model, group)
        self._compiled = CompiledUnits()
        self.model_memory = ModelMemory(self.state, other_plans or {})
        timeline_options = {"breakdown": plan.loop.times_phases, "records": plan.loop.reports_steps and group.rank == 0}
        self._timeline = Timeline(device, self.ledger, schedule, self._hooks, **timeline_options)
        self._trace = TraceWindow.of(plan.loop.trace, device, group.rank)
        if self._trace is not None:
            weakref.finalize(self, self._trace.give_up)
        with_less = {way: self.model_memory.complete(other) for way, other in (plans_with_less or {}).items()}
        self._memory_errors = MemoryErrors(self.state, plan, with_less, self._trace)
        schedule.guard.start()
        self._modules["module"] = model
        self.training = model.training
        register_engine(model, self)
        self._saver = CheckpointSaver(self.state)
        self._copies = PeerCopies(self.state, self._saver)
        self._loader = CheckpointLoader(self.state, self._saver, self._copies)
        self._guards = StepGuards(self.state, self._saver, self._loader, self._copies)
        self._replay = StepReplay(self.state)
        self._steps = StepTaker(self.state, self._hooks, self._saver, self._replay)
        self._reports = EngineReports(self.state, self.model_memory, self.ledger, self._timeline, self.monitor, record)
        handles, offloaded = self._events.handles, self.offloaded_states
        self._stop, self._stalls = JobStop(self.state), StallGuard(self.state, self.monitor)
        parts = EngineParts(
            self.state, self._saver, self._hooks, handles, offloaded, self._reports, self._compiled, self._stop,
            self._stalls, self._copies,
        )  # fmt: skip
        self._finalizer = weakref.finalize(self, close_unreachable, parts)
        self._finalizer.atexit = False
        self._resume_collector = pause_collector(self) if plan.loop.pauses_collector else lambda: None

    # -- the loop -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.state.check_present()
        self._shared.check_present()
        self._reports.see_inputs(kwargs)
        precision = self.plan.precision
        if precision.casts_inputs:
            args, kwargs = cast_floats(args, torch.float16), cast_floats(kwargs, torch.float16)
        with self._phase("forward"), self._memory_errors.explained("forward"):
            output = self._replay.call_model(args, kwargs)
        if self.plan.loop.reports_memory:
            memory_status("after forward")
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward on the loss divided by the accumulation count and multiplied by the loss scale.

        Return the divided loss, detached. `scale_wrt_gas=False` skips the division.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"engine.backward expects a scalar loss, not {what}. Reduce it, e.g. by loss.mean().")
        if not loss.requires_grad:
            raise ValueError("the loss does not require grad. Compute it outside of no_grad, and do not detach it.")
        state, decision = self.state, self.state.decision
        if scale_wrt_gas:
            loss = loss / self.batch.accumulation
        with self._phase("backward"):
            state.begin_backward(divisor=1)
            is_last = state.window.backward_is_last
            decision.add_loss(loss.detach())
            try:
                scaled = loss.float() * decision.loss_scale.value if decision.scales_loss else loss
                with self._memory_errors.explained("backward"):  # measures memory before gradients are dropped
                    scaled.backward(retain_graph=retain_graph)
                    state.schedule.end_backward()
            except Exception as error:
                if not isinstance(error, Disagreement) and not is_backend_error(
                    error
                ):  # otherwise no rank can be reached
                    state.abort_backward()
                raise
            except BaseException as error:
                if state.group.size == 1:
                    state.abort_backward()
                else:  # Ctrl-C launches no collective, because the other ranks may not be interrupted
                    state.interrupted = type(error).__name__
                raise
            self._replay.end_micro_step(is_last=is_last)
        if self.plan.loop.reports_memory:
            memory_status("after backward")
        return loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for a bare `loss.backward()`. The step divides by the accumulation."""
        scaled = loss.float() * self.state.decision.loss_scale.value
        self._events.expect_scaled_backward(scaled)
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Clip gradients, update parameters and advance the schedule at an accumulation boundary; elsewhere count."""
        state = self.state
        if self.optimizer is None:
            raise RuntimeError("the engine has no optimizer. Pass one to initialize, or add an optimizer section.")
        state.check_complete()
        if state.window.in_no_sync:
            raise RuntimeError("engine.step() is called inside engine.no_sync(). Leave the context first.")
        at_boundary = state.window.at_boundary
        if at_boundary:
            check_step_arguments(state.lr_scheduler, lr_kwargs or {})
            self._reports.begin_step()
            with self._phase("step"), self._memory_errors.explained("step"):
                taken = self._guards.run(partial(self._steps.take, self.optimizer, self._stop.number))
            if not taken:
                return
            state.global_steps += 1
            state.global_samples += self.batch.train
        state.window.micro_steps += 1
        if at_boundary:
            try:
                if state.decision.applied and state.lr_scheduler is not None:
                    state.lr_scheduler.step(**(lr_kwargs or {}))
            finally:  # the step is taken and counted even if the scheduler raises
                self._saver.remember_step()
            self._reports.end_step()
            self._stalls.record_step()
            if self._trace is not None:
                self._trace.after_step(state.global_steps)
            self._stop.after_step(self._saver)
            self._copies.after_step()

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times a phase and traces it if the trace window is open."""
        if self._trace is not None:
            self._trace.before_phase(self.state.global_steps)
        return self._stalls.phase(name, self._timeline.span(name))

    def wait_for_step(self) -> None:
        """Wait for copies and collectives that the last step has launched."""
        self.state.schedule.wait_for_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all accumulated gradients."""
        self.state.drop_gradients()

    def was_step_applied(self) -> bool:
        """Return whether the last boundary updated the weights. An overflow skips the update."""
        return self.state.decision.applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's averaged gradient before clipping; None before the first step."""
        return self.state.decision.norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each optimizer group."""
        return learning_rates(self.state)

    # -- accumulation -------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the present micro-step ends with an update."""
        return self.state.window.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set, before each backward, whether an update follows it. The engine then no longer counts micro-steps."""
        self.state.window.explicit = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backwards without a step. Sharded gradients are reduced even so: reduction is linear."""
        return self.state.window.no_sync()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation count so that a step takes this many samples."""
        self.state.window.set_train(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward, and with it those of a step."""
        self.state.window.set_micro(micro_batch_size)

    def set_gradient_accumulation_steps(self, accumulation: int) -> None:
        """Change the micro-steps of a step, and with it its samples."""
        self.state.window.set_accumulation(accumulation)

    # -- checkpoints and weights --------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        background: bool | None = None,
    ) -> bool:
        """Write model, optimizer, scheduler, random states, data position and `client_state` to save_dir/tag.

        Call it on all ranks, or on rank 0 alone: then the others join at their next collective. `tag` is
        "global_step{N}" by default. With `background` (default: the config's `checkpoint.async`) training continues
        once the state is copied to host memory; `wait_for_checkpoint`, the next save and the end of the process wait
        for the write.
        """
        self._saver.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters, background)
        return True

    def set_client_state_of_copies(self, provide: Callable[[], Mapping[str, Any]]) -> None:
        """Set the function that returns the client state of each peer copy (`onefold.peer_copies`).

        It is called on rank 0, when a copy begins. Restarted programs find its value as the client state that
        `load_checkpoint` returns.
        """
        self._copies.client_state = provide

    def wait_for_checkpoint(self) -> None:
        """Wait until the save in the background is on disk. Raise if it failed."""
        self._saver.finish()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that any plan has saved on any number of ranks. All ranks call this together.

        Return its path and its client state. Without a `tag` the checkpoint named by `latest` is loaded, or with a
        warning the newest complete one if that is damaged; (None, None) is returned if `load_dir` holds no checkpoint.
        A missing `tag` is an error. Accumulated gradients are dropped.

        A load that is refused changes nothing. After an error while values are written (of the disk, or of
        `custom_load_fn`) the engine refuses to compute until another load succeeds.
        """
        self._hooks.check_model()
        return self._loader.load(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
        )

    @property
    def module(self) -> nn.Module:
        """The model, after waiting for copies and collectives that the last step has launched."""
        self.state.schedule.wait_for_step()
        return self.state.model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Return the unsharded state dict of the model. All ranks call this together.

        Sharded parameters are gathered unit by unit into host memory of rank 0; the other ranks get an empty dict.
        """
        return self._saver.whole_state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> bool:
        """Write the unsharded model weights in their dtype, for `from_pretrained`. All ranks call this together.

        The format is safetensors unless the file name has another suffix (`pytorch_model.bin` is pickled by torch).
        """
        self._saver.save_weights(save_dir, save_filename, exclude_frozen_parameters, max_shard_size)
        return True

    # -- memory and reports -------------------------------------------------------------------------------------

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> dict[str, int]:
        """Move optimizer states, master weights, model weights and gradients to host memory until `reload_states`.

        `include` selects kinds. Return the bytes freed on the device, by kind. States that the config offloads are not
        moved. A second call moves further kinds. While `lp_params` are on the device, the model computes and its
        weights can be gathered; all other work raises.
        """
        return self.offloaded_states.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> dict[str, int]:
        """Move all states back to the device. Return the bytes restored, by kind."""
        return self.offloaded_states.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Reshard all units that are unsharded and not in use."""
        self.state.schedule.reshard_all()

    def describe(self) -> str:
        """Return the plan in words: what is replicated, what is sharded, bytes per rank, tier and step."""
        lines = self.model_memory.describe(), self._replay.describe(), self._copies.describe()
        return "\n".join(line for line in lines if line)

    def plan_report(self) -> str:
        """Return planned and measured bytes as text: each tier and kind, buffers, the peak, traffic per step.

        Gradients are those at the end of a backward, because a step frees them; before the first step they are those
        held now.
        """
        return self._reports.plan_report()

    def note_run(self, **facts: Any) -> None:
        """Add facts to the record of the run, if there is one. `steps` is the number of steps of the run."""
        self._reports.note(**facts)

    def count_tokens(self, tokens: int, row_length: int) -> None:
        """Report the tokens of this rank's micro-step, in rows of this length. See "Tokens per second" in the docs.

        Call it before `step()`. Without it, the `input_ids` of forwards are counted.
        """
        self._reports.count_tokens(tokens, row_length)

    # -- compiling, attributes and the end ----------------------------------------------------------------------

    def compile(  # type: ignore[override]
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of each unit with `torch.compile`. Collectives remain between the compiled forwards."""
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError("engine.compile: schedule and compiled_autograd_enabled need DeepCompile. Leave them out.")
        self._compiled.compile(self.state.schedule.units, self._hooks, backend, compile_kwargs or {})
        self.is_compiled = True

    config = property(lambda self: self.state.config, doc="The config as the user gave it.")
    global_steps = _of_state("global_steps", "Optimizer steps, skipped ones included.")
    global_samples = _of_state("global_samples", "Samples of all steps on all ranks.")
    skipped_steps = _of_state("skipped_steps", "Steps that were skipped because of an overflow.")
    lr_scheduler = _of_state("lr_scheduler", "The learning-rate scheduler that `step` advances.")
    training_dataloader = _of_state("training_dataloader", "The loader whose position checkpoints hold.")
    local_rank = property(lambda self: local_rank(), doc="The rank of this process on its node.")
    global_rank = property(lambda self: dist.get_rank(), doc="The rank of this process.")
    world_size = property(lambda self: self.state.group.size, doc="The number of ranks.")
    sequence_parallel = property(lambda self: self.state.sequence, doc="Parts of batches and their mean loss.")
    expert_parallel = property(lambda self: self.state.experts, doc="The experts that this rank computes.")

    @property
    def stop_requested(self) -> signal.Signals | None:
        """The signal with which a scheduler stops the job, or None. `step` updates it, equally on all ranks.

        The config key `onefold.stop` selects signals. The program saves and exits with code 128 + signal.
        """
        return self._stop.requested

    @property
    def batch(self) -> Batch:
        """Samples per step and per micro-step, and micro-steps per step."""
        return self.state.window.batch

    def close(self) -> None:
        """Release the model: remove all hooks, free gradients and states. The model remains usable."""
        finalizer = self._finalizer.detach()
        if finalizer is None:
            return
        _, _, (parts,), _ = finalizer
        self._events.is_closed = True
        self._resume_collector()
        if self._trace is not None:
            self._trace.give_up()
        self._saver.stop()
        # A delayed step ends with a collective, which only an explicit close may launch.
        with suppress(Exception):  # reported by `parts.close`, and by the step that failed
            self.state.flush()
        schedule = self.state.schedule
        try:
            schedule.drop_gradients()
        finally:
            parts.close()
            self._shared.release()
        schedule.in_flight.pool.clear()
        self.optimizer = self.state.step = None
        schedule.forget_units()

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Engine:
        """Refuse casts and moves (`.to()`, `.half()`), because parameters are views of flat parameters."""
        for param in (param for unit in self.state.schedule.units for param in unit.params):
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            changed = fn(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise RuntimeError("the engine's model cannot be cast or moved. Set dtypes and devices in the config.")
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and name != "module":
                return getattr(modules["module"], name)
            raise
