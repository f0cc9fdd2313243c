"""The bus between device and host: copies down and up beside the compute, each way on a stream of its own.

[Note: the bus]
A copy enters its stream behind what the caller's stream has queued, and is told by an event. The host waits for it
asleep (`wait`): a thread that spins takes a core from the host's own step, which then waits for its slowest thread.
Device memory is held by its owner until the caller's stream is ordered behind the event (`order`); nothing needs
`record_stream`. Where the device is the host itself a copy is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onefold.recorder import Track, recorded


class Arrival:
    """A copy on its way."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Until it is there, as the host sees it."""
        if self._event is not None:
            self._event.synchronize()

    def order(self) -> None:
        """Whatever the caller's stream does next comes after it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


HERE = Arrival()

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sources and targets of copies."""

_TRACKS = {"down": Track.DOWN, "up": Track.UP}


class Bus:
    """Copies between the device and the host, counted: `count` is told "down" or "up" and bytes."""

    def __init__(self, device: torch.device, count: Callable[[str, int], None]) -> None:
        self.device = device
        self.count = count
        self.crosses = device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(device) for way in ("down", "up")} if self.crosses else {}

    def down(self, source: torch.Tensor, target: torch.Tensor, *, add: bool = False) -> Arrival:
        """`add` only where nothing crosses: a bus cannot add."""
        if add:
            assert not self.crosses
            with recorded(Track.DOWN, "down", numel=source.numel()):
                self.count("down", source.nbytes)
                target.add_(source)
            return HERE
        return self.down_together([(source, target)])

    def down_together(self, pairs: Pairs) -> Arrival:
        """All these copies as one."""
        return self._copy("down", pairs, self.now())

    def up(self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event | None = None) -> Arrival:
        """The device casts. `after`: the last use of the target, where the caller's own stream does not know it."""
        return self.up_together([(source, target)], after)

    def up_together(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> Arrival:
        """All these copies as one."""
        return self._copy("up", pairs, after or self.now())

    def up_at_once(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """In the order of the caller's own stream."""
        with recorded(Track.UP, "up", numel=source.numel()):
            self.count("up", source.nbytes)
            if source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
            else:
                target.copy_(torch.empty_like(source, device=target.device).copy_(source, non_blocking=True))

    def now(self, *, blocking: bool = False) -> torch.cuda.Event | None:
        """Where the caller's stream stands. `blocking`: a host that waits for it sleeps."""
        if not self.crosses:
            return None
        event = torch.cuda.Event(blocking=blocking)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def drain(self) -> None:
        """Until all copies beside the compute are made."""
        for stream in self._streams.values():
            stream.synchronize()

    def _copy(self, way: str, pairs: Pairs, after: torch.cuda.Event | None) -> Arrival:
        num_bytes, numel = sum(source.nbytes for source, _ in pairs), sum(source.numel() for source, _ in pairs)
        if not self.crosses:
            with recorded(_TRACKS[way], way, numel=numel):
                self.count(way, num_bytes)
                for source, target in pairs:
                    target.copy_(source)
            return HERE
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
        return Arrival(arrived)
