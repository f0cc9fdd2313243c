"""Planned bytes of model state and of other buffers per rank. They are equal to those that the runtime allocates."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from onefold.plan.buffers import (
    FLAT_GRADIENT,
    BufferKind,
    FlatParamSpec,
    adopts_gradient,
    gathered_bytes,
    gathers_in_fp8,
    receives_in_target,
    stays_unsharded,
)
from onefold.plan.plan import Plan, Tier
from onefold.plan.program import REDUCTIONS_IN_FLIGHT


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
    buffers = [buffer for spec in specs for buffer in spec.buffers(plan) if buffer.tier is tier]
    held: Counter[BufferKind] = Counter()
    for buffer in buffers:
        held[buffer.kind] += buffer.own_bytes
    return ModelBytes(
        parameters=held[BufferKind.PARAMETER],
        gradients=held[BufferKind.GRADIENT],
        masters=held[BufferKind.MASTER],
        states=held[BufferKind.STATE],
        largest_slot=max((buffer.num_bytes for buffer in buffers if buffer.kind is BufferKind.SLOT), default=0),
    )


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
    """Compute the bytes of the largest unit while it is in use.

    If the model is captured in one CUDA graph, all units are in use: their gradients stay in the memory of the graph.
    """
    units = list(units)

    def in_use(spec: FlatParamSpec) -> int:
        unsharded = 0 if stays_unsharded(plan, spec) else gathered_bytes(plan, spec)
        if gathers_in_fp8(plan, spec):  # backward transposes one weight at a time
            unsharded += max(member.stop - member.start for member in spec.layout.members)
        return unsharded + spec.unsharded_bytes * int(spec.trainable)

    of_units = [sum(map(in_use, specs)) for specs in units]
    return sum(of_units) if _captures_model(units, plan) else max(of_units, default=0)


def _captures_model(units: Iterable[Sequence[FlatParamSpec]], plan: Plan) -> bool:
    """Return whether the model is captured as a whole, if it can be."""
    scope, specs = plan.activations.cuda_graphs, [spec for some in units for spec in some]
    if scope == "on":
        alone = plan.num_shards == plan.num_replicas == 1
        return alone and all(stays_unsharded(plan, spec) and not spec.residency.offloads_states for spec in specs)
    return scope == "model"


def count_buffers(reductions: Batches, refreshes: Batches, plan: Plan) -> int:
    """Compute the bytes that pools retain on a CPU rank from step to step, in addition to model state.

    Pools grow to the largest number of buffers in use at once: the unsharded gradients of the batch that backward
    computes and of the reductions in flight, and the data that those reductions receive. Gradients that are reduced
    where autograd created them, and data that is received in the reduced gradient, are not in a pool.
    `reductions` and `refreshes` are batches of trained flat parameters, in the order of their reductions and of the
    all-gathers after a step.
    """
    most: Counter[Hashable] = Counter()
    in_flight: deque[Sequence[FlatParamSpec]] = deque()
    for batch, after in zip_longest(reductions, reductions[1:], fillvalue=()):
        while len(in_flight) >= (REDUCTIONS_IN_FLIGHT if plan.overlap else 1):
            in_flight.popleft()
        while (
            in_flight
            and sum(spec.used_layout.total for some in (*in_flight, batch) for spec in some) > plan.reduce_bucket
        ):
            in_flight.popleft()
        in_flight.append(batch)
        arriving = [spec for some in in_flight for spec in some]
        computed = [*arriving, *(after if plan.overlap else ())]
        slots = (_slots(spec, plan) for spec in computed)
        most |= _sum_by_key(chain(*slots, *(_inboxes(spec, plan) for spec in arriving)))
    if not plan.shards_states:  # reduced gradients are gathered one batch ahead
        for batch, after in zip_longest(refreshes, refreshes[1:], fillvalue=()):
            most |= _sum_by_key(chain(*(_gathered(spec, plan) for spec in (*batch, *after))))
    return sum(most.values())


# The key in its pool, and the bytes, of each buffer.
PoolBuffers = Iterator[tuple[Hashable, int]]


def _sum_by_key(found: PoolBuffers) -> Counter[Hashable]:
    counted: Counter[Hashable] = Counter()
    for key, num_bytes in found:
        counted[key] += num_bytes
    return counted


def _slots(spec: FlatParamSpec, plan: Plan) -> PoolBuffers:
    for buffer in spec.buffers(plan):
        if buffer.kind is BufferKind.SLOT and not adopts_gradient(plan, spec):
            yield (buffer.numel, buffer.dtype, spec.used_layout.shape_key), buffer.num_bytes


def _inboxes(spec: FlatParamSpec, plan: Plan) -> PoolBuffers:
    layout, wire = spec.used_layout, plan.precision.of_wire(spec.dtype)
    if layout.num_shards > 1:
        received = layout.shard_size * (layout.num_shards - 1)
        if not receives_in_target(plan, spec):
            yield ("received", received, wire), received * wire.itemsize
        if any(buffer.name == FLAT_GRADIENT and buffer.dtype != wire for buffer in spec.buffers(plan)):
            yield ("cast", layout.total, wire), layout.total * wire.itemsize


def _gathered(spec: FlatParamSpec, plan: Plan) -> PoolBuffers:
    total, num_shards = spec.layout.total, spec.layout.num_shards
    if num_shards > 1:
        dtype = plan.precision.of_reduced(spec.dtype, plan.num_micro_steps, num_shards)
        yield (total, dtype), total * dtype.itemsize
