"""Runs: the flat lines that hold the parameters and gradients of a unit, and the moves they can make."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import nn

from onefold.comm import Gathering, Reduction, Source
from onefold.plan import Plan, Precision, RunShape, Tier, Wire
from onefold.plan.memory import master_dtype, reduces_in_place, rests_whole
from onefold.tier.bus import HERE, Arrival
from onefold.tier.device import Pool
from onefold.tier.lower import Flat, LowerTiers, write
from onefold.tier.nvme import DiskTensor
from onefold.tier.sources import FreshSource


class Run:
    """One flat line of a unit: parameters of one dtype, all trainable or all frozen, all persistent or none.

    [Note: where a parameter is]
    `full` is one tensor for life, and so is each Parameter. A run that rests whole keeps `full` filled. Any other run
    keeps `shard`, this rank's slice (the fp32 master where it is trained); its `full` has an empty storage at rest,
    and its parameters are placeholders without elements: autograd may hold views of `full`, so the same storage is
    refilled on every gather, and nothing else ever takes its place. `shard` rests where `rest.parameters` says.

    [Note: where a gradient is]
    Autograd hands each gradient over as a fresh tensor; `land` moves it into the run's line and clears `p.grad`, so
    nothing a user does to `p.grad` (zero_grad, create_graph) can detach the line. The line (`grad`) is a slot of the
    pool, taken at the first gradient. Where the plan keeps whole gradients it gathers micro-steps until the boundary;
    elsewhere every micro-step ends in a reduction. The reduction leaves this rank's sum in `reduced`: in its own slice
    of the slot where the dtypes allow and the slot is not wanted back, otherwise in a shard of its own. `reduced` is a
    sum over ranks and micro-steps; the step divides it. Where the host steps, `reduced` is on the host, and what each
    micro-step reduces on the device is only passing through (`Descent`).
    """

    def __init__(
        self,
        shape: RunShape,
        parameters: Sequence[nn.Parameter],
        *,
        plan: Plan,
        precision: Precision,
        rank: int,
        accumulates: bool,
        device: torch.device,
        lower: LowerTiers | None = None,
    ) -> None:
        self.layout = shape.layout
        self.parameters = list(parameters)
        self.dtype = shape.dtype
        self.trainable = shape.trainable
        self.persistent = shape.persistent
        self.rest = shape.rest
        self.rests_whole = rests_whole(plan, shape, shape.layout.num_shards)
        self.shard: Flat | None = None
        self.device = device
        self.lower = lower
        self.wire = precision.of_wire(self.dtype)
        self.full = torch.zeros(self.layout.total, dtype=self.dtype, device=device)
        self.grad: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        # Where the host steps: the gradient on its way down, the square sum of one that needs no adding there, and the
        # step that is still to come back from the host.
        self.descending: Arrival | Future[None] = HERE
        self.square: torch.Tensor | None = None
        self.passing: torch.Tensor | None = None
        self.update: Future[Arrival] | None = None
        # The host's master, where it has been stepped since it was last cast to the shard beside it.
        self.fresh: torch.Tensor | None = None
        self._saving: Arrival = HERE
        self.last_landing = [0] * len(self.parameters)
        self._filled = bytearray(len(self.parameters))
        self.plan = plan
        self._precision = precision
        self._rank = rank
        self._accumulates = accumulates
        # A slice of the line among neighbouring ranks, as it was when it was last gathered from all.
        self.second: torch.Tensor | None = None
        self._second_is_current = False
        self._sum_slot: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None
        self._other_shard: torch.Tensor | None = None
        self.take_parameters()
        if self.trainable:
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
            if self.shard is None:
                self.shard = self._new_shard()
            self.forget_fetched()
            self.change()
            write(self.shard, self.own_slice)
            self.fresh = None

    def forget_fetched(self) -> None:
        """The shard is about to be written: nobody reads or writes it any more, and what was read ahead is old."""
        self._saving.wait()
        if self.lower is not None and isinstance(self.shard, DiskTensor):
            self.lower.source(self.shard).drop()

    def _new_shard(self) -> Flat:
        size, tier = self.layout.shard_size, self.rest.parameters
        if tier is Tier.DEVICE:
            dtype = master_dtype(self.dtype) if self.shape.master_is_shard else self.dtype
            return torch.empty(size, dtype=dtype, device=self.device)
        assert self.lower is not None
        if tier is Tier.HOST:
            return self.lower.host(size, self.dtype)
        return self.lower.disk_for_parameters(size, self.dtype)

    def refill(self) -> Gathering:
        """Memory for the whole line, and what the collective has to fill it with."""
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.itemsize)
        if self._second_is_current:
            return Gathering(self.full, self.second, span=self.plan.node_shard_size)
        lossy = self.plan.wire_of(trainable=self.trainable) is not Wire.NATIVE
        return Gathering(self.full, self._source, lossy=lossy)

    def keep_second(self) -> None:
        """The line has been gathered from all ranks: until it changes, neighbours have it between them."""
        span = self.plan.node_shard_size
        if span > 1 and not self._second_is_current:
            length = self.layout.total // span
            if self.second is None:
                self.second = torch.empty(length, dtype=self.dtype, device=self.device)
            self.second.copy_(self.full.narrow(0, self._rank % span * length, length))
            self._second_is_current = True

    def change(self) -> None:
        """The parameters are about to have other values."""
        self._second_is_current = False

    @property
    def _source(self) -> torch.Tensor | Source | None:
        if self.lower is None or self.shard is None or self.rest.parameters is Tier.DEVICE:
            assert not isinstance(self.shard, DiskTensor)
            return self.shard
        if self.fresh is not None:
            return FreshSource(self.fresh, self._take_down, self.lower.bus)
        return self.lower.source(self.shard)

    def _take_down(self, values: torch.Tensor) -> None:
        """The device has cast the master: the host's shard takes its word."""
        assert self.lower is not None
        assert isinstance(self.shard, torch.Tensor)
        self._saving, self.fresh = self.lower.bus.down(values, self.shard), None

    def freshen(self) -> None:
        """The shard is what the master says, whether or not anybody has gathered it."""
        self._saving.wait()
        if self.fresh is not None:
            assert self.shard is not None
            write(self.shard, self.fresh)
            self.fresh = None

    def fetch(self) -> bool:
        """A gather comes soon: what is on disk is read ahead. False where there is no room for it, or it is not there
        yet.
        """
        if self.lower is None or not isinstance(self.shard, DiskTensor):
            return True
        return (self.update is None or self.update.done()) and self.lower.source(self.shard).fetch()

    def finish_update(self) -> None:
        """The host has stepped this run, and what it sends up has arrived, as the caller's stream sees it."""
        if self.update is not None:
            arrival = self.update.result()
            self.update = None
            arrival.order()

    def show(self) -> None:
        """The line is whole: parameters are views of it."""
        for view, parameter in zip(self._views(), self.parameters, strict=True):
            parameter.data = view

    def hide(self) -> None:
        """Back to rest: placeholders instead of parameters, no memory behind the line."""
        self._saving.order()
        placeholder = torch.empty(0, dtype=self.dtype, device=self.device)
        here = self.full.untyped_storage().data_ptr()
        for parameter in self.parameters:
            # One that has moved to another run since is not ours to empty.
            if parameter.untyped_storage().data_ptr() == here:
                parameter.data = placeholder
        self.full.untyped_storage().resize_(0)

    def put_away(self) -> None:
        """A line that rests whole leaves the device for a while: nobody may read through its parameters."""
        for parameter in self.parameters:
            parameter.data = self.full.new_empty(0)

    def cast(self, dtype: torch.dtype) -> None:
        """From now on the line computes in another dtype. Only while nobody trains it."""
        resting = self.full.untyped_storage().size() == 0
        self.dtype = dtype
        if resting:
            assert isinstance(self.shard, torch.Tensor)
            self.shard = self.shard.to(dtype)
            self.full = torch.empty(self.layout.total, dtype=dtype, device=self.device)
            for parameter in self.parameters:
                parameter.data = self.full[:0]
            self.hide()
        else:
            self.full = self.full.to(dtype)
            self.show()

    def parameter_bytes(self, tier: Tier) -> int:
        """Bytes of parameters held now; a shard that is the master is counted there."""
        line = int(self.full.untyped_storage().size()) if tier is Tier.DEVICE else 0
        line += self.second.nbytes if tier is Tier.DEVICE and self.second is not None else 0
        own = self.shard is not None and self.rest.parameters is tier and not self.shape.master_is_shard
        return line + (self.shard.nbytes if own and self.shard is not None else 0)

    @property
    def shape(self) -> RunShape:
        return RunShape(self.layout, self.dtype, self.trainable, self.persistent, self.rest)

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
        return reduces_in_place(self.plan, self.shape, self._precision, self.layout.num_shards, self._num_micro_steps)

    def _allocate_shard(self) -> None:
        if self.rest.offloads_states:
            assert self.lower is not None
            self._shard = self.lower.host(self.layout.shard_size, self._reduced_dtype)
            if self.plan.delays_host:
                self._other_shard = self.lower.host(self.layout.shard_size, self._reduced_dtype)
        elif not self.in_place:
            self._shard = torch.zeros(self.layout.shard_size, dtype=self._reduced_dtype, device=self.device)

    def accumulate(self, pool: Pool) -> None:
        """From now on several micro-steps add up: widen what was meant for one."""
        if self._accumulates:
            return
        self._accumulates = True
        if self.rest.offloads_states:
            self._widen_on_host()
        elif self.in_place:
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

    def _widen_on_host(self) -> None:
        assert self.lower is not None
        assert self._shard is not None
        if self._shard.dtype != self._reduced_dtype:
            self.wait_for_reduced()
            self._shard = self.lower.more_host(self.layout.shard_size, self._reduced_dtype).copy_(self._shard)
            if self._other_shard is not None:
                self._other_shard = self.lower.more_host(self.layout.shard_size, self._reduced_dtype)
            self.reduced = self._shard if self.reduced is not None else None

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

    def reduction(self, prescale: float, pool: Pool) -> Reduction:
        """What the collective has to do for this run; parameters without a gradient count as zero."""
        assert self.grad is not None
        for member, filled in zip(self.layout.members, self._filled, strict=True):
            if not filled:
                self.grad[member.start : member.stop].zero_()
        if prescale != 1.0:
            self.grad.mul_(prescale)
        if self.rest.offloads_states:
            self.passing = self._passing(pool)
            return Reduction(self.grad, self.passing, self.wire, add=False, key=self)
        add = self.reduced is not None
        if self.reduced is None and self.in_place:
            start, stop = self.layout.shard_range(self._rank)
            self.reduced, self._sum_slot = self.grad[start:stop], self.grad
        elif self.reduced is None:
            self.reduced = self._shard
        assert self.reduced is not None
        return Reduction(self.grad, self.reduced, self.wire, add, key=self)

    def _passing(self, pool: Pool) -> torch.Tensor:
        """Where one micro-step's sum lies on the device until it is on the host."""
        assert self.grad is not None
        if self.layout.num_shards == 1:
            return self.grad
        return pool.take(self.layout.shard_size, self._reduced_dtype)

    @property
    def passing_bytes(self) -> int:
        """Of one micro-step's sum."""
        dtype = self.dtype if self.layout.num_shards == 1 else self._reduced_dtype
        return self.layout.shard_size * dtype.itemsize

    def land_on_host(self) -> tuple[torch.Tensor, bool]:
        """Where a micro-step's sum goes on the host, and whether it is added to what is there."""
        if self.update is not None:
            self.update.result()  # the step still reads the last one
        assert self._shard is not None
        add = self.reduced is not None
        if not add:
            self.wait_for_reduced()  # one that was dropped may still be on its way there
        self.reduced = self._shard
        return self._shard, add

    def swap_shards(self) -> None:
        """The host keeps this gradient for longer: the next one goes elsewhere."""
        self._shard, self._other_shard = self._other_shard, self._shard

    def wait_for_reduced(self) -> None:
        """Until the reduced gradient is whole on the host."""
        if isinstance(self.descending, Future):
            self.descending.result()
        else:
            self.descending.wait()

    def close(self, pool: Pool) -> None:
        """The line has been reduced: give the slot back, unless the sum lies in it."""
        if self.grad is not None and self.grad is not self._sum_slot:
            pool.give_back(self.grad, self.layout.shape_key)
        self.grad = None

    def drop_gradients(self, pool: Pool) -> None:
        """Forget everything that has been accumulated."""
        self.close(pool)
        self._give_back_sum_slot(pool)
        self.reduced = self.square = None

    def forget_gradients(self) -> None:
        """No more training: hold nothing but parameters, and none on a disk that is about to be cleaned."""
        self.freshen()
        if isinstance(self.shard, DiskTensor):
            self.shard = self.shard.load()
            self.rest = replace(self.rest, parameters=Tier.HOST)
        elif self.shard is not None and self.rest.parameters is Tier.HOST:
            self.shard = self.shard.clone()  # it would hold the memory of all that rested beside it
        self.grad = self.reduced = self._sum_slot = self._shard = self._other_shard = None

    def _give_back_sum_slot(self, pool: Pool) -> None:
        if self._sum_slot is not None:
            pool.give_back(self._sum_slot, self.layout.shape_key)
            self._sum_slot = None

    def gradient_tensors(self) -> list[torch.Tensor]:
        """What holds gradients on the device now."""
        shard = None if self.rest.offloads_states else self._shard
        held = (shard, self._sum_slot if self._sum_slot is not None else self.grad)
        return [tensor for tensor in held if tensor is not None]

    def gradient_bytes(self, tier: Tier) -> int:
        """Bytes of gradient held now."""
        if tier is Tier.DEVICE:
            return sum(tensor.nbytes for tensor in self.gradient_tensors())
        on_host = self.rest.offloads_states and tier is Tier.HOST
        return sum(t.nbytes for t in (self._shard, self._other_shard) if on_host and t is not None)


def _as_parameter(payload: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(payload, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter
