"""Triton kernels for the check of in-place writes. They read every element once."""

from __future__ import annotations

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
    words = torch.arange(-BLOCK, 2 * BLOCK + 1, device="cuda") * 0x123456789
    total, expected = torch.zeros((2,), dtype=torch.int64, device="cuda")
    add_words(words, total)
    specification(words, expected)
    if not torch.equal(total, expected):
        raise RuntimeError(f"the kernel gave {total.item()} for {expected.item()}")
