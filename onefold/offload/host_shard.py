"""A parameter shard in host memory, with an optional copy on the device.

[Note: the newest value of a shard]
An all-gather reads the `values` of a shard on the device, and the `gather_source` of an offloaded one. Only a shard in
host memory may be older than its fp32 master: next to a GPU the host updates the master and leaves the cast to the GPU,
which makes it during the next all-gather and copies it back to the host. Until then the master is the shard's newest
value (`stale_behind`), and every other reader of the shard calls `refresh` first, which casts it on the host. If the
GPU takes the step, it casts at once.
"""

from __future__ import annotations

import torch

from onefold.comm import Source
from onefold.offload.buffer import Buffer
from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.param_shard import LastUse, ParamShard, Publisher, Unstepped
from onefold.plan import Tier

# Elements of a master that are copied to the device and cast at once. The device holds an fp32 copy of them meanwhile.
_CAST_SIZE = 1 << 23


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
        # A copy in the device cache, whether it has the newest value, and whether a step writes the next one to it.
        self.cached: torch.Tensor | None = None
        self._is_cached = self._is_written = False

    def set_cached(self, *, on: bool) -> None:
        """Store a copy on the device from the next all-gather on, or free it."""
        if on != (self.cached is not None):
            self._reading.wait_on_stream()
            self._copying.wait_on_stream()
            self.cached = torch.empty_like(self.values, device=self._bus.device) if on else None
            self._is_cached = False

    def stale_behind(self, master: torch.Tensor | None) -> None:
        """Set the master that the next all-gather casts into the shard. None means that the shard is up to date."""
        self._master = master
        self._is_cached = False

    @property
    def is_stale(self) -> bool:
        """Whether the newest value is the master."""
        return self._master is not None

    def gather_source(self, *, is_overwritten: bool) -> Source:
        return _HostSource(self, is_overwritten=is_overwritten)

    def copy_to(self, target: torch.Tensor, *, is_overwritten: bool) -> None:
        """Copy the newest value to the device on the caller's stream, and a new cast of it back to the host."""
        if self._is_cached:
            assert self.cached is not None
            self._reading.wait_on_stream()
            target.copy_(self.cached)
            self._reading = CopyEvent(self._bus.now(blocking=True))
            return
        self._copying.wait_on_stream()
        if self._master is None:
            self._bus.up_at_once(self.values, target)
        else:
            for source, part in zip(self._master.split(_CAST_SIZE), target.split(_CAST_SIZE), strict=True):
                self._bus.up_at_once(source, part)
        if self.cached is not None and not self._is_written:
            self.cached.copy_(target)
            self._is_cached = True
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
        self._is_cached = False

    def write(self, values: torch.Tensor) -> None:
        self.wait()
        self.values.copy_(values)
        self.stale_behind(None)

    def refresh(self) -> None:
        self.wait()
        if self._master is not None:
            self.values.copy_(self._master)
            self._master = None

    def order(self) -> None:
        self._copying.wait_on_stream()

    def publisher(self, master: Buffer, gradient: torch.Tensor, last_use: LastUse, unstepped: Unstepped) -> Publisher:
        self._is_cached = False
        return ToHostShard(self, master.tensor if self._bus.crosses and master.is_plain_tensor else None)

    def early_publisher(self) -> Publisher:
        if self.cached is None:
            return Publisher()
        self._is_cached, self._is_written = False, True
        return ToCache(self)

    def write_cached(self, weight: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Cast a range of updated weights into the copy on the device, on the caller's stream, and return it."""
        assert self.cached is not None
        self._reading.wait_on_stream()
        return self.cached[start:stop].copy_(weight)

    def set_newest(self, master: torch.Tensor | None, written: CopyEvent | None) -> None:
        """Set where the newest value is after a step: in the master, or in `values`.

        With `written`, the end of the last `write_cached`, it is also in the copy on the device.
        """
        self.stale_behind(master)
        self._is_written = False
        if written is not None:
            self._is_cached, self._reading = True, written

    def discard_written(self) -> None:
        """Discard what `write_cached` has written. The next all-gather copies the newest value to the device again."""
        self._is_written = False

    def start_copy_of_cached(self, written: CopyEvent) -> None:
        """Start to copy the newest value from the device to `values`."""
        assert self.cached is not None
        self._copying = self._bus.down_after(self.cached, self.values, written)

    def in_own_memory(self) -> ParamShard:
        self.refresh()
        return HostShard(self.values.clone(), self._bus)


class _HostSource:
    def __init__(self, shard: HostShard, *, is_overwritten: bool) -> None:
        self._shard, self._is_overwritten = shard, is_overwritten

    def copy_to(self, target: torch.Tensor) -> None:
        self._shard.copy_to(target, is_overwritten=self._is_overwritten)


class ToHostShard(Publisher):
    """Writes a parameter shard in host memory, and its copy on the device if there is one.

    Next to a GPU the host skips the cast of the shards that it steps itself (`cast_later` is their master): the GPU is
    idle during the next all-gather and casts them then.
    """

    def __init__(self, shard: HostShard, cast_later: torch.Tensor | None) -> None:
        self._shard, self._cast_later = shard, cast_later
        self._written: CopyEvent | None = None

    @property
    def casts_later(self) -> bool:
        """Whether the next all-gather casts the master, so that nothing is copied before."""
        return self._cast_later is not None

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the shard's range, unless the next all-gather casts it."""
        return self._shard.values[start:stop] if self._cast_later is None else None

    def send_from_device(self, weight: torch.Tensor, start: int, stop: int, spare: torch.Tensor, bus: Bus) -> bool:
        """Cast on the device and start a device-to-host copy."""
        target = self._shard.values[start:stop]
        if self._shard.cached is not None:
            weight = self._shard.write_cached(weight, start, stop)
            self._written = CopyEvent(bus.now(blocking=True))
        elif weight.dtype != target.dtype:
            weight = spare.view(target.dtype)[: stop - start].copy_(weight)
        bus.down(weight, target)
        self._cast_later = None
        return True

    def finish(self) -> CopyEvent:
        """Record where the newest value of the shard is."""
        self._shard.set_newest(self._cast_later, self._written)
        return COMPLETE


class ToCache(Publisher):
    """Writes the device cache during a backward, which computes with the shard in host memory until `publish`."""

    def __init__(self, shard: HostShard) -> None:
        self._shard = shard
        self._written: CopyEvent | None = None

    def send_from_device(self, weight: torch.Tensor, start: int, stop: int, spare: torch.Tensor, bus: Bus) -> bool:
        """Cast into the copy on the device."""
        self._shard.write_cached(weight, start, stop)
        self._written = CopyEvent(bus.now(blocking=True))
        return True

    def publish(self) -> CopyEvent:
        """Use the new weights from now on. Called once, when `step` is called and the update is complete."""
        self._shard.set_newest(None, self._written)
        if self._written is not None:
            self._shard.start_copy_of_cached(self._written)
        return COMPLETE

    def discard(self) -> None:
        """Keep using the weights before the step."""
        self._shard.discard_written()
