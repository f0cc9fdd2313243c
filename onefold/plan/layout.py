"""How parameters lie in one flat parameter, cut into one equal shard per rank. No tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

# Each parameter starts at a multiple of this many elements, and each optimizer group ends at one: vector kernels
# then meet no scalar tail inside a range (a tail may round differently), and a block of so many elements, as quantized
# states share a scale, belongs to one parameter and one rank.
PARAMETER_ALIGNMENT = 256

# Each shard is a multiple of this many elements: vector kernels, quantization blocks and, at two bytes an element,
# pages of direct disk access never straddle a rank. Elements of one byte need twice as many for a page.
SHARD_ALIGNMENT = 2048


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Member:
    """One parameter of a flat one: its name, shape and place there."""

    name: str
    shape: tuple[int, ...]
    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A range of a flat parameter that belongs to one optimizer group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A flat parameter: members in order of optimizer group, then padding up to equal, aligned shards."""

    members: tuple[Member, ...]
    num_shards: int
    total: int

    @staticmethod
    def of(parameters: Iterable[tuple[str, tuple[int, ...], int]], num_shards: int, itemsize: int = 2) -> Layout:
        """Lay out (name, shape, optimizer group) triples. Within a run each group is one range."""
        alignment = SHARD_ALIGNMENT * (2 if itemsize == 1 else 1)
        members = []
        end = 0
        for name, shape, group in sorted(parameters, key=lambda parameter: parameter[2]):
            start = round_up(end, PARAMETER_ALIGNMENT)
            end = start + math.prod(shape)
            members.append(Member(name, shape, group, start, end))
        return Layout(tuple(members), num_shards, round_up(end, alignment * num_shards))

    @property
    def shard_size(self) -> int:
        return self.total // self.num_shards

    @property
    def numel(self) -> int:
        """Elements that are parameters, padding left out."""
        return sum(member.stop - member.start for member in self.members)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Where padding lies."""
        ends, starts = [0, *(member.stop for member in self.members)], [*(m.start for m in self.members), self.total]
        return tuple((stop, start) for stop, start in zip(ends, starts, strict=True) if stop < start)

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_size, (rank + 1) * self.shard_size

    @cached_property
    def group_ranges(self) -> tuple[Segment, ...]:
        """One padded range per optimizer group, in order."""
        ranges: dict[int, Segment] = {}
        for member in self.members:
            first = ranges.get(member.group)
            stop = round_up(member.stop, PARAMETER_ALIGNMENT)
            ranges[member.group] = Segment(member.group, first.start if first else member.start, stop)
        return tuple(segment for segment in ranges.values() if segment.start < segment.stop)

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """The group ranges inside [start, stop), counted from the start of the flat parameter."""
        for segment in self.group_ranges:
            low, high = max(segment.start, start), min(segment.stop, stop)
            if low < high:
                yield Segment(segment.group, low, high)

    @cached_property
    def shape_key(self) -> tuple[int, ...]:
        """Equal for flat parameters with padding in the same places: their gradient buffers are interchangeable."""
        return (self.total, *(edge for member in self.members for edge in (member.start, member.stop)))
