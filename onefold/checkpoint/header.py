"""The safetensors format: what a header and an index say, checked to the last byte. No tensor data.

A file is the header's length (8 bytes, little endian), the header (JSON: name -> dtype, shape, data_offsets), then the
tensors' bytes without holes. Several files are one model by way of an index (JSON: name -> file).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint import fields
from onefold.checkpoint.files import read_small

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit, and a bound on what a hostile file makes us allocate
MAX_DIMS = 64  # torch's
INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its bytes begin at `offset` from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def find(path: Path) -> Path:
    """The file or the index that `path` means."""
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
            raise ValueError(f"{path}: which of {', '.join(file.name for file in found)}?")
    raise ValueError(f"{path}: holds no .safetensors file")


def is_plain(file_name: str) -> bool:
    """A .safetensors file in the same folder: an index never leads elsewhere."""
    return file_name.endswith(".safetensors") and not re.search(r"[/\\\0]", file_name)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill the buffer; returns how many bytes there were. The kernel gives at most 2 GiB a call."""
    done = 0
    while done < len(buffer) and (got := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += got
    return done


def read_header(descriptor: int, file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries of a file and its metadata."""
    size = os.fstat(descriptor).st_size
    prefix = bytearray(8)
    read_into(descriptor, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"{file}: not a safetensors file, or truncated: {size} bytes, with a header of {length}")
    text = bytearray(length)
    read_into(descriptor, memoryview(text), 8)
    if not text.startswith(b"{"):
        raise ValueError(f"{file}: the header is not a JSON object")
    header = _parse(bytes(text), file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{file}: __metadata__ must map strings to strings")

    begin, num_bytes, end = 8 + length, size - 8 - length, 0
    infos = {name: _check(f"{file}: tensor {name!r}", info, num_bytes) for name, info in header.items()}
    for name, (_, _, start, stop) in sorted(infos.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise ValueError(f"{file}: tensor {name!r} begins at {start}, where the one before it ends at {end}")
        end = stop
    if end != num_bytes:
        raise ValueError(f"{file}: {num_bytes} bytes of data, but its tensors end at {end}")
    return {name: Entry(dtype, shape, file, begin + at) for name, (dtype, shape, at, _) in infos.items()}, metadata


def _check(where: str, info: Any, num_bytes: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Dtype, shape, start and stop of one tensor."""
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
        raise ValueError(f"{where}: data_offsets {offsets} do not lie in {num_bytes} bytes of data; truncated?")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{where}: data_offsets {offsets} do not fit {dtype} of shape {list(shape)}")
    return dtype, shape, offsets[0], offsets[1]


def write_header(
    file: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, Entry]:
    """Begin a file; returns where its tensors go.

    Wide dtypes come first: without holes, every tensor then lies at a multiple of its element size.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    begin = 8 + len(text)
    return {name: Entry(*shapes[name], file, begin + header[name]["data_offsets"][0]) for name in shapes}


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    weight_map = _parse(read_small(path, MAX_HEADER_BYTES), path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: has no weight_map from tensors to files")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not is_plain(file_name):
            raise ValueError(f"{path}: {name!r} must be in a .safetensors file beside it, not in {file_name!r}")
    return weight_map


def write_index(path: Path, entries: Mapping[str, Entry]) -> None:
    total = {"total_size": sum(entry.nbytes for entry in entries.values())}
    weight_map = {name: entry.file.name for name, entry in entries.items()}
    path.write_text(json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n")


def _parse(text: bytes, file: Path) -> dict[str, Any]:
    try:
        parsed = fields.parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: not a JSON object")
    return parsed
