"""The plan against what was measured: bytes of each tier and kind, buffers, peaks, traffic. Plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onefold.log import format_bytes

TIERS = ("device", "host", "nvme")
KINDS = ("parameters", "gradients", "masters", "states")
HeldBytes = dict[str, dict[str, int]]
"""Bytes of model state by tier and kind."""

# What a ledger calls each way between tiers.
_WAYS = {"down": "down", "up": "up", "read": "read", "written": "write"}


@dataclass(frozen=True)
class TrafficRow:
    """What one rank sent, or moved between tiers, by one operation."""

    operation: str
    group: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Compared:
    """One line of the table. `measured` None: nothing measures it by itself."""

    where: str
    what: str
    planned: int | None
    measured: int | None


@dataclass(frozen=True)
class PlanReport:
    """One rank's plan, and what was measured of it so far."""

    planned: HeldBytes
    held: HeldBytes
    """When the last backward had ended, which is what the plan speaks of; before the first, now."""
    buffers: dict[str, int]
    """Planned: what pools keep, and what the largest unit needs while it is in use."""
    crossing: dict[str, int]
    """Planned: bytes of a step between tiers, each way."""
    peaks: dict[str, int]
    """Measured, of the whole process: `device` where there is one, and `host`."""
    traffic: tuple[TrafficRow, ...]
    """Measured, of all `num_steps` together."""
    num_steps: int

    def rows(self) -> Iterator[Compared]:
        """The table, top to bottom. A new kind of prediction is a new line here."""
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
        return round(num_bytes / self.num_steps) if self.num_steps else None

    def text(self) -> str:
        lines = [f"{'':<8}{'bytes of one rank':<34}{'planned':>12}{'measured':>12}"]
        lines += [
            f"{row.where:<8}{row.what:<34}{_shown(row.planned):>12}{_shown(row.measured):>12}" for row in self.rows()
        ]
        steps = f"{self.num_steps} step{'s' * (self.num_steps != 1)}"
        lines.append(
            f"model state at the end of a backward; traffic is the mean of {steps}, with all that lies between"
        )
        return "\n".join(lines)


def _shown(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)
