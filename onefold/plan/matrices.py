"""Which matrices lie in a flat parameter, which pieces of each the ranks hold, and which rank works on each as a whole.
No tensors.

[Note: whole matrices]
Some optimizers look at a matrix as a whole (Muon orthogonalises it), and shards cut through matrices. So each matrix
has an owner: a rank that holds a piece of it anyway, to which the others send theirs and from which they get them back.
Owners are chosen over all flat parameters at once: what lies on one rank stays there, then the dearest matrix comes
first, each to the rank that has the least to do so far. Where every rank steps everything there is nothing to send, and
each is its own owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onefold.plan.layout import Layout, Member


class MatrixError(ValueError):
    """A parameter cannot be taken as the matrices that were asked for."""


@dataclass(frozen=True)
class Matrix:
    """Rows and columns that lie one after the other in a flat parameter, from `start` on."""

    member: int
    """The place of its parameter among the members of the layout."""
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
        """What of it lies in [start, stop); empty ranges are (x, x)."""
        low = max(self.start, start)
        return low, max(low, min(self.stop, stop))


Splits = Mapping[str, Sequence[int] | int]
"""By a pattern of names: rows of each part (a fused QKV), or how many equal parts there are (heads)."""


def matrices_of(layout: Layout, splits: Splits | None = None) -> list[Matrix]:
    """All matrices of a flat parameter, in their order. A parameter of three dimensions is as many matrices as its
    first one says, as experts are; one of more, as convolutions have, is one with a row for each output.
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
            f"parameter {member.name} has {len(shape)} dimension{'s' * (len(shape) != 1)} and is no matrix: let AdamW "
            "step it (a group with use_muon, or use_ and the name of its rule, false; or optimizer.params.adamw_names)"
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
        raise MatrixError(f"parameter {member.name} has {rows} rows, which {asked} do not make up")
    return parts


Cost = Callable[[int, int], float]
"""What the work on a matrix of so many rows and columns costs, in any unit."""


def choose_owners(layouts: Sequence[tuple[Layout, Sequence[Matrix]]], cost: Cost) -> list[list[int]]:
    """The owner of each matrix, as a shard's number, in the order of the layouts and their matrices."""
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
    """The shards that have a piece of it."""
    size = layout.shard_size
    return range(matrix.start // size, (matrix.stop - 1) // size + 1)


def count_sent(layout: Layout, matrices: Sequence[Matrix], owners: Sequence[int], rank: int, itemsize: int = 2) -> int:
    """Bytes that one shard's rank sends in a step: its pieces to their owners, and others' pieces back to them."""
    sent = 0
    for matrix, owner in zip(matrices, owners, strict=True):
        low, high = matrix.piece(*layout.shard_range(rank))
        own = high - low
        sent += matrix.stop - matrix.start - own if owner == rank else own
    return sent * itemsize
