"""The sum over ranks in Triton: the bits that `comm/tree.py` specifies, with one read and one write per value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

# Pieces that one kernel adds: a branch of the tree. More pieces are added branch by branch.
BRANCH = 8
_BLOCK = 1024


@triton.jit
def _load(piece, place, mask):
    return tl.load(piece + place, mask=mask).to(tl.float32)


@triton.jit
def _add_branch(
    a, b, c, d, e, f, g, h, target, numel,
    NUM: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    # Missing pieces are skipped: adding 0 would change -0.
    total = _load(a, place, mask)
    if NUM > 1:
        total += _load(b, place, mask)
    if NUM > 2:
        right = _load(c, place, mask)
        if NUM > 3:
            right += _load(d, place, mask)
        total += right
    if NUM > 4:
        upper = _load(e, place, mask)
        if NUM > 5:
            upper += _load(f, place, mask)
        if NUM > 6:
            last = _load(g, place, mask)
            if NUM > 7:
                last += _load(h, place, mask)
            upper += last
        total += upper
    if ADD:
        total = tl.load(target + place, mask=mask).to(tl.float32) + total
    tl.store(target + place, total, mask=mask)


_launch: Any = _add_branch


def add_tree(pieces: Sequence[torch.Tensor], target: torch.Tensor, *, add: bool = False) -> None:
    """Store the sum of pieces in `target`, or with `add` add it."""
    while len(pieces) > BRANCH:
        branches = [pieces[start : start + BRANCH] for start in range(0, len(pieces), BRANCH)]
        sums = target.new_empty(len(branches), target.numel(), dtype=torch.float32)
        for branch, total in zip(branches, sums, strict=True):
            add_tree(branch, total)
        pieces = list(sums)
    if target.numel():
        rows = [*pieces, *[pieces[0]] * (BRANCH - len(pieces))]
        num, grid = len(pieces), (triton.cdiv(target.numel(), _BLOCK),)
        with torch.cuda.device(target.device):
            _launch[grid](*rows, target, target.numel(), NUM=num, ADD=add, BLOCK=_BLOCK, enable_fp_fusion=False)


def try_out() -> None:
    """Compile the kernel and run it once. Raise if it does not compile, or gives a wrong sum."""
    pieces = [torch.full((3,), float(1 << number), device="cuda", dtype=torch.bfloat16) for number in range(3)]
    total = torch.ones(3, device="cuda")
    add_tree(pieces, total, add=True)
    if total.tolist() != [8.0] * 3:
        raise RuntimeError(f"the kernel computes 1 + 1 + 2 + 4 as {total.tolist()}")
