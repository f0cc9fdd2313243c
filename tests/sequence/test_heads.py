"""The exchange of heads on its own: the bytes that it holds, and tensors of other dtypes and dimensions."""

from __future__ import annotations

import pytest
import torch
from live_bytes import Peaks

from onefold.sequence.heads import gather_heads, scatter_heads

SIZE, HEADS, TOKENS, DIM = 2, 4, 8, 16


def exchange(outgoing: torch.Tensor) -> torch.Tensor:
    """Exchange with a rank that sends what this rank sends."""
    return outgoing.clone()


def heads_of(batch: int, tokens: int = TOKENS, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    """Heads as models make them: the transposed output of a linear layer."""
    return torch.randn(batch, tokens, heads, dim).transpose(1, 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_an_exchange_holds_its_inputs_and_two_messages(batch):
    one = 4 * batch * HEADS * TOKENS * DIM
    with Peaks() as forward:
        inputs = [heads_of(batch).requires_grad_() for _ in range(3)]
        scattered = scatter_heads(exchange, SIZE, *inputs)
    assert forward.peak == (3 + 2 * 3) * one  # then the received message, and the tensors that are made of it
    assert forward.live == (3 + 3) * one
    with Peaks() as backward:
        gradients = [heads_of(batch, SIZE * TOKENS, HEADS // SIZE) for _ in range(3)]
        found = torch.autograd.grad(scattered, inputs, gradients)
    assert backward.peak == (3 + 2 * 3) * one
    assert sum(gradient.nbytes for gradient in found) == 3 * one

    with Peaks() as forward:
        output = heads_of(batch, SIZE * TOKENS, HEADS // SIZE).requires_grad_()
        gathered = gather_heads(exchange, SIZE, output)
    assert forward.peak == (1 + 2) * one
    with Peaks() as backward:
        torch.autograd.grad(gathered, output, heads_of(batch))
    assert backward.peak == (1 + 2) * one


def test_tensors_of_other_dtypes_and_dimensions():
    """Under autocast, a linear layer returns bf16, and a norm fp32."""
    query, key, value = heads_of(2).bfloat16().requires_grad_(), heads_of(2, heads=2), heads_of(2, heads=2, dim=6)
    found = scatter_heads(exchange, SIZE, query, key, value)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 3
    for tensor, given in zip(found, (query, key, value), strict=True):
        own = given.unflatten(1, (SIZE, -1)).float()
        assert torch.equal(tensor, torch.cat(list(own.unbind(1)), dim=2))
    (gradient,) = torch.autograd.grad(found[0], query, torch.ones_like(found[0]))
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, torch.ones_like(query))
