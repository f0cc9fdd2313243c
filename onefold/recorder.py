"""Spans of a timeline, which comm, offload, runtime and optim report while a recorder is active.

[Note: spans]
A span has two marks: its begin and its end. Work of the host is marked by the host's clock. Work of a device is marked
by events on its stream. Nothing waits for these events while steps run; `Recorder.slices` reads them after the window.
Both clocks are read before and after the window, which maps the times of events to the host's clock.

[Note: what a span carries]
Only the ledger counts bytes. While a span is current (`carrying`), bytes that the ledger counts for an operation of the
span's track are added to the span, and a lane that its work enters marks its begin and end. Another thread that does
part of the work makes the span current too (`carried`). Bytes that are counted without a current span of their track
become a span of zero length. Spans that are recorded inside another span, or `within` a unit, have the name of that
unit by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch


class Track(Enum):
    """A row of the timeline."""

    PHASES = "phases"
    COMPUTE = "compute"
    GATHERS = "gathers"
    REDUCTIONS = "reductions"
    STEP = "step"
    DOWN = "bus down"
    UP = "bus up"
    DISK = "disk"
    SYNCHRONIZATION = "synchronization"


# The track of each operation of the ledger.
TRACKS = {
    "gather": Track.GATHERS,
    "reduce-scatter": Track.REDUCTIONS,
    "reduce inside": Track.REDUCTIONS,
    "reduce across": Track.REDUCTIONS,
    "down": Track.DOWN,
    "up": Track.UP,
    "read": Track.DISK,
    "write": Track.DISK,
    "synchronize": Track.SYNCHRONIZATION,
    "broadcast": Track.SYNCHRONIZATION,
}

Mark = int | torch.cuda.Event
"""Nanoseconds of the host's clock, or an event on a stream."""


class Span:
    """An interval of work that is being recorded."""

    __slots__ = ("_entered", "begun", "details", "ended", "launched", "name", "num_bytes", "on_device", "track", "unit")

    def __init__(self, track: Track, name: str, unit: str, details: dict[str, Any], *, on_device: bool) -> None:
        self.track, self.name, self.unit, self.details = track, name, unit, details
        self.on_device = on_device
        self.num_bytes = 0
        self.launched = time.perf_counter_ns()
        self.begun: Mark = _event() if on_device else self.launched
        self.ended: Mark | None = None
        self._entered = False

    def enter(self, stream: torch.cuda.Stream | None) -> None:
        """Mark the begin of the span on the first stream that its work is queued on."""
        if self.on_device and stream is not None and not self._entered:
            self.begun, self._entered = _event(stream), True

    def leave(self, stream: torch.cuda.Stream | None) -> None:
        """Mark the end of the span after its work on this stream is queued. The last stream determines the end."""
        if self.on_device and stream is not None:
            self.ended = _event(stream)

    def finish(self) -> None:
        """End the span at the current position of the caller's stream, unless other streams have marked its end."""
        if not self.on_device:
            self.ended = time.perf_counter_ns()
        elif not self._entered:
            self.ended = _event()


def _event(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream if stream is not None else torch.cuda.current_stream())
    return event


@dataclass(frozen=True)
class Slice:
    """A finished span, with times in nanoseconds of the host's clock."""

    track: Track
    name: str
    begin: int
    end: int
    args: dict[str, Any]


class Recorder:
    """The spans of one window on this rank. `active` is the current recorder, if there is one."""

    active: ClassVar[Recorder | None] = None

    def __init__(self, device: torch.device) -> None:
        self.spans: list[Span] = []
        self.clock_error = 0
        """The error of device times on the host's clock, in nanoseconds."""
        self._device = device if device.type == "cuda" else None
        self._first = self._last = _TiePoint.now(self._device) if self._device is not None else None
        self._stopped = 0

    def start(
        self, track: Track, name: str, unit: str = "", details: dict[str, Any] | None = None, *, by_host: bool = False
    ) -> Span:
        """Start a span. With `by_host` it is measured by the host's clock even if there is a device."""
        on_device = self._device is not None and not by_host
        span = Span(track, name, unit or _unit.get(), details or {}, on_device=on_device)
        self.spans.append(span)
        return span

    def count(self, operation: str, num_bytes: int) -> None:
        """Add bytes that the ledger has counted to the current span."""
        span, track = current_span.get(), TRACKS.get(operation, Track.SYNCHRONIZATION)
        if span is None or span.track is not track:
            if not num_bytes:
                return
            span = self.start(track, operation, by_host=True)
            span.finish()
        span.num_bytes += num_bytes

    def stop(self) -> None:
        """End the window and synchronize with the device."""
        if self._first is not None and self._device is not None:
            self._last = _TiePoint.now(self._device)
            self.clock_error = max(self._first.error, self._last.error)
        self._stopped = time.perf_counter_ns()

    def slices(self) -> list[Slice]:
        """Return all spans after the window has ended, on the host's clock.

        Spans without an end are marked as unfinished and end with the window.
        """
        times = self._device_times()
        found = []
        for span in list(self.spans):
            args: dict[str, Any] = {"unit": span.unit} if span.unit else {}
            args |= span.details
            if span.num_bytes or span.track in _MOVING:
                args["bytes"] = span.num_bytes
            begin = times(span.begun)
            if span.ended is None:
                args["unfinished"] = True
            if span.on_device:
                args["queued_us"] = max(0, begin - span.launched) // 1000
            end = times(span.ended) if span.ended is not None else self._stopped
            found.append(Slice(span.track, span.name, begin, max(begin, end), args))
        return found

    def _device_times(self) -> Callable[[Mark], int]:
        first, last = self._first, self._last
        if first is None or last is None:
            return lambda mark: mark  # type: ignore[return-value] # there are no events without a device
        passed = first.event.elapsed_time(last.event)  # milliseconds
        rate = (last.host - first.host) / passed if passed > 0 else 1e6

        def times(mark: Mark) -> int:
            return mark if isinstance(mark, int) else first.host + round(first.event.elapsed_time(mark) * rate)

        return times


