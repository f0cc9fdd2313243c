"""Which ranks share a node, and which rank of a node stands for one of another node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Nodes:
    """The sizes of the nodes of a group; the ranks of a node are neighbours, in the order of the nodes."""

    sizes: tuple[int, ...]

    @staticmethod
    def of_size(size: int, num_ranks: int) -> Nodes:
        """Nodes of one size, which divides the number of ranks."""
        return Nodes((size,) * (num_ranks // size))

    @staticmethod
    def from_launcher(told: Sequence[int]) -> Nodes:
        """By what the launcher told each rank of the size of its node. One node where that does not fit together."""
        sizes, first = [], 0
        while first < len(told):
            size = told[first]
            if size < 1 or list(told[first : first + size]) != [size] * size:
                return Nodes((len(told),))
            sizes.append(size)
            first += size
        return Nodes(tuple(sizes))

    @cached_property
    def _firsts(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    @property
    def num_ranks(self) -> int:
        return self._firsts[-1]

    @property
    def common_size(self) -> int:
        """The size of each node; nodes of different sizes are one for whoever asks for this."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else self.num_ranks

    def of(self, rank: int) -> int:
        """The node of a rank."""
        return bisect_right(self._firsts, rank) - 1

    def ranks(self, node: int) -> range:
        return range(self._firsts[node], self._firsts[node + 1])

    def agent(self, node: int, rank: int) -> int:
        """Who stands for a rank on a node: on its own node itself, on others the rank with its place there, counted
        round where a node is smaller.
        """
        if rank in self.ranks(node):
            return rank
        place = rank - self.ranks(self.of(rank)).start
        return self.ranks(node)[place % self.sizes[node]]

    def among(self, first: int, num_ranks: int) -> Nodes:
        """Of these neighbouring ranks alone, counted from the first of them."""
        counts: dict[int, int] = {}
        for rank in range(first, first + num_ranks):
            counts[self.of(rank)] = counts.get(self.of(rank), 0) + 1
        return Nodes(tuple(counts.values()))
