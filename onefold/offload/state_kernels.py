"""Triton kernels for the formats of masters and states, bit-equal to `state_codec.py`.

Each value is read and written once. Multiply-adds are not fused (`enable_fp_fusion` is off), and quotients and roots
are rounded to nearest as IEEE 754 defines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from onefold.offload import state_codec
from onefold.plan.state_formats import BF16_STOCHASTIC, BLOCK, INT8, INT8_SQUARES, SPLIT_8, SPLIT_16, StateFormat

# The constants that select a format in the kernels. PLAIN is fp32.
BYTES, BYTES_OF_SQUARES, PLAIN, ROUNDED, SPLIT_TO_16, SPLIT_TO_8 = (tl.constexpr(number) for number in range(6))
KINDS = {INT8: 0, INT8_SQUARES: 1, None: 2, BF16_STOCHASTIC: 3, SPLIT_16: 4, SPLIT_8: 5}

# Blocks per Triton program.
PER_PROGRAM = 8
OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}

_TINY = tl.constexpr(state_codec.TINY)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_SIZE = tl.constexpr(BLOCK)


@triton.jit
def load_values(first, second, block, place, inside, KIND: tl.constexpr):
    """Load blocks of values as fp32. `first` and `second` are the parts of the format."""
    if KIND <= BYTES_OF_SQUARES:
        scale = tl.load(second + block, mask=block * _SIZE < inside, other=0.0)[:, None]
        code = tl.load(first + place, mask=place < inside, other=0).to(tl.float32)
        if KIND == BYTES:
            root = tl.math.div_rn(code, tl.full(code.shape, 127.0, tl.float32))
            value = (root * tl.abs(root)) * scale
        else:
            root = tl.math.div_rn(code, tl.full(code.shape, 255.0, tl.float32))
            square = root * root
            value = (square * square) * scale
    elif KIND >= SPLIT_TO_16:
        weight = tl.load(first + place, mask=place < inside, other=0.0).to(tl.float32)
        rest = tl.load(second + place, mask=place < inside, other=0).to(tl.int32)
        if KIND == SPLIT_TO_8:
            rest = rest * 256
        rest = tl.where((weight == 0.0) & (rest < 0), 0, rest)
        value = (weight.to(tl.int32, bitcast=True) + rest).to(tl.float32, bitcast=True)
    else:
        value = tl.load(first + place, mask=place < inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def store_values(value, first, second, block, place, inside, seed, start, KIND: tl.constexpr, DITHERS: tl.constexpr):
    """Store blocks of fp32 values. `seed` and `start` belong to the dither and are used only if DITHERS is true."""
    bits = value.to(tl.int32, bitcast=True)
    if KIND <= BYTES_OF_SQUARES:
        # Compared as integers, NaN exceeds infinity, and infinity exceeds all finite values.
        most = tl.max(bits & 0x7FFFFFFF, axis=1)
        largest = most.to(tl.float32, bitcast=True)
        finite = most < _INFINITY_BITS
        usable = finite & (largest >= _TINY)
        scale = tl.where(usable, largest, tl.where(finite, 0.0, float("nan")))
        tl.store(second + block, scale, mask=block * _SIZE < inside)
        divisor = tl.where(usable, largest, 1.0)[:, None]
        magnitude = tl.where(usable[:, None], tl.abs(value), 0.0)
        root = tl.math.sqrt_rn(tl.math.div_rn(magnitude, divisor + tl.zeros_like(magnitude)))
        if KIND == BYTES:
            code = (root * 127.0 + 0.5).to(tl.int32)
            code = tl.where(value < 0.0, -code, code)
            tl.store(first + place, code.to(tl.int8), mask=place < inside)
        else:
            code = (tl.math.sqrt_rn(root) * 255.0 + 0.5).to(tl.int32)
            tl.store(first + place, tl.maximum(code, 1).to(tl.uint8), mask=place < inside)
    elif KIND >= SPLIT_TO_16:
        weight = value.to(tl.bfloat16)
        tl.store(first + place, weight, mask=place < inside)
        rest = bits - weight.to(tl.float32).to(tl.int32, bitcast=True)
        if KIND == SPLIT_TO_16:
            rest = tl.minimum(tl.maximum(rest, -32767), 32767)
            tl.store(second + place, rest.to(tl.int16), mask=place < inside)
        else:
            rest = (rest + 128) >> 8
            rest = tl.minimum(tl.maximum(rest, -127), 127)
            tl.store(second + place, rest.to(tl.int8), mask=place < inside)
    elif KIND == ROUNDED and DITHERS:
        nearest = value.to(tl.bfloat16)
        mixed = (place + start).to(tl.int32) * -1640531527 + seed
        mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * -2048144789
        mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * -1028477387
        mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) & 0xFFFF
        rounded = ((bits + mixed) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        finite = (nearest.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITY_BITS
        tl.store(first + place, tl.where(finite, rounded, nearest), mask=place < inside)
    else:
        tl.store(first + place, value.to(first.dtype.element_ty), mask=place < inside)


@triton.jit
def places_of_blocks(PER: tl.constexpr):
    """Return the indices of the blocks of this program, and of their values."""
    block = tl.program_id(0).to(tl.int64) * PER + tl.arange(0, PER)
    return block, block[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]


@triton.jit
def _decode(first, second, out, size, KIND: tl.constexpr, PER: tl.constexpr):
    block, place = places_of_blocks(PER)
    tl.store(out + place, load_values(first, second, block, place, size, KIND), mask=place < size)


@triton.jit
def _encode(values, first, second, size, seed, start, KIND: tl.constexpr, DITHERS: tl.constexpr, PER: tl.constexpr):
    block, place = places_of_blocks(PER)
    value = tl.load(values + place, mask=place < size, other=0.0)
    store_values(value, first, second, block, place, size, seed, start, KIND, DITHERS)


def grid_of(size: int) -> tuple[int]:
    return (triton.cdiv(size, BLOCK * PER_PROGRAM),)


def two_parts(parts: Sequence[Any]) -> tuple[Any, Any]:
    """Return two parts. The second one is unused by kernels if the format has a single part."""
    return parts[0], parts[-1]


def decode(format: StateFormat, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Decode values into `out`."""
    if out.numel():
        with torch.cuda.device(out.device):
            _decode[grid_of(out.numel())](*two_parts(parts), out, out.numel(), KINDS[format], PER_PROGRAM, **OPTIONS)


