"""Units and their runs: the flat lines that hold parameters and gradients, and the moves they can make."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from onefold.comm import Reduction
from onefold.plan import Layout, Plan, Precision
from onefold.plan.memory import RunShape, reduces_in_place
from onefold.tier.device import Pool


class Run:
    """One flat line of a unit: parameters of one dtype, all trainable or all frozen.

    [Note: where a gradient is]
    Autograd hands each gradient over as a fresh tensor; `land` moves it into the run's line and clears `p.grad`, so
    nothing a user does to `p.grad` (zero_grad, create_graph) can detach the line. The line (`grad`) is a slot of the
    pool, taken at the first gradient. Where the plan keeps whole gradients it gathers micro-steps until the boundary;
    elsewhere every micro-step ends in a reduction. The reduction leaves this rank's sum in `reduced`: in its own slice
    of the slot where the dtypes allow and the slot is not wanted back, otherwise in a shard of its own. `reduced` is a
    sum over ranks and micro-steps; the step divides it.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        *,
        trainable: bool,
        plan: Plan,
        precision: Precision,
        rank: int,
        accumulates: bool,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.parameters = list(parameters)
        self.dtype = dtype
        self.trainable = trainable
        self.device = device
        self.wire = precision.of_wire(dtype)
        self.full = torch.zeros(layout.total, dtype=dtype, device=device)
        self.grad: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.last_landing = [0] * len(self.parameters)
        self._filled = bytearray(len(self.parameters))
        self._plan = plan
        self._precision = precision
        self._rank = rank
        self._accumulates = accumulates
        self._sum_slot: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None
        self._take_parameters()
        if trainable:
            self._allocate_shard()

    # -- parameters ---------------------------------------------------------------------------------------------

    def _take_parameters(self) -> None:
        """Copy the values in and make every parameter a view of the line. The Parameter objects stay the same."""
        with torch.no_grad():
            for member, parameter in zip(self.layout.members, self.parameters, strict=True):
                view = self.full[member.start : member.stop].view(member.shape)
                if parameter.is_meta:
                    # `.data` refuses a tensor of another kind; swapping the payload keeps the object.
                    torch.utils.swap_tensors(parameter, _as_parameter(view, parameter))
                else:
                    view.copy_(parameter)
                    parameter.data = view

    @property
    def shape(self) -> RunShape:
        return RunShape(self.layout, self.dtype, self.trainable)

    # -- gradients ----------------------------------------------------------------------------------------------

    @property
    def _grad_dtype(self) -> torch.dtype:
        if not self._plan.keeps_whole_gradient:
            return self.dtype
        return self._precision.of_gradient(self.dtype, self._num_micro_steps)

    @property
    def _reduced_dtype(self) -> torch.dtype:
        return self._precision.of_reduced(self.dtype, self._num_micro_steps, self.layout.num_shards)

    @property
    def _num_micro_steps(self) -> int:
        return 2 if self._accumulates else 1

    @property
    def in_place(self) -> bool:
        """Whether the sum stays in the slot; otherwise the slot goes back as soon as it is reduced."""
        return reduces_in_place(self._plan, self.dtype, self._precision, self.layout.num_shards, self._num_micro_steps)

    def _allocate_shard(self) -> None:
        if not self.in_place:
            self._shard = torch.zeros(self.layout.shard_size, dtype=self._reduced_dtype, device=self.device)

    def accumulate(self, pool: Pool) -> None:
        """From now on several micro-steps add up: widen what was meant for one."""
        if self._accumulates:
            return
        self._accumulates = True
        if self.in_place:
            self._shard = None
        elif self._shard is None or self._shard.dtype != self._reduced_dtype:
            self._allocate_shard()
        if self.grad is not None and self.grad.dtype != self._grad_dtype:
            wide = pool.take(self.layout.total, self._grad_dtype, self.layout.shape_key).copy_(self.grad)
            pool.give_back(self.grad, self.layout.shape_key)
            self.grad = wide
        if self.reduced is not None and self.reduced.dtype != self._reduced_dtype:
            self.reduced = self.reduced.to(self._reduced_dtype)
            self._give_back_sum_slot(pool)

    def open(self, pool: Pool) -> None:
        """Have a line to land gradients in."""
        if self.reduced is not None:
            self.accumulate(pool)
        self.grad = pool.take(self.layout.total, self._grad_dtype, self.layout.shape_key)
        self._filled = bytearray(len(self.parameters))

    def land(self, index: int) -> None:
        """Move the gradient autograd has just produced into the line."""
        parameter, member = self.parameters[index], self.layout.members[index]
        gradient = parameter.grad
        assert gradient is not None
        assert self.grad is not None
        with torch.no_grad():
            gradient = gradient.detach()
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            view = self.grad[member.start : member.stop].view(member.shape)
            if self._filled[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        self._filled[index] = 1
        parameter.grad = None

    def reduction(self, prescale: float) -> Reduction:
        """What the collective has to do for this run; parameters without a gradient count as zero."""
        assert self.grad is not None
        for member, filled in zip(self.layout.members, self._filled, strict=True):
            if not filled:
                self.grad[member.start : member.stop].zero_()
        if prescale != 1.0:
            self.grad.mul_(prescale)
        add = self.reduced is not None
        if self.reduced is None and self.in_place:
            start, stop = self.layout.shard_range(self._rank)
            self.reduced, self._sum_slot = self.grad[start:stop], self.grad
        elif self.reduced is None:
            self.reduced = self._shard
        assert self.reduced is not None
        return Reduction(self.grad, self.reduced, self.wire, add)

    def close(self, pool: Pool) -> None:
        """The line has been reduced: give the slot back, unless the sum lies in it."""
        if self.grad is not None and self.grad is not self._sum_slot:
            pool.give_back(self.grad, self.layout.shape_key)
        self.grad = None

    def drop_gradients(self, pool: Pool) -> None:
        """Forget everything that has been accumulated."""
        self.close(pool)
        self._give_back_sum_slot(pool)
        self.reduced = None

    def _give_back_sum_slot(self, pool: Pool) -> None:
        if self._sum_slot is not None:
            pool.give_back(self._sum_slot, self.layout.shape_key)
            self._sum_slot = None

    def gradient_bytes(self) -> int:
        """Bytes of gradient held now."""
        held = (self._shard, self._sum_slot if self._sum_slot is not None else self.grad)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def _as_parameter(view: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(view, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter


class GradientState(Enum):
    """EMPTY -> OPEN (gradients land) -> REDUCING (on the wire) -> EMPTY, the sum left in each run's `reduced`."""

    EMPTY = "empty"
    OPEN = "open"
    REDUCING = "reducing"


class ParameterState(Enum):
    """FULL -> GATHERING (stepped, the other ranks' slices on their way) -> FULL."""

    FULL = "full"
    GATHERING = "gathering"


class Unit:
    """The parameters that are gathered, reduced and stepped together."""

    def __init__(self, name: str, module: nn.Module, runs: Sequence[Run], *, index: int, shared: bool) -> None:
        self.name = name or "(root)"
        self.module = module
        self.runs = list(runs)
        self.trained = [run for run in runs if run.trainable]
        self.index = index
        # Some gradient may arrive twice in one backward, so only the end of backward closes this unit.
        self.shared = shared
        self.gradient = GradientState.EMPTY
        self.parameter = ParameterState.FULL
        self.num_elements = sum(run.layout.total for run in self.trained)
        self.num_parameters = sum(len(run.parameters) for run in self.trained)

    def open(self, pool: Pool) -> None:
        if self.gradient is GradientState.EMPTY:
            for run in self.trained:
                run.open(pool)
            self.gradient = GradientState.OPEN
        assert self.gradient is GradientState.OPEN, (self.name, self.gradient)

    def start_reducing(self, prescale: float) -> list[Reduction]:
        assert self.gradient is GradientState.OPEN, (self.name, self.gradient)
        self.gradient = GradientState.REDUCING
        return [run.reduction(prescale) for run in self.trained]

    def finish_reducing(self, pool: Pool) -> None:
        assert self.gradient is GradientState.REDUCING, (self.name, self.gradient)
        for run in self.trained:
            run.close(pool)
        self.gradient = GradientState.EMPTY

    def drop_gradients(self, pool: Pool) -> None:
        assert self.gradient is not GradientState.REDUCING, self.name
        for run in self.trained:
            run.drop_gradients(pool)
        self.gradient = GradientState.EMPTY
