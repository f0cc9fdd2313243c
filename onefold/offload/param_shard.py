"""A parameter shard between uses: what a gather starts from, on the device, in host memory or on disk.

[Note: the newest value of a shard]
A gather asks the shard for its source and never where that is. Only a shard in host memory may be older than its fp32
master: beside a GPU the host steps the master and leaves the cast to the device, which makes it at the next gather and
copies it back down. Until then the shard knows the master as its newest value (`stale_behind`), and whoever reads the
shard in any other way casts it first (`refresh`). Where the device steps, it casts at once and the shard is new.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence

import torch

from onefold.comm import Source
from onefold.offload.buffer import Buffer
from onefold.offload.bus import HERE, Arrival, Bus
from onefold.offload.host_memory import page_aligned
from onefold.offload.nvme import DiskTensor, Transfer
from onefold.plan import Tier
from onefold.plan.memory import master_dtype

# Until then the caller's stream may read what is on the device.
LastUse = torch.cuda.Event | None
# Ranges that the step leaves as they are, counted from the start of what is stepped.
Unstepped = Sequence[tuple[int, int]]

# Elements of a master that are copied up and cast at once: a wide copy of them is on the device meanwhile.
_CAST_SIZE = 1 << 23


class StepOutput:
    """Where the host's step leaves what it updates, some elements at a time. This one leaves all in the master."""

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """What these elements are cast into; None: nothing, the master is sent as it is."""
        return None

    def send(self, master: torch.Tensor, start: int, stop: int) -> None:
        """These elements of the master are updated, and cast."""

    def send_from_device(self, weights: torch.Tensor, start: int, stop: int, spare: torch.Tensor) -> bool:
        """These elements were updated on the device, in the order of the caller's stream, and rest there until the
        bus's next copy down has arrived, as does `spare`, memory for a cast of them. False where the device cannot send
        them to where they rest: they are sent when the master is below again.
        """
        return False

    def leave(self) -> None:
        """The master's memory may be used for other elements next."""

    def finish(self) -> Arrival:
        """All are updated. The master is read until the arrival."""
        return HERE


