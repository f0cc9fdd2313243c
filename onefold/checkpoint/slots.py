"""What this rank keeps of a model and its optimizer, as stretches of named tensors: what it saves, and looks for again.

Weights are `model/NAME`, in the precision they rest in (the fp32 master of what is trained); optimizer states are
`optimizer/NAME/STATE`. Names, shapes and values know nothing of ranks, units or stages, so that any plan reads any
other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.shards import Slot
from onefold.checkpoint.weights import Contents
from onefold.optim.sharded import ShardedOptimizer
from onefold.plan.layout import Layout, Member
from onefold.runtime import Run, Unit, home_of
from onefold.tier.lower import Flat


def own_slots(units: Sequence[Unit], optimizer: ShardedOptimizer | None, *, exclude_frozen: bool) -> Iterator[Slot]:
    """What this rank writes: its own range of every run, whatever else it holds."""
    for run in (run for unit in units for run in unit.runs):
        if run.trainable or not exclude_frozen:
            yield from weight_slots(run, optimizer, *run.own_range)
            yield from state_slots(run, optimizer, *run.own_range)


def needed_range(run: Run, optimizer: ShardedOptimizer | None) -> tuple[int, int]:
    """What this rank reads of a run's line: what it steps. The rest of a line that rests whole comes from others."""
    if run.trainable and optimizer is not None:
        piece = optimizer.piece_of(run)
        return piece.start, piece.stop
    return run.own_range


def weight_slots(run: Run, optimizer: ShardedOptimizer | None, start: int, stop: int) -> Iterator[Slot]:
    if run.trainable and optimizer is not None:
        piece = optimizer.piece_of(run)
        memory: Flat = piece.master
        first = piece.start
    elif run.shard is not None:
        memory, first = run.shard, run.own_range[0]
    else:
        memory, first = run.full, 0
    for member, low, high in stretches(run.layout, start, stop):
        yield _slot(f"model/{member.name}", member, low, high, memory, first)


def state_slots(run: Run, optimizer: ShardedOptimizer | None, start: int, stop: int) -> Iterator[Slot]:
    if not run.trainable or optimizer is None:
        return
    piece = optimizer.piece_of(run)
    for state in optimizer.held_states(piece):
        first = piece.start + state.start
        for member, low, high in stretches(run.layout, max(start, first), min(stop, first + state.memory.numel())):
            yield _slot(f"optimizer/{member.name}/{state.name}", member, low, high, state.memory, first)


def stretches(layout: Layout, start: int, stop: int) -> Iterator[tuple[Member, int, int]]:
    """The parameters in [start, stop) of a line, and where. One without elements is the first rank's."""
    for member in layout.members:
        low, high = max(start, member.start), min(stop, member.stop)
        if low < high or (member.start == member.stop and start == 0):
            yield member, low, max(low, high)


def _slot(name: str, member: Member, low: int, high: int, memory: Flat, first: int) -> Slot:
    return Slot(name, member.shape, low - member.start, high - member.start, memory[low - first : high - first])


def outside_runs(model: nn.Module, *, exclude_frozen: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Buffers, and parameters that are left alone, by name; and the other names of everything that is tied."""
    contents = Contents.of(model, exclude_frozen=exclude_frozen)
    return {name: tensor for name, tensor in contents.tensors.items() if home_of(tensor) is None}, contents.aliases


def groups_of(units: Sequence[Unit]) -> dict[str, int | None]:
    """Every parameter and its optimizer group, None where it is not trained."""
    return {
        member.name: member.group if run.trainable else None
        for unit in units
        for run in unit.runs
        for member in run.layout.members
    }


def loose_states(units: Sequence[Unit], optimizer: ShardedOptimizer | None) -> dict[str, dict[str, Any]]:
    """States that do not lie along a parameter (step counts, factored moments), by parameter and name."""
    found: dict[str, dict[str, Any]] = {}
    for run in (run for unit in units for run in unit.trained) if optimizer is not None else ():
        assert optimizer is not None
        piece = optimizer.piece_of(run)
        for start, stop, values in optimizer.loose_states(piece):
            for member, _, _ in stretches(run.layout, piece.start + start, piece.start + stop):
                found.setdefault(member.name, {}).update(values)
    return found
