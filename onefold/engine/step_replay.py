"""Re-execution of a suspicious step: its forwards and backwards run again, and their bits are compared.

[Note: how a step is re-executed]
The engine calls the model, but not the program, which computes the loss. It therefore records, for each forward, the
inputs, the random states before it, and the gradients that the backward sends to the outputs; and all buffers before
the first forward of the step. A re-execution restores buffers and random states, calls the model with the same inputs,
and starts a backward at its outputs with the recorded gradients. The loss scale, the division by the accumulation
count and the loss function of the program are contained in these.

If a forward has other outputs than before, the recorded gradients may be wrong. They are right if the model returns its
loss, a number whose gradient does not depend on its value. Otherwise the step is refused.

The first step is always re-executed once. If its bits cannot be reproduced, later steps are not re-executed: kernels
that are not deterministic, and state outside of buffers, would look like bit flips.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.state.random_states import capture_random_states, restore_random_states
from onefold.engine.train_state import TrainState
from onefold.log import format_bytes, logger
from onefold.recovery.executions import (
    BitFlipError,
    Difference,
    Execution,
    Finding,
    Kind,
    decide,
    describe_differences,
    first_difference,
)
from onefold.runtime import FlatParam, Unit
from onefold.runtime.torch_internals import tensors_in

_ADVICE = "Test the device of that rank."


@dataclass
class _Forward:
    """One call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    """The version counters of the input tensors."""
    random_states: dict[str, Any]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """The gradients of the outputs, by the position of the output."""
    outputs: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """The outputs of the last re-execution, by position. None for those of more than one number."""

    @property
    def inputs(self) -> Iterator[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))


@dataclass
class _MicroStep:
    """The forwards that one backward went through."""

    forwards: list[_Forward]
    is_last: bool
    """Whether gradients were reduced because a step follows."""


