"""Triton kernels for AdamW with fp32 states, which read any gradient and write the model weight as well.

They have the bits of torch's fused kernel, which needs a gradient in fp32 and leaves the model weight to another
kernel. Like it, they compute in fp32, with hyperparameters rounded to fp32. `step` updates one tile, `step_together`
several tiles in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from onefold.offload.buffer import Buffer
from onefold.optim.rules import MASTER, Hyper, StoredTile

_BLOCK = 1024
# Elements of a program that first looks up its tile.
_BLOCK_OF_TILES = 2048


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
    p = tl.load(master + place, mask=inside, other=0.0)
    m = tl.load(average + place, mask=inside, other=0.0)
    v = tl.load(squares + place, mask=inside, other=0.0)
    if TAKES_OVER:
        weight = tl.load(weights + place, mask=inside, other=0.0)
        p = tl.where(p.to(weight.dtype) != weight, weight.to(tl.float32), p)
    p, m, v = _updated(g, p, m, v, numbers, DECAYS, MAXIMIZES)
    tl.store(average + place, m, mask=inside)
    tl.store(squares + place, v, mask=inside)
    tl.store(master + place, p, mask=inside)
    if HAS_WEIGHTS:
        tl.store(weights + place, p.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _step_together(
    table, tile_of_block, one_gradient, one_master, one_weight, coefficient, skip, numbers,
    HAS_COEFFICIENT: tl.constexpr, SKIPS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, TAKES_OVER: tl.constexpr,
    DECAYS: tl.constexpr, MAXIMIZES: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step a block of elements of one tile. `table` has the rows of `_table_of`."""
    row = table + tl.load(tile_of_block + tl.program_id(0)) * 7
    gradient = tl.load(row).to(one_gradient.dtype)
    master = tl.load(row + 1).to(one_master.dtype)
    average = tl.load(row + 2).to(one_master.dtype)
    squares = tl.load(row + 3).to(one_master.dtype)
    weights = tl.load(row + 4).to(one_weight.dtype)
    size = tl.load(row + 5)
    if IS_ALIGNED:  # so that 16 bytes are loaded at once
        gradient, weights = tl.multiple_of(gradient, 16), tl.multiple_of(weights, 16)
        master, average = tl.multiple_of(master, 16), tl.multiple_of(average, 16)
        squares, size = tl.multiple_of(squares, 16), tl.multiple_of(size, 16)
    place = (tl.program_id(0) - tl.load(row + 6)) * BLOCK + tl.arange(0, BLOCK)
    if SKIPS:  # masks all elements
        size = tl.where(tl.load(skip) != 0.0, 0, size)
    inside = place < size
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_COEFFICIENT:
        g = g * tl.load(coefficient)
    p = tl.load(master + place, mask=inside, other=0.0)
    m = tl.load(average + place, mask=inside, other=0.0)
    v = tl.load(squares + place, mask=inside, other=0.0)
    if TAKES_OVER:
        weight = tl.load(weights + place, mask=inside, other=0.0)
        p = tl.where(p.to(weight.dtype) != weight, weight.to(tl.float32), p)
    p, m, v = _updated(g, p, m, v, numbers, DECAYS, MAXIMIZES)
    tl.store(average + place, m, mask=inside)
    tl.store(squares + place, v, mask=inside)
    tl.store(master + place, p, mask=inside)
    if HAS_WEIGHTS:
        tl.store(weights + place, p.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _updated(g, p, m, v, numbers, DECAYS: tl.constexpr, MAXIMIZES: tl.constexpr):
    """Return the new parameter and moments of a block, for the scaled gradient `g`."""
    if MAXIMIZES:
        g = -g
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
    return p - tl.math.div_rn(m * step_size, divisor), m, v


# The numbers of a step on the device, by device, stream and hyperparameters, until the next step.
_numbers: dict[tuple[Any, ...], torch.Tensor] = {}
_of_step = 0


def step(tile: StoredTile, hyper: Hyper, number: int) -> None:
    """Update the master and moments in place, and the model weight if the tile has one."""
    gradient, device = tile.gradient, tile.gradient.device
    numbers = _numbers_of(hyper, number, device)
    factor = _factor_of(tile)
    size = gradient.numel()
    with torch.cuda.device(device):
        _step[(triton.cdiv(size, _BLOCK),)](
            gradient, factor if factor is not None else numbers, tile.skip if tile.skip is not None else numbers,
            tile.weights if tile.weights is not None else numbers, *_state_of(tile), numbers, size,
            factor is not None, tile.skip is not None, tile.weights is not None, tile.takes_over,
            float(hyper["weight_decay"]) != 0.0, bool(hyper.get("maximize")),
            BLOCK=_BLOCK, enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip


def step_together(tiles: Sequence[StoredTile], hyper: Hyper, number: int) -> None:
    """Update tiles whose gradients, and whose weights, have the same dtype. They share coefficient and skip."""
    one, device = tiles[0], tiles[0].gradient.device
    numbers = _numbers_of(hyper, number, device)
    factor = _factor_of(one)
    table, tile_of_block, is_aligned = _table_of(tiles, device)
    with torch.cuda.device(device):
        _step_together[(tile_of_block.numel(),)](
            table, tile_of_block, one.gradient, numbers, one.weights if one.weights is not None else numbers,
            factor if factor is not None else numbers, one.skip if one.skip is not None else numbers, numbers,
            factor is not None, one.skip is not None, one.weights is not None, one.takes_over,
            float(hyper["weight_decay"]) != 0.0, bool(hyper.get("maximize")), is_aligned,
            BLOCK=_BLOCK_OF_TILES, enable_fp_fusion=False, num_warps=8,
        )  # fmt: skip


def _state_of(tile: StoredTile) -> list[torch.Tensor]:
    return [tile.held[name].tensor for name in (MASTER, "exp_avg", "exp_avg_sq")]


def _factor_of(tile: StoredTile) -> torch.Tensor | None:
    """Return the factor of the gradient on the device, or None if it is 1."""
    factor = tile.coefficient
    if isinstance(factor, torch.Tensor):
        return factor.to(torch.float32)
    return torch.full((), factor, dtype=torch.float32, device=tile.gradient.device) if factor != 1.0 else None


# Tables on the device, by device, stream and their rows. As a rule, addresses are those of the last step.
_tables: dict[tuple[Any, ...], torch.Tensor] = {}
_MAX_TABLES = 256


def _table_of(tiles: Sequence[StoredTile], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return the table of tiles, the tile of each block, and whether all addresses and sizes are multiples of 16.

    A row has the addresses of gradient, master, moments and weight, the number of elements, and the first block.
    """
    rows: list[tuple[int, ...]] = []
    sizes = []
    first = addresses = 0
    for tile in tiles:
        tensors = (tile.gradient, *_state_of(tile), *((tile.weights,) if tile.weights is not None else ()))
        row = [tensor.data_ptr() for tensor in tensors]
        for address in row:
            addresses |= address
        size = tile.gradient.numel()
        addresses |= size
        rows.append((*row, *(0,) * (5 - len(row)), size, first))
        sizes.append(triton.cdiv(size, _BLOCK_OF_TILES))
        first += sizes[-1]
    if len(_tables) >= _MAX_TABLES:
        _tables.clear()
    stream = torch.cuda.current_stream(device).cuda_stream
    key, places = (device, stream, *rows), (device, stream, *sizes)
    if key not in _tables:
        _tables[key] = _on_device(torch.tensor(rows, dtype=torch.int64), device)
    if places not in _tables:
        index = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
        _tables[places] = _on_device(index, device)
    return _tables[key], _tables[places], addresses % 16 == 0


def _on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True)


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
        values = _on_device(torch.tensor(given, dtype=torch.float32), device)
        found = _numbers[key] = torch.cat([values, 1 - torch.pow(values[1:3], torch.full_like(values[1:3], number))])
    return found


def try_out() -> None:
    """Raise if a kernel does not compile, does not run, or differs from torch."""
    size = 1 << 16
    generator = torch.Generator("cuda").manual_seed(1)
    hyper = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    tensors = [torch.randn(size, device="cuda", generator=generator), *torch.zeros(2, size, device="cuda")]
    expected = [tensor.clone() for tensor in tensors]
    for number in (1, 2, 3):
        gradient = torch.randn(size, device="cuda", generator=generator) * 10.0**-number
        held = dict(zip((MASTER, "exp_avg", "exp_avg_sq"), map(Buffer.of, tensors), strict=True))
        if number < 3:
            step(StoredTile(held, gradient, 1.0, None, None), hyper, number)
        else:
            cut = 1000
            parts = [slice(0, cut), slice(cut, size)]
            each = [{name: buffer[part] for name, buffer in held.items()} for part in parts]
            tiles = [StoredTile(of, gradient[part], 1.0, None, None) for of, part in zip(each, parts, strict=True)]
            step_together(tiles, hyper, number)
        torch._fused_adamw_(
            [expected[0]], [gradient], [expected[1]], [expected[2]], [],
            [torch.full((), float(number), device="cuda")], lr=3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    if not all(map(torch.equal, tensors, expected)):
        raise RuntimeError("the AdamW kernel returns other values than torch")
