"""Helpers that scripts import from DeepSpeed's runtime."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy
import torch

from onefold.report.memory_usage import memory_status, see_memory_usage

__all__ = [
    "call_to_str", "clip_grad_norm_", "clip_tensors_by_global_norm", "empty_cache", "ensure_directory_exists",
    "get_global_norm_of_tensors", "get_only_unique_item", "get_weight_norm", "has_inf_or_nan",
    "mask_nan_or_inf_with_val_inplace", "memory_status", "move_to_device", "noop_context", "noop_decorator",
    "see_memory_usage", "set_random_seed",
]  # fmt: skip


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Return nested dicts, lists and tuples with their tensors on another device."""
    if (criterion_func is None and torch.is_tensor(item)) or (criterion_func is not None and criterion_func(item)):
        return item.to(device)
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def set_random_seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that a file is to be written in."""
    import os

    os.makedirs(os.path.dirname(filename), exist_ok=True)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    _refuse_parallelism(mpu)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def noop_decorator(func: Any) -> Any:
    return func


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
