"""Writing of shard files, one per rank, and reading of any range of any tensor. Checksums verify all bytes read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.files import CheckpointError, RemovedError, check_object
from onefold.checkpoint.format.folder import FoundCheckpoint, choose, examine, removal
from onefold.checkpoint.format.manifest import (
    NAME,
    RANGE_BYTES,
    Manifest,
    ShardFile,
    StoredPart,
    StoredTensor,
    check_decoded_loose,
    check_decoded_state,
    checksum,
)
from onefold.checkpoint.format.safetensors_files import (
    DTYPE_NAMES,
    DTYPES,
    TensorEntry,
    bytes_of,
    make_header,
    read_header,
)
from onefold.disk_waits import waiting_for_disk
from onefold.offload.buffer import Buffer
from onefold.storage.place import NewFile, OpenFile, Place, PlaceLike, open_file, place, reason

# Number of attempts to open a checkpoint in a folder from which a job removes old checkpoints.
TRIES = 10


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of a named tensor, and the buffer on this rank that stores them."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    buffer: Buffer

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    @property
    def is_on_disk(self) -> bool:
        return self.buffer.is_on_disk

    @property
    def entry(self) -> tuple[str, tuple[int, ...]]:
        return _entry(self.name, self.shape, self.start, self.stop)

    @staticmethod
    def whole(name: str, tensor: torch.Tensor) -> Slot:
        return Slot(name, tuple(tensor.shape), 0, tensor.numel(), Buffer.of(tensor.detach().reshape(-1)))


@dataclass(frozen=True)
class ShardRecord:
    """Description of a shard file for rank 0: the file, its parts (with file number 0), and the per-rank state."""

    file: ShardFile
    parts: tuple[tuple[str, torch.dtype, tuple[int, ...], StoredPart], ...]
    own: Any

    def as_json(self) -> dict[str, Any]:
        parts = [[name, DTYPE_NAMES[dtype], shape, part.as_json()] for name, dtype, shape, part in self.parts]
        return {"file": self.file.as_json(), "parts": parts, "own": self.own}

    @staticmethod
    def from_json(tree: Any) -> ShardRecord:
        parts = tuple(
            (name, DTYPES[dtype], tuple(shape), StoredPart.from_json(part, name))
            for name, dtype, shape, part in tree["parts"]
        )
        return ShardRecord(ShardFile.from_json(tree["file"], "file"), parts, tree["own"])

    def numbered(self, file: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], StoredPart]]:
        for name, dtype, shape, part in self.parts:
            yield name, dtype, shape, replace(part, file=file)


def _entry(name: str, shape: tuple[int, ...], start: int, stop: int) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape of a range of a tensor in a file. A whole tensor keeps its name and shape."""
    return (name, shape) if stop - start == math.prod(shape) else (f"{name}[{start}:{stop}]", (stop - start,))


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writer of a new shard file for known slots. It computes the checksums.

    On a file system, the slots may be written in any order, in an object store only in the order of `write_order`.

    `slots` may be meta tensors. The slots that are passed to `write` must have memory.
    """

    def __init__(self, path: Place, slots: Sequence[Slot]) -> None:
        self._path = path
        for slot in slots:
            if slot.dtype not in DTYPE_NAMES:
                raise ValueError(f"{slot.name}: {slot.dtype} cannot be saved")
        self._slots = {slot.entry[0]: slot for slot in slots}
        assert len(self._slots) == len(slots), "a range is written twice"
        shapes = {name: (slot.dtype, slot.entry[1]) for name, slot in self._slots.items()}
        self._header, self._entries = make_header(path, shapes, {"format": "onefold"})
        self._parts: dict[str, StoredPart] = {}
        nbytes = sum(entry.numel * entry.dtype.itemsize for entry in self._entries.values())
        self._file = NewFile(path, len(self._header) + nbytes)
        self._file.write(self._header, 0)

    def write(self, slot: Slot) -> None:
        name = slot.entry[0]
        start = offset = self._entries[name].offset
        sums = []
        for tile in _tiles(slot.buffer):
            sums.append(checksum(tile))
            self._file.write(tile, offset)
            offset += len(tile)
        self._parts[name] = StoredPart(0, slot.start, slot.stop, start, tuple(sums))

    def close(self, own: Any) -> ShardRecord:
        """Flush the file and return its record. `own` is the per-rank state."""
        with waiting_for_disk("the flush of", str(self._path)):
            nbytes = self._file.finish()
        parts = tuple((slot.name, slot.dtype, slot.shape, self._parts[name]) for name, slot in self._slots.items())
        shown = f"{self._path.parent.name}/{self._path.name}"
        return ShardRecord(ShardFile(shown, nbytes, len(self._header), checksum(self._header)), parts, own)

    def __exit__(self, *exc_info: object) -> None:
        self._file.__exit__(*exc_info)


def write_order(slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots in the order of their bytes in a file: wide dtypes first, and slots on disk before others."""
    return sorted(slots, key=lambda slot: (-slot.dtype.itemsize, not slot.is_on_disk))


