"""Triton kernels of `scaled_tensor.py`: a cast to FP8 and a transpose, with one read and one write per value.

torch needs five passes over memory for the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _cast(
    source, largest, rows_out, columns_out, inverse, num_rows, num_columns, row_stride, column_stride, columns_pitch,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, WRITES_ROWS: tl.constexpr, WRITES_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast a tile. `columns_out` is the transpose, whose rows have `columns_pitch` elements, the last of them 0."""
    most = tl.load(largest).to(tl.float64)
    most = tl.maximum(most, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    scale = (LIMIT / most).to(tl.float32)
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    x = tl.load(source + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32) * scale
    x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(FORMAT)
    if WRITES_ROWS:
        tl.store(rows_out + row * num_columns + column, x, mask=inside)
    if WRITES_COLUMNS:
        kept = (row < columns_pitch) & (column < num_columns)
        tl.store(columns_out + column * columns_pitch + row, x, mask=kept)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(inverse, tl.math.div_rn(1.0, scale))


@triton.jit
def _transpose(source, target, num_rows, num_columns, pitch, BLOCK: tl.constexpr):
    """Transpose a tile of bytes. The rows of the target have `pitch` elements, the last ones of them 0."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    x = tl.load(source + row * num_columns + column, mask=(row < num_rows) & (column < num_columns), other=0)
    tl.store(target + column * pitch + row, x, mask=(row < pitch) & (column < num_columns))


def cast(source: Tensor, largest: Tensor, rows_out: Tensor | None, columns_out: Tensor | None, inverse: Tensor) -> None:
    """Cast a matrix with one scale to FP8, as it is and transposed, and store the inverse scale.

    A transpose may have more columns than the matrix has rows. They become 0.
    """
    if source.dtype == torch.float32 and rows_out is not None and columns_out is not None:
        # Triton 3.6 writes wrong values in the second store of a tile that was cast from fp32 elements.
        cast(source, largest, rows_out, None, inverse)
        rows_out = None
    made: Any = rows_out if rows_out is not None else columns_out
    num_rows, num_columns = source.shape
    pitch = columns_out.shape[1] if columns_out is not None else 0
    grid = triton.cdiv(max(num_rows, pitch), _BLOCK), triton.cdiv(num_columns, _BLOCK)
    _cast[grid](
        source, largest, rows_out, columns_out, inverse, num_rows, num_columns, *source.stride(), pitch,
        LIMIT=torch.finfo(made.dtype).max, FORMAT=_FORMATS[made.dtype], WRITES_ROWS=rows_out is not None,
        WRITES_COLUMNS=columns_out is not None, BLOCK=_BLOCK,
    )  # fmt: skip


def transpose(source: Tensor, target: Tensor) -> None:
    """Transpose a matrix of bytes. The target may have more columns, which become 0."""
    num_rows, num_columns = source.shape
    grid = triton.cdiv(target.shape[1], _BLOCK), triton.cdiv(num_columns, _BLOCK)
    _transpose[grid](source, target, num_rows, num_columns, target.shape[1], BLOCK=_BLOCK)


def try_out() -> None:
    """Compile both kernels on the current device."""
    source = torch.ones(16, 32, device="cuda")
    rows, columns = (torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda") for shape in ((16, 32), (32, 16)))
    inverse = torch.empty((), device="cuda")
    cast(source, source.amax(), rows, columns, inverse)
    transpose(rows.view(torch.uint8), columns.view(torch.uint8))
    torch.cuda.synchronize()
