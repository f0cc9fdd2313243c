"""Host memory that is free and still held by the process."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back_free_memory() -> None:
    """Hand free pages of the C library's heap to the system. A model that was built, or the first pass, leaves holes
    there that nothing fills again; the library keeps them resident for good.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """None where the C library is not glibc."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
