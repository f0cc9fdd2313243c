"""What a captured call depends on besides the values of its tensors, and tensors at fixed addresses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

# The type of device whose tensors a graph cannot read.
HOST = "cpu"
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class NotCapturable(Exception):
    """Raised with the reason why a block cannot be captured, which users read."""


def signature_of(value: Any, tensors: list[Tensor], what: str = "an argument") -> Hashable:
    """Return the structure, the constants and the layouts of tensors of a value, and append its tensors to a list."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.device.type == HOST or value.layout is not torch.strided:
            raise NotCapturable(f"{what} is a tensor on {value.device}, or not dense")
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if kind in _CONSTANTS:
        return kind, value
    if kind is tuple or kind is list:
        return kind, *(signature_of(item, tensors, what) for item in value)
    if kind is dict:
        return kind, *((key, signature_of(item, tensors, what)) for key, item in value.items())
    if node := _node_of(kind):
        values, names = node.flatten_fn(value)
        return str(kind), repr(names), *(signature_of(item, tensors, what) for item in values)
    raise NotCapturable(f"{what} is a {kind.__module__}.{kind.__qualname__}")


def _node_of(kind: type) -> Any:
    """Return how to take apart a subclass of dict that is registered with torch, as the outputs of transformers are."""
    return SUPPORTED_NODES.get(kind) if issubclass(kind, dict) else None


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same structure with other tensors."""
    kind = type(value)
    if isinstance(value, Tensor):
        return next(tensors)
    if kind is tuple or kind is list:
        return kind(with_tensors(item, tensors) for item in value)
    if kind is dict:
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if node := _node_of(kind):
        values, names = node.flatten_fn(value)
        return node.unflatten_fn([with_tensors(item, tensors) for item in values], names)
    return value


def static_copy(source: Tensor) -> Tensor:
    """Return a copy with the same strides, also of a tensor whose elements overlap because it was expanded."""
    memory = _memory_of(source)
    copied = torch.empty_like(memory).copy_(memory)
    return copied.as_strided(source.shape, source.stride(), 0)


def update(target: Tensor, source: Tensor) -> None:
    """Copy the values of a tensor to a `static_copy` of a tensor with the same layout."""
    _memory_of(target).copy_(_memory_of(source))


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the elements between the first and the last one of a tensor, as a flat tensor.

    Writing to it does not count as an in-place write for autograd.
    """
    tensor = tensor.data
    if not tensor.numel():
        return tensor.view(-1)
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((length,), (1,), tensor.storage_offset())


def without_ownership(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory that does not keep it allocated.

    A graph keeps all of its memory. A later capture may use what no tensor owns, after the values were read.
    """
    storage = tensor.untyped_storage()
    borrowed: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())
