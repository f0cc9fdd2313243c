"""Exact encoding of plain Python data, such as the client state, as JSON and tensors, without pickle.

None, booleans, integers, floats, strings, lists and dicts with string keys are encoded as JSON values. Any other value
is encoded as an object with one key, its tag:

    {"$tuple": [...]}  {"$set": [...]}  {"$frozenset": [...]}  {"$deque": {"maxlen": 5, "items": [...]}}
    {"$dict": [[key, value], ...]}     a dict with keys that are not strings or begin with "$"
    {"$ordered_dict": [[key, value], ...]}  {"$counter": [[key, count], ...]}
    {"$state_dict": {"items": [[key, value], ...], "metadata": {...}}}     an OrderedDict from Module.state_dict
    {"$int": "0x..."}      beyond 2**53, where other JSON parsers round
    {"$float": "nan"}      or "inf" or "-inf"
    {"$complex": [real, imaginary]}  {"$bytes": "..."}     in base64
    {"$torch_dtype": "bfloat16"}  {"$torch_device": "cuda:0"}  {"$torch_size": [2, 3]}
    {"$tensor": "0"}       the tensor stored as "0"; {"$complex128_tensor": "0"}: stored as pairs of float64
    {"$ndarray": {"dtype": "uint16", "tensor": {"$tensor": "0"}}}
    {"$numpy_scalar": {"dtype": "float32", "value": 0.5}}

torch's schedules and user-defined optimizers store sets, deques and Counters. The encoding does not preserve shared
references to a list or dict, nor the device, the strides and `requires_grad` of a tensor: tensors and Parameters are
decoded as plain tensors on the CPU. JSON writers that sort keys lose the order of dicts.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import enum
import io
import json
import math
import pathlib
import random
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.format.files import spell
from onefold.checkpoint.format.safetensors_files import DTYPE_NAMES

MAX_DEPTH = 100  # levels of JSON; Python fails before 1000
MAX_LEAF_DEPTH = 8  # upper bound of the levels that a tagged leaf adds
MAX_REPORTED, MAX_LABEL = 10, 60
MAX_PLAIN_INT = 2**53
NUMBERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
NUMBERS |= {"bool", "float16", "float32", "float64", "complex64", "complex128"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class ClientStateError(ValueError):
    """A client state contains values that a checkpoint cannot hold. The message lists their paths."""


def encode(value: Any, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Encode plain data as a JSON tree and the tensors that it refers to. Error messages call the value `where`."""
    encoder = _Encoder(where)
    tree = encoder.encode(value, 0)
    if encoder.problems:
        more = len(encoder.problems) - MAX_REPORTED
        rest = [f"and {more} more"] if more > 0 else []
        raise ClientStateError("\n".join(encoder.problems[:MAX_REPORTED] + rest))
    return tree, encoder.tensors


def decode(tree: Any, tensors: Mapping[str, torch.Tensor], depth: int = 0) -> Any:
    """Decode a JSON tree, which may be untrusted, to plain data. Raise a ValueError if it is malformed."""
    kind = type(tree)
    if tree is None or kind in (bool, int, float, str):
        return tree
    if depth > MAX_DEPTH + MAX_LEAF_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels of nesting")
    if kind is list:
        return [decode(item, tensors, depth + 1) for item in tree]
    if kind is not dict or any(type(key) is not str for key in tree):
        raise ValueError(f"not JSON: a {kind.__name__}")
    tag = next((key for key in tree if key.startswith("$")), None)
    if tag is None:
        return {key: decode(value, tensors, depth + 1) for key, value in tree.items()}
    if len(tree) > 1:
        raise ValueError(f"{tag}: a tagged value has one key, not {len(tree)}")
    if tag in ("$tensor", "$complex128_tensor"):
        return _tensor(tag, tree[tag], tensors)

    content = decode(tree[tag], tensors, depth + 1)
    try:
        return _build(tag, content)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{tag}: malformed: {error}") from error


