"""Programs that read, write and replace weights in FP8: stage 3 must not differ from stage 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batches, first_difference, more, rank, start, train
from test_fp8 import Wide, settings
from torch import nn
from torch.func import functional_call

from onefold.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param
from onefold.zero import GatheredParameters


def evaluated(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(*batches(1, seed=9)[0]).item()
    engine.train()
    return loss


def run_again_after_destroy(made: Callable[[nn.Module], Any]) -> Any:
    engine = made(Wide())
    train(engine, 2)
    model = engine.module
    engine.destroy()
    with GatheredParameters(list(model.parameters())):
        values = [each.detach().clone() for each in model.parameters()]
    return values, train(made(model), 2)


class WithFunctionalCall(Wide):
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        given = {"up.weight": torch.full((64, 32), 0.01, dtype=torch.bfloat16)}
        h = functional_call(self.blocks[0], given, (self.embed(x),))
        return self.head(self.blocks[2](self.blocks[1](h)))


def functional_calls(made: Callable[[nn.Module], Any]) -> Any:
    return train(made(WithFunctionalCall()), 3)


def replaced_weight(made: Callable[[nn.Module], Any]) -> Any:
    engine = made(Wide())
    train(engine, 2)
    other = nn.Parameter(torch.full((64, 32), 0.01, dtype=torch.bfloat16), requires_grad=False)
    engine.module.blocks[0].up.weight = other
    return evaluated(engine)


def backward_after_a_step(made: Callable[[nn.Module], Any]) -> Any:
    engine = made(Wide())
    first, second = batches(2)
    late, loss = engine(*first), engine(*second)
    for each in (loss, late):
        engine.backward(each)
        engine.step()
    return train(engine, 2)


class WithoutTokens(Wide):
    """A net that calls a block with an empty batch on one rank, as experts are."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        expert = self.blocks[0](h.flatten(0, 1)[: 3 * rank()])
        return self.head(self.blocks[2](self.blocks[1](h)) + expert.sum())


def empty_batches(made: Callable[[nn.Module], Any]) -> Any:
    return train(made(WithoutTokens()), 3)


def masters_written_after_a_forward(made: Callable[[nn.Module], Any]) -> Any:
    engine = made(Wide())
    found = [evaluated(engine)]
    safe_set_full_fp32_param(engine.module.blocks[0].up.weight, torch.full((64, 32), 3.0))
    found.append(evaluated(engine))
    for block in engine.module.blocks:
        local = safe_get_local_fp32_param(block.up.weight)
        safe_set_local_fp32_param(block.up.weight, local * 30)
    return [*found, evaluated(engine), train(engine, 2)]


class ReadsNorms(Wide):
    """A net that gathers a weight without FP8 in its forward, next to weights in FP8."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            with GatheredParameters([block.norm.weight]):
                h = h + block.norm.weight.sum()
        return self.head(h)


def gathered_in_a_forward(made: Callable[[nn.Module], Any]) -> Any:
    return train(made(ReadsNorms()), 3)


def difference(program: Callable[..., Any]) -> list[str | None]:
    found = []
    for stage, all_gather in ((2, None), (3, None), (3, False)):
        torch.manual_seed(0)
        options = settings(stage, all_gather=all_gather)
        found.append(program(lambda model, options=options: start(model, options)))
    return [first_difference(got, found[0]) for got in found[1:]]


@pytest.mark.parametrize(
    "program",
    [
        run_again_after_destroy,
        functional_calls,
        more(replaced_weight),
        backward_after_a_step,
        more(empty_batches),
        masters_written_after_a_forward,
        more(gathered_in_a_forward),
    ],
    ids=lambda program: program.__name__,
)
def test_stages_are_equal(own_ranks, program):  # on which nothing was compiled
    assert own_ranks(2, difference, program) == [[None, None]] * 2


class Writes(Wide):
    """A net that reads or writes a weight in FP8 inside its forward."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](self.embed(x))
        up = self.blocks[1].up
        with GatheredParameters([up.weight, up.bias], modifier_rank=0 if self.writes else None):
            if not self.writes:
                return h + up.weight.sum()
        return h


def refusal(writes: bool) -> str:
    engine = start(Writes(writes), settings(3))
    with pytest.raises(RuntimeError) as error:
        engine(*batches(1)[0])
    engine.destroy()
    return str(error.value)


def test_gathered_parameters_inside_a_forward_have_no_values_of_weights_in_fp8(own_ranks):
    for message in own_ranks(2, refusal, False):
        assert "blocks.1.up.weight is all-gathered in FP8" in message
    for message in own_ranks(2, refusal, True):
        assert "Write outside forward and backward, or disable fp8.all_gather" in message
