"""Host memory: long-lived tensors are allocated outside the C library's heap, and its free pages are released.

[Note: the heap]
The C library allocates tensors below 32 MB from one heap, caches freed memory, and returns only the end of the heap to
the system. Long-lived states and pools between short-lived parameters and gradients would fragment it: a hundred MB and
more would stay resident but unused. On 64-bit ARM torch has a separate allocator for tensors, which releases free pages
after a while.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

# Smaller tensors do not fragment the heap, and a mapping has whole pages.
_SMALLEST = 1 << 20


def zeros_apart(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a long-lived zeroed tensor. On a host it is a separate mapping, which is freed with the tensor."""
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < _SMALLEST:
        return torch.zeros(numel, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype)


def give_back_free_memory() -> None:
    """Return free pages of the heap to the system.

    Building a model, and the first pass, leave free pages that are not used again.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return `malloc_trim`, or None if the C library is not glibc."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
