"""Flat parameters: parameters of a unit in one flat tensor, which is unsharded for use and sharded otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from onefold.comm import AllGatherOp, Source
from onefold.fp8 import Fp8Linear, GatheredWeights
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.offload.write_check import fingerprint
from onefold.plan import FlatParamSpec, Plan, Tier, Wire
from onefold.plan.buffers import gathers_in_fp8, stays_unsharded
from onefold.plan.layout import Layout
from onefold.runtime.flat_grad import FlatGrad, views_of_members
from onefold.runtime.parameter_proxy import attach_values, detach_values, is_sharded, set_data, set_proxy_class
from onefold.runtime.torch_internals import compiles


class FlatParam:
    """Parameters of one dtype, all trainable or all frozen, all persistent or none, in one flat tensor.

    [Note: where a parameter is]
    `full` is the unsharded flat parameter. Each Parameter is a view of it and remains the same object. A flat parameter
    that stays unsharded always has its values in `full`. Any other has this rank's shard in its `store`; while it is
    sharded, `full` has no memory and its Parameters are placeholders without elements.

    [Note: views of unsharded memory]
    Inside a pass autograd may hold views of `full`. Resharding therefore frees the storage, and the next unshard
    reallocates the same storage, so that these views see the gathered values. Outside a pass no graph needs the next
    values, but the user may have kept a view, an array or a shared-memory handle. `full` is then replaced instead of
    freed, and the remaining view keeps the old memory alive. The same happens inside a pass if the storage cannot be
    freed (`numpy()`, `share_memory_()`) or a view was returned to the user.

    [Note: secondary shards]
    With hpZ the ranks of a node keep a second copy of `full`, sharded among them, from the first all-gather of a step
    on, and later all-gathers read from it. All ranks must choose the same source. The choice depends only on what all
    ranks have launched before, and secondary shards are used only while all ranks follow one recorded order.
    Negotiated all-gathers (evaluation, a pass that is being recorded) start from the primary shards. Frozen parameters
    never change, so their secondary shards are always valid.

    [Note: all-gathers in FP8] of `fp8/gathered_weights.py`: such a flat parameter has its values in `fp8` instead of
    `full` when it is unsharded for its layers.
    """

    grad: FlatGrad
    """The gradient. Only a trained flat parameter has one."""

    def __init__(
        self,
        spec: FlatParamSpec,
        parameters: Sequence[nn.Parameter],
        *,
        plan: Plan,
        rank: int,
        device: torch.device,
        memory: OffloadMemory | None = None,
        in_fp8: Mapping[str, Fp8Linear] | None = None,
    ) -> None:
        self.layout = spec.layout
        self.trainable = spec.trainable
        self.parameters = list(parameters)
        self.plan = plan
        self.device = device
        self.stays_unsharded = stays_unsharded(plan, spec)
        self.store = ShardStore(spec, plan, rank, device, memory)
        self.full = torch.zeros(self.layout.total, dtype=spec.dtype, device=device)
        self._rank = rank
        # `full` has the layout of the experts of this rank, because it was gathered for a forward or backward.
        self._is_part = False
        self._wire = Wire.NATIVE if spec.packed else plan.wire_of(trainable=spec.trainable)
        # A view of `full` was returned to the user, who may keep it.
        self.handed_out = False
        # Indices of parameters that currently have a shape but no values.
        self._shape_placeholders: set[int] = set()
        self._versions: list[int] = []
        self._read_through_data: dict[int, torch.Tensor] = {}
        # This rank's slice of `full` among the ranks of its node, as of the last all-gather from all ranks.
        self.secondary: torch.Tensor | None = None
        if plan.node_shard_size > 1 and not self.stays_unsharded:
            self.secondary = self.full.new_empty(self.layout.total // plan.node_shard_size)
        self._secondary_serves = False
        self._fills_secondary = False
        # The values in `full` were rounded by a quantized all-gather.
        self._is_rounded = False
        self.fp8: GatheredWeights | None = None
        if gathers_in_fp8(plan, spec):
            layers = [(in_fp8 or {})[member.name] for member in self.layout.members]
            self.fp8 = GatheredWeights(self.layout, layers, spec.dtype, rank, device)
        # The unsharded values of the last `GatheredParameters`, and fingerprints of them and of this rank's shard.
        self._cached: tuple[torch.Tensor, list[int]] | None = None
        self.take_parameters()
        if spec.trainable:
            used = spec.used_layout
            self.grad = FlatGrad(self.store, self.parameters, plan, used.shard_range(rank % used.num_shards))

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def spec(self) -> FlatParamSpec:
        """The specification that the store was made from, with everything that has changed since."""
        return self.store.spec

    @property
    def own_range(self) -> tuple[int, int]:
        """Start and end of this rank's shard in the flat parameter."""
        return self.layout.shard_range(self._rank)

    @property
    def unsharded_layout(self) -> Layout:
        """The layout of `full`: of the whole flat parameter, or of the experts that this rank computes with."""
        return self.spec.used_layout if self._is_part else self.layout

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and the Parameter of each member of the layout."""
        return zip((member.name for member in self.layout.members), self.parameters, strict=True)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of all members in a tensor with the layout of `full`."""
        return views_of_members(flat, self.unsharded_layout)

    @property
    def is_sharded(self) -> bool:
        """Whether `full` has no memory."""
        return self.layout.total > 0 and self.full.untyped_storage().size() == 0

    @property
    def unsharded_storages(self) -> list[torch.UntypedStorage]:
        """The memory of the unsharded values, which is empty while they are sharded."""
        in_fp8 = [self.fp8.storage] if self.fp8 is not None else []
        return [self.full.untyped_storage(), *in_fp8]

    # -- unshard ------------------------------------------------------------------------------------------------

    def read_ahead(self) -> bool:
        """Start reading the shard from disk for a coming all-gather. Return False if no buffer is free yet."""
        return self._secondary_serves or self.store.prefetch()

    def prepare_all_gather(self, *, lossless: bool = False, use_secondary: bool = False) -> AllGatherOp:
        """Allocate `full` and return the all-gather that fills it.

        `lossless`: do not quantize, because the user reads or writes the values. `use_secondary`: gather inside the
        node once the secondary shards are filled.
        """
        if self.fp8 is not None and not lossless:
            self._is_rounded = True
            return self.fp8.prepare_all_gather(self.shard_on_device())
        if not lossless and self.spec.num_expert_parts > 1:
            return self._prepare_all_gather_of_part()
        if self.has_part:
            name = self.layout.members[0].name
            raise RuntimeError(f"{name} is in use with the experts of this rank. Gather it outside of the forward.")
        self._allocate(self.layout, is_part=False)
        self._is_rounded = not lossless and self._wire is not Wire.NATIVE
        if self.secondary is not None and not lossless and (use_secondary or not self.trainable):
            if self._secondary_serves:
                return AllGatherOp(self.full, self.secondary, span=self.plan.node_shard_size)
            self._secondary_serves = self._fills_secondary = True
        # The user may write to values that are gathered losslessly.
        source = self._gather_source(is_overwritten=self._is_rounded or lossless)
        return AllGatherOp(self.full, source, lossy=self._is_rounded)

    def _prepare_all_gather_of_part(self) -> AllGatherOp:
        """Return the all-gather of the experts of this rank ([Note: experts of a rank])."""
        part, output = self.spec.used_layout, self.full
        if self.is_sharded or self._is_part or self.full.numel() < self.layout.total:
            self._allocate(part, is_part=True)
            output = self.full
        else:  # the whole is unsharded here, but another rank needs this rank's shard
            output = self.full.narrow(0, self._rank // part.num_shards * part.total, part.total)
        return AllGatherOp(output, self._gather_source(is_overwritten=False), span=self.spec.span)

    def _allocate(self, layout: Layout, *, is_part: bool) -> None:
        """Allocate `full` for a layout, in the storage that it has if that is large enough."""
        self._is_part = is_part
        if self.full.numel() != layout.total:
            self.full = torch.empty(layout.total, dtype=self.dtype, device=self.device)
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.itemsize)

    def _gather_source(self, *, is_overwritten: bool) -> torch.Tensor | Source:
        """Return what this rank sends. `is_overwritten`: `full` will have other values than the shard."""
        shard = self.store.param
        assert shard is not None
        on_device = shard.tier is Tier.DEVICE
        return self.shard_on_device() if on_device else shard.gather_source(is_overwritten=is_overwritten)

    def attach_views(self) -> None:
        """Make the Parameters views of `full`, or give layers their weights in FP8, after the all-gather."""
        if self.fp8 is not None and self._is_rounded:
            self.fp8.attach()
            for index in range(len(self.parameters)):  # autograd records the shapes of inputs
                self.attach_shape_placeholder(index)
                if compiles():  # the compiler takes no Parameter that intercepts functions
                    set_proxy_class(self.parameters[index], sharded=False)
            return
        if self._is_part:
            for index in range(len(self.parameters)):
                is_own = not self.spec.is_stacked and self.spec.is_used(index)
                (self.attach_part if is_own else self.hide_part)(index)
        else:
            attach_values(self.parameters, self.views_of(self.full))
        self.note_values()

    @property
    def has_part(self) -> bool:
        """Whether the experts of this rank are unsharded, and no others."""
        return self._is_part and not self.is_sharded

    def attach_part(self, index: int) -> None:
        """Make a Parameter a view of the experts of this rank, while their layer computes."""
        attach_values([self.parameters[index]], [self.view_of(index)])

    def hide_part(self, index: int) -> None:
        """Make a Parameter a placeholder: of stacked experts until their layer computes, or of others' experts."""
        shape = (self.spec.used_layout if self.spec.is_stacked else self.layout).members[index].shape
        set_data(self.parameters[index], self.full.new_full((1,), math.nan).expand(shape))
        set_proxy_class(self.parameters[index], sharded=True)

    def fill_secondary(self) -> None:
        """Copy this rank's part of `full` into its secondary shard, after an all-gather from all ranks."""
        if self._fills_secondary:
            assert self.secondary is not None
            length = self.secondary.numel()
            self.secondary.copy_(self.full.narrow(0, self._rank % self.plan.node_shard_size * length, length))
            self._fills_secondary = False

    def shard_on_device(self) -> torch.Tensor:
        """Return this rank's shard, in the dtype of the weight or the master."""
        shard = self.store.param
        assert shard is not None
        assert isinstance(shard.values, torch.Tensor)
        if shard.values.numel() and not shard.values.untyped_storage().size():
            raise RuntimeError(
                "the storage of a parameter shard was emptied by hand, and its values are lost. Free the device's "
                "memory with engine.offload_states(include=['lp_params']), and load a checkpoint into a new engine"
            )
        return shard.values

    def stepped_shard(self) -> torch.Tensor:
        """Return this rank's shard once the host has stepped it."""
        self.store.finish_step()
        return self.shard_on_device()

    def invalidate_secondary(self, *, values_change: bool = True) -> None:
        """Discard copies of the unsharded values, and scales in FP8, before the values change on every rank."""
        self._secondary_serves = self._fills_secondary = False
        self.drop_cache()
        if self.fp8 is not None and values_change:
            self.fp8.is_current = False

    # -- values kept between two uses of GatheredParameters -----------------------------------------------------

    def cache_unsharded(self) -> None:
        """Keep the unsharded values beyond the next `free_unsharded(drop=True)`."""
        self._cached = self.full, self._fingerprints(self.full)

    def has_valid_cache(self) -> bool:
        """Return whether cached values exist and neither they nor the shard were written to since."""
        return self._cached is not None and self._fingerprints(self._cached[0]) == self._cached[1]

    def restore_cached(self) -> None:
        """Make the cached values the unsharded ones, instead of an all-gather."""
        assert self._cached is not None
        self.full, self._cached = self._cached[0], None
        self._is_rounded = False
        self.attach_views()

    def drop_cache(self) -> None:
        """Free the cached values."""
        self._cached = None

    def _fingerprints(self, full: torch.Tensor) -> list[int]:
        shard = self.store.param.values if self.store.param is not None else None
        return [int(fingerprint(tensor)) for tensor in (full, shard) if isinstance(tensor, torch.Tensor)]

    def view_of(self, index: int) -> torch.Tensor:
        """Return the view of `full` that belongs to one parameter."""
        member = self.unsharded_layout.members[index]
        return self.full[member.start : member.stop].view(member.shape)

    # -- reshard ------------------------------------------------------------------------------------------------

    def free_unsharded(self, *, drop: bool = False) -> None:
        """Free `full` and turn the Parameters into placeholders.

        `drop`: replace `full` instead of emptying its storage, because no graph needs the next values in this memory.
        """
        if self.store.param is not None:
            self.store.param.order()
        if self.fp8 is not None:
            self.fp8.free()
            self.remove_shape_placeholders()
            for parameter in self.parameters:
                set_proxy_class(parameter, sharded=True)
        placeholder = torch.empty(0, dtype=self.dtype, device=self.device)
        storage = self.full.untyped_storage()
        # A parameter that was moved to another flat parameter has other memory.
        is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
        aliases = [each for each in self.parameters if self._is_part or is_alias(each, self.full)]
        detach_values(aliases, placeholder)
        if drop or self.handed_out or not storage.resizable() or (not storage.is_cuda and storage.is_shared()):
            self.full = placeholder
        else:
            storage.resize_(0)
        self.handed_out = False

    def attach_shape_placeholder(self, index: int) -> None:
        """Give a sharded parameter its shape without values, until `remove_shape_placeholders`.

        Autograd compares a gradient's shape with its parameter's before it accumulates the gradient.
        """
        parameter = self.parameters[index]
        if is_sharded(parameter) and self.is_sharded and not parameter.untyped_storage().size():
            shape = self.spec.used_layout.members[index].shape
            set_data(parameter, self.full.new_full((1,), math.nan).expand(shape))
            self._shape_placeholders.add(index)

    def remove_shape_placeholders(self) -> None:
        """Turn parameters with a shape placeholder back into empty placeholders, unless they were unsharded since."""
        if self.fp8 is not None and self.fp8.num_bytes:
            return  # they need their shapes until the weights in FP8 are freed
        for index in self._shape_placeholders:
            parameter = self.parameters[index]
            if parameter.untyped_storage().size() == parameter.itemsize and self.is_sharded:
                set_data(parameter, self.full.new_empty(0))
        self._shape_placeholders.clear()

    def is_seen_by(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether one of the tensors is a view of `full`."""
        here = self.full.untyped_storage()._cdata
        return any(tensor.untyped_storage()._cdata == here for tensor in tensors if _has_memory(tensor))

    # -- writes by the user -------------------------------------------------------------------------------------

    def take_parameters(self) -> None:
        """Copy the parameters' values into `full` and make the parameters views of it."""
        self._check_lossless()
        with torch.no_grad():
            for view, parameter in zip(views_of_members(self.full, self.layout), self.parameters, strict=True):
                if parameter.is_meta:
                    # A meta parameter does not accept `.data` on a device. Swapping its payload keeps the object. The
                    # payload must not be a view of `full`: it would share a version counter that all-gathers increment.
                    payload = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
                    payload.__dict__.update(parameter.__dict__)
                    torch.utils.swap_tensors(parameter, payload)
                    set_data(parameter, view)
                elif not _is_same_memory(parameter, view):
                    view.copy_(parameter)
                    set_data(parameter, view)
        self.note_values()

    def update_shard(self) -> None:
        """Copy this rank's slice of `full` into its shard, after the unsharded values were written."""
        if self.stays_unsharded:
            return
        self._check_lossless()
        self.invalidate_secondary()
        start, stop = self.own_range
        self.store.write_back(self.full[start:stop])
        self.note_values()

    def _check_lossless(self) -> None:
        """Raise if the unsharded values were rounded or are a part, so that they cannot be written back."""
        if self.has_part:
            raise RuntimeError(
                f"{self.layout.members[0].name} has the experts of this rank only, because it was gathered for a "
                "forward or backward. Write to it in GatheredParameters, outside forward and backward."
            )
        if self._is_rounded:
            names = ", ".join(member.name for member in self.layout.members[:3])
            raise RuntimeError(
                f"The flat parameter of {names} was gathered quantized for a forward or backward, so writing it "
                "back would round all of its values. Write outside forward and backward, or disable "
                f"{'zero_quantized_weights' if self.fp8 is None else 'fp8.all_gather'}."
            )

    def note_values(self) -> None:
        """Record version counters, so that `written_names` reports writes from here on."""
        self._versions = [parameter._version for parameter in self.parameters]
        self._read_through_data.clear()

    def look_for_writes(self, index: int) -> None:
        """Record a fingerprint of a parameter whose `data` was read, because writes through it have no counter."""
        if index not in self._read_through_data:
            member = self.unsharded_layout.members[index]
            self._read_through_data[index] = fingerprint(self.full[member.start : member.stop])

    def written_names(self) -> list[str]:
        """Return the names of parameters that were written in place since `note_values`."""
        if not self._read_through_data and self._versions == [parameter._version for parameter in self.parameters]:
            return []
        members = self.unsharded_layout.members
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
        """Return whether a parameter is still the view of `full` that `attach_views` made."""
        if self.has_part:
            return True
        member, parameter = self.layout.members[index], self.parameters[index]
        lies = parameter.data_ptr() == self.full[member.start : member.stop].data_ptr() or not parameter.numel()
        return lies and tuple(parameter.shape) == member.shape

    def reshaped_names(self) -> list[str]:
        """Return the names of parameters that were given another shape."""
        if self.has_part:
            return []
        pairs = zip(self.layout.members, self.parameters, strict=True)
        return [member.name for member, parameter in pairs if tuple(parameter.shape) != member.shape]

    def remove_parameter(self, name: str) -> nn.Parameter:
        """Remove a parameter from the layout and return it. Its range remains as padding."""
        index = next(index for index, member in enumerate(self.layout.members) if member.name == name)
        removed = self.parameters[index]
        self.parameters[index] = nn.Parameter(self.view_of(index), requires_grad=False)
        return removed

    def detach_views(self) -> None:
        """Turn the Parameters into placeholders while an always-unsharded flat parameter is off the device."""
        detach_values(self.parameters, self.full.new_empty(0))

    def cast(self, dtype: torch.dtype) -> None:
        """Change the dtype of the model weight. Only for a flat parameter that no engine trains."""
        was_sharded = self.full.untyped_storage().size() == 0
        self.store.cast(dtype)
        if was_sharded:
            self.full = torch.empty(0, dtype=dtype, device=self.device)
            for parameter in self.parameters:
                set_data(parameter, self.full)
        else:
            self.full = self.full.to(dtype)
            self.attach_views()

    def forget_training(self) -> None:
        """Free all but the parameters when the engine is destroyed, and move them out of its memory and files."""
        self.store.forget_training()
        self.fp8 = None
        self.__dict__.pop("grad", None)
        self.invalidate_secondary()
        self.secondary = None

    def param_bytes(self, tier: Tier) -> int:
        """Return the bytes of parameters stored in a tier. A shard that is the master is counted with the masters."""
        held = self.store.param_bytes(tier)
        if tier is Tier.DEVICE:
            others = (self.secondary, self._cached[0] if self._cached is not None else None)
            held += sum(storage.size() for storage in self.unsharded_storages) + sum(
                tensor.nbytes for tensor in others if tensor is not None
            )
        return held


def unrecorded() -> AbstractContextManager[None]:
    """Exclude copies of parameter values from autograd and `torch.func` transforms.

    Tensors made inside are not inference tensors, because training uses them later.
    """
    is_plain = not torch.is_inference_mode_enabled() and torch._C._functorch.peek_interpreter_stack() is None
    return torch.no_grad() if is_plain else _without_modes()


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.no_grad():
        if torch._C._functorch.peek_interpreter_stack() is None:
            yield
        else:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            with temporarily_clear_interpreter_stack():
                yield


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same view. Addresses do not suffice: empty tensors all have address 0."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset() and one.shape == other.shape


def _has_memory(tensor: torch.Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout is torch.strided and not tensor.is_meta and not wrapped
