"""Host memory for saves in the background: one piece, made at the first such save and used again by all later ones.

Fresh memory is several times slower to copy to than memory that has been touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from onefold.checkpoint.shards import Slot

_ALIGNMENT = 64


class Staging:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def places(self, slots: Sequence[Slot]) -> list[Slot]:
        """The same slots, with room in host memory that nobody else writes to."""
        sizes = [-(-slot.memory.nbytes // _ALIGNMENT) * _ALIGNMENT for slot in slots]
        if self._memory.numel() < sum(sizes):
            pinned = any(slot.memory.is_cuda for slot in slots)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        found, offset = [], 0
        for slot, size in zip(slots, sizes, strict=True):
            memory = self._memory[offset : offset + slot.memory.nbytes].view(slot.dtype)
            found.append(replace(slot, memory=memory))
            offset += size
        return found


def copy(pairs: Sequence[tuple[Slot, Slot]]) -> None:
    """From slots to their places; on a GPU beside whatever computes there."""
    devices = {slot.memory.device for slot, _ in pairs if isinstance(slot.memory, torch.Tensor) and slot.memory.is_cuda}
    streams = [torch.cuda.Stream(device) for device in devices]
    with ExitStack() as stack:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        for slot, place in pairs:
            assert isinstance(slot.memory, torch.Tensor)
            assert isinstance(place.memory, torch.Tensor)
            place.memory.copy_(slot.memory, non_blocking=True)
        for stream in streams:
            stream.synchronize()
