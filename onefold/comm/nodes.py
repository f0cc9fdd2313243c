"""Which ranks share a node, and which rank of a node is the agent of a rank of another node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Nodes:
    """The sizes of the nodes of a group. The ranks of a node are consecutive, in the order of the nodes."""

    sizes: tuple[int, ...]

    @staticmethod
    def of_size(size: int, num_ranks: int) -> Nodes:
        """Return nodes of one size, which divides the number of ranks."""
        return Nodes((size,) * (num_ranks // size))

    @staticmethod
    def from_launcher(given: Sequence[int]) -> Nodes:
        """Return nodes from the node size that the launcher has set on each rank; one node if these contradict."""
        sizes, first = [], 0
        while first < len(given):
            size = given[first]
            if size < 1 or list(given[first : first + size]) != [size] * size:
                return Nodes((len(given),))
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
        """The number of ranks per node, or of all ranks if nodes have different sizes."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else self.num_ranks

    def of(self, rank: int) -> int:
        """Return the node of a rank."""
        return bisect_right(self._firsts, rank) - 1

    def ranks(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(self._firsts[node], self._firsts[node + 1])

    def agent(self, node: int, rank: int) -> int:
        """Return the agent of a rank on a node: the rank itself on its own node, else the rank with its place there.

        Places wrap around on smaller nodes.
        """
        if rank in self.ranks(node):
            return rank
        place = rank - self.ranks(self.of(rank)).start
        return self.ranks(node)[place % self.sizes[node]]

    def among(self, ranks: Iterable[int]) -> Nodes:
        """Return the nodes of these increasing ranks alone, which are numbered from 0."""
        counts: dict[int, int] = {}
        for rank in ranks:
            counts[self.of(rank)] = counts.get(self.of(rank), 0) + 1
        return Nodes(tuple(counts.values()))
