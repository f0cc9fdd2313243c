"""Bytes of model state and host-device traffic per rank and tier, computed from the plan.

The computed bytes are equal to those that the runtime allocates and copies.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from onefold.plan.layout import Layout
from onefold.plan.plan import Plan, Tier
from onefold.plan.program import REDUCTIONS_IN_FLIGHT
from onefold.plan.state_formats import INT8, INT8_SQUARES, FormatPart, StateFormat, StateFormats


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
    """The format of each state ([Note: formats of states]); None is the dtype of the master. Empty: all are None."""
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


# Bytes per element of the matrices that are sent to their owners and back.
MATRIX_ITEMSIZE = 2


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

    @property
    def states(self) -> tuple[str, ...]:
        return self.state_spec.names

    @property
    def master_is_shard(self) -> bool:
        """Whether the master is the source of the all-gather, so that there is no separate parameter shard.

        A master on the device is cast before the all-gather. An offloaded one must match the parameters in dtype and
        tier.
        """
        if not self.trainable or self.state_spec.master is not None:
            return False
        same = master_dtype(self.dtype) == self.dtype and self.residency.states is self.residency.parameters
        return not self.residency.offloads_states or (same and not self.residency.apart)

    @property
    def weight_is_master(self) -> bool:
        """Whether the bf16 part of a split master is the model weight, or the parameter shard.

        This requires both to be stored in the same tier.
        """
        if not self.trainable or self.state_spec.master is None:
            return False
        apart = self.residency.apart and self.residency.offloads_states
        return self.residency.states is self.residency.parameters and not apart

    def parts_of_master(self) -> tuple[FormatPart, ...]:
        """Return the tensors of a master, without the bf16 part if that is the model weight."""
        if self.state_spec.master is None:
            return (FormatPart(master_dtype(self.dtype)),)
        return self.state_spec.master.parts[1 if self.weight_is_master else 0 :]

    def parts_of_states(self) -> tuple[FormatPart, ...]:
        """Return the tensors of all optimizer states."""
        plain = FormatPart(master_dtype(self.dtype))
        formats = self.state_spec.formats or (None,) * len(self.state_spec.names)
        return tuple(part for each in formats for part in (each.parts if each is not None else (plain,)))


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of model state on one rank at the end of backward, when sharded parameters are resharded.

    `largest_slot` is the largest buffer that a unit needs during backward for its unsharded gradient.
    """

    parameters: int
    gradients: int
    masters: int
    states: int
    largest_slot: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.masters + self.states


def count_bytes(specs: Iterable[FlatParamSpec], plan: Plan, tier: Tier = Tier.DEVICE) -> ModelBytes:
    """Compute the bytes of model state of one rank in one tier."""
    parameters = gradients = masters = states = largest_slot = 0
    precision, num_micro_steps = plan.precision, plan.num_micro_steps
    for spec in specs:
        layout, residency = spec.layout, spec.residency
        unsharded = stays_unsharded(plan, spec)
        if unsharded and tier is Tier.DEVICE:
            parameters += layout.total * spec.dtype.itemsize
        elif not unsharded and residency.parameters is tier and not spec.master_is_shard:
            parameters += layout.shard_size * spec.dtype.itemsize
        if not unsharded and tier is Tier.DEVICE and plan.node_shard_size > 1:
            parameters += layout.total // plan.node_shard_size * spec.dtype.itemsize
        if not spec.trainable:
            continue
        reduced = precision.of_reduced(spec.dtype, num_micro_steps, layout.num_shards)
        in_place = reduces_in_place(plan, spec, num_micro_steps)
        if tier is Tier.DEVICE and not in_place:
            largest_slot = max(largest_slot, layout.total * spec.dtype.itemsize)
        if tier is Tier.DEVICE and plan.feedback is not None:
            gradients += feedback_bytes(layout.total, layout.num_shards, plan.node_size or 1)
        if tier is residency.gradients:
            if in_place:
                gradients += layout.total * precision.of_gradient(spec.dtype, num_micro_steps).itemsize
            else:
                # A delayed step reads one gradient while the next one is copied to the host.
                num = 2 if plan.delays_host and residency.offloads_states else 1
                gradients += layout.shard_size * reduced.itemsize * num
        if tier is residency.states:
            stepped = layout.shard_size if plan.shards_states else layout.total
            is_slice = unsharded and master_dtype(spec.dtype) == spec.dtype and not residency.offloads_states
            masters += 0 if is_slice else _bytes_of(spec.parts_of_master(), stepped)
            states += _bytes_of(spec.parts_of_states(), stepped)
    return ModelBytes(parameters, gradients, masters, states, largest_slot)


