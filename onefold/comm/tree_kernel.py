"""The sum over ranks in Triton: what `comm/tree.py` specifies, to the bit, each value read and written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

# Pieces that one kernel adds: a branch of the tree. More of them are added branch by branch.
BRANCH = 8
_BLOCK = 1024


@triton.jit
def _load(piece, place, mask, PRESENT: tl.constexpr):
    # What is not there counts as -0, the one number that changes no other when it is added.
    return tl.load(piece + place, mask=mask & PRESENT, other=-0.0).to(tl.float32)


@triton.jit
def _add_branch(
    a, b, c, d, e, f, g, h, target, numel,
    NUM: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    ab = _load(a, place, mask, True) + _load(b, place, mask, NUM > 1)
    cd = _load(c, place, mask, NUM > 2) + _load(d, place, mask, NUM > 3)
    ef = _load(e, place, mask, NUM > 4) + _load(f, place, mask, NUM > 5)
    gh = _load(g, place, mask, NUM > 6) + _load(h, place, mask, NUM > 7)
    total = (ab + cd) + (ef + gh)
    if ADD:
        total = tl.load(target + place, mask=mask).to(tl.float32) + total
    tl.store(target + place, total, mask=mask)


_launch: Any = _add_branch


def add_tree(pieces: Sequence[torch.Tensor], target: torch.Tensor, *, add: bool = False) -> None:
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
    """Raises where the kernel does not build, or is wrong."""
    pieces = [torch.full((3,), float(1 << number), device="cuda", dtype=torch.bfloat16) for number in range(3)]
    total = torch.ones(3, device="cuda")
    add_tree(pieces, total, add=True)
    if total.tolist() != [8.0] * 3:
        raise RuntimeError(f"1 + 1 + 2 + 4 came out as {total.tolist()}")
