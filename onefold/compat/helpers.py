"""Small helpers that scripts import from DeepSpeed's `utils` and `runtime` packages."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import nn

from onefold.compat.not_offered import NotOfferedError, explain
from onefold.storage.file_lock import lock_file, unlock_file

# -- tensors, norms and seeds ------------------------------------------------------------------------------------------


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Return nested dicts, lists and tuples with their tensors on another device."""
    if (criterion_func is None and torch.is_tensor(item)) or (criterion_func is not None and criterion_func(item)):
        return item.to(device)
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def split_half_float_double(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group dense tensors by dtype: fp16, fp32, fp64, bf16. Dtypes without tensors have no group."""
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    found = [[tensor for tensor in dense if tensor.dtype is dtype] for dtype in dtypes]
    return [bucket for bucket in found if bucket]


def split_half_float_double_sparse(tensors: list[torch.Tensor]) -> list[tuple[Any, list[torch.Tensor]]]:
    """Group tensors by dtype."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.items())


def set_random_seed(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that a file is to be written in."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    _refuse_parallelism(mpu)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


noop_context = nullcontext


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as source code: `call_to_str("f", 1, x=2)` is "f(1, x=2)"."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    (item,) = set(items)
    return item


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(x.detach()).all()


def mask_nan_or_inf_with_val_inplace(input: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    input.masked_fill_(~torch.isfinite(input), val)


def get_global_norm_of_tensors(
    input_tensors: list[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """Return the norm of all tensors of this process together; -1 if it is not finite."""
    _refuse_parallelism(mpu, moe_ep_group)
    norm = torch.nn.utils.get_total_norm([tensor.detach().float() for tensor in input_tensors], float(norm_type))
    mask_nan_or_inf_with_val_inplace(norm)
    return norm


get_weight_norm = get_global_norm_of_tensors


def clip_tensors_by_global_norm(
    input_tensors: list[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Scale the tensors in place so that their norm is at most `max_norm`; returns the norm before."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (float(norm) + eps)
    if factor < 1 and math.isfinite(factor):
        torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)
    return norm


def _refuse_parallelism(*groups: Any) -> None:
    if any(group is not None for group in groups):
        raise NotImplementedError("mpu and moe_ep_group need model parallelism. Leave them out.")


# -- modules -----------------------------------------------------------------------------------------------------------


def recursive_getattr(model: Any, module_name: str) -> Any:
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    *path, name = module_name.split(".")
    setattr(reduce(getattr, path, model), name, module)


class OnDevice:
    """A context in which new tensors are on `device`, which may be "meta", and floating-point ones in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


# -- torch, its compiler and autocast ----------------------------------------------------------------------------------


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    from packaging.version import Version

    assert min_version or max_version, "give min_version, max_version or both"
    installed = Version(torch.__version__)
    return not (min_version and Version(str(min_version)) > installed) and not (
        max_version and Version(str(max_version)) < installed
    )


def register_grad_hook(param: Any, hook: Callable[..., Any]) -> Any:
    """Call `hook(param)` whenever a gradient has been added to `param.grad`."""
    return param.register_post_accumulate_grad_hook(hook)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a range with its name."""
    return torch.profiler.record_function(func.__qualname__)(func)


def is_compile_supported() -> bool:
    return True


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside of compiled graphs. The compiler is imported when the function is first called."""
    disabled: Callable[..., Any] = torch._disable_dynamo(func)  # type: ignore[attr-defined]
    return disabled


lazy_disable = disable


def enable(min_version: Any = None) -> Callable[..., Any]:
    """Let a function be compiled, as every function is. Used with or without parentheses."""
    return min_version if callable(min_version) else dummy_decorator


def dummy_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


noop_decorator = dummy_decorator


def compiled_autograd(enabled: bool, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
    if enabled:
        raise NotOfferedError(explain("compiled_autograd", "a compiled backward (engine.compile compiles forwards)"))
    return nullcontext()


PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
"""The attribute with which DeepSpeed marks parameters whose gradients are reduced in autocast's dtype. No parameter of
onefold has it."""


def has_comm_dtype(param: nn.Parameter) -> bool:
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def autocast_if_enabled(engine: Any) -> AbstractContextManager[Any]:
    """Return the autocast that the engine's own forward runs under. It is entered twice without harm."""
    if not engine.torch_autocast_enabled():
        return nullcontext()
    dtype = torch.float16 if engine.torch_autocast_dtype() == "fp16" else torch.bfloat16
    return torch.autocast(engine.device.type, dtype=dtype)


# -- printing ----------------------------------------------------------------------------------------------------------


def printflock(*msgs: Any) -> None:
    """Print one rank after the other, so that lines do not mix."""
    with open(__file__) as lock:
        lock_file(lock)
        try:
            print(*msgs, flush=True)
        finally:
            unlock_file(lock)
