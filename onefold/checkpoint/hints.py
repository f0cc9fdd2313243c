"""What a value that cannot be saved is called, and what to save in its place."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import json
import random
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.header import DTYPE_NAMES

SURROGATE = re.compile("[\ud800-\udfff]")
MAX_LABEL = 60
NUMBERS = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
NUMBERS |= {"float16", "float32", "float64", "complex64", "complex128"}
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
CODE_HINT = "It is code; save a name that your script looks up"

HINTS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda value: isinstance(value, enum.Enum), "Save its .value instead"),
    (lambda value: isinstance(value, np.generic), "Save its item() instead"),
    (lambda value: isinstance(value, defaultdict), "Its factory is code; save dict() of it instead"),
    (lambda value: isinstance(value, tuple) and hasattr(value, "_asdict"), "Save its _asdict() instead"),
    (dataclasses.is_dataclass, "Save dataclasses.asdict() of it instead"),
    (lambda value: hasattr(type(value), "state_dict"), "Save its state_dict() instead"),
    (lambda value: isinstance(value, torch.Generator | np.random.RandomState), "Save its get_state() instead"),
    (lambda value: isinstance(value, np.random.Generator), "Save its bit_generator.state instead"),
    (lambda value: isinstance(value, random.Random), "Save its getstate() instead"),
    (lambda value: isinstance(value, io.IOBase), "Save its path instead"),
    (lambda value: isinstance(value, Iterator), "Save a list of what it yields instead"),
    (lambda value: isinstance(value, datetime.datetime | datetime.time), "Save it in datetime.timezone.utc instead"),
    (lambda value: isinstance(value, Mapping), "Save dict() of it instead"),
    *(
        (lambda value, plain=plain: isinstance(value, plain), f"Save {plain.__name__}() of it instead")
        for plain in (str, int, float, complex, bytes, list, tuple, set, frozenset)
    ),
    (callable, CODE_HINT),
    (lambda value: hasattr(value, "__dict__"), "Save the plain values it holds instead, such as vars() of it"),
)


def describe(value: Any) -> tuple[str, str]:
    """What a value is, and a hint."""
    if isinstance(value, CODE):
        noun = "class" if isinstance(value, type) else "module" if type(value) is types.ModuleType else "function"
        return f"the {noun} {value.__name__}", CODE_HINT
    name = type(value).__name__
    what = f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    if isinstance(value, torch.Tensor):
        return what, str(why_no_tensor(value))
    if isinstance(value, np.ndarray):
        return what, str(why_no_array(value))
    return what, next((hint for fits, hint in HINTS if fits(value)), "Save the plain values it holds instead")


def why_no_tensor(tensor: torch.Tensor) -> str | None:
    """The hint for a tensor that safetensors cannot hold."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        method = next((name for name in ("full_tensor", "dequantize") if name in vars(type(tensor))), None)
        return f"Save its {method}() instead" if method else "Save it as a plain torch.Tensor instead"
    if tensor.is_meta:
        return "It lies on the meta device and holds no numbers"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "Save its to_dense() instead"
    if tensor.dtype not in DTYPE_NAMES and tensor.dtype is not torch.complex128:
        return f"There is no {tensor.dtype} in safetensors; save it in another dtype"
    return None


def why_no_array(array: Any) -> str | None:
    """The hint for an array that is no plain array of numbers."""
    if type(array) is not np.ndarray:
        return "Save numpy.array() of it instead"
    if array.dtype.name not in NUMBERS:
        return f"It holds no numbers but {array.dtype}; save its tolist() instead"
    return None if array.dtype.isnative else 'Save its astype(array.dtype.newbyteorder("=")) instead'


def spell(trail: list[str | tuple[Any]]) -> str:
    """The path to a value; (key,) is a subscript."""
    return "".join(step if isinstance(step, str) else f"[{_label(step[0])}]" for step in trail)


def _label(key: Any) -> str:
    if type(key) is str:
        text = json.dumps(key, ensure_ascii=SURROGATE.search(key) is not None)
    elif type(key) is tuple:
        text = f"({', '.join(map(_label, key))})"
    elif type(key) is int and abs(key) >= 2**64:
        text = hex(key)  # Python does not write long numbers in decimal
    else:
        text = repr(key) if type(key) in (int, float, bool, type(None)) else f"a {type(key).__name__}"
    return text if len(text) <= MAX_LABEL else f"{text[:MAX_LABEL]}..."
