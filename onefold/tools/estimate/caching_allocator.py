"""Simulate torch's caching allocator for CUDA: the allocated and the reserved bytes.

[Note: blocks and segments]
Requests are rounded up to 512 bytes. Those of at most 1 MiB are served from segments of 2 MiB, larger ones from
segments of 20 MiB, and those of at least 10 MiB from separate segments of a multiple of 2 MiB. A request takes the
smallest free block that is large enough. The rest of the block is split off if it is large enough, in large segments
more than 1 MiB; otherwise it counts as allocated. Adjacent free blocks are merged. Segments are never freed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass

_ROUNDING = 512
_MIB = 1 << 20
_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _SEGMENT_ROUNDING = _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


@dataclass
class _MemoryBlock:
    start: int
    size: int
    is_small: bool
    is_free: bool = True
    before: _MemoryBlock | None = None
    after: _MemoryBlock | None = None


class CachingAllocator:
    """The allocator of one device and one stream."""

    def __init__(self) -> None:
        self.requested = self.allocated = self.reserved = 0
        self._next = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, _MemoryBlock] = {}
        self._taken: dict[Hashable, tuple[_MemoryBlock, int]] = {}

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Allocate bytes under a key."""
        if not num_bytes:
            return
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        is_small = size <= _SMALL
        block = self._find(size, is_small) or self._new_segment(size, is_small)
        self._split(block, size)
        block.is_free = False
        self._taken[key] = block, num_bytes
        self.requested += num_bytes
        self.allocated += block.size

    def free(self, key: Hashable) -> None:
        """Free the allocation of a key, if there is one."""
        if key not in self._taken:
            return
        block, num_bytes = self._taken.pop(key)
        self.requested -= num_bytes
        self.allocated -= block.size
        block.is_free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._drop(neighbour)
        if block.before is not None and block.before.is_free:
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            block = self._join(block, block.after)
        insort(self._free[block.is_small], (block.size, block.start))

    def _find(self, size: int, is_small: bool) -> _MemoryBlock | None:
        free = self._free[is_small]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        return self._blocks[free.pop(place)[1]]

    def _new_segment(self, size: int, is_small: bool) -> _MemoryBlock:
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
        self.reserved += segment
        block = _MemoryBlock(self._next, segment, is_small)
        self._blocks[block.start] = block
        self._next += 2 * segment  # segments are not adjacent
        return block

    def _split(self, block: _MemoryBlock, size: int) -> None:
        rest = block.size - size
        if rest < _ROUNDING if block.is_small else rest <= _SMALL:
            return
        other = _MemoryBlock(block.start + size, rest, block.is_small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.size, block.after = size, other
        self._blocks[other.start] = other
        insort(self._free[other.is_small], (rest, other.start))

    def _drop(self, block: _MemoryBlock) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.size, block.start)))

    def _join(self, low: _MemoryBlock, high: _MemoryBlock) -> _MemoryBlock:
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        del self._blocks[high.start]
        return low
