"""One rank's file of a checkpoint: stretches of named tensors, hashed while they are written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from onefold.checkpoint.header import DTYPE_NAMES, DTYPES, write_header
from onefold.checkpoint.manifest import RANGE_BYTES, File, Part, checksum
from onefold.offload.nvme import DiskTensor
from onefold.offload.param_shard import Flat


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of a named tensor of some shape, and the flat memory (or file) that holds them on this
    rank.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    memory: Flat

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
            (name, DTYPES[dtype], tuple(shape), Part.from_json(part, name))
            for name, dtype, shape, part in tree["parts"]
        )
        return Record(File.from_json(tree["file"], "file"), parts, tree["own"])

    def numbered(self, file: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Part]]:
        for name, dtype, shape, part in self.parts:
            yield name, dtype, shape, replace(part, file=file)


class ShardWriter:
    """A new file for known slots, written in any order, hashed on the way. Whole tensors keep their name and shape,
    others are named by their range. `slots` may be without memory (meta tensors) as long as those written have it.
    """

    def __init__(self, path: Path, slots: Sequence[Slot]) -> None:
        self._path = path
        for slot in slots:
            if slot.dtype not in DTYPE_NAMES:
                raise ValueError(f"{slot.name}: a checkpoint cannot hold {slot.dtype}")
        self._slots = {_entry_name(slot): slot for slot in slots}
        assert len(self._slots) == len(slots), "a stretch is written twice"
        shapes = {
            name: (slot.dtype, slot.shape if slot.is_whole else (slot.stop - slot.start,))
            for name, slot in self._slots.items()
        }
        self._entries = write_header(path, shapes, {"format": "onefold"})
        self._header = path.read_bytes()
        self._sums: dict[str, tuple[int, ...]] = {}
        self._file = path.open("r+b", buffering=0)

    def write(self, slot: Slot) -> None:
        name = _entry_name(slot)
        offset, sums = self._entries[name].offset, []
        for tile in _tiles(slot.memory):
            sums.append(checksum(tile))
            write_all(self._file.fileno(), tile, offset)
            offset += len(tile)
        self._sums[name] = tuple(sums)

    def close(self, own: Any) -> Record:
        """Flush. `own` is the rank's state, for the record."""
        with self._file:
            os.fsync(self._file.fileno())
            nbytes = os.fstat(self._file.fileno()).st_size
        parts = tuple(
            (slot.name, slot.dtype, slot.shape, Part(0, slot.start, slot.stop, entry.offset, self._sums[name]))
            for name, slot in self._slots.items()
            for entry in [self._entries[name]]
        )
        shown = f"{self._path.parent.name}/{self._path.name}"
        return Record(File(shown, nbytes, len(self._header), checksum(self._header)), parts, own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()


def write_shard(path: Path, slots: Sequence[Slot], own: Any, free_disk: Callable[[], None] = lambda: None) -> Record:
    """Write the slots to a new file and flush it. What rests on a disk comes first; then `free_disk` is called."""
    with ShardWriter(path, slots) as writer:
        for slot in slots:
            if isinstance(slot.memory, DiskTensor):
                writer.write(slot)
        free_disk()
        for slot in slots:
            if not isinstance(slot.memory, DiskTensor):
                writer.write(slot)
        return writer.close(own)


def _entry_name(slot: Slot) -> str:
    return slot.name if slot.is_whole else f"{slot.name}[{slot.start}:{slot.stop}]"


def _tiles(memory: Flat) -> Iterator[memoryview]:
    """The bytes of a flat tensor, a checksum's range at a time. From a GPU the next one comes while one is written."""
    if isinstance(memory, DiskTensor):
        for part in memory.split(RANGE_BYTES // memory.itemsize):
            yield part.load().view(torch.uint8).numpy().data
        return
    pieces = memory.detach().split(RANGE_BYTES // memory.itemsize) if memory.numel() else ()
    if not memory.is_cuda:
        yield from (piece.contiguous().view(torch.uint8).numpy().data for piece in pieces)
        return
    buffers = [torch.empty(RANGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    under_way: tuple[torch.Tensor, torch.cuda.Event] | None = None
    with torch.cuda.device(memory.device):
        for number in range(len(pieces) + 1):
            before = under_way
            if number < len(pieces):
                piece, event = pieces[number], torch.cuda.Event()
                place = buffers[number % 2][: piece.nbytes].view(piece.dtype).copy_(piece, non_blocking=True)
                event.record()
                under_way = place, event
            if before is not None:
                before[1].synchronize()
                yield before[0].view(torch.uint8).numpy().data


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
