"""Counts the bytes that are sent between ranks or between memory tiers, by operation and group."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from onefold.recorder import Recorder


@dataclass
class Row:
    """One row of the ledger: calls, bytes sent by this rank, and seconds its host spent launching and waiting."""

    operation: str
    group: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """The traffic of one engine. It is cheap enough to be always on."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}
        self._lock = threading.Lock()

    def count(self, operation: str, group: str, num_bytes: int) -> None:
        """Count one call that sends `num_bytes`."""
        with self._lock:  # the thread of the offloaded step counts too
            row = self._row(operation, group)
            row.calls += 1
            row.bytes += num_bytes
        recorder = Recorder.active
        if recorder is not None:
            recorder.count(operation, num_bytes)

    @contextmanager
    def timed(self, operation: str, group: str) -> Iterator[None]:
        """Add the time spent in the context to the seconds of an operation."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:  # background threads of collectives are timed too
                self._row(operation, group).seconds += spent

    def rows(self) -> list[Row]:
        """Return a copy of the rows, sorted by group and operation."""
        with self._lock:
            rows = [replace(row) for row in self._rows.values()]
        return sorted(rows, key=lambda row: (row.group, row.operation))

    def bytes(self, operation: str) -> int:
        """Return the bytes sent by an operation over all groups."""
        return sum(row.bytes for row in self.rows() if row.operation == operation)

    def calls(self, operation: str) -> int:
        """Return the number of calls of an operation over all groups."""
        return sum(row.calls for row in self.rows() if row.operation == operation)

    def copy(self) -> Ledger:
        """Return a copy of the current counts."""
        other = Ledger()
        other._rows = {(row.operation, row.group): row for row in self.rows()}
        return other

    def since(self, earlier: Ledger) -> Ledger:
        """Return what was counted since an earlier copy."""
        later = self.copy()
        for before in earlier.rows():
            row = later._row(before.operation, before.group)
            row.calls -= before.calls
            row.bytes -= before.bytes
            row.seconds -= before.seconds
        return later

    def clear(self) -> None:
        """Remove all rows."""
        with self._lock:
            self._rows.clear()

    def table(self) -> str:
        """Return the rows as a text table."""
        lines = [f"{'operation':<16}{'group':<8}{'calls':>8}{'MB sent':>12}{'host s':>10}"]
        lines += [
            f"{row.operation:<16}{row.group:<8}{row.calls:>8}{row.bytes / 1e6:>12.2f}{row.seconds:>10.3f}"
            for row in self.rows()
        ]
        return "\n".join(lines)

    def _row(self, operation: str, group: str) -> Row:
        return self._rows.setdefault((operation, group), Row(operation, group))
