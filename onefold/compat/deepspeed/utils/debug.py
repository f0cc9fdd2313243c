"""Printing from several ranks at once."""

from __future__ import annotations

from typing import Any

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]


def printflock(*msgs: Any) -> None:
    """Print one rank after the other, so that lines do not mix."""
    if fcntl is None:
        print(*msgs, flush=True)
        return
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            print(*msgs, flush=True)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