def _bytes_of(parts: Iterable[FormatPart], num_values: int) -> int:
    return sum(part.numel(num_values) * part.dtype.itemsize for part in parts)


Batches = Sequence[Sequence[FlatParamSpec]]


@dataclass(frozen=True)
class BufferBytes:
    """Bytes of one rank in addition to its model state, without activations."""

    pools: int
    """Buffers that pools retain from step to step, on CPU ranks."""
    unit_in_use: int
    """The largest unit in use: its unsharded parameters, and the gradients that autograd creates."""
    matrices: int = 0
    """The peak of whole matrices in a step: in flight, on their owner, and the workspace of one of them."""

    @property
    def total(self) -> int:
        return self.pools + self.unit_in_use + self.matrices


def count_unit_in_use(units: Iterable[Sequence[FlatParamSpec]], plan: Plan) -> int:
    """Compute the bytes of the largest unit while it is in use."""
    return max((sum(_bytes_in_use(spec, plan) for spec in specs) for specs in units), default=0)


def _bytes_in_use(spec: FlatParamSpec, plan: Plan) -> int:
    unsharded = spec.layout.total * spec.dtype.itemsize
    return unsharded * (int(spec.trainable) + int(not stays_unsharded(plan, spec)))


def count_buffers(reductions: Batches, refreshes: Batches, plan: Plan) -> int:
    """Compute the bytes that pools retain on a CPU rank from step to step, in addition to model state.

    Pools grow to the largest number of buffers in use at once: the unsharded gradients of the batch that backward
    computes and of the reductions in flight, and the data that those reductions receive. `reductions` and `refreshes`
    are batches of trained flat parameters, in the order of their reductions and of the all-gathers after a step.
    """
    most: Counter[Hashable] = Counter()

    def open_at_once(found: Iterable[tuple[Hashable, int]]) -> None:
        counted: Counter[Hashable] = Counter()
        for key, num_bytes in found:
            counted[key] += num_bytes
        most.update({key: num - most[key] for key, num in counted.items() if num > most[key]})

    in_flight: deque[Sequence[FlatParamSpec]] = deque()
    for batch, after in zip_longest(reductions, reductions[1:], fillvalue=()):
        while len(in_flight) >= (REDUCTIONS_IN_FLIGHT if plan.overlap else 1):
            in_flight.popleft()
        while (
            in_flight and sum(spec.layout.total for some in (*in_flight, batch) for spec in some) > plan.reduce_bucket
        ):
            in_flight.popleft()
        in_flight.append(batch)
        arriving = [spec for some in in_flight for spec in some]
        computed = [*arriving, *(after if plan.overlap else ())]
        open_at_once(
            each
            for specs, buffers in ((computed, _slots), (arriving, _inboxes))
            for spec in specs
            for each in buffers(spec, plan)
        )
    if not plan.shards_states:  # reduced gradients are gathered one batch ahead
        for pair in zip_longest(refreshes, refreshes[1:], fillvalue=()):
            open_at_once(each for batch in pair for spec in batch for each in _gathered(spec, plan))
    return sum(most.values())


def _slots(spec: FlatParamSpec, plan: Plan) -> Iterator[tuple[Hashable, int]]:
    layout, dtype = spec.layout, _slot_dtype(spec, plan)
    if not reduces_in_place(plan, spec, plan.num_micro_steps):
        yield (layout.total, dtype, layout.shape_key), layout.total * dtype.itemsize


