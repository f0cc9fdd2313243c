"""Host memory that is free and still held by the process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def give_back_free_memory() -> None:
    """Hand free pages of the C library's heap to the system. A model that was built, or the first pass, leaves holes
    there that nothing fills again; the library keeps them resident for good.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@contextmanager
def apart_from_heap() -> Iterator[None]:
    """Memory for long: in mappings of its own, so that what comes and goes in the heap leaves no holes around it."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    try:
        yield
    finally:
        # As far as the library moves both by itself, which it no longer does.
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 26)


@cache
def _mallopt() -> Any:
    try:
        return ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None


@cache
def _malloc_trim() -> Any:
    """None where the C library is not glibc."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
