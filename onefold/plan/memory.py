"""Bytes of model state per rank and tier, by arithmetic: what the runtime allocates is equal to this, to the byte.

And which flat parameter rests in which tier: the device is filled first, then the host, then the disks. Units are taken
in their order, so what stays on the device is used first: its forward runs while the host still steps the rest.
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
from onefold.plan.state_formats import SIGNED, SQUARES, FormatPart, StateFormat, StateFormats


@dataclass(frozen=True)
class Residency:
    """The tiers of a flat parameter: of masters, states and gradients, and of what a gather starts from."""

    states: Tier = Tier.DEVICE
    parameters: Tier = Tier.DEVICE
    apart: bool = False
    """The master is never gathered from below the device: the host may be stepping it."""

    @property
    def offloads_states(self) -> bool:
        return self.states is not Tier.DEVICE

    @property
    def gradients(self) -> Tier:
        """Reduced gradients wait where the step runs: the host steps what rests on the host or on a disk."""
        return Tier.HOST if self.offloads_states else Tier.DEVICE


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps beside each master of a group, by name, two tensors for Adam; none where only its class
    knows. `as_matrices`: it looks at whole matrices ([Note: whole matrices]). `by_own_class`: the user's class steps.
    """

    names: tuple[str, ...] = ()
    as_matrices: bool = False
    by_own_class: bool = False
    formats: tuple[StateFormat | None, ...] = ()
    """Of each name ([Note: state formats]), None for those in the dtype of the master; empty: none has one."""
    master: StateFormat | None = None

    def held_as(self, formats: StateFormats, parameter: str, dtype: torch.dtype, numel: int) -> StateSpec:
        """The same for a parameter of this name, dtype and size, in the forms that the config asks for."""
        chosen = tuple(formats.of_state(name, parameter, dtype, numel) for name in self.names)
        if self.as_matrices:  # a rule of the user's may call anything by these names
            chosen = tuple(SIGNED if each is SQUARES else each for each in chosen)
        return replace(self, formats=chosen if any(chosen) else (), master=formats.of_master(dtype))

    def format_of(self, name: str) -> StateFormat | None:
        return self.formats[self.names.index(name)] if self.formats else None


# In what matrices travel to their owners and back.
MATRIX_ITEMSIZE = 2


@dataclass(frozen=True)
class FlatParamSpec:
    """A flat parameter without tensors: its layout, dtype and treatment."""

    layout: Layout
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    packed: bool = False
    """Frozen values in a format of their own, as quantized weights are: gathered byte for byte, never cast."""
    residency: Residency = Residency()
    state_spec: StateSpec = StateSpec()
    given_to_device: bool = False
    """Where host and device step what rests below the device together: this is the device's."""

    @property
    def states(self) -> tuple[str, ...]:
        return self.state_spec.names

    @property
    def master_is_shard(self) -> bool:
        """Whether the master is what a gather starts from, so that no other copy is held: on the device it is cast on
        the way, elsewhere it must have the dtype, and the tier, that the parameters rest in.
        """
        if not self.trainable or self.state_spec.master is not None:
            return False
        same = master_dtype(self.dtype) == self.dtype and self.residency.states is self.residency.parameters
        return not self.residency.offloads_states or (same and not self.residency.apart)

    @property
    def weight_is_master(self) -> bool:
        """Whether the bf16 part of a master that has a form is the very tensor that computes, or that is gathered: both
        rest in one tier.
        """
        if not self.trainable or self.state_spec.master is None:
            return False
        apart = self.residency.apart and self.residency.offloads_states
        return self.residency.states is self.residency.parameters and not apart

    def parts_of_master(self) -> tuple[FormatPart, ...]:
        """What is held of a master beside the weights, where these are a part of it."""
        if self.state_spec.master is None:
            return (FormatPart(master_dtype(self.dtype)),)
        return self.state_spec.master.parts[1 if self.weight_is_master else 0 :]

    def parts_of_states(self) -> tuple[FormatPart, ...]:
        plain = FormatPart(master_dtype(self.dtype))
        formats = self.state_spec.formats or (None,) * len(self.state_spec.names)
        return tuple(part for each in formats for part in (each.parts if each is not None else (plain,)))


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one rank when backward ends. Where gradients are sharded by then, each open unit held a slot before;
    sharded parameters are at rest: their masters, or the shards of those that are not trained.
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
    """The plan's arithmetic, for one tier."""
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
                # One is stepped with while the next comes down.
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
    """Bytes of one rank beside its model state: what pools keep from step to step, on a CPU, and what the largest unit
    needs while it is in use: its parameters unsharded, and gradients as autograd makes them.
    """

    pools: int
    unit_in_use: int
    matrices: int = 0
    """Whole matrices in a step, at most: on their way, on their owner, and what the work on one of them needs."""

    @property
    def total(self) -> int:
        return self.pools + self.unit_in_use + self.matrices