def _inboxes(spec: FlatParamSpec, plan: Plan) -> Iterator[tuple[Hashable, int]]:
    layout, wire = spec.layout, plan.precision.of_wire(spec.dtype)
    if layout.num_shards == 1:
        return
    received = layout.shard_size * (layout.num_shards - 1)
    yield ("received", received, wire), received * wire.itemsize
    if wire != _slot_dtype(spec, plan):
        yield ("cast", layout.total, wire), layout.total * wire.itemsize


def _slot_dtype(spec: FlatParamSpec, plan: Plan) -> torch.dtype:
    """Return the dtype of an unsharded gradient, which accumulates until it is reduced."""
    return plan.precision.of_gradient(spec.dtype, plan.num_micro_steps if plan.keeps_unsharded_gradient else 1)


def _gathered(spec: FlatParamSpec, plan: Plan) -> Iterator[tuple[Hashable, int]]:
    layout = spec.layout
    if layout.num_shards > 1:
        dtype = plan.precision.of_reduced(spec.dtype, plan.num_micro_steps, layout.num_shards)
        yield (layout.total, dtype), layout.total * dtype.itemsize


def feedback_bytes(numel: int, num_ranks: int, node_size: int) -> int:
    """Compute the bytes of error feedback: for each hop, one byte per value and an fp32 scale per block of 256."""
    values = (numel if node_size > 1 else 0) + (numel // node_size if num_ranks > node_size else 0)
    return values + values // 64


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the master of a parameter: fp64 for fp64 parameters, otherwise fp32."""
    return torch.promote_types(dtype, torch.float32)


def stays_unsharded(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether a flat parameter stays unsharded between uses.

    This is the case if the plan replicates parameters, if it is persistent, or if sharding would save no memory.
    """
    if not plan.shards_parameters or spec.persistent:
        return True
    if spec.layout.num_shards > 1 or spec.residency.parameters is not Tier.DEVICE or plan.shards_on_one_rank:
        return False
    return not (spec.master_is_shard and master_dtype(spec.dtype) != spec.dtype)


def reduces_in_place(plan: Plan, spec: FlatParamSpec, num_micro_steps: int) -> bool:
    """Return whether the reduced gradient shard is a slice of the flat gradient, so that it needs no extra memory."""
    num_ranks = spec.layout.num_shards
    if spec.residency.offloads_states:
        return False
    if not plan.keeps_unsharded_gradient:
        return num_ranks == 1 and num_micro_steps == 1
    whole = plan.precision.of_gradient(spec.dtype, num_micro_steps)
    return whole == plan.precision.of_reduced(spec.dtype, num_micro_steps, num_ranks)


class OffloadedStepSplit:
    """Splits the step of offloaded units between the host and the GPU.

    [Note: host and device step together]
    A step on the host is bound by its memory bandwidth, and streaming states through the GPU is bound by the bus. Both
    together are faster than either: 0.46 s a step for 1.3B parameters on an H200 and 16 cores, instead of 0.53 and
    0.61 s. Units are assigned by their size, in model order, which is close to the order of the next forward. The GPU
    rounds differently from the host, so under the same config the split depends only on the units and on the trained
    parameters. Results are then bit-equal for every stage, tier and number of ranks.
    """

    # The fraction of all trained elements that the GPU steps.
    SHARE = 0.6

    def __init__(self) -> None:
        self._host = self._device = 0

    def assign(self, numel: int) -> bool:
        """Assign the next unit, which has `numel` trained elements. Return True if the GPU steps it."""
        is_devices = self._device * (1 - self.SHARE) < self._host * self.SHARE
        self._device += numel * is_devices
        self._host += numel * (not is_devices)
        return is_devices


def is_streamed(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether the offloaded states of a flat parameter are streamed through the GPU for the step.

    See [Note: states streamed through the GPU].
    """
    states = spec.state_spec
    if plan.delays_host or states.as_matrices or states.by_own_class or plan.offloaded_step == "host":
        return False
    if plan.offloaded_step == "device" or (plan.offloaded_step == "auto" and not plan.formats.are_plain):
        return True
    # Copies are several times slower from memory that is not page-locked.
    return spec.given_to_device and (plan.offload.is_pinned or plan.offloaded_step == "both")


def bytes_of_step(spec: FlatParamSpec) -> int:
    """Compute the bytes of a shard that a step reads and writes: its master, including its weights, and its states."""
    weight = spec.state_spec.master.parts[:1] if spec.weight_is_master and spec.state_spec.master is not None else ()
    return _bytes_of([*weight, *spec.parts_of_master(), *spec.parts_of_states()], spec.layout.shard_size)


@dataclass(frozen=True)
class OffloadTraffic:
    """Bytes that one rank copies between tiers in one step.

    `up` and `read` count one all-gather of each unit per forward and one per backward. Units that the program leaves
    unsharded between two uses need fewer.
    """

    down: int
    """Bytes copied from the device to the host."""
    up: int
    """Bytes copied from the host to the device."""
    read: int
    """Bytes read from disk."""
    written: int
    """Bytes written to disk."""

    @property
    def any(self) -> bool:
        return bool(self.down or self.up or self.read or self.written)


def count_offload_traffic(
    specs: Iterable[FlatParamSpec], plan: Plan, num_micro_steps: int, *, device_casts: bool
) -> OffloadTraffic:
    """Compute the bytes that a step of `num_micro_steps` micro-steps copies between tiers.

    `device_casts` is True if the device is a GPU, which then casts fp32 masters to the parameter shards of the host:
    in the step if it is streamed through the GPU, otherwise when the master is gathered for the first time.
    """
    down = up = read = written = 0
    for spec in specs:
        shard, residency = spec.layout.shard_size, spec.residency
        # Bytes per updated value that are copied to the device: the master, or the bf16 part of a split one.
        held_as = spec.state_spec.master
        master = (held_as.parts[0].dtype if held_as is not None else master_dtype(spec.dtype)).itemsize
        unsharded = stays_unsharded(plan, spec)
        # With secondary shards only the first all-gather of a step reads the offloaded shard. Secondary shards of
        # frozen parameters remain valid.
        gathers = (1 if spec.trainable else 0) if plan.node_shard_size > 1 else 2 * num_micro_steps
        below = not unsharded and residency.parameters is not Tier.DEVICE
        gathered = gathers * shard * spec.dtype.itemsize if below else 0
        up += gathered
        read += gathered if residency.parameters is Tier.NVME else 0
        if not spec.trainable or not residency.offloads_states:
            continue
        # One micro-step of one rank is exact in its own dtype; sums over ranks are not.
        travels = plan.precision.of_reduced(spec.dtype, 1, spec.layout.num_shards)
        down += num_micro_steps * shard * travels.itemsize
        if spec.state_spec.as_matrices:  # copied to the device for the update, and back
            up, down = up + shard * MATRIX_ITEMSIZE, down + shard * MATRIX_ITEMSIZE
        of_step = bytes_of_step(spec)
        on_host = not unsharded and residency.parameters is Tier.HOST
        is_held_twice = on_host and not (spec.master_is_shard or spec.weight_is_master)
        # After a step on the host a shard is gathered from its fp32 master. A delayed step, and a user-defined
        # optimizer that steps all shards at once, write the parameter shard themselves.
        writes_shard = plan.delays_host or (spec.state_spec.by_own_class and plan.states.tier is not Tier.NVME)
        casts_later = residency.states is Tier.HOST and spec.state_spec.master is None and not writes_shard
        if device_casts and is_streamed(plan, spec):
            held = plan.precision.of_reduced(spec.dtype, plan.num_micro_steps, spec.layout.num_shards)
            up, down = up + of_step + shard * held.itemsize, down + of_step
            down += shard * spec.dtype.itemsize if is_held_twice else 0
        elif unsharded or residency.parameters is Tier.DEVICE:
            up += shard * master
        elif device_casts and is_held_twice and casts_later:
            up += shard * (master - spec.dtype.itemsize)
            down += shard * spec.dtype.itemsize
        if residency.states is Tier.NVME:
            read, written = read + of_step, written + of_step
            # The masters that a delayed step updated are read again when they are used.
            read += _bytes_of(spec.parts_of_master()[:1], shard) if plan.delays_host else 0
        if not unsharded and residency.parameters is Tier.NVME and not (spec.master_is_shard or spec.weight_is_master):
            written += shard * spec.dtype.itemsize
    return OffloadTraffic(down, up, read, written)
