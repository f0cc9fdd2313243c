"""The ops of a pass, and the work they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch


class TensorLike(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device, bound: int) -> torch.Tensor:
        """Return a tensor of this kind. Integers, which may be indices, are below the bound."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point or self.dtype is torch.bool:
            return made.fill_(1e-3)
        values = torch.arange(made.numel(), device=device).remainder_(bound)
        return made.copy_(values.view(self.shape))


class OpCall(NamedTuple):
    """An op and the shapes of its arguments."""

    func: Callable[..., Any]
    arguments: Hashable

    @staticmethod
    def of(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> OpCall:
        """Return the call of an op with these arguments."""
        return OpCall(func, (_frozen(args), _frozen(kwargs)))

    def bind(self, device: torch.device) -> Callable[[], Any]:
        """Return a function that runs the op on real tensors of a device."""
        # An index may select from any dimension.
        bound = min((size for size in _sizes(self.arguments) if size > 1), default=1)
        args, kwargs = (_thawed(each, device, bound) for each in self.arguments)  # type: ignore[attr-defined]
        return lambda: self.func(*args, **kwargs)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return _num_bytes(self.arguments)


def _frozen(found: Any) -> Hashable:
    if isinstance(found, torch.Tensor):
        return TensorLike(tuple(found.shape), tuple(found.stride()), found.dtype)
    if isinstance(found, dict):
        return dict, tuple((name, _frozen(found[name])) for name in sorted(found))
    if isinstance(found, list | tuple):
        return type(found), tuple(_frozen(each) for each in found)
    return found  # type: ignore[no-any-return]


def _sizes(found: Any) -> Iterator[int]:
    if isinstance(found, TensorLike):
        yield from found.shape
    elif isinstance(found, tuple):
        for each in found:
            yield from _sizes(each)


def _thawed(found: Any, device: torch.device, bound: int) -> Any:
    if isinstance(found, TensorLike):
        return found.make(device, bound)
    if isinstance(found, torch.device):
        return device
    if isinstance(found, tuple) and len(found) == 2 and found[0] is dict:
        return {name: _thawed(value, device, bound) for name, value in found[1]}
    if isinstance(found, tuple) and len(found) == 2 and found[0] in (list, tuple):
        return found[0](_thawed(each, device, bound) for each in found[1])
    return found


def _num_bytes(found: Any) -> int:
    if isinstance(found, TensorLike):
        return found.dtype.itemsize * torch.Size(found.shape).numel()
    return sum(map(_num_bytes, found)) if isinstance(found, tuple) else 0


@dataclass
class Work:
    """The work of a pass: FLOPs of matrix products, and bytes that other ops read and write."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    num_ops: int = 0
    calls: Counter[OpCall] = field(default_factory=Counter)
    """How often each op is called with tensors of the same shapes."""
    is_inside: bool = False
    """Whether a function is running whose ops are not counted."""

    def copy(self) -> Work:
        """Return a copy that further ops do not change."""
        return replace(self, calls=self.calls.copy())
