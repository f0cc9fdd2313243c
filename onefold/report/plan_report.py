"""The comparison of a plan with measurements: model state, buffers, peaks and traffic. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onefold.log import format_bytes

TIERS = ("device", "host", "nvme")
KINDS = ("parameters", "gradients", "masters", "states")
HeldBytes = dict[str, dict[str, int]]
"""Bytes of model state by tier and kind."""

# The operation of the ledger for each direction of offload traffic.
_WAYS = {"down": "down", "up": "up", "read": "read", "written": "write"}


@dataclass(frozen=True)
class TrafficRow:
    """The bytes that one rank sent, or copied between tiers, by one operation."""

    operation: str
    group: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Compared:
    """One row of the table. A value is None if it is not planned or not measured."""

    where: str
    what: str
    planned: int | None
    measured: int | None


@dataclass(frozen=True)
class PlanReport:
    """The plan of one rank, and the measurements so far."""

    planned: HeldBytes
    held: HeldBytes
    """Measured model state at the end of the last backward, as planned; before the first backward, at present."""
    buffers: dict[str, int]
    """Planned bytes of pools, and of the largest unit in use."""
    crossing: dict[str, int]
    """Planned bytes that a step copies between tiers, by direction."""
    peaks: dict[str, int]
    """Measured peaks of the process: `device` on a GPU, and `host`."""
    traffic: tuple[TrafficRow, ...]
    """Measured traffic of all `num_steps` steps."""
    num_steps: int

    def rows(self) -> Iterator[Compared]:
        """Yield the rows of the table."""
        for tier in TIERS:
            planned, held = self.planned.get(tier, {}), self.held.get(tier, {})
            if not sum(planned.values()) and not sum(held.values()):
                continue
            for kind in KINDS:
                if planned.get(kind) or held.get(kind):
                    yield Compared(tier, kind, planned.get(kind, 0), held.get(kind, 0))
            yield Compared(tier, "model state", sum(planned.values()), sum(held.values()))
        for name, value in self.buffers.items():
            if value:
                yield Compared("device", f"buffers: {name.replace('_', ' ')}", value, None)
        for name, value in self.peaks.items():
            yield Compared(name, "peak of the process", None, value)
        for name, value in self.crossing.items():
            measured = sum(row.bytes for row in self.traffic if row.operation == _WAYS.get(name))
            if value or measured:
                yield Compared("a step", f"between tiers: {name}", value, self.per_step(measured))
        for row in self.traffic:
            if row.operation not in _WAYS.values():
                yield Compared("a step", f"sent: {row.operation} ({row.group})", None, self.per_step(row.bytes))

    def per_step(self, num_bytes: int) -> int | None:
        """Return the mean per step, or None before the first step."""
        return round(num_bytes / self.num_steps) if self.num_steps else None

    def text(self) -> str:
        """Return the table as text."""
        lines = [f"{'tier':<8}{'bytes of one rank':<34}{'planned':>12}{'measured':>12}"]
        lines += [
            f"{row.where:<8}{row.what:<34}{_shown(row.planned):>12}{_shown(row.measured):>12}" for row in self.rows()
        ]
        steps = f"{self.num_steps} step{'s' * (self.num_steps != 1)}"
        lines.append(
            f"model state at the end of backward; traffic is the mean of {steps}, including the time between steps"
        )
        return "\n".join(lines)


def _shown(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)
