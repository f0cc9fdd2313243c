"""Flat parameters: parameters of a unit, flattened into one tensor, unsharded while used and shards in between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from onefold.comm import AllGatherOp
from onefold.offload.fingerprint import fingerprint
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.plan import FlatParamSpec, Plan, Tier, Wire
from onefold.plan.memory import stays_unsharded
from onefold.runtime.flat_grad import FlatGrad
from onefold.runtime.held import hold, set_data


class FlatParam:
    """Parameters of one dtype, all trainable or all frozen, all persistent or none, in one flat tensor.

    [Note: where a parameter is]
    `full` is the unsharded flat parameter; each Parameter is a view of it, and stays the same object for life. A flat
    parameter that stays unsharded keeps `full` filled. Any other keeps this rank's shard in its `store`; sharded, its
    `full` has no memory and its Parameters are placeholders without elements.

    [Note: memory that somebody else sees]
    Inside a pass autograd may hold views of `full`, so its storage is emptied on reshard and the same one refilled on
    every unshard. Outside a pass nothing has to see the next values, but a user may have kept what he was given (a
    view, an array, a queue's handle): there `full` is dropped, and whoever has a view keeps that memory alive. The
    same inside a pass where the storage cannot be emptied (`numpy()`, `share_memory_()`), or a view of it was handed
    out on purpose.

    [Note: secondary shards]
    Where the plan has them (hpZ), neighbouring ranks hold `full` between them from its first gather of a step on, and
    later gathers start from there. Which kind a gather is must be the same on every rank: it is decided when it is
    launched, by what all ranks have launched before, and only within a program that all follow. A gather that ranks
    negotiate (evaluation, a pass that is being recorded) starts from the shards themselves. Frozen parameters never
    change, so their secondary shards serve every gather.
    """

    def __init__(
        self,
        spec: FlatParamSpec,
        parameters: Sequence[nn.Parameter],
        *,
        plan: Plan,
        rank: int,
        device: torch.device,
        memory: OffloadMemory | None = None,
    ) -> None:
        self.spec = spec
        self.layout = spec.layout
        self.trainable = spec.trainable
        self.parameters = list(parameters)
        self.plan = plan
        self.device = device
        self.stays_unsharded = stays_unsharded(plan, spec)
        self.store = ShardStore(spec, plan, rank, device, memory)
        self.full = torch.zeros(self.layout.total, dtype=spec.dtype, device=device)
        self._rank = rank
        # Somebody got a view of `full`, and may keep it.
        self.handed_out = False
        # Places of parameters that are a shape without values at the moment.
        self._standing_in: set[int] = set()
        self._versions: list[int] = []
        self._read_through_data: dict[int, torch.Tensor] = {}
        # This rank's slice of `full` among neighbouring ranks, as it was when it was last gathered from all.
        self.secondary: torch.Tensor | None = None
        if plan.node_shard_size > 1 and not self.stays_unsharded:
            self.secondary = self.full.new_empty(self.layout.total // plan.node_shard_size)
        self._secondary_serves = False
        self._fills_secondary = False
        # What `full` holds came in a form that rounds it.
        self._is_rounded = False
        # The unsharded values after a read from outside, with the fingerprints of them and of this rank's shard.
        self._cached: tuple[torch.Tensor, list[int]] | None = None
        self.take_parameters()
        self._grad = FlatGrad(self.store, self.parameters, plan, self.own_range) if spec.trainable else None

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def grad(self) -> FlatGrad:
        """Of a trained flat parameter."""
        assert self._grad is not None
        return self._grad

    @property
    def own_range(self) -> tuple[int, int]:
        """Where this rank's shard begins and ends in the flat parameter."""
        return self.layout.shard_range(self._rank)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip((member.name for member in self.layout.members), self.parameters, strict=True)

    @property
    def is_sharded(self) -> bool:
        """Whether the values are not here but in shards."""
        return self.layout.total > 0 and self.full.untyped_storage().size() == 0

    # -- unshard ------------------------------------------------------------------------------------------------

    def prefetch(self) -> bool:
        """A gather comes soon: read ahead what is on disk. False where that is not possible yet."""
        return self._secondary_serves or self.store.prefetch()

    def start_unshard(self, *, lossless: bool = False, use_secondary: bool = False) -> AllGatherOp:
        """Memory for the unsharded flat parameter, and what the collective has to fill it with. What is computed with
        may be rounded on its way; what is looked at or written from outside, `lossless`, is not.
        """
        if self.full.numel() < self.layout.total:
            self.full = torch.empty(self.layout.total, dtype=self.dtype, device=self.device)
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.itemsize)
        wire = Wire.NATIVE if lossless or self.spec.packed else self.plan.wire_of(trainable=self.trainable)
        self._is_rounded = wire is not Wire.NATIVE
        if self.secondary is not None and not lossless and (use_secondary or not self.trainable):
            if self._secondary_serves:
                return AllGatherOp(self.full, self.secondary, span=self.plan.node_shard_size)
            self._secondary_serves = self._fills_secondary = True
        assert self.store.param is not None
        # The user may write to what is looked at.
        source = self.store.param.gather_source(is_overwritten=self._is_rounded or lossless)
        return AllGatherOp(self.full, source, lossy=self._is_rounded)

    def attach_views(self) -> None:
        """The flat parameter is unsharded: parameters are views of it."""
        for view, parameter in zip(self._views(), self.parameters, strict=True):
            set_data(parameter, view)
            hold(parameter, resting=False)
        self.note_values()

    def fill_secondary(self) -> None:
        """A gather is finished: where it was from all ranks, neighbours hold the result between them from now on."""
        if self._fills_secondary:
            assert self.secondary is not None
            length = self.secondary.numel()
            self.secondary.copy_(self.full.narrow(0, self._rank % self.plan.node_shard_size * length, length))
            self._fills_secondary = False

    def invalidate_secondary(self) -> None:
        """The parameters are about to have other values, on every rank."""
        self._secondary_serves = self._fills_secondary = False
        self.forget_cached()

    # -- values that the next reader is likely to ask for -------------------------------------------------------

    def cache(self) -> None:
        """Keep the unsharded values beyond the next `reshard(drop=True)`."""
        self._cached = self.full, self._fingerprints(self.full)

    def is_cached(self) -> bool:
        """Whether the cached values are still those of the shards; a program may have kept a view and written to it."""
        return self._cached is not None and self._fingerprints(self._cached[0]) == self._cached[1]

    def use_cached(self) -> None:
        """Unshard from the cached values."""
        assert self._cached is not None
        self.full, self._cached = self._cached[0], None
        self._is_rounded = False
        self.attach_views()

    def forget_cached(self) -> None:
        self._cached = None

    def _fingerprints(self, full: torch.Tensor) -> list[int]:
        shard = self.store.param.values if self.store.param is not None else None
        return [int(fingerprint(tensor)) for tensor in (full, shard) if isinstance(tensor, torch.Tensor)]

    def view_of(self, index: int) -> torch.Tensor:
        """Where one parameter lies in a flat parameter that is unsharded."""
        member = self.layout.members[index]
        return self.full[member.start : member.stop].view(member.shape)

    def _views(self) -> list[torch.Tensor]:
        return [self.view_of(index) for index in range(len(self.layout.members))]

    # -- reshard ------------------------------------------------------------------------------------------------

    def reshard(self, *, drop: bool = False) -> None:
        """Placeholders instead of parameters. `drop`: nothing has to see the next values through the present memory."""
        if self.store.param is not None:
            self.store.param.order()
        placeholder = torch.empty(0, dtype=self.dtype, device=self.device)
        storage = self.full.untyped_storage()
        for parameter in self.parameters:
            # One that has moved to another flat parameter since is not ours to empty.
            if parameter.untyped_storage()._cdata == storage._cdata:
                set_data(parameter, placeholder)
                hold(parameter, resting=True)
        if drop or self.handed_out or not storage.resizable() or (not storage.is_cuda and storage.is_shared()):
            self.full = placeholder
        else:
            storage.resize_(0)
        self.handed_out = False

    def stand_in(self, index: int) -> None:
        """Autograd is about to leave a gradient on a parameter at rest, and looks at its shape alone: a shape without
        values, until `end_stand_ins`.
        """
        member, parameter = self.layout.members[index], self.parameters[index]
        if self.is_sharded and not parameter.untyped_storage().size():
            set_data(parameter, self.full.new_full((1,), math.nan).expand(member.shape))
            self._standing_in.add(index)

    def end_stand_ins(self) -> None:
        """Placeholders again, where nothing has unsharded the parameters since."""
        for index in self._standing_in:
            parameter = self.parameters[index]
            if parameter.untyped_storage().size() == parameter.itemsize and self.is_sharded:
                set_data(parameter, self.full.new_empty(0))
        self._standing_in.clear()

    def is_seen_by(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors lies in the flat parameter."""
        here = self.full.untyped_storage()._cdata
        return any(tensor.untyped_storage()._cdata == here for tensor in tensors if _has_memory(tensor))

    # -- writes from outside ------------------------------------------------------------------------------------

    def take_parameters(self) -> None:
        """Copy the values in and make every parameter a view. The Parameter objects stay the same."""
        with torch.no_grad():
            for view, parameter in zip(self._views(), self.parameters, strict=True):
                if parameter.is_meta:
                    # `.data` refuses a tensor of another kind; swapping the payload keeps the object. The payload is no
                    # view of `full`: it would share its version with it, and every gather writes to that.
                    payload = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
                    payload.__dict__.update(parameter.__dict__)
                    torch.utils.swap_tensors(parameter, payload)
                    set_data(parameter, view)
                elif not _is_same_memory(parameter, view):
                    view.copy_(parameter)
                    set_data(parameter, view)
        self.note_values()

    def write_back(self) -> None:
        """The unsharded values were written: this rank's slice of them becomes its shard."""
        if self.stays_unsharded:
            return
        if self._is_rounded:
            names = ", ".join(member.name for member in self.layout.members[:3])
            raise RuntimeError(
                f"parameters beside {names} were gathered as integers for a forward or backward: writing them back "
                "would round all of them. Write outside forward and backward, or without zero_quantized_weights"
            )
        self.invalidate_secondary()
        start, stop = self.own_range
        self.store.write_back(self.full[start:stop])
        self.note_values()

    def note_values(self) -> None:
        """From now on writes are looked for: what is unsharded now is what is sharded, or has been seen."""
        self._versions = [parameter._version for parameter in self.parameters]
        self._read_through_data.clear()

    def look_for_writes(self, index: int) -> None:
        """A parameter's `data` was taken, and no counter shows what is written through it."""
        if index not in self._read_through_data:
            member = self.layout.members[index]
            self._read_through_data[index] = fingerprint(self.full[member.start : member.stop])

    def written_names(self) -> list[str]:
        """Parameters that were written in place since they were unsharded."""
        members = self.layout.members
        changed = {
            index
            for index, before in self._read_through_data.items()
            if fingerprint(self.full[members[index].start : members[index].stop]) != before
        }
        versions = enumerate(zip(self.parameters, self._versions, strict=True)) if self._versions else ()
        changed |= {index for index, (parameter, version) in versions if parameter._version != version}
        return [members[index].name for index in sorted(changed)]

    # -- parameters that change their memory, shape or dtype -----------------------------------------------------

    def is_attached(self, index: int) -> bool:
        """Whether a parameter of an unsharded flat parameter is still the view of it that `attach_views` made."""
        member, parameter = self.layout.members[index], self.parameters[index]
        lies = parameter.data_ptr() == self.full[member.start : member.stop].data_ptr() or not parameter.numel()
        return lies and tuple(parameter.shape) == member.shape

    def reshaped_names(self) -> list[str]:
        """Parameters that were given another shape."""
        pairs = zip(self.layout.members, self.parameters, strict=True)
        return [member.name for member, parameter in pairs if tuple(parameter.shape) != member.shape]

    def release(self, name: str) -> nn.Parameter:
        """A parameter leaves for good; its place stays, for nobody."""
        index = next(index for index, member in enumerate(self.layout.members) if member.name == name)
        leaving = self.parameters[index]
        self.parameters[index] = nn.Parameter(self._views()[index], requires_grad=False)
        return leaving

    def detach_views(self) -> None:
        """A flat parameter that stays unsharded leaves the device for a while: nobody may read its parameters."""
        for parameter in self.parameters:
            set_data(parameter, self.full.new_empty(0))
            hold(parameter, resting=True)

    def cast(self, dtype: torch.dtype) -> None:
        """Compute in another dtype from now on. Only while nobody trains it."""
        was_sharded = self.full.untyped_storage().size() == 0
        self.store.cast(dtype)
        self.spec = self.store.spec
        if was_sharded:
            self.full = torch.empty(0, dtype=dtype, device=self.device)
            for parameter in self.parameters:
                set_data(parameter, self.full)
        else:
            self.full = self.full.to(dtype)
            self.attach_views()

    def forget_training(self) -> None:
        """The engine goes: hold nothing but parameters, and none in memory or files that go with it."""
        self.store.forget_training()
        self._grad = None
        self.invalidate_secondary()
        self.secondary = None

    def param_bytes(self, tier: Tier) -> int:
        """Bytes of parameters held now; a shard that is the master is counted there."""
        held = self.store.param_bytes(tier)
        if tier is Tier.DEVICE:
            others = (self.secondary, self._cached[0] if self._cached is not None else None)
            held += self.full.untyped_storage().size() + sum(tensor.nbytes for tensor in others if tensor is not None)
        return held


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Addresses would not do: all tensors without elements lie at 0."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset() and one.shape == other.shape


def _has_memory(tensor: torch.Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout is torch.strided and not tensor.is_meta and not wrapped