class ParamShard:
    """This rank's shard of a flat parameter, in the dtype and tier in which it rests."""

    tier: Tier
    values: torch.Tensor | DiskTensor

    @property
    def buffer(self) -> Buffer:
        """The shard as a buffer. Call `refresh` first if its newest value is needed."""
        return Buffer.of(self.values)

    def gather_source(self, *, is_overwritten: bool) -> torch.Tensor | Source:
        """What fills this rank's slice of a gather. `is_overwritten`: the gather then decodes other values into it."""
        raise NotImplementedError

    def prefetch(self) -> bool:
        """A gather comes soon: read ahead what is on disk. False where there is no buffer for all of it."""
        return True

    def forget_prefetched(self) -> None:
        """The shard is about to be written: nobody reads it any more, and what was read ahead is old."""

    def write(self, values: torch.Tensor) -> None:
        """Write back: the shard takes these values."""
        raise NotImplementedError

    def refresh(self) -> None:
        """The shard itself has its newest value, whether or not anybody has gathered it."""

    def wait(self) -> None:
        """Until no copy reads or writes the shard, or the master it is behind, as the host sees it."""

    def order(self) -> None:
        """What the caller's stream does next comes after copies into the shard that are under way."""

    def output(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> StepOutput:
        """Where the host's step leaves updated values. The gradient's memory may be used for them."""
        raise NotImplementedError

    def in_own_memory(self) -> ParamShard:
        """The same values, when the engine and its offload memory go."""
        return self


class DeviceShard(ParamShard):
    """On the device that computes."""

    tier = Tier.DEVICE
    values: torch.Tensor

    def __init__(self, values: torch.Tensor, bus: Bus | None = None) -> None:
        self.values = values
        self._bus = bus

    def gather_source(self, *, is_overwritten: bool) -> torch.Tensor:
        if self.values.numel() and not self.values.untyped_storage().size():
            raise RuntimeError(
                "the storage of a parameter shard was emptied by hand, and its values are lost. Free the device's "
                "memory with engine.offload_states(include=['lp_params']), and load a checkpoint into a new engine"
            )
        return self.values

    def write(self, values: torch.Tensor) -> None:
        self.values.copy_(values)

    def output(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> StepOutput:
        assert self._bus is not None
        return DeviceOutput(self.values, self._bus, last_use)


class HostShard(ParamShard):
    """In host memory: copied up by every gather."""

    tier = Tier.HOST
    values: torch.Tensor

    def __init__(self, values: torch.Tensor, bus: Bus) -> None:
        self.values = values
        self._bus = bus
        self._master: torch.Tensor | None = None
        # The last copies into the shard, and out of it.
        self._copying: Arrival = HERE
        self._reading: Arrival = HERE

    def stale_behind(self, master: torch.Tensor | None) -> None:
        """The host has stepped the master: the next gather casts it on the device, and the shard takes the cast. None:
        the shard was cast with the step.
        """
        self._master = master

    def gather_source(self, *, is_overwritten: bool) -> Source:
        return _HostSource(self, is_overwritten=is_overwritten)

    def copy_to(self, target: torch.Tensor, *, is_overwritten: bool) -> None:
        self._copying.order()
        if self._master is None:
            self._bus.up_at_once(self.values, target)
        else:
            for source, part in zip(self._master.split(_CAST_SIZE), target.split(_CAST_SIZE), strict=True):
                self._bus.up_at_once(source, part)
        self._reading = Arrival(self._bus.now(blocking=True))
        if self._master is not None:
            self._copying, self._master = self._bus.down(target, self.values), None
            if is_overwritten:
                self._copying.order()

    def wait(self) -> None:
        self._copying.wait()
        self._reading.wait()

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
        self._copying.order()

    def output(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> StepOutput:
        cast_later = master.tensor if self._bus.crosses and master.is_plain_tensor else None
        return _HostOutput(self, self._bus, cast_later)

    def in_own_memory(self) -> ParamShard:
        self.refresh()
        return HostShard(self.values.clone(), self._bus)


class _HostSource:
    def __init__(self, shard: HostShard, *, is_overwritten: bool) -> None:
        self._shard, self._is_overwritten = shard, is_overwritten

    def copy_to(self, target: torch.Tensor) -> None:
        self._shard.copy_to(target, is_overwritten=self._is_overwritten)


class DiskShard(ParamShard):
    """In a file: read ahead into the page-locked buffers that are free, the rest as they come free again."""

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

    def output(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> StepOutput:
        return _ToDisk(self.values, gradient, unstepped)

    def in_own_memory(self) -> ParamShard:
        return HostShard(self.values.load(), self._bus)


class Buffers:
    """Some page-locked host buffers of one size. One given back is free once the device has read it."""

    def __init__(self, num: int, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._free: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None]] = queue.SimpleQueue()
        # Who has read ahead, the oldest first: whoever is used now may take a buffer from one who is not.
        self.holders: list[DiskShard] = []
        for buffer in page_aligned(num * num_bytes, pinned=pinned).split(num_bytes):
            self._free.put((buffer, None))

    def take(self, user: DiskShard | None = None) -> torch.Tensor:
        for holder in reversed(self.holders):
            if self._free.empty() and holder is not user:
                holder.forget_prefetched()
        return self._take(block=True)

    def try_take(self) -> torch.Tensor | None:
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
        self._free.put((buffer, read))


# -- what the host's step does with updated parameters ----------------------------------------------------------


class DeviceOutput(StepOutput):
    """Sent up to the device as the fp32 master, which the device casts. Where the device is the host, cast in place."""

    def __init__(self, target: torch.Tensor, bus: Bus, last_use: LastUse) -> None:
        self._target, self._bus, self._last_use = target, bus, last_use
        self._arrival: Arrival = HERE

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        return None if self._bus.crosses else self._target[start:stop]

    def send(self, master: torch.Tensor, start: int, stop: int) -> None:
        if self._bus.crosses:
            self._arrival = self._bus.up(master, self._target[start:stop], self._last_use)
        else:
            self._bus.count("up", master.nbytes)

    def send_from_device(self, weights: torch.Tensor, start: int, stop: int, spare: torch.Tensor) -> bool:
        if self._last_use is not None:
            torch.cuda.current_stream().wait_event(self._last_use)
        self._target[start:stop].copy_(weights)
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._arrival = Arrival(event)
        return True

    def leave(self) -> None:
        self._arrival.wait()

    def finish(self) -> Arrival:
        return self._arrival


class _HostOutput(StepOutput):
    """Into a shard in host memory: cast by whoever steps. Beside a GPU the host leaves the cast of its own steps to the
    next gather (`cast_later`: the master), since the GPU is idle then and the host is not.
    """

    def __init__(self, shard: HostShard, bus: Bus, cast_later: torch.Tensor | None) -> None:
        self._shard, self._bus, self._cast_later = shard, bus, cast_later

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        return self._shard.values[start:stop] if self._cast_later is None else None

    def send_from_device(self, weights: torch.Tensor, start: int, stop: int, spare: torch.Tensor) -> bool:
        target = self._shard.values[start:stop]
        if weights.dtype != target.dtype:
            weights = spare.view(target.dtype)[: stop - start].copy_(weights)
        self._bus.down(weights, target)
        self._cast_later = None
        return True

    def finish(self) -> Arrival:
        self._shard.stale_behind(self._cast_later)
        return HERE


class _ToDisk(StepOutput):
    """Cast over the gradient it was made of, which is read by then, and stored from there."""

    def __init__(self, target: DiskTensor, gradient: torch.Tensor, unstepped: Unstepped) -> None:
        self._target, self._gradient, self._unstepped = target, gradient, unstepped
        self._stores: list[Transfer] = []

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        dtype = self._target.dtype
        if dtype == master_dtype(dtype):
            return None  # the master goes to the disk as it is
        return self._gradient[start:stop].view(dtype)[: stop - start]

    def send(self, master: torch.Tensor, start: int, stop: int) -> None:
        memory = self.memory(start, stop)
        if memory is not None:
            for low, high in self._unstepped:  # a gradient is left there
                inside = slice(max(low - start, 0), max(min(high, stop) - start, 0))
                memory[inside].copy_(master[inside])
        self._stores.append(self._target[start:stop].start_store(master if memory is None else memory))

    def leave(self) -> None:
        while self._stores:
            self._stores.pop(0).wait()

    def finish(self) -> Arrival:
        self.leave()
        return HERE
