"""Helpers that scripts import from DeepSpeed's runtime."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from onefold.report.memory_usage import memory_status, see_memory_usage

__all__ = [
    "clip_grad_norm_", "empty_cache", "ensure_directory_exists", "memory_status", "move_to_device", "noop_decorator",
    "see_memory_usage", "set_random_seed",
]  # fmt: skip


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """The same nest of dicts, lists and tuples with its tensors on another device."""
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
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def noop_decorator(func: Any) -> Any:
    return func
