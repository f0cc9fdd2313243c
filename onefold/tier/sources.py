"""What a gather starts from below the device, and the page-locked buffers that what is on disk passes through."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

import torch

from onefold.tier.bus import Bus
from onefold.tier.host import page_aligned
from onefold.tier.nvme import DiskTensor, Transfer


class HostSource:
    """A shard in host memory, on its way up."""

    def __init__(self, shard: torch.Tensor, count: Callable[[str, int], None]) -> None:
        self._shard, self._count = shard, count

    def fetch(self) -> bool:
        return True

    def drop(self) -> None:
        pass

    def copy_to(self, target: torch.Tensor) -> None:
        self._count("up", self._shard.nbytes)
        target.copy_(self._shard, non_blocking=True)


class FreshSource:
    """A master that the host has stepped: it goes up as it is, the device casts it, and `take_down` gets the cast for
    the shard that rests beside the master. The host's cores have better to do than to cast.
    """

    # Elements on their way at once: a wide copy of them is on the device meanwhile.
    _STRETCH = 1 << 23

    def __init__(self, master: torch.Tensor, take_down: Callable[[torch.Tensor], None], bus: Bus) -> None:
        self._master, self._take_down, self._bus = master, take_down, bus

    def copy_to(self, target: torch.Tensor) -> None:
        for source, part in zip(self._master.split(self._STRETCH), target.split(self._STRETCH), strict=True):
            self._bus.count("up", source.nbytes)
            part.copy_(torch.empty_like(source, device=target.device).copy_(source, non_blocking=True))
        self._take_down(target)


class DiskSource:
    """A shard on disk: read ahead into the page-locked buffers that are free, the rest as they come free again."""

    def __init__(self, shard: DiskTensor, buffers: Buffers, bus: Bus) -> None:
        self._pieces = shard.split(buffers.num_bytes // shard.itemsize)
        self._shard, self._buffers, self._bus = shard, buffers, bus
        self._reading: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._num_started = 0

    def fetch(self) -> bool:
        """Start as much as there are buffers for; whether that is all of it."""
        while self._num_started < len(self._pieces):
            buffer = self._buffers.try_take()
            if buffer is None:
                return False
            self._start(buffer)
        return True

    def _start(self, buffer: torch.Tensor) -> None:
        if self not in self._buffers.holders:
            self._buffers.holders.append(self)
        piece = self._pieces[self._num_started]
        self._num_started += 1
        self._reading.append((buffer, piece.start_load(buffer[: piece.nbytes].view(piece.dtype))))

    def copy_to(self, target: torch.Tensor) -> None:
        start = 0
        for piece in self._pieces:
            self.fetch()
            if not self._reading:
                self._start(self._buffers.take(self))
            buffer, transfer = self._reading.popleft()
            try:
                transfer.wait()
            except BaseException:
                self._buffers.give_back(buffer)
                self.drop()
                raise
            self._bus.count("up", piece.nbytes)
            target[start : start + piece.numel()].copy_(buffer[: piece.nbytes].view(piece.dtype), non_blocking=True)
            self._buffers.give_back(buffer, self._bus.now())
            start += piece.numel()
        self.drop()

    def drop(self) -> None:
        """What was read ahead is not wanted any more."""
        if self in self._buffers.holders:
            self._buffers.holders.remove(self)
        while self._reading:
            buffer, transfer = self._reading.popleft()
            transfer.finish()
            self._buffers.give_back(buffer)
        self._num_started = 0


class Buffers:
    """Some page-locked host buffers of one size. One given back is free once the device has read it."""

    def __init__(self, num: int, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._free: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None]] = queue.SimpleQueue()
        # Who has read ahead, the oldest first: whoever is used now may take a buffer from one who is not.
        self.holders: list[DiskSource] = []
        memory = page_aligned(num * num_bytes, pinned=pinned)
        for buffer in memory.split(num_bytes):
            self._free.put((buffer, None))

    def take(self, user: DiskSource | None = None) -> torch.Tensor:
        for holder in reversed(self.holders):
            if self._free.empty() and holder is not user:
                holder.drop()
        buffer, read = self._free.get()
        if read is not None:
            read.synchronize()
        return buffer

    def try_take(self) -> torch.Tensor | None:
        try:
            buffer, read = self._free.get_nowait()
        except queue.Empty:
            return None
        if read is not None:
            read.synchronize()
        return buffer

    def give_back(self, buffer: torch.Tensor, read: torch.cuda.Event | None = None) -> None:
        self._free.put((buffer, read))
