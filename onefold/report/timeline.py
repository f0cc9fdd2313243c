"""The time of the phases of a step, and the timeline of every unit for `Profiling`.

`wall_clock_breakdown` and the record of a run use the phases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from onefold.comm import Ledger, local_device
from onefold.log import logger
from onefold.recorder import Recorder, Slice, Span, Track
from onefold.report.memory_usage import GIB, peak_resident_bytes, used_bytes
from onefold.report.trace_file import RankTimeline, host_name, write_alone, write_together
from onefold.runtime import Hooks, Schedule
from onefold.runtime.unit_spans import UnitSpans


@dataclass(frozen=True)
class PhaseSpan:
    """One phase of a step: its start, its duration, and the memory in use at its end."""

    phase: str
    start: float
    seconds: float
    memory: int


class Timeline:
    """The times of the phases of one engine.

    Only a breakdown synchronizes with the device. With `records` the phases of each step are stored, measured on
    the host. Without any of these, and without `Profiling`, nothing is measured.
    """

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        schedule: Schedule,
        hooks: Hooks,
        *,
        breakdown: bool,
        records: bool = False,
    ) -> None:
        self.device = device
        self.ledger = ledger
        self.schedule = schedule
        self.hooks = hooks
        self._breakdown = breakdown
        self._records = records
        self._totals: dict[str, float] = {}
        self._recorded: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Measure a phase, if a breakdown, a record or `Profiling` is active."""
        listener = Profiling.active
        waits = self._breakdown or listener is not None
        if not waits and not self._records:
            yield
            return
        recorded = listener.begin(self, phase) if listener is not None else None
        self._synchronise()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronise()
            seconds = time.perf_counter() - start
            if waits:
                self._totals[phase] = self._totals.get(phase, 0.0) + seconds
            if self._records:
                self._recorded[phase] = self._recorded.get(phase, 0.0) + seconds
            if listener is not None and recorded is not None:
                listener.end(self, recorded)

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by phase since the last `take`."""
        return dict(self._totals)

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        totals, self._totals = self._totals, {}
        return totals

    def take_recorded(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, for the record of a run."""
        recorded, self._recorded = self._recorded, {}
        return recorded

    def _synchronise(self) -> None:
        if self._breakdown and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Profiling:
    """A context manager that measures time by phase, traffic and memory, and prints a table on rank 0.

    `trace` is a file for the timeline of every unit on every rank, which Perfetto and chrome://tracing open. All ranks
    enter and leave the context together, and rank 0 writes the file. The context does not synchronize with the device:
    its work is timed by events that are read at the end, so the timeline shows the real overlap.
    """

    active: Profiling | None = None

    def __init__(self, trace: str | os.PathLike[str] | None = None) -> None:
        self.spans: list[PhaseSpan] = []
        self.seconds = 0.0
        self.path: Path | None = None
        """The path of the trace after it is written, on the rank that wrote it."""
        self._trace = trace
        # The ledger of each engine, and its copy from the start of the first phase.
        self._ledgers: dict[Ledger, Ledger] = {}
        self._traffic: list[Ledger] | None = None
        self._engines: dict[Timeline, UnitSpans | None] = {}
        self._recorder: Recorder | None = None
        self._start = 0

    def __enter__(self) -> Profiling:
        if Profiling.active is not None:
            raise RuntimeError("onefold.Profiling is already active. Leave it before you enter it again.")
        self._recorder = Recorder(local_device())
        Profiling.active = self
        if self._trace is not None:
            Recorder.active = self._recorder
        self._start = time.perf_counter_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        recorder = self._recorder
        assert recorder is not None
        for engine, units in self._engines.items():
            if units is not None:
                units.remove()
            if kind is None and units is not None:
                engine.schedule.wait_for_step()  # work of the last step that is in flight is part of the timeline
        Profiling.active = Recorder.active = None
        self._traffic = self.traffic()
        recorder.stop()
        self.seconds = (time.perf_counter_ns() - self._start) / 1e9
        slices = recorder.slices()
        self.spans += [
            PhaseSpan(piece.name, piece.begin / 1e9, (piece.end - piece.begin) / 1e9, piece.args["memory_bytes"])
            for piece in slices
            if piece.track is Track.PHASES and "memory_bytes" in piece.args
        ]
        if self._trace is not None:
            self._write(self._trace, slices, recorder.clock_error, failed=kind is not None)
        if _rank() == 0:
            logger.info("profile\n%s", self.table())

    def _write(self, trace: str | os.PathLike[str], slices: list[Slice], device_error: int, *, failed: bool) -> None:
        timeline = RankTimeline(_rank(), host_name(), slices, device_error)
        agreement = next((engine.schedule.agreement for engine in self._engines), None)
        if failed or agreement is None:  # other ranks may never reach the collective
            self.path = write_alone(timeline, trace)
            logger.warning("only the timeline of rank %d is in %s", timeline.rank, self.path)
        else:
            self.path = write_together(timeline, trace, agreement)

    def begin(self, engine: Timeline, phase: str) -> Span:
        """Start the span of a phase."""
        assert self._recorder is not None
        if engine not in self._engines:
            self._ledgers[engine.ledger] = engine.ledger.copy()
            self._engines[engine] = UnitSpans(engine.hooks, engine.schedule) if self._trace is not None else None
        return self._recorder.start(Track.PHASES, phase)

    def end(self, engine: Timeline, span: Span) -> None:
        """Finish the span of a phase."""
        units = self._engines.get(engine)
        if units is not None and span.name == "backward":
            units.end_backwards()
        span.details["memory_bytes"] = used_bytes(engine.device)
        span.finish()

    def traffic(self) -> list[Ledger]:
        """Return the traffic of each engine inside the context."""
        if self._traffic is not None:
            return self._traffic
        return [ledger.since(before) for ledger, before in self._ledgers.items()]

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase, after the context is left."""
        phases = dict.fromkeys(span.phase for span in self.spans)
        return {phase: sum(span.seconds for span in self.spans if span.phase == phase) for phase in phases}

    def table(self) -> str:
        """Return the table of phases, traffic and memory."""
        phases = self.by_phase()
        rows = [*phases.items(), ("outside", self.seconds - sum(phases.values()))]
        lines = [f"{'phase':<16}{'seconds':>10}{'share':>8}"]
        lines += [f"{name:<16}{spent:>10.3f}{spent / (self.seconds or 1):>8.1%}" for name, spent in rows]
        lines += [ledger.table() for ledger in self.traffic()]
        peak = max((span.memory for span in self.spans), default=0)
        host = peak_resident_bytes()
        lines.append(f"memory at phase ends, peak {peak / GIB:.2f} GiB; host peak {host / GIB:.2f} GiB")
        return "\n".join(lines)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
