"""Triton kernels for the check of in-place writes. They read every element once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from onefold.offload.write_check import SPREAD
from onefold.offload.write_check import add_words as specification

BLOCK = 4096


@triton.jit
def _take_over(master, used, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    wide = tl.load(master + place, mask=inside, other=0.0)
    narrow = tl.load(used + place, mask=inside, other=0.0)
    written = wide.to(narrow.dtype) != narrow
    tl.store(master + place, narrow.to(wide.dtype), mask=inside & written)


def take_over(master: torch.Tensor, used: torch.Tensor) -> None:
    """Copy elements of `used` that are not the master's rounding into the master."""
    with torch.cuda.device(master.device):
        _take_over[(triton.cdiv(master.numel(), BLOCK),)](master, used, master.numel(), BLOCK=BLOCK)


@triton.jit
def _take_over_all(table, one_master, one_used, BLOCK: tl.constexpr):
    # Each row of the table is a block: addresses of its master and of its model weight, and its number of elements.
    row = table + tl.program_id(0) * 3
    master = tl.load(row).to(one_master.dtype)
    used = tl.load(row + 1).to(one_used.dtype)
    place = tl.arange(0, BLOCK)
    inside = place < tl.load(row + 2)
    wide = tl.load(master + place, mask=inside, other=0.0)
    narrow = tl.load(used + place, mask=inside, other=0.0)
    written = wide.to(narrow.dtype) != narrow
    tl.store(master + place, narrow.to(wide.dtype), mask=inside & written)


def table_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the table of `take_over_all` for pairs of a master and a model weight."""
    rows = [
        (master[start:].data_ptr(), used[start:].data_ptr(), min(BLOCK, master.numel() - start))
        for master, used in pairs
        for start in range(0, master.numel(), BLOCK)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(pairs[0][0].device)


def take_over_all(master: torch.Tensor, used: torch.Tensor, table: torch.Tensor) -> None:
    """Do `take_over` for all pairs in a table, whose dtypes are those of `master` and `used`."""
    with torch.cuda.device(master.device):
        _take_over_all[(len(table),)](table, master, used, BLOCK=BLOCK)


@triton.jit
def _add_words(words, total, size, spread, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place, mask=place < size, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * ((place * spread) | 1)))


def add_words(words: torch.Tensor, total: torch.Tensor) -> None:
    """Compute the same result as `write_check.add_words`."""
    if words.numel():
        with torch.cuda.device(words.device):
            grid = (triton.cdiv(words.numel(), BLOCK),)
            _add_words[grid](words, total, words.numel(), SPREAD, BLOCK=BLOCK, num_warps=8)


def try_out() -> None:
    """Raise if a kernel does not compile, does not run, or gives a wrong result."""
    master = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    take_over(master, torch.tensor([1.0, 5.0, 3.0], device="cuda", dtype=torch.bfloat16))
    if master.tolist() != [1.0, 5.0, 3.0]:
        raise RuntimeError(f"the kernel gave {master.tolist()}")
    masters = torch.arange(2 * BLOCK + 3, device="cuda").remainder(128).float()  # exact in 16 bits
    weights, expected_masters = masters.to(torch.bfloat16), masters.clone()
    weights[BLOCK + 1] = expected_masters[BLOCK + 1] = 200.0
    take_over_all(masters, weights, table_of([(masters, weights)]))
    if not torch.equal(masters, expected_masters):
        raise RuntimeError("the kernel for several tensors gave wrong masters")
    words = torch.arange(-BLOCK, 2 * BLOCK + 1, device="cuda") * 0x123456789
    total, expected = torch.zeros((2,), dtype=torch.int64, device="cuda")
    add_words(words, total)
    specification(words, expected)
    if not torch.equal(total, expected):
        raise RuntimeError(f"the kernel gave {total.item()} for {expected.item()}")
