"""The record of a run, `run.jsonl`: what its lines say, and how it is read. No torch: `onefold watch` starts at once.

[Note: lines of a run]
Each line is one JSON object with a `kind`:
* `run`: facts, once for each engine that has written to the file. A run that is resumed appends another and goes on
  from its checkpoint: steps that come again replace those of before;
* `note`: more facts, from whoever knows them, such as how many steps there will be;
* `step`: one optimizer step (`StepRow`);
* `end`: the engine is closed: why, and the plan against what was measured.
A number that is not finite is a string: "nan", "inf", "-inf". The last line may be cut off where a process was killed.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from onefold.report.plan_report import KINDS, TIERS, HeldBytes, PlanReport, TrafficRow

FILE_NAME = "run.jsonl"
_LONGEST_LINE = 1 << 26
PHASES = ("forward", "backward", "step", "outside")
_Value = TypeVar("_Value")


class RunFileError(ValueError):
    """A file that is no record of a run; the message says where and why."""


@dataclass(frozen=True)
class MemoryRow:
    """Memory of the first rank when a backward has ended and the step begins, in bytes."""

    held: HeldBytes
    """Model state by tier and kind, counted from tensors. A CPU's device tier is host memory."""
    rest: int
    """What else is allocated on the device: activations and buffers. On a CPU the rest of the process."""
    host_resident: int
    host_peak: int
    device_allocated: int | None = None
    """None on a CPU, as are the next two."""
    device_reserved: int | None = None
    device_peak: int | None = None

    @property
    def peak(self) -> int:
        """Of what ranks compete for: device memory, or resident memory on a CPU."""
        return self.host_peak if self.device_peak is None else self.device_peak

    def by_kind(self) -> dict[str, int]:
        return {kind: sum(kinds.get(kind, 0) for kinds in self.held.values()) for kind in KINDS}

    def by_tier(self) -> dict[str, int]:
        return {tier: sum(self.held.get(tier, {}).values()) for tier in TIERS}


@dataclass(frozen=True)
class StepRow:
    """One optimizer step, as the first rank saw it."""

    step: int
    samples: int
    """Of all ranks and steps so far,"""
    batch_samples: int
    """and of this step."""
    time: float
    """When it was over, in seconds since 1970."""
    seconds: float
    """Since the step before, or since the engine stands."""
    loss: float | None
    """The mean of this rank's micro-steps; None where `engine.backward` was never given it."""
    learning_rates: tuple[float, ...]
    """Of each parameter group, in this step."""
    grad_norm: float | None
    """Of the averaged gradient, before clipping."""
    loss_scale: float | None
    """None where the loss is not scaled."""
    skipped: bool
    phases: dict[str, float]
    """Seconds of `seconds` by phase, as the host sees them; with `wall_clock_breakdown` the device is waited for."""
    memory: MemoryRow
    traffic: tuple[TrafficRow, ...]
    """What this rank has sent or moved since the step before."""

    @property
    def samples_per_second(self) -> float | None:
        return self.batch_samples / self.seconds if self.seconds > 0 else None

    def bytes_of(self, operation: str) -> int:
        return sum(row.bytes for row in self.traffic if row.operation == operation)

    @staticmethod
    def of(line: Mapping[str, Any]) -> StepRow:
        """From a line. Raises KeyError, TypeError or ValueError."""
        memory, rates = _object(line["memory"]), line["learning_rates"]
        return StepRow(
            step=_count(line["step"]),
            samples=_count(line["samples"]),
            batch_samples=_count(line["batch_samples"]),
            time=_number(line["time"]),
            seconds=_number(line["seconds"]),
            loss=_or_none(line["loss"], _number),
            learning_rates=tuple(_number(rate) for rate in rates),
            grad_norm=_or_none(line["grad_norm"], _number),
            loss_scale=_or_none(line["loss_scale"], _number),
            skipped=bool(line["skipped"]),
            phases={str(name): _number(value) for name, value in _object(line["phases"]).items()},
            memory=MemoryRow(
                held=_held(memory["held"]),
                rest=_count(memory["rest"]),
                host_resident=_count(memory["host_resident"]),
                host_peak=_count(memory["host_peak"]),
                device_allocated=_or_none(memory["device_allocated"], _count),
                device_reserved=_or_none(memory["device_reserved"], _count),
                device_peak=_or_none(memory["device_peak"], _count),
            ),
            traffic=_traffic(line["traffic"]),
        )


def report_of(line: Mapping[str, Any]) -> PlanReport:
    """The plan against measurement, from an `end` line. Raises as `StepRow.of`."""
    return PlanReport(
        planned=_held(line["planned"]),
        held=_held(line["held"]),
        buffers=_counts(line["buffers"]),
        crossing=_counts(line["crossing"]),
        peaks=_counts(line["peaks"]),
        traffic=_traffic(line["traffic"]),
        num_steps=_count(line["num_steps"]),
    )


def write_line(kind: str, **facts: Any) -> str:
    """One line of the file."""
    return json.dumps({"kind": kind, **_plain(facts)}, allow_nan=False, default=str) + "\n"


def line_of(row: StepRow) -> str:
    return write_line("step", **asdict(row))


