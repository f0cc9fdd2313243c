"""Fingerprints of tensors, by which writes to them are detected."""

from __future__ import annotations

import torch

from onefold.gpu_kernels import kernels_of

# The number of words that torch multiplies at once, because the products need memory.
_CHUNK = 1 << 20
# The multiplier of word indices, which gives each word a distinct odd factor: 2^64 divided by the golden ratio, as a
# signed integer.
SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_kernels = kernels_of(
    "onefold.offload.fingerprint_kernels",
    "the check for written parameters",
    "set onefold.honour_writes to false to disable it",
)


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View a tensor as the widest possible integers, whose comparison is fastest and distinguishes NaN and -0."""
    wide = values.nbytes % 8 == 0 and values.data_ptr() % 8 == 0 and values.storage_offset() * values.itemsize % 8 == 0
    return values.view(torch.int64 if wide else _INTEGERS[values.itemsize])


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Compute a number that changes if a value changes or is moved, without synchronizing with the device."""
    words = as_integers(values)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if kernels := _kernels(values):
        kernels.add_words(words, total)
    else:
        add_words(words, total)
    return total


def add_words(words: torch.Tensor, total: torch.Tensor) -> None:
    """Add all words to `total`, each multiplied by an odd factor of its index, in wrapping 64-bit arithmetic."""
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        places = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=words.device)
        total += (chunk * places.mul_(SPREAD).bitwise_or_(1)).sum()
