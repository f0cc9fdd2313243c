"""The slots of a rank: its ranges of the named tensors of a model and its optimizer.

Weights are named `model/NAME`; for trained parameters, they are the fp32 master weights.
Optimizer states are named `optimizer/NAME/STATE`. Names, shapes and values are independent of ranks, units and stages,
so a checkpoint of one plan loads into any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.format.shard_files import Slot
from onefold.checkpoint.state.weights import ModelTensors
from onefold.offload.buffer import Buffer
from onefold.optim.step import ShardedStep
from onefold.plan.layout import Layout, Member
from onefold.runtime import FlatParam, Unit, handle_of


def own_slots(units: Sequence[Unit], step: ShardedStep | None, *, exclude_frozen: bool) -> Iterator[Slot]:
    """Yield the slots that this rank saves: its shard of each flat parameter, in-place writes to it included."""
    if step is not None:
        step.sync_masters()
    for param in (param for unit in units for param in unit.params):
        if param.trainable or not exclude_frozen:
            yield from weight_slots(param, step, *param.own_range)
            yield from state_slots(param, step, *param.own_range)


def needed_range(param: FlatParam, step: ShardedStep | None) -> tuple[int, int]:
    """Return the range of a flat parameter that this rank loads: the range that it updates.

    The other ranks send the rest of a parameter that stays unsharded.
    """
    return (param.store.start, param.store.stop) if param.trainable and step is not None else param.own_range


def weight_slots(param: FlatParam, step: ShardedStep | None, start: int, stop: int) -> Iterator[Slot]:
    """Yield the slots of the weights in [start, stop) of a flat parameter, from the master weights if they exist."""
    store = param.store
    if param.trainable and step is not None:
        buffer, first = store.master, store.start
    elif store.param is not None:
        buffer, first = store.param.buffer, param.own_range[0]
    else:
        buffer, first = Buffer.of(param.full), 0
    for member, low, high in member_ranges(param.layout, start, stop):
        yield _slot(f"model/{member.name}", member, low, high, buffer, first)


def state_slots(param: FlatParam, step: ShardedStep | None, start: int, stop: int) -> Iterator[Slot]:
    """Yield the slots of the optimizer states in [start, stop) of a flat parameter."""
    if not param.trainable or step is None:
        return
    for state in step.states.saved_states(param.store):
        first = param.store.start + state.start
        last = first + state.buffer.numel()
        for member, low, high in member_ranges(param.layout, max(start, first), min(stop, last)):
            yield _slot(f"optimizer/{member.name}/{state.name}", member, low, high, state.buffer, first)


def member_ranges(layout: Layout, start: int, stop: int) -> Iterator[tuple[Member, int, int]]:
    """Yield the parameters in [start, stop) with their ranges. A parameter without elements belongs to rank 0."""
    for member in layout.members:
        low, high = max(start, member.start), min(stop, member.stop)
        if low < high or (member.start == member.stop and start == 0):
            yield member, low, max(low, high)


def _slot(name: str, member: Member, low: int, high: int, buffer: Buffer, first: int) -> Slot:
    return Slot(name, member.shape, low - member.start, high - member.start, buffer[low - first : high - first])


def outside_units(model: nn.Module, *, exclude_frozen: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return buffers and parameters outside of units by name, and the aliases of all tied tensors."""
    contents = ModelTensors.of(model, exclude_frozen=exclude_frozen)
    return {name: tensor for name, tensor in contents.tensors.items() if handle_of(tensor) is None}, contents.aliases


def buffer_name(rank: int, name: str) -> str:
    """Return the stored name of a rank's copy of a buffer that differs from the copy of rank 0."""
    return f"buffer/{rank}/{name}"


def groups_of(units: Sequence[Unit]) -> dict[str, int | None]:
    """Return the optimizer group of each parameter by name; None for parameters that are not trained."""
    params = [param for unit in units for param in unit.params]
    return {m.name: m.group if param.trainable else None for param in params for m in param.layout.members}


def loose_states(units: Sequence[Unit], step: ShardedStep | None) -> dict[str, dict[str, Any]]:
    """Return optimizer states that don't have the shape of their parameter, by parameter and state name.

    Examples are step counts and factored moments.
    """
    found: dict[str, dict[str, Any]] = {}
    if step is None:
        return found
    for param in (param for unit in units for param in unit.trained_params):
        first = param.store.start
        for start, stop, values in step.loose_states(param.store):
            for member, _, _ in member_ranges(param.layout, first + start, first + stop):
                found.setdefault(member.name, {}).update(values)
    return found
