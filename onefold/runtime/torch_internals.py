"""Access to torch internals: tensors inside arguments and outputs, the state of autograd, and the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

# Depth to which attributes of objects of unknown classes are searched: an output, the layers in it, their tensors.
_DEPTH = 4
_LEAVES = (str, bytes, int, float, complex, type(None), type, nn.Module, ModuleType)
_SHORT = 256


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside tuples, lists, mappings, dataclasses, and attributes of other objects but modules."""
    return _tensors_in(value, _DEPTH, set())


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))  # a container may contain itself
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list | set):
        items = value
    elif dataclasses.is_dataclass(value):
        items = (getattr(value, field.name) for field in dataclasses.fields(value))
    elif depth:
        items, depth = list(getattr(value, "__dict__", {}).values()), depth - 1
    for item in items:
        yield from _tensors_in(item, depth, seen)


def may_hold_tensors(value: Any) -> bool:
    """Return False for long containers of strings and numbers, such as a vocabulary, judged by a few of their items."""
    if not isinstance(value, list | tuple | dict):
        return isinstance(value, torch.Tensor)
    if len(value) <= _SHORT:
        return True
    items = value.values() if isinstance(value, dict) else value
    return not all(isinstance(item, _LEAVES) for item in (*islice(items, 8), *islice(reversed(items), 8)))


def inside_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_transform() -> bool:
    """Return whether `torch.func` is differentiating or mapping a function, so that its tensors are wrapped."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_plain_float(dtype: torch.dtype) -> bool:
    """Return whether a dtype is for computation. Floats of 8 bits or less are codes with a separate scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return the same structure with its floating-point tensors cast."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value


_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_compiler(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Exclude a function, and everything it calls, from compilation.

    `torch.compiler.disable` does the same, but imports the compiler, which takes 1.5 s per rank at start-up. The mark
    prevents inlining into a graph, and the strategy prevents compilation of its frames.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
    return function
