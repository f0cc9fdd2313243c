"""Triton kernels for the elementwise parts of Muon and Shampoo, each in one pass over memory.

They have the bits of torch's operations on a GPU: products and sums are fused exactly where torch's kernels fuse them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
_OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}


@triton.jit
def _lerp(start, end, weight, rest):
    """Compute `torch.lerp`. `rest` is one minus the weight."""
    if weight < 0.5:
        found = tl.fma(weight + tl.zeros_like(start), end - start, start)
    else:
        found = tl.fma(start - end, rest + tl.zeros_like(start), end)
    return found


@triton.jit
def _average(
    gradient, coefficient, skip, average, update, size, weight, weight_rest, momentum, momentum_rest,
    SKIPS: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if SKIPS:  # masks all elements
        size = tl.where(tl.load(skip) != 0.0, 0, size)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * tl.load(coefficient)
    m = _lerp(tl.load(average + place, mask=inside, other=0.0), g, weight, weight_rest)
    tl.store(average + place, m, mask=inside)
    if NESTEROV:
        m = _lerp(g, m, momentum, momentum_rest)
    tl.store(update + place, m.to(update.dtype.element_ty), mask=inside)


@triton.jit
def _move(
    master, update, weights, skip, size, decay, rate,
    SKIPS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, TAKES_OVER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if SKIPS:
        size = tl.where(tl.load(skip) != 0.0, 0, size)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    p = tl.load(master + place, mask=inside, other=0.0)
    if TAKES_OVER:
        weight = tl.load(weights + place, mask=inside, other=0.0)
        p = tl.where(p.to(weight.dtype) != weight, weight.to(tl.float32), p)
    u = tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
    p = tl.fma(u, rate + tl.zeros_like(u), p * decay)
    tl.store(master + place, p, mask=inside)
    if HAS_WEIGHTS:
        tl.store(weights + place, p.to(weights.dtype.element_ty), mask=inside)


def average(
    gradient: torch.Tensor,
    coefficient: float | torch.Tensor,
    skip: torch.Tensor | None,
    mean: torch.Tensor,
    update: torch.Tensor,
    momentum: float,
    *,
    nesterov: bool,
) -> None:
    """Cast and scale the gradient, average it into `mean`, and write the input of the matrix rule to `update`."""
    factor = coefficient
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=gradient.device)
    weight, lead = _numbers(1 - momentum), _numbers(momentum)
    with torch.cuda.device(gradient.device):
        _average[(triton.cdiv(gradient.numel(), BLOCK),)](
            gradient, factor.to(torch.float32), skip if skip is not None else factor, mean, update, gradient.numel(),
            *weight, *lead, skip is not None, nesterov, BLOCK, **_OPTIONS,
        )  # fmt: skip


def move(
    master: torch.Tensor,
    update: torch.Tensor,
    weights: torch.Tensor | None,
    skip: torch.Tensor | None,
    decay: float,
    rate: float,
    *,
    takes_over: bool,
) -> None:
    """Set the master to `decay` times the master plus `rate` times the update, and cast it into `weights`.

    `takes_over`: first copy weights that differ from the rounded master into the master, because the user has written
    to them in place.
    """
    with torch.cuda.device(master.device):
        _move[(triton.cdiv(master.numel(), BLOCK),)](
            master, update, weights if weights is not None else update, skip if skip is not None else master,
            master.numel(), decay, rate, skip is not None, weights is not None, takes_over, BLOCK, **_OPTIONS,
        )  # fmt: skip


def _numbers(weight: float) -> tuple[float, float]:
    """Return a weight, and one minus the weight, computed in fp32 as torch does."""
    narrow = torch.tensor(weight, dtype=torch.float32)
    return weight, (1 - narrow).item()


def try_out() -> None:
    """Raise if the kernels do not compile, do not run, or differ from torch."""
    generator = torch.Generator("cuda").manual_seed(0)
    gradient, mean, master = torch.randn((3, 2 * BLOCK + 5), generator=generator, device="cuda")
    for momentum in (0.95, 0.3):
        found, wanted = mean.clone(), mean.clone()
        updates = [torch.empty_like(mean, dtype=torch.bfloat16) for _ in range(2)]
        average(gradient, 0.3, None, found, updates[0], momentum, nesterov=True)
        scaled = gradient * 0.3
        updates[1].copy_(scaled.lerp(wanted.lerp_(scaled, 1 - momentum), momentum))
        moved, expected = master.clone(), master.clone()
        move(moved, updates[0], None, None, 0.999, -0.037, takes_over=False)
        expected.mul_(0.999).add_(updates[1], alpha=-0.037)
        for one, other in ((found, wanted), (updates[0], updates[1]), (moved, expected)):
            if not torch.equal(one, other):
                raise RuntimeError("the Muon kernels return other values than torch")
