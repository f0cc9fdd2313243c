"""The `.metadata` file of torch.distributed.checkpoint (DCP), read without executing code from it.

torch writes the file with pickle, and reads it with the standard unpickler, which imports and calls whatever the file
names. Here an unpickler accepts only the opcodes that such a file contains, and only the names of the metadata classes.
Each class is replaced by a placeholder, which only stores its arguments and its state, as for DeepSpeed's files.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from onefold.checkpoint.deepspeed.torch_files import (
    MAX_DEPTH,
    MAX_REPETITION,
    PlainCopier,
    RefusedPickle,
    StandIn,
    enum_member,
    read_torch_bytes,
    refusing,
    require,
)
from onefold.storage.place import file_size, open_file, read_small

METADATA = ".metadata"
_MAX_BYTES = 1 << 30

Shape = tuple[int, ...]
PathInState = tuple[str | int, ...]
"""The keys that lead to a value in the nested state dict that was saved."""

# -- the unpickler -----------------------------------------------------------------------------------------------------

_MODULE = "torch.distributed.checkpoint."
_KINDS = (
    *(f"{_MODULE}metadata.{name}" for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    f"{_MODULE}filesystem._StorageInfo", "torch.serialization._get_layout",
    *(f"pathlib.{module}{name}" for module in ("", "_local.") for name in ("PosixPath", "WindowsPath")),
)  # fmt: skip


def _size(*given: Any) -> Shape:
    """Replace torch.Size."""
    sizes = given[0] if given else ()
    require(len(given) < 2 and type(sizes) is tuple and all(type(size) is int for size in sizes), "a torch.Size")
    return tuple(sizes)


NAMES: dict[str, Any] = {
    **{name: type(name.rpartition(".")[2], (StandIn,), {"name": name}) for name in _KINDS},
    "torch.Size": _size,
    "builtins.getattr": enum_member,
}
_CALLABLE = frozenset(NAMES.values())
_OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "BUILD",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "GLOBAL", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWOBJ", "NEWTRUE", "NONE", "PROTO", "REDUCE", "SETITEM", "SETITEMS", "SHORT_BINUNICODE",
    "STACK_GLOBAL", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
_CODES = {getattr(pickle, name)[0] for name in _OPCODES}
_PythonUnpickler: Any = pickle._Unpickler  # its methods are not part of typeshed


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Python's own unpickler, without all opcodes and names that the metadata does not need."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        dtype = vars(torch).get(name) if module == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else NAMES.get(full)
        require(found is not None, f"requests {full}")
        return found

    def load_reduce(self) -> None:
        require(callable(self.stack[-2]) and self.stack[-2] in _CALLABLE, "a call")
        super().load_reduce()

    def load_newobj(self) -> None:
        require(isinstance(self.stack[-2], type), "an object without a class")
        super().load_newobj()

    def load_build(self) -> None:
        require(isinstance(self.stack[-2], StandIn), "the state of a value that has none")
        super().load_build()

    def load_setitem(self) -> None:
        _check_dict(self.stack[-3], self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        target = self.metastack[-1][-1]
        _check_dict(target, self.stack[::2])
        super().load_setitems()

    dispatch: ClassVar = {
        code: method for code, method in _PythonUnpickler.dispatch.items() if code in _CODES
    } | {
        pickle.REDUCE[0]: load_reduce, pickle.NEWOBJ[0]: load_newobj, pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems,
    }  # fmt: skip


def _check_dict(target: Any, keys: Sequence[Any]) -> None:
    """Refuse keys that would be compared or hashed by their content, such as tuples of any depth."""
    require(type(target) is dict and all(type(key) is str or isinstance(key, StandIn) for key in keys), "a dictionary")


def read_pickle(data: bytes, where: str) -> Any:
    """Unpickle metadata to plain data and placeholders. Raise `RefusedPickle` for anything else."""
    with refusing(where):
        try:
            found = _Unpickler(io.BytesIO(data)).load()
        except KeyError as error:
            raise RefusedPickle(f"opcode {error} is not one of a metadata file") from error
        return PlainCopier(set(), MAX_REPETITION * len(data)).copy(found, 0)


# -- the content -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DcpValue:
    """A value, or a chunk of a tensor: a range of bytes in a file of the folder, which is a file of `torch.save`."""

    name: str
    file: Path
    start: int
    nbytes: int

    def read(self) -> Any:
        where = f"{self.file}, bytes {self.start} to {self.start + self.nbytes}"
        with open_file(self.file) as opened:
            data = bytearray(min(self.nbytes, max(0, opened.size - self.start)))
            if len(data) < self.nbytes or opened.read_into(memoryview(data), self.start) < self.nbytes:
                raise ValueError(f"{where}: the file ends before them")
        return read_torch_bytes(bytes(data), where)


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the folder, and the chunks that contain its elements: offsets, sizes and place."""

    name: str
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[tuple[Shape, Shape, DcpValue], ...]

    def read(self) -> torch.Tensor:
        """Read all chunks. Raise if they do not cover the tensor exactly."""
        whole = torch.zeros(self.shape, dtype=self.dtype)
        covered = torch.zeros(self.shape, dtype=torch.bool)
        for offsets, sizes, stored in self.chunks:
            box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            found = stored.read()
            if not isinstance(found, torch.Tensor) or (found.dtype, tuple(found.shape)) != (self.dtype, sizes):
                raise ValueError(f"{stored.file}: {self.name!r} at {list(offsets)} is not a {self.dtype} {list(sizes)}")
            if covered[box].any():
                raise ValueError(f"{stored.file}: the chunks of {self.name!r} overlap at {list(offsets)}")
            whole[box], covered[box] = found, True
        if not covered.all():
            raise ValueError(f"{self.name!r} is incomplete: its chunks do not cover all elements")
        return whole


