"""Ranges of tensors read straight into memory, exports written tensor by tensor. No process group, no pickle."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Self

import torch

from onefold.checkpoint.files import open_regular, told
from onefold.checkpoint.folder import sync
from onefold.checkpoint.header import (
    DTYPE_NAMES,
    INDEX,
    Entry,
    find,
    is_plain,
    read_header,
    read_index,
    read_into,
    write_header,
    write_index,
)

TILE = 1 << 20  # elements that are cast or copied at a time
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Weights:
    """The tensors of one model on disk. `open` checks all headers; `read` reads ranges and counts `bytes_read`.

    Files stay open, so an export that replaces this one meanwhile does not mix with it. `aliases` are names left out
    of the files because they are tied to a stored tensor; `entry` and `read` take them too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.bytes_read = 0
        self._entries: dict[str, Entry] = {}
        self._descriptors: dict[Path, int] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """`path`: a .safetensors file, a .safetensors.index.json, or a folder with either (model.* goes first)."""
        weights = cls(find(Path(path)))
        try:
            weights._read_headers()
        except BaseException:
            weights.close()
            raise
        return weights

    def _read_headers(self) -> None:
        if not self.path.name.endswith(INDEX):
            self._entries = self._open_file(self.path)
            return
        headers: dict[str, dict[str, Entry]] = {}
        for name, file_name in read_index(self.path).items():
            if file_name not in headers:
                headers[file_name] = self._open_file(self.path.parent / file_name)
            if name not in headers[file_name]:
                raise ValueError(f"{self.path}: {name!r} should be in {file_name!r}, which has no such tensor")
            self._entries[name] = headers[file_name][name]

    def _open_file(self, file: Path) -> dict[str, Entry]:
        try:
            descriptor = self._descriptors[file] = open_regular(file)
        except (OSError, UnicodeError) as error:
            why = told(error) if isinstance(error, OSError) else error
            raise ValueError(
                f"{self.path}: there is no file {file.name!r} beside it that can be read: {why}"
            ) from error
        entries, metadata = read_header(descriptor, file)
        self.metadata |= metadata
        return entries

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def aliases(self) -> dict[str, str]:
        stored = self._entries
        return {name: target for name, target in self.metadata.items() if target in stored and name not in stored}

    def entry(self, name: str) -> Entry:
        found = self._entries.get(name) or self._entries.get(self.metadata.get(name, name))
        if found is None:
            raise ValueError(f"{self.path}: no tensor {name!r}")
        return found

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Elements [start, stop) of the flattened tensor into a flat CPU tensor; another dtype is cast in tiles."""
        entry = self.entry(name)
        if not 0 <= start <= stop <= entry.numel:
            raise ValueError(f"{entry.file}: {name!r} has {entry.numel} elements, not [{start}, {stop})")
        if out.device.type != "cpu" or out.shape != (stop - start,) or not out.is_contiguous():
            raise ValueError(f"{name!r}: `out` must be a contiguous 1-d CPU tensor of {stop - start} elements")
        _check_cast(name, entry.dtype, out.dtype)
        out = out.detach()
        if out.dtype is entry.dtype:
            self._read_exact(name, entry, start, out)
            return
        tile = torch.empty(min(TILE, out.numel()), dtype=entry.dtype)
        for piece in out.split(TILE):
            self._read_exact(name, entry, start, tile[: piece.numel()])
            piece.copy_(tile[: piece.numel()])
            start += piece.numel()

    def _read_exact(self, name: str, entry: Entry, start: int, out: torch.Tensor) -> None:
        offset = entry.offset + start * entry.dtype.itemsize
        got = read_into(self._descriptors[entry.file], _bytes_of(out), offset)
        self.bytes_read += got
        if got < out.nbytes:
            raise ValueError(f"{entry.file}: {name!r} is cut short: the file was truncated after it was opened")

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Writer:
    """An export of known names, dtypes and shapes, written in any order: whole, or not there at all.

    Files are cut as Hugging Face cuts them: `max_shard_size` counts tensor bytes, a larger tensor has its own file.
    All is written in a hidden folder beside the target and moved into place by `close`; until then, and after an
    error, an earlier export is as it was. One writer per folder and file name at a time.

    `aliases` (left-out name -> stored name) are tied weights: stored once, and noted in the metadata of the file that
    holds them, as `safetensors.torch.save_model` does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        entries: Iterable[tuple[str, torch.dtype, Iterable[int]]],
        *,
        file_name: str = "model.safetensors",
        max_shard_size: int | str = "5GB",
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if not is_plain(file_name):
            raise ValueError(f"file_name must be a plain name that ends with .safetensors, not {file_name!r}")
        self.folder = Path(folder)
        self._stem = file_name.removesuffix(".safetensors")
        self._aliases = dict(aliases or {})
        metadata = {"format": "pt"} if metadata is None else dict(metadata)
        shards = _cut(_check_entries(entries, metadata, self._aliases), parse_size(max_shard_size))
        count = len(shards)
        names = [f"{self._stem}-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
        self.file_names = [*names, self._stem + INDEX] if count > 1 else [file_name]

        self.folder.mkdir(parents=True, exist_ok=True)
        prefix, suffix = f".{file_name}-", ".partial"
        for leftover in self.folder.iterdir():  # of a writer that was killed
            if leftover.name.startswith(prefix) and leftover.name.endswith(suffix):
                shutil.rmtree(leftover)
        self._partial = tempfile.TemporaryDirectory(prefix=prefix, suffix=suffix, dir=self.folder)
        self._entries: dict[str, Entry] = {}
        for shard, name in zip(shards, self.file_names, strict=False):
            tied = {alias: stored for alias, stored in self._aliases.items() if stored in shard}
            self._entries |= write_header(Path(self._partial.name, name), shard, metadata | tied)
        if count > 1:
            write_index(Path(self._partial.name, self._stem + INDEX), self._entries)
        self._missing = dict.fromkeys(self._entries)
        self._open = True

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """One whole tensor, from any device, cast to its entry's dtype."""
        if not self._open:
            raise ValueError(f"{self.folder}: this writer is closed")
        if name not in self._missing:
            why = "was already written" if name in self._entries else "is not among the entries"
            if name in self._aliases:
                why = f"is tied to {self._aliases[name]!r}, which stands for both"
            raise ValueError(f"{self.folder}: {name!r} {why}")
        entry = self._entries[name]
        if tensor.shape != entry.shape:
            raise ValueError(f"{self.folder}: {name!r} has shape {tuple(tensor.shape)}, its entry says {entry.shape}")
        _check_cast(name, tensor.dtype, entry.dtype)
        tile = torch.empty(min(TILE, entry.numel), dtype=entry.dtype)
        with entry.file.open("r+b") as file:
            file.seek(entry.offset)
            for piece in tensor.detach().reshape(-1).split(TILE):
                file.write(_bytes_of(tile[: piece.numel()].copy_(piece)))
        del self._missing[name]

    def close(self) -> None:
        """Flush to disk, move into place, then remove what is left of an earlier export."""
        if not self._open:
            return
        self._open = False
        try:
            if self._missing:
                raise ValueError(f"{self.folder}: never written: {', '.join(map(repr, self._missing))}")
            for name in self.file_names:
                sync(Path(self._partial.name, name))
            self._move_into_place()
        finally:
            self._partial.cleanup()

    def _move_into_place(self) -> None:
        # An old index over shards that are half replaced would name a mixture. Without it, a crash here is loud.
        if any((self.folder / name).exists() for name in self.file_names[:-1]):
            (self.folder / (self._stem + INDEX)).unlink(missing_ok=True)
            sync(self.folder)
        for name in self.file_names:
            os.replace(Path(self._partial.name, name), self.folder / name)
        sync(self.folder)
        ours = re.compile(rf"{re.escape(self._stem)}((-\d{{5,}}-of-\d{{5,}})?\.safetensors|{re.escape(INDEX)})")
        for file in self.folder.iterdir():
            if ours.fullmatch(file.name) and file.name not in self.file_names:
                file.unlink()

    def discard(self) -> None:
        """Give up: remove what was written so far; an earlier export stays."""
        self._open = False
        self._partial.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def parse_size(size: int | str) -> int:
    """Bytes: 1000, "500MB" and "5GB" (powers of ten), "2GiB" (of two)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])(i?))?B?", str(size).strip())
    unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else 0
    if not match or Fraction(match[1]) * unit < 1:
        raise ValueError(f"a size is a positive number of bytes (500000000, '500MB', '5GB', '2GiB'), not {size!r}")
    return int(Fraction(match[1]) * unit)


def _check_entries(
    entries: Iterable[tuple[str, torch.dtype, Iterable[int]]], metadata: dict[str, str], aliases: dict[str, str]
) -> Shapes:
    shapes: Shapes = {}
    for name, dtype, shape in entries:
        if name in shapes or name == "__metadata__":
            raise ValueError(f"{name!r} is {'given twice' if name in shapes else 'reserved'}")
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name!r}: safetensors files do not hold {dtype}")
        shapes[name] = dtype, tuple(int(size) for size in shape)
    for alias, stored in aliases.items():
        if stored not in shapes or alias in shapes or alias in metadata:
            raise ValueError(f"alias {alias!r} of {stored!r}: the latter alone must be an entry, the former a new name")
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError(f"metadata must map strings to strings: {metadata!r}")
    return shapes


def _cut(shapes: Shapes, limit: int) -> list[Shapes]:
    """Files in order of the entries: a tensor that no longer fits begins the next one."""
    files: list[Shapes] = [{}]
    filled = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if files[-1] and filled + nbytes > limit:
            files.append({})
            filled = 0
        files[-1][name] = dtype, shape
        filled += nbytes
    return files


def _check_cast(name: str, source: torch.dtype, target: torch.dtype) -> None:
    if not torch.can_cast(source, target):
        raise ValueError(f"{name!r}: {source} is not cast to {target}")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
