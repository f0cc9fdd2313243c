"""A pool of device buffers that are reused from step to step."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from onefold.allocator import zeros_apart


class Pool:
    """A pool of flat buffers.

    On a GPU torch's allocator caches freed memory, so buffers are simply freed and activations can use their memory. On
    a CPU freed pages are returned to the system and are slow to get again, so they are stored in free lists, which grow
    to the largest number of buffers in use at once.

    A buffer with a key is zero wherever the users of that key never write (padding). Without a key its content is
    undefined. All buffers must be taken and given back on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeps = device.type == "cpu"
        self._free: dict[Hashable, list[torch.Tensor]] = {}
        self._adopted: set[int] = set()
        self.num_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, key: Hashable = None) -> torch.Tensor:
        """Take a buffer from the pool, or allocate one."""
        free = self._free.get((numel, dtype, key))
        if free:
            return free.pop()
        self.num_bytes += numel * dtype.itemsize
        if self._keeps or key is not None:
            return zeros_apart(numel, dtype, self._device)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def adopt(self, buffer: torch.Tensor) -> torch.Tensor:
        """Count a buffer that the pool did not allocate until it is given back, and return it."""
        self._adopted.add(buffer.data_ptr())
        self.num_bytes += buffer.nbytes
        return buffer

    def give_back(self, buffer: torch.Tensor, key: Hashable = None) -> None:
        """Return a buffer to the pool."""
        is_adopted = buffer.data_ptr() in self._adopted
        self._adopted.discard(buffer.data_ptr())
        if self._keeps and not is_adopted:
            self._free.setdefault((buffer.numel(), buffer.dtype, key), []).append(buffer)
        else:
            self.num_bytes -= buffer.nbytes

    def clear(self) -> None:
        """Free the unused buffers. Buffers in use remain counted until they are given back."""
        self.num_bytes -= sum(buffer.nbytes for free in self._free.values() for buffer in free)
        self._free.clear()
