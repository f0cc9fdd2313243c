"""Loading of a checkpoint of any plan into the shards of this rank, reading only the required ranges.

All checks precede the first write: names, shapes, optimizer states, hyperparameters, the schedule and the random
states. If the engine has already trained, the checksums of all bytes are verified first as well.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.format.files import check_whole, require, spell
from onefold.checkpoint.format.manifest import RANGE_BYTES, is_number, single
from onefold.checkpoint.format.shard_files import CheckpointReader, Slot
from onefold.checkpoint.state.slots import buffer_name, needed_range, outside_units, state_slots, weight_slots
from onefold.offload.buffer import Buffer
from onefold.optim.step import ShardedStep
from onefold.plan.layout import Member
from onefold.runtime import Unit


class MisfitError(ValueError):
    """A checkpoint is complete, but does not fit the model or the optimizer. The message lists all differences."""


@dataclass(frozen=True)
class LoadTarget:
    """The model and the optimizer step of this rank into which a checkpoint is loaded."""

    model: nn.Module
    units: Sequence[Unit]
    step: ShardedStep | None
    rank: int
    world_size: int

    @property
    def trained(self) -> list[Member]:
        return [member for unit in self.units for param in unit.trained_params for member in param.layout.members]


def find_stored(checkpoint: CheckpointReader, names: Collection[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the name in the checkpoint of each tensor of the model that is stored there.

    A tensor may be stored under its name or under that of a tied tensor, by the aliases of the model or the checkpoint.
    """
    stored, theirs = set(checkpoint.names("model/")), checkpoint.manifest.aliases
    found: dict[str, str] = {}
    for candidate, name in [*((name, name) for name in names), *aliases.items()]:
        source = theirs.get(candidate, candidate)
        if source in stored and name in names:
            found.setdefault(name, source)
    return found


def weight_reads(checkpoint: CheckpointReader, target: LoadTarget, *, strict: bool) -> list[Slot]:
    """Return the weights and buffers of this rank as slots with the names in the checkpoint.

    Raise a MisfitError that lists all differences if the checkpoint does not fit the model.
    """
    outside, aliases = outside_units(target.model)
    inside = {
        m.name: (m.shape, param.spec) for unit in target.units for param in unit.params for m in param.layout.members
    }
    shapes = {name: shape for name, (shape, _) in inside.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in outside.items()}
    sources = find_stored(checkpoint, shapes, aliases)
    left_out = set(checkpoint.manifest.left_out)
    problems = []
    for name, shape in shapes.items():
        if name not in sources:
            if strict and name not in left_out:
                problems.append(f"missing in the checkpoint: {name} {list(shape)}")
            continue
        there = checkpoint.stored(f"model/{sources[name]}")
        dtype = outside[name].dtype if name in outside else inside[name][1].dtype
        fits = there.dtype.is_floating_point == dtype.is_floating_point and torch.can_cast(there.dtype, dtype)
        if name in inside and inside[name][1].packed:
            fits = there.dtype == dtype
        if there.shape != shape:
            theirs = list(there.shape)
            problems.append(f"different shape: {name} is {list(shape)} in the model, {theirs} in the checkpoint")
        elif not fits:
            problems.append(f"different dtype: {name} is {dtype} in the model, {there.dtype} in the checkpoint")
    if strict:
        unexpected = {*checkpoint.names("model/")} - {*sources.values(), *aliases}
        problems += [f"not in the model: {name}" for name in sorted(unexpected)]
    if problems:
        raise MisfitError(
            f"{checkpoint.folder} does not fit the model:\n  " + "\n  ".join(problems) + "\nBuild the model that was "
            "saved, or pass load_module_strict=False to load the tensors that both have (shapes must agree)."
        )
    return list(_fitting_reads(checkpoint, target, sources, outside))


def _fitting_reads(
    checkpoint: CheckpointReader, target: LoadTarget, sources: Mapping[str, str], outside: Mapping[str, torch.Tensor]
) -> Iterator[Slot]:
    for param in (param for unit in target.units for param in unit.params):
        for slot in weight_slots(param, target.step, *needed_range(param, target.step)):
            source = sources.get(slot.name.removeprefix("model/"))
            if source is not None:
                yield replace(slot, name=f"model/{source}")
    same_world = checkpoint.manifest.world_size == target.world_size
    for name, tensor in outside.items():
        source = sources.get(name)
        if source is not None:
            own = buffer_name(target.rank, source)
            stored = own if same_world and own in checkpoint.manifest.tensors else f"model/{source}"
            yield Slot(stored, tuple(tensor.shape), 0, tensor.numel(), Buffer.of(tensor.detach()))


