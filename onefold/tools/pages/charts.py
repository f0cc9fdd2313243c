"""The charts of a run, for the page and for PNGs. Long runs are thinned, but keep their extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from onefold.report.plan_report import KINDS, TIERS
from onefold.report.run_file import PHASES, RunFile, StepRow

MAX_POINTS = 1000
# The number of steps from which a smoothed line is added.
MANY = 20
# Layers that are not part of the model states, drawn in grey.
RESTS = ("activations and buffers", "rest of the process", "outside")
Unit = Literal["number", "bytes", "seconds"]


@dataclass(frozen=True)
class Series:
    """One line, or one layer of a stack. None: no value."""

    name: str
    values: list[float | None]


@dataclass(frozen=True)
class Chart:
    """Series over steps. Layers of a stack add up to the total; `over` is a line on top of the stack."""

    name: str
    """The name in files and links."""
    title: str
    unit: Unit
    steps: list[int]
    series: list[Series]
    stacked: bool = False
    over: Series | None = None
    note: str = ""
    """An explanation, in a sentence."""


def charts_of(run: RunFile) -> list[Chart]:
    """Return every chart for which the run has data."""
    rows, waits_for_device, device_flops = run.steps, bool(run.facts.get("waits_for_device")), run.peak_flops
    on_device = any(row.memory.device_allocated is not None for row in rows)
    rest = RESTS[0] if on_device else RESTS[1]
    operations = list(dict.fromkeys(sent.operation for row in rows for sent in row.traffic))
    num_groups = max((len(row.learning_rates) for row in rows), default=0)
    peak = ("peak so far", lambda row: row.memory.peak)
    clock = "Synchronized with the device." if waits_for_device else "Host time; the GPU runs asynchronously."
    lines, stack = partial(_lines, rows), partial(_stack, rows)
    rates = {f"group {i}" if num_groups > 1 else "learning rate": _rate_of(i) for i in range(num_groups)}
    kinds = {kind: _kind_of(kind) for kind in KINDS} | ({rest: _rest_of} if on_device else {})
    all_tiers = "All tiers, at the end of backward." + ("" if on_device else " Model states only.")
    tiers = {f"held in {tier}": _tier_of(tier) for tier in TIERS} | {rest: _rest_of}
    cpu_tier = "" if on_device else "On a CPU, the device tier is host memory."
    phases = {phase: _phase_of(phase) for phase in PHASES}
    sent = {operation: _sent_by(operation) for operation in operations}
    found = [
        lines(
            "loss", "Loss", {"loss": lambda row: row.loss}, smoothed=True, note="Mean over the micro-steps of rank 0."
        ),
        lines("learning-rate", "Learning rate", rates),
        lines("gradient-norm", "Gradient norm", {"norm": lambda row: row.grad_norm}, note="Before clipping."),
        lines("speed", "Samples per second", {"of all ranks": lambda row: row.samples_per_second}),
        lines("tokens", "Tokens per second", {"of all ranks": lambda row: row.tokens_per_second}),
        lines("mfu", "Model FLOPs utilization", {"share of the peak": lambda row: row.utilization(device_flops)}),
        lines("loss-scale", "Loss scale", {"scale": lambda row: row.loss_scale}),
        stack("memory-by-kind", "Memory by kind", kinds, over=peak if on_device else None, note=all_tiers),
        stack("memory-by-tier", "Memory by tier", tiers, over=peak, note=cpu_tier),
        stack("time", "Time of a step", phases, unit="seconds", note=clock),
        stack("traffic", "Traffic of a step", sent, note="Bytes that rank 0 sends, or moves between tiers."),
    ]
    return [chart for chart in found if chart is not None]


_Value = Callable[[StepRow], float | None]


def _rate_of(group: int) -> _Value:
    return lambda row: row.learning_rates[group] if group < len(row.learning_rates) else None


def _kind_of(kind: str) -> _Value:
    return lambda row: row.memory.by_kind()[kind]


def _tier_of(tier: str) -> _Value:
    return lambda row: row.memory.by_tier()[tier]


def _rest_of(row: StepRow) -> float:
    return row.memory.rest


def _phase_of(phase: str) -> _Value:
    return lambda row: row.phases.get(phase, 0.0)


def _sent_by(operation: str) -> _Value:
    return lambda row: row.bytes_of(operation)


def _lines(
    rows: Sequence[StepRow], name: str, title: str, values: dict[str, _Value], *, smoothed: bool = False, note: str = ""
) -> Chart | None:
    columns = {key: [value(row) for row in rows] for key, value in values.items()}
    columns = {key: column for key, column in columns.items() if any(value is not None for value in column)}
    if not columns:
        return None
    kept = thin(list(columns.values()))
    if smoothed and len(rows) >= MANY:
        columns |= {"smoothed": smooth(next(iter(columns.values())))}
    series = [Series(key, [column[place] for place in kept]) for key, column in columns.items()]
    return Chart(name, title, "number", [rows[place].step for place in kept], series, note=note)


def _stack(
    rows: Sequence[StepRow],
    name: str,
    title: str,
    values: dict[str, _Value],
    *,
    unit: Unit = "bytes",
    over: tuple[str, _Value] | None = None,
    note: str = "",
) -> Chart | None:
    columns = {key: [value(row) for row in rows] for key, value in values.items()}
    columns = {key: column for key, column in columns.items() if any(column)}
    if not columns:
        return None
    kept = thin([[sum(value or 0.0 for value in layer) for layer in zip(*columns.values(), strict=True)]])
    series = [Series(key, [column[place] for place in kept]) for key, column in columns.items()]
    line = Series(over[0], [over[1](rows[place]) for place in kept]) if over is not None else None
    return Chart(name, title, unit, [rows[place].step for place in kept], series, stacked=True, over=line, note=note)


def thin(columns: Sequence[Sequence[float | None]], limit: int = MAX_POINTS) -> list[int]:
    """Return about `limit` indices to keep: the first, the last, and the extremes of each column in every stretch.

    NaN counts as the greatest value.
    """
    length = len(columns[0])
    if length <= limit:
        return list(range(length))
    num_stretches = max(1, limit // (2 * len(columns)))
    kept = {0, length - 1}
    for stretch in range(num_stretches):
        start, stop = stretch * length // num_stretches, (stretch + 1) * length // num_stretches
        for column in columns:
            there = [
                (_rank(value), place) for place, value in enumerate(column[start:stop], start) if value is not None
            ]
            if there:
                kept |= {min(there)[1], max(there)[1]}
    return sorted(kept)


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Return a centred moving average."""
    reach = max(5, len(values) // 100)
    sums, counts = [0.0], [0]
    for value in values:
        known = value is not None and math.isfinite(value)
        sums.append(sums[-1] + (value or 0.0 if known else 0.0))
        counts.append(counts[-1] + known)
    found: list[float | None] = []
    for place in range(len(values)):
        low, high = max(0, place - reach), min(len(values), place + reach + 1)
        number = counts[high] - counts[low]
        found.append((sums[high] - sums[low]) / number if number else None)
    return found


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value
