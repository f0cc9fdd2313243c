"""Sums over ranks in one fixed order, a balanced binary tree in fp32; and gradients split into chunks to be summed.

[Note: one order of addition]
Neighbouring ranks are added in pairs, then neighbouring pairs, and so on. An odd one is added at the next level:

    ranks 0 1 2 3 4 5      ((0 + 1) + (2 + 3)) + (4 + 5)

The sum of 2, 4, 8, ... aligned neighbours is therefore a branch of the tree. Adding inside a node or a replica group
first and across them later gives the bits of one sum over all ranks. 16-bit floats are widened before they are added.
On a CUDA device a Triton kernel gives the same bits in one pass over memory (`comm/tree_kernel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from onefold.comm.collective import Reduction
from onefold.gpu_kernels import kernels_of

# Elements added at once on a CPU, so that partial sums stay in cache.
_CHUNK = 1 << 17
# The most bytes that a rank receives in one round. Larger gradients take several rounds.
INBOX_BYTES = 1 << 27

_kernels = kernels_of("onefold.comm.tree_kernel", "sums over ranks")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of a dtype are added."""
    return torch.promote_types(dtype, torch.float32)


def add_tree(pieces: Sequence[torch.Tensor], target: torch.Tensor, *, add: bool = False) -> None:
    """Store the sum of pieces of one dtype in `target`, or with `add` add it, in the order of the tree.

    The target may be one of the pieces. Its last bytes may contain one with fewer bits, on a CPU.
    """
    if pieces[0].dtype != torch.float64 and (kernels := _kernels(target)):
        kernels.add_tree(pieces, target, add=add)
        return
    size = sum_dtype(pieces[0].dtype)
    scratch = [target.new_empty(min(_CHUNK, target.numel()), dtype=size) for _ in range(len(pieces).bit_length() + 1)]
    for start in range(0, target.numel(), _CHUNK):
        stop = min(start + _CHUNK, target.numel())
        into = target[start:stop]
        rows = [_apart(piece[start:stop], into) for piece in pieces]
        spare = [buffer[: stop - start] for buffer in scratch]
        if add or into.dtype != size or len(rows) == 1:
            total = _fold(rows, spare[1:], spare[0])
            into.add_(total) if add else into.copy_(total)
        else:
            half = _half(len(rows))
            left, right = _fold(rows[:half], spare[2:], spare[0]), _fold(rows[half:], spare[2:], spare[1])
            _add(left, right, into)


def _apart(row: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Return a row, copied if it has fewer bits than the elements of `into` that are written over it."""
    if row.dtype == into.dtype or row.untyped_storage()._cdata != into.untyped_storage()._cdata:
        return row
    begin, end = into.storage_offset() * into.itemsize, (into.storage_offset() + into.numel()) * into.itemsize
    start, stop = row.storage_offset() * row.itemsize, (row.storage_offset() + row.numel()) * row.itemsize
    return row.clone() if start < end and begin < stop else row


def _fold(pieces: Sequence[torch.Tensor], spare: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Sum pieces into `out`, and return it. Return a single piece as it is."""
    if len(pieces) == 1:
        return pieces[0]
    half = _half(len(pieces))
    left = _fold(pieces[:half], spare, out)
    return _add(left, _fold(pieces[half:], spare[1:], spare[0]), out)


def _add(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if left.dtype == out.dtype or right.dtype == out.dtype:
        return torch.add(left, right, out=out)
    return out.copy_(left).add_(right)  # both have 16 bits


def _half(num: int) -> int:
    """Return how many of `num` pieces form the left branch: the largest power of two below `num`."""
    return 1 << (num - 1).bit_length() - 1


# -- branches ----------------------------------------------------------------------------------------------------------


def branches_of(ranks: range, num_ranks: int) -> list[range]:
    """Return the largest branches of the tree over `num_ranks` ranks that consecutive `ranks` consist of."""
    found, start = [], ranks.start
    while start < ranks.stop:
        width = 1
        while (
            start % (2 * width) == 0 and start + width < ranks.stop and min(start + 2 * width, num_ranks) <= ranks.stop
        ):
            width *= 2
        found.append(range(start, min(start + width, ranks.stop)))
        start += width
    return found


def add_branches(branches: Mapping[range, torch.Tensor], target: torch.Tensor, *, add: bool = False) -> None:
    """Store the sum of branches that cover all ranks in `target`, or with `add` add it."""
    ordered = sorted(branches, key=lambda branch: branch.start)
    width = len(ordered[0])
    if (
        all(branch.start == index * width for index, branch in enumerate(ordered))
        and len({b.dtype for b in branches.values()}) == 1
    ):
        add_tree([branches[branch] for branch in ordered], target, add=add)  # equal branches form a tree
        return
    add_tree([_join(branches, 0, ordered[-1].stop)], target, add=add)


def _join(branches: Mapping[range, torch.Tensor], first: int, last: int) -> torch.Tensor:
    if (branch := branches.get(range(first, last))) is not None:
        return branch
    middle = first + _half(last - first)
    left, right = _join(branches, first, middle), _join(branches, middle, last)
    return torch.add(left.to(sum_dtype(left.dtype)), right)


# -- chunks of gradients -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradChunk:
    """Columns of a gradient that are sent together.

    Row k is sent to rank k. The sum of the rows that this rank receives is stored in `target`, or added to it.
    """

    rows: torch.Tensor
    target: torch.Tensor
    add: bool


def split_into_rounds(
    reductions: Sequence[Reduction], sources: Sequence[torch.Tensor], num_ranks: int
) -> Iterator[list[GradChunk]]:
    """Yield the rounds of some reductions. `sources` are their gradients in the dtype of the transport."""
    pairs, batch = zip(reductions, sources, strict=True), list[GradChunk]()
    for chunk in (chunk for reduction, source in pairs for chunk in _split(reduction, source, num_ranks)):
        if batch and sum(each.rows.nbytes for each in [*batch, chunk]) > INBOX_BYTES:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _split(reduction: Reduction, source: torch.Tensor, num_ranks: int) -> Iterator[GradChunk]:
    if not source.numel():
        return
    rows = source.view(num_ranks, -1)
    width = max(1, INBOX_BYTES // rows[:, :1].nbytes)
    for start in range(0, rows.shape[1], width):
        yield GradChunk(rows[:, start : start + width], reduction.target[start : start + width], reduction.add)