def write_shard(
    path: Place, slots: Sequence[Slot], own: Any, free_disk: Callable[[], None] = lambda: None
) -> ShardRecord:
    """Write the slots to a new file and flush it. `free_disk` is called when the slots on disk are written."""
    ordered = write_order(slots)
    left = sum(slot.is_on_disk for slot in ordered)
    with ShardWriter(path, ordered) as writer:
        for slot in ordered:
            if not left:
                free_disk()
            writer.write(slot)
            left -= slot.is_on_disk
        free_disk()
        return writer.close(own)


def _tiles(buffer: Buffer) -> Iterator[memoryview]:
    """Iterate over the bytes of a buffer's values, one checksum range at a time.

    The next range of a GPU buffer is copied while the current one is written.
    """
    if not buffer.is_plain_tensor:
        for piece in buffer.split(RANGE_BYTES // buffer.dtype.itemsize):
            yield bytes_of(piece.fetch().cpu())
        return
    memory = buffer.tensor
    pieces = memory.detach().split(RANGE_BYTES // memory.itemsize) if memory.numel() else ()
    if not memory.is_cuda:
        yield from (bytes_of(piece.contiguous()) for piece in pieces)
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
                yield bytes_of(before[0])


# -- reading -----------------------------------------------------------------------------------------------------------


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """Reader of any range of any tensor in a published checkpoint. Checksums verify all bytes read.

    Reading uses no collectives and no pickle.
    """

    def __init__(self, folder: Place, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0
        self._files: dict[int, OpenFile] = {}
        self._last: OpenFile | None = None
        # Files whose headers have been compared with the manifest.
        self._checked: set[int] = set()

    @staticmethod
    def open(path: PlaceLike, tag: str | None = None) -> CheckpointReader:
        """Open the checkpoint in the folder of a tag, or one in a folder of tags.

        In a folder of tags, open `tag`, by default the one that `latest` names, or the newest complete one.
        """
        folder = place(path)
        for _ in range(TRIES):
            found = examine(folder)
            if tag is not None or found.manifest is None:
                candidates, _ = choose(folder, tag)
                whole = (entry for entry in candidates if not entry.problems)
                found = next(whole, candidates[0] if candidates else found)
            if not found.removed:
                break
        return CheckpointReader.of(found)

    @staticmethod
    def of(found: FoundCheckpoint, hint: str = "") -> CheckpointReader:
        """Open a checkpoint that was found. Raise if it is not complete."""
        if found.manifest is None or found.problems:
            kind = RemovedError if found.removed else CheckpointError
            raise kind("; ".join(found.problems) + hint)
        return CheckpointReader(found.folder, found.manifest)

    def names(self, prefix: str) -> Iterator[str]:
        """Iterate over the names of the tensors with a prefix such as `model/`, without the prefix."""
        return (name.removeprefix(prefix) for name in self.manifest.tensors if name.startswith(prefix))

    def stored(self, name: str) -> StoredTensor:
        found = self.manifest.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self.folder}: no tensor {name!r}")
        return found

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Read elements [start, stop) into a flat tensor on any device, and cast them to its dtype."""
        stored = self.stored(name)
        assert 0 <= start <= stop <= stored.numel, (name, start, stop)
        assert out.shape == (stop - start,), (name, out.shape)
        out = out.detach()
        direct = out.dtype is stored.dtype and out.device.type == "cpu" and out.is_contiguous()
        for part, number, first, last in _ranges(stored, start, stop):
            low, high = max(start, first), min(stop, last)
            target = out[low - start : high - start]
            fits = direct and (low, high) == (first, last)
            data = target if fits else torch.empty(last - first, dtype=stored.dtype)
            self._read_range(name, part, number, bytes_of(data))
            if not fits:
                target.copy_(data[low - first : high - first])

    def read_order(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots in the order of their bytes in the files, so that reads follow each other."""

        def first_byte(slot: Slot) -> tuple[int, int]:
            for part, number, _, _ in _ranges(self.stored(slot.name), slot.start, slot.stop):
                return part.file, part.offset + number * RANGE_BYTES
            return 0, 0

        return sorted(slots, key=first_byte)

    def verify(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Read elements [start, stop), one range at a time, and verify their checksums."""
        stored = self.stored(name)
        buffer = memoryview(bytearray(min(RANGE_BYTES, stored.nbytes)))
        for part, number, first, last in _ranges(stored, start, stored.numel if stop is None else stop):
            self._read_range(name, part, number, buffer[: (last - first) * stored.dtype.itemsize])

    def _read_range(self, name: str, part: StoredPart, number: int, data: memoryview) -> None:
        file, offset = self.folder / self.manifest.files[part.file].name, part.offset + number * RANGE_BYTES
        opened = self._open(part.file)
        if self._last is not None and self._last is not opened:
            self._last.release()
        self._last = opened
        try:
            with waiting_for_disk("the read of", str(file)):
                got = opened.read_into(data, offset)
        except OSError as error:  # includes a removed file on a network file system
            raise self._unreadable(file, error) from error
        self.bytes_read += got
        where = f"{file}: {name!r}, bytes {offset} to {offset + len(data)}"
        if got < len(data):
            raise CheckpointError(f"{where}: truncated, the file ends before them")
        if checksum(data) != part.checksums[number]:
            raise CheckpointError(f"{where}: damaged, the checksum does not match")

    def check_headers(self) -> None:
        """Compare the headers of all files with the manifest: names, dtypes, shapes and offsets. Close the files."""
        for number in range(len(self.manifest.files)):
            if number not in self._checked:
                self._open(number)
                self._files.pop(number).close()

    def _open(self, file: int) -> OpenFile:
        path = self.folder / self.manifest.files[file].name
        try:
            if file not in self._files:
                self._files[file] = open_file(path)
            if file not in self._checked:
                self._check_header(file, path)
        except OSError as error:
            raise self._unreadable(path, error) from error
        return self._files[file]

    def _unreadable(self, path: Place, error: OSError) -> CheckpointError:
        gone = removal(self.folder, self.manifest)
        return RemovedError(gone) if gone else CheckpointError(f"{path} cannot be read: {reason(error)}")

    def _check_header(self, file: int, path: Place) -> None:
        try:
            entries = read_header(self._files[file], path)[0]
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        named = {}
        for name, stored, part in self.manifest.parts_by_file[file]:
            entry_name, shape = _entry(name, stored.shape, part.start, part.stop)
            named[entry_name] = TensorEntry(stored.dtype, shape, path, part.offset)
        for name in {**entries, **named}:
            there, here = entries.get(name), named.get(name)
            if there != here:
                raise CheckpointError(f"{path}: {name!r} is {_spell(there)}, but {_spell(here)} in the manifest")
        self._checked.add(file)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a whole tensor to host memory."""
        stored = self.stored(name)
        flat = torch.empty(stored.numel, dtype=dtype or stored.dtype)
        self.read(name, 0, stored.numel, flat)
        return flat.view(stored.shape)

    # -- plain data ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The state of the job: optimizer, scheduler, loss scale, counters, client state, config."""
        return self._decode(self.manifest.state, "state", "state/", check_decoded_state)

    def own(self, rank: int) -> dict[str, Any]:
        """Return the per-rank state: random states and data position."""
        return self._decode(self.manifest.ranks[rank], f"ranks[{rank}]", f"rank/{rank}/", check_object)

    def loose(self, rank: int) -> dict[str, Any]:
        """Return the optimizer states of one rank that do not have the shape of their parameter."""
        tree = self.manifest.ranks[rank].get("loose", {})
        return self._decode(tree, f"ranks[{rank}].loose", f"rank/{rank}/", check_decoded_loose)

    def _decode(self, tree: Any, where: str, prefix: str, check: Callable[[Any, str], object]) -> dict[str, Any]:
        try:
            found = plain_data.decode(tree, _Tensors(self, prefix))
            check(found, where)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.folder / NAME}: {where}: {error}") from error
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _ranges(stored: StoredTensor, start: int, stop: int) -> Iterator[tuple[StoredPart, int, int, int]]:
    """Iterate over the checksum ranges that overlap [start, stop): part, index in the part, first and last element."""
    size = RANGE_BYTES // stored.dtype.itemsize
    for part in stored.parts:
        for number in range(max(0, start - part.start) // size, -(-(min(stop, part.stop) - part.start) // size)):
            first, last = part.start + number * size, min(part.start + (number + 1) * size, part.stop)
            if max(start, first) < min(stop, last):
                yield part, number, first, last


class _Tensors(dict[str, torch.Tensor]):
    """The tensors of a tagged tree, which are read when they are accessed."""

    def __init__(self, checkpoint: CheckpointReader, prefix: str) -> None:
        super().__init__()
        self._checkpoint, self._prefix = checkpoint, prefix

    def __missing__(self, key: str) -> torch.Tensor:
        return self._checkpoint.tensor(self._prefix + key)

    def __contains__(self, key: object) -> bool:
        return f"{self._prefix}{key}" in self._checkpoint.manifest.tensors


def _spell(entry: TensorEntry | None) -> str:
    return "missing" if entry is None else f"{DTYPE_NAMES[entry.dtype]} {list(entry.shape)} at byte {entry.offset}"
