"""Shared experts compute while tokens travel to other experts, with the results of a run that computes them later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expert_cases import batch_of, loss_of, make_model, settings_of, train, train_beside_torch, weights_of
from models import more, rank, start
from torch import nn

import onefold


def exchanges(engine: onefold.Engine) -> int:
    return sum(row.calls for row in engine.ledger.rows() if row.operation == "tokens")


def exchanges_before_shared_experts(kind: str) -> tuple[int, int, int]:
    """Return how many exchanges of tokens have started when the shared expert runs, in forward and in backward."""
    engine = start(make_model(kind), settings_of(3, 2))
    block = engine.module.model.layers[1].mlp
    shared = getattr(block, "shared_experts", None) or block.shared_expert
    found: list[int] = []
    shared.up_proj.register_forward_hook(lambda *_: found.append(exchanges(engine) - before))
    shared.up_proj.register_full_backward_hook(lambda *_: found.append(exchanges(engine) - before))
    for other in (0, 1):  # The first step records the program.
        before, found[:] = exchanges(engine), []
        engine.backward(loss_of(engine(**batch_of(other, rank()))))
        engine.step()
    forward, backward = found
    engine.destroy()
    return forward, backward, exchanges(engine) - before


def test_they_compute_while_tokens_travel(on_ranks):
    """Only the second block of this model has experts: of its four exchanges, the first and the last overlap."""
    assert on_ranks(2, exchanges_before_shared_experts, "DeepseekV3") == [(1, 4, 4)] * 2


def test_a_block_that_calls_them_first_is_left_as_it_is(on_ranks):
    """Two blocks have experts. In the second one, four exchanges of the first are over; two of them are in backward."""
    assert on_ranks(2, exchanges_before_shared_experts, "Qwen2Moe") == [(2, 6, 8)] * 2


def train_with(hooked: bool, stage: int, **changes: Any) -> tuple[Any, Any, Any]:
    model = make_model("DeepseekV3", **changes)
    if hooked:  # So the shared expert computes when the block calls it.
        model.model.layers[1].mlp.shared_experts.register_forward_hook(lambda *_: None)
    engine = start(model, settings_of(stage, 2))
    losses, norms = train(engine)
    weights = weights_of(model)
    engine.destroy()
    return losses, norms, weights


@pytest.mark.parametrize(("stage", "recomputes"), [(3, False), more(3, True), more(1, False)])
def test_losses_norms_and_weights_are_those_of_a_later_call(on_ranks, stage, recomputes):
    early = on_ranks(2, train_with, False, stage, recomputes=recomputes)[0]
    later = on_ranks(2, train_with, True, stage, recomputes=recomputes)[0]
    assert early[:2] == later[:2]
    for name, value in early[2].items():
        assert torch.equal(value, later[2][name]), name


@pytest.mark.parametrize("kind", ["DeepseekV3", more("Qwen2Moe")])
@pytest.mark.parametrize(("world", "size", "stage"), [(2, 2, 3), more(4, 2, 3), more(4, 4, 1)])
def test_models_train_as_in_plain_torch(on_ranks, kind, world, size, stage):
    assert on_ranks(world, train_beside_torch, kind, size, stage, {}, {})[0]["divided"]


class OtherInput(nn.Module):
    """A block whose shared expert gets other tokens than its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = inner.gate, inner.experts, inner.shared_experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        _, weights, index = self.gate(hidden_states)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        routed = self.experts(tokens, index, weights).view(hidden_states.shape)
        return routed + self.shared_experts(2 * hidden_states)


def train_other_input() -> tuple[bool, bool]:
    """Return whether the loss is that of plain torch, and whether forwards are restored."""
    model = make_model("DeepseekV3")
    model.model.layers[1].mlp = OtherInput(model.model.layers[1].mlp)
    reference = copy.deepcopy(model)
    engine = start(model, settings_of(3, 2))
    close = []
    for _ in range(2):
        found, expected = (loss_of(each(**batch_of(0, rank()))) for each in (engine, reference))
        close.append(torch.allclose(found, expected, rtol=1e-5, atol=1e-6))
    engine.destroy()
    block = model.model.layers[1].mlp
    return all(close), "forward" not in vars(block) and "forward" not in vars(block.shared_experts)


def test_an_output_for_other_tokens_is_not_used(on_ranks):
    assert on_ranks(2, train_other_input) == [(True, True)] * 2
