"""A parameter shard in each tier: the source of the all-gather, and how it receives the values that a step computed.

The step updates the master weight, some elements at a time. A `Publisher` copies each range into the model weight while
later ranges are still updated.

[Note: the newest value of a shard]
An all-gather reads the `values` of a shard on the device, and the `gather_source` of an offloaded one. Only a shard in
host memory may be older than its fp32 master: next to a GPU the host updates the master and leaves the cast to the GPU,
which makes it during the next all-gather and copies it back to the host. Until then the master is the shard's newest
value (`stale_behind`), and every other reader of the shard calls `refresh` first, which casts it on the host. If the
GPU takes the step, it casts at once.

A step casts the 16-bit values of a shard on NVMe into the host memory of its gradient, which it has used, and writes
them to the file from there. They stay in this memory until the next gradient of the shard is copied into it, which is
after the first backward. The all-gathers until then read this memory instead of the file.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence

import torch

from onefold.comm import Source
from onefold.offload.buffer import Buffer
from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.host_memory import page_aligned
from onefold.offload.nvme import DiskTensor, Transfer
from onefold.plan import Tier
from onefold.plan.buffers import master_dtype

# Elements of a master that are copied to the device and cast at once. The device holds an fp32 copy of them meanwhile.
_CAST_SIZE = 1 << 23


LastUse = torch.cuda.Event | None
"""Recorded after the last use of a model weight on the device. None if the device is the host."""

Unstepped = Sequence[tuple[int, int]]
"""Ranges that a step does not change, relative to the first element that this rank steps."""


class Publisher:
    """Publishes nothing: for a master weight that is itself the model weight, and for a delayed step."""

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the memory that the step casts [start, stop) into, or None if it casts nothing."""
        return None

    def send(self, master: torch.Tensor, start: int, stop: int) -> None:
        """Publish [start, stop) of the master, which the step has updated and cast into `memory`."""

    def send_from_device(self, weight: torch.Tensor, start: int, stop: int, spare: torch.Tensor) -> bool:
        """Publish a range that was updated on the GPU, on the caller's stream, and return whether this did so.

        `weight` and `spare`, memory for a cast of it, stay valid until the bus's next device-to-host copy completes.
        A publisher that cannot send from the device returns False. The caller then calls `send` once the master is in
        host memory again.
        """
        return False

    def release(self) -> None:
        """Wait until the memory of the ranges sent so far may be overwritten."""

    def finish(self) -> CopyEvent:
        """Return an event that completes when the master may be overwritten. Called after the last range."""
        return COMPLETE


class InPlace(Publisher):
    """Casts into a model weight in the same tier, in the same kernel or loop that updates the master."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the range of the model weight itself."""
        return self._weight[start:stop]


class ParamShard:
    """This rank's shard of a flat parameter, in the dtype and tier in which it is stored."""

    tier: Tier
    values: torch.Tensor | DiskTensor

    @property
    def buffer(self) -> Buffer:
        """The shard as a buffer. Call `refresh` first if its newest value is needed."""
        return Buffer.of(self.values)

    def gather_source(self, *, is_overwritten: bool) -> Source:
        """Return the source of this rank's slice of an all-gather, for an offloaded shard.

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

    def write(self, values: torch.Tensor) -> None:
        self.values.copy_(values)

    def publisher(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> Publisher:
        assert self._bus is not None
        return ToDevice(self.values, self._bus, last_use)


class ToDevice(Publisher):
    """Copies the fp32 master of an offloaded step to the device, which casts it to the model weight.

    If the device is the host, the step casts in place.
    """

    def __init__(self, target: torch.Tensor, bus: Bus, last_use: LastUse) -> None:
        self._target, self._bus, self._last_use = target, bus, last_use
        self._arrival: CopyEvent = COMPLETE

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the model weight's range if the device is the host."""
        return None if self._bus.crosses else self._target[start:stop]

    def send(self, master: torch.Tensor, start: int, stop: int) -> None:
        """Start a host-to-device copy of the range."""
        if self._bus.crosses:
            self._arrival = self._bus.up(master, self._target[start:stop], self._last_use)
        else:
            self._bus.count("up", master.nbytes)

    def send_from_device(self, weight: torch.Tensor, start: int, stop: int, spare: torch.Tensor) -> bool:
        """Copy within the device, behind the last use of the old weight."""
        if self._last_use is not None:
            torch.cuda.current_stream().wait_event(self._last_use)
        self._target[start:stop].copy_(weight)
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._arrival = CopyEvent(event)
        return True

    def release(self) -> None:
        """Wait for the last copy."""
        self._arrival.synchronize()

    def finish(self) -> CopyEvent:
        """Return the event of the last copy."""
        return self._arrival


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


class ToHostShard(Publisher):
    """Writes a parameter shard in host memory.

    Next to a GPU the host skips the cast of the shards that it steps itself (`cast_later` is their master): the GPU is
    idle during the next all-gather and casts them then. `set_stale` receives the master that is still to be cast, or
    None.
    """

    def __init__(
        self,
        values: torch.Tensor,
        bus: Bus,
        cast_later: torch.Tensor | None,
        set_stale: Callable[[torch.Tensor | None], None],
    ) -> None:
        self._values, self._bus, self._cast_later, self._set_stale = values, bus, cast_later, set_stale

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the shard's range, unless the next all-gather casts it."""
        return self._values[start:stop] if self._cast_later is None else None

    def send_from_device(self, weight: torch.Tensor, start: int, stop: int, spare: torch.Tensor) -> bool:
        """Cast on the device and start a device-to-host copy."""
        target = self._values[start:stop]
        if weight.dtype != target.dtype:
            weight = spare.view(target.dtype)[: stop - start].copy_(weight)
        self._bus.down(weight, target)
        self._cast_later = None
        return True

    def finish(self) -> CopyEvent:
        """Record whether the newest value of the shard is its master."""
        self._set_stale(self._cast_later)
        return COMPLETE


class DiskShard(ParamShard):
    """A shard in a file on NVMe. It is read ahead into free page-locked buffers, the rest as buffers become free.

    After a step it is read from host memory until that is overwritten ([Note: the newest value of a shard]).
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
