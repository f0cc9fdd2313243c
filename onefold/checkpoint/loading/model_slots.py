"""The tensors of a model and its optimizer by name: the ranges this rank keeps (its slots), and all of them whole.

Weights are `model/NAME`, in the precision they rest in (the fp32 master of what is trained); optimizer states are
`optimizer/NAME/STATE`. Names, shapes and values know nothing of ranks, units or stages, so that any plan reads any
other's. Whole weights are gathered one unit at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from onefold.checkpoint.format.safetensors_files import SafetensorsReader, SafetensorsWriter
from onefold.checkpoint.format.shard_files import Slot
from onefold.comm import Agreement, Ledger, data_group
from onefold.optim.sharded import ShardedOptimizer
from onefold.plan.layout import Layout, Member
from onefold.runtime import Home, Run, Unit, about_to_write, home_of, whole_shape
from onefold.tier.lower import Flat, write

T = TypeVar("T")


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model's state dict, each by its first name, and the other names of those that are tied."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]

    @staticmethod
    def of(model: nn.Module, *, exclude_frozen: bool = False) -> ModelTensors:
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            own: dict[str, torch.Tensor | None] = {**module._parameters}
            if exclude_frozen:
                own = {name: p for name, p in own.items() if p is not None and p.requires_grad}
            own |= {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
            for name, tensor in own.items():
                if tensor is None:
                    continue
                full = f"{path}.{name}" if path else name
                known = first.setdefault(id(tensor), full)
                if known == full:
                    tensors[full] = tensor
                else:
                    aliases[full] = known
        return ModelTensors(tensors, aliases)


# -- slots: what this rank keeps ---------------------------------------------------------------------------------------


def own_slots(units: Sequence[Unit], optimizer: ShardedOptimizer | None, *, exclude_frozen: bool) -> Iterator[Slot]:
    """What this rank saves: its own shard of every run, whatever else it holds."""
    for run in (run for unit in units for run in unit.runs):
        if run.trainable or not exclude_frozen:
            yield from weight_slots(run, optimizer, *run.own_range)
            yield from state_slots(run, optimizer, *run.own_range)


def needed_range(run: Run, optimizer: ShardedOptimizer | None) -> tuple[int, int]:
    """What this rank loads of a run: the range it steps. The rest of an unsharded run is gathered from other ranks."""
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
    for member, low, high in member_ranges(run.layout, start, stop):
        yield _slot(f"model/{member.name}", member, low, high, memory, first)


def state_slots(run: Run, optimizer: ShardedOptimizer | None, start: int, stop: int) -> Iterator[Slot]:
    if not run.trainable or optimizer is None:
        return
    piece = optimizer.piece_of(run)
    for state in optimizer.held_states(piece):
        first = piece.start + state.start
        for member, low, high in member_ranges(run.layout, max(start, first), min(stop, first + state.memory.numel())):
            yield _slot(f"optimizer/{member.name}/{state.name}", member, low, high, state.memory, first)


def member_ranges(layout: Layout, start: int, stop: int) -> Iterator[tuple[Member, int, int]]:
    """The parameters in [start, stop) of a flat run, each with its range. One without elements is the first rank's."""
    for member in layout.members:
        low, high = max(start, member.start), min(stop, member.stop)
        if low < high or (member.start == member.stop and start == 0):
            yield member, low, max(low, high)


def _slot(name: str, member: Member, low: int, high: int, memory: Flat, first: int) -> Slot:
    return Slot(name, member.shape, low - member.start, high - member.start, memory[low - first : high - first])


