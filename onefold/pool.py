"""Device buffers that are taken, given back and taken again: no step pays for what the last one freed."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from onefold.allocator import zeros_apart


class Pool:
    """Flat buffers for the time they are needed.

    On a GPU torch's allocator already keeps what is freed, so a buffer given back is simply let go, and activations
    can use its memory meanwhile. On a CPU freed pages go back to the system and cost dearly to get again, so free
    lists keep them: they grow to the largest number that was open at once, and no further.

    A buffer taken under a key is zero wherever the users of that key never write (padding); without a key its content
    is arbitrary. Everything is taken and given back on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeps = device.type == "cpu"
        self._free: dict[Hashable, list[torch.Tensor]] = {}
        self.num_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, key: Hashable = None) -> torch.Tensor:
        free = self._free.get((numel, dtype, key))
        if free:
            return free.pop()
        self.num_bytes += numel * dtype.itemsize
        if self._keeps or key is not None:
            return zeros_apart(numel, dtype, self._device)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def give_back(self, buffer: torch.Tensor, key: Hashable = None) -> None:
        if self._keeps:
            self._free.setdefault((buffer.numel(), buffer.dtype, key), []).append(buffer)
        else:
            self.num_bytes -= buffer.nbytes

    def clear(self) -> None:
        """Forget the free buffers; those still out are their holders', and counted until they come back."""
        self.num_bytes -= sum(buffer.nbytes for free in self._free.values() for buffer in free)
        self._free.clear()
