"""One rank's file of a checkpoint: stretches of named tensors, hashed while they are written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.header import DTYPE_NAMES, DTYPES, Entry, write_header
from onefold.checkpoint.manifest import RANGE_BYTES, File, Part, checksum


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of a named tensor of some shape, and the flat memory that holds them on this rank."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    memory: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == math.prod(self.shape)

    @staticmethod
    def whole(name: str, tensor: torch.Tensor) -> Slot:
        return Slot(name, tuple(tensor.shape), 0, tensor.numel(), tensor.detach().reshape(-1))


@dataclass(frozen=True)
class Record:
    """What a rank says of its file: the file, its parts (of file number 0), and the rank's own state."""

    file: File
    parts: tuple[tuple[str, torch.dtype, tuple[int, ...], Part], ...]
    own: Any

    def as_json(self) -> dict[str, Any]:
        parts = [[name, DTYPE_NAMES[dtype], shape, part.as_json()] for name, dtype, shape, part in self.parts]
        return {"file": self.file.as_json(), "parts": parts, "own": self.own}

    @staticmethod
    def from_json(tree: Any) -> Record:
        parts = tuple(
            (name, DTYPES[dtype], tuple(shape), Part.from_json(part)) for name, dtype, shape, part in tree["parts"]
        )
        return Record(File.from_json(tree["file"]), parts, tree["own"])

    def numbered(self, file: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Part]]:
        for name, dtype, shape, part in self.parts:
            yield name, dtype, shape, replace(part, file=file)


def write_shard(path: Path, slots: Sequence[Slot], own: Any) -> Record:
    """Write the slots to a new file and flush it. Whole tensors keep their name and shape, others get their range."""
    names = {_entry_name(slot): slot for slot in slots}
    assert len(names) == len(slots), "a stretch is written twice"
    shapes = {
        name: (slot.dtype, slot.shape if slot.is_whole else (slot.stop - slot.start,)) for name, slot in names.items()
    }
    entries = write_header(path, shapes, {"format": "onefold"})
    header = path.read_bytes()
    sums: dict[str, list[int]] = {name: [] for name in names}
    with path.open("r+b", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, max(1, len(header) + sum(entry.nbytes for entry in entries.values())))
        for name, slot in sorted(names.items(), key=lambda item: entries[item[0]].offset):
            offset = entries[name].offset
            for tile in _tiles(slot.memory):
                sums[name].append(checksum(tile))
                write_all(file.fileno(), tile, offset)
                offset += len(tile)
        os.fsync(file.fileno())
        nbytes = os.fstat(file.fileno()).st_size
    parts = tuple(
        (slot.name, slot.dtype, slot.shape, _part(slot, entries[name], sums[name])) for name, slot in names.items()
    )
    shown = f"{path.parent.name}/{path.name}"
    return Record(File(shown, nbytes, len(header), checksum(header)), parts, own)


def _entry_name(slot: Slot) -> str:
    return slot.name if slot.is_whole else f"{slot.name}[{slot.start}:{slot.stop}]"


def _part(slot: Slot, entry: Entry, sums: list[int]) -> Part:
    return Part(0, slot.start, slot.stop, entry.offset, tuple(sums))


def _tiles(memory: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a flat tensor, a checksum's range at a time, from any device."""
    for piece in memory.detach().split(RANGE_BYTES // memory.itemsize) if memory.numel() else ():
        yield piece.cpu().contiguous().view(torch.uint8).numpy().data


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
