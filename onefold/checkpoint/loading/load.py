"""Loading: from a checkpoint of any plan to what this rank keeps in its own, reading only the ranges it needs.

Everything is compared before anything is written: names, shapes, optimizer states, hyperparameters, the schedule, the
random states. Where the engine has trained, so that there is something to lose, the bytes themselves are checked first
as well.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.format.files import check_whole, spell
from onefold.checkpoint.format.manifest import RANGE_BYTES, is_number
from onefold.checkpoint.format.shard_files import CheckpointReader, Slot
from onefold.checkpoint.loading.slots import needed_range, outside_units, state_slots, weight_slots
from onefold.offload.nvme import DiskTensor
from onefold.offload.param_shard import Flat
from onefold.optim.step import ShardedStep
from onefold.runtime import Unit


class MisfitError(ValueError):
    """A checkpoint is whole, but of another model or another optimizer; every difference is listed."""


@dataclass(frozen=True)
class LoadTarget:
    """What a checkpoint is loaded into, on this rank."""

    model: nn.Module
    units: Sequence[Unit]
    step: ShardedStep | None
    rank: int
    world_size: int

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Every parameter that is in a unit, with its unsharded shape."""
        return {m.name: m.shape for unit in self.units for param in unit.params for m in param.layout.members}


@dataclass(frozen=True)
class TensorRead:
    """One read: elements [start, stop) of a stored tensor go to this memory, in its order of elements."""

    source: str
    start: int
    stop: int
    memory: Flat


class StoredNames:
    """The checkpoint's name for each tensor of the model: its own, or that of one it is tied to, here or there."""

    def __init__(self, checkpoint: CheckpointReader, aliases: Mapping[str, str]) -> None:
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


def weight_reads(checkpoint: CheckpointReader, target: LoadTarget, *, strict: bool) -> list[TensorRead]:
    """The reads that fill this rank's weights and buffers. Raises with everything that does not fit."""
    outside, aliases = outside_units(target.model)
    names = StoredNames(checkpoint, aliases)
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
    return [*_unit_reads(target, names), *_outside_reads(checkpoint, target, names, outside)]


def _unit_reads(target: LoadTarget, names: StoredNames) -> Iterator[TensorRead]:
    for param in (param for unit in target.units for param in unit.params):
        for slot in weight_slots(param, target.step, *needed_range(param, target.step)):
            source = names.find(slot.name.removeprefix("model/"))
            if source is not None:
                yield TensorRead(f"model/{source}", slot.start, slot.stop, slot.memory)


def _outside_reads(
    checkpoint: CheckpointReader, target: LoadTarget, names: StoredNames, outside: Mapping[str, torch.Tensor]
) -> Iterator[TensorRead]:
    for name, tensor in outside.items():
        source = names.find(name)
        own = buffer_name(target.rank, source or "")
        if source is not None:
            same_world = checkpoint.manifest.world_size == target.world_size
            stored = own if same_world and own in checkpoint.manifest.tensors else f"model/{source}"
            yield TensorRead(stored, 0, tensor.numel(), tensor.detach())


def buffer_name(rank: int, name: str) -> str:
    """The stored name of a rank's own copy of a buffer, where it differs from rank 0's."""
    return f"buffer/{rank}/{name}"


def state_reads(
    checkpoint: CheckpointReader, target: LoadTarget, loose: Mapping[str, Any], *, strict: bool
) -> list[TensorRead]:
    """The reads that fill this rank's optimizer states, which are allocated here. Raises with what does not fit."""
    step = target.step
    assert step is not None
    names = StoredNames(checkpoint, outside_units(target.model)[1])
    trained = [member for unit in target.units for param in unit.trained for member in param.layout.members]
    stored: dict[str, dict[str, torch.dtype]] = {}
    for key in checkpoint.names("optimizer/"):
        name, _, state = key.rpartition("/")
        stored.setdefault(name, {})[state] = checkpoint.stored(f"optimizer/{key}").dtype
    sources = {member.name: names.find(member.name) or member.name for member in trained}
    wanted = {name: stored.get(source, {}) for name, source in sources.items()}
    step.stepper.make_states(wanted, {name: loose.get(source, {}) for name, source in sources.items()})
    reads: list[TensorRead] = []
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
            reads.append(TensorRead(source, slot.start, slot.stop, slot.memory))
    more = {state for states in wanted.values() for state in states}
    if kept:  # a rank whose shards are all padding keeps none, and cannot tell
        problems |= dict.fromkeys(f"{step.name} here keeps no {state}" for state in sorted(more - kept))
    if problems and strict:
        raise MisfitError(
            f"{checkpoint.folder} has other optimizer states than {step.name} keeps:\n  " + "\n  ".join(problems)
            + "\nload_optimizer_states=False starts them anew; load_module_strict=False takes those that both have"
        )  # fmt: skip
    return reads


def _state_slots(target: LoadTarget) -> Iterator[Slot]:
    for param in (param for unit in target.units for param in unit.trained):
        yield from state_slots(param, target.step, *needed_range(param, target.step))


def verify(checkpoint: CheckpointReader, reads: Sequence[TensorRead]) -> None:
    """Check every byte that the reads would read; nothing is written."""
    for read in reads:
        checkpoint.verify(read.source, read.start, read.stop)


@torch.no_grad()
def fill(checkpoint: CheckpointReader, reads: Sequence[TensorRead]) -> None:
    """Read the values to where they belong."""
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


