"""A number for what a tensor holds, to see later whether somebody has written to it."""

from __future__ import annotations

import torch

from onefold.gpu_kernels import kernels_of

# Words that are multiplied at once where torch does it: the products need memory.
_CHUNK = 1 << 20
# By which places are multiplied, so that each word has an odd factor of its own: 2^64 over the golden ratio, as a
# signed number.
SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_kernels = kernels_of(
    "onefold.offload.fingerprint_kernels",
    "the check for written parameters",
    "onefold.honour_writes false turns the check off",
)


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """As whole numbers, the widest that fit: comparing them is fastest, and tells NaN and -0 apart."""
    wide = values.nbytes % 8 == 0 and values.data_ptr() % 8 == 0 and values.storage_offset() * values.itemsize % 8 == 0
    return values.view(torch.int64 if wide else _INTEGERS[values.itemsize])


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """A number that changes when any value changes or changes places. Nothing is waited for."""
    words = as_integers(values)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if kernels := _kernels(values):
        kernels.add_words(words, total)
    else:
        add_words(words, total)
    return total


def add_words(words: torch.Tensor, total: torch.Tensor) -> None:
    """The sum of words, each times an odd number that its place gives it, in wrapping 64-bit arithmetic."""
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        places = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=words.device)
        total += (chunk * places.mul_(SPREAD).bitwise_or_(1)).sum()
