"""The buffers that store a flat parameter's model state on one rank.

[Note: planned buffers]
`FlatParamSpec.buffers` lists every tensor of a flat parameter's model state: its tier, size and dtype, and whether it
shares the memory of another one. The runtime allocates these buffers. Bytes held (`plan/memory.py`) and host-device
traffic (`plan/traffic.py`) are sums over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch

from onefold.plan.layout import Layout
from onefold.plan.plan import Plan, Tier
from onefold.plan.state_formats import INT8, INT8_SQUARES, FormatPart, StateFormat, StateFormats


class BufferKind(Enum):
    """The kind of model state that the bytes of a buffer are counted as."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    MASTER = "masters"
    STATE = "states"
    SLOT = "slot"
    """An unsharded gradient that is freed after its reduction. It is not part of the model state between steps."""


# Names of buffers. An optimizer state has its own name, such as `exp_avg`.
PARAMETER, SECONDARY, MASTER = "parameter", "secondary shard", "master"
FLAT_GRADIENT, REDUCED_GRADIENT, FEEDBACK = "flat gradient", "reduced gradient", "error feedback"
# Copies of offloaded buffers on the device (`plan/device_cache.py`).
CACHED_GRADIENT, CACHED_PARAMETER = "cached gradient", "cached parameter"
# The prefix of masters and states that a speculative step writes (`plan/speculation.py`).
SECOND = "second "


@dataclass(frozen=True)
class BufferSpec:
    """One tensor of model state. A buffer in a state format has one `BufferSpec` per part."""

    name: str
    kind: BufferKind
    tier: Tier
    numel: int
    dtype: torch.dtype
    alias_of: str | None = None
    """The name of the buffer whose memory this one uses. None: it has its own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.numel * self.dtype.itemsize

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that this buffer adds."""
        return 0 if self.alias_of is not None else self.num_bytes

    @property
    def is_stepped(self) -> bool:
        """Whether an optimizer step reads and writes this buffer: it is a master or a state, and not a second one."""
        return (self.name == MASTER or self.kind is BufferKind.STATE) and not self.name.startswith(SECOND)


@dataclass(frozen=True)
class Residency:
    """The tiers of a flat parameter: of its masters and states, and of the parameter shard that is all-gathered."""

    states: Tier = Tier.DEVICE
    parameters: Tier = Tier.DEVICE
    apart: bool = False
    """An offloaded master is never the source of the all-gather, because a delayed step may be updating it."""

    @property
    def offloads_states(self) -> bool:
        return self.states is not Tier.DEVICE

    @property
    def shares_tier(self) -> bool:
        """Whether the master can be the parameter shard, or contain it."""
        return self.states is self.parameters and not (self.apart and self.offloads_states)

    @property
    def gradients(self) -> Tier:
        """The tier of reduced gradients: host memory if the states are offloaded."""
        return Tier.HOST if self.offloads_states else Tier.DEVICE


@dataclass(frozen=True)
class StateSpec:
    """The optimizer states of a parameter group, and the formats of its states and masters."""

    names: tuple[str, ...] = ()
    """The names of the states, such as `exp_avg`. Empty if a user-defined optimizer creates them."""
    as_matrices: bool = False
    """The optimizer updates whole matrices ([Note: whole matrices])."""
    by_own_class: bool = False
    """A user-defined optimizer class performs the step."""
    formats: tuple[StateFormat | None, ...] = ()
    """The format of each state ([Note: state formats]); None is the dtype of the master. Empty: all are None."""
    master: StateFormat | None = None
    """The format of the master. None is fp32, or fp64 for fp64 parameters."""

    def held_as(self, formats: StateFormats, parameter: str, dtype: torch.dtype, numel: int) -> StateSpec:
        """Return this spec with the formats that the config selects for one parameter."""
        chosen = tuple(formats.of_state(name, parameter, dtype, numel) for name in self.names)
        if self.as_matrices:  # a user-defined rule may store signed values under these names
            chosen = tuple(INT8 if each is INT8_SQUARES else each for each in chosen)
        return replace(self, formats=chosen if any(chosen) else (), master=formats.of_master(dtype))

    def format_of(self, name: str) -> StateFormat | None:
        return self.formats[self.names.index(name)] if self.formats else None


