"""Bytes of model state per rank, by arithmetic: what the runtime allocates is equal to this, to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from onefold.plan.layout import Layout
from onefold.plan.table import Plan, Precision


@dataclass(frozen=True)
class RunShape:
    """What the arithmetic needs to know of a run."""

    layout: Layout
    dtype: torch.dtype
    trainable: bool
    persistent: bool


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


def count_bytes(
    runs: Iterable[RunShape],
    plan: Plan,
    precision: Precision,
    *,
    world_size: int,
    num_micro_steps: int,
    num_states: int,
) -> ModelBytes:
    """The plan's arithmetic. `num_states`: tensors the optimizer keeps per parameter (2 for Adam)."""
    parameters = gradients = masters = states = largest_slot = 0
    for run in runs:
        whole = rests_whole(plan, run.dtype, trainable=run.trainable, persistent=run.persistent, world_size=world_size)
        if whole:
            parameters += run.layout.total * run.dtype.itemsize
        elif not run.trainable:
            parameters += run.layout.shard_size * run.dtype.itemsize
        if not run.trainable:
            continue
        if reduces_in_place(plan, run.dtype, precision, world_size, num_micro_steps):
            gradients += run.layout.total * precision.of_gradient(run.dtype, num_micro_steps).itemsize
        else:
            gradients += run.layout.shard_size * precision.of_reduced(run.dtype, num_micro_steps, world_size).itemsize
            largest_slot = max(largest_slot, run.layout.total * run.dtype.itemsize)
        stepped = run.layout.shard_size if plan.shards_states else run.layout.total
        master = master_dtype(run.dtype)
        masters += 0 if whole and master == run.dtype else stepped * master.itemsize
        states += stepped * master.itemsize * num_states
    return ModelBytes(parameters, gradients, masters, states, largest_slot)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The optimizer updates fp32, or fp64 where the parameter is fp64."""
    return torch.promote_types(dtype, torch.float32)


def rests_whole(plan: Plan, dtype: torch.dtype, *, trainable: bool, persistent: bool, world_size: int) -> bool:
    """Whether a run is whole at rest: as the plan says, if it is small, or where its resting form is no smaller."""
    if not plan.shards_parameters or persistent:
        return True
    return world_size == 1 and not (trainable and master_dtype(dtype) != dtype)


def reduces_in_place(
    plan: Plan, dtype: torch.dtype, precision: Precision, world_size: int, num_micro_steps: int
) -> bool:
    """Whether the reduced shard lies in its own slice of the whole gradient, so that it costs no byte of its own."""
    if not plan.keeps_whole_gradient:
        return False
    whole = precision.of_gradient(dtype, num_micro_steps)
    return whole == precision.of_reduced(dtype, num_micro_steps, world_size)