def encode(
    format: StateFormat, values: torch.Tensor, parts: Sequence[torch.Tensor], dither: state_codec.Dither | None
) -> None:
    """Encode values into the parts."""
    if values.numel():
        seed, start = (dither.seed, dither.start) if dither is not None else (0, 0)
        with torch.cuda.device(values.device):
            _encode[grid_of(values.numel())](
                values, *two_parts(parts), values.numel(), seed, start, KINDS[format], dither is not None, PER_PROGRAM,
                **OPTIONS,
            )  # fmt: skip


def try_out() -> None:
    """Raise if the kernels do not compile, do not run, or differ from torch."""
    values = torch.linspace(-1.0, 1.0, 2 * BLOCK, dtype=torch.float32, device="cuda")
    for format in (INT8, INT8_SQUARES, BF16_STOCHASTIC, SPLIT_16, SPLIT_8):
        of_form = values.abs() if format is INT8_SQUARES else values
        found = [torch.zeros(p.numel(2 * BLOCK), dtype=p.dtype, device="cuda") for p in format.parts]
        wanted = [torch.zeros_like(part) for part in found]
        dither = state_codec.Dither(1, "weight", 7)
        encode(format, of_form, found, dither)
        state_codec.encode_in_torch(format, of_form, wanted, dither)
        decode(format, found, back := torch.empty_like(values))
        state_codec.decode_in_torch(format, wanted, plain := torch.empty_like(values))
        if not (all(map(torch.equal, found, wanted)) and torch.equal(back, plain)):
            raise RuntimeError(f"the kernels for {format.name} return other values than torch")
