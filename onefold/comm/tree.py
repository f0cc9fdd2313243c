"""Sums over ranks in one fixed order: a balanced binary tree, in fp32.

[Note: one order of addition]
Neighbouring ranks are added in pairs, then neighbouring pairs, and so on. An odd one is added at the next level:

    ranks 0 1 2 3 4 5      ((0 + 1) + (2 + 3)) + (4 + 5)

The sum of 2, 4, 8, ... aligned neighbours is therefore a branch of the tree. Adding inside a node or a replica group
first and across them later gives the bits of one sum over all ranks. 16-bit floats are widened before they are added.
On a CUDA device a Triton kernel gives the same bits in one pass over memory (`comm/tree_kernel.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from onefold.gpu_kernels import kernels_of

# Elements added at once on a CPU, so that partial sums stay in cache.
_CHUNK = 1 << 17

_kernels = kernels_of("onefold.comm.tree_kernel", "sums over ranks")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of a dtype are added."""
    return torch.promote_types(dtype, torch.float32)


def add_tree(pieces: Sequence[torch.Tensor], target: torch.Tensor, *, add: bool = False) -> None:
    """Store the sum of pieces of one dtype in `target`, or with `add` add it, in the order of the tree.

    The target may be one of the pieces.
    """
    if pieces[0].dtype != torch.float64 and (kernels := _kernels(target)):
        kernels.add_tree(pieces, target, add=add)
        return
    size = sum_dtype(pieces[0].dtype)
    scratch = [target.new_empty(min(_CHUNK, target.numel()), dtype=size) for _ in range(len(pieces).bit_length() + 1)]
    for start in range(0, target.numel(), _CHUNK):
        stop = min(start + _CHUNK, target.numel())
        into = target[start:stop]
        rows, spare = [piece[start:stop] for piece in pieces], [buffer[: stop - start] for buffer in scratch]
        if add or into.dtype != size or len(rows) == 1:
            total = _fold(rows, spare[1:], spare[0])
            into.add_(total) if add else into.copy_(total)
        else:
            half = _half(len(rows))
            left, right = _fold(rows[:half], spare[2:], spare[0]), _fold(rows[half:], spare[2:], spare[1])
            _add(left, right, into)


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
