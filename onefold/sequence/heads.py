"""The exchange of attention heads: from a part of the sequence with all heads to the whole sequence with some heads.

[Note: exchange of heads]
Outside of attention, a rank has s of the n = S x s tokens, and all heads. Before attention, the ranks of a sequence
exchange queries, keys and values, so that each has all tokens of H / S heads; after attention they exchange back
(DeepSpeed-Ulysses). A rank sends (S - 1) / S of its queries, keys, values and outputs, and as many bytes in backward.

         before: tokens of rank 0, 1        in attention: all tokens
 rank 0  [ t0 ] heads 0 1 2 3               [ t0 t1 ] heads 0 1
 rank 1  [ t1 ] heads 0 1 2 3               [ t0 t1 ] heads 2 3

Grouped-query attention has fewer key heads. If S does not divide their number, each key head is repeated so often that
S does, but at most once for each query head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Exchange = Callable[[Tensor], Tensor]
"""Sends row r of a matrix to rank r of the sequence, and returns the matrix of the rows received from each rank."""


def key_head_repeats(num_heads: int, num_key_heads: int, size: int) -> int:
    """Return how often each key head is repeated before the exchange. Raise if heads cannot be divided."""
    if num_heads % size:
        fit = ", ".join(str(number) for number in range(1, num_heads + 1) if num_heads % number == 0)
        raise ValueError(
            f"sequence_parallel_size = {size} does not divide the {num_heads} attention heads of the model. Use one of "
            f"{fit}."
        )
    groups, rest = divmod(num_heads, num_key_heads)
    if rest:
        raise ValueError(f"{num_heads} query heads cannot share {num_key_heads} key heads equally. Change the model.")
    return next(n for n in range(1, groups + 1) if groups % n == 0 and num_key_heads * n % size == 0)


class _ScatterHeads(torch.autograd.Function):
    """All tokens of this rank's heads, from all heads of this rank's tokens. The inverse in backward."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.size = exchange, size
        return _scatter(exchange, size, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_gather(ctx.exchange, ctx.size, gradients)


class _GatherHeads(torch.autograd.Function):
    """All heads of this rank's tokens, from all tokens of this rank's heads. The inverse in backward."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, size: int, tensor: Tensor) -> Tensor:
        ctx.exchange, ctx.size = exchange, size
        return _gather(exchange, size, (tensor,))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *_scatter(ctx.exchange, ctx.size, (gradient,))


def scatter_heads(exchange: Exchange, size: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return query, key and value of all tokens, for this rank's heads. Shapes: (batch, heads, tokens, dim)."""
    repeats = key_head_repeats(query.shape[1], key.shape[1], size)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    return _ScatterHeads.apply(exchange, size, query, key, value)  # type: ignore[no-any-return, no-untyped-call]


def gather_heads(exchange: Exchange, size: int, output: Tensor) -> Tensor:
    """Return the outputs of all heads for this rank's tokens."""
    return _GatherHeads.apply(exchange, size, output)  # type: ignore[no-any-return, no-untyped-call]


def _scatter(exchange: Exchange, size: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    parts = [tensor.unflatten(1, (size, -1)).movedim(1, 0) for tensor in tensors]
    received = _send(exchange, parts)
    return tuple(part.movedim(0, 2).flatten(2, 3) for part in received)


def _gather(exchange: Exchange, size: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    parts = [tensor.unflatten(2, (size, -1)).movedim(2, 0) for tensor in tensors]
    received = _send(exchange, parts)
    return tuple(part.movedim(0, 1).flatten(1, 2) for part in received)


def _send(exchange: Exchange, parts: list[Tensor]) -> list[Tensor]:
    """Exchange tensors whose first dimension is the receiving rank, in one message for each rank."""
    sizes = [part[0].numel() for part in parts]
    received = exchange(_pack(parts, sizes))
    split = received.split(sizes, dim=1)
    return [got.view(part.shape) for got, part in zip(split, parts, strict=True)]


def _pack(parts: list[Tensor], sizes: list[int]) -> Tensor:
    """Return the matrix of the messages to each rank, from tensors with `sizes` elements for each."""
    if len(parts) == 1:
        return parts[0].flatten(1).contiguous()
    # Heads are strided, so `torch.cat` of flattened parts would copy them twice: to flatten them, and into the message.
    # Under autocast, a norm of queries and keys leaves them in fp32 next to values in bf16.
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    packed = parts[0].new_empty(len(parts[0]), sum(sizes), dtype=dtype)
    for columns, part in zip(packed.split(sizes, dim=1), parts, strict=True):
        columns.view(part.shape).copy_(part)
    return packed
