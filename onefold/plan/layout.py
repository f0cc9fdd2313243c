"""The offsets of parameters in a flat parameter, which is split into equal shards. No tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

# Each parameter starts at a multiple of this number of elements, and each optimizer group ends at one. Vector kernels
# then have no scalar tail inside a range (a tail may round differently), and each block of quantized states, which
# share a scale, belongs to one parameter and one rank.
PARAMETER_ALIGNMENT = 256

# The size of each shard is a multiple of this number of elements. Vector kernels, quantization blocks and, at two bytes
# per element, pages of direct disk access then never span two ranks. One-byte elements need twice as many for a page.
SHARD_ALIGNMENT = 2048


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Member:
    """One parameter of a flat parameter: its name, shape, optimizer group and range."""

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
    """The layout of a flat parameter: members ordered by optimizer group, then padding to equal, aligned shards."""

    members: tuple[Member, ...]
    num_shards: int
    total: int

    @staticmethod
    def of(parameters: Iterable[tuple[str, tuple[int, ...], int]], num_shards: int, itemsize: int = 2) -> Layout:
        """Lay out (name, shape, optimizer group) triples. Each group becomes one range."""
        alignment = SHARD_ALIGNMENT * (2 if itemsize == 1 else 1)
        members = []
        end = 0
        for name, shape, group in sorted(parameters, key=lambda parameter: parameter[2]):
            start = round_up(end, PARAMETER_ALIGNMENT)
            end = start + math.prod(shape)
            members.append(Member(name, shape, group, start, end))
        return Layout(tuple(members), num_shards, round_up(end, alignment * num_shards))

    @staticmethod
    def of_parts(
        parts: Sequence[Sequence[tuple[str, tuple[int, ...], int]]], num_shards: int, itemsize: int = 2
    ) -> Layout:
        """Lay out equal parts, of one optimizer group, one after the other. Each has the same number of shards."""
        placed = [Layout.of(part, num_shards // len(parts), itemsize) for part in parts]
        size = max(part.total for part in placed)
        moved = [part.moved(number * size) for number, part in enumerate(placed)]
        return Layout(tuple(member for members in moved for member in members), num_shards, size * len(parts))

    def moved(self, offset: int) -> tuple[Member, ...]:
        """Return the members at other positions."""
        return tuple(replace(each, start=each.start + offset, stop=each.stop + offset) for each in self.members)

    @property
    def shard_size(self) -> int:
        return self.total // self.num_shards

    @property
    def numel(self) -> int:
        """The number of elements without padding."""
        return sum(member.stop - member.start for member in self.members)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of padding."""
        ends, starts = [0, *(member.stop for member in self.members)], [*(m.start for m in self.members), self.total]
        return tuple((stop, start) for stop, start in zip(ends, starts, strict=True) if stop < start)

    @cached_property
    def strided(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """The shape, the strides and the start of each member."""
        shapes = [member.shape for member in self.members]
        strides = [
            tuple(math.prod(max(size, 1) for size in shape[axis:]) for axis in range(1, len(shape) + 1))
            for shape in shapes
        ]
        return tuple(zip(shapes, strides, (member.start for member in self.members), strict=True))

    def part(self, num_parts: int, number: int = 0) -> Layout:
        """Return the layout of one of equal parts.

        A single parameter is divided along its first dimension. Of several, each belongs to one part (`of_parts`); in
        the layout of a part, parameters of other parts have no elements.
        """
        if num_parts == 1:
            return self
        size, shards = self.total // num_parts, self.num_shards // num_parts
        if len(self.members) == 1:
            (member,) = self.members
            shape = (member.shape[0] // num_parts, *member.shape[1:])
            return Layout((replace(member, shape=shape, stop=member.stop // num_parts),), shards, size)
        begin = number * size
        inside = [begin <= member.start < begin + size for member in self.members]
        end = max((member.stop for member, own in zip(self.members, inside, strict=True) if own), default=begin)
        members = [
            replace(member, start=member.start - begin, stop=member.stop - begin)
            if own
            else replace(member, shape=(0,), start=edge, stop=edge)
            for member, own in zip(self.members, inside, strict=True)
            for edge in [0 if member.start < begin else end - begin]
        ]
        return Layout(tuple(members), shards, size)

    def has_parts(self, num_parts: int) -> bool:
        """Return whether `part` exists: each part has whole shards, without padding."""
        of_one = len(self.members) == 1 and self.numel == self.total
        return of_one and self.num_shards % num_parts == 0 and self.members[0].shape[0] % num_parts == 0

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_size, (rank + 1) * self.shard_size

    @cached_property
    def group_ranges(self) -> tuple[Segment, ...]:
        """The padded range of each optimizer group, in order."""
        ranges: dict[int, Segment] = {}
        for member in self.members:
            first = ranges.get(member.group)
            stop = round_up(member.stop, PARAMETER_ALIGNMENT)
            ranges[member.group] = Segment(member.group, first.start if first else member.start, stop)
        return tuple(segment for segment in ranges.values() if segment.start < segment.stop)

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Yield the group ranges inside [start, stop), as offsets in the flat parameter."""
        for segment in self.group_ranges:
            low, high = max(segment.start, start), min(segment.stop, stop)
            if low < high:
                yield Segment(segment.group, low, high)

    @cached_property
    def shape_key(self) -> tuple[int, ...]:
        """A key that is equal for layouts with the same padding, whose gradient buffers are interchangeable."""
        return (self.total, *(edge for member in self.members for edge in (member.start, member.stop)))
