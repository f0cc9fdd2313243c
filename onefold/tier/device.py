"""Device buffers that are taken, given back and taken again: no step allocates what the last one freed."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class Pool:
    """Free lists of flat buffers. It grows to the largest number that was open at once, and no further.

    A buffer is zero when it is first made; buffers are reused only under the same key, so whatever the users of one
    key never write (padding) stays zero. Everything is taken and given back on the stream that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[Hashable, list[torch.Tensor]] = {}
        self.num_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, key: Hashable = None) -> torch.Tensor:
        free = self._free.get((numel, dtype, key))
        if free:
            return free.pop()
        self.num_bytes += numel * dtype.itemsize
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def give_back(self, buffer: torch.Tensor, key: Hashable = None) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype, key), []).append(buffer)

    def clear(self) -> None:
        """Forget the free buffers; those still out are their holders'."""
        self._free.clear()
        self.num_bytes = 0
