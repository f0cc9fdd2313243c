"""A parameter shard while it is sharded: the source of the all-gather, on the device, in host memory or on NVMe.

[Note: the newest value of a shard]
An all-gather takes the shard's `gather_source` and does not depend on its tier. Only a shard in host memory may be
older than its fp32 master: next to a GPU the host updates the master and leaves the cast to the GPU, which makes it
during the next all-gather and copies it back to the host. Until then the master is the shard's newest value
(`stale_behind`), and every other reader of the shard calls `refresh` first, which casts it on the host. If the GPU
takes the step, it casts at once.
"""

from __future__ import annotations

import queue
from collections import deque

import torch

from onefold.comm import Source
from onefold.offload.buffer import Buffer
from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.host_memory import page_aligned
from onefold.offload.nvme import DiskTensor, Transfer
from onefold.offload.publish import LastUse, Publisher, ToDevice, ToHostShard, ToNvme, Unstepped
from onefold.plan import Tier

# Elements of a master that are copied to the device and cast at once. The device holds an fp32 copy of them meanwhile.
_CAST_SIZE = 1 << 23


class ParamShard:
    """This rank's shard of a flat parameter, in the dtype and tier in which it is stored."""

    tier: Tier
    values: torch.Tensor | DiskTensor

    @property
    def buffer(self) -> Buffer:
        """The shard as a buffer. Call `refresh` first if its newest value is needed."""
        return Buffer.of(self.values)

    def gather_source(self, *, is_overwritten: bool) -> torch.Tensor | Source:
        """Return the source of this rank's slice of an all-gather.

        `is_overwritten` says that the all-gather then decodes other values into that slice.
        """
        raise NotImplementedError

    def prefetch(self) -> bool:
        """Read a shard on NVMe ahead of its all-gather. Return False if there are not enough free buffers yet."""
        return True

    def forget_prefetched(self) -> None:
        """Discard what was read ahead, and wait for all reads, because the shard is about to be written."""

    def write(self, values: torch.Tensor) -> None:
        """Overwrite the shard."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Cast the master into the shard if the master is newer."""

    def wait(self) -> None:
        """Block the host until no copy reads or writes the shard, or the master that it is cast from."""

    def order(self) -> None:
        """Make the caller's stream wait for copies into the shard."""

    def publisher(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> Publisher:
        """Return what publishes an offloaded step to this shard. It may overwrite the gradient."""
        raise NotImplementedError

    def in_own_memory(self) -> ParamShard:
        """Return the shard in memory that outlives the engine."""
        return self


class DeviceShard(ParamShard):
    """A shard on the device that computes."""

    tier = Tier.DEVICE
    values: torch.Tensor

    def __init__(self, values: torch.Tensor, bus: Bus | None = None) -> None:
        self.values = values
        self._bus = bus

    def gather_source(self, *, is_overwritten: bool) -> torch.Tensor:
        if self.values.numel() and not self.values.untyped_storage().size():
            raise RuntimeError(
                "the storage of a parameter shard was freed outside the engine, so its values are lost. Load a "
                "checkpoint into a new engine, and free memory with engine.offload_states(include=['lp_params'])."
            )
        return self.values

    def write(self, values: torch.Tensor) -> None:
        self.values.copy_(values)

    def publisher(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> Publisher:
        assert self._bus is not None
        return ToDevice(self.values, self._bus, last_use)


class HostShard(ParamShard):
    """A shard in host memory, copied to the device by every all-gather."""

    tier = Tier.HOST
    values: torch.Tensor

    def __init__(self, values: torch.Tensor, bus: Bus) -> None:
        self.values = values
        self._bus = bus
        self._master: torch.Tensor | None = None
        # The last copies into the shard, and out of it.
        self._copying: CopyEvent = COMPLETE
        self._reading: CopyEvent = COMPLETE

    def stale_behind(self, master: torch.Tensor | None) -> None:
        """Set the master that the next all-gather casts into the shard. None means that the shard is up to date."""
        self._master = master

    def gather_source(self, *, is_overwritten: bool) -> Source:
        return _HostSource(self, is_overwritten=is_overwritten)

    def copy_to(self, target: torch.Tensor, *, is_overwritten: bool) -> None:
        """Copy the newest value to the device on the caller's stream, and a new cast of it back to the host."""
        self._copying.wait_on_stream()
        if self._master is None:
            self._bus.up_at_once(self.values, target)
        else:
            for source, part in zip(self._master.split(_CAST_SIZE), target.split(_CAST_SIZE), strict=True):
                self._bus.up_at_once(source, part)
        self._reading = CopyEvent(self._bus.now(blocking=True))
        if self._master is not None:
            self._copying, self._master = self._bus.down(target, self.values), None
            if is_overwritten:
                self._copying.wait_on_stream()

    def wait(self) -> None:
        self._copying.synchronize()
        self._reading.synchronize()

    def forget_prefetched(self) -> None:
        self.wait()

    def write(self, values: torch.Tensor) -> None:
        self.wait()
        self.values.copy_(values)
        self._master = None

    def refresh(self) -> None:
        self.wait()
        if self._master is not None:
            self.values.copy_(self._master)
            self._master = None

    def order(self) -> None:
        self._copying.wait_on_stream()

    def publisher(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> Publisher:
        cast_later = master.tensor if self._bus.crosses and master.is_plain_tensor else None
        return ToHostShard(self.values, self._bus, cast_later, self.stale_behind)

    def in_own_memory(self) -> ParamShard:
        self.refresh()
        return HostShard(self.values.clone(), self._bus)


class _HostSource:
    def __init__(self, shard: HostShard, *, is_overwritten: bool) -> None:
        self._shard, self._is_overwritten = shard, is_overwritten

    def copy_to(self, target: torch.Tensor) -> None:
        self._shard.copy_to(target, is_overwritten=self._is_overwritten)


class DiskShard(ParamShard):
    """A shard in a file on NVMe. It is read ahead into free page-locked buffers, the rest as buffers become free."""

    tier = Tier.NVME
    values: DiskTensor

    def __init__(self, values: DiskTensor, buffers: Buffers, bus: Bus) -> None:
        self.values = values
        self._parts = values.split(buffers.num_bytes // values.itemsize)
        self._buffers, self._bus = buffers, bus
        self._reading: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._num_started = 0

    def gather_source(self, *, is_overwritten: bool) -> Source:
        return self

    def prefetch(self) -> bool:
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
        """Copy the shard to the device on the caller's stream, buffer by buffer."""
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
                self.forget_prefetched()
                raise
            self._bus.up_at_once(buffer[: part.nbytes].view(part.dtype), target[start : start + part.numel()])
            self._buffers.give_back(buffer, self._bus.now())
            start += part.numel()
        self.forget_prefetched()

    def forget_prefetched(self) -> None:
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
        return ToNvme(self.values, gradient, unstepped)

    def in_own_memory(self) -> ParamShard:
        return HostShard(self.values.load(), self._bus)


class Buffers:
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
