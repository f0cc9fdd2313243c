"""A published checkpoint, open for reading: any range of any tensor, each byte checked before it is believed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from onefold.checkpoint import sound, tagged
from onefold.checkpoint.files import open_regular, told
from onefold.checkpoint.folder import Found, choose, examine, removal
from onefold.checkpoint.header import DTYPE_NAMES, Entry, read_header, read_into
from onefold.checkpoint.manifest import (
    NAME,
    RANGE_BYTES,
    CheckpointError,
    Manifest,
    Part,
    RemovedError,
    Stored,
    checksum,
)

# A folder in which a job removes old checkpoints is looked at so many times before a reader gives up.
TRIES = 10


class Checkpoint:
    """`read` takes ranges of flattened tensors and counts `bytes_read`. No process group, no pickle."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0
        self._descriptors: dict[int, int] = {}
        # Files whose headers say what the manifest says.
        self._checked: set[int] = set()
        self._parts: dict[int, list[tuple[str, Stored, Part]]] | None = None

    @staticmethod
    def open(path: str | os.PathLike[str], tag: str | None = None) -> Checkpoint:
        """The folder of a tag, or a folder of tags: then `tag`, or what `latest` names, or the newest complete one."""
        folder = Path(path)
        for _ in range(TRIES):
            found = examine(folder)
            if tag is not None or found.manifest is None:
                candidates, _ = choose(folder, tag)
                whole = (entry for entry in candidates if not entry.problems)
                found = next(whole, candidates[0] if candidates else found)
            if not found.removed:
                break
        return Checkpoint.of(found)

    @staticmethod
    def of(found: Found, hint: str = "") -> Checkpoint:
        """One that was found, if it is complete."""
        if found.manifest is None or found.problems:
            kind = RemovedError if found.removed else CheckpointError
            raise kind("; ".join(found.problems) + hint)
        return Checkpoint(found.folder, found.manifest)

    def names(self, prefix: str) -> Iterator[str]:
        """What follows a prefix, `model/` say, in the names of tensors."""
        return (name.removeprefix(prefix) for name in self.manifest.tensors if name.startswith(prefix))

    def stored(self, name: str) -> Stored:
        found = self.manifest.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self.folder}: holds no tensor {name!r}")
        return found

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Elements [start, stop) into a flat tensor on any device; another dtype is cast."""
        stored = self.stored(name)
        assert 0 <= start <= stop <= stored.numel, (name, start, stop)
        assert out.shape == (stop - start,), (name, out.shape)
        out = out.detach()
        direct = out.dtype is stored.dtype and out.device.type == "cpu" and out.is_contiguous()
        size = RANGE_BYTES // stored.dtype.itemsize
        for part in stored.parts:
            # Whole ranges are read, since a checksum covers a whole range.
            for number in range(max(0, start - part.start) // size, -(-(min(stop, part.stop) - part.start) // size)):
                first, last = part.start + number * size, min(part.start + (number + 1) * size, part.stop)
                low, high = max(start, first), min(stop, last)
                if low >= high:
                    continue
                target = out[low - start : high - start]
                fits = direct and (low, high) == (first, last)
                data = target if fits else torch.empty(last - first, dtype=stored.dtype)
                self._read_range(name, part, number, number * RANGE_BYTES, _bytes_of(data))
                if not fits:
                    target.copy_(data[low - first : high - first])

    def _read_range(self, name: str, part: Part, number: int, low: int, data: memoryview) -> None:
        file = self.folder / self.manifest.files[part.file].name
        descriptor = self._descriptor(part.file)
        try:
            got = read_into(descriptor, data, part.offset + low)
        except OSError as error:  # also of a network's file that was removed
            raise self._unreadable(file, error) from error
        self.bytes_read += got
        where = f"{file}: {name!r}, bytes {part.offset + low} to {part.offset + low + len(data)}"
        if got < len(data):
            raise CheckpointError(f"{where}: the file ends before them: truncated")
        if checksum(data) != part.checksums[number]:
            raise CheckpointError(f"{where}: damaged, the checksum does not fit")

    def check_headers(self) -> None:
        """Every file's own header against the manifest: names, dtypes, shapes, places. None stays open for it."""
        for number in range(len(self.manifest.files)):
            if number not in self._checked:
                self._descriptor(number)
                os.close(self._descriptors.pop(number))

    def _descriptor(self, file: int) -> int:
        if file not in self._descriptors:
            path = self.folder / self.manifest.files[file].name
            try:
                descriptor = open_regular(path)
            except OSError as error:
                raise self._unreadable(path, error) from error
            try:
                self._check_header(file, descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptors[file] = descriptor
        return self._descriptors[file]

    def _unreadable(self, path: Path, error: OSError) -> CheckpointError:
        gone = removal(self.folder, self.manifest)
        return RemovedError(gone) if gone else CheckpointError(f"{path}: cannot be read: {told(error)}")

    def _check_header(self, file: int, descriptor: int, path: Path) -> None:
        if file in self._checked:
            return
        try:
            entries = read_header(descriptor, path)[0]
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if self._parts is None:
            self._parts = {}
            for name, stored in self.manifest.tensors.items():
                for part in stored.parts:
                    self._parts.setdefault(part.file, []).append((name, stored, part))
        named = {}
        for name, stored, part in self._parts.get(file, []):
            is_whole = part.stop - part.start == stored.numel
            entry_name = name if is_whole else f"{name}[{part.start}:{part.stop}]"
            shape = stored.shape if is_whole else (part.stop - part.start,)
            named[entry_name] = Entry(stored.dtype, shape, path, part.offset)
        for name in {**entries, **named}:
            there, here = entries.get(name), named.get(name)
            if there != here:
                raise CheckpointError(f"{path}: {name!r} is {_spell(there)} there, but {_spell(here)} in the manifest")
        self._checked.add(file)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, whole, in host memory."""
        stored = self.stored(name)
        flat = torch.empty(stored.numel, dtype=dtype or stored.dtype)
        self.read(name, 0, stored.numel, flat)
        return flat.view(stored.shape)

    def verify(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Read elements [start, stop) through and check them, holding one range at a time."""
        stored = self.stored(name)
        size = RANGE_BYTES // stored.dtype.itemsize
        buffer = memoryview(bytearray(min(RANGE_BYTES, stored.nbytes)))
        for part in stored.parts:
            for number, first in enumerate(range(part.start, part.stop, size)):
                last = min(first + size, part.stop)
                if first < (stored.numel if stop is None else stop) and start < last:
                    data = buffer[: (last - first) * stored.dtype.itemsize]
                    self._read_range(name, part, number, number * RANGE_BYTES, data)

    # -- what is not tensors ------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """Of the job: optimizer, scheduler, loss scale, counters, client state."""
        return self._decode(self.manifest.state, "state", "state/", sound.check_job)

    def own(self, rank: int) -> dict[str, Any]:
        """Of one rank: random numbers, data position."""
        return self._decode(self.manifest.ranks[rank], f"ranks[{rank}]", f"rank/{rank}/", sound.check_object)

    def loose(self, rank: int) -> dict[str, Any]:
        """Of the optimizer, on one rank: states that do not lie along a parameter."""
        tree = self.manifest.ranks[rank].get("loose", {})
        return self._decode(tree, f"ranks[{rank}].loose", f"rank/{rank}/", sound.check_loose)

    def _decode(self, tree: Any, where: str, prefix: str, check: Callable[[Any, str], None]) -> dict[str, Any]:
        try:
            found = tagged.decode(tree, _Tensors(self, prefix))
            check(found, where)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.folder / NAME}: {where}: {error}") from error
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        while self._descriptors:
            with suppress(OSError):
                os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Tensors(dict[str, torch.Tensor]):
    """Tensors of a tagged tree, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        super().__init__()
        self._checkpoint, self._prefix = checkpoint, prefix

    def __missing__(self, key: str) -> torch.Tensor:
        return self._checkpoint.tensor(self._prefix + key)

    def __contains__(self, key: object) -> bool:
        return f"{self._prefix}{key}" in self._checkpoint.manifest.tensors


def _spell(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{DTYPE_NAMES[entry.dtype]} {list(entry.shape)} at byte {entry.offset}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
