"""The format of the record of a run, `run.jsonl`, and its reader. No torch, so that `onefold watch` starts quickly.

[Note: lines of a run]
Each line is one JSON object with a `kind`:
* `run`: the facts of a run, once for each engine that has written to the file. A resumed run appends another `run` line
  and continues from its checkpoint; repeated steps replace the earlier ones;
* `note`: additional facts, such as the total number of steps;
* `step`: one optimizer step (`StepRow`);
* `end`: the reason why the engine was closed, and the comparison of plan and measurements.
Numbers that are not finite are strings: "nan", "inf", "-inf". The last line is incomplete if the process was killed.
In an object store the lines are divided into segments (`record_segments.py`).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from onefold.report.plan_report import KINDS, TIERS, HeldBytes, PlanReport, TrafficRow
from onefold.report.record_segments import read_segments
from onefold.storage.object_path import ObjectPath
from onefold.storage.place import Place, PlaceLike, place

FILE_NAME = "run.jsonl"
_LONGEST_LINE = 1 << 26
PHASES = ("forward", "backward", "step", "outside")
_Value = TypeVar("_Value")


class RunFileError(ValueError):
    """A file is not a valid record of a run."""


@dataclass(frozen=True)
class MemoryRow:
    """Memory of the first rank between the end of backward and the step, in bytes."""

    held: HeldBytes
    """Model state by tier and kind, counted from tensors. On a CPU the device tier is host memory."""
    rest: int
    """Other allocated bytes on the device: activations and buffers. On a CPU, other resident memory."""
    host_resident: int
    host_peak: int
    device_allocated: int | None = None
    """Allocated GPU memory. This and the next two fields are None on a CPU."""
    device_reserved: int | None = None
    device_peak: int | None = None

    @property
    def peak(self) -> int:
        """The peak of device memory, or of resident memory on a CPU."""
        return self.host_peak if self.device_peak is None else self.device_peak

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of model state by kind, summed over tiers."""
        return {kind: sum(kinds.get(kind, 0) for kinds in self.held.values()) for kind in KINDS}

    def by_tier(self) -> dict[str, int]:
        """Return the bytes of model state by tier, summed over kinds."""
        return {tier: sum(self.held.get(tier, {}).values()) for tier in TIERS}


@dataclass(frozen=True)
class StepRow:
    """One optimizer step, measured on the first rank."""

    step: int
    samples: int
    """The number of samples of all ranks and steps so far."""
    batch_samples: int
    """The number of samples of all ranks in this step."""
    time: float
    """The end of the step, in seconds since 1970."""
    seconds: float
    """Seconds since the previous step, or since the engine was built."""
    loss: float | None
    """The mean loss of this rank's micro-steps. None if `engine.backward` was not called."""
    learning_rates: tuple[float, ...]
    """The learning rate of each parameter group in this step."""
    grad_norm: float | None
    """The norm of the averaged gradient before clipping."""
    loss_scale: float | None
    """The loss scale. None if the loss is not scaled."""
    skipped: bool
    phases: dict[str, float]
    """Seconds by phase, measured on the host. With `wall_clock_breakdown` each phase synchronizes with the device."""
    memory: MemoryRow
    traffic: tuple[TrafficRow, ...]
    """The traffic of this rank since the previous step."""
    tokens: int | None = None
    """The tokens of this step: those of the first rank, times the number of ranks. None if they are unknown."""
    flops: float | None = None
    """The FLOPs of the model for these tokens. None if the shape of the model is unknown."""

    @property
    def samples_per_second(self) -> float | None:
        return self.batch_samples / self.seconds if self.seconds > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens is not None and self.seconds > 0 else None

    def utilization(self, peak: float | None) -> float | None:
        """Return the model FLOPs utilization (MFU): FLOP/s of the model, as a share of the peak of all devices."""
        return self.flops / self.seconds / peak if self.flops is not None and self.seconds > 0 and peak else None

    def bytes_of(self, operation: str) -> int:
        """Return the bytes of one operation."""
        return sum(row.bytes for row in self.traffic if row.operation == operation)

    @staticmethod
    def of(line: Mapping[str, Any]) -> StepRow:
        """Parse a `step` line. Raise KeyError, TypeError or ValueError if it is invalid."""
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
            tokens=_or_none(line.get("tokens"), _count),  # absent in records of earlier versions
            flops=_or_none(line.get("flops"), _number),
        )


def report_of(line: Mapping[str, Any]) -> PlanReport:
    """Parse the report of an `end` line. Raise KeyError, TypeError or ValueError if it is invalid."""
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
    """Format one line of the file."""
    return json.dumps({"kind": kind, **_plain(facts)}, allow_nan=False, default=str) + "\n"


