"""Attention and dropout on the meta device, with the tensors that their CUDA kernels save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from onefold.tools.estimate.work import OpCall, Work

ATTENTION = "flash attention is assumed: the scores are not stored"


@contextmanager
def as_on_cuda(work: Work) -> Iterator[None]:
    """Replace attention and dropout by versions that save the same tensors as their CUDA kernels.

    The functions themselves are patched, because a torch function mode would not see recomputed forwards.
    """
    before = F.scaled_dot_product_attention, F.dropout
    F.scaled_dot_product_attention, F.dropout = partial(_attend, work), _drop_out
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = before


def _drop_out(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _attend(
    work: Work,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return _Attention.apply(query, key, value, work, is_causal)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, work: Work, is_causal: bool
    ) -> torch.Tensor:
        work.is_inside = True
        *batch, heads, rows, _ = query.shape
        out = query.new_empty(*batch, rows, heads, value.shape[-1]).transpose(-2, -3)
        sums = query.new_empty(*batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        # Two products of rows x columns x width; a causal mask leaves half of them.
        ctx.flops = 4 * query.numel() * key.shape[-2] * (0.5 if is_causal else 1.0)
        ctx.work, ctx.is_causal, work.is_inside = work, is_causal, False
        work.flops += ctx.flops
        work.num_ops += 1
        work.calls[OpCall.of(attend, (query, key, value, is_causal), {})] += 1
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, _, _ = ctx.saved_tensors
        ctx.work.flops += 2.5 * ctx.flops
        ctx.work.num_ops += 3
        ctx.work.calls[OpCall.of(attend_backward, (query, key, value, ctx.is_causal), {})] += 1
        ctx.work.is_inside = True
        accumulator = torch.empty_like(query, dtype=torch.float32)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del accumulator
        ctx.work.is_inside = False
        return (*gradients, None, None)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Run the forward of attention."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def attend_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> Any:
    """Run the forward and backward of attention. `OpTimer` subtracts the time of the forward."""
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        found = attend(inputs[0], inputs[1], inputs[2], is_causal)
    return torch.autograd.grad(found, inputs, found.detach())