def state_reads(
    checkpoint: CheckpointReader, target: LoadTarget, loose: Mapping[str, Any], *, strict: bool
) -> list[Slot]:
    """Allocate the optimizer states of this rank, and return them as slots with the names in the checkpoint.

    Raise a MisfitError that lists all differences if `strict` is set and the states differ.
    """
    step = target.step
    assert step is not None
    stored: dict[str, dict[str, torch.dtype]] = {}
    for key in checkpoint.names("optimizer/"):
        name, _, state = key.rpartition("/")
        stored.setdefault(name, {})[state] = checkpoint.stored(f"optimizer/{key}").dtype
    sources = {member.name: member.name for member in target.trained}
    sources |= find_stored(checkpoint, sources, outside_units(target.model)[1])
    wanted = {name: stored.get(source, {}) for name, source in sources.items()}
    step.make_states(wanted, {name: loose.get(source, {}) for name, source in sources.items()})
    reads: list[Slot] = []
    problems: dict[str, None] = {}
    params = [param for unit in target.units for param in unit.trained_params]
    # The shard of a flat parameter may consist of padding only, and then has no slots.
    kept = {state for param in params for state in param.spec.states}
    for slot in (slot for param in params for slot in state_slots(param, step, *needed_range(param, step))):
        name, _, state = slot.name.removeprefix("optimizer/").rpartition("/")
        kept.add(state)
        source = f"optimizer/{sources[name]}/{state}"
        if source not in checkpoint.manifest.tensors:
            problems[f"no {state} of {name}"] = None
        elif checkpoint.stored(source).shape != slot.shape:
            problems[f"different shape: {state} of {name}"] = None
        else:
            reads.append(replace(slot, name=source))
    more = {state for states in wanted.values() for state in states}
    if kept:  # empty on a rank whose shards all consist of padding
        problems |= dict.fromkeys(f"{step.name} has no {state}" for state in sorted(more - kept))
    if problems and strict:
        raise MisfitError(
            f"{checkpoint.folder} has other optimizer states than {step.name}:\n  " + "\n  ".join(problems)
            + "\nPass load_optimizer_states=False to reset them, or load_module_strict=False to load the common ones."
        )  # fmt: skip
    return reads


def verify(checkpoint: CheckpointReader, reads: Sequence[Slot]) -> None:
    """Verify the checksums of all bytes that the slots require, without writing to the slots."""
    for read in checkpoint.read_order(reads):
        checkpoint.verify(read.name, read.start, read.stop)


