"""The manifest of a checkpoint: every tensor by name, the files its stretches lie in, and their checksums. No tensors.

`docs/checkpoints.md` describes the file for readers that are not onefold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from onefold.checkpoint.header import DTYPE_NAMES, DTYPES, MAX_DIMS

FORMAT = "onefold-checkpoint"
VERSION = 1
NAME = "manifest.json"

# A part has one checksum for each stretch of this many bytes, so that a rank that needs a piece of it can check what
# it reads without reading the rest.
RANGE_BYTES = 4 << 20

_HEAD = '{"xxh3":"%016x","manifest":'
_HEAD_BYTES = len(_HEAD % 0)


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or does not fit; the message says which file, what is wrong, what to do."""


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a flattened tensor, in one file from `offset` on."""

    file: int
    start: int
    stop: int
    offset: int
    checksums: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        sums = [f"{value:016x}" for value in self.checksums]
        return {"file": self.file, "start": self.start, "stop": self.stop, "offset": self.offset, "xxh3": sums}

    @staticmethod
    def from_json(tree: Any) -> Part:
        file, start, stop, offset = numbers = [tree[key] for key in ("file", "start", "stop", "offset")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"a part has file, start, stop and offset from 0 up, not {numbers}")
        return Part(file, start, stop, offset, tuple(int(text, 16) for text in tree["xxh3"]))


@dataclass(frozen=True)
class Stored:
    """One tensor: what it is as a whole, and the parts that make it up, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        parts = [part.as_json() for part in self.parts]
        return {"dtype": DTYPE_NAMES[self.dtype], "shape": self.shape, "parts": parts}

    @staticmethod
    def from_json(tree: Any) -> Stored:
        shape = tuple(tree["shape"])
        if len(shape) > MAX_DIMS or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"a shape is a short list of sizes, not {shape}")
        stored = Stored(DTYPES[tree["dtype"]], shape, tuple(Part.from_json(part) for part in tree["parts"]))
        end = 0
        for part in stored.parts:
            nbytes = (part.stop - part.start) * stored.dtype.itemsize
            if part.start != end or part.stop < part.start or len(part.checksums) != math.ceil(nbytes / RANGE_BYTES):
                raise ValueError(f"parts must follow each other, with a checksum each {RANGE_BYTES} bytes: {part}")
            end = part.stop
        if end != stored.numel:
            raise ValueError(f"the parts end at element {end} of {stored.numel}")
        return stored


@dataclass(frozen=True)
class File:
    """One safetensors file of a checkpoint; `name` is relative to the folder of the tag."""

    name: str
    nbytes: int
    header_bytes: int
    header_checksum: int

    def as_json(self) -> dict[str, Any]:
        sums = f"{self.header_checksum:016x}"
        return {"name": self.name, "bytes": self.nbytes, "header_bytes": self.header_bytes, "header_xxh3": sums}

    @staticmethod
    def from_json(tree: Any) -> File:
        folder, _, file = str(tree["name"]).partition("/")
        if not folder or not file or "/" in file or "\\" in tree["name"] or {folder, file} & {".", ".."}:
            raise ValueError(f"a file lies in a folder beside the manifest, not at {tree['name']!r}")
        return File(tree["name"], int(tree["bytes"]), int(tree["header_bytes"]), int(tree["header_xxh3"], 16))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    `parameters` maps each parameter to its optimizer group, None where it is frozen. `left_out` are frozen parameters
    that the save was told to leave out. `state` (of the job) and `ranks` (of each rank) are tagged JSON, whose tensors
    stand among `tensors` as `state/...` and `rank/N/...`.
    """

    tag: str
    saved: str
    global_steps: int
    world_size: int
    files: tuple[File, ...]
    tensors: Mapping[str, Stored]
    parameters: Mapping[str, int | None]
    state: Any
    ranks: Sequence[Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    writer: str = ""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def data_folders(self) -> set[str]:
        return {file.name.partition("/")[0] for file in self.files}

    def to_text(self) -> bytes:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "writer": self.writer,
            "tag": self.tag,
            "saved": self.saved,
            "global_steps": self.global_steps,
            "world_size": self.world_size,
            "range_bytes": RANGE_BYTES,
            "files": [file.as_json() for file in self.files],
            "parameters": self.parameters,
            "aliases": self.aliases,
            "left_out": list(self.left_out),
            "state": self.state,
            "ranks": list(self.ranks),
            "tensors": {name: stored.as_json() for name, stored in self.tensors.items()},
        }
        text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        return (_HEAD % checksum(text)).encode() + text + b"}\n"

    @staticmethod
    def from_text(text: bytes, path: Path) -> Manifest:
        body = text[_HEAD_BYTES:-2]
        if text[:_HEAD_BYTES] != (_HEAD % checksum(body)).encode() or text[-2:] != b"}\n":
            raise CheckpointError(f"{path}: the manifest is damaged: its checksum does not fit its text")
        try:
            tree = json.loads(body)
            if tree["format"] != FORMAT or tree["version"] != VERSION or tree["range_bytes"] != RANGE_BYTES:
                raise ValueError(
                    f"format {tree['format']} version {tree['version']}; this onefold reads version {VERSION}"
                )
            files = tuple(File.from_json(file) for file in tree["files"])
            tensors = {name: Stored.from_json(stored) for name, stored in tree["tensors"].items()}
            if any(part.file >= len(files) for stored in tensors.values() for part in stored.parts):
                raise ValueError("a part names a file that is not listed")
            return Manifest(
                tag=tree["tag"],
                saved=tree["saved"],
                global_steps=tree["global_steps"],
                world_size=tree["world_size"],
                files=files,
                tensors=tensors,
                parameters=tree["parameters"],
                state=tree["state"],
                ranks=tree["ranks"],
                aliases=tree["aliases"],
                left_out=tree["left_out"],
                writer=tree["writer"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a manifest that this onefold reads: {error!r}") from error

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a tag's folder."""
        path = folder / NAME
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: has no {NAME}: nothing was published there") from None
        return Manifest.from_text(text, path)


def join_parts(parts: Iterable[tuple[str, torch.dtype, tuple[int, ...], Part]]) -> dict[str, Stored]:
    """Every rank's parts as whole tensors. A tensor that is not covered is somebody's fault, and named."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...], list[Part]]] = {}
    for name, dtype, shape, part in parts:
        known = found.setdefault(name, (dtype, shape, []))
        assert known[:2] == (dtype, shape), (name, known[:2], dtype, shape)
        known[2].append(part)
    tensors = {}
    for name, (dtype, shape, some) in found.items():
        some.sort(key=lambda part: part.start)
        ends = [0, *(part.stop for part in some)]
        assert [part.start for part in some] == ends[:-1], (name, some)
        assert ends[-1] == math.prod(shape), (name, shape, some)
        tensors[name] = Stored(dtype, shape, tuple(some))
    return tensors
