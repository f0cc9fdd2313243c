"""Walks over what models take and return: the tensors inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

# How deep objects of unknown classes are looked into: an output, the layers in it, their tensors.
_DEPTH = 4


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Every tensor inside tuples, lists, mappings, dataclasses, and attributes of other objects but modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth)
    elif isinstance(value, tuple | list | set):
        for item in value:
            yield from tensors_in(item, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), depth)
    elif depth and not isinstance(value, type | nn.Module | ModuleType):
        for item in list(getattr(value, "__dict__", {}).values()):
            yield from tensors_in(item, depth - 1)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with its floating-point tensors cast."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value
