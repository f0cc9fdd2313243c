"""The codec's Triton kernels: the bits that `comm/codec.py` specifies, with one read and one write per value.

A program takes a few blocks of one row, or of one piece of it. Products and sums are not fused (`enable_fp_fusion` is
off), because a fused operation would round once where the specification rounds twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Adding this to a small number rounds it to an integer, half to even, in the lowest bits of the result.
MAGIC = tl.constexpr(12582912.0)
TINY = tl.constexpr(1e-30)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _quantize(x, BITS: tl.constexpr):
    """Quantize blocks of fp32 values. Return integers in the lowest bits of 32, and scales."""
    limit: tl.constexpr = (1 << (BITS - 1)) - 1.0
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.max(bits, axis=1)  # compared as integers, NaN is above infinity, and infinity above all other values
    amax = most.to(tl.float32, bitcast=True)
    finite = most < INFINITY_BITS
    usable = finite & (amax >= TINY)
    divisor = tl.where(usable, amax, 1.0)
    inverse = tl.where(usable, tl.math.div_rn(tl.full(divisor.shape, limit, tl.float32), divisor), 0.0)
    scale = tl.where(finite, tl.where(usable, amax * (1 / limit), 0.0), float("nan"))
    scaled = tl.where(usable[:, None], x, 0.0) * inverse[:, None]
    return (scaled + MAGIC).to(tl.int32, bitcast=True), scale


@triton.jit
def _store(q, scale, row, scales, block, mask, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the integers and scales of blocks in a row of bytes."""
    tl.store(scales + block, scale, mask=mask)
    if BITS == 8:
        packed = q.to(tl.int8)
    else:
        low, high = tl.split(tl.reshape(q, (q.shape[0], BLOCK // 2, 2)))
        packed = ((low & 0xF) | (high << 4)).to(tl.int8)
    width: tl.constexpr = BLOCK * BITS // 8
    tl.store(row + (block * width)[:, None] + tl.arange(0, width)[None, :], packed, mask=mask[:, None])


@triton.jit
def _load(row, scales, block, mask, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Load blocks of a row of bytes as fp32 values."""
    scale = tl.load(scales + block, mask=mask, other=0.0)
    width: tl.constexpr = BLOCK * BITS // 8
    q = tl.load(row + (block * width)[:, None] + tl.arange(0, width)[None, :], mask=mask[:, None], other=0)
    if BITS == 4:
        both = q.to(tl.int32)
        q = tl.reshape(tl.join((both << 28) >> 28, both >> 4), (both.shape[0], BLOCK))
    return q.to(tl.float32) * scale[:, None]


@triton.jit
def _load_sum(row, scales, row_bytes, block, mask, ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the same blocks of several rows, and add them in their order."""
    total = _load(row, scales, block, mask, BITS, BLOCK)
    for number in tl.static_range(1, ROWS):
        far = number * row_bytes
        total += _load(row + far, scales + far // 4, block, mask, BITS, BLOCK)
    return total


@triton.jit
def _encode(
    values, out, scales, per_piece, row_stride, piece_stride, row_bytes,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    mask = block < per_piece
    start = values + row * row_stride + piece * piece_stride
    x = tl.load(start + (block * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], mask=mask[:, None], other=0.0)
    q, scale = _quantize(x.to(tl.float32), BITS)
    before = piece * per_piece
    size = tl.num_programs(1) * per_piece * (BLOCK * BITS // 8)
    _store(
        q, scale, out + row * row_bytes + before * (BLOCK * BITS // 8), scales + (row * row_bytes + size) // 4 + before,
        block, mask, BITS, BLOCK,
    )  # fmt: skip


@triton.jit
def _decode(
    data, scales, out, per_row, row_bytes, out_stride,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    mask = block < per_row
    size = per_row * (BLOCK * BITS // 8)
    x = _load(data + row * row_bytes, scales + (row * row_bytes + size) // 4, block, mask, BITS, BLOCK)
    start = out + row * out_stride
    x = x.to(out.dtype.element_ty)
    tl.store(start + (block * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], x, mask=mask[:, None])


@triton.jit
def _add(
    data, scales, out, per_row, row_bytes,
    ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    mask = block < per_row
    size = per_row * (BLOCK * BITS // 8)
    total = _load_sum(data, scales + size // 4, row_bytes, block, mask, ROWS, BITS, BLOCK)
    tl.store(out + (block * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], total, mask=mask[:, None])


@triton.jit
def _recode(
    data, scales, out, out_scales, per_row, row_bytes, out_per_row, out_row_bytes,
    ROWS: tl.constexpr, BITS: tl.constexpr, OUT_BITS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    mask = block < out_per_row
    before = row * out_per_row
    size = per_row * (BLOCK * BITS // 8)
    first = data + before * (BLOCK * BITS // 8)
    total = _load_sum(first, scales + size // 4 + before, row_bytes, block, mask, ROWS, BITS, BLOCK)
    q, scale = _quantize(total, OUT_BITS)
    out_size = out_per_row * (BLOCK * OUT_BITS // 8)
    _store(
        q, scale, out + row * out_row_bytes, out_scales + (row * out_row_bytes + out_size) // 4,
        block, mask, OUT_BITS, BLOCK,
    )  # fmt: skip


# Blocks and warps per program. Small programs let a multiprocessor run many of them.
PER, NUM_WARPS = 4, 1


def _launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel. `grid` is (blocks of a piece, pieces of a row, rows)."""
    if 0 in grid:
        return
    with torch.cuda.device(arguments[0].device):
        kernel[triton.cdiv(grid[0], PER), grid[1], grid[2]](
            *arguments, **constants, PER=PER, num_warps=NUM_WARPS, enable_fp_fusion=False
        )


def _both(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of rows of bytes: as integers, and as the fp32 scales at their ends."""
    return data.view(torch.int8), data.view(torch.float32)


def encode(rows: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    """Encode rows of values into rows of bytes."""
    pieces = rows if rows.dim() == 3 else rows.unsqueeze(1)
    if pieces.stride(2) != 1 or pieces.shape[2] % block:  # a piece ends within a block
        pieces = rows.reshape(rows.shape[0], 1, -1)
    per_piece = pieces.shape[2] // block
    _launch(
        _encode, (per_piece, pieces.shape[1], pieces.shape[0]), pieces, *_both(out),
        per_piece, pieces.stride(0), pieces.stride(1), out.stride(0), BITS=bits, BLOCK=block,
    )  # fmt: skip


def decode(data: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    """Decode rows of bytes into rows of values."""
    assert out.stride(1) == 1
    per_row = out.shape[1] // block
    _launch(
        _decode, (per_row, 1, data.shape[0]), *_both(data), out,
        per_row, data.stride(0), out.stride(0), BITS=bits, BLOCK=block,
    )  # fmt: skip


def add(data: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    """Sum rows of bytes into fp32 values."""
    per_row = out.numel() // block
    _launch(
        _add, (per_row, 1, 1), *_both(data), out,
        per_row, data.stride(0), ROWS=data.shape[0], BITS=bits, BLOCK=block,
    )  # fmt: skip


def recode(data: torch.Tensor, out: torch.Tensor, bits: int, out_bits: int, block: int) -> None:
    """Sum rows of bytes, and encode the sum with another number of bits."""
    out_per_row = out.shape[1] // (block * out_bits // 8 + 4)
    _launch(
        _recode, (out_per_row, 1, out.shape[0]), *_both(data), *_both(out),
        out_per_row * out.shape[0], data.stride(0), out_per_row, out.stride(0),
        ROWS=data.shape[0], BITS=bits, OUT_BITS=out_bits, BLOCK=block,
    )  # fmt: skip


def try_out() -> None:
    """Compile each kernel and run it once, so that compiler errors show early."""
    for bits in (8, 4):
        values = torch.ones(1, 256, device="cuda")
        data = torch.empty(1, 256 * bits // 8 + 4, dtype=torch.uint8, device="cuda")
        encode(values, data, bits, 256)
        decode(data, values, bits, 256)
        add(data, values.view(-1), bits, 256)
        recode(data, data.clone(), bits, bits, 256)
    torch.cuda.synchronize()
