"""Timeline files for Perfetto and chrome://tracing, with one process per rank and one thread per track."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from onefold.comm import Agreement
from onefold.comm.agreement import ClockOffset, bytes_for_first, clock_offset
from onefold.recorder import Slice, Track, rows_of

# Spans of these tracks nest, as calls do. Spans of the others overlap.
_NESTING = {Track.PHASES, Track.COMPUTE}


@dataclass(frozen=True)
class RankTimeline:
    """The spans that one rank has recorded, with times in nanoseconds of its clock."""

    rank: int
    host: str
    slices: Sequence[Slice]
    device_error: int = 0
    """The error of device times on the clock of the rank, in nanoseconds."""

    def trace(self, offset: ClockOffset) -> dict[str, Any]:
        """Return the events of the trace, on the clock of rank 0."""
        found = [*self._names()]
        for tid, piece in zip(self._threads(), self.slices, strict=True):
            times = {"ts": piece.begin + offset.nanoseconds, "dur": piece.end - piece.begin}
            where = {"pid": self.rank, "tid": tid, "cat": piece.track.value, "args": piece.args}
            found.append({"name": piece.name, "ph": "X", **times, **where})
        error = {"host": self.host, "clock_error_us": offset.error / 1e3, "device_error_us": self.device_error / 1e3}
        return {"rank": self.rank, "clock": error, "events": found}

    def _rows(self) -> dict[Track, list[int]]:
        by_track = {track: [piece for piece in self.slices if piece.track is track] for track in Track}
        return {
            track: rows_of([(piece.begin, piece.end) for piece in pieces], nests=track in _NESTING)
            for track, pieces in by_track.items()
        }

    def _threads(self) -> list[int]:
        rows = {track: iter(found) for track, found in self._rows().items()}
        return [_thread(piece.track, next(rows[piece.track])) for piece in self.slices]

    def _names(self) -> list[dict[str, Any]]:
        names = [_name("process_name", self.rank, 0, {"name": f"rank {self.rank} on {self.host}"})]
        names.append(_name("process_sort_index", self.rank, 0, {"sort_index": self.rank}))
        for track, rows in self._rows().items():
            for row in range(max(rows, default=0) + 1):
                tid, title = _thread(track, row), f"{track.value} {row + 1}" if row else track.value
                names.append(_name("thread_name", self.rank, tid, {"name": title}))
                names.append(_name("thread_sort_index", self.rank, tid, {"sort_index": tid}))
        return names


_PLACES = dict(zip(Track, count(), strict=False))


def _thread(track: Track, row: int) -> int:
    return 1000 * _PLACES[track] + row


def _name(kind: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": dict(args)}


def host_name() -> str:
    return socket.gethostname()


def write_together(timeline: RankTimeline, path: str | os.PathLike[str], agreement: Agreement) -> Path | None:
    """Write the timelines of all ranks to one file. All ranks call this together.

    Rank 0 writes the file and returns its path. Other ranks return None.
    """
    offset = clock_offset(agreement)
    own = json.dumps(timeline.trace(offset)).encode()
    found = bytes_for_first(agreement, "the timeline of all ranks", own)
    return _write(Path(path), [json.loads(data) for data in found]) if found else None


def write_alone(timeline: RankTimeline, path: str | os.PathLike[str]) -> Path:
    """Write the timeline of this rank to a separate file, whose name contains the rank."""
    target = Path(path)
    target = target.with_name(f"{target.stem}.rank{timeline.rank}{target.suffix}")
    return _write(target, [timeline.trace(ClockOffset())])


def _write(target: Path, traces: Sequence[dict[str, Any]]) -> Path:
    """Write a trace file. Times are in microseconds after the first event of any rank."""
    events = [event for trace in traces for event in trace["events"]]
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    for event in events:
        if event["ph"] == "X":
            event["ts"], event["dur"] = (event["ts"] - first) / 1e3, event["dur"] / 1e3
    clocks = {f"rank {trace['rank']}": trace["clock"] for trace in traces}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}))
    return target