def _tensor(tag: str, name: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if type(name) is not str or name not in tensors:
        raise ValueError(f"{tag}: no tensor {name!r}")
    tensor = tensors[name]
    if tag == "$tensor":
        return tensor
    if tensor.dtype is not torch.float64 or tensor.shape[-1:] != (2,):
        raise ValueError(f"{tag}: tensor {name!r} does not contain pairs of float64")
    return torch.view_as_complex(tensor)


def _build(tag: str, content: Any) -> Any:
    """Build the value of a tagged object. Raise if the content does not have the form that the tag requires."""
    match tag, content:
        case "$tuple", list():
            return tuple(content)
        case (("$set" | "$frozenset"), list()):
            members = (set if tag == "$set" else frozenset)(content)
            if len(members) == len(content):
                return members
        case (("$dict" | "$ordered_dict" | "$counter"), list()):
            return {"$dict": dict, "$ordered_dict": OrderedDict, "$counter": Counter}[tag](_unique(content))
        case "$state_dict", {"items": list() as items, "metadata": metadata}:
            state: Any = OrderedDict(_unique(items))
            state._metadata = metadata
            return state
        case "$deque", {"items": list() as items, "maxlen": maxlen}:
            return deque(items, maxlen)
        case "$int", str() if re.fullmatch("-?0x[0-9a-f]+", content):
            return int(content, 16)
        case "$float", ("nan" | "inf" | "-inf"):
            return float(content)
        case "$complex", [float() as real, float() as imaginary]:
            return complex(real, imaginary)
        case "$bytes", str():
            return base64.b64decode(content, validate=True)
        case "$torch_dtype", str() if isinstance(vars(torch).get(content), torch.dtype):
            return vars(torch)[content]
        case "$torch_device", str():
            return torch.device(content)
        case "$torch_size", list() if all(type(size) is int for size in content):
            return torch.Size(content)
        case "$ndarray", {"dtype": str() as dtype, "tensor": torch.Tensor() as tensor}:
            if dtype in NUMBERS and f"torch.{dtype}" == str(tensor.dtype):
                return tensor.numpy()
        case "$numpy_scalar", {"dtype": str() as dtype, "value": value} if dtype in NUMBERS:
            with np.errstate(all="ignore"):
                scalar = np.dtype(dtype).type(value)
            if repr(scalar.item()) == repr(value):
                return scalar
    raise ValueError(f"unknown content {spell(content)}, perhaps of another version")


def _unique(content: list[Any]) -> dict[Any, Any]:
    pairs = dict(pair for pair in content if type(pair) is list)
    if len(pairs) != len(content):
        raise ValueError("a key is given twice, or without a value")
    return pairs


# -- writing -----------------------------------------------------------------------------------------------------------

_PAIRED: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}
_CONTAINERS = (list, tuple, set, frozenset, deque, *_PAIRED)


class _Encoder:
    """Encoder of a tree of values. It collects all values that cannot be saved, to report them together."""

    def __init__(self, where: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.problems: list[str] = []
        self._trail: list[str | tuple[Any]] = [where]  # path to the current value; (key,) is a subscript
        self._open: dict[int, int] = {}  # length of the path to each enclosing container, by id
        self._names: dict[int, str] = {}  # names of stored tensors and arrays, by id, to store each of them once

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is str and not _SURROGATE.search(value)):
            return value
        if kind is int:
            return value if abs(value) <= MAX_PLAIN_INT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is complex:
            return {"$complex": self.encode([value.real, value.imag], depth + 1)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind in (torch.dtype, torch.device, torch.Size):
            plain = [*value] if kind is torch.Size else str(value).removeprefix("torch.")
            return {f"$torch_{kind.__name__.lower()}": plain}
        if isinstance(value, np.generic) and value.dtype.name in NUMBERS:
            return {"$numpy_scalar": {"dtype": value.dtype.name, "value": self.encode(value.item(), depth + 2)}}
        if isinstance(value, torch.Tensor | np.ndarray) and _why_not_stored(value) is None:
            return self._store(value)
        if kind not in _CONTAINERS:
            what = f"{_describe(value)} cannot be saved: checkpoints contain only plain data and tensors"
            return self._refuse(f"{what}. {_hint(value)}")
        if id(value) in self._open:
            around = _spell_path(self._trail[: self._open[id(value)]])
            return self._refuse(f"the same object as {around}, but data that contains itself cannot be saved")
        if depth >= MAX_DEPTH:
            return self._refuse(f"more than {MAX_DEPTH} levels of JSON cannot be saved")
        self._open[id(value)] = len(self._trail)
        tree = self._encode_container(value, depth)
        del self._open[id(value)]
        return tree

    def _encode_container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple, deque):
            inner = depth + 1 + (kind is not list) + (kind is deque)
            items = [self._step((index,), item, inner) for index, item in enumerate(value)]
            if kind is deque:
                return {"$deque": {"maxlen": value.maxlen, "items": items}}
            return items if kind is list else {"$tuple": items}
        if kind in (set, frozenset):
            # The order of a set of strings differs between processes. Sorting makes files reproducible.
            members = sorted((self._step(" (a member)", item, depth + 2) for item in value), key=json.dumps)
            return {f"${kind.__name__}": members}
        if kind is dict and all(type(key) is str and key[:1] != "$" and not _SURROGATE.search(key) for key in value):
            return {key: self._step((key,), item, depth + 1) for key, item in value.items()}
        is_state_dict = kind is OrderedDict and hasattr(value, "_metadata")
        inner = depth + 3 + is_state_dict
        pairs = [[self._step(".keys()", key, inner), self._step((key,), item, inner)] for key, item in value.items()]
        if not is_state_dict:
            return {_PAIRED[kind]: pairs}
        return {"$state_dict": {"items": pairs, "metadata": self._step("._metadata", value._metadata, depth + 2)}}

    def _step(self, step: str | tuple[Any], value: Any, depth: int) -> Any:
        self._trail.append(step)
        tree = self.encode(value, depth)
        self._trail.pop()
        return tree

    def _refuse(self, problem: str) -> None:
        self.problems.append(f"{_spell_path(self._trail)}: {problem}")

    def _store(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray)
        # numpy.ascontiguousarray would turn a 0-d array into a 1-d array.
        tensor = torch.from_numpy(value.copy()) if is_array else value
        is_wide = tensor.dtype is torch.complex128  # safetensors does not support it
        if id(value) not in self._names:
            name = self._names[id(value)] = str(len(self.tensors))
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            self.tensors[name] = torch.view_as_real(plain) if is_wide else plain
        tree = {"$complex128_tensor" if is_wide else "$tensor": self._names[id(value)]}
        return {"$ndarray": {"dtype": value.dtype.name, "tensor": tree}} if is_array else tree