class StepReplay:
    """Records the micro-steps of one engine's step, and re-executes them."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._enabled = state.plan.guards.reexecutes and state.step is not None and not state.group.is_fake
        self._micro_steps: list[_MicroStep] = []
        self._forwards: list[_Forward] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._execution = Execution()
        self._has_warned = self._is_reproducible = False
        self._kept_bytes = 0
        # The positions of outputs from which no other output is computed, by the kinds of all outputs.
        self._roots: dict[tuple[Any, ...], frozenset[int]] = {}
        if self._enabled:
            state.schedule.context.on_gradient = self._record_gradient
            state.decision.suspects = state.decision.examines = True

    # -- recording ------------------------------------------------------------------------------------------------

    def call_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, and record the call if it may have a backward."""
        if not self._enabled or not torch.is_grad_enabled():
            with self._autocast():
                return self._state.model(*args, **kwargs)
        if not self._state.decision.losses and (self._micro_steps or not self._forwards):
            self.clear()
            self._keep_buffers()
        versions = [_version(tensor) for tensor in tensors_in((args, kwargs))]
        states = capture_random_states(self._state.device)
        forward = _Forward(args, kwargs, versions, states)
        with self._autocast():
            output = self._state.model(*args, **kwargs)
        for position, tensor in self._record_outputs(output):
            tensor.register_hook(partial(forward.gradients.__setitem__, position))
        self._forwards.append(forward)
        return output

    def end_micro_step(self, *, is_last: bool) -> None:
        """Record that a backward has used the forwards since the one before."""
        if self._enabled:
            self._micro_steps.append(_MicroStep(self._forwards, is_last))
            self._forwards = []

    def clear(self) -> None:
        """Forget the micro-steps of a step."""
        self._measure()
        self._micro_steps, self._forwards, self._buffers = [], [], []
        self._execution = Execution()

    def describe(self) -> str:
        """Return a line about the memory of what is kept, or an empty string."""
        if not self._enabled:
            return ""
        self._measure()
        kept = format_bytes(self._kept_bytes) if self._kept_bytes else "not known before the first step"
        return f"re-execution      inputs, buffers and gradients of outputs of each step: {kept}"

    def _measure(self) -> None:
        tensors = {id(copy): copy for *_, copy in self._buffers}
        for micro_step in self._micro_steps:
            for forward in micro_step.forwards:
                tensors |= {id(each): each for each in (*forward.inputs, *forward.gradients.values())}
        self._kept_bytes = max(self._kept_bytes, sum(each.nbytes for each in tensors.values()))

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._state.plan.precision.autocast
        return torch.autocast(self._state.device.type, dtype=dtype) if dtype else nullcontext()

    def _keep_buffers(self) -> None:
        for module in self._state.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta and not buffer.is_inference():
                    self._buffers.append((module, name, buffer, buffer.detach().clone()))

    def _record_outputs(self, output: Any) -> list[tuple[int, torch.Tensor]]:
        """Add the sums of the outputs at which a backward may begin. Return them with their positions."""
        found = [(index, tensor) for index, tensor in enumerate(tensors_in(output)) if tensor.requires_grad]
        kinds = tuple((index, type(tensor.grad_fn)) for index, tensor in found)
        if kinds not in self._roots:
            self._roots[kinds] = _roots_of(found)
        found = [(index, tensor) for index, tensor in found if index in self._roots[kinds]]
        number = len(self._micro_steps) + 1
        for index, tensor in found:
            self._execution.add(Kind.OUTPUT, f"output {index} of the forward, in micro-step {number}", tensor)
        return found

    def _record_gradient(self, unit: Unit, param: FlatParam, gradient: torch.Tensor) -> None:
        """Add the sums of a gradient whose reduction is launched, by parameter group."""
        number = len(self._micro_steps) + 1
        for segment in param.layout.group_ranges:
            gaps = _inside(param.layout.gaps, segment.start, segment.stop)
            place = f"the gradient of unit {unit.name} (parameter group {segment.group}), in micro-step {number}"
            self._execution.add(Kind.GRADIENT, place, gradient[segment.start : segment.stop], gaps)

    # -- re-execution ---------------------------------------------------------------------------------------------

    def examine(self, problem: str) -> None:
        """Re-execute the step that is about to be taken, and leave the gradients that are right.

        `problem` is why it is suspicious, or empty for the first step. All ranks call this together. Raise
        `BitFlipError` if no right gradients are known.
        """
        state, decision = self._state, self._state.decision
        decision.examines = False
        if not self._can_reexecute():
            return
        losses, now = list(decision.losses), capture_random_states(state.device)
        micro_steps = self._micro_steps
        first, second = self._finished(), self._execute(micro_steps)
        differences, finding = self._compare(first, second), Finding.SAME
        if any(each.is_any for each in differences):
            third = self._execute(micro_steps)
            same = [not any(each.is_any for each in self._compare(one, third)) for one in (first, second)]
            finding = decide(False, *same)
        restore_random_states(now, state.device)
        where = describe_differences(differences, second.places) if finding is not Finding.SAME else ""
        self._conclude(finding, problem, where, differences)
        is_wrong = finding is Finding.FIRST_DIFFERS and differences[state.group.rank].outputs_differ
        for loss, micro_step in zip(losses, micro_steps, strict=True):
            decision.add_loss(self._loss_of(micro_step, loss) if is_wrong else loss)

    def _can_reexecute(self) -> bool:
        """Return whether all ranks can re-execute the step. Warn once if one cannot."""
        reason = self._obstacle()
        rows = self._state.schedule.agreement.synchronize("the re-execution of a step", [bool(reason)])
        if reason and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "onefold.reexecute_steps: rank %d cannot re-execute steps: %s", self._state.group.rank, reason
            )
        return not any(row[0] for row in rows)

    def _obstacle(self) -> str:
        """Return why this rank cannot re-execute the step, or an empty string."""
        forwards = [forward for micro_step in self._micro_steps for forward in micro_step.forwards]
        if not self._micro_steps or len(self._micro_steps) != len(self._state.decision.losses):
            return "backward was called on the loss directly. Call engine.backward(loss)"
        if not all(micro_step.forwards for micro_step in self._micro_steps):
            return "a backward used no forward of the engine. Call engine(...) before each backward"
        if any(tensor.requires_grad for forward in forwards for tensor in forward.inputs):
            return "an input of the model requires a gradient"
        if any([_version(tensor) for tensor in forward.inputs] != forward.versions for forward in forwards):
            return "the program has changed the inputs of a forward in place. Change a copy"
        return ""

    def _finished(self) -> Execution:
        """Return the present execution, with the sums of the reduced gradients."""
        execution, self._execution = self._execution, Execution()
        for unit in self._state.schedule.trained_units:
            for param in unit.trained_params:
                shard = param.grad.shard
                if shard.value is not None:
                    shard.wait()
                    start, stop = param.own_range
                    gaps = _inside(param.layout.gaps, start, stop)
                    execution.add(Kind.REDUCED, f"the gradient of unit {unit.name}", shard.value, gaps)
        return execution

    def _execute(self, micro_steps: list[_MicroStep]) -> Execution:
        """Run the micro-steps again, and leave their gradients for the step."""
        state, schedule = self._state, self._state.schedule
        state.drop_gradients()
        self._micro_steps, self._execution = [], Execution()
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                buffer.copy_(copy)
                module._buffers[name] = buffer
        for micro_step in micro_steps:
            outputs: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            for forward in micro_step.forwards:
                restore_random_states(forward.random_states, state.device)
                with torch.enable_grad(), self._autocast():
                    output = state.model(*forward.args, **forward.kwargs)
                for position, tensor in self._record_outputs(output):
                    if position in forward.gradients:
                        outputs.append(tensor)
                        gradients.append(forward.gradients[position])
                        forward.outputs[position] = tensor.detach() if tensor.numel() == 1 else None
            schedule.begin_backward(boundary=micro_step.is_last)
            torch.autograd.backward(outputs, gradients)
            schedule.end_backward()
            self._micro_steps.append(micro_step)
        if not state.window.managed and state.plan.keeps_unsharded_gradient:
            schedule.begin_backward(boundary=True)
            schedule.end_backward()
        schedule.reduce_late()
        state.window.divide_by(1)
        return self._finished()

    def _compare(self, one: Execution, other: Execution) -> list[Difference]:
        """Return the first difference on each rank. All ranks call this together."""
        mine = first_difference(one, other, self._state.group.rank)
        row = [mine.index, mine.kind.value, mine.outputs_differ]
        rows = self._state.schedule.agreement.synchronize("the comparison of two executions", row)
        return [Difference(rank, index, Kind(kind), bool(wrong)) for rank, (index, kind, wrong, *_) in enumerate(rows)]

    def _conclude(self, finding: Finding, problem: str, where: str, differences: Sequence[Difference]) -> None:
        """Log what was found, or raise if the step cannot continue. All ranks conclude the same."""
        decision = self._state.decision
        if finding is Finding.SAME:
            self._is_reproducible = True
            if problem:
                self._log(
                    "%s. The step was re-executed with the same bits on all ranks, so this is no bit flip: the cause "
                    "is the data, the program or the model", problem,
                )  # fmt: skip
        elif finding is Finding.SECOND_DIFFERS:
            self._is_reproducible = True
            self._log("a bit has flipped in a re-execution: %s. The step itself was right. %s", where, _ADVICE)
        elif not self._is_reproducible:
            decision.suspects = False
            self._log(
                "onefold.reexecute_steps: steps are not re-executed, because the first one has other bits each time: "
                "%s. Use deterministic kernels (torch.use_deterministic_algorithms), and keep what a forward changes "
                "in buffers", where,
            )  # fmt: skip
        else:
            found = f"a bit has flipped: {where}{f' ({problem})' if problem else ''}"
            if finding is Finding.ALL_DIFFER:
                raise BitFlipError(f"{found}. Three executions of the step all differ", _ADVICE, rolls_back=True)
            if self._is_loss_outside(differences):
                reason = "The loss is computed outside of the model, from outputs that differ"
                raise BitFlipError(f"{found}. {reason}", _ADVICE, rolls_back=True)
            self._log("%s. Two re-executions agree, so the step continues with their gradients. %s", found, _ADVICE)

    def _is_loss_outside(self, differences: Sequence[Difference]) -> bool:
        """Return whether a rank with other outputs has computed its loss from more than single numbers."""
        forwards = [forward for micro_step in self._micro_steps for forward in micro_step.forwards]
        is_wrong = differences[self._state.group.rank].outputs_differ
        mine = is_wrong and any(each.numel() > 1 for forward in forwards for each in forward.gradients.values())
        rows = self._state.schedule.agreement.synchronize("the outputs of a re-execution", [mine])
        return any(row[0] for row in rows)

    def _loss_of(self, micro_step: _MicroStep, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a re-executed micro-step, from the outputs that it is a sum of multiples of."""
        total = torch.zeros_like(loss)
        for forward in micro_step.forwards:
            for position, gradient in forward.gradients.items():
                output = forward.outputs[position]
                if output is not None:
                    total += (gradient.reshape(()) * output.reshape(())).to(
                        total
                    ) / self._state.decision.loss_scale.value
        return total

    def _log(self, text: str, *values: object) -> None:
        if self._state.group.rank == 0:
            logger.warning(text, *values)


def _inside(gaps: Iterable[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of ranges that are inside another range, relative to its start."""
    return [(max(low, start) - start, min(high, stop) - start) for low, high in gaps if low < stop and high > start]


def _roots_of(outputs: Sequence[tuple[int, torch.Tensor]]) -> frozenset[int]:
    """Return the positions of outputs from which no other output is computed, as a loss is from logits.

    The gradients of the others are computed in the backward from these.
    """
    nodes = {tensor.grad_fn: index for index, tensor in outputs if tensor.grad_fn is not None}
    below: set[int] = set()
    seen: set[Any] = set()
    waiting = [before for node in nodes for before, _ in node.next_functions]
    while waiting if len(nodes) > 1 else []:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in nodes:
            below.add(nodes[node])
        waiting += [before for before, _ in node.next_functions]
    return frozenset(index for index, _ in outputs) - below


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
