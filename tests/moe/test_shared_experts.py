"""Shared experts compute while tokens are exchanged, with the results of a run that computes them later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expert_cases import (
    batch_of,
    loss_of,
    make_model,
    settings_of,
    train,
    train_beside_torch,
    train_plainly,
    weights_of,
)
from models import more, rank, start
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


def test_they_compute_while_tokens_are_exchanged(on_ranks):
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


def exchanges_before_shared_experts_recomputed(num_forwards: int) -> list[int]:
    """Return how many exchanges have started when the shared expert runs, in forwards and recomputations of 3 steps."""
    engine = start(make_model("DeepseekV3", recomputes=True), settings_of(3, 2))
    found: list[int] = []
    shared = engine.module.model.layers[1].mlp.shared_experts
    shared.up_proj.register_forward_hook(lambda *_: found.append(exchanges(engine)))
    for step in range(3):
        losses = [loss_of(engine(**batch_of(num_forwards * step + each, rank()))) for each in range(num_forwards)]
        engine.backward(sum(losses))
        engine.step()
    engine.destroy()
    return found


@pytest.mark.parametrize("num_forwards", [1, 2])
def test_they_compute_early_in_every_step_with_recomputation(on_ranks, num_forwards):
    """A forward has two exchanges, and so have a recomputation and a backward."""
    expected, started = [], 0
    for _ in range(3):
        expected += [started + 2 * number + 1 for number in range(num_forwards)]
        started += 2 * num_forwards
        expected += [started + 4 * number + 1 for number in range(num_forwards)]
        started += 4 * num_forwards
    assert on_ranks(2, exchanges_before_shared_experts_recomputed, num_forwards) == [expected] * 2


class OneBlock(nn.Module):
    """A model of one recomputed block, of which only the shared expert is trained."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(37, 16), block, nn.Linear(16, 37)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("shared_experts" in name)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        hidden = checkpoint(self.block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x + hidden).flatten(0, 1), labels.flatten())


def train_shared_expert_only() -> tuple[Any, Any]:
    model = OneBlock(make_model("DeepseekV3").model.layers[1].mlp)
    reference = copy.deepcopy(model)
    engine = start(model, settings_of(3, 2))
    found = train(engine)
    engine.destroy()
    return found, train_plainly(reference, 2)


def test_a_recomputation_that_ends_at_the_shared_expert_leaves_no_exchange_open(on_ranks):
    """No other tensor is saved after those of the shared expert, so that the checkpoint ends there."""
    for found, expected in on_ranks(2, train_shared_expert_only):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def interrupted() -> tuple[int, bool]:
    """Interrupt the shared expert on all ranks. Return how often, and whether the next loss is as before."""
    model = make_model("DeepseekV3")
    engine = start(model, settings_of(3, 2))
    engine.eval()
    attempts = []

    class Interrupted(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        attempts.append(1)
        raise Interrupted

    with torch.no_grad():
        before = loss_of(engine(**batch_of(0, rank())))
        handle = model.model.layers[1].mlp.shared_experts.act_fn.register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupted):
            engine(**batch_of(0, rank()))
        handle.remove()
        again = loss_of(engine(**batch_of(0, rank())))
    engine.destroy()
    return len(attempts), torch.equal(before, again)


def test_an_exchange_ends_if_the_shared_expert_raises(on_ranks):
    assert on_ranks(2, interrupted) == [(1, True)] * 2


class OtherCall(nn.Module):
    """A block that calls its shared expert with other tokens than its input, or under other conditions."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = inner.gate, inner.experts, inner.shared_experts
        self.kind = kind
        for parameter in self.shared_experts.parameters():  # so that their output matters
            nn.init.normal_(parameter, std=0.3)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        _, weights, index = self.gate(hidden_states.clone())
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        routed = self.experts(tokens, index, weights).view(hidden_states.shape)
        if self.kind == "other input":
            return routed + self.shared_experts(2 * hidden_states)
        if self.kind == "changed input":
            return routed + self.shared_experts(hidden_states.mul_(2))
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return routed + self.shared_experts(hidden_states)
        with torch.no_grad():
            shared = self.shared_experts(hidden_states)
        return routed + shared


class Scale(nn.Module):
    """A norm whose output its backward does not need, so that a block may write to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def train_other_call(kind: str, recomputes: bool) -> tuple[Any, Any, bool]:
    """Return losses and norms, those of plain torch, and whether forwards are restored."""
    model = make_model("DeepseekV3", recomputes=recomputes)
    layer = model.model.layers[1]
    layer.mlp = OtherCall(layer.mlp, kind)
    if kind == "changed input":
        layer.post_attention_layernorm = Scale()
    reference = copy.deepcopy(model)
    engine = start(model, settings_of(3, 2))
    found = train(engine)
    engine.destroy()
    restored = "forward" not in vars(layer.mlp) and "forward" not in vars(layer.mlp.shared_experts)
    return found, train_plainly(reference, 2), restored


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["other input", "changed input", "autocast", "no gradient"])
def test_an_output_for_another_call_is_not_used(on_ranks, kind, recomputes):
    for found, expected, restored in on_ranks(2, train_other_call, kind, recomputes):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert restored
