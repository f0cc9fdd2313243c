"""Tensors of an engine that tools read, and that some tools move to the CPU and back by hand.

A tensor that is moved away (`tensor.data = tensor.data.cpu()`) offloads all states of its kind, as
`engine.offload_states` does, and one that is moved back reloads them. Emptying one (`resize_`) raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from onefold.engine.offloaded_states import OffloadedStates, OffloadStateTypeEnum
from onefold.runtime.torch_internals import reads_no_values, tensors_in

_data: Any = torch.Tensor.data


class Mover:
    """The engine that owns a tensor, and the kinds of state that are moved with it."""

    def __init__(
        self, what: str, offloaded: Callable[[], OffloadedStates | None], kinds: Sequence[OffloadStateTypeEnum]
    ) -> None:
        self.what = what
        self._offloaded, self._kinds = offloaded, kinds

    def move(self, held: torch.Tensor, value: torch.Tensor) -> bool:
        """Follow a move by hand; return whether `value` is the tensor itself, on its device or another one."""
        with torch._C.DisableTorchFunctionSubclass():
            offloaded = self._offloaded()
            if offloaded is None and value.device != held.device:
                self.refuse("moving", "it belongs to no engine")
            if offloaded is not None and value.is_meta and not held.is_meta:
                offloaded.move_by_hand(self._kinds, value.device, self.what)
            known = self.present(held)
            if value.shape != known.shape or not torch.equal(value.to(known.device, known.dtype), known):
                return False
            # States that the config offloads are not moved.
            if offloaded is not None and (offloaded.moved_by_hand or held.device.type == offloaded.device.type):
                offloaded.move_by_hand(self._kinds, value.device, self.what)
            return True

    def present(self, held: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor, from the host where it was moved there by hand."""
        offloaded = self._offloaded()
        is_empty = held.numel() > 0 and held.untyped_storage().size() == 0
        return offloaded.host_copy(held) if is_empty and offloaded is not None else held

    def refuse(self, action: str, why: str = "the engine would lose its values") -> NoReturn:
        raise RuntimeError(
            f"{action} {self.what} is not supported: {why}. Free device memory with engine.offload_states(include=...) "
            "and restore it with engine.reload_states()."
        )


class HandedOut(torch.Tensor):
    """A tensor of the engine, to read or to write in place. See the head of this module for moves."""

    _onefold_mover: Mover

    @staticmethod
    def of(tensor: torch.Tensor, mover: Mover) -> HandedOut:
        with torch._C.DisableTorchFunctionSubclass():
            made: HandedOut = tensor.as_subclass(HandedOut)
        made._onefold_mover = mover
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], HandedOut) else None
        mover = first._onefold_mover if first is not None else None
        if first is not None and mover is not None:
            if func == _data.__set__:
                if not mover.move(first, args[1]):
                    mover.refuse("giving other data to")
                return None
            if func in _EMPTYING:
                mover.refuse(f"{func.__name__} of")
        if not reads_no_values(func) and any(isinstance(t, HandedOut) for t in tensors_in((args, kwargs))):
            args, kwargs = _present(args), _present(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if mover is not None and func in _STORAGES:
            return _Storage(result, mover)
        if mover is not None and func in _ALIASES:
            return HandedOut.of(result, mover)
        return result

    def set_(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Refuse, as `__torch_function__` does for other functions: torch does not call it for this one."""
        self._onefold_mover.refuse("set_ of")

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._onefold_mover.present(self).as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self._onefold_mover.present(self).as_subclass(torch.Tensor).clone()


class _Storage:
    """The storage of a tensor that was handed out. Resizing it raises."""

    def __init__(self, storage: Any, mover: Mover) -> None:
        self._storage, self._mover = storage, mover

    def resize_(self, size: int) -> NoReturn:
        self._mover.refuse("resizing the storage of")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def __len__(self) -> int:
        return len(self._storage)


def _present(value: Any) -> Any:
    """Replace tensors that were moved off the device by hand by their values on the host."""
    if isinstance(value, HandedOut):
        return value._onefold_mover.present(value)
    if isinstance(value, tuple | list):
        return type(value)(_present(each) for each in value) if type(value) in (tuple, list) else value
    return {key: _present(each) for key, each in value.items()} if type(value) is dict else value


_EMPTYING: set[Any] = {torch.Tensor.resize_, torch.Tensor.resize_as_}
_STORAGES: set[Any] = {torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor._typed_storage}
_ALIASES: set[Any] = {_data.__get__, torch.Tensor.detach, torch.detach}
