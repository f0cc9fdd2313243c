"""Matrices in FP8 with scales, and their products.

[Note: scales]
An FP8 matrix is a matrix times a scale, rounded: the scale maps the largest magnitude of the matrix (tensorwise), or of
each of its rows (rowwise), to the largest number of the format. A product multiplies the FP8 values, accumulates in
fp32, and multiplies by the inverses of both scales. Scales are dynamic: each matrix gets its scale when it is cast.
The scales of rows are powers of 2, which add no rounding of their own. A matrix with an infinite or NaN element becomes
NaN, so that overflow checks see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Inputs and weights are in the format with more digits, gradients in that with more range.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The hardware multiplies matrices whose sizes are multiples of this number.
ALIGNMENT = 16
_SMALLEST = 1e-12


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix in FP8. Its values times the inverse scale approximate the original."""

    values: Tensor
    inverse_scale: Tensor
    """One number, or one for each row as a column."""


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps a magnitude to the largest number of an FP8 format."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=_SMALLEST)).float()


def round_to_fp8(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor times a scale in FP8."""
    limit = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-limit, limit).to(dtype)


def to_fp8(matrix: Tensor, dtype: torch.dtype, *, by_row: bool) -> ScaledTensor:
    """Cast a matrix to FP8 with one scale, or with one for each row."""
    magnitudes = matrix.detach().abs()
    scale = scale_of(magnitudes.amax(dim=1, keepdim=True) if by_row else magnitudes.amax(), dtype)
    if by_row:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)  # without the digits after the first
    return ScaledTensor(round_to_fp8(matrix, scale, dtype), scale.reciprocal())


def transposed(matrix: ScaledTensor) -> ScaledTensor:
    """Return the transpose of a matrix with one scale, as a copy, because products need rows in memory."""
    return ScaledTensor(matrix.values.t().contiguous(), matrix.inverse_scale)


def multiply(left: ScaledTensor, right: ScaledTensor, dtype: torch.dtype, *, emulate: bool, fast: bool) -> Tensor:
    """Return the product of a matrix and the transpose of another one. The columns of both are contracted.

    `fast`: accumulate with fewer bits where the hardware can, as is usual for outputs but not for gradients.
    """
    if emulate:
        product = left.values.float() @ right.values.float().t()
        return (product * (left.inverse_scale * right.inverse_scale.t())).to(dtype)
    by_row = left.inverse_scale.dim() > 0
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.inverse_scale,
        scale_b=right.inverse_scale.t() if by_row else right.inverse_scale,
        out_dtype=torch.bfloat16 if by_row else dtype,  # kernels for rows write no other format
        use_fast_accum=fast or by_row,
    ).to(dtype)


def pad_columns(matrix: ScaledTensor) -> ScaledTensor:
    """Append columns of zeros, which add nothing to a product, until their number is a multiple of the alignment."""
    missing = -matrix.values.shape[1] % ALIGNMENT
    if not missing:
        return matrix
    values = torch.nn.functional.pad(matrix.values.view(torch.uint8), (0, missing)).view(matrix.values.dtype)
    return ScaledTensor(values, matrix.inverse_scale)
