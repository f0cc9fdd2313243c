"""Safetensors files: strict checks of headers and indexes, reading of ranges, and export tensor by tensor.

A file consists of the length of the header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
data_offsets), and the bytes of the tensors without gaps. An index (JSON: name -> file) combines several files to one
model. This module needs no process group and no pickle.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from onefold.checkpoint.format.files import parse_json
from onefold.log import parse_size
from onefold.storage.place import OpenFile, Place, local_path, open_file, read_small, reason, sync

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format, which also bounds the memory for untrusted files
MAX_DIMS = 64  # the limit of torch
INDEX = ".safetensors.index.json"
TILE = 1 << 20  # number of elements that are cast or copied at a time
Entry = tuple[str, torch.dtype, Iterable[int]]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. Its bytes begin at `offset` from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Place
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def find(path: Path) -> Path:
    """Find the file or the index that `path` refers to."""
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file or folder")
        return path
    for name in ("model.safetensors", "model" + INDEX):
        if (path / name).is_file():
            return path / name
    for pattern in ("*" + INDEX, "*.safetensors"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{path} has several files. Name one of {', '.join(file.name for file in found)}.")
    raise ValueError(f"{path}: no .safetensors file")


def is_plain(file_name: str) -> bool:
    """Return whether a name is a plain .safetensors file name. An index must not refer to other folders."""
    return file_name.endswith(".safetensors") and not re.search(r"[/\\\0]", file_name)


def read_header(opened: OpenFile, file: Place) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read and check the header of a file. Return its entries and its metadata."""
    size = opened.size
    prefix = bytearray(8)
    opened.read_into(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"{file}: not a safetensors file, or truncated: {size} bytes, with a header of {length}")
    text = bytearray(length)
    opened.read_into(memoryview(text), 8)
    if not text.startswith(b"{"):
        raise ValueError(f"{file}: the header is not a JSON object")
    header = _parse(bytes(text), file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{file}: __metadata__ must map strings to strings")

    begin, num_bytes, end = 8 + length, size - 8 - length, 0
    infos = {name: _check_entry(f"{file}: tensor {name!r}", info, num_bytes) for name, info in header.items()}
    for name, (_, _, start, stop) in sorted(infos.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise ValueError(f"{file}: tensor {name!r} begins at {start}, but the previous one ends at {end}")
        end = stop
    if end != num_bytes:
        raise ValueError(f"{file}: {num_bytes} bytes of data, but its tensors end at {end}")
    entries = {name: TensorEntry(dtype, shape, file, begin + at) for name, (dtype, shape, at, _) in infos.items()}
    return entries, metadata


def _check_entry(where: str, info: Any, num_bytes: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Check one entry of a header. Return its dtype, shape, start and stop."""
    if not isinstance(info, dict) or not info.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: needs dtype, shape and data_offsets")
    dtype = DTYPES.get(info["dtype"]) if isinstance(info["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{where}: unknown dtype {info['dtype']!r}")
    for key, most in (("shape", MAX_DIMS), ("data_offsets", 2)):
        numbers = info[key]
        if not isinstance(numbers, list) or len(numbers) > most:
            raise ValueError(f"{where}: {key} must be a list of at most {most} numbers")
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"{where}: {key} must be whole numbers from 0 to 2**63 - 1, not {numbers}")
    shape, offsets = tuple(info["shape"]), info["data_offsets"]
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= num_bytes:
        raise ValueError(f"{where}: data_offsets {offsets} are outside the {num_bytes} bytes of data (truncated?)")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{where}: data_offsets {offsets} do not fit {dtype} of shape {list(shape)}")
    return dtype, shape, offsets[0], offsets[1]


def make_header(file: Place, shapes: Shapes, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the header of a new file, and the entries with the offsets of its tensors.

    Wide dtypes come first, so that every tensor is aligned to its element size without gaps.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    entries = {name: TensorEntry(*shapes[name], file, begin + header[name]["data_offsets"][0]) for name in shapes}
    return len(text).to_bytes(8, "little") + text, entries


def read_index(path: Path) -> dict[str, str]:
    """Read an index, and return the file name of each tensor."""
    weight_map = _parse(read_small(path, MAX_HEADER_BYTES), path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: no weight_map from tensors to files")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not is_plain(file_name):
            raise ValueError(
                f"{path}: {name!r} must be in a .safetensors file in the same folder, not in {file_name!r}"
            )
    return weight_map


def _parse(text: bytes, file: Place) -> dict[str, Any]:
    try:
        parsed = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: not a JSON object")
    return parsed


class SafetensorsReader(AbstractContextManager["SafetensorsReader"]):
    """Reader of the tensors of one model on disk. `open` checks all headers, and `read` reads ranges.

    Files are kept open, so that a concurrent export to the same folder has no effect on this reader. `aliases` are
    the names that the files omit because they are tied to a stored tensor. `entry` and `read` accept them too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.bytes_read = 0
        self._entries: dict[str, TensorEntry] = {}
        self._files: dict[Place, OpenFile] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a .safetensors file, a .safetensors.index.json, or a folder with either. model.* is preferred."""
        weights = cls(find(local_path(path, "the weights")))
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
        headers: dict[str, dict[str, TensorEntry]] = {}
        for name, file_name in read_index(self.path).items():
            if file_name not in headers:
                headers[file_name] = self._open_file(self.path.parent / file_name)
            if name not in headers[file_name]:
                raise ValueError(f"{self.path}: {name!r} is not in {file_name!r}, which the index names")
            self._entries[name] = headers[file_name][name]

    def _open_file(self, file: Path) -> dict[str, TensorEntry]:
        try:
            opened = self._files[file] = open_file(file)
        except (OSError, UnicodeError) as error:
            why = f"the file {file.name!r} in the same folder cannot be read: {reason(error)}"
            raise ValueError(f"{self.path}: {why}") from error
        entries, metadata = read_header(opened, file)
        self.metadata |= metadata
        return entries

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def aliases(self) -> dict[str, str]:
        stored = self._entries
        return {name: target for name, target in self.metadata.items() if target in stored and name not in stored}

    def entry(self, name: str) -> TensorEntry:
        found = self._entries.get(name) or self._entries.get(self.metadata.get(name, name))
        if found is None:
            raise ValueError(f"{self.path}: no tensor {name!r}")
        return found

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Read elements [start, stop) of a flattened tensor into a flat CPU tensor, and cast them to its dtype."""
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

    def _read_exact(self, name: str, entry: TensorEntry, start: int, out: torch.Tensor) -> None:
        offset = entry.offset + start * entry.dtype.itemsize
        got = self._files[entry.file].read_into(bytes_of(out), offset)
        self.bytes_read += got
        if got < out.nbytes:
            raise ValueError(f"{entry.file}: {name!r} is incomplete: the file was truncated after it was opened")

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ExportFiles(AbstractContextManager["ExportFiles"]):
    """The files of an export, split and named as Hugging Face does, and moved into place together.

    `limit` is the maximum number of tensor bytes per file; a larger tensor gets a separate file. Files are written to a
    hidden folder inside the target. Until `publish`, and after `discard`, an earlier export is unchanged. Only one
    export per folder and file name may run at a time.
    """

    def __init__(self, folder: str | os.PathLike[str], file_name: str, sizes: Mapping[str, int], limit: int) -> None:
        self.folder = local_path(folder, "the folder of an export")
        self._stem, self._suffix = os.path.splitext(file_name)
        self._sizes = sizes
        cut = _cut(sizes, limit)
        count = len(cut)
        names = [f"{self._stem}-{k + 1:05d}-of-{count:05d}{self._suffix}" for k in range(count)]
        self.shards = dict(zip(names, cut, strict=True)) if count > 1 else {file_name: cut[0]}
        """The names of the tensors in each file."""
        self._index = f"{file_name}.index.json"
        self.names = [*self.shards, self._index] if count > 1 else [file_name]
        self.folder.mkdir(parents=True, exist_ok=True)
        prefix, suffix = f".{file_name}-", ".partial"
        for leftover in self.folder.iterdir():  # from an export that was killed
            if leftover.name.startswith(prefix) and leftover.name.endswith(suffix):
                shutil.rmtree(leftover)
        self._partial = tempfile.TemporaryDirectory(prefix=prefix, suffix=suffix, dir=self.folder)

    def path(self, name: str) -> Path:
        """Return the path at which a file is written before it is published."""
        return Path(self._partial.name, name)

    def write_index(self, weight_map: Mapping[str, str]) -> None:
        """Write the index (name -> file) if there are several files."""
        if len(self.names) > 1:
            index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": weight_map}
            self.path(self._index).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def publish(self) -> None:
        """Flush the files to disk, move them into place, and remove the remaining files of an earlier export."""
        try:
            for name in self.names:
                sync(self.path(name))
            # Remove the old index first: after a crash it would combine old and new files. Without it, loading fails.
            if any((self.folder / name).exists() for name in self.names[:-1]):
                (self.folder / self._index).unlink(missing_ok=True)
                sync(self.folder)
            for name in self.names:
                os.replace(self.path(name), self.folder / name)
            sync(self.folder)
            stem, suffix = re.escape(self._stem), re.escape(self._suffix)
            ours = re.compile(rf"{stem}(-\d{{5,}}-of-\d{{5,}})?{suffix}|{re.escape(self._index)}")
            for file in self.folder.iterdir():
                if ours.fullmatch(file.name) and file.name not in self.names:
                    file.unlink()
        finally:
            self._partial.cleanup()

    def discard(self) -> None:
        """Remove the files written so far. An earlier export is kept."""
        self._partial.cleanup()

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.publish() if kind is None else self.discard()


class SafetensorsWriter(AbstractContextManager["SafetensorsWriter"]):
    """Writer of an export with known names, dtypes and shapes, in any order. The export is published atomically.

    `aliases` (omitted name -> stored name) are tied weights. They are stored once, and recorded in the metadata of the
    file that contains them, as `safetensors.torch.save_model` does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        entries: Iterable[Entry],
        *,
        file_name: str = "model.safetensors",
        max_shard_size: int | str = "5GB",
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if not is_plain(file_name):
            raise ValueError(f"file_name must be a plain name that ends with .safetensors, not {file_name!r}")
        self._aliases = dict(aliases or {})
        metadata = {"format": "pt"} if metadata is None else dict(metadata)
        shapes = _check_entries(entries, metadata, self._aliases)
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
        self._files = ExportFiles(folder, file_name, sizes, parse_size(max_shard_size))
        self.folder, self.file_names = self._files.folder, self._files.names
        self._entries: dict[str, TensorEntry] = {}
        for name, inside in self._files.shards.items():
            tied = {alias: stored for alias, stored in self._aliases.items() if stored in inside}
            shard = {entry: shapes[entry] for entry in inside}
            header, placed = make_header(self._files.path(name), shard, metadata | tied)
            self._files.path(name).write_bytes(header)
            self._entries |= placed
        self._files.write_index({name: entry.file.name for name, entry in self._entries.items()})
        self._missing = dict.fromkeys(self._entries)
        self._open = True

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one whole tensor, from any device, cast to the dtype of its entry."""
        if not self._open:
            raise ValueError(f"{self.folder}: the writer is closed")
        if name not in self._missing:
            why = "was already written" if name in self._entries else "is not among the entries"
            if name in self._aliases:
                why = f"is tied to {self._aliases[name]!r}, which is stored for both"
            raise ValueError(f"{self.folder}: {name!r} {why}")
        entry = self._entries[name]
        if tensor.shape != entry.shape:
            raise ValueError(f"{self.folder}: {name!r} has shape {tuple(tensor.shape)}, its entry {entry.shape}")
        _check_cast(name, tensor.dtype, entry.dtype)
        tile = torch.empty(min(TILE, entry.numel), dtype=entry.dtype)
        with self._files.path(entry.file.name).open("r+b") as file:
            file.seek(entry.offset)
            for piece in tensor.detach().reshape(-1).split(TILE):
                file.write(bytes_of(tile[: piece.numel()].copy_(piece)))
        del self._missing[name]

    def close(self) -> None:
        """Publish the export. Raise if a tensor has not been written."""
        if not self._open:
            return
        if self._missing:
            self.discard()
            raise ValueError(f"{self.folder}: tensors were not written: {', '.join(map(repr, self._missing))}")
        self._open = False
        self._files.publish()

    def discard(self) -> None:
        """Remove the files written so far. An earlier export is kept."""
        self._open = False
        self._files.discard()

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close() if kind is None else self.discard()


def _check_entries(entries: Iterable[Entry], metadata: dict[str, str], aliases: dict[str, str]) -> Shapes:
    shapes: Shapes = {}
    for name, dtype, shape in entries:
        if name in shapes or name == "__metadata__":
            raise ValueError(f"{name!r} is {'given twice' if name in shapes else 'reserved'}")
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name!r}: safetensors does not support {dtype}")
        shapes[name] = dtype, tuple(int(size) for size in shape)
    for alias, stored in aliases.items():
        if stored not in shapes or alias in shapes or alias in metadata:
            raise ValueError(f"alias {alias!r} of {stored!r}: the alias must be a new name, and {stored!r} an entry")
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError(f"metadata must map strings to strings: {metadata!r}")
    return shapes


def _cut(sizes: Mapping[str, int], limit: int) -> list[dict[str, None]]:
    """Distribute tensors over files in order. A tensor that exceeds the limit of a file starts the next one."""
    files: list[dict[str, None]] = [{}]
    filled = 0
    for name, nbytes in sizes.items():
        if files[-1] and filled + nbytes > limit:
            files.append({})
            filled = 0
        files[-1][name] = None
        filled += nbytes
    return files


def _check_cast(name: str, source: torch.dtype, target: torch.dtype) -> None:
    if not torch.can_cast(source, target):
        raise ValueError(f"{name!r}: {source} cannot be cast to {target}")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
