"""Which torch functions read or write the values of a tensor, and which do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
