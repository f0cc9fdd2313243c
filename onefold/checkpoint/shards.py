"""One rank's file of a checkpoint: stretches of named tensors, hashed while they are written."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from onefold.checkpoint.header import DTYPE_NAMES, DTYPES, write_header
from onefold.checkpoint.manifest import RANGE_BYTES, File, Part, checksum

# Threads that hash and write: copying to the page cache takes a core.
_WRITERS = 4


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


class ShardWriter:
    """A new file for known slots, written in any order, hashed on the way. Whole tensors keep their name and shape,
    others are named by their range. `slots` may be without memory (meta tensors) as long as those written have it.
    """

    def __init__(self, path: Path, slots: Sequence[Slot]) -> None:
        self._path = path
        self._slots = {_entry_name(slot): slot for slot in slots}
        assert len(self._slots) == len(slots), "a stretch is written twice"
        shapes = {
            name: (slot.dtype, slot.shape if slot.is_whole else (slot.stop - slot.start,))
            for name, slot in self._slots.items()
        }
        self._entries = write_header(path, shapes, {"format": "onefold"})
        self._header = path.read_bytes()
        self._sums: dict[str, list[Future[int]]] = {}
        self._file = path.open("r+b", buffering=0)
        self._pool = ThreadPoolExecutor(_WRITERS)
        self._under_way: deque[Future[int]] = deque()
        self._ring: list[torch.Tensor] = []

    def write(self, slot: Slot) -> None:
        """Returns before all is written; the memory must stay as it is until `close`."""
        name = _entry_name(slot)
        offset, sums = self._entries[name].offset, self._sums.setdefault(name, [])
        for piece in slot.memory.detach().split(RANGE_BYTES // slot.memory.itemsize) if slot.memory.numel() else ():
            while len(self._under_way) >= 2 * _WRITERS:
                self._under_way.popleft().result()
            tile = self._on_host(piece)
            sums.append(self._pool.submit(self._write_tile, tile, offset))
            self._under_way.append(sums[-1])
            offset += len(tile)

    def _on_host(self, piece: torch.Tensor) -> memoryview:
        """The bytes of a piece, through a ring of pinned buffers where it lies on a GPU."""
        if piece.is_cuda:
            if len(self._ring) < 2 * _WRITERS + 1:  # one more than can be under way
                self._ring.append(torch.empty(RANGE_BYTES, dtype=torch.uint8, pin_memory=True))
            else:
                self._ring.append(self._ring.pop(0))
            piece = self._ring[-1][: piece.nbytes].view(piece.dtype).copy_(piece)
        return piece.contiguous().view(torch.uint8).numpy().data

    def _write_tile(self, tile: memoryview, offset: int) -> int:
        write_all(self._file.fileno(), tile, offset)
        return checksum(tile)

    def close(self, own: Any) -> Record:
        """Flush. `own` is the rank's state, for the record."""
        with self._file:
            sums = {name: tuple(future.result() for future in futures) for name, futures in self._sums.items()}
            os.fsync(self._file.fileno())
            nbytes = os.fstat(self._file.fileno()).st_size
        parts = tuple(
            (slot.name, slot.dtype, slot.shape, Part(0, slot.start, slot.stop, self._entries[name].offset, sums[name]))
            for name, slot in self._slots.items()
        )
        shown = f"{self._path.parent.name}/{self._path.name}"
        return Record(File(shown, nbytes, len(self._header), checksum(self._header)), parts, own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._file.close()


def write_shard(path: Path, slots: Sequence[Slot], own: Any) -> Record:
    """Write the slots to a new file and flush it."""
    with ShardWriter(path, slots) as writer:
        for slot in slots:
            writer.write(slot)
        return writer.close(own)


def _entry_name(slot: Slot) -> str:
    return slot.name if slot.is_whole else f"{slot.name}[{slot.start}:{slot.stop}]"


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
