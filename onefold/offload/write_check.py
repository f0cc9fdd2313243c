"""Find in-place writes to model weights by comparing them with their master weights.

[Note: a write that no counter shows]
In-place writes to a parameter (`p.clamp_()`, `p.data.mul_()`) must reach its master weight. A model weight that has a
separate master is the master's rounding from one step to the next, unless the program has written to it, and writes
through `.data` change no version counter. So both are compared: an element that is not its master's rounding has been
written, and replaces the master's value. Every step compares while it updates, which reads two bytes per parameter in
addition to the four that the update reads anyway. Code that reads master weights between two steps (checkpoints,
`safe_get_*`, `optimizer.state_dict()`) calls `ShardedStep.master_of` or `ShardedStep.sync_masters`, which compare.
Where the master is in host memory and the model weight on a GPU, a fingerprint of the model weight shows first whether
they have to be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.gpu_kernels import kernels_of

# The number of words that torch multiplies at once, because the products need memory.
_CHUNK = 1 << 20
# The multiplier of word indices, which gives each word a distinct odd factor: 2^64 divided by the golden ratio, as a
# signed integer.
SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)

# Address of a master, address of its model weight, and their number of elements.
_Addresses = tuple[int, int, int]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_kernels = kernels_of(
    "onefold.offload.write_kernels",
    "the check for written parameters",
    "set onefold.honour_writes to false to disable it",
)


class WriteCheck:
    """Compares master weights with model weights, a range at a time. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._scratch: torch.Tensor | None = None
        # Addresses and sizes of what a kernel compares at once, and their table on the GPU, by the first of them.
        self._tables: dict[_Addresses, tuple[list[_Addresses], torch.Tensor]] = {}

    def take_over(self, master: torch.Tensor, used: torch.Tensor) -> bool:
        """Copy elements of `used` that are not the master's rounding into the master.

        Return False if there are none. On a GPU the answer is always True, because reading it would synchronize.
        """
        if kernels := _kernels(master):
            kernels.take_over(master, used)
            return True
        rounded = self._rounded(master, used.dtype)
        if not master.is_cuda and torch.equal(as_integers(rounded), as_integers(used)):
            return False
        master.copy_(torch.where(rounded == used, master, used.to(master.dtype)))
        return True

    def take_over_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Call `take_over` for pairs of a master and a model weight, in one kernel on a GPU."""
        kernels = _kernels(pairs[0][0]) if pairs else None
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for master, used in pairs:
            if kernels is None:
                self.take_over(master, used)
            else:
                by_dtype.setdefault((master.dtype, used.dtype), []).append((master, used))
        for alike in by_dtype.values():
            assert kernels is not None
            addresses = [(master.data_ptr(), used.data_ptr(), master.numel()) for master, used in alike]
            held = self._tables.get(addresses[0])
            if held is None or held[0] != addresses:  # addresses are those of the last step, as a rule
                held = self._tables[addresses[0]] = addresses, kernels.table_of(alike)
            kernels.take_over_all(*alike[0], held[1])

    def _rounded(self, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if master.dtype == dtype:
            return master
        if master.is_cuda:  # torch's allocator keeps the memory of each stream apart
            return master.to(dtype)
        scratch = self._scratch
        if scratch is None or scratch.dtype != dtype or scratch.numel() < master.numel():
            scratch = self._scratch = torch.empty(master.numel(), dtype=dtype)
        return scratch[: master.numel()].copy_(master)


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