@torch.no_grad()
def fill(checkpoint: CheckpointReader, reads: Sequence[Slot]) -> set[str]:
    """Read the values into their buffers. Return the names of the tensors that a state format has rounded."""
    rounded = set()
    for read in checkpoint.read_order(reads):
        if not read.buffer.is_plain_tensor:
            first = read.start
            for part in read.buffer.split(RANGE_BYTES // read.dtype.itemsize):
                values = torch.empty(part.numel(), dtype=read.dtype)
                checkpoint.read(read.name, first, first + part.numel(), values)
                part.store(values)
                first += part.numel()
                if part.is_encoded and not torch.equal(part.fetch().cpu(), values):
                    rounded.add(read.name)
            continue
        memory = read.buffer.tensor
        flat = memory.view(-1) if memory.is_contiguous() else memory.new_empty(memory.numel())
        checkpoint.read(read.name, read.start, read.stop, flat)
        if not memory.is_contiguous():
            memory.copy_(flat.view(memory.shape))
    return rounded


def groups_for(
    checkpoint: CheckpointReader, target: LoadTarget, saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the saved hyperparameters for each optimizer group.

    They are empty if the parameters of the group were in several groups of the checkpoint.
    """
    step = target.step
    assert step is not None
    known = checkpoint.manifest.parameters
    found: list[dict[str, Any]] = []
    for index, group in enumerate(step.groups):
        sources = {known.get(member.name) for member in target.trained if member.group == index} - {None}
        chosen = saved[sources.pop() or 0] if len(sources) == 1 else {}
        known_here = chosen.keys() if step.keeps_other_keys else {*group, "initial_lr"}
        found.append({key: value for key, value in chosen.items() if key in known_here and key != "params"})
    return found


# -- comparison of loaded values with live values ----------------------------------------------------------------------
#
# [Note: comparison with live values]
# A manifest is untrusted even if its checksum is correct, and may be of another program. The optimizer and the schedule
# would accept some wrong values silently and fail later (a learning rate that is a string, one beta instead of two, an
# epoch that is a list). Such values are refused before anything is changed. The live value that a loaded value replaces
# determines its type: a number for a number, a list for a list. If the live value is None, any plain value is accepted.
# Keys that the live object does not have are passed to it unchecked.

# Choices of a kernel, which do not affect the result. Either program may have used torch's default (None).
_LEFT_TO_TORCH = ("foreach", "fused", "capturable", "differentiable")
# Keys of the position in a schedule, and keys with one number per group.
_POSITIONS = ("last_epoch", "last_batch_iteration")
_OF_GROUPS = ("base_lrs", "_last_lr")


def check_loose_like(found: Mapping[str, Mapping[str, Any]], live: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare loose optimizer states with those of an optimizer that has stepped, for parameters that both have."""
    for name in live.keys() & found.keys():
        for key, value in live[name].items():
            where = f"ranks, loose.{name}"
            if key not in found[name]:
                raise ValueError(f"{where} lacks {key}")
            _check_like(found[name][key], value, f"{where}.{key}")


def check_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> None:
    """Compare saved hyperparameters with those of the live groups that they replace."""
    for number, (new, group) in enumerate(zip(saved, live, strict=True)):
        if new and "lr" in group and "lr" not in new:
            raise ValueError(f"state.optimizer.groups, for group {number}: lr is missing")
        for key, value in new.items():
            if key in group and not (value is None and key in _LEFT_TO_TORCH):
                _check_like(value, group[key], f"state.optimizer.groups, for group {number}: {key}")


def check_schedule(saved: Any, schedule: Any) -> None:
    """Compare the saved state of a learning rate schedule with that of the live schedule."""
    live = schedule.state_dict()
    if isinstance(live, dict):
        require(isinstance(saved, dict), saved, "an object", "state.lr_scheduler")
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
            raise ValueError(f"state.lr_scheduler: {hidden[0]} is a method of {type(schedule).__name__}, not a state")


def check_taken(saved: Any, taker: Any, groups: Sequence[dict[str, Any]], where: str) -> None:
    """Try `taker.load_state_dict(saved)`, and restore the taker and the groups, which it may write to.

    Raise a ValueError if it fails.
    """
    before = copy.deepcopy(taker.state_dict())
    attributes = dict(vars(taker))
    values = [dict(group) for group in groups]
    rates = [{k: v.clone() for k, v in group.items() if isinstance(v, torch.Tensor)} for group in groups]
    try:
        taker.load_state_dict(copy.deepcopy(saved))
    except Exception as error:
        raise ValueError(f"{where} is rejected by {type(taker).__name__}: {type(error).__name__}: {error}") from error
    finally:
        _put_back(vars(taker), attributes)
        taker.load_state_dict(before)  # restores nested objects
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
    for kind, what in ((bool, "true or false"), (str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(live, kind):
            require(isinstance(saved, kind), saved, what, where)
    if isinstance(live, torch.Tensor):
        if isinstance(saved, torch.Tensor):
            fits = saved.shape == live.shape and saved.is_floating_point() == live.is_floating_point()
        else:
            fits = live.numel() == 1 and is_number(saved)
        require(fits, saved, f"a tensor of shape {list(live.shape)}", where)
    elif is_number(live):
        number = single(saved)
        require(is_number(number), saved, "a number", where)
        require(math.isfinite(number) or not math.isfinite(live), saved, "a finite number", where)
    elif isinstance(live, tuple):
        require(isinstance(saved, tuple | list) and len(saved) == len(live), saved, f"{len(live)} values", where)
        for index, (one, other) in enumerate(zip(saved, live, strict=True)):
            _check_like(one, other, f"{where}[{index}]")
    elif isinstance(live, list) and live and is_number(live[0]):
        require(all(is_number(each) and math.isfinite(each) for each in saved), saved, "a list of numbers", where)