_MOVING = set(TRACKS.values())


@dataclass(frozen=True)
class _TiePoint:
    """A simultaneous reading of both clocks: an event of an idle device, and the host's time at its middle."""

    event: torch.cuda.Event
    host: int
    error: int

    @staticmethod
    def now(device: torch.device) -> _TiePoint:
        torch.cuda.synchronize(device)
        return min((_TiePoint._try(device) for _ in range(8)), key=lambda point: point.error)

    @staticmethod
    def _try(device: torch.device) -> _TiePoint:
        before = time.perf_counter_ns()
        event = _event(torch.cuda.current_stream(device))
        event.synchronize()
        after = time.perf_counter_ns()
        return _TiePoint(event, (before + after) // 2, (after - before + 1) // 2)


# -- the current span and unit of a thread -----------------------------------------------------------------------------

current_span: ContextVar[Span | None] = ContextVar("span", default=None)
_unit: ContextVar[str] = ContextVar("unit", default="")
_NOTHING: AbstractContextManager[None] = nullcontext()


def carrying(span: Span | None) -> AbstractContextManager[None]:
    """Make a span current: it receives the bytes that the ledger counts and the lanes that are entered."""
    return _carrying(span) if span is not None else _NOTHING


@contextmanager
def _carrying(span: Span) -> Iterator[None]:
    before = current_span.set(span)
    try:
        with _within(span.unit or _unit.get()):
            yield
    finally:
        current_span.reset(before)


def within(unit: str) -> AbstractContextManager[None]:
    """Set the unit of spans that are recorded in this context."""
    return _within(unit) if Recorder.active is not None else _NOTHING


@contextmanager
def _within(unit: str) -> Iterator[None]:
    before = _unit.set(unit)
    try:
        yield
    finally:
        _unit.reset(before)


def carried(job: Callable[[], None]) -> Callable[[], None]:
    """Wrap a job for another thread, so that the current span and unit are current there."""
    return job if Recorder.active is None else partial(copy_context().run, job)


@contextmanager
def _recorded(span: Span) -> Iterator[None]:
    try:
        with _carrying(span):
            yield
    finally:
        span.finish()


def recorded(
    track: Track, name: str, unit: str = "", *, numel: int | None = None, by_host: bool = False
) -> AbstractContextManager[None]:
    """Record a span around work that ends in the function and on the stream where it begins."""
    recorder = Recorder.active
    if recorder is None:
        return _NOTHING
    details = {} if numel is None else {"elements": numel}
    return _recorded(recorder.start(track, name, unit, details, by_host=by_host))


# -- rows of a track ---------------------------------------------------------------------------------------------------


def rows_of(times: Sequence[tuple[int, int]], *, nests: bool) -> list[int]:
    """Assign the first free row to each (begin, end), so that intervals in a row do not overlap.

    With `nests` an interval may lie inside another one of its row.
    """
    order = sorted(range(len(times)), key=lambda index: (times[index][0], -times[index][1]))
    open_ends: list[list[int]] = []
    found = [0] * len(times)
    for index in order:
        begin, end = times[index]
        for row, ends in enumerate(open_ends):  # noqa: B007 - the row is the result
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or (nests and end <= ends[-1]):
                break
        else:
            row = len(open_ends)
            open_ends.append([])
        open_ends[row].append(end)
        found[index] = row
    return found
