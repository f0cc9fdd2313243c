"""Where the time of a step goes: spans by phase, for `wall_clock_breakdown`, `Profiling` and the record of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm import Ledger
from onefold.log import logger
from onefold.report.memory_usage import GIB, peak_resident_bytes, used_bytes


@dataclass(frozen=True)
class Span:
    """One phase of a step: when it began, how long it took, and the memory in use at its end."""

    phase: str
    start: float
    seconds: float
    memory: int


class Timeline:
    """Spans of one engine. It costs nothing unless someone reads it, and synchronises the device for those who time the
    device: `breakdown` and `Profiling`. `records`: each step's phases are kept as the host sees them.
    """

    def __init__(self, device: torch.device, ledger: Ledger, *, breakdown: bool, records: bool = False) -> None:
        self._device = device
        self._ledger = ledger
        self._breakdown = breakdown
        self._records = records
        self._totals: dict[str, float] = {}
        self._recorded: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        listener = Profiling.active
        waits = self._breakdown or listener is not None
        if not waits and not self._records:
            yield
            return
        if listener is not None:
            listener.watch(self._ledger)
        if waits:
            self._synchronise()
        start = time.perf_counter()
        try:
            yield
        finally:
            if waits:
                self._synchronise()
            seconds = time.perf_counter() - start
            if waits:
                self._totals[phase] = self._totals.get(phase, 0.0) + seconds
            if self._records:
                self._recorded[phase] = self._recorded.get(phase, 0.0) + seconds
            if listener is not None:
                listener.spans.append(Span(phase, start, seconds, used_bytes(self._device)))

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        totals, self._totals = self._totals, {}
        return totals

    def take_recorded(self) -> dict[str, float]:
        """The same for the record of a run."""
        recorded, self._recorded = self._recorded, {}
        return recorded

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Profiling:
    """`with onefold.Profiling():` around a loop: time by phase, traffic and memory, as a table and as a trace.

    The trace is a JSON file that chrome://tracing and Perfetto open; one file a rank. Inside the context every phase
    waits for the device, so overlap between phases does not show.
    """

    active: Profiling | None = None

    def __init__(self, trace: str | os.PathLike[str] | None = None) -> None:
        self.spans: list[Span] = []
        self.seconds = 0.0
        self._trace = trace
        # Each engine's ledger, and what stood in it when its first span began.
        self._ledgers: dict[Ledger, Ledger] = {}
        self._start = 0.0

    def __enter__(self) -> Profiling:
        if Profiling.active is not None:
            raise RuntimeError("onefold.Profiling is already active: contexts do not nest")
        Profiling.active = self
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        Profiling.active = None
        self.seconds = time.perf_counter() - self._start
        if self._trace is not None:
            self.write_trace(self._trace)
        if _rank() == 0:
            logger.info("profile\n%s", self.table())

    def watch(self, ledger: Ledger) -> None:
        if ledger not in self._ledgers:
            self._ledgers[ledger] = ledger.copy()

    def traffic(self) -> list[Ledger]:
        """What each engine sent inside the context."""
        return [ledger.since(before) for ledger, before in self._ledgers.items()]

    def by_phase(self) -> dict[str, float]:
        phases = dict.fromkeys(span.phase for span in self.spans)
        return {phase: sum(span.seconds for span in self.spans if span.phase == phase) for phase in phases}

    def table(self) -> str:
        phases = self.by_phase()
        rows = [*phases.items(), ("outside", self.seconds - sum(phases.values()))]
        lines = [f"{'phase':<16}{'seconds':>10}{'share':>8}"]
        lines += [f"{name:<16}{spent:>10.3f}{spent / (self.seconds or 1):>8.1%}" for name, spent in rows]
        lines += [ledger.table() for ledger in self.traffic()]
        peak = max((span.memory for span in self.spans), default=0)
        host = peak_resident_bytes()
        lines.append(f"memory at phase ends, peak {peak / GIB:.2f} GiB; host peak {host / GIB:.2f} GiB")
        return "\n".join(lines)

    def write_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write this rank's spans; the rank goes into the name where there are several."""
        target, rank = Path(path), _rank()
        if rank > 0:
            target = target.with_name(f"{target.stem}.rank{rank}{target.suffix}")
        events: list[dict[str, Any]] = []
        for span in self.spans:
            times = {"ts": (span.start - self._start) * 1e6, "dur": span.seconds * 1e6}
            where = {"pid": rank, "tid": 0, "args": {"memory_bytes": span.memory}}
            events.append({"name": span.phase, "ph": "X", **times, **where})
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"traceEvents": events}))
        return target


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