Entry = DcpTensor | DcpValue


@dataclass(frozen=True)
class DcpFolder:
    """An open folder of DCP: its entries, by their paths in the state dict that was saved."""

    folder: Path
    entries: Mapping[PathInState, Entry]
    num_files: int

    @staticmethod
    def open(folder: Path) -> DcpFolder:
        """Read and check the metadata of a folder. Raise a ValueError that names what is unknown."""
        path = folder / METADATA
        found = read_pickle(read_small(path, _MAX_BYTES), str(path))
        try:
            return _parse(folder, found)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not in the format of torch.distributed.checkpoint: {error!r}") from error


def _parse(folder: Path, found: Any) -> DcpFolder:
    content = _fields(found, "Metadata")
    places = {}
    for key, value in content["storage_data"].items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        places[index["fqn"], index.get("offset")] = _stored(folder, index["fqn"], info)
    in_order = sorted(places.values(), key=lambda stored: (stored.file, stored.start))
    for one, other in pairwise(in_order):
        if one.file == other.file and one.start + one.nbytes > other.start:
            raise ValueError(f"{folder / METADATA}: {one.name!r} and {other.name!r} share bytes of {one.file.name}")
    known = {METADATA, *(stored.file.name for stored in places.values())}
    if unknown := sorted(entry.name for entry in folder.iterdir() if entry.name not in known):
        raise ValueError(
            f"{folder}: not written by torch.distributed.checkpoint: {', '.join(unknown)}. Move them away."
        )
    paths = content["planner_data"] or {}
    entries: dict[PathInState, Entry] = {}
    for name, value in content["state_dict_metadata"].items():
        path = paths.get(name, (name,))
        if (
            type(path) is not tuple
            or not 0 < len(path) <= MAX_DEPTH
            or not all(type(key) in (str, int) for key in path)
            or path in entries
        ):
            raise ValueError(f"{folder / METADATA}: {name!r} has no path of its own in the state dict")
        if value.name.endswith(".BytesStorageMetadata"):
            entries[path] = places[name, None]
        else:
            entries[path] = _tensor(name, _fields(value, "TensorStorageMetadata"), places)
    return DcpFolder(folder, entries, len(known) - 1)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, StandIn) or value.name.rpartition(".")[2] != kind or type(value.state) is not dict:
        raise TypeError(f"expected a {kind}")
    return value.state


def _stored(folder: Path, name: str, info: Mapping[str, Any]) -> DcpValue:
    file, start, nbytes = info["relative_path"], info["offset"], info["length"]
    if type(file) is not str or Path(file).name != file or file in ("", ".", "..", METADATA):
        raise ValueError(f"{folder / METADATA}: {name!r} is in {file!r}, which is not a file of the folder")
    if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
        raise ValueError(f"{folder / METADATA}: {name!r} has no range of bytes")
    if start + nbytes > file_size(folder / file):
        raise ValueError(f"{folder / file}: truncated, it ends before {name!r}")
    if info.get("transform_descriptors"):
        raise ValueError(f"{folder / METADATA}: {name!r} is compressed or encrypted, which is not supported")
    return DcpValue(name, folder / file, start, nbytes)


def _tensor(name: str, value: Mapping[str, Any], places: Mapping[tuple[str, Shape | None], DcpValue]) -> DcpTensor:
    dtype, shape = value["properties"].state[0], value["size"]
    chunks = []
    for chunk in value["chunks"]:
        offsets, sizes = (_fields(chunk, "ChunkStorageMetadata")[key] for key in ("offsets", "sizes"))
        fits = len(offsets) == len(sizes) == len(shape)
        fits = fits and all(min(o, n) >= 0 and o + n <= end for o, n, end in zip(offsets, sizes, shape, strict=True))
        if not fits:
            raise ValueError(f"{name!r}: a chunk of {list(sizes)} at {list(offsets)} is outside of {list(shape)}")
        if (name, offsets) not in places:
            raise ValueError(f"{name!r}: the chunk at {list(offsets)} is not stored")
        chunks.append((offsets, sizes, places[name, offsets]))
    if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
        raise ValueError(f"{name!r}: a tensor of {dtype} and {list(shape)}")
    stored = sum(place.nbytes for _, _, place in chunks)
    if math.prod(shape) * dtype.itemsize > stored:
        raise ValueError(f"{name!r}: {list(shape)} of {dtype} is larger than its {stored} stored bytes")
    return DcpTensor(name, dtype, shape, tuple(chunks))
