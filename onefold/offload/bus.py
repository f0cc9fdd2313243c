"""Copies between device and host on two streams, one for each direction, in parallel to the compute stream.

[Note: the bus]
A copy waits for the work that the caller's stream has queued, and ends with an event. `CopyEvent.synchronize` puts the
host thread to sleep: a thread that spins would take a core from the host's own step, which then waits for its slowest
thread. The owner of device memory keeps it until its stream waits for the event (`wait_on_stream`), so that nothing
needs `record_stream`. If the device is the host itself, a copy is complete when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onefold.recorder import Track, recorded


class CopyEvent:
    """The end of an asynchronous copy."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.recorded = event

    def synchronize(self) -> None:
        """Block the host thread until the copy is complete."""
        if self.recorded is not None:
            self.recorded.synchronize()

    def wait_on_stream(self) -> None:
        """Make the caller's stream wait for the copy."""
        if self.recorded is not None:
            torch.cuda.current_stream().wait_event(self.recorded)


COMPLETE = CopyEvent()

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sources and targets of copies."""

_TRACKS = {"down": Track.DOWN, "up": Track.UP}


class Bus:
    """Copies between the device and the host. `count` receives "down" or "up" and the bytes of each copy."""

    def __init__(self, device: torch.device, count: Callable[[str, int], None]) -> None:
        self.device = device
        self.count = count
        self.crosses = device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(device) for way in ("down", "up")} if self.crosses else {}
        self._siblings: list[Bus] = []

    def sibling(self) -> Bus:
        """Return a bus with separate streams, whose copies do not wait for those of this one. `drain` includes it."""
        self._siblings.append(Bus(self.device, self.count))
        return self._siblings[-1]

    def down(self, source: torch.Tensor, target: torch.Tensor, *, add: bool = False) -> CopyEvent:
        """Copy to the host, or add to `target` if the device is the host."""
        if add:
            assert not self.crosses
            with recorded(Track.DOWN, "down", numel=source.numel()):
                self.count("down", min(source.nbytes, target.nbytes))
                target.add_(source)
            return COMPLETE
        return self.down_together([(source, target)])

    def down_after(self, source: torch.Tensor, target: torch.Tensor, after: CopyEvent) -> CopyEvent:
        """Copy to the host after another copy, without waiting for the caller's stream."""
        return self._copy("down", [(source, target)], after.recorded)

    def down_together(self, pairs: Pairs) -> CopyEvent:
        """Copy several tensors to the host, with one event."""
        return self._copy("down", pairs, self.now())

    def up(self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event | None = None) -> CopyEvent:
        """Copy to the device, which casts to the target's dtype.

        `after` is the last use of the target, for a caller whose own stream is not ordered behind that.
        """
        return self.up_together([(source, target)], after)

    def up_together(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> CopyEvent:
        """Copy several tensors to the device, with one event."""
        return self._copy("up", pairs, after or self.now())

    def up_after(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        """Copy to the device after other copies, without waiting for the caller's stream."""
        first, *others = [event.recorded for event in after if event.recorded is not None]
        for event in others:
            self._streams["up"].wait_event(event)
        return self.up(source, target, first)

    def compute_down(
        self, compute: Callable[[], None], source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyEvent]
    ) -> CopyEvent:
        """Run `compute`, which writes `source`, on the device-to-host stream, then copy `source` to `target`.

        The stream waits for the copies in `after` first.
        """
        stream, arrived = self._streams["down"], torch.cuda.Event(blocking=True)
        for event in after:
            if event.recorded is not None:
                stream.wait_event(event.recorded)
        with torch.cuda.stream(stream), recorded(Track.DOWN, "down", numel=source.numel()):
            self.count("down", source.nbytes)
            compute()
            target.copy_(source, non_blocking=True)
            arrived.record(stream)
        return CopyEvent(arrived)

    def up_at_once(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy to the device on the caller's own stream."""
        with recorded(Track.UP, "up", numel=source.numel()):
            self.count("up", source.nbytes)
            if source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
            else:
                target.copy_(torch.empty_like(source, device=target.device).copy_(source, non_blocking=True))

    def now(self, *, blocking: bool = False) -> torch.cuda.Event | None:
        """Record an event on the caller's stream. With `blocking`, a host thread that waits for it sleeps."""
        if not self.crosses:
            return None
        event = torch.cuda.Event(blocking=blocking)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def drain(self) -> None:
        """Block until both streams are idle, and those of siblings."""
        for stream in self._streams.values():
            stream.synchronize()
        for sibling in self._siblings:
            sibling.drain()

    def _copy(self, way: str, pairs: Pairs, after: torch.cuda.Event | None) -> CopyEvent:
        num_bytes, numel = sum(source.nbytes for source, _ in pairs), sum(source.numel() for source, _ in pairs)
        if not self.crosses:
            with recorded(_TRACKS[way], way, numel=numel):
                self.count(way, num_bytes)
                for source, target in pairs:
                    target.copy_(source)
            return COMPLETE
        assert after is not None
        stream, arrived = self._streams[way], torch.cuda.Event(blocking=True)
        stream.wait_event(after)
        with torch.cuda.stream(stream), recorded(_TRACKS[way], way, numel=numel):
            self.count(way, num_bytes)
            for source, target in pairs:
                if source.dtype == target.dtype:
                    target.copy_(source, non_blocking=True)
                else:
                    # torch would cast on the host. The copy is made and freed on this stream.
                    target.copy_(torch.empty_like(source, device=self.device).copy_(source, non_blocking=True))
            arrived.record(stream)
        return CopyEvent(arrived)
