"""Requests to disks and object stores that have not returned, for the watch of stalled ranks.

`storage`, `checkpoint` and `offload` make each request inside `waiting_for_disk`. Requests are recorded only while the
watch (`recovery/stall_watch.py`) runs.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

_NOTHING: AbstractContextManager[None] = nullcontext()


class DiskWait:
    """One request, as a context."""

    __slots__ = ("operation", "path", "since")

    def __init__(self, operation: str, path: str | os.PathLike[str]) -> None:
        self.operation, self.path, self.since = operation, path, 0.0

    def __enter__(self) -> None:
        self.since = time.monotonic()
        _waits.append(self)  # one atomic operation needs no lock

    def __exit__(self, *error: object) -> None:
        global _num_ended
        _waits.remove(self)
        _num_ended += 1


class LongestWait(NamedTuple):
    """The request that has waited for the longest time."""

    what: str
    since: float


_waits: list[DiskWait] = []
_num_ended = 0
_is_recorded = False
_threads = threading.local()


def waiting_for_disk(operation: str, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Return a context around one request to a disk. `operation` is "the write of", for example."""
    return DiskWait(operation, path) if _is_recorded and not hasattr(_threads, "ignored") else _NOTHING


def ignore_disk_waits() -> None:
    """Leave out the requests of this thread, because neither training nor a save waits for them."""
    _threads.ignored = True


def record_disk_waits(*, enabled: bool) -> None:
    """Start or end the recording of requests."""
    global _is_recorded
    _is_recorded = enabled


def longest_disk_wait() -> LongestWait | None:
    """Return the oldest request that has not returned, if there is one."""
    found = min(list(_waits), key=lambda wait: wait.since, default=None)
    return LongestWait(f"{found.operation} {os.fspath(found.path)}", found.since) if found is not None else None


def num_disk_requests() -> int:
    """Return the number of requests that have returned since the start of the process."""
    return _num_ended
