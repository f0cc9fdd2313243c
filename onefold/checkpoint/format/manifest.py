"""The manifest of a checkpoint: the names of all tensors, the files that contain them, and their checksums.

`docs/checkpoints.md` specifies the file for other programs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from numbers import Real
from typing import Any

import torch
import xxhash

from onefold.checkpoint.format.files import (
    CheckpointError,
    check_finite,
    check_hexadecimal,
    check_list,
    check_object,
    check_text,
    check_whole,
    parse_json,
    require,
    spell,
)
from onefold.checkpoint.format.safetensors_files import DTYPE_NAMES, DTYPES, MAX_DIMS, MAX_HEADER_BYTES
from onefold.redaction import URL_CREDENTIALS, is_secret_name
from onefold.storage.place import Place, read_small, reason

FORMAT = "onefold-checkpoint"
VERSION = 1
NAME = "manifest.json"

# A part has one checksum for each range of this many bytes, so that a rank can verify a range without reading the rest.
RANGE_BYTES = 4 << 20
# A checkpoint of a terabyte has a manifest of about 10 MB. The limit bounds the memory for untrusted manifests.
MAX_BYTES = 1 << 30

STATE_KEYS = ("optimizer", "lr_scheduler", "loss_scale", "counters", "client_state", "config")
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
RANK_KEYS = ("rng", "data", "loose")

_HEAD = '{"xxh3":"%016x","manifest":'
_HEAD_BYTES = len(_HEAD % 0)


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True)
class StoredPart:
    """Elements [start, stop) of a flattened tensor, stored in one shard file at byte `offset`."""

    file: int
    start: int
    stop: int
    offset: int
    checksums: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        sums = [f"{value:016x}" for value in self.checksums]
        return {"file": self.file, "start": self.start, "stop": self.stop, "offset": self.offset, "xxh3": sums}

    @staticmethod
    def from_json(tree: Any, where: str) -> StoredPart:
        keys = ("file", "start", "stop", "offset")
        tree = check_object(tree, where, *keys, "xxh3")
        file, start, stop, offset = (check_whole(tree[key], f"{where}.{key}") for key in keys)
        sums = check_list(tree["xxh3"], f"{where}.xxh3")
        return StoredPart(file, start, stop, offset, tuple(check_hexadecimal(text, f"{where}.xxh3") for text in sums))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, with its dtype, its unsharded shape and its parts in shard files, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

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
    def from_json(tree: Any, where: str) -> StoredTensor:
        tree = check_object(tree, where, "dtype", "shape", "parts")
        dtype = DTYPES.get(check_text(tree["dtype"], f"{where}.dtype"))
        if dtype is None:
            raise ValueError(f"{where}.dtype: {tree['dtype']!r} is not a dtype of safetensors")
        shape = tuple(check_whole(size, f"{where}.shape") for size in check_list(tree["shape"], f"{where}.shape"))
        if len(shape) > MAX_DIMS:
            raise ValueError(f"{where}.shape has {len(shape)} dimensions, more than {MAX_DIMS}")
        trees = check_list(tree["parts"], f"{where}.parts")
        parts = tuple(StoredPart.from_json(part, f"{where}.parts[{n}]") for n, part in enumerate(trees))
        stored = StoredTensor(dtype, shape, parts)
        end = 0
        for part in parts:
            nbytes = (part.stop - part.start) * dtype.itemsize
            if part.start != end or part.stop < part.start or len(part.checksums) != -(-nbytes // RANGE_BYTES):
                raise ValueError(
                    f"{where}.parts must follow each other, with a checksum each {RANGE_BYTES} bytes: {part}"
                )
            end = part.stop
        if end != stored.numel:
            raise ValueError(f"{where}.parts end at element {end} of {stored.numel}")
        return stored


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file of a checkpoint. `name` is relative to the folder of the tag."""

    name: str
    nbytes: int
    header_bytes: int
    header_checksum: int

    def as_json(self) -> dict[str, Any]:
        sums = f"{self.header_checksum:016x}"
        return {"name": self.name, "bytes": self.nbytes, "header_bytes": self.header_bytes, "header_xxh3": sums}

    @staticmethod
    def from_json(tree: Any, where: str) -> ShardFile:
        tree = check_object(tree, where, "name", "bytes", "header_bytes", "header_xxh3")
        name = check_text(tree["name"], f"{where}.name")
        folder, _, file = name.partition("/")
        plain = folder and file and name.isprintable() and "/" not in file and "\\" not in name
        if not plain or {folder, file} & {".", ".."}:
            raise ValueError(f"{where}.name: a file must be in a folder next to the manifest, not at {name!r}")
        nbytes = check_whole(tree["bytes"], f"{where}.bytes")
        header = check_whole(tree["header_bytes"], f"{where}.header_bytes", 8, min(nbytes, 8 + MAX_HEADER_BYTES))
        return ShardFile(name, nbytes, header, check_hexadecimal(tree["header_xxh3"], f"{where}.header_xxh3"))


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    `parameters` maps each parameter to its optimizer group, or to None if it is frozen. `left_out` lists the frozen
    parameters that were excluded from the save. `state` (of the job) and `ranks` (per rank) are tagged JSON, whose
    tensors are stored in `tensors` as `state/...` and `rank/N/...`.
    """

    tag: str
    saved: str
    global_steps: int
    world_size: int
    files: tuple[ShardFile, ...]
    tensors: Mapping[str, StoredTensor]
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

    @cached_property
    def parts_by_file(self) -> list[list[tuple[str, StoredTensor, StoredPart]]]:
        """The parts in each file."""
        found: list[list[tuple[str, StoredTensor, StoredPart]]] = [[] for _ in self.files]
        for name, stored in self.tensors.items():
            for part in stored.parts:
                found[part.file].append((name, stored, part))
        return found

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
        if len(text) > MAX_BYTES - _HEAD_BYTES - 2:
            raise ValueError(f"the manifest has {len(text)} bytes, more than {MAX_BYTES}. Store large data in tensors.")
        return (_HEAD % checksum(text)).encode() + text + b"}\n"

    @staticmethod
    def read(folder: Place) -> Manifest:
        """Read and check the manifest in the folder of a tag. The text is untrusted even if its checksum is correct."""
        path = folder / NAME
        try:
            text = read_small(path, MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder}: not a published checkpoint: it has no {NAME}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
        body = text[_HEAD_BYTES:-2]
        if text[:_HEAD_BYTES] != (_HEAD % checksum(body)).encode() or text[-2:] != b"}\n":
            raise CheckpointError(f"{path}: the manifest is damaged: its checksum does not match")
        try:
            return _from_tree(parse_json(body))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a manifest that this version of onefold supports: {error}") from error


def _from_tree(tree: Any) -> Manifest:
    tree = check_object(tree, "the manifest", "format", "version", "range_bytes")
    known = {"format": FORMAT, "version": VERSION, "range_bytes": RANGE_BYTES}
    if any(type(tree[key]) is not type(value) or tree[key] != value for key, value in known.items()):
        raise ValueError(f"it has {spell({key: tree[key] for key in known})}; this version supports {known}")
    names = [field.name for field in fields(Manifest)]
    tree = check_object(tree, "the manifest", *names)
    for key in ("tag", "saved", "writer"):
        check_text(tree[key], key)
    try:
        datetime.fromisoformat(tree["saved"])
    except ValueError:
        raise ValueError(f"saved must be a time in ISO 8601, not {spell(tree['saved'])}") from None
    files = tuple(ShardFile.from_json(file, f"files[{n}]") for n, file in enumerate(check_list(tree["files"], "files")))
    if len({file.name for file in files}) < len(files):
        raise ValueError("files: a name is given twice")
    trees = check_object(tree["tensors"], "tensors")
    tensors = {name: StoredTensor.from_json(stored, f"tensors.{name}") for name, stored in trees.items()}
    for name, stored in tensors.items():
        for part in stored.parts:
            nbytes = (part.stop - part.start) * stored.dtype.itemsize
            if part.file >= len(files):
                raise ValueError(f"tensors.{name}: a part is in file {part.file}, which is not listed")
            file = files[part.file]
            if not file.header_bytes <= part.offset <= file.nbytes - nbytes:
                raise ValueError(f"tensors.{name}: {nbytes} bytes at {part.offset} are outside {file.name}")
    check_whole(tree["global_steps"], "global_steps")
    check_whole(tree["world_size"], "world_size", least=1)
    for key in ("parameters", "aliases"):
        check_object(tree[key], key)
    for key in ("ranks", "left_out"):
        check_list(tree[key], key)
    manifest = Manifest(**{**{name: tree[name] for name in names}, "files": files, "tensors": tensors})
    _check_names(manifest)
    _check_state(manifest)
    return manifest


def _check_names(manifest: Manifest) -> None:
    """Check that every parameter is stored or left out, and that every alias refers to such a parameter."""
    for name in manifest.left_out:
        if check_text(name, "left_out") not in manifest.parameters or manifest.parameters[name] is not None:
            raise ValueError(f"left_out: {name!r} is not a frozen parameter")
    left_out = set(manifest.left_out)
    known = left_out | {name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")}
    for name in manifest.parameters:
        if name not in known:
            raise ValueError(f"parameters: {name!r} is neither stored nor left out")
    for alias, name in manifest.aliases.items():
        if check_text(name, f"aliases.{alias}") not in known or f"model/{alias}" in manifest.tensors:
            raise ValueError(f"aliases: {alias!r} is tied to {name!r}; only the latter may be stored")
    for name in manifest.tensors:
        if name.startswith("optimizer/"):
            trained = name.removeprefix("optimizer/").rpartition("/")[0]
            if manifest.parameters.get(trained) is None:
                raise ValueError(f"tensors: {name!r} is not the state of a trained parameter")


def _check_state(manifest: Manifest) -> None:
    """Check the state of the job and of the ranks as far as possible before it is decoded."""
    state = check_object(manifest.state, "state", *STATE_KEYS)
    counters = check_object(state["counters"], "state.counters", *COUNTERS)
    for key in COUNTERS:
        check_whole(counters[key], f"state.counters.{key}")
    if counters["global_steps"] != manifest.global_steps:
        raise ValueError(f"global_steps is {manifest.global_steps}, but {counters['global_steps']} in state.counters")
    num_groups = None
    if state["optimizer"] is not None:
        optimizer = check_object(state["optimizer"], "state.optimizer", "name", "num_steps", "groups")
        if optimizer["name"] is not None:
            check_text(optimizer["name"], "state.optimizer.name")
        check_whole(optimizer["num_steps"], "state.optimizer.num_steps")
        groups = check_list(optimizer["groups"], "state.optimizer.groups")
        for number, group in enumerate(groups):
            check_object(group, f"state.optimizer.groups[{number}]")
        num_groups = len(groups)
    for name, of in manifest.parameters.items():
        if of is not None and check_whole(of, f"parameters.{name}") >= (2**31 if num_groups is None else num_groups):
            raise ValueError(f"parameters: {name!r} is in group {of}, but state.optimizer has {num_groups} groups")
    for key in ("lr_scheduler", "loss_scale", "config"):
        if state[key] is not None:
            check_object(state[key], f"state.{key}")
    check_object(state["client_state"], "state.client_state")
    if len(manifest.ranks) != manifest.world_size:
        raise ValueError(f"world_size is {manifest.world_size}, but ranks has {len(manifest.ranks)} entries")
    for number, own in enumerate(manifest.ranks):
        # An imported checkpoint has no per-rank state.
        check_object(own, f"ranks[{number}]", *(RANK_KEYS if own else ()))


# -- the decoded state -------------------------------------------------------------------------------------------------

# Hyperparameters that must not be negative in any optimizer. Betas must also be below 1.
_NOT_NEGATIVE = ("lr", "initial_lr", "eps", "weight_decay", "momentum", "betas")


def check_decoded_state(state: Any, where: str) -> None:
    """Check the types and ranges of the job's state: counters, hyperparameters, loss scale."""
    check_object(state, where)
    for key in ("client_state", "counters"):
        require(isinstance(state[key], dict), state[key], "an object", key)
    if state["optimizer"] is not None:
        for number, group in enumerate(state["optimizer"]["groups"]):
            check_object(group, where)
            _check_ranges(group, f"optimizer.groups[{number}]")
    for key in ("losses", "grad_norms"):
        for number, value in enumerate(check_list(state.get(key, []), key)):
            check_finite(value, f"{key}[{number}]")
    scale = state["loss_scale"]
    if scale is None:
        return
    if not isinstance(scale, dict) or "value" not in scale:
        raise ValueError(f"loss_scale must have a value, not {spell(scale)}")
    if check_finite(scale["value"], "loss_scale.value") <= 0:
        raise ValueError(f"loss_scale.value must be above 0, not {scale['value']}")
    if len(scale) > 1:  # a dynamic loss scale
        for key, least in (("remaining_hysteresis", 0), ("iteration", 0), ("last_overflow_iteration", -1)):
            if key not in scale:
                raise ValueError(f"loss_scale has no {key}")
            check_whole(scale[key], f"loss_scale.{key}", least)