def outside_runs(model: nn.Module, *, exclude_frozen: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Buffers, and parameters that are in no run, by name; and the other names of everything that is tied."""
    contents = ModelTensors.of(model, exclude_frozen=exclude_frozen)
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
    """Optimizer states that are not shaped as their parameter (step counts, factored moments), by both names."""
    found: dict[str, dict[str, Any]] = {}
    for run in (run for unit in units for run in unit.trained) if optimizer is not None else ():
        assert optimizer is not None
        piece = optimizer.piece_of(run)
        for start, stop, values in optimizer.loose_states(piece):
            for member, _, _ in member_ranges(run.layout, piece.start + start, piece.start + stop):
                found.setdefault(member.name, {}).update(values)
    return found


# -- whole weights -----------------------------------------------------------------------------------------------------


def whole_tensors(contents: ModelTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor unsharded, in turn. All ranks iterate together; a unit is gathered only while it is passed."""
    by_home: dict[Home | None, list[str]] = {}
    for name, tensor in contents.tensors.items():
        by_home.setdefault(home_of(tensor), []).append(name)
    for home in sorted(by_home, key=lambda home: -1 if home is None else home.number):
        if home is not None:
            home.borrow()
        try:
            for name in by_home[home]:
                yield name, contents.tensors[name].detach()
        finally:
            if home is not None:
                home.give_back()


def consolidate(model: nn.Module, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """Gather the whole state dict to host memory on rank 0; None elsewhere. Tied weights stay tied."""
    contents = ModelTensors.of(model, exclude_frozen=exclude_frozen)
    first = data_group().rank == 0
    found = {}
    for name, tensor in whole_tensors(contents):
        if first:
            found[name] = tensor.to("cpu", copy=True)
    if not first:
        return None
    names = {**dict.fromkeys(contents.tensors), **dict.fromkeys(contents.aliases)}
    return {name: found[contents.aliases.get(name, name)] for name in names}


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    file_name: str = "model.safetensors",
    max_shard_size: int | str = "5GB",
    exclude_frozen: bool = False,
) -> None:
    """Save whole weights as safetensors (streamed, one unit in memory), or pickled if the file name ends otherwise."""
    if not file_name.endswith(".safetensors"):
        found = consolidate(model, exclude_frozen=exclude_frozen)
        together = _Together()
        together.first(lambda: os.makedirs(folder, exist_ok=True))
        together.first(lambda: _pickle(found, Path(folder, file_name)))
        together.agree()
        return
    contents = ModelTensors.of(model, exclude_frozen=exclude_frozen)
    entries = [(name, tensor.dtype, tuple(whole_shape(tensor))) for name, tensor in contents.tensors.items()]
    together = _Together()
    together.first(lambda: os.makedirs(folder, exist_ok=True))
    writer = together.first(
        lambda: SafetensorsWriter(
            folder, entries, file_name=file_name, max_shard_size=max_shard_size, aliases=contents.aliases
        )
    )
    for name, tensor in whole_tensors(contents):
        if writer is not None:
            together.first(partial(writer.write, name, tensor))
    if writer is not None:
        together.first(writer.close)
        if together.error is not None:
            writer.discard()
    together.agree()


def _pickle(found: object, path: Path) -> None:
    """torch.save by a rename: the old file or the new one, never a part of it."""
    unfinished = path.with_name(f".{path.name}.partial")
    with unfinished.open("wb") as file:
        torch.save(found, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


class _Together:
    """Rank 0 works alone while all ranks go through the same collectives; what fails there is raised everywhere."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._group = data_group()

    def first(self, work: Callable[[], T]) -> T | None:
        """Done on rank 0 only, and nothing more after an error."""
        if self._group.rank != 0 or self.error is not None:
            return None
        try:
            return work()
        except Exception as error:  # raised by `agree`, when no rank waits for this one any more
            self.error = error
            return None

    def agree(self) -> None:
        failed = Agreement(self._group, Ledger()).meet("saving", [int(self.error is not None)])
        if self.error is not None:
            raise self.error
        if failed[0][0]:
            raise RuntimeError("rank 0 could not save the weights: see its error")


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> int:
    """Fill a model's parameters and buffers from safetensors files; returns the bytes that this rank read.

    `path`: a file, an index, or a folder with either. Each rank reads the ranges it keeps and no others. With `strict`
    missing, unexpected and misshapen tensors are an error, listed together, before anything is written.
    """
    with SafetensorsReader.open(path) as weights:
        contents = ModelTensors.of(model)
        stored = {name: _stored_as(name, contents, weights) for name in contents.tensors}
        _check(contents, stored, weights, strict=strict)
        homes: dict[Home, None] = {}
        for tensor in contents.tensors.values():
            about_to_write(tensor)
        for name, tensor in contents.tensors.items():
            source, home = stored[name], home_of(tensor)
            if source is None:
                continue
            if home is None:
                _read_whole(weights, source, tensor)
            else:
                homes[home] = None
                run, index = home.run_of(tensor)
                _read_run(weights, source, run, index)
        for home in homes:
            home.tell_written()
        return weights.bytes_read


def _stored_as(name: str, contents: ModelTensors, weights: SafetensorsReader) -> str | None:
    """The file's name for a tensor: its own, or that of a tensor it is tied to."""
    known = {*weights.names, *weights.aliases}
    names = [name, *(alias for alias, first in contents.aliases.items() if first == name)]
    return next((candidate for candidate in names if candidate in known), None)


def _check(contents: ModelTensors, stored: dict[str, str | None], weights: SafetensorsReader, *, strict: bool) -> None:
    taken = {*stored.values(), *contents.aliases, *weights.aliases}
    problems = [f"missing: {name}" for name, source in stored.items() if source is None and strict]
    problems += [f"unexpected: {name}" for name in weights.names if name not in taken and strict]
    for name, source in stored.items():
        shape = tuple(whole_shape(contents.tensors[name]))
        if source is not None and tuple(weights.entry(source).shape) != shape:
            there = tuple(weights.entry(source).shape)
            problems.append(f"misshapen: {name} is {shape} in the model, {there} in the file")
    if problems:
        raise ValueError(
            f"{weights.path} does not fit the model:\n  " + "\n  ".join(problems) + "\nstrict=False skips what is "
            "missing or unexpected"
        )


def _read_whole(weights: SafetensorsReader, name: str, tensor: torch.Tensor) -> None:
    line = torch.empty(tensor.numel(), dtype=tensor.dtype)
    weights.read(name, 0, tensor.numel(), line)
    with torch.no_grad():
        tensor.copy_(line.view(tensor.shape))


def _read_run(weights: SafetensorsReader, name: str, run: Run, index: int) -> None:
    """Read the range of one parameter that this rank keeps, rounded to the dtype it computes in."""
    member = run.layout.members[index]
    start, stop = (0, run.layout.total) if run.rests_whole else run.own_range
    low, high = max(start, member.start), min(stop, member.stop)
    if low >= high:
        return
    part = torch.empty(high - low, dtype=run.dtype)
    weights.read(name, low - member.start, high - member.start, part)
    target = run.full if run.shard is None else run.shard
    run.freshen()
    run.forget_fetched()
    with torch.no_grad():
        write(target[low - start : high - start], part)
