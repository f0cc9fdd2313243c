"""Loading: from a checkpoint of any plan to what this rank keeps in its own, reading only the ranges it needs.

Everything is compared before anything is written: names, shapes, optimizer states. Where the engine has trained, so
that there is something to lose, the bytes themselves are checked first as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.manifest import RANGE_BYTES
from onefold.checkpoint.reader import Checkpoint
from onefold.checkpoint.shards import Slot
from onefold.checkpoint.slots import needed_range, outside_units, state_slots, weight_slots
from onefold.offload.nvme import DiskTensor
from onefold.offload.param_shard import Flat
from onefold.optim.step import ShardedStep
from onefold.runtime import Unit


class MisfitError(ValueError):
    """A checkpoint is whole, but of another model or another optimizer; every difference is listed."""


@dataclass(frozen=True)
class Target:
    """What a checkpoint is loaded into, on this rank."""

    model: nn.Module
    units: Sequence[Unit]
    step: ShardedStep | None
    rank: int
    world_size: int

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Every parameter that lies in a unit, with its unsharded shape."""
        return {m.name: m.shape for unit in self.units for param in unit.params for m in param.layout.members}


@dataclass(frozen=True)
class Read:
    """Elements [start, stop) of a stored tensor go to this memory, in its order of elements."""

    source: str
    start: int
    stop: int
    memory: Flat


class Names:
    """A checkpoint's name for each of the model's tensors: its own, or that of one it is tied to, here or there."""

    def __init__(self, checkpoint: Checkpoint, aliases: Mapping[str, str]) -> None:
        self._stored = set(checkpoint.names("model/"))
        self._theirs = checkpoint.manifest.aliases
        self._ours: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self._ours.setdefault(name, []).append(alias)

    def find(self, name: str) -> str | None:
        for candidate in (name, *self._ours.get(name, [])):
            stored = self._theirs.get(candidate, candidate)
            if stored in self._stored:
                return stored
        return None

    def unexpected(self, ours: Sequence[str]) -> list[str]:
        known = {self.find(name) for name in ours} | {alias for some in self._ours.values() for alias in some}
        return sorted(self._stored - known)


def weight_reads(checkpoint: Checkpoint, target: Target, *, strict: bool) -> list[Read]:
    """What this rank reads to have its weights and buffers. Raises with everything that does not fit."""
    outside, aliases = outside_units(target.model)
    names = Names(checkpoint, aliases)
    shapes = {**target.members, **{name: tuple(tensor.shape) for name, tensor in outside.items()}}
    left_out = set(checkpoint.manifest.left_out)
    problems = []
    for name, shape in shapes.items():
        source = names.find(name)
        if source is None:
            if strict and name not in left_out:
                problems.append(f"missing in the checkpoint: {name} {list(shape)}")
            continue
        there = checkpoint.stored(f"model/{source}")
        # What lies in runs is of floats; a buffer may be of anything.
        dtype = outside[name].dtype if name in outside else torch.float32
        if there.shape != shape:
            problems.append(
                f"another shape: {name} is {list(shape)} in the model, {list(there.shape)} in the checkpoint"
            )
        elif there.dtype.is_floating_point != dtype.is_floating_point or not torch.can_cast(there.dtype, dtype):
            problems.append(f"another kind: {name} is {dtype} in the model, {there.dtype} in the checkpoint")
    if strict:
        problems += [f"not in the model: {name}" for name in names.unexpected(list(shapes))]
    if problems:
        raise MisfitError(
            f"{checkpoint.folder} does not fit the model:\n  " + "\n  ".join(problems) + "\nload_module_strict=False "
            "loads what both have (shapes must agree); or build the model that was saved"
        )
    return [*_run_reads(target, names), *_outside_reads(checkpoint, target, names, outside)]


def _run_reads(target: Target, names: Names) -> Iterator[Read]:
    for param in (param for unit in target.units for param in unit.params):
        for slot in weight_slots(param, target.step, *needed_range(param, target.step)):
            source = names.find(slot.name.removeprefix("model/"))
            if source is not None:
                yield Read(f"model/{source}", slot.start, slot.stop, slot.memory)


