"""Access to torch internals: tensors in arguments, autograd, the compiler, and functions that read no values."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
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
    return iter((value,)) if isinstance(value, torch.Tensor) else _tensors_in(value, _DEPTH, set())


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))  # a container may contain itself
    items: Iterable[Any] = ()
    if isinstance(value, tuple | list | set):
        items = value
    elif isinstance(value, dict | Mapping):
        items = value.values()
    elif dataclasses.is_dataclass(value):
        items = (getattr(value, field.name) for field in dataclasses.fields(value))
    elif depth:
        items, depth = list(getattr(value, "__dict__", {}).values()), depth - 1
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif not isinstance(item, _LEAVES):
            yield from _tensors_in(item, depth, seen)


def may_hold_tensors(value: Any) -> bool:
    """Return False for long containers of strings and numbers, such as a vocabulary, judged by a few of their items."""
    if not isinstance(value, list | tuple | dict):
        return isinstance(value, torch.Tensor)
    if len(value) <= _SHORT:
        return True
    items = value.values() if isinstance(value, dict) else value
    return not all(isinstance(item, _LEAVES) for item in (*islice(items, 8), *islice(reversed(items), 8)))


def is_unshared(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is dense and nothing but its Parameter and the caller refers to its memory."""
    if gradient.layout is not torch.strided or gradient.requires_grad or not gradient.is_contiguous():
        return False
    if gradient.nbytes != gradient.untyped_storage().nbytes():
        return False
    return all(found <= few for found, few in zip(_references(gradient), _fewest_references(), strict=True))


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Count the references of Python and of torch to a tensor, and those of tensors to its storage."""
    of_storage: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]
    of_torch: Any = tensor._use_count  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), of_torch(), of_storage(tensor.untyped_storage()._cdata)


@cache
def _fewest_references() -> tuple[int, int, int]:
    """Count the references to a new gradient in a caller's caller, which depend on the versions of Python and torch."""
    parameter = nn.Parameter(torch.empty(1, device="cpu"))
    parameter.grad = torch.empty(1, device="cpu")
    gradient = parameter.grad
    return _passed_on(gradient)


def _passed_on(gradient: torch.Tensor) -> tuple[int, int, int]:
    return _references(gradient)


def inside_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_checkpoint() -> bool:
    """Return whether a non-reentrant checkpoint of torch saves or recomputes the tensors of this call."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    return hooks is not None and hooks[1].__module__ == "torch.utils.checkpoint"


@contextmanager
def outside_checkpoint() -> Iterator[None]:
    """Save tensors for backward as if no checkpoint of torch were around this call.

    A non-reentrant checkpoint replaces saved tensors by a recomputation. A call that recomputes itself saves its inputs
    only, so that the checkpoint around it has nothing to recompute.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)  # type: ignore[attr-defined]


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


_expects_compiler = False


def expect_compiler() -> None:
    """Note that functions are about to be compiled."""
    global _expects_compiler
    _expects_compiler = True


def compiles() -> bool:
    """Return whether torch has compiled a function in this process, or `expect_compiler` was called."""
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    return _expects_compiler or (compiler is not None and bool(compiler.output_codes.seen_ids))


def constant_in_graphs(function: Callable[[], bool]) -> Callable[[], bool]:
    """Call a function while a graph is traced, and use its result as a constant of the graph.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# -- torch functions that read or write the values of a tensor, and those that do not --------------------------------

DATA: Any = torch.Tensor.data


def describe(func: Callable[..., Any]) -> str:
    """Return the words that an error message has for a torch function on a parameter."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f".{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return f"{name} of a parameter" if name.startswith((".", "__")) else f"{name.removeprefix('_')}() on a parameter"


def is_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a function is named as an in-place one."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def overwrites(func: Callable[..., Any]) -> bool:
    """Return whether a function overwrites all values of its first argument."""
    return getattr(func, "__name__", "") in _OVERWRITES


def reads_no_values(func: Callable[..., Any]) -> bool:
    """Return whether a function reads metadata only: shape, dtype, device, requires_grad, grad, hooks and the like."""
    if func in _METADATA:
        return True
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    return func.__name__ in ("__get__", "__set__", "__delete__") and name not in _VALUES


_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}
_METADATA: set[Any] = {
    getattr(torch.Tensor, name)
    for name in """
        size dim ndimension numel nelement stride storage_offset is_contiguous dim_order __len__ data_ptr
        untyped_storage storage element_size get_device is_floating_point is_complex is_signed is_shared is_pinned
        is_inference is_set_to _is_view requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook
        __hash__ __repr__ __format__ __dir__ new_empty new_zeros new_ones new_full new_tensor new_empty_strided
    """.split()  # noqa: SIM905
    if hasattr(torch.Tensor, name)
} | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch._has_compatible_shallow_copy_type}
ADDRESSES: set[Any] = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage}
# Functions that code calls before it saves the bytes of a tensor. safetensors reads the layout before the address, and
# would write an empty tensor.
MEMORY: set[Any] = {*ADDRESSES, torch.Tensor.layout.__get__}  # type: ignore[attr-defined]
# Outside a pass these return a tensor without values, so that casting, moving and detaching a module do not fail until
# values are read.
MOVES: set[Any] = {
    getattr(torch.Tensor, name)
    for name in ("to", "half", "float", "double", "bfloat16", "cpu", "cuda", "type", "type_as")
    if hasattr(torch.Tensor, name)
}
WITHOUT_VALUES: set[Any] = {*MOVES, torch.Tensor.detach, DATA.__get__, torch.detach}
# Before `initialize` these return a tensor without values too.
VIEWS: set[Any] = {
    getattr(where, name)
    for where in (torch, torch.Tensor)
    for name in """
        clone contiguous view view_as reshape reshape_as flatten ravel t transpose swapaxes permute squeeze unsqueeze
        narrow __getitem__ alias
    """.split()  # noqa: SIM905
    if hasattr(where, name)
} | {getattr(torch.Tensor, name).__get__ for name in ("T", "mT")}
# Names instead of functions, because libraries replace functions of `torch.nn.init` while they initialise a model.
_OVERWRITES = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_", "constant_", "zeros_", "ones_", "kaiming_uniform_",
}  # fmt: skip
