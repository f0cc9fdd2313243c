"""Matrices in FP8 with scales, and their products.

[Note: scales]
An FP8 matrix is a matrix times a scale, rounded: the scale maps the largest magnitude of the matrix (tensorwise), or of
each of its rows (rowwise), to the largest number of the format. A product multiplies the FP8 values, accumulates in
fp32, and multiplies by the inverses of both scales. Scales are dynamic: each matrix gets its scale when it is cast.
The scales of rows are powers of 2, which add no rounding of their own. A matrix with an infinite or NaN element becomes
NaN, so that overflow checks see it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onefold.gpu_kernels import kernels_of

# Inputs and weights are in the format with more digits, gradients in that with more range.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The hardware multiplies matrices whose sizes are multiples of this number.
ALIGNMENT = 16
_SMALLEST = 1e-12
_kernels = kernels_of("onefold.fp8.cast_kernels", "casts to FP8")


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
    return (tensor.float() * scale).clamp(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def to_fp8_by_row(matrix: Tensor) -> ScaledTensor:
    """Cast a matrix to FP8 with a scale for each row. Columns of zeros make their number a multiple of 16."""
    scale = scale_of(_largest(matrix, by_row=True), E4M3)
    scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)  # without the digits after the first
    return ScaledTensor(_padded(round_to_fp8(matrix, scale, E4M3)), scale.reciprocal())


def cast_to_fp8(matrix: Tensor, dtype: torch.dtype) -> ScaledTensor:
    """Cast a matrix to FP8 with one scale, in operations of torch."""
    scale = scale_of(_largest(matrix), dtype)
    return ScaledTensor(round_to_fp8(matrix, scale, dtype), scale.reciprocal())


def to_fp8(
    matrix: Tensor, dtype: torch.dtype, *, as_it_is: bool, transposed: bool
) -> tuple[ScaledTensor | None, ScaledTensor | None]:
    """Cast a matrix to FP8 with one scale. Return it as it is, and its transpose as `transpose` does, or None."""
    kernels = _kernels_for(matrix)
    if kernels is None or not matrix.numel():
        found = cast_to_fp8(matrix, dtype)
        return found if as_it_is else None, transpose(found) if transposed else None
    largest = _largest(matrix)
    num_rows, num_columns = matrix.shape
    rows = matrix.new_empty(num_rows, num_columns, dtype=dtype) if as_it_is else None
    columns = matrix.new_empty(num_columns, _aligned(num_rows), dtype=dtype) if transposed else None
    inverse = largest.new_empty((), dtype=torch.float32)
    kernels.cast(matrix.detach(), largest, rows, columns, inverse)
    return tuple(None if values is None else ScaledTensor(values, inverse) for values in (rows, columns))  # type: ignore[return-value]


def _is_traced(tensor: Tensor) -> bool:
    """Return whether a compiler traces operations on a tensor: it passes subclasses, such as `FakeTensor`."""
    return type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter


def _kernels_for(tensor: Tensor) -> Any:
    """Return the Triton kernels, or None if torch computes with this tensor."""
    return None if _is_traced(tensor) else _kernels(tensor)


def _largest(matrix: Tensor, *, by_row: bool = False) -> Tensor:
    """Return the largest magnitude of a matrix, or of each of its rows as a column. Without elements, it is 0."""
    if not matrix.numel():  # of an expert without tokens, for example
        return matrix.new_zeros((matrix.shape[0], 1) if by_row else ())
    matrix = matrix.detach()
    if _is_traced(matrix):  # the compiler fuses these two with what computes the matrix
        return matrix.abs().amax(1, keepdim=True) if by_row else matrix.abs().amax()
    largest: Tensor = torch.linalg.vector_norm(matrix, torch.inf, dim=1 if by_row else None, keepdim=by_row)
    return largest


def transpose(matrix: ScaledTensor) -> ScaledTensor:
    """Return the transpose of a matrix with one scale, as a copy, because products need rows in memory.

    Columns of zeros, which add nothing to a product, make their number a multiple of 16.
    """
    values = matrix.values
    kernels = _kernels_for(values)
    if kernels is None or not values.numel():
        return ScaledTensor(_padded(values.t().contiguous()), matrix.inverse_scale)
    target = values.new_empty(values.shape[1], _aligned(values.shape[0]))
    kernels.transpose(values.view(torch.uint8), target.view(torch.uint8))
    return ScaledTensor(target, matrix.inverse_scale)


def _padded(values: Tensor) -> Tensor:
    missing = _aligned(values.shape[1]) - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def multiply(left: ScaledTensor, right: ScaledTensor, dtype: torch.dtype, *, emulate: bool, fast: bool) -> Tensor:
    """Return the product of a matrix and the transpose of another one. The columns of both are contracted.

    `fast`: accumulate with fewer bits where the hardware can, as is usual for outputs but not for gradients.
    """
    if not (left.values.numel() and right.values.numel()):
        return left.values.new_zeros(left.values.shape[0], right.values.shape[0], dtype=dtype)
    if emulate:
        with _without_autocast(left.values.device.type):
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


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Multiply in fp32 although autocast is enabled: sums of unscaled products do not fit in fp16."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
