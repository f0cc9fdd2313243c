"""Counts every byte that crosses a wire or a tier, by operation and by group."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from onefold.recorder import Recorder


@dataclass
class Row:
    """One line of the ledger. Bytes are what this rank sends; seconds what its host spent launching and waiting."""

    operation: str
    group: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Traffic of one engine. Cheap enough to be always on."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}
        self._lock = threading.Lock()

    def count(self, operation: str, group: str, num_bytes: int) -> None:
        with self._lock:  # the host's thread counts too
            row = self._row(operation, group)
            row.calls += 1
            row.bytes += num_bytes
        recorder = Recorder.active
        if recorder is not None:
            recorder.count(operation, num_bytes)

    @contextmanager
    def timed(self, operation: str, group: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:  # threads of wires are timed too
                self._row(operation, group).seconds += spent

    def rows(self) -> list[Row]:
        """The lines as they are now, by group and operation."""
        with self._lock:
            rows = [replace(row) for row in self._rows.values()]
        return sorted(rows, key=lambda row: (row.group, row.operation))

    def bytes(self, operation: str) -> int:
        return sum(row.bytes for row in self.rows() if row.operation == operation)

    def calls(self, operation: str) -> int:
        return sum(row.calls for row in self.rows() if row.operation == operation)

    def copy(self) -> Ledger:
        """The counts as they are now."""
        other = Ledger()
        other._rows = {(row.operation, row.group): row for row in self.rows()}
        return other

    def since(self, earlier: Ledger) -> Ledger:
        """What was counted after an earlier copy."""
        later = self.copy()
        for before in earlier.rows():
            row = later._row(before.operation, before.group)
            row.calls -= before.calls
            row.bytes -= before.bytes
            row.seconds -= before.seconds
        return later

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()

    def table(self) -> str:
        """The rows as text."""
        lines = [f"{'operation':<16}{'group':<8}{'calls':>8}{'MB sent':>12}{'host s':>10}"]
        lines += [
            f"{row.operation:<16}{row.group:<8}{row.calls:>8}{row.bytes / 1e6:>12.2f}{row.seconds:>10.3f}"
            for row in self.rows()
        ]
        return "\n".join(lines)

    def _row(self, operation: str, group: str) -> Row:
        return self._rows.setdefault((operation, group), Row(operation, group))