def _outside_reads(
    checkpoint: Checkpoint, target: Target, names: Names, outside: Mapping[str, torch.Tensor]
) -> Iterator[Read]:
    for name, tensor in outside.items():
        source = names.find(name)
        own = buffer_name(target.rank, source or "")
        if source is not None:
            same_world = checkpoint.manifest.world_size == target.world_size
            stored = own if same_world and own in checkpoint.manifest.tensors else f"model/{source}"
            yield Read(stored, 0, tensor.numel(), tensor.detach())


def buffer_name(rank: int, name: str) -> str:
    """A rank's own copy of a buffer, where it is not that of rank 0."""
    return f"buffer/{rank}/{name}"


def state_reads(checkpoint: Checkpoint, target: Target, loose: Mapping[str, Any], *, strict: bool) -> list[Read]:
    """What this rank reads to have its optimizer states, for which there is room then."""
    step = target.step
    assert step is not None
    names = Names(checkpoint, outside_units(target.model)[1])
    trained = [member for unit in target.units for param in unit.trained for member in param.layout.members]
    stored: dict[str, dict[str, torch.dtype]] = {}
    for key in checkpoint.names("optimizer/"):
        name, _, state = key.rpartition("/")
        stored.setdefault(name, {})[state] = checkpoint.stored(f"optimizer/{key}").dtype
    sources = {member.name: names.find(member.name) or member.name for member in trained}
    wanted = {name: stored.get(source, {}) for name, source in sources.items()}
    step.make_states(wanted, {name: loose.get(source, {}) for name, source in sources.items()})
    reads: list[Read] = []
    problems: dict[str, None] = {}
    kept: set[str] = set()
    for slot in _state_slots(target):
        name, _, state = slot.name.removeprefix("optimizer/").rpartition("/")
        kept.add(state)
        source = f"optimizer/{sources[name]}/{state}"
        if source not in checkpoint.manifest.tensors:
            problems[f"no {state} of {name}"] = None
        elif checkpoint.stored(source).shape != slot.shape:
            problems[f"another shape: {state} of {name}"] = None
        else:
            reads.append(Read(source, slot.start, slot.stop, slot.memory))
    more = {state for states in wanted.values() for state in states}
    if kept:  # a rank whose shards are all padding keeps none, and cannot tell
        problems |= dict.fromkeys(f"{step.name} here keeps no {state}" for state in sorted(more - kept))
    if problems and strict:
        raise MisfitError(
            f"{checkpoint.folder} has other optimizer states than {step.name} keeps:\n  " + "\n  ".join(problems)
            + "\nload_optimizer_states=False starts them anew; load_module_strict=False takes those that both have"
        )  # fmt: skip
    return reads


def _state_slots(target: Target) -> Iterator[Slot]:
    for param in (param for unit in target.units for param in unit.trained):
        yield from state_slots(param, target.step, *needed_range(param, target.step))


def verify(checkpoint: Checkpoint, reads: Sequence[Read]) -> None:
    """Every byte that would be read is what was saved; nothing is written."""
    for read in reads:
        checkpoint.verify(read.source, read.start, read.stop)


@torch.no_grad()
def fill(checkpoint: Checkpoint, reads: Sequence[Read]) -> None:
    for read in reads:
        memory = read.memory
        if isinstance(memory, DiskTensor):
            first = read.start
            for part in memory.split(RANGE_BYTES // memory.itemsize):
                values = torch.empty(part.numel(), dtype=memory.dtype)
                checkpoint.read(read.source, first, first + part.numel(), values)
                part.store(values)
                first += part.numel()
            continue
        flat = memory.view(-1) if memory.is_contiguous() else memory.new_empty(memory.numel())
        checkpoint.read(read.source, read.start, read.stop, flat)
        if not memory.is_contiguous():
            memory.copy_(flat.view(memory.shape))


def groups_for(checkpoint: Checkpoint, target: Target, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each optimizer group the hyperparameters that all its parameters had, or none where they were apart."""
    step = target.step
    assert step is not None
    known = checkpoint.manifest.parameters
    found: list[dict[str, Any]] = []
    members = [m for unit in target.units for param in unit.trained for m in param.layout.members]
    for index, group in enumerate(step.groups):
        sources = {known.get(member.name) for member in members if member.group == index} - {None}
        chosen = saved[sources.pop() or 0] if len(sources) == 1 else {}
        known_here = chosen.keys() if step.keeps_other_keys else {*group, "initial_lr"}
        found.append({key: value for key, value in chosen.items() if key in known_here and key != "params"})
    return found
