"""A Triton kernel for AdamW with fp32 states, which reads any gradient and writes the model weight as well.

It has the bits of torch's fused kernel, which needs a gradient in fp32 and leaves the model weight to another kernel.
Like it, this one computes in fp32, with hyperparameters rounded to fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from onefold.offload.buffer import Buffer
from onefold.optim.rules import MASTER, Hyper, StoredTile

_BLOCK = 1024


@triton.jit
def _step(
    gradient, coefficient, skip, weights, master, average, squares, numbers, size,
    HAS_COEFFICIENT: tl.constexpr, SKIPS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, TAKES_OVER: tl.constexpr,
    DECAYS: tl.constexpr, MAXIMIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step a block of elements. `numbers` are those of `_numbers_of`."""
    if SKIPS:  # masks all elements
        size = tl.where(tl.load(skip) != 0.0, 0, size)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_COEFFICIENT:
        g = g * tl.load(coefficient)
    if MAXIMIZES:
        g = -g
    p = tl.load(master + place, mask=inside, other=0.0)
    m = tl.load(average + place, mask=inside, other=0.0)
    v = tl.load(squares + place, mask=inside, other=0.0)
    if TAKES_OVER:
        weight = tl.load(weights + place, mask=inside, other=0.0)
        p = tl.where(p.to(weight.dtype) != weight, weight.to(tl.float32), p)
    rate, decay, eps = tl.load(numbers), tl.load(numbers + 3), tl.load(numbers + 4)
    beta1, beta2 = tl.zeros_like(g) + tl.load(numbers + 1), tl.zeros_like(g) + tl.load(numbers + 2)
    step_size = tl.math.div_rn(rate, tl.load(numbers + 5))
    of_root = tl.math.sqrt_rn(tl.load(numbers + 6))
    if DECAYS:
        p = tl.fma(tl.zeros_like(p) - rate * decay, p, p)
    square = g * g
    m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
    v = tl.fma(beta2, v, tl.fma(-beta2, square, square))
    divisor = tl.math.div_rn(tl.math.sqrt_rn(v), tl.zeros_like(v) + of_root) + eps
    p = p - tl.math.div_rn(m * step_size, divisor)
    tl.store(average + place, m, mask=inside)
    tl.store(squares + place, v, mask=inside)
    tl.store(master + place, p, mask=inside)
    if HAS_WEIGHTS:
        tl.store(weights + place, p.to(weights.dtype.element_ty), mask=inside)


# The numbers of a step on the device, by device, stream and hyperparameters, until the next step.
_numbers: dict[tuple[Any, ...], torch.Tensor] = {}
_of_step = 0


def step(tile: StoredTile, hyper: Hyper, number: int) -> None:
    """Update the master and moments in place, and the model weight if the tile has one."""
    gradient, factor, device = tile.gradient, tile.coefficient, tile.gradient.device
    numbers = _numbers_of(hyper, number, device)
    has_coefficient = isinstance(factor, torch.Tensor) or factor != 1.0
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=device) if has_coefficient else numbers
    of_state = [tile.held[name].tensor for name in (MASTER, "exp_avg", "exp_avg_sq")]
    size = gradient.numel()
    with torch.cuda.device(device):
        _step[(triton.cdiv(size, _BLOCK),)](
            gradient, factor.to(torch.float32) if has_coefficient else numbers,
            tile.skip if tile.skip is not None else numbers,
            tile.weights if tile.weights is not None else numbers, *of_state, numbers, size,
            has_coefficient, tile.skip is not None, tile.weights is not None, tile.takes_over,
            float(hyper["weight_decay"]) != 0.0, bool(hyper.get("maximize")),
            BLOCK=_BLOCK, enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip


def _numbers_of(hyper: Hyper, number: int, device: torch.device) -> torch.Tensor:
    """Return the hyperparameters and 1 - beta^number on the device, computed as by torch's kernel."""
    global _of_step
    if number != _of_step:
        _numbers.clear()
        _of_step = number
    given = tuple(float(each) for each in (hyper["lr"], *hyper["betas"], hyper["weight_decay"], hyper["eps"]))
    key = (device, torch.cuda.current_stream(device).cuda_stream, given)
    found = _numbers.get(key)
    if found is None:
        # A copy of a tensor from host memory would wait for the device.
        values = torch.cat([torch.full((1,), each, dtype=torch.float32, device=device) for each in given])
        found = _numbers[key] = torch.cat([values, 1 - torch.pow(values[1:3], torch.full_like(values[1:3], number))])
    return found


def try_out() -> None:
    """Raise if the kernel does not compile, does not run, or differs from torch."""
    size = 1 << 16
    generator = torch.Generator("cuda").manual_seed(1)
    hyper = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    tensors = [torch.randn(size, device="cuda", generator=generator), *torch.zeros(2, size, device="cuda")]
    expected = [tensor.clone() for tensor in tensors]
    for number in (1, 2, 3):
        gradient = torch.randn(size, device="cuda", generator=generator) * 10.0**-number
        held = dict(zip((MASTER, "exp_avg", "exp_avg_sq"), map(Buffer.of, tensors), strict=True))
        step(StoredTile(held, gradient, 1.0, None, None), hyper, number)
        torch._fused_adamw_(
            [expected[0]], [gradient], [expected[1]], [expected[2]], [],
            [torch.full((), float(number), device="cuda")], lr=3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    if not all(map(torch.equal, tensors, expected)):
        raise RuntimeError("the AdamW kernel returns other values than torch")