# -- hints for values that cannot be saved -----------------------------------------------------------------------------

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_CODE_HINT = "It is code. Save a name that your script looks up instead"
_HINTS: tuple[tuple[Callable[[Any], bool] | type | tuple[type, ...], str], ...] = (
    (enum.Enum, "Save its .value instead"),
    (np.generic, "Save its item() instead"),
    (defaultdict, "Its factory is code. Save dict() of it instead"),
    (lambda value: isinstance(value, tuple) and hasattr(value, "_asdict"), "Save its _asdict() instead"),
    (dataclasses.is_dataclass, "Save dataclasses.asdict() of it instead"),
    (lambda value: hasattr(type(value), "state_dict"), "Save its state_dict() instead"),
    ((torch.Generator, np.random.RandomState), "Save its get_state() instead"),
    (np.random.Generator, "Save its bit_generator.state instead"),
    (random.Random, "Save its getstate() instead"),
    (io.IOBase, "Save its path instead"),
    (pathlib.PurePath, "Save str() of it instead"),
    ((datetime.date, datetime.time), "Save its isoformat() instead"),
    (datetime.timedelta, "Save its total_seconds() instead"),
    (slice, "Save its start, stop and step instead"),
    (range, "Save list() of it instead"),
    (bytearray, "Save bytes() of it instead"),
    (lambda value: type(value) is str, 'It has surrogates. Save its encode("utf-8", "surrogatepass") instead'),
    (Iterator, "Save list() of it instead"),
    (Mapping, "Save dict() of it instead"),
    *((plain, f"Save {plain.__name__}() of it instead")
      for plain in (str, int, float, complex, bytes, list, tuple, set, frozenset)),
    (callable, _CODE_HINT),
    (lambda value: hasattr(value, "__dict__"), "Save its plain values instead, such as vars() of it"),
)  # fmt: skip


def _describe(value: Any) -> str:
    if isinstance(value, _CODE):
        noun = "class" if isinstance(value, type) else "module" if type(value) is types.ModuleType else "function"
        return f"the {noun} {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _hint(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(_why_not_stored(value))
    fits = (
        hint for test, hint in _HINTS if (isinstance(value, test) if isinstance(test, type | tuple) else test(value))
    )
    return _CODE_HINT if isinstance(value, _CODE) else next(fits, "Save its plain values instead")


def _why_not_stored(value: Any) -> str | None:
    """Return the hint for a tensor or an array that safetensors cannot hold, or None if it can be stored."""
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray:
            return "Save numpy.array() of it instead"
        if value.dtype.name not in NUMBERS:
            return f"Its dtype is {value.dtype}, not a number. Save its tolist() instead"
        return None if value.dtype.isnative else 'Save its astype(array.dtype.newbyteorder("=")) instead'
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        method = next((name for name in ("full_tensor", "dequantize") if name in vars(type(value))), None)
        return f"Save its {method}() instead" if method else "Save it as a plain torch.Tensor instead"
    if value.is_meta:
        return "It is on the meta device and has no values"
    if value.layout is not torch.strided or value.is_nested:
        return "Save its to_dense() instead"
    is_stored = value.dtype in DTYPE_NAMES or value.dtype is torch.complex128
    return None if is_stored else f"safetensors does not support {value.dtype}. Save it in another dtype"


def _spell_path(trail: list[str | tuple[Any]]) -> str:
    """Format the path to a value. (key,) is a subscript."""
    return "".join(step if isinstance(step, str) else f"[{_label(step[0])}]" for step in trail)


def _label(key: Any) -> str:
    if type(key) is str:
        text = json.dumps(key, ensure_ascii=_SURROGATE.search(key) is not None)
    elif type(key) is tuple:
        text = f"({', '.join(map(_label, key))})"
    elif type(key) is int and abs(key) >= 2**64:
        text = hex(key)  # Python limits the length of decimal integers
    else:
        text = repr(key) if type(key) in (int, float, bool, type(None)) else f"a {type(key).__name__}"
    return text if len(text) <= MAX_LABEL else f"{text[:MAX_LABEL]}..."
