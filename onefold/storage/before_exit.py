"""Work that is finished when the main thread has ended, but before Python closes its thread pools.

Requests to object stores resolve names in a thread pool. Functions of `atexit` and threads that Python waits for run
when these pools refuse work: a request that needs a new connection then fails.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - it closes the pools; functions run in reverse order of registration
import threading
import weakref
from collections.abc import Callable

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def before_exit(work: Callable[[], object]) -> None:
    """Call `work` when the main thread has ended."""
    threading._register_atexit(work)  # type: ignore[attr-defined]


def join_before_exit(thread: threading.Thread) -> None:
    """Wait for a thread when the main thread has ended."""
    _threads.add(thread)


def _join_threads() -> None:
    for thread in list(_threads):
        thread.join()


before_exit(_join_threads)  # now: a thread may start another one after the main thread has ended
