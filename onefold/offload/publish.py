"""Publishers: how the model weight of a shard receives the values that a step computed.

The step updates the master weight, some elements at a time, and a publisher copies each range into the model weight:
where the master and the model weight are in different tiers, while later ranges are still updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.nvme import DiskTensor, Transfer
from onefold.plan.buffers import master_dtype

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


class ToNvme(Publisher):
    """Writes a parameter shard on NVMe. 16-bit values are cast into the memory of the gradient, which has been used."""

    def __init__(self, target: DiskTensor, gradient: torch.Tensor, unstepped: Unstepped) -> None:
        self._target, self._gradient, self._unstepped = target, gradient, unstepped
        self._stores: list[Transfer] = []

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the gradient's memory, or None if the master is stored as it is."""
        dtype = self._target.dtype
        if dtype == master_dtype(dtype):
            return None
        return self._gradient[start:stop].view(dtype)[: stop - start]

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
        return COMPLETE
