"""Linear layers that multiply in FP8: output, input gradient and weight gradient.

[Note: the three products]
    output          = input x weight^T             columns of inputs
    input gradient  = gradient x weight            columns of outputs
    weight gradient = gradient^T x input           tokens
Both factors of a product are stored with the contracted dimension last, as the hardware needs them. So the second and
third products read transposes. With one scale per tensor, a cast also writes the transpose, and the transposed input is
saved for backward, in FP8. With one scale per row, the transposes have other rows and are cast from the original
tensors, which are saved.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from onefold.fp8.scaled_tensor import (
    E4M3,
    E5M2,
    ScaledTensor,
    cast_to_fp8,
    multiply,
    to_fp8,
    to_fp8_by_row,
    transpose,
)


@dataclass(eq=False)
class Fp8State:
    """How a layer multiplies, and how often it did."""

    name: str
    weight: Tensor
    by_row: bool
    emulate: bool
    gathered: ScaledTensor | None = None
    """The weight in FP8 as an all-gather delivers it. Its values are present while the layer is unsharded."""
    num_products: int = 0
    """The number of FP8 products, without those in compiled graphs."""
    is_compiled: bool = False
    """Whether a compiled graph has products of this layer."""


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
        # `functional_call` and programs that replace the weight give the layer another one.
        gathered = state.gathered if self.weight is state.weight else None
        values, inverse_scale = (gathered.values, gathered.inverse_scale) if gathered is not None else (None, None)
        rows = input.reshape(-1, input.shape[-1])
        if torch.compiler.is_compiling():
            state.is_compiled = True
            _allow_in_graph()
            output = _MultiplyInGraph.apply(
                rows, self.weight, values, inverse_scale, state.by_row, state.emulate, dtype
            )  # type: ignore[no-untyped-call]
        else:
            output = _Multiply.apply(input, self.weight, values, inverse_scale, state, dtype)  # type: ignore[no-untyped-call]
        output = output.view(*input.shape[:-1], output.shape[-1])
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output  # type: ignore[no-any-return]


class _Multiply(torch.autograd.Function):
    """The three products of a layer in eager mode. See [Note: the three products]."""

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
        saved: tuple[Tensor | None, ...] = (None, None)
        if state.by_row:
            of_input, of_weight = to_fp8_by_row(rows), to_fp8_by_row(weight.detach())
            saved = (rows, None)
        else:
            of_input, for_backward = _input_in_fp8(input, rows, transposed=ctx.needs_input_grad[1])
            of_weight = _weight_in_fp8(weight, _scaled(gathered, gathered_scale))
            if for_backward is not None:
                saved = for_backward.values, for_backward.inverse_scale
        if not ctx.needs_input_grad[1]:
            saved = (None, None)
        # Backward uses the weight that is gathered then. Hooks on saved tensors do not copy it.
        ctx.weight = weight if gathered is not None else None
        ctx.save_for_backward(*saved, weight if gathered is None else None)
        state.num_products += 1
        return multiply(of_input, of_weight, dtype, emulate=state.emulate, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        state, needed = ctx.state, ctx.needs_input_grad[:2]
        input, input_scale, weight = ctx.saved_tensors
        weight, gathered = (weight, None) if ctx.weight is None else (ctx.weight, state.gathered)
        input = input if state.by_row else _scaled(input, input_scale)
        of_inputs, of_weights = _gradients(
            gradient, input, weight, gathered, ctx.dtypes, needed, by_row=state.by_row, emulate=state.emulate
        )
        state.num_products += sum(needed)
        return of_inputs.view(ctx.shape) if of_inputs is not None else None, of_weights, None, None, None, None


class _MultiplyInGraph(torch.autograd.Function):
    """The three products of a layer in a compiled model.

    Neither method has side effects, so the compiler may fuse the casts with earlier operations and choose what it
    saves for backward. Dynamo must not trace into the methods (`_allow_in_graph`): in torch 2.11 the weight then gets
    no gradient, without an error.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        gathered: Tensor | None,
        gathered_scale: Tensor | None,
        by_row: bool,
        emulate: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.by_row, ctx.emulate, ctx.dtypes = by_row, emulate, (rows.dtype, weight.dtype)
        ctx.save_for_backward(rows, weight, gathered, gathered_scale)
        if by_row:
            of_input, of_weight = to_fp8_by_row(rows), to_fp8_by_row(weight.detach())
        else:
            of_input, of_weight = cast_to_fp8(rows, E4M3), _weight_in_fp8(weight, _scaled(gathered, gathered_scale))
        return multiply(of_input, of_weight, dtype, emulate=emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, gathered, gathered_scale = ctx.saved_tensors
        input = rows if ctx.by_row else transpose(cast_to_fp8(rows, E4M3))
        gathered, needed = _scaled(gathered, gathered_scale), ctx.needs_input_grad[:2]
        of_inputs, of_weights = _gradients(
            gradient, input, weight, gathered, ctx.dtypes, needed, by_row=ctx.by_row, emulate=ctx.emulate
        )
        return of_inputs, of_weights, None, None, None, None, None


def _allow_in_graph() -> bool:
    """Register `_MultiplyInGraph`, so that Dynamo does not trace into it. Dynamo calls this when it traces a layer.

    Registration at import, by a decorator, would import the compiler in programs that do not compile.
    """
    torch.compiler.allow_in_graph(_MultiplyInGraph)
    return True


_allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _scaled(values: Tensor | None, inverse_scale: Tensor | None) -> ScaledTensor | None:
    """Return the matrix with these values, or None without values."""
    return ScaledTensor(values, inverse_scale) if values is not None and inverse_scale is not None else None


def _gradients(
    gradient: Tensor,
    input: Any,
    weight: Tensor,
    gathered: ScaledTensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    needed: tuple[bool, bool],
    *,
    by_row: bool,
    emulate: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the input and of the weight, as far as they are needed.

    `input` is the transposed input in FP8, or, with one scale for each row, the input itself.
    """
    rows, (to_input, to_weight) = gradient.reshape(-1, gradient.shape[-1]), needed
    factors: list[tuple[ScaledTensor, ScaledTensor] | None] = [None, None]
    if by_row:
        if to_input:
            factors[0] = to_fp8_by_row(rows), to_fp8_by_row(weight.detach().t())
        if to_weight:
            factors[1] = to_fp8_by_row(rows.t()), to_fp8_by_row(input.t())
    else:
        as_it_is, turned = to_fp8(rows, E5M2, as_it_is=to_input, transposed=to_weight)
        if as_it_is is not None:
            factors[0] = as_it_is, _weight_in_fp8(weight, gathered, transposed=True)
        if turned is not None:
            factors[1] = turned, input
    of_inputs, of_weights = (
        multiply(*some, dtype, emulate=emulate, fast=False) if some is not None else None
        for some, dtype in zip(factors, dtypes, strict=True)
    )
    return of_inputs, of_weights


class _LastCast:
    """The input that was cast last. Layers such as queries, keys and values get the same one, one after the other.

    Only activations that autograd has recorded are kept: programs may write to others without changing their version,
    for example to a static buffer.
    """

    def __init__(self) -> None:
        # A weak reference to the input, what its cast is valid for, the cast, and its transpose.
        self._kept: tuple[Any, Any, ScaledTensor, ScaledTensor | None] | None = None

    def find(self, input: Tensor) -> tuple[ScaledTensor | None, ScaledTensor | None]:
        """Return the cast of an input and its transpose, as far as they exist."""
        kept = self._kept
        if kept is not None and kept[0]() is input and kept[1] == self._valid_for(input):
            return kept[2:]
        return None, None

    def keep(self, input: Tensor, found: ScaledTensor, turned: ScaledTensor | None) -> None:
        """Keep the cast of an input, until it is freed or another one is cast."""
        self._kept = None
        if input.grad_fn is not None:
            self._kept = weakref.ref(input, self._forget), self._valid_for(input), found, turned

    @staticmethod
    def _valid_for(input: Tensor) -> tuple[int, Any]:
        return input._version, torch.cuda.current_stream(input.device) if input.is_cuda else None

    def _forget(self, reference: Any) -> None:
        kept = self._kept
        if kept is not None and kept[0] is reference:
            self._kept = None


_last_cast = _LastCast()


def _input_in_fp8(input: Tensor, rows: Tensor, *, transposed: bool) -> tuple[ScaledTensor, ScaledTensor | None]:
    """Cast the input of a layer, once for layers that get the same one."""
    found, turned = _last_cast.find(input)
    if found is None:
        found, turned = to_fp8(rows, E4M3, as_it_is=True, transposed=transposed)
    elif transposed and turned is None:
        turned = transpose(found)
    assert found is not None
    _last_cast.keep(input, found, turned)
    return found, turned if transposed else None


def _weight_in_fp8(weight: Tensor, gathered: ScaledTensor | None, *, transposed: bool = False) -> ScaledTensor:
    """Return the weight that arrived in FP8, or cast it. For the input gradient, it is transposed."""
    if gathered is not None:
        return transpose(gathered) if transposed else gathered
    as_it_is, turned = to_fp8(weight.detach(), E4M3, as_it_is=not transposed, transposed=transposed)
    found = turned if transposed else as_it_is
    assert found is not None
    return found