def count_unit_in_use(units: Iterable[Sequence[FlatParamSpec]], plan: Plan) -> int:
    return max((sum(_bytes_in_use(spec, plan) for spec in specs) for specs in units), default=0)


def _bytes_in_use(spec: FlatParamSpec, plan: Plan) -> int:
    unsharded = spec.layout.total * spec.dtype.itemsize
    return unsharded * (int(spec.trainable) + int(not stays_unsharded(plan, spec)))


def count_buffers(reductions: Batches, refreshes: Batches, plan: Plan) -> int:
    """Bytes that pools keep on a CPU from step to step beside model state: whole gradients until they are reduced, of
    the batch that lands and of those in flight, and what comes from other ranks meanwhile. Pools grow to the most that
    is open at once. Batches of trained flat parameters, in the order of their reductions, and of steps.
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
        landed = [*arriving, *(after if plan.overlap else ())]
        open_at_once(
            each
            for specs, buffers in ((landed, _slots), (arriving, _inboxes))
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
    """Of a whole gradient, of as many micro-steps as add up before it is reduced."""
    return plan.precision.of_gradient(spec.dtype, plan.num_micro_steps if plan.keeps_whole_gradient else 1)


def _gathered(spec: FlatParamSpec, plan: Plan) -> Iterator[tuple[Hashable, int]]:
    layout = spec.layout
    if layout.num_shards > 1:
        dtype = plan.precision.of_reduced(spec.dtype, plan.num_micro_steps, layout.num_shards)
        yield (layout.total, dtype), layout.total * dtype.itemsize


def feedback_bytes(numel: int, num_ranks: int, node_size: int) -> int:
    """Of what each hop of a quantized reduction has lost: a byte a value, and a scale a block of 256."""
    values = (numel if node_size > 1 else 0) + (numel // node_size if num_ranks > node_size else 0)
    return values + values // 64


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The optimizer updates fp32, or fp64 where the parameter is fp64."""
    return torch.promote_types(dtype, torch.float32)


def stays_unsharded(plan: Plan, spec: FlatParamSpec) -> bool:
    """Whether it is unsharded at rest: as the plan says, if it is small, or if its shard is no smaller."""
    if not plan.shards_parameters or spec.persistent:
        return True
    if spec.layout.num_shards > 1 or spec.residency.parameters is not Tier.DEVICE or plan.shards_on_one_rank:
        return False
    return not (spec.master_is_shard and master_dtype(spec.dtype) != spec.dtype)


def reduces_in_place(plan: Plan, spec: FlatParamSpec, num_micro_steps: int) -> bool:
    """Whether the reduced shard lies in its own slice of the flat gradient, so that it costs no byte of its own."""
    num_ranks = spec.layout.num_shards
    if spec.residency.offloads_states:
        return False
    if not plan.keeps_whole_gradient:
        return num_ranks == 1 and num_micro_steps == 1
    whole = plan.precision.of_gradient(spec.dtype, num_micro_steps)
    return whole == plan.precision.of_reduced(spec.dtype, num_micro_steps, num_ranks)