def _check_ranges(group: Mapping[str, Any], where: str) -> None:
    for key in _NOT_NEGATIVE:
        values = group.get(key)
        for value in values if isinstance(values, tuple | list) else [values]:
            if value is None or (isinstance(value, torch.Tensor) and value.numel() != 1):
                continue
            number, is_beta = _check_number(value, f"{where}.{key}"), key == "betas"
            fits = 0 <= number < (1 if is_beta else math.inf)
            require(fits, values, "from 0 to below 1" if is_beta else "from 0 up", f"{where}.{key}")


def _check_number(value: Any, where: str) -> float:
    number = single(value)
    require(is_number(number) and math.isfinite(number), number, "a finite number", where)
    return float(number)


def check_decoded_loose(found: Any, where: str) -> None:
    """Check the optimizer states that do not have the shape of their parameter, by parameter and state name."""
    check_object(found, where)
    for name, states in found.items():
        if not isinstance(name, str) or not isinstance(states, dict):
            raise ValueError(f"{spell(name)} must be a parameter's name with an object of states")
        if "step" in states:
            step = single(states["step"])
            require(_check_number(step, f"{name}.step") >= 0, step, "from 0 up", f"{name}.step")


def single(value: Any) -> Any:
    """Return the number in a tensor of one element. Return other values unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # includes numpy numbers


# -- secrets of a config -----------------------------------------------------------------------------------------------

NOT_STORED = "(not stored)"


def without_secrets(tree: Any) -> Any:
    """Replace the values of all keys in a config that name a secret by `(not stored)`, except numbers and booleans.

    Checkpoints are shared with others and kept for years.
    """
    if isinstance(tree, dict):
        return {
            key: _hidden(value) if is_secret_name(str(key)) else without_secrets(value) for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return type(tree)(without_secrets(value) for value in tree)
    return URL_CREDENTIALS.sub(f"{NOT_STORED}@", tree) if isinstance(tree, str) else tree


def _hidden(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else NOT_STORED


# -- tensors of all ranks ----------------------------------------------------------------------------------------------


def join_parts(parts: Iterable[tuple[str, torch.dtype, tuple[int, ...], StoredPart]]) -> dict[str, StoredTensor]:
    """Join the parts of all ranks to whole tensors. Assert that the parts cover each tensor exactly."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...], list[StoredPart]]] = {}
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
        tensors[name] = StoredTensor(dtype, shape, tuple(some))
    return tensors