def line_of(row: StepRow) -> str:
    """Format a `step` line."""
    return write_line("step", **asdict(row))


class RunFile:
    """A reader of a record, which may still be written. `update` reads appended lines."""

    def __init__(self, folder: PlaceLike) -> None:
        """Create a reader of the record in a folder or below a URL. `folder` may also be the record itself."""
        path = place(folder)
        self.path: Place = path if path.name.endswith(".jsonl") else path / FILE_NAME
        self._start_over()

    def _start_over(self) -> None:
        self.facts: dict[str, Any] = {}
        self.steps: list[StepRow] = []
        self.end: dict[str, Any] | None = None
        self._segment = self._offset = self._line_number = 0
        self._bad = ""

    @staticmethod
    def read(folder: PlaceLike) -> RunFile:
        """Read an existing record."""
        file = RunFile(folder)
        try:
            file.update()
        except (FileNotFoundError, NotADirectoryError):
            raise RunFileError(
                f"{file.path}: no such file. `onefold train` writes it into its folder, and other jobs "
                'into the folder of "onefold": {"report": "FOLDER"} in their config.'
            ) from None
        if not file.facts:
            raise RunFileError(f"{file.path}: {file._bad or 'it contains no run yet'}")
        return file

    def update(self) -> bool:
        """Read the appended lines. Return whether there were any. Raise FileNotFoundError if there is no record."""
        before = self._line_number
        is_new = self._read_segments(self.path) if isinstance(self.path, ObjectPath) else self._read_file(self.path)
        return is_new or self._line_number > before

    def _read_file(self, path: Path) -> bool:
        """Read the rest of the file. Return whether it was replaced by the record of another run."""
        # Opening a pipe would wait for a writer, and reading a device might never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise self._error("not a regular file")
        with path.open("rb") as opened:
            is_new = os.fstat(opened.fileno()).st_size < self._offset
            if is_new:
                self._start_over()
            opened.seek(self._offset)
            self._read_lines(opened)
        return is_new

    def _read_segments(self, path: ObjectPath) -> bool:
        """Read new bytes of the last segment, and later segments. Return whether they are those of another run."""
        try:
            for number, offset, content in read_segments(path, self._segment, self._offset):
                self._segment, self._offset = number, offset
                self._read_lines(BytesIO(content))
        except FileNotFoundError:
            if not self._segment and not self._offset:
                raise
            self._start_over()
            self._read_segments(path)
            return True
        return False

    def _read_lines(self, opened: BinaryIO) -> None:
        while (line := opened.readline(_LONGEST_LINE)).endswith(b"\n"):
            self._offset += len(line)
            self._line_number += 1
            self._take(line)
        if len(line) == _LONGEST_LINE:  # a shorter line without an end is incomplete
            raise self._error(f"line {self._line_number + 1} is longer than {_LONGEST_LINE} bytes: not a run record")

    @property
    def report(self) -> PlanReport:
        """The comparison of plan and measurements: the report of a closed engine, else from the steps so far."""
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

    @property
    def peak_flops(self) -> float | None:
        """The FLOP/s of all devices, or None if they are unknown."""
        return _or_none(self.facts.get("peak_flops"), _number)

    def _take(self, line: bytes) -> None:
        try:
            read = json.loads(line)
            kind = read.pop("kind")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            self._fail_on_bad()
            self._bad = f"line {self._line_number} is not valid ({type(error).__name__}: {str(error)[:80]})"
            return
        if kind != "run":
            self._fail_on_bad()  # only a resumed run may follow an incomplete line
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
            raise ValueError("a run record must begin with a line of facts")
        elif kind == "note":
            self.facts |= read
        elif kind == "end":
            report_of(read["report"])
            self.end = read
        elif kind == "step":
            row = StepRow.of(read)
            while self.steps and self.steps[-1].step >= row.step:  # the run was resumed from a checkpoint
                self.steps.pop()
            self.steps.append(row)

    def _fail_on_bad(self) -> None:
        if self._bad:
            raise self._error(self._bad)

    def _error(self, text: str) -> RunFileError:
        return RunFileError(f"{self.path}: {text}")


def peaks_of(memory: MemoryRow) -> dict[str, int]:
    """Return the peaks of host memory and, on a GPU, device memory."""
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
    """Convert a value to plain JSON. Numbers that are not finite become strings."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected an object, not {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, not {type(value).__name__}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, not {type(value).__name__}")
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
