"""A Triton kernel for Adam and AdamW with encoded states, which are decoded, updated and encoded in one pass.

It has the bits of `adam_in_single_operations` of `rules.py` between decoding and encoding by `state_codec.py`: products
and sums are not fused, and quotients and roots are rounded as in IEEE 754.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from onefold.offload.buffer import Buffer
from onefold.offload.state_codec import decode_in_torch, encode_in_torch
from onefold.offload.state_kernels import (
    KINDS,
    OPTIONS,
    PER_PROGRAM,
    grid_of,
    load_values,
    places_of_blocks,
    store_values,
    two_parts,
)
from onefold.optim.rules import MASTER, AdamNumbers, StoredTile, Tile, adam_in_single_operations
from onefold.plan.state_formats import BF16_STOCHASTIC, BLOCK, INT8, INT8_SQUARES, SPLIT_8, SPLIT_16


@triton.jit
def _step(
    gradient, coefficient, skip, weights,
    master, master_rest, average, average_rest, squares, squares_rest,
    size, decay, beta1, one_less_beta1, beta2, one_less_beta2, step_size, root, eps, sign,
    start, master_seed, average_seed, squares_seed,
    OF_MASTER: tl.constexpr, OF_AVERAGE: tl.constexpr, OF_SQUARES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, TAKES_OVER: tl.constexpr, DECOUPLED: tl.constexpr, SKIPS: tl.constexpr,
    DITHERS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    if SKIPS:  # masks all elements
        size = tl.where(tl.load(skip) != 0.0, 0, size)
    block, place = places_of_blocks(PER)
    g = tl.load(gradient + place, mask=place < size, other=0.0).to(tl.float32) * tl.load(coefficient)
    g = g * sign
    p = load_values(master, master_rest, block, place, size, OF_MASTER)
    m = load_values(average, average_rest, block, place, size, OF_AVERAGE)
    v = load_values(squares, squares_rest, block, place, size, OF_SQUARES)
    if TAKES_OVER:
        weight = tl.load(weights + place, mask=place < size, other=0.0)
        p = tl.where(p.to(weight.dtype) != weight, weight.to(tl.float32), p)
    if DECOUPLED:
        p = p * decay
    else:
        g = g + p * decay
    m = m * beta1 + g * one_less_beta1
    v = v * beta2 + (g * g) * one_less_beta2
    divisor = tl.math.div_rn(tl.math.sqrt_rn(v), root + tl.zeros_like(v)) + eps
    p = p - tl.math.div_rn(m, divisor) * step_size
    store_values(m, average, average_rest, block, place, size, average_seed, start, OF_AVERAGE, DITHERS)
    store_values(v, squares, squares_rest, block, place, size, squares_seed, start, OF_SQUARES, DITHERS)
    store_values(p, master, master_rest, block, place, size, master_seed, start, OF_MASTER, DITHERS)
    if HAS_WEIGHTS:
        tl.store(weights + place, p.to(weights.dtype.element_ty), mask=place < size)


def step(tile: StoredTile, numbers: AdamNumbers) -> None:
    """Update the encoded master and moments in place."""
    size, device = tile.gradient.numel(), tile.gradient.device
    factor = tile.coefficient
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=device)
    seeds: list[int] = []
    tensors: list[Any] = []
    for name in (MASTER, "exp_avg", "exp_avg_sq"):
        tensors += two_parts(tile.held[name].tensors)
        seeds.append(replace(tile.dither, state=name).seed if tile.dither is not None else 0)
    kinds = [KINDS[buffer.format] for buffer in _in_order(tile)]
    with torch.cuda.device(device):
        _step[grid_of(size)](
            tile.gradient, factor.to(torch.float32), tile.skip if tile.skip is not None else factor,
            tile.weights if tile.weights is not None else factor, *tensors, size,
            numbers.decay, numbers.beta1, 1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2,
            numbers.step_size, numbers.root, numbers.eps, numbers.sign,
            tile.dither.start if tile.dither is not None else 0, *seeds,
            *kinds, tile.weights is not None, tile.takes_over, numbers.decoupled,
            tile.skip is not None, tile.dither is not None, PER_PROGRAM, **OPTIONS,
        )  # fmt: skip


def _in_order(tile: StoredTile) -> list[Buffer]:
    return [tile.held[name] for name in (MASTER, "exp_avg", "exp_avg_sq")]


def step_in_torch(tile: StoredTile, numbers: AdamNumbers) -> None:
    """Update like `step`, with separate torch operations. This is the reference for the kernel."""
    values = {}
    for name, buffer in tile.held.items():
        if buffer.format is not None:
            values[name] = torch.empty(buffer.numel(), dtype=torch.float32, device=buffer.device)
            decode_in_torch(buffer.format, buffer.tensors, values[name])
        else:
            values[name] = buffer.tensor
    gradient = tile.gradient.to(torch.float32, copy=True).mul_(tile.coefficient)
    if tile.takes_over and tile.weights is not None:
        written = values[MASTER].to(tile.weights.dtype) != tile.weights
        values[MASTER].copy_(torch.where(written, tile.weights.to(torch.float32), values[MASTER]))
    adam_in_single_operations(Tile(values[MASTER], gradient, values), numbers)
    for name, buffer in tile.held.items():
        if buffer.format is not None:
            dither = replace(tile.dither, state=name) if tile.dither is not None else None
            encode_in_torch(buffer.format, values[name], buffer.tensors, dither)
    if tile.weights is not None:
        tile.weights.copy_(values[MASTER])


def try_out() -> None:
    """Raise if the kernel does not compile, does not run, or differs from torch."""
    numbers = AdamNumbers.of({"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1,
                              "decoupled_weight_decay": True}, 3)  # fmt: skip
    gradient = torch.linspace(-1.0, 1.0, 2 * BLOCK, dtype=torch.float32, device="cuda")
    for formats in (
        (None, INT8, INT8_SQUARES),
        (SPLIT_16, INT8, INT8_SQUARES),
        (SPLIT_8, INT8, INT8_SQUARES),
        (BF16_STOCHASTIC,) * 3,
    ):
        tiles = []
        for _ in range(2):
            buffers: dict[str, Buffer] = {}
            for name, state_format in zip((MASTER, "exp_avg", "exp_avg_sq"), formats, strict=True):
                if state_format is None:
                    buffers[name] = Buffer.of(gradient.clone())
                    continue
                parts = [torch.zeros(p.numel(2 * BLOCK), dtype=p.dtype, device="cuda") for p in state_format.parts]
                buffers[name] = Buffer(parts, 2 * BLOCK, state_format)
            tiles.append(StoredTile(buffers, gradient, 0.7, None, None))
        step(tiles[0], numbers)
        step_in_torch(tiles[1], numbers)
        for one, other in zip(_in_order(tiles[0]), _in_order(tiles[1]), strict=True):
            if not all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True)):
                raise RuntimeError("the Adam kernel returns other values than torch")