class RunFile:
    """A record that is read as far as it is written; `update` reads on."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        """`place`: the file, or the folder that it is in."""
        path = Path(place)
        self.path = path if path.suffix == ".jsonl" else path / FILE_NAME
        self._start_over()

    def _start_over(self) -> None:
        self.facts: dict[str, Any] = {}
        self.steps: list[StepRow] = []
        self.end: dict[str, Any] | None = None
        self._offset = self._line_number = 0
        self._bad = ""

    @staticmethod
    def read(place: str | os.PathLike[str]) -> RunFile:
        """All of a file that is there and holds a run."""
        file = RunFile(place)
        try:
            file.update()
        except (FileNotFoundError, NotADirectoryError):
            raise RunFileError(
                f"{file.path}: there is no such file. `onefold train` writes it into its folder, and any other job "
                'where its config says: "onefold": {"report": "FOLDER"}'
            ) from None
        if not file.facts:
            raise RunFileError(f"{file.path}: {file._bad or 'there is no run in it yet'}")
        return file

    def update(self) -> bool:
        """Read what was appended; whether that was anything. Raises FileNotFoundError where there is no file."""
        # Opening a pipe would wait for a writer, and a device may have no end.
        if not stat.S_ISREG(self.path.stat().st_mode):
            raise self._error("not a regular file")
        read_any = False
        with self.path.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size < self._offset:  # it was removed, and another run has begun
                self._start_over()
            opened.seek(self._offset)
            while (line := opened.readline(_LONGEST_LINE)).endswith(b"\n"):
                self._offset += len(line)
                self._line_number += 1
                self._take(line)
                read_any = True
        if len(line) == _LONGEST_LINE:  # what is shorter is being written, or was cut off
            raise self._error(f"line {self._line_number + 1} is longer than {_LONGEST_LINE} bytes: no line of a run")
        return read_any

    @property
    def report(self) -> PlanReport:
        """The plan against measurement: the engine's own words, or as far as the run has come."""
        if self.end is not None:
            return report_of(self.end["report"])
        last = self.steps[-1].memory if self.steps else None
        return PlanReport(
            planned=_held(self.facts["planned"]),
            held=last.held if last is not None else {},
            buffers=_counts(self.facts["planned_buffers"]),
            crossing=_counts(self.facts["planned_crossing"]),
            peaks=peaks_of(last) if last is not None else {},
            traffic=_added(self.steps),
            num_steps=len(self.steps),
        )

    def _take(self, line: bytes) -> None:
        try:
            read = json.loads(line)
            kind = read.pop("kind")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            self._fail_on_bad()
            self._bad = f"line {self._line_number} is no line of a run ({type(error).__name__}: {str(error)[:80]})"
            return
        if kind != "run":
            self._fail_on_bad()  # only a run that was resumed comes after a line that was cut off
        self._bad = ""
        try:
            self._take_line(kind, read)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error(f"line {self._line_number}: {type(error).__name__}: {error}") from None

    def _take_line(self, kind: str, read: dict[str, Any]) -> None:
        if kind == "run":
            _held(read["planned"]), _counts(read["planned_buffers"]), _counts(read["planned_crossing"])
            _number(read["time"])
            self.facts, self.end = {**self.facts, **read}, None
        elif not self.facts:
            raise ValueError("a run begins with a line of facts")
        elif kind == "note":
            self.facts |= read
        elif kind == "end":
            report_of(read["report"])
            self.end = read
        elif kind == "step":
            row = StepRow.of(read)
            while self.steps and self.steps[-1].step >= row.step:  # a run that goes on from a checkpoint
                self.steps.pop()
            self.steps.append(row)

    def _fail_on_bad(self) -> None:
        if self._bad:
            raise self._error(self._bad)

    def _error(self, text: str) -> RunFileError:
        return RunFileError(f"{self.path}: {text}")


def peaks_of(memory: MemoryRow) -> dict[str, int]:
    peaks = {"host": memory.host_peak}
    return peaks if memory.device_peak is None else {"device": memory.device_peak, **peaks}


def _added(steps: list[StepRow]) -> tuple[TrafficRow, ...]:
    found: dict[tuple[str, str], TrafficRow] = {}
    for row in (row for step in steps for row in step.traffic):
        before = found.get((row.operation, row.group), TrafficRow(row.operation, row.group, 0, 0))
        added = TrafficRow(row.operation, row.group, before.calls + row.calls, before.bytes + row.bytes)
        found[row.operation, row.group] = added
    return tuple(found.values())


# -- values ----------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """As JSON has it: numbers that are not finite become strings."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"an object was expected, not {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a number was expected, not {type(value).__name__}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a whole number was expected, not {type(value).__name__}")
    return value


def _or_none(value: Any, read: Callable[[Any], _Value]) -> _Value | None:
    return None if value is None else read(value)


def _counts(value: Any) -> dict[str, int]:
    return {str(name): _count(inner) for name, inner in _object(value).items()}


def _held(value: Any) -> HeldBytes:
    return {
        tier: {kind: _count(kinds[kind]) for kind in KINDS if kind in kinds}
        for tier, kinds in _object(value).items()
        if tier in TIERS
    }


def _traffic(value: Any) -> tuple[TrafficRow, ...]:
    return tuple(
        TrafficRow(str(row["operation"]), str(row["group"]), _count(row["calls"]), _count(row["bytes"]))
        for row in value
    )
