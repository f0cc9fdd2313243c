"""The matrices in a flat parameter, and the rank that updates each of them. No tensors.

[Note: whole matrices]
Some optimizers need a whole matrix (Muon orthogonalizes it), but shard boundaries split matrices. So each matrix has an
owner: one of the ranks that store a piece of it. The other ranks send their pieces to the owner, which updates the
matrix and sends them back. Owners are chosen over all flat parameters at once. Matrices that lie in one shard are owned
by its rank. The others are assigned in order of decreasing cost, each to the rank with the least work so far. Where
optimizer states are replicated nothing is sent: every rank updates every matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onefold.plan.layout import Layout, Member


class MatrixError(ValueError):
    """A parameter cannot be split into the requested matrices."""


@dataclass(frozen=True)
class Matrix:
    """A matrix that is stored in row-major order in a flat parameter, at offset `start`."""

    member: int
    """The index of its parameter among the members of the layout."""
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def piece(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the matrix inside [start, stop). Empty ranges are (x, x)."""
        low = max(self.start, start)
        return low, max(low, min(self.stop, stop))


Splits = Mapping[str, Sequence[int] | int]
"""A map from name patterns to the rows of each part (a fused QKV), or to the number of equal parts (heads)."""


def matrices_of(layout: Layout, splits: Splits | None = None) -> list[Matrix]:
    """Return the matrices of a flat parameter, in order.

    A parameter of three dimensions, such as fused experts, has one matrix per index of the first dimension. One of more
    dimensions, such as a convolution, is a single matrix with one row per output channel.
    """
    found = []
    for place, member in enumerate(layout.members):
        if member.start == member.stop:
            continue
        number, rows, columns = _as_matrices(member)
        parts = _rows_of_parts(member, rows, splits or {})
        start = member.start
        for _ in range(number):
            for part in parts:
                found.append(Matrix(place, start, part, columns))
                start += part * columns
    return found


def _as_matrices(member: Member) -> tuple[int, int, int]:
    shape = member.shape
    if len(shape) < 2:
        raise MatrixError(
            f"parameter {member.name} has {len(shape)} dimension{'s' * (len(shape) != 1)} and is not a matrix. Use "
            "AdamW for it (a group with use_muon, or use_ and the name of its rule, false), or add it to adamw_names."
        )
    if len(shape) == 3:
        return shape
    return 1, shape[0], math.prod(shape[1:])


def _rows_of_parts(member: Member, rows: int, splits: Splits) -> list[int]:
    split = next((split for pattern, split in splits.items() if fnmatchcase(member.name, pattern)), None)
    if split is None:
        return [rows]
    parts = [rows // split] * split if isinstance(split, int) else list(split)
    if sum(parts) != rows or not all(part > 0 for part in parts):
        asked = f"{split} equal parts" if isinstance(split, int) else f"parts of {parts} rows"
        raise MatrixError(f"parameter {member.name} has {rows} rows, which cannot be divided into {asked}")
    return parts


Cost = Callable[[int, int], float]
"""A function that returns the cost of updating a matrix of (rows, columns), in any unit."""


def choose_owners(layouts: Sequence[tuple[Layout, Sequence[Matrix]]], cost: Cost) -> list[list[int]]:
    """Choose the owner of each matrix. Return shard indices, in the order of the layouts and their matrices."""
    owners = [[0] * len(matrices) for _, matrices in layouts]
    busy: dict[int, float] = {}
    places = [(line, place) for line, (_, matrices) in enumerate(layouts) for place in range(len(matrices))]
    costs = {(line, place): cost(*layouts[line][1][place].shape) for line, place in places}
    held = {(line, place): holders(layouts[line][0], layouts[line][1][place]) for line, place in places}
    for line, place in sorted(places, key=lambda found: (len(held[found]) > 1, -costs[found], found)):
        owner = min(held[line, place], key=lambda rank: (busy.get(rank, 0.0), rank))
        busy[owner] = busy.get(owner, 0.0) + costs[line, place]
        owners[line][place] = owner
    return owners


def holders(layout: Layout, matrix: Matrix) -> range:
    """Return the indices of the shards that contain a piece of the matrix."""
    size = layout.shard_size
    return range(matrix.start // size, (matrix.stop - 1) // size + 1)


def count_sent(layout: Layout, matrices: Sequence[Matrix], owners: Sequence[int], rank: int, itemsize: int = 2) -> int:
    """Compute the bytes that a rank sends in a step: its pieces to their owners, and updated pieces to other ranks."""
    sent = 0
    for matrix, owner in zip(matrices, owners, strict=True):
        low, high = matrix.piece(*layout.shard_range(rank))
        own = high - low
        sent += matrix.stop - matrix.start - own if owner == rank else own
    return sent * itemsize
