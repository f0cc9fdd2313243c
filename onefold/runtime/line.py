"""The flat line of a run's parameters: whole, resting as a shard in some tier, or on its way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import nn

from onefold.comm import Gathering, Source
from onefold.plan import Plan, RunShape, Tier, Wire
from onefold.plan.memory import master_dtype, rests_whole
from onefold.runtime.fingerprint import fingerprint
from onefold.runtime.held import hold, set_data
from onefold.tier.bus import HERE, Arrival
from onefold.tier.lower import Flat, LowerTiers, write
from onefold.tier.nvme import DiskTensor
from onefold.tier.sources import FreshSource


class Line:
    """The parameters of a run.

    [Note: where a parameter is]
    `full` is one tensor for life, and so is each Parameter. A run that rests whole keeps `full` filled. Any other run
    keeps `shard`, this rank's slice (the fp32 master where it is trained); its `full` has an empty storage at rest,
    and its parameters are placeholders without elements. `shard` rests where `rest.parameters` says.

    [Note: memory that somebody else sees]
    Inside a pass autograd may hold views of `full`, so its storage is emptied on reshard and the same one refilled on
    every unshard. Outside a pass nothing has to see the next values, but a user may have kept what he was given (a
    view, an array, a queue's handle): there `full` is dropped, and whoever has a view keeps that memory alive. The
    same inside a pass where the storage cannot be emptied (`numpy()`, `share_memory_()`), or a view of it was handed
    out on purpose.

    [Note: second shards]
    Where the plan has them, neighbouring ranks hold `full` between them from its first gather of a step on, and later
    gathers start from there. Which kind a gather is must be the same on every rank: it is decided when it is launched,
    by what all ranks have launched before, and only within a program that all follow. A gather that ranks negotiate
    (evaluation, a pass that is being learned) starts from the shards themselves. Frozen lines never change, so theirs
    serve every gather.
    """

    def __init__(
        self,
        shape: RunShape,
        parameters: Sequence[nn.Parameter],
        *,
        plan: Plan,
        rank: int,
        device: torch.device,
        lower: LowerTiers | None,
    ) -> None:
        self.layout = shape.layout
        self.parameters = list(parameters)
        self.dtype = shape.dtype
        self.trainable = shape.trainable
        self.persistent = shape.persistent
        self.rest = shape.rest
        self.rests_whole = rests_whole(plan, shape, shape.layout.num_shards)
        self.plan = plan
        self.device = device
        self.lower = lower
        self.shard: Flat | None = None
        self.full = torch.zeros(self.layout.total, dtype=self.dtype, device=device)
        self._handed_out = False
        self._versions: list[int] = []
        self._read_through_data: dict[int, torch.Tensor] = {}
        # The step that is still to come back from the host.
        self.update: Future[Arrival] | None = None
        # Told when that has come.
        self.arrived: weakref.WeakMethod[Callable[[], None]] | None = None
        # The host's master, where it has been stepped since it was last cast to the shard beside it.
        self.fresh: torch.Tensor | None = None
        self._saving: Arrival = HERE
        # A slice of the line among neighbouring ranks, as it was when it was last gathered from all.
        span = plan.node_shard_size
        has_second = span > 1 and not self.rests_whole
        self.second = torch.empty(self.layout.total // span, dtype=self.dtype, device=device) if has_second else None
        self._second_serves = False
        self._fills_second = False
        # What the line holds came in a form that rounds it.
        self._rounded = False
        self._rank = rank
        self.take_parameters()

    def take_parameters(self) -> None:
        """Copy the values in and make every parameter a view of the line. The Parameter objects stay the same."""
        with torch.no_grad():
            for view, parameter in zip(self._views(), self.parameters, strict=True):
                if parameter.is_meta:
                    # `.data` refuses a tensor of another kind; swapping the payload keeps the object. The payload is no
                    # view of the line: it would share its version with it, and every gather writes to the line.
                    torch.utils.swap_tensors(parameter, _as_parameter(view.new_empty(0), parameter))
                    set_data(parameter, view)
                elif not _is_same_memory(parameter, view):
                    view.copy_(parameter)
                    set_data(parameter, view)
        self.note_values()

    @property
    def is_resting(self) -> bool:
        """Whether the values are not here but in shards."""
        return self.layout.total > 0 and self.full.untyped_storage().size() == 0

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
            if self._rounded:
                names = ", ".join(member.name for member in self.layout.members[:3])
                raise RuntimeError(
                    f"parameters beside {names} were gathered as integers for a forward or backward: writing them back "
                    "would round all of them. Write outside forward and backward, or without zero_quantized_weights"
                )
            self.forget_fetched()
            self.change()
            write(self.shard, self.own_slice)
            self.fresh = None
            self.note_values()

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

    def refill(self, *, exact: bool = False, near: bool = False) -> Gathering:
        """Memory for the whole line, and what the collective has to fill it with. What is computed with may be rounded
        on its way; what is looked at or written from outside, `exact`, is not. `near`: second shards may serve.
        """
        if self.full.numel() < self.layout.total:
            self.full = torch.empty(self.layout.total, dtype=self.dtype, device=self.device)
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.itemsize)
        self._rounded = self._rounds and not exact
        if self.second is not None and not exact and (near or not self.trainable):
            if self._second_serves:
                return Gathering(self.full, self.second, span=self.plan.node_shard_size)
            self._second_serves = self._fills_second = True
        return Gathering(self.full, self._source, lossy=self._rounded)

    def keep_second(self) -> None:
        """The line has been gathered: where that was from all ranks, neighbours have it between them from now on."""
        if self._fills_second:
            assert self.second is not None
            length = self.second.numel()
            self.second.copy_(self.full.narrow(0, self._rank % self.plan.node_shard_size * length, length))
            self._fills_second = False

    def change(self) -> None:
        """The parameters are about to have other values, on every rank."""
        self._second_serves = self._fills_second = False

    def drop_second(self) -> None:
        self.change()
        self.second = None

    @property
    def _rounds(self) -> bool:
        """Whether the form in which parameters travel rounds them."""
        return self.plan.wire_of(trainable=self.trainable) is not Wire.NATIVE

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
        if self._rounded:
            self._saving.order()  # what is decoded next takes the place of these values

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
        if self.lower is None or not isinstance(self.shard, DiskTensor) or self._second_serves:
            return True
        return (self.update is None or self.update.done()) and self.lower.source(self.shard).fetch()

    def finish_update(self) -> None:
        """The host has stepped this run, and what it sends up has arrived, as the caller's stream sees it."""
        if self.update is not None:
            arrival = self.update.result()
            self.update = None
            arrival.order()
            arrived = self.arrived() if self.arrived is not None else None
            if arrived is not None:
                arrived()

    def show(self) -> None:
        """The line is whole: parameters are views of it."""
        for view, parameter in zip(self._views(), self.parameters, strict=True):
            set_data(parameter, view)
            hold(parameter, resting=False)
        self.note_values()

    def note_values(self) -> None:
        """From now on writes are looked for: what is unsharded now is what is sharded, or has been seen."""
        self._versions = [parameter._version for parameter in self.parameters]
        self._read_through_data.clear()

    def hide(self, *, drop: bool = False) -> None:
        """Back to rest: placeholders instead of parameters, no memory behind the line.

        `drop`: nothing has to see the next values through the line's present memory.
        """
        self._saving.order()
        placeholder = torch.empty(0, dtype=self.dtype, device=self.device)
        storage = self.full.untyped_storage()
        for parameter in self.parameters:
            # One that has moved to another run since is not ours to empty.
            if parameter.untyped_storage()._cdata == storage._cdata:
                set_data(parameter, placeholder)
                hold(parameter, resting=True)
        if drop or self._handed_out or not storage.resizable() or (not storage.is_cuda and storage.is_shared()):
            self.full = placeholder
        else:
            storage.resize_(0)
        self._handed_out = False

    def is_seen_by(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors lies in the line."""
        here = self.full.untyped_storage()._cdata
        return any(tensor.untyped_storage()._cdata == here for tensor in tensors if _has_memory(tensor))

    def hand_out(self) -> None:
        """Somebody got a view of the line, and may keep it."""
        self._handed_out = True

    def look_for_writes(self, index: int) -> None:
        """A parameter's `data` was taken, and no counter shows what is written through it."""
        if index not in self._read_through_data:
            member = self.layout.members[index]
            self._read_through_data[index] = fingerprint(self.full[member.start : member.stop])

    def written_members(self) -> list[str]:
        """Parameters that were written in place since they were last shown."""
        members = self.layout.members
        changed = {
            index
            for index, before in self._read_through_data.items()
            if fingerprint(self.full[members[index].start : members[index].stop]) != before
        }
        versions = enumerate(zip(self.parameters, self._versions, strict=True)) if self._versions else ()
        changed |= {index for index, (parameter, version) in versions if parameter._version != version}
        return [members[index].name for index in sorted(changed)]

    def put_away(self) -> None:
        """A line that rests whole leaves the device for a while: nobody may read through its parameters."""
        for parameter in self.parameters:
            set_data(parameter, self.full.new_empty(0))

    def cast(self, dtype: torch.dtype) -> None:
        """From now on the line computes in another dtype. Only while nobody trains it."""
        resting = self.full.untyped_storage().size() == 0
        self.dtype = dtype
        if resting:
            assert isinstance(self.shard, torch.Tensor)
            self.shard = self.shard.to(dtype)
            self.full = torch.empty(0, dtype=dtype, device=self.device)
            for parameter in self.parameters:
                set_data(parameter, self.full)
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


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Addresses would not do: all tensors without elements lie at 0."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset() and one.shape == other.shape


def _has_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _as_parameter(payload: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(payload, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter
