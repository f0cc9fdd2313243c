"""Bytes of model state per rank and tier, by arithmetic: what the runtime allocates is equal to this, to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from onefold.plan.layout import Layout
from onefold.plan.table import Plan, Precision, Tier


@dataclass(frozen=True)
class Rest:
    """Where a run rests: its masters, states and reduced gradients; and what a gather of its parameters starts from."""

    states: Tier = Tier.DEVICE
    parameters: Tier = Tier.DEVICE
    apart: bool = False
    """The master is never gathered from below the device: the host may be stepping it."""

    @property
    def offloads_states(self) -> bool:
        return self.states is not Tier.DEVICE


@dataclass(frozen=True)
class RunShape:
    """What the arithmetic needs to know of a run."""

    layout: Layout
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    rest: Rest = Rest()

    @property
    def master_is_shard(self) -> bool:
        """Whether the master is what a gather starts from, so that no other copy is held: on the device it is cast on
        the way, elsewhere it must have the dtype, and the tier, that the parameters rest in.
        """
        if not self.trainable:
            return False
        same = master_dtype(self.dtype) == self.dtype and self.rest.states is self.rest.parameters
        return not self.rest.offloads_states or (same and not self.rest.apart)


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


@dataclass(frozen=True)
class Counting:
    """What bytes depend on beside the runs. `num_states`: tensors the optimizer keeps per parameter (2 for Adam)."""

    plan: Plan
    precision: Precision
    world_size: int
    num_micro_steps: int
    num_states: int
    node_size: int = 1


def count_bytes(runs: Iterable[RunShape], counting: Counting, tier: Tier = Tier.DEVICE) -> ModelBytes:
    """The plan's arithmetic, for one tier."""
    parameters = gradients = masters = states = largest_slot = 0
    plan, precision, num_micro_steps = counting.plan, counting.precision, counting.num_micro_steps
    for run in runs:
        whole = rests_whole(plan, run, counting.world_size)
        if whole and tier is Tier.DEVICE:
            parameters += run.layout.total * run.dtype.itemsize
        elif not whole and run.rest.parameters is tier and not run.master_is_shard:
            parameters += run.layout.shard_size * run.dtype.itemsize
        if not whole and tier is Tier.DEVICE and plan.node_shard_size > 1:
            parameters += run.layout.total // plan.node_shard_size * run.dtype.itemsize
        if not run.trainable:
            continue
        reduced = precision.of_reduced(run.dtype, num_micro_steps, counting.world_size)
        in_place = reduces_in_place(plan, run, precision, counting.world_size, num_micro_steps)
        if tier is Tier.DEVICE and not in_place:
            largest_slot = max(largest_slot, run.layout.total * run.dtype.itemsize)
        if tier is Tier.DEVICE and plan.makes_up:
            gradients += lost_bytes(run.layout.total, counting.world_size, counting.node_size)
        if tier is gradient_tier(run.rest):
            if in_place:
                gradients += run.layout.total * precision.of_gradient(run.dtype, num_micro_steps).itemsize
            else:
                # One is stepped with while the next comes down.
                num = 2 if plan.delays_host and run.rest.offloads_states else 1
                gradients += run.layout.shard_size * reduced.itemsize * num
        if tier is run.rest.states:
            stepped = run.layout.shard_size if plan.shards_states else run.layout.total
            master = master_dtype(run.dtype)
            is_line = whole and master == run.dtype and not run.rest.offloads_states
            masters += 0 if is_line else stepped * master.itemsize
            states += stepped * master.itemsize * counting.num_states
    return ModelBytes(parameters, gradients, masters, states, largest_slot)


def lost_bytes(numel: int, world_size: int, node_size: int) -> int:
    """Of what each hop of a quantized reduction has lost: a byte a value, and a scale a block of 256."""
    values = (numel if node_size > 1 else 0) + (numel // node_size if world_size > node_size else 0)
    return values + values // 64


def gradient_tier(rest: Rest) -> Tier:
    """Reduced gradients wait where the step runs: the host steps what rests on the host and what rests on a disk."""
    return Tier.HOST if rest.offloads_states else Tier.DEVICE


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The optimizer updates fp32, or fp64 where the parameter is fp64."""
    return torch.promote_types(dtype, torch.float32)


def rests_whole(plan: Plan, run: RunShape, world_size: int) -> bool:
    """Whether a run is whole at rest: as the plan says, if it is small, or where its resting form is no smaller."""
    if not plan.shards_parameters or run.persistent:
        return True
    if world_size > 1 or run.rest.parameters is not Tier.DEVICE:
        return False
    casts_from_master = run.trainable and not run.rest.offloads_states and master_dtype(run.dtype) != run.dtype
    return not casts_from_master


def reduces_in_place(plan: Plan, run: RunShape, precision: Precision, world_size: int, num_micro_steps: int) -> bool:
    """Whether the reduced shard lies in its own slice of the whole gradient, so that it costs no byte of its own."""
    if run.rest.offloads_states:
        return False
    if not plan.keeps_whole_gradient:
        return world_size == 1 and num_micro_steps == 1
    whole = precision.of_gradient(run.dtype, num_micro_steps)
    return whole == precision.of_reduced(run.dtype, num_micro_steps, world_size)


@dataclass(frozen=True)
class Crossing:
    """Bytes that one rank moves between tiers in one step: to the host and back, from disk and to it. `up` and `read`
    take each unit to be gathered once a forward and once a backward; those that the program keeps whole save a gather.
    """

    down: int
    up: int
    read: int
    written: int

    @property
    def any(self) -> bool:
        return bool(self.down or self.up or self.read or self.written)


def count_crossing(
    runs: Iterable[RunShape], counting: Counting, num_micro_steps: int, *, device_casts: bool
) -> Crossing:
    """The plan's arithmetic of a step with so many micro-steps. `device_casts`: shards on the host beside their masters
    take a GPU's cast of them, which is gathered from the master then.
    """
    down = up = read = written = 0
    for run in runs:
        shard, master = run.layout.shard_size, master_dtype(run.dtype).itemsize
        whole = rests_whole(counting.plan, run, counting.world_size)
        # With second shards only the first gather of a step starts below the device; those of frozen runs stay.
        gathers = (1 if run.trainable else 0) if counting.plan.node_shard_size > 1 else 2 * num_micro_steps
        below = not whole and run.rest.parameters is not Tier.DEVICE
        gathered = gathers * shard * run.dtype.itemsize if below else 0
        up += gathered
        read += gathered if run.rest.parameters is Tier.NVME else 0
        if not run.trainable or not run.rest.offloads_states:
            continue
        # One micro-step of one rank is exact in its own dtype; sums over ranks are not.
        travels = counting.precision.of_reduced(run.dtype, 1, counting.world_size)
        down += num_micro_steps * shard * travels.itemsize
        up += shard * master if whole or run.rest.parameters is Tier.DEVICE else 0
        if run.rest.states is run.rest.parameters is Tier.HOST and device_casts and not run.master_is_shard:
            up += shard * (master - run.dtype.itemsize)
            down += shard * run.dtype.itemsize
        if run.rest.states is Tier.NVME:
            read += shard * master * (1 + counting.num_states)
            written += shard * master * (1 + counting.num_states)
        if not whole and run.rest.parameters is Tier.NVME and not run.master_is_shard:
            written += shard * run.dtype.itemsize
    return Crossing(down, up, read, written)