def groups_for(
    checkpoint: CheckpointReader, target: LoadTarget, saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each optimizer group: the saved hyperparameters of its parameters, none where they were in several groups."""
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


# -- what is loaded against what is live -------------------------------------------------------------------------------
#
# [Note: what is compared with what]
# A manifest may be edited and signed again, or be of another program. What the job's own objects would take without a
# word and fail on later (a rate that is a string, one beta where two are wanted, an epoch that is a list) is refused
# before anything is changed. What a value has to be is told by the live value that it would replace: a number for a
# number, a list for a list. Where that is None anything plain may come, and what the live object has no key for is
# left to it.

# Ways to the same numbers: one of two programs may have left them to torch (None).
_LEFT_TO_TORCH = ("foreach", "fused", "capturable", "differentiable")
# Where a schedule stands; and what has a number for each group.
_POSITIONS = ("last_epoch", "last_batch_iteration")
_OF_GROUPS = ("base_lrs", "_last_lr")


def check_loose_like(found: Mapping[str, Mapping[str, Any]], live: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare loose optimizer states with those of an optimizer that has stepped, where both know the parameter."""
    for name in live.keys() & found.keys():
        for key, value in live[name].items():
            where = f"ranks, loose.{name}"
            if key not in found[name]:
                raise ValueError(f"{where} lacks {key}")
            _check_like(found[name][key], value, f"{where}.{key}")


def check_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> None:
    """Compare hyperparameters with those of the live groups that they are about to replace."""
    for number, (new, group) in enumerate(zip(saved, live, strict=True)):
        if new and "lr" in group and "lr" not in new:
            raise ValueError(f"state.optimizer.groups, for group {number} here: lacks lr")
        for key, value in new.items():
            if key in group and not (value is None and key in _LEFT_TO_TORCH):
                _check_like(value, group[key], f"state.optimizer.groups, for group {number} here: {key}")


def check_schedule(saved: Any, schedule: Any) -> None:
    """Compare the saved state of a learning-rate schedule with the live one's."""
    live = schedule.state_dict()
    if isinstance(live, dict):
        if not isinstance(saved, dict):
            raise ValueError(f"state.lr_scheduler must be an object, not {spell(saved)}")
        for key in live.keys() & saved.keys():
            where = f"state.lr_scheduler.{key}"
            _check_like(saved[key], live[key], where)
            if key in _OF_GROUPS and live[key] and len(saved[key]) != len(live[key]):
                raise ValueError(f"{where} must have {len(live[key])} numbers, not {spell(saved[key])}")
        for key in _POSITIONS:
            if type(live.get(key)) is int:
                check_whole(saved.get(key), f"state.lr_scheduler.{key}", least=-1)
        hidden = [key for key in saved if isinstance(key, str) and callable(getattr(type(schedule), key, None))]
        if hidden:
            raise ValueError(f"state.lr_scheduler: {hidden[0]} is a method of {type(schedule).__name__}, and no state")


def check_taken(saved: Any, taker: Any, groups: Sequence[dict[str, Any]], where: str) -> None:
    """Try `load_state_dict`. Afterwards the taker and the groups, which it may write to, are as before."""
    before = copy.deepcopy(taker.state_dict())
    attributes = dict(vars(taker))
    values = [dict(group) for group in groups]
    rates = [{k: v.clone() for k, v in group.items() if isinstance(v, torch.Tensor)} for group in groups]
    try:
        taker.load_state_dict(copy.deepcopy(saved))
    except Exception as error:
        raise ValueError(f"{where} is not taken by {type(taker).__name__}: {type(error).__name__}: {error}") from error
    finally:
        _put_back(vars(taker), attributes)
        taker.load_state_dict(before)  # for what lies deeper
        _put_back(vars(taker), attributes)
        for group, value, rate in zip(groups, values, rates, strict=True):
            _put_back(group, value)
            for key, number in rate.items():
                group[key].copy_(number)


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    for key in now.keys() - before.keys():
        del now[key]
    now.update(before)


def _check_like(saved: Any, live: Any, where: str) -> None:
    if live is None:
        return
    if isinstance(live, torch.Tensor):
        if isinstance(saved, torch.Tensor):
            fits = saved.shape == live.shape and saved.is_floating_point() == live.is_floating_point()
        else:
            fits = live.numel() == 1 and is_number(saved)
        _require(fits, saved, f"a tensor of shape {list(live.shape)}", where)
    elif isinstance(live, bool):
        _require(isinstance(saved, bool), saved, "true or false", where)
    elif is_number(live):
        single = saved.item() if isinstance(saved, torch.Tensor) and saved.numel() == 1 else saved
        _require(is_number(single), saved, "a number", where)
        _require(math.isfinite(single) or not math.isfinite(live), saved, "a finite number", where)
    elif isinstance(live, str):
        _require(isinstance(saved, str), saved, "a string", where)
    elif isinstance(live, tuple):
        fits = isinstance(saved, tuple | list) and len(saved) == len(live)
        _require(fits, saved, f"{len(live)} values", where)
        for number, (one, other) in enumerate(zip(saved, live, strict=True)):
            _check_like(one, other, f"{where}[{number}]")
    elif isinstance(live, list):
        _require(isinstance(saved, list), saved, "a list", where)
        if live and is_number(live[0]):
            _require(all(is_number(each) and math.isfinite(each) for each in saved), saved, "a list of numbers", where)
    elif isinstance(live, dict):
        _require(isinstance(saved, dict), saved, "an object", where)


def _require(fits: bool, saved: Any, what: str, where: str) -> None:
    if not fits:
        raise ValueError(f"{where} must be {what}, not {spell(saved)}")