class OffloadedStepSplit:
    """Which units the device steps and which the host, where what rests below the device is stepped by both at once.

    [Note: host and device step together]
    A host's step is bound by its memory, and states that pass through the device are bound by the bus. Together they
    are faster than either: 1.3B parameters on an H200 and 16 cores, 0.46 s a step instead of 0.53 and 0.61. Units take
    turns by their size, in the model's order, which is nearly that of the next forward. A device rounds differently
    from a host. So under the same keys who steps what depends on the cut into units and on what is trained alone: every
    stage, tier and number of ranks has the same bits.
    """

    # Of all trained elements, the device's.
    SHARE = 0.6

    def __init__(self) -> None:
        self._host = self._device = 0

    def assign(self, numel: int) -> bool:
        """Whether the next unit, of so many trained elements, is the device's."""
        is_devices = self._device * (1 - self.SHARE) < self._host * self.SHARE
        self._device += numel * is_devices
        self._host += numel * (not is_devices)
        return is_devices


def is_streamed(plan: Plan, spec: FlatParamSpec) -> bool:
    """Whether a GPU steps what rests below it ([Note: states streamed through the GPU])."""
    states = spec.state_spec
    if plan.delays_host or states.as_matrices or states.by_own_class or plan.offloaded_step == "host":
        return False
    if plan.offloaded_step == "device" or (plan.offloaded_step == "auto" and not plan.formats.are_plain):
        return True
    # A bus is several times slower with memory that is not page-locked.
    return spec.given_to_device and (plan.offload.is_pinned or plan.offloaded_step == "both")


def bytes_of_step(spec: FlatParamSpec) -> int:
    """What a step reads and writes of a shard: its master, with the weights in it, and its states."""
    weight = spec.state_spec.master.parts[:1] if spec.weight_is_master and spec.state_spec.master is not None else ()
    return _bytes_of([*weight, *spec.parts_of_master(), *spec.parts_of_states()], spec.layout.shard_size)


@dataclass(frozen=True)
class OffloadTraffic:
    """Bytes that one rank moves between tiers in one step: to the host and back, from disk and to it. `up` and `read`
    take each unit to be gathered once a forward and once a backward; what the program keeps unsharded saves a gather.
    """

    down: int
    up: int
    read: int
    written: int

    @property
    def any(self) -> bool:
        return bool(self.down or self.up or self.read or self.written)


def count_offload_traffic(
    specs: Iterable[FlatParamSpec], plan: Plan, num_micro_steps: int, *, device_casts: bool
) -> OffloadTraffic:
    """The plan's arithmetic of a step with so many micro-steps. `device_casts`: the device is a GPU. Shards on the host
    beside their masters take its cast: with the step where it steps them, else when they are gathered from the master.
    """
    down = up = read = written = 0
    for spec in specs:
        shard, residency = spec.layout.shard_size, spec.residency
        # What goes up of an updated value: the master, or the weight of one that has a form.
        held_as = spec.state_spec.master
        master = (held_as.parts[0].dtype if held_as is not None else master_dtype(spec.dtype)).itemsize
        unsharded = stays_unsharded(plan, spec)
        # With secondary shards only the first gather of a step starts below the device; those of frozen ones stay.
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
        if spec.state_spec.as_matrices:  # to the device, where they are worked on, and back
            up, down = up + shard * MATRIX_ITEMSIZE, down + shard * MATRIX_ITEMSIZE
        of_step = bytes_of_step(spec)
        on_host = not unsharded and residency.parameters is Tier.HOST
        is_held_twice = on_host and not (spec.master_is_shard or spec.weight_is_master)
        # After a step of the host's a shard is gathered from its fp32 master. A delayed step, and an optimizer of the
        # user's that steps all shards at once, write the shard themselves.
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
            # What a delayed step has made is read once more, when it is used.
            read += _bytes_of(spec.parts_of_master()[:1], shard) if plan.delays_host else 0
        if not unsharded and residency.parameters is Tier.NVME and not (spec.master_is_shard or spec.weight_is_master):
            written += shard * spec.dtype.itemsize
    return OffloadTraffic(down, up, read, written)