@dataclass(frozen=True)
class FlatParamSpec:
    """The specification of a flat parameter: its layout, dtype, tiers and states."""

    layout: Layout
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    packed: bool = False
    """The values are frozen and in a packed format, such as quantized weights. They are gathered without a cast."""
    residency: Residency = Residency()
    state_spec: StateSpec = StateSpec()
    given_to_device: bool = False
    """The GPU steps this flat parameter when host and GPU share the step of offloaded states."""
    caches_gradient: bool = False
    """The gradient of an offloaded step is accumulated on the device ([Note: the device cache])."""
    caches_parameter: bool = False
    """The device has a copy of the offloaded parameter shard, until a step changes it."""
    multiplies_in_fp8: bool = False
    """The parameters are weights of layers that multiply in FP8."""
    num_expert_parts: int = 1
    """The number of equal parts of experts. A rank computes with one of them, in every stage ([Note: experts of a rank]
    in `moe/divided_experts.py`)."""
    expert_part: int = 0
    """The part of this rank. It matters for experts that are several parameters."""
    has_second_state: bool = False
    """There is a second master and a second tensor of each state ([Note: speculative steps])."""

    @cached_property
    def used_layout(self) -> Layout:
        """The layout of what a forward uses and a backward returns: everything, or the experts of this rank."""
        return self.layout.part(self.num_expert_parts, self.expert_part)

    @property
    def span(self) -> int | None:
        """The number of neighbouring ranks that compute with the same parameters; None for all ranks."""
        return self.used_layout.num_shards if self.num_expert_parts > 1 else None

    @property
    def is_stacked(self) -> bool:
        """Whether all experts are one parameter, of which a rank computes with a part."""
        return self.num_expert_parts > 1 and len(self.layout.members) == 1

    def is_used(self, index: int) -> bool:
        """Return whether this rank computes with a parameter. It does not if it is an expert of other ranks."""
        member = self.used_layout.members[index]
        return self.num_expert_parts == 1 or member.start < member.stop

    @property
    def states(self) -> tuple[str, ...]:
        return self.state_spec.names

    @property
    def on_device(self) -> FlatParamSpec:
        """The same flat parameter without offload, and without the copies that offload makes."""
        return replace(
            self, residency=Residency(), caches_gradient=False, caches_parameter=False, has_second_state=False
        )

    @property
    def master_is_shard(self) -> bool:
        """Whether the master is the source of the all-gather, so that there is no separate parameter shard.

        A master on the device is cast before the all-gather. An offloaded one must have the dtype of the parameters.
        """
        if not self.trainable or self.state_spec.master is not None or not self.residency.shares_tier:
            return False
        return not self.residency.offloads_states or master_dtype(self.dtype) == self.dtype

    @property
    def weight_is_part_of_master(self) -> bool:
        """Whether the bf16 part of a split master is the model weight, or the parameter shard."""
        return self.trainable and self.state_spec.master is not None and self.residency.shares_tier

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return self.used_layout.total * self.dtype.itemsize

    def buffers(self, plan: Plan) -> list[BufferSpec]:
        """Return the buffers of one rank."""
        parameters = self._parameter_buffers(plan)
        if not self.trainable:
            return parameters
        return [*parameters, *self._gradient_buffers(plan), *self._step_buffers(plan, parameters[0])]

    def _parameter_buffers(self, plan: Plan) -> list[BufferSpec]:
        layout, kind = self.layout, BufferKind.PARAMETER
        if stays_unsharded(plan, self):
            return [BufferSpec(PARAMETER, kind, Tier.DEVICE, layout.total, self.dtype)]
        shard = BufferSpec(PARAMETER, kind, self.residency.parameters, layout.shard_size, self.dtype)
        if self.master_is_shard:  # stored and counted as a master
            shard = replace(shard, kind=BufferKind.MASTER, dtype=master_dtype(self.dtype))
        if self.caches_parameter:
            return [shard, BufferSpec(CACHED_PARAMETER, kind, Tier.DEVICE, layout.shard_size, self.dtype)]
        if plan.node_shard_size == 1:
            return [shard]
        return [shard, BufferSpec(SECONDARY, kind, Tier.DEVICE, layout.total // plan.node_shard_size, self.dtype)]

    def _gradient_buffers(self, plan: Plan) -> Iterator[BufferSpec]:
        layout, kind = self.used_layout, BufferKind.GRADIENT
        in_place = reduces_in_place(plan, self, plan.num_micro_steps)
        # An unsharded gradient accumulates until it is reduced.
        dtype = plan.precision.of_gradient(self.dtype, plan.num_micro_steps if plan.keeps_unsharded_gradient else 1)
        yield BufferSpec(FLAT_GRADIENT, kind if in_place else BufferKind.SLOT, Tier.DEVICE, layout.total, dtype)
        alias, tier = FLAT_GRADIENT if in_place else None, self.residency.gradients
        dtype = plan.precision.of_reduced(self.dtype, plan.num_micro_steps, layout.num_shards)
        # A delayed step reads one gradient while the next one is copied to the host.
        for _ in range(2 if plan.delays_host and self.residency.offloads_states else 1):
            yield BufferSpec(REDUCED_GRADIENT, kind, tier, layout.shard_size, dtype, alias)
        if self.caches_gradient:
            yield BufferSpec(CACHED_GRADIENT, kind, Tier.DEVICE, layout.shard_size, dtype)
        if plan.feedback is not None:  # of each hop of a quantized reduction
            node_size = plan.node_size or 1
            numel = layout.total if node_size > 1 else 0
            numel += layout.total // node_size if layout.num_shards > node_size else 0
            for part in INT8.parts:
                yield BufferSpec(FEEDBACK, kind, Tier.DEVICE, part.numel(numel), part.dtype)

    def _step_buffers(self, plan: Plan, parameter: BufferSpec) -> Iterator[BufferSpec]:
        plain, states = (FormatPart(master_dtype(self.dtype)),), self.state_spec
        formats = {name: states.format_of(name) for name in states.names}
        numel = self.layout.shard_size if plan.shards_states else self.layout.total
        for name, format_ in ((MASTER, states.master), *formats.items()):
            kind = BufferKind.MASTER if name == MASTER else BufferKind.STATE
            for place, part in enumerate(plain if format_ is None else format_.parts):
                is_weight = name == MASTER and place == 0 and part.dtype == parameter.dtype
                alias = PARAMETER if is_weight and (self.master_is_shard or self.weight_is_part_of_master) else None
                yield BufferSpec(name, kind, self.residency.states, part.numel(numel), part.dtype, alias)
                if self.has_second_state:
                    yield BufferSpec(SECOND + name, kind, self.residency.states, part.numel(numel), part.dtype)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the master of a parameter: fp64 for fp64 parameters, otherwise fp32."""
    return torch.promote_types(dtype, torch.float32)


def stays_unsharded(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether a flat parameter is never resharded.

    This is the case if the plan replicates parameters, if it is persistent, or if sharding would save no memory.
    Experts that are divided are resharded in every stage.
    """
    if spec.num_expert_parts > 1:
        return False
    if not plan.shards_parameters or spec.persistent:
        return True
    if spec.layout.num_shards > 1 or spec.residency.parameters is not Tier.DEVICE or plan.shards_on_one_rank:
        return False
    return not (spec.master_is_shard and master_dtype(spec.dtype) != spec.dtype)


def gathers_in_fp8(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether a flat parameter is all-gathered in FP8 for its layers, which a part of divided experts is not."""
    gathers = plan.fp8 is not None and plan.fp8.gathers and spec.num_expert_parts == 1
    return gathers and spec.multiplies_in_fp8 and not stays_unsharded(plan, spec)


def gathered_bytes(plan: Plan, spec: FlatParamSpec) -> int:
    """Compute the bytes that an all-gather of a flat parameter fills."""
    return spec.used_layout.total if gathers_in_fp8(plan, spec) else spec.unsharded_bytes


def adopts_gradient(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether a gradient of autograd can be the flat gradient on a CPU, because it has the same layout."""
    layout = spec.used_layout
    return not plan.keeps_unsharded_gradient and len(layout.members) == 1 and layout.numel == layout.total


def receives_in_target(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether one of two CPU ranks receives the slice of the other in the reduced gradient, without a buffer."""
    num_ranks = spec.used_layout.num_shards
    if num_ranks != 2 or reduces_in_place(plan, spec, plan.num_micro_steps):
        return False
    reduced = plan.precision.of_reduced(spec.dtype, plan.num_micro_steps, num_ranks)
    if spec.residency.offloads_states:  # the host adds micro-steps
        reduced = master_dtype(reduced)
    elif plan.accumulates:
        return False
    wire = plan.precision.of_wire(spec.dtype)
    return reduced == wire or reduced.itemsize > wire.itemsize


def reduces_in_place(plan: Plan, spec: FlatParamSpec, num_micro_steps: int) -> bool:
    """Return whether the reduced gradient shard is a slice of the flat gradient, so that it needs no extra memory."""
    num_ranks = spec.used_layout.num_shards
    if spec.residency.offloads_states:
        return False
    if not plan.keeps_unsharded_gradient:
        return num_ranks == 1 and num_micro_steps == 1
    whole = plan.precision.of_gradient(spec.dtype, num_micro_steps)
    return whole == plan.precision.of_reduced(spec.dtype, num_micro_steps, num_ranks)
