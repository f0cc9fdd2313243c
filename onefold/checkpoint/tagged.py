"""Plain Python data as JSON and tensors that come back exactly, without pickle.

None, booleans, whole numbers, floats, strings, lists and dicts with string keys are themselves in JSON. Any other value
is an object with one key, its tag:

    {"$tuple": [...]}  {"$set": [...]}  {"$frozenset": [...]}  {"$slice": [...]}  {"$range": [start, stop, step]}
    {"$dict": [[key, value], ...]}     keys that are no strings, or begin with "$"; a plain object never has such a key
    {"$ordered_dict": [[key, value], ...]}  {"$counter": [[key, count], ...]}
    {"$state_dict": {"items": [[key, value], ...], "metadata": {...}}}     an OrderedDict from Module.state_dict
    {"$defaultdict": {"factory": "list", "items": [[key, value], ...]}}
    {"$deque": {"maxlen": 5, "items": [...]}}
    {"$namespace": {...}}  {"$simple_namespace": {...}}     argparse's and types'
    {"$int": "0x..."}      beyond 2**53, where other JSON readers round
    {"$float": "nan"}      or "inf" or "-inf"
    {"$complex": [real, imaginary]}
    {"$str": [104, 55357]}                code points, where surrogates would not survive
    {"$bytes": "..."}  {"$bytearray": "..."}     in base64
    {"$path": "..."}  {"$pure_posix_path": "..."}  {"$pure_windows_path": "..."}
    {"$datetime": "..."}  {"$date": "..."}  {"$time": "..."}     in ISO 8601
    {"$timedelta": [days, seconds, microseconds]}
    {"$torch_dtype": "bfloat16"}  {"$torch_device": "cuda:0"}  {"$torch_size": [2, 3]}
    {"$tensor": "0"}       the tensor stored as "0"; {"$complex128_tensor": "0"}: stored as pairs of float64
    {"$ndarray": {"dtype": "uint16", "tensor": {"$tensor": "0"}}}
    {"$numpy_scalar": {"dtype": "float32", "value": 0.5}}

Not kept: that two places hold the same list or dict (each gets its own), and of a tensor its device, its strides,
`requires_grad` and being a Parameter: it comes back as a plain tensor on the CPU. A writer that sorts keys loses order.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import json
import math
import pathlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.hints import NUMBERS, SURROGATE, describe, spell, why_no_array, why_no_tensor

MAX_DEPTH = 100  # levels of JSON; Python's own reader and writer give up below 1000
MAX_LEAF_DEPTH = 8  # more than the deepest tagged leaf adds
MAX_TOLD = 10
MAX_PLAIN_INT = 2**53
FACTORIES = {"list": list, "dict": dict, "int": int, "float": float, "set": set, "str": str, None: None}


class ClientStateError(ValueError):
    """Values that a checkpoint cannot hold, each with the path to it."""


def encode(value: Any, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tree for JSON, and the tensors it names. `where` is what errors call the value."""
    encoder = _Encoder(where)
    tree = encoder.encode(value, 0)
    if encoder.problems:
        more = len(encoder.problems) - MAX_TOLD
        rest = [f"and {more} more"] if more > 0 else []
        raise ClientStateError("\n".join(encoder.problems[:MAX_TOLD] + rest))
    return tree, encoder.tensors


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was encoded. The tree may come from anywhere: it can make plain data only, or a ValueError."""
    return _decode(tree, tensors, 0)


# -- values that hold no others: how each is written as simpler data, and built from it ----------------------------


@dataclasses.dataclass(frozen=True)
class _Leaf:
    tag: str
    write: Callable[[Any], Any]
    build: Callable[[Any], Any]
    fits: Callable[[Any], bool] = lambda value: True


def _text(content: Any) -> str:
    if type(content) is not str:
        raise ValueError(f"holds a string, not a {type(content).__name__}")
    return content


def _list(content: Any, kind: type = object, length: int | None = None) -> list[Any]:
    if type(content) is not list or (length is not None and len(content) != length):
        raise ValueError("holds a list" if length is None else f"holds a list of {length}")
    if kind is not object and any(type(item) is not kind for item in content):
        raise ValueError(f"holds a list of {kind.__name__}")
    return content


def _object(content: Any, *keys: str) -> tuple[Any, ...]:
    if type(content) is not dict or content.keys() != set(keys):
        raise ValueError(f"holds an object with {' and '.join(keys)}")
    return tuple(content[key] for key in keys)


def _pairs(content: Any) -> dict[Any, Any]:
    pairs = {key: value for key, value in (_list(pair, length=2) for pair in _list(content))}
    if len(pairs) != len(content):
        raise ValueError("a key is given twice")
    return pairs


def _base64(content: Any) -> bytes:
    return base64.b64decode(_text(content), validate=True)


def _hexadecimal(content: Any) -> int:
    if not re.fullmatch("-?0x[0-9a-f]+", _text(content)):
        raise ValueError("holds a hexadecimal number")
    return int(content, 16)


def _members(content: Any, build: Callable[[Any], Any]) -> Any:
    members = build(_list(content))
    if len(members) != len(content):
        raise ValueError("a member is given twice")
    return members


def _torch_dtype(content: Any) -> torch.dtype:
    dtype = vars(torch).get(_text(content))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {content!r}")
    return dtype


def _state_dict(content: Any) -> Any:
    items, metadata = _object(content, "items", "metadata")
    state: Any = collections.OrderedDict(_pairs(items))
    state._metadata = metadata
    return state


def _defaultdict(content: Any) -> Any:
    factory, items = _object(content, "factory", "items")
    return collections.defaultdict(FACTORIES[factory], _pairs(items))


def _deque(content: Any) -> Any:
    maxlen, items = _object(content, "maxlen", "items")
    return collections.deque(_list(items), maxlen)


def _namespace(content: Any, kind: type) -> Any:
    if type(content) is not dict:
        raise ValueError("holds an object")
    space = kind()
    vars(space).update(content)
    return space


def _numpy_scalar(content: Any) -> Any:
    dtype, value = _object(content, "dtype", "value")
    if dtype not in NUMBERS:
        raise ValueError(f"unknown dtype {dtype!r}")
    with np.errstate(all="ignore"):
        scalar = np.dtype(dtype).type(value)
    if repr(scalar.item()) != repr(value):
        raise ValueError(f"{value!r} is no {dtype}")
    return scalar


def _ndarray(content: Any) -> Any:
    dtype, tensor = _object(content, "dtype", "tensor")
    if dtype not in NUMBERS or not isinstance(tensor, torch.Tensor) or f"torch.{dtype}" != str(tensor.dtype):
        raise ValueError(f"dtype {dtype!r} does not fit its tensor")
    return tensor.numpy()


def _iso(kind: Any) -> _Leaf:
    """What ISO 8601 cannot say (a zone by name, `fold`) is refused."""
    return _Leaf(
        f"${kind.__name__}",
        kind.isoformat,
        lambda content: kind.fromisoformat(_text(content)),
        lambda value: repr(kind.fromisoformat(value.isoformat())) == repr(value),
    )


LEAVES: dict[type, _Leaf] = {
    complex: _Leaf(
        "$complex", lambda value: [value.real, value.imag], lambda content: complex(*_list(content, float, 2))
    ),
    bytes: _Leaf("$bytes", lambda value: base64.b64encode(value).decode(), _base64),
    bytearray: _Leaf("$bytearray", lambda value: base64.b64encode(value).decode(), lambda c: bytearray(_base64(c))),
    range: _Leaf("$range", lambda value: [value.start, value.stop, value.step], lambda c: range(*_list(c, int, 3))),
    slice: _Leaf("$slice", lambda value: [value.start, value.stop, value.step], lambda c: slice(*_list(c, length=3))),
    type(pathlib.Path()): _Leaf("$path", str, lambda content: pathlib.Path(_text(content))),
    pathlib.PurePosixPath: _Leaf("$pure_posix_path", str, lambda content: pathlib.PurePosixPath(_text(content))),
    pathlib.PureWindowsPath: _Leaf("$pure_windows_path", str, lambda content: pathlib.PureWindowsPath(_text(content))),
    datetime.datetime: _iso(datetime.datetime),
    datetime.date: _iso(datetime.date),
    datetime.time: _iso(datetime.time),
    datetime.timedelta: _Leaf(
        "$timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda content: datetime.timedelta(*_list(content, int, 3)),
    ),
    torch.dtype: _Leaf("$torch_dtype", lambda value: str(value).removeprefix("torch."), _torch_dtype),
    torch.device: _Leaf("$torch_device", str, lambda content: torch.device(_text(content))),
    torch.Size: _Leaf("$torch_size", list, lambda content: torch.Size(_list(content, int))),
}

BUILDERS: dict[str, Callable[[Any], Any]] = {leaf.tag: leaf.build for leaf in LEAVES.values()} | {
    "$int": _hexadecimal,
    "$float": lambda content: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[_text(content)],
    "$str": lambda content: "".join(map(chr, _list(content, int))),
    "$tuple": lambda content: tuple(_list(content)),
    "$set": lambda content: _members(content, set),
    "$frozenset": lambda content: _members(content, frozenset),
    "$dict": _pairs,
    "$ordered_dict": lambda content: collections.OrderedDict(_pairs(content)),
    "$state_dict": _state_dict,
    "$counter": lambda content: collections.Counter(_pairs(content)),
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$namespace": lambda content: _namespace(content, argparse.Namespace),
    "$simple_namespace": lambda content: _namespace(content, types.SimpleNamespace),
    "$numpy_scalar": _numpy_scalar,
    "$ndarray": _ndarray,
}


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    kind = type(tree)
    if tree is None or kind in (bool, int, float, str):
        return tree
    if depth > MAX_DEPTH + MAX_LEAF_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if kind is list:
        return [_decode(item, tensors, depth + 1) for item in tree]
    if kind is not dict or any(type(key) is not str for key in tree):
        raise ValueError(f"not JSON: a {kind.__name__}")
    tag = next((key for key in tree if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(value, tensors, depth + 1) for key, value in tree.items()}
    if len(tree) > 1:
        raise ValueError(f"{tag}: a tagged value has one key, not {len(tree)}")
    if tag in ("$tensor", "$complex128_tensor"):
        return _tensor(tag, tree[tag], tensors)
    if tag not in BUILDERS:
        raise ValueError(f"{tag}: an unknown tag. Was this written by a newer version?")
    content = _decode(tree[tag], tensors, depth + 1)
    try:
        return BUILDERS[tag](content)
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{tag}: malformed: {error}") from error


def _tensor(tag: str, name: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if type(name) is not str or name not in tensors:
        raise ValueError(f"{tag}: there is no tensor {name!r}")
    tensor = tensors[name]
    if tag == "$tensor":
        return tensor
    if tensor.dtype is not torch.float64 or tensor.shape[-1:] != (2,):
        raise ValueError(f"{tag}: tensor {name!r} does not hold pairs of float64")
    return torch.view_as_complex(tensor)


# -- writing -------------------------------------------------------------------------------------------------------


class _Encoder:
    """Goes on after a value it must refuse, so that all are told at once."""

    def __init__(self, where: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.problems: list[str] = []
        self._trail: list[str | tuple[Any]] = [where]  # the way here; (key,) is a subscript, spelt only in an error
        self._open: dict[int, int] = {}  # the containers around this value, by id: how long the way to each is
        self._names: dict[int, str] = {}  # of tensors and arrays, by id: one that occurs twice is stored once

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if abs(value) <= MAX_PLAIN_INT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is str:
            return {"$str": [*map(ord, value)]} if SURROGATE.search(value) else value
        leaf = LEAVES.get(kind)
        if leaf is not None and leaf.fits(value):
            return {leaf.tag: self.encode(leaf.write(value), depth + 1)}
        if isinstance(value, torch.Tensor) and why_no_tensor(value) is None:
            return self._store(value, value)
        if kind is np.ndarray and why_no_array(value) is None:
            # Not ascontiguousarray: it turns a single number into a list of one.
            return {
                "$ndarray": {"dtype": value.dtype.name, "tensor": self._store(value, torch.from_numpy(value.copy()))}
            }
        if isinstance(value, np.generic) and value.dtype.name in NUMBERS:
            return {"$numpy_scalar": {"dtype": value.dtype.name, "value": self.encode(value.item(), depth + 2)}}
        if kind not in CONTAINERS or (
            kind is collections.defaultdict and value.default_factory not in FACTORIES.values()
        ):
            what, hint = describe(value)
            return self._refuse(f"{what} cannot be saved; checkpoints hold plain data and tensors only. {hint}")
        if id(value) in self._open:
            around = spell(self._trail[: self._open[id(value)]])
            return self._refuse(f"this is {around} again; data that contains itself cannot be saved")
        if depth >= MAX_DEPTH:
            return self._refuse(f"nested more than {MAX_DEPTH} levels of JSON deep, which cannot be saved")
        self._open[id(value)] = len(self._trail)
        tree = CONTAINERS[kind](self, value, depth)
        del self._open[id(value)]
        return tree

    def _step(self, step: str | tuple[Any], value: Any, depth: int) -> Any:
        self._trail.append(step)
        tree = self.encode(value, depth)
        self._trail.pop()
        return tree

    def _refuse(self, problem: str) -> None:
        self.problems.append(f"{spell(self._trail)}: {problem}")

    def _store(self, owner: Any, tensor: torch.Tensor) -> dict[str, str]:
        is_wide = tensor.dtype is torch.complex128  # safetensors has no name for it
        if id(owner) not in self._names:
            name = self._names[id(owner)] = str(len(self.tensors))
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            self.tensors[name] = torch.view_as_real(plain) if is_wide else plain
        return {"$complex128_tensor" if is_wide else "$tensor": self._names[id(owner)]}

    def _items(self, value: Any, depth: int) -> list[Any]:
        return [self._step((index,), item, depth + 1) for index, item in enumerate(value)]

    def _set(self, value: Any, depth: int) -> list[Any]:
        # Sets of strings have another order in every process; files should not.
        return sorted((self._step(" (a member)", item, depth + 1) for item in value), key=json.dumps)

    def _pairs(self, value: Any, depth: int) -> list[list[Any]]:
        return [
            [self._step(".keys()", key, depth + 2), self._step((key,), item, depth + 2)] for key, item in value.items()
        ]

    def _dict(self, value: Any, depth: int, subscript: Callable[[Any], Any] = lambda key: (key,)) -> dict[str, Any]:
        if all(type(key) is str and key[:1] != "$" and not SURROGATE.search(key) for key in value):
            return {key: self._step(subscript(key), item, depth + 1) for key, item in value.items()}
        return {"$dict": self._pairs(value, depth + 1)}

    def _space(self, value: Any, depth: int) -> dict[str, Any]:
        return self._dict(vars(value), depth, lambda key: f".{key}")

    def _ordered(self, value: Any, depth: int) -> dict[str, Any]:
        if not hasattr(value, "_metadata"):
            return {"$ordered_dict": self._pairs(value, depth + 1)}
        metadata = self._step("._metadata", value._metadata, depth + 2)
        return {"$state_dict": {"items": self._pairs(value, depth + 2), "metadata": metadata}}

    def _default(self, value: Any, depth: int) -> dict[str, Any]:
        items = self._pairs(value, depth + 2)
        factory = next(name for name, factory in FACTORIES.items() if factory is value.default_factory)
        return {"$defaultdict": {"factory": factory, "items": items}}


CONTAINERS: dict[type, Callable[[_Encoder, Any, int], Any]] = {
    list: _Encoder._items,
    dict: _Encoder._dict,
    tuple: lambda encoder, value, depth: {"$tuple": encoder._items(value, depth + 1)},
    set: lambda encoder, value, depth: {"$set": encoder._set(value, depth + 1)},
    frozenset: lambda encoder, value, depth: {"$frozenset": encoder._set(value, depth + 1)},
    collections.OrderedDict: _Encoder._ordered,
    collections.Counter: lambda encoder, value, depth: {"$counter": encoder._pairs(value, depth + 1)},
    collections.defaultdict: _Encoder._default,
    collections.deque: lambda encoder, value, depth: {
        "$deque": {"maxlen": value.maxlen, "items": encoder._items(value, depth + 2)}
    },
    argparse.Namespace: lambda encoder, value, depth: {"$namespace": encoder._space(value, depth + 1)},
    types.SimpleNamespace: lambda encoder, value, depth: {"$simple_namespace": encoder._space(value, depth + 1)},
}
