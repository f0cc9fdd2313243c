"""Host memory for saves in the background: one piece, made at the first such save and used again by all later ones.

Fresh memory is several times slower to copy to than memory that has been touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from onefold.checkpoint.shards import Slot

_ALIGNMENT = 64


class Staging:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, slots: Sequence[Slot]) -> list[Slot]:
        """The same slots, in host memory that nobody else writes to."""
        sizes = [-(-slot.memory.nbytes // _ALIGNMENT) * _ALIGNMENT for slot in slots]
        if self._memory.numel() < sum(sizes):
            pinned = any(slot.memory.is_cuda for slot in slots)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        copies, offset = [], 0
        for slot, size in zip(slots, sizes, strict=True):
            place = self._memory[offset : offset + slot.memory.nbytes].view(slot.dtype)
            copies.append(replace(slot, memory=place.copy_(slot.memory, non_blocking=True)))
            offset += size
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        return copies
