"""Linear layers that multiply in FP8: output, input gradient and weight gradient.

[Note: the three products]
    output          = input x weight^T             columns of inputs
    input gradient  = gradient x weight            columns of outputs
    weight gradient = gradient^T x input           tokens
Both factors of a product are stored with the contracted dimension last, as the hardware needs them. So the second and
third products read transposes. With one scale per tensor, these are copies of the FP8 values: the input is saved for
backward in FP8. With one scale per row, the transposes have other rows and are cast again from the original tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from onefold.fp8.scaled_tensor import E4M3, E5M2, ScaledTensor, multiply, pad_columns, to_fp8, transposed

_CAST = "_onefold_fp8"


@dataclass(eq=False)
class Fp8State:
    """How a layer multiplies, and how often it did."""

    name: str
    by_row: bool
    emulate: bool
    gathered: ScaledTensor | None = None
    """The weight in FP8 as an all-gather delivers it. Its values are present while the layer is unsharded."""
    num_products: int = 0
    """The number of FP8 products, without those in compiled graphs."""
    is_compiled: bool = False
    """Whether a compiled graph has products of this layer."""

    def count(self) -> None:
        """Count one product."""
        if torch.compiler.is_compiling():
            self.is_compiled = True
        else:
            self.num_products += 1


class Fp8Linear(nn.Linear):
    """`nn.Linear` in FP8. Layers get this class in place (`convert_layers`), so that their parameters stay the same."""

    fp8: Fp8State

    def forward(self, input: Tensor) -> Tensor:
        """Return the output in the data type of the input, or of autocast."""
        state, device, dtype = self.fp8, input.device.type, input.dtype
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        elif dtype != self.weight.dtype:
            raise RuntimeError(
                f"{state.name} got an input in {dtype}, but its weight is {self.weight.dtype}. Cast the input, or use "
                "torch_autocast."
            )
        gathered = state.gathered
        values, inverse_scale = (gathered.values, gathered.inverse_scale) if gathered is not None else (None, None)
        output = _Multiply.apply(input, self.weight, values, inverse_scale, state, dtype)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output  # type: ignore[no-any-return]


class _Multiply(torch.autograd.Function):
    """The three products of a layer. See [Note: the three products]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        gathered: Tensor | None,
        gathered_scale: Tensor | None,
        state: Fp8State,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.state, ctx.dtypes, ctx.shape = state, (input.dtype, weight.dtype), input.shape
        rows = input.reshape(-1, input.shape[-1])
        of_input = _input_in_fp8(input, rows, by_row=state.by_row)
        of_weight = _weight_in_fp8(weight, gathered, gathered_scale, by_row=state.by_row)
        saved: tuple[Tensor | None, ...] = (None, None)
        if ctx.needs_input_grad[1]:  # otherwise the input is not needed in backward
            saved = (rows, None) if state.by_row else (of_input.values, of_input.inverse_scale)
        # A weight that is gathered in FP8 has no other values.
        ctx.save_for_backward(*saved, weight if gathered is None else None, gathered, gathered_scale)
        state.count()
        output = multiply(of_input, of_weight, dtype, emulate=state.emulate, fast=True)
        return output.view(*input.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        state, by_row = ctx.state, ctx.state.by_row
        input, input_scale, weight, gathered, gathered_scale = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_input, to_weight = ctx.needs_input_grad[:2]
        of_gradient = to_fp8(rows, E4M3 if by_row else E5M2, by_row=by_row)
        of_inputs = of_weights = None
        if to_input:
            if by_row:
                of_weight = to_fp8(weight.detach().t(), E4M3, by_row=True)
            else:
                of_weight = transposed(_weight_in_fp8(weight, gathered, gathered_scale, by_row=False))
            of_inputs = multiply(of_gradient, of_weight, ctx.dtypes[0], emulate=state.emulate, fast=False)
            of_inputs = of_inputs.view(ctx.shape)
            state.count()
        if to_weight:
            if by_row:
                left, right = (to_fp8(each.t(), E4M3, by_row=True) for each in (rows, input))
            else:
                left, right = transposed(of_gradient), transposed(ScaledTensor(input, input_scale))
            left, right = pad_columns(left), pad_columns(right)
            of_weights = multiply(left, right, ctx.dtypes[1], emulate=state.emulate, fast=False)
            state.count()
        return of_inputs, of_weights, None, None, None, None


def _input_in_fp8(input: Tensor, rows: Tensor, *, by_row: bool) -> ScaledTensor:
    """Cast the input of a layer, once for all layers that get the same tensor, such as queries, keys and values."""
    if torch.compiler.is_compiling() or input.is_inference():  # the compiler finds equal casts itself
        return to_fp8(rows, E4M3, by_row=by_row)
    version, found = getattr(input, _CAST, (None, None))
    if found is None or version != (input._version, by_row):
        found = to_fp8(rows, E4M3, by_row=by_row)
        setattr(input, _CAST, ((input._version, by_row), found))
    return found  # type: ignore[no-any-return]


def _weight_in_fp8(
    weight: Tensor, gathered: Tensor | None, inverse_scale: Tensor | None, *, by_row: bool
) -> ScaledTensor:
    """Return the weight that arrived in FP8, or cast it."""
    if gathered is not None and inverse_scale is not None and gathered.numel():
        return ScaledTensor(gathered, inverse_scale)
    return to_fp8(weight.detach(), E4M3, by_row=by_row)
