"""Loading: from a checkpoint of any plan to what this rank keeps in its own, reading only the ranges it needs.

Everything is compared before anything is written: names, shapes, optimizer states, hyperparameters, the schedule, the
random states. Where the engine has trained, so that there is something to lose, the bytes themselves are checked first
as well.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.format import check_whole, spell
from onefold.checkpoint.format.manifest import RANGE_BYTES, is_number
from onefold.checkpoint.format.shard_files import CheckpointReader, Slot
from onefold.checkpoint.loading.model_slots import needed_range, outside_runs, state_slots, weight_slots
from onefold.optim.sharded import ShardedOptimizer
from onefold.runtime import Unit
from onefold.tier.lower import Flat
from onefold.tier.nvme import DiskTensor


class MisfitError(ValueError):
    """A checkpoint is whole, but of another model or another optimizer; every difference is listed."""


@dataclass(frozen=True)
class LoadTarget:
    """What a checkpoint is loaded into, on this rank."""

    model: nn.Module
    units: Sequence[Unit]
    optimizer: ShardedOptimizer | None
    rank: int
    world_size: int

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Every parameter that is in a run, with its whole shape."""
        return {m.name: m.shape for unit in self.units for run in unit.runs for m in run.layout.members}


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
    outside, aliases = outside_runs(target.model)
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
    return [*_run_reads(target, names), *_outside_reads(checkpoint, target, names, outside)]


def _run_reads(target: LoadTarget, names: StoredNames) -> Iterator[TensorRead]:
    for run in (run for unit in target.units for run in unit.runs):
        for slot in weight_slots(run, target.optimizer, *needed_range(run, target.optimizer)):
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
    optimizer = target.optimizer
    assert optimizer is not None
    names = StoredNames(checkpoint, outside_runs(target.model)[1])
    trained = [member for unit in target.units for run in unit.trained for member in run.layout.members]
    stored: dict[str, dict[str, torch.dtype]] = {}
    for key in checkpoint.names("optimizer/"):
        name, _, state = key.rpartition("/")
        stored.setdefault(name, {})[state] = checkpoint.stored(f"optimizer/{key}").dtype
    sources = {member.name: names.find(member.name) or member.name for member in trained}
    wanted = {name: stored.get(source, {}) for name, source in sources.items()}
    optimizer.make_states(wanted, {name: loose.get(source, {}) for name, source in sources.items()})
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
    if kept:  # a rank without a piece of its own keeps none, and cannot tell
        problems |= dict.fromkeys(f"{optimizer.name} here keeps no {state}" for state in sorted(more - kept))
    if problems and strict:
        raise MisfitError(
            f"{checkpoint.folder} has other optimizer states than {optimizer.name} keeps:\n  " + "\n  ".join(problems)
            + "\nload_optimizer_states=False starts them anew; load_module_strict=False takes those that both have"
        )  # fmt: skip
    return reads


def _state_slots(target: LoadTarget) -> Iterator[Slot]:
    for run in (run for unit in target.units for run in unit.trained):
        yield from state_slots(run, target.optimizer, *needed_range(run, target.optimizer))


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
    optimizer = target.optimizer
    assert optimizer is not None
    known = checkpoint.manifest.parameters
    found: list[dict[str, Any]] = []
    members = [m for unit in target.units for run in unit.trained for m in run.layout.members]
    for index, group in enumerate(optimizer.param_groups):
        sources = {known.get(member.name) for member in members if member.group == index} - {None}
        chosen = saved[sources.pop() or 0] if len(sources) == 1 else {}
        known_here = chosen.keys() if optimizer.keeps_other_keys else {*group, "initial_lr"}
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


# -- random number generators: Python's, numpy's global one, torch's on the CPU and on this rank's GPU -----------------


def capture_random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as plain data and tensors. Takes about 0.15 ms, most of it numpy's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # before its import there is no state to lose
        state["numpy"] = dict(numpy_random.get_state(legacy=False))
    if device.type == "cuda" and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_random_states(state: Any, device: torch.device) -> None:
    """Raise unless all captured states can be restored here; nothing is changed."""
    if not isinstance(state, dict) or not {"python", "torch"} <= state.keys() <= {"python", "torch", "numpy", "cuda"}:
        raise ValueError("the random state must hold python and torch, and may hold numpy and cuda")
    for name in state.keys() - (set() if _has_cuda(state, device) else {"cuda"}):
        try:
            _try_random_state(name, state[name], device)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"the saved random state of {name} cannot be restored: {error}") from error


def restore_random_states(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to captured states. Nothing is changed unless all of them are sound.

    The state of a GPU is left aside where there is none, and a generator of which nothing was captured stays as it is.
    """
    check_random_states(state, device)
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        importlib.import_module("numpy.random").set_state(state["numpy"])
    if _has_cuda(state, device):
        torch.cuda.set_rng_state(state["cuda"], device)


def _has_cuda(state: dict[str, Any], device: torch.device) -> bool:
    return device.type == "cuda" and "cuda" in state


def _try_random_state(name: str, saved: Any, device: torch.device) -> None:
    """Try a saved state on a generator that nobody uses."""
    if name == "python":
        random.Random().setstate(saved)
        # What the generator itself does not look at.
        if not all(type(word) is int for word in saved[1]) or not (saved[2] is None or _is_finite(saved[2])):
            raise ValueError("its words are no whole numbers, or its next normal number is none")
    elif name == "numpy":
        numpy_random = importlib.import_module("numpy.random")
        kind = type(numpy_random.get_bit_generator())
        if not isinstance(saved, dict) or saved["bit_generator"] != kind.__name__:
            raise ValueError(f"it is not of a {kind.__name__}, which this process uses")
        if kind is numpy_random.MT19937:  # numpy itself would read beyond the words, and looks at nothing else
            key, position, has_next = saved["state"]["key"], saved["state"]["pos"], saved["has_gauss"]
            if key.shape != (624,) or type(position) is not int or not 0 <= position <= 624:
                raise ValueError(f"a position {position} in words of shape {key.shape}")
            if type(has_next) is not int or has_next not in (0, 1) or not _is_finite(saved["gauss"]):
                raise ValueError("its next normal number is none")
        numpy_random.RandomState(kind(0)).set_state(saved)
    else:
        generator = torch.Generator(device if name == "cuda" else "cpu")
        fresh = generator.get_state()
        if not isinstance(saved, torch.Tensor) or (saved.dtype, saved.shape) != (fresh.dtype, fresh.shape):
            raise ValueError(f"it is not a tensor of {fresh.numel()} bytes")
        generator.set_state(saved)


def _is_finite(number: Any) -> bool:
    return isinstance(number, float) and math.isfinite(number)
