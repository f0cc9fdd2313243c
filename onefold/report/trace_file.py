"""A timeline as a file that Perfetto and chrome://tracing open: a process a rank, a thread a track."""

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
from onefold.comm.clocks import ClockOffset, bytes_for_first, clock_offset
from onefold.recorder import Slice, Track, rows_of

# Spans of these lie inside one another, as calls do; those of the others go on beside each other.
_NESTING = {Track.PHASES, Track.COMPUTE}


@dataclass(frozen=True)
class RankTimeline:
    """What one rank has recorded, with times in nanoseconds of its own clock."""

    rank: int
    host: str
    slices: Sequence[Slice]
    device_error: int = 0
    """Nanoseconds by which times of the device may be wrong on the rank's clock."""

    def trace(self, offset: ClockOffset) -> dict[str, Any]:
        """As events of a trace, on the clock of rank 0."""
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
    """One file of all ranks, written by rank 0, which gets its path. All ranks call this together."""
    offset = clock_offset(agreement)
    own = json.dumps(timeline.trace(offset)).encode()
    found = bytes_for_first(agreement, "the timeline of all ranks", own)
    return _write(Path(path), [json.loads(data) for data in found]) if found else None


def write_alone(timeline: RankTimeline, path: str | os.PathLike[str]) -> Path:
    """This rank's part, where the others may not come; the rank goes into the name."""
    target = Path(path)
    target = target.with_name(f"{target.stem}.rank{timeline.rank}{target.suffix}")
    return _write(target, [timeline.trace(ClockOffset())])


def _write(target: Path, traces: Sequence[dict[str, Any]]) -> Path:
    """Times count from the first event of any rank, in microseconds."""
    events = [event for trace in traces for event in trace["events"]]
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    for event in events:
        if event["ph"] == "X":
            event["ts"], event["dur"] = (event["ts"] - first) / 1e3, event["dur"] / 1e3
    clocks = {f"rank {trace['rank']}": trace["clock"] for trace in traces}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}))
    return target
