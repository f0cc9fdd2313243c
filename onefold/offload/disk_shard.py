"""A parameter shard on NVMe, and the staging buffers that it is read into.

[Note: weights that a step leaves in memory]
A step casts the 16-bit values of a shard on NVMe into the host memory of its gradient, which it has used, and writes
them to the file from there. They stay in this memory until the next gradient of the shard is copied into it, which is
after the first backward. The all-gathers until then read this memory instead of the file.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

import torch

from onefold.comm import Source
from onefold.offload.buffer import Buffer
from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.host_memory import page_aligned
from onefold.offload.host_shard import HostShard
from onefold.offload.nvme import DiskTensor, Transfer
from onefold.offload.param_shard import LastUse, ParamShard, Publisher, Unstepped
from onefold.plan import Tier
from onefold.plan.buffers import master_dtype


class DiskShard(ParamShard):
    """A shard in a file on NVMe. It is read ahead into free page-locked buffers, the rest as buffers become free.

    After a step it is read from host memory until that is overwritten ([Note: weights that a step leaves in memory]).
    """

    tier = Tier.NVME
    values: DiskTensor

    def __init__(self, values: DiskTensor, buffers: StagingBuffers, bus: Bus) -> None:
        self.values = values
        self._parts = values.split(buffers.num_bytes // values.itemsize)
        self._buffers, self._bus = buffers, bus
        self._reading: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._num_started = 0
        # The values in the memory of the gradient, and the last copy out of it.
        self._in_memory: torch.Tensor | None = None
        self._copying: CopyEvent = COMPLETE

    def gather_source(self, *, is_overwritten: bool) -> Source:
        return self

    def set_in_memory(self, values: torch.Tensor) -> None:
        """Set the host memory in which a step has left the values, as they are in the file."""
        self._in_memory = values

    def forget_memory(self) -> None:
        """Read the file from the next all-gather on. The caller's stream waits for copies out of the memory."""
        self._in_memory = None
        self._copying.wait_on_stream()

    def wait(self) -> None:
        self._copying.synchronize()

    def prefetch(self) -> bool:
        if self._in_memory is not None:
            return True
        while self._num_started < len(self._parts):
            buffer = self._buffers.try_take()
            if buffer is None:
                return False
            self._start(buffer)
        return True

    def _start(self, buffer: torch.Tensor) -> None:
        if self not in self._buffers.holders:
            self._buffers.holders.append(self)
        part = self._parts[self._num_started]
        self._num_started += 1
        self._reading.append((buffer, part.start_load(buffer[: part.nbytes].view(part.dtype))))

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the shard to the device on the caller's stream, from memory or buffer by buffer."""
        if self._in_memory is not None:
            self._bus.up_at_once(self._in_memory, target)
            self._copying = CopyEvent(self._bus.now(blocking=True))
            return
        start = 0
        for part in self._parts:
            self.prefetch()
            if not self._reading:
                self._start(self._buffers.take(self))
            buffer, transfer = self._reading.popleft()
            try:
                transfer.wait()
            except BaseException:
                self._buffers.give_back(buffer)
                self._release_buffers()
                raise
            self._bus.up_at_once(buffer[: part.nbytes].view(part.dtype), target[start : start + part.numel()])
            self._buffers.give_back(buffer, self._bus.now())
            start += part.numel()
        self._release_buffers()

    def forget_prefetched(self) -> None:
        self.forget_memory()
        self._release_buffers()

    def _release_buffers(self) -> None:
        """Wait for all reads, and free their buffers."""
        if self in self._buffers.holders:
            self._buffers.holders.remove(self)
        while self._reading:
            buffer, transfer = self._reading.popleft()
            transfer.finish()
            self._buffers.give_back(buffer)
        self._num_started = 0

    def write(self, values: torch.Tensor) -> None:
        self.forget_prefetched()
        self.values.store(values.to("cpu", self.values.dtype))

    def publisher(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> Publisher:
        self._in_memory = None
        return ToNvme(self.values, gradient, unstepped, self.set_in_memory)

    def in_own_memory(self) -> ParamShard:
        return HostShard(self.values.load(), self._bus)


class ToNvme(Publisher):
    """Writes a parameter shard on NVMe. 16-bit values are cast into the memory of the gradient, which has been used.

    `set_in_memory` receives this memory at the end. Ranges are published in ascending order, so that no value
    overwrites a gradient that is still to be used.
    """

    def __init__(
        self,
        target: DiskTensor,
        gradient: torch.Tensor,
        unstepped: Unstepped,
        set_in_memory: Callable[[torch.Tensor], None],
    ) -> None:
        self._target, self._unstepped, self._set_in_memory = target, unstepped, set_in_memory
        is_cast = target.dtype != master_dtype(target.dtype)
        self._memory = gradient.view(target.dtype)[: target.numel()] if is_cast else None
        self._stores: list[Transfer] = []

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the gradient's memory, or None if the master is stored as it is."""
        return self._memory[start:stop] if self._memory is not None else None

    def send(self, master: torch.Tensor, start: int, stop: int) -> None:
        """Start to write the range to the file."""
        memory = self.memory(start, stop)
        if memory is not None:
            # The gradient is still in the ranges that the step does not change.
            for low, high in self._unstepped:
                inside = slice(max(low - start, 0), max(min(high, stop) - start, 0))
                memory[inside].copy_(master[inside])
        self._stores.append(self._target[start:stop].start_store(master if memory is None else memory))

    def release(self) -> None:
        """Wait for all writes."""
        while self._stores:
            self._stores.pop(0).wait()

    def finish(self) -> CopyEvent:
        """Wait for all writes."""
        self.release()
        if self._memory is not None:
            self._set_in_memory(self._memory)
        return COMPLETE


class StagingBuffers:
    """Page-locked host buffers of one size. A buffer that is given back is free once the device has read it."""

    def __init__(self, num: int, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._free: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None]] = queue.SimpleQueue()
        # Shards that have read ahead, oldest first. A shard that is gathered now may take the buffers of the others.
        self.holders: list[DiskShard] = []
        for buffer in page_aligned(num * num_bytes, pinned=pinned).split(num_bytes):
            self._free.put((buffer, None))

    def take(self, user: DiskShard | None = None) -> torch.Tensor:
        """Return a free buffer. If there is none, shards other than `user` discard what they have read ahead."""
        for holder in reversed(self.holders):
            if self._free.empty() and holder is not user:
                holder.forget_prefetched()
        return self._take(block=True)

    def try_take(self) -> torch.Tensor | None:
        """Return a free buffer, or None."""
        try:
            return self._take(block=False)
        except queue.Empty:
            return None

    def _take(self, *, block: bool) -> torch.Tensor:
        buffer, read = self._free.get(block)
        if read is not None:
            read.synchronize()
        return buffer

    def give_back(self, buffer: torch.Tensor, read: torch.cuda.Event | None = None) -> None:
        """Free a buffer once the device has passed the event `read`."""
        self._free.put((buffer, read))
