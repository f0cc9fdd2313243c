"""Units and their runs: the flat lines that hold parameters and gradients, and the moves they can make."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from onefold.comm import Gathering, Reduction
from onefold.plan import Layout, Plan, Precision
from onefold.plan.memory import RunShape, master_dtype, reduces_in_place, rests_whole
from onefold.tier.device import Pool


class Run:
    """One flat line of a unit: parameters of one dtype, all trainable or all frozen, all persistent or none.

    [Note: where a parameter is]
    `full` is one tensor for life, and so is each Parameter. A run that rests whole keeps `full` filled. Any other run
    keeps `shard`, this rank's slice (the fp32 master where it is trained); its `full` has an empty storage at rest,
    and its parameters are placeholders without elements: autograd may hold views of `full`, so the same storage is
    refilled on every gather, and nothing else ever takes its place.

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
        persistent: bool,
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
        self.persistent = persistent
        self.rests_whole = rests_whole(
            plan, dtype, trainable=trainable, persistent=persistent, world_size=layout.num_shards
        )
        self.shard: torch.Tensor | None = None
        self.device = device
        self.wire = precision.of_wire(dtype)
        self.full = torch.zeros(layout.total, dtype=dtype, device=device)
        self.grad: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.last_landing = [0] * len(self.parameters)
        self._filled = bytearray(len(self.parameters))
        self.plan = plan
        self._precision = precision
        self._rank = rank
        self._accumulates = accumulates
        self._sum_slot: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None
        self.take_parameters()
        if trainable:
            self._allocate_shard()

    # -- parameters ---------------------------------------------------------------------------------------------

    def take_parameters(self) -> None:
        """Copy the values in and make every parameter a view of the line. The Parameter objects stay the same."""
        with torch.no_grad():
            for view, parameter in zip(self._views(), self.parameters, strict=True):
                if parameter.is_meta:
                    # `.data` refuses a tensor of another kind; swapping the payload keeps the object. The payload is no
                    # view of the line: it would share its version with it, and every gather writes to the line.
                    torch.utils.swap_tensors(parameter, _as_parameter(view.new_empty(0), parameter))
                    parameter.data = view
                elif parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)
                    parameter.data = view

    def is_home(self, index: int) -> bool:
        """Whether a parameter of a whole line is still the view of it that `show` made."""
        member, parameter = self.layout.members[index], self.parameters[index]
        lies = parameter.data_ptr() == self.full[member.start : member.stop].data_ptr() or not parameter.numel()
        return lies and tuple(parameter.shape) == member.shape

    def strangers(self) -> list[str]:
        """Parameters that were given another shape."""
        pairs = zip(self.layout.members, self.parameters, strict=True)
        return [member.name for member, parameter in pairs if tuple(parameter.shape) != member.shape]

    def let_leave(self, name: str) -> nn.Parameter:
        """A parameter goes its own way; its place in the line stays, for nobody."""
        index = next(index for index, member in enumerate(self.layout.members) if member.name == name)
        leaving = self.parameters[index]
        self.parameters[index] = nn.Parameter(self._views()[index], requires_grad=False)
        return leaving

    def _views(self) -> list[torch.Tensor]:
        return [self.full[member.start : member.stop].view(member.shape) for member in self.layout.members]

    @property
    def own_range(self) -> tuple[int, int]:
        """Where this rank's slice of the line begins and ends."""
        return self.layout.shard_range(self._rank)

    @property
    def own_slice(self) -> torch.Tensor:
        """This rank's slice of the line; the line must be whole."""
        start, stop = self.own_range
        return self.full[start:stop]

    def store(self) -> None:
        """Keep this rank's slice of the line as what rests."""
        if not self.rests_whole:
            dtype = master_dtype(self.dtype) if self.trainable else self.dtype
            if self.shard is None:
                self.shard = torch.empty(self.layout.shard_size, dtype=dtype, device=self.device)
            self.shard.copy_(self.own_slice)

    def refill(self) -> Gathering:
        """Memory for the whole line, and what the collective has to fill it with."""
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.itemsize)
        return Gathering(self.full, self.shard)

    def show(self) -> None:
        """The line is whole: parameters are views of it."""
        for view, parameter in zip(self._views(), self.parameters, strict=True):
            parameter.data = view

    def hide(self) -> None:
        """Back to rest: placeholders instead of parameters, no memory behind the line."""
        placeholder = torch.empty(0, dtype=self.dtype, device=self.device)
        here = self.full.untyped_storage().data_ptr()
        for parameter in self.parameters:
            # One that has moved to another run since is not ours to empty.
            if parameter.untyped_storage().data_ptr() == here:
                parameter.data = placeholder
        self.full.untyped_storage().resize_(0)

    def cast(self, dtype: torch.dtype) -> None:
        """From now on the line computes in another dtype. Only while nobody trains it."""
        resting = self.full.untyped_storage().size() == 0
        self.dtype = dtype
        if resting:
            assert self.shard is not None
            self.shard = self.shard.to(dtype)
            self.full = torch.empty(self.layout.total, dtype=dtype, device=self.device)
            for parameter in self.parameters:
                parameter.data = self.full[:0]
            self.hide()
        else:
            self.full = self.full.to(dtype)
            self.show()

    def parameter_bytes(self) -> int:
        """Bytes of parameters held now; a trained run's shard is its master, and counted there."""
        shard = self.shard.nbytes if self.shard is not None and not self.trainable else 0
        return int(self.full.untyped_storage().size()) + shard

    @property
    def shape(self) -> RunShape:
        return RunShape(self.layout, self.dtype, self.trainable, self.persistent)

    # -- gradients ----------------------------------------------------------------------------------------------

    @property
    def _grad_dtype(self) -> torch.dtype:
        if not self.plan.keeps_whole_gradient:
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
        return reduces_in_place(self.plan, self.dtype, self._precision, self.layout.num_shards, self._num_micro_steps)

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

    def forget_gradients(self) -> None:
        """No more training: hold nothing but parameters."""
        self.grad = self.reduced = self._sum_slot = self._shard = None

    def _give_back_sum_slot(self, pool: Pool) -> None:
        if self._sum_slot is not None:
            pool.give_back(self._sum_slot, self.layout.shape_key)
            self._sum_slot = None

    def gradient_bytes(self) -> int:
        """Bytes of gradient held now."""
        held = (self._shard, self._sum_slot if self._sum_slot is not None else self.grad)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def _as_parameter(payload: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(payload, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter


class GradientState(Enum):
    """EMPTY -> OPEN (gradients land) -> REDUCING (on the wire) -> EMPTY, the sum left in each run's `reduced`."""

    EMPTY = "empty"
    OPEN = "open"
    REDUCING = "reducing"


class ParameterState(Enum):
    """RESTING -> GATHERING -> FULL -> RESTING. A unit whose runs all rest whole is always FULL."""

    RESTING = "resting"
    GATHERING = "gathering"
    FULL = "full"


class Unit:
    """The parameters that are gathered, released, reduced and stepped together."""

    def __init__(self, name: str, module: nn.Module, runs: Sequence[Run], *, index: int, shared: bool) -> None:
        self.name = name or "(root)"
        self.module = module
        self.runs = list(runs)
        self.trained = [run for run in runs if run.trainable]
        self.sharded = [run for run in runs if not run.rests_whole]
        self.index = index
        # Its module contains modules of other units.
        self.encloses = False
        # Some gradient may arrive twice in one backward, so only the end of backward closes this unit.
        self.shared = shared
        self.gradient = GradientState.EMPTY
        self.parameter = ParameterState.FULL
        # Stepped, and the other ranks' slices of what rests whole are on their way.
        self.refreshing = False
        # Gathers on their way. A unit that is whole may be gathered again, since another rank needs this one's part.
        self.flying = 0
        self.uses = Uses()
        self.num_elements = sum(run.layout.total for run in self.trained)
        self.num_gathered = sum(run.layout.total for run in self.sharded)
        self.num_parameters = sum(len(run.parameters) for run in self.trained)

    # -- parameters ---------------------------------------------------------------------------------------------

    def start_gather(self) -> list[Gathering]:
        self.flying += 1
        if self.parameter is ParameterState.RESTING:
            self.parameter = ParameterState.GATHERING
        return [run.refill() for run in self.sharded]

    def finish_gather(self) -> None:
        self.flying -= 1
        # A unit that was whole when another rank asked for it stays as it is.
        if self.parameter is ParameterState.GATHERING:
            for run in self.sharded:
                run.show()
            self.parameter = ParameterState.FULL

    def release(self) -> None:
        assert self.parameter is ParameterState.FULL, (self.name, self.parameter)
        assert not self.flying, self.name
        if self.sharded:
            for run in self.sharded:
                run.hide()
            self.parameter = ParameterState.RESTING

    def store(self) -> None:
        """The whole values were written from outside: shards take them over."""
        assert self.parameter is ParameterState.FULL, (self.name, self.parameter)
        for run in self.sharded:
            run.store()

    # -- gradients ----------------------------------------------------------------------------------------------

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


class Uses:
    """Who needs a unit whole right now, on this rank.

    `forwards`: calls of its module under way. `backwards`: calls whose backward has begun and not ended; `calls` and
    `ended` count those of the pass that will have a backward, and those whose backward is over.
    `held`: somebody outside reads it; it stays until the pass ends. `lent`: open `GatheredParameters`.
    """

    def __init__(self) -> None:
        self.forwards = 0
        # The forwards under way: the number of the call, 0 without a backward, and the producers of its inputs.
        self.stack: list[tuple[int, list[object]]] = []
        self.backwards: set[int] = set()
        self.calls = 0
        self.ended = 0
        self.held = False
        self.lent = 0
        # The event of the program that this use belongs to, where one is followed.
        self.event: int | None = None

    @property
    def any(self) -> bool:
        return bool(self.forwards or self.backwards or self.held or self.lent)

    def forget_pass(self) -> None:
        self.backwards.clear()
        self.ended = 0
        self.held = False
        self.event = None
