"""Bytes of tensors that are alive at one time, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Peaks(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest number of bytes of tensors that operations return and that are alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return out

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size
