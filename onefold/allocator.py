"""Host memory: what is held for long lies apart from the C library's heap, and what is free there goes back.

[Note: the heap]
The C library serves tensors below 32 MB from one heap, keeps what is freed for the next, and can give back to the
system only what lies at its end. States and pools that lay between parameters and gradients that come and go would
leave holes of odd sizes: a hundred MB and more that are resident and empty. On 64-bit ARM torch has an allocator of its
own for tensors, which gives free pages back by itself after a while.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

# Smaller ones fill no holes, and a mapping has whole pages.
_SMALLEST = 1 << 20


def zeros_apart(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for long, all zero: on a host in a mapping of its own, which ends with the tensor."""
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < _SMALLEST:
        return torch.zeros(numel, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype)


def give_back_free_memory() -> None:
    """Hand free pages of the heap to the system: a model that was built, or the first pass, leaves holes that nothing
    fills again.
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
