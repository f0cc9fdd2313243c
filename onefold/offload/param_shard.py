"""A parameter shard: the source of the all-gather, and how it receives the values that a step computed.

A shard in host memory is in `host_shard.py`, one on NVMe in `disk_shard.py`.

The step updates the master weight, some elements at a time. A `Publisher` copies each range into the model weight while
later ranges are still updated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.comm import Source
from onefold.offload.buffer import Buffer
from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.nvme import DiskTensor
from onefold.plan import Tier

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

    def send_from_device(self, weight: torch.Tensor, start: int, stop: int, spare: torch.Tensor, bus: Bus) -> bool:
        """Publish a range that was updated on the GPU, on the caller's stream, and return whether this did so.

        `weight` and `spare`, memory for a cast of it, stay valid until the next device-to-host copy of `bus` completes.
        A publisher that cannot send from the device returns False. The caller then calls `send` once the master is in
        host memory again.
        """
        return False

    def release(self) -> None:
        """Wait until the memory of the ranges sent so far may be overwritten."""

    def finish(self) -> CopyEvent:
        """Return an event that completes when the master may be overwritten. Called after the last range."""
        return COMPLETE

    def discard(self) -> None:
        """Keep the model weight as it was, because a speculative step is discarded."""


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

    def early_publisher(self) -> Publisher:
        """Return what receives updated weights during a backward, before `step` publishes them."""
        return Publisher()

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

    def send_from_device(self, weight: torch.Tensor, start: int, stop: int, spare: torch.Tensor, bus: Bus) -> bool:
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
