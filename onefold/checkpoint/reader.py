"""A published checkpoint, open for reading: any range of any tensor, each byte checked before it is believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from onefold.checkpoint import tagged
from onefold.checkpoint.folder import choose, examine
from onefold.checkpoint.header import read_into
from onefold.checkpoint.manifest import RANGE_BYTES, CheckpointError, Manifest, Part, Stored, checksum


class Checkpoint:
    """`read` takes ranges of flattened tensors and counts `bytes_read`. No process group, no pickle."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0
        self._descriptors: dict[int, int] = {}

    @staticmethod
    def open(path: str | os.PathLike[str], tag: str | None = None) -> Checkpoint:
        """The folder of a tag, or a folder of tags: then `tag`, or what `latest` names, or the newest complete one."""
        folder = Path(path)
        found = examine(folder)
        if tag is not None or found.manifest is None:
            candidates, _ = choose(folder, tag)
            found = next((entry for entry in candidates if not entry.problems), candidates[0] if candidates else found)
        if found.manifest is None or found.problems:
            raise CheckpointError("; ".join(found.problems))
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
        got = read_into(self._descriptor(part.file), data, part.offset + low)
        self.bytes_read += got
        where = f"{file}: {name!r}, bytes {part.offset + low} to {part.offset + low + len(data)}"
        if got < len(data):
            raise CheckpointError(f"{where}: the file ends before them: truncated")
        if checksum(data) != part.checksums[number]:
            raise CheckpointError(f"{where}: damaged, the checksum does not fit")

    def _descriptor(self, file: int) -> int:
        if file not in self._descriptors:
            path = self.folder / self.manifest.files[file].name
            try:
                self._descriptors[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        return self._descriptors[file]

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
        return self._decode(self.manifest.state, "state/")

    def own(self, rank: int) -> dict[str, Any]:
        """Of one rank: random numbers, data position."""
        return self._decode(self.manifest.ranks[rank], f"rank/{rank}/")

    def loose(self, rank: int) -> dict[str, Any]:
        """Of the optimizer, on one rank: states that do not lie along a parameter."""
        return self._decode(self.manifest.ranks[rank].get("loose", {}), f"rank/{rank}/")

    def _decode(self, tree: Any, prefix: str) -> dict[str, Any]:
        try:
            found = tagged.decode(tree, _Tensors(self, prefix))
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.folder}: the manifest's {prefix}: {error}") from error
        assert isinstance(found, dict), prefix
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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
