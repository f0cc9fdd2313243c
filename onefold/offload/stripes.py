"""The division of the bytes on disk among several folders, in proportion to the rates of their drives.

[Note: stripes]
All tensors on disk of a rank share one range of addresses. It is cut into units of `aio.block_size` bytes, and a cycle
of units assigns each of them to a folder: with rates of 3 and 1 GB/s the cycle is 0 0 1 0. Every transfer of many units
then uses all drives, and each drive needs the same time for its part. The addresses of tensors do not depend on the
rates, so the same tensors are reserved before the rates are known. The division never changes a result.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

# Units in a cycle. A folder gets a multiple of 1/64 of the bytes, and none below half of that.
_CYCLE = 64


@dataclass(frozen=True)
class Stripes:
    """The folder of each unit of addresses, as a cycle of indices that repeats. See [Note: stripes]."""

    unit: int
    cycle: tuple[int, ...] = (0,)

    @staticmethod
    def in_proportion(rates: Sequence[float], unit: int) -> Stripes:
        """Divide units among folders in proportion to `rates`, spread as evenly as possible over the cycle."""
        total = sum(rates)
        counts = [int(_CYCLE * rate / total) for rate in rates]
        remainders = [_CYCLE * rate / total - count for rate, count in zip(rates, counts, strict=True)]
        for index in sorted(range(len(rates)), key=lambda index: -remainders[index])[: _CYCLE - sum(counts)]:
            counts[index] += 1
        shortest = gcd(*counts)
        counts = [count // shortest for count in counts]
        cycle: list[int] = []
        for length in range(1, sum(counts) + 1):
            behind = [count * length / sum(counts) - cycle.count(index) for index, count in enumerate(counts)]
            cycle.append(behind.index(max(behind)))
        return Stripes(unit, tuple(cycle))

    def locate(self, address: int) -> tuple[int, int]:
        """Return the folder of an address, and the offset in its file."""
        number, inside = divmod(address, self.unit)
        cycles, place = divmod(number, len(self.cycle))
        folder = self.cycle[place]
        units = cycles * self.cycle.count(folder) + self.cycle[:place].count(folder)
        return folder, units * self.unit + inside

    def end_of_run(self, address: int) -> int:
        """Return the address before which no other folder begins."""
        if len(set(self.cycle)) == 1:
            return sys.maxsize
        return (address // self.unit + 1) * self.unit

    def folders_of(self, begin: int, end: int) -> Iterable[int]:
        """Return the folders of a range of addresses, each once."""
        first, last = begin // self.unit, -(-end // self.unit)
        numbers = range(first, min(last, first + len(self.cycle))) if end > begin else ()
        return dict.fromkeys(self.cycle[number % len(self.cycle)] for number in numbers)

    def num_bytes(self, total: int) -> Counter[int]:
        """Return the bytes of each folder's file if addresses up to `total` are used."""
        found: Counter[int] = Counter()
        cycles, rest = divmod(total, len(self.cycle) * self.unit)
        for place, folder in enumerate(self.cycle):
            found[folder] += cycles * self.unit + min(max(rest - place * self.unit, 0), self.unit)
        return found