# -- which flat parameter rests in which tier -----------------------------------------------------------------------


def assign_tiers(
    specs: Sequence[FlatParamSpec], plan: Plan, *, device_bytes: int | None = None, host_bytes: int | None = None
) -> list[FlatParamSpec]:
    """The same flat parameters, each with its residency. `device_bytes` and `host_bytes`: what model state may take of
    these tiers where the config names no share (`ratio`); None: as much as it likes.
    """
    wanted, ratio = plan.states.tier, plan.offload.optimizer.ratio
    settled = list(specs)
    trained = [place for place, spec in enumerate(specs) if spec.trainable]
    if wanted is not Tier.DEVICE:
        below = Residency(Tier.HOST if ratio is None else wanted)
        for place in trained:
            settled[place] = replace(specs[place], residency=below)
        settled = [_with_parameters(spec, plan) for spec in settled]
        for place in _kept_on_device(settled, trained, plan, device_bytes):
            settled[place] = replace(specs[place], residency=Residency())
    left = [place for place in trained if settled[place].residency.offloads_states]
    if wanted is Tier.NVME and ratio is None:
        for place in reversed(left):  # what the host has no room for goes to disk, the last first
            if host_bytes is None or count_bytes(settled, plan, Tier.HOST).total <= host_bytes:
                break
            settled[place] = replace(settled[place], residency=Residency(Tier.NVME))
    elif wanted is Tier.NVME:
        spare = plan.offload.optimizer.max_in_cpu
        for place in left:
            spare -= specs[place].layout.shard_size
            if spare >= 0:
                settled[place] = replace(settled[place], residency=Residency(Tier.HOST))
    settled = [_with_parameters(spec, plan) for spec in settled]
    spare = plan.offload.param.max_in_cpu
    for place, spec in enumerate(settled):
        if spec.residency.parameters is Tier.NVME:
            spare -= spec.layout.shard_size
            if spare >= 0:
                settled[place] = replace(spec, residency=replace(spec.residency, parameters=Tier.HOST))
    return settled


def _kept_on_device(
    settled: list[FlatParamSpec], trained: list[int], plan: Plan, device_bytes: int | None
) -> list[int]:
    """The first ones, as far as the ratio or the device goes."""
    kept: list[int] = []
    ratio = plan.offload.optimizer.ratio
    if ratio is None:
        if device_bytes is None:
            return trained
        trial = list(settled)
        for place in trained:
            trial[place] = replace(trial[place], residency=Residency())
            bytes_ = count_bytes(trial, plan)
            if bytes_.total + 2 * bytes_.largest_slot > device_bytes:
                break
            kept.append(place)
        return kept
    total = sum(settled[place].layout.numel for place in trained)
    used = 0
    for place in trained:
        used += settled[place].layout.numel
        if used > (1 - ratio) * total:
            break
        kept.append(place)
    return kept


def _with_parameters(spec: FlatParamSpec, plan: Plan) -> FlatParamSpec:
    """What stays unsharded stays on the device, and so does what is cast from a master there: it is held once."""
    states, tier = spec.residency.states, plan.parameters.tier
    has_master_dtype = spec.trainable and master_dtype(spec.dtype) == spec.dtype
    if not plan.shards_parameters or spec.persistent or (spec.trainable and states is Tier.DEVICE):
        tier = Tier.DEVICE
    elif tier is Tier.NVME and states is Tier.HOST and has_master_dtype:
        tier = Tier.HOST  # the master there is what is gathered
    return replace(spec, residency=Residency(states, tier, apart=plan.delays_host))
