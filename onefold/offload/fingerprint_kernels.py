"""A Triton kernel for fingerprints: one launch that reads each word once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onefold.offload.fingerprint import SPREAD
from onefold.offload.fingerprint import add_words as specification

BLOCK = 4096


@triton.jit
def _add_words(words, total, size, spread, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place, mask=place < size, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * ((place * spread) | 1)))


def add_words(words: torch.Tensor, total: torch.Tensor) -> None:
    """Compute the same result as `fingerprint.add_words`."""
    if words.numel():
        with torch.cuda.device(words.device):
            grid = (triton.cdiv(words.numel(), BLOCK),)
            _add_words[grid](words, total, words.numel(), SPREAD, BLOCK=BLOCK, num_warps=8)


def try_out() -> None:
    """Raise if the kernel does not compile, does not run, or gives a wrong sum."""
    words = torch.arange(-BLOCK, 2 * BLOCK + 1, device="cuda") * 0x123456789
    total, expected = torch.zeros((2,), dtype=torch.int64, device="cuda")
    add_words(words, total)
    specification(words, expected)
    if not torch.equal(total, expected):
        raise RuntimeError(f"the kernel returned {total.item()} instead of {expected.item()}")
