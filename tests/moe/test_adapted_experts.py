"""LoRA on stacked experts trains as in plain torch, in every stage and division."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_cases import StackedExperts, batch_of, make_model, settings_of, train, train_plainly, weights_of
from listed_cases import ListedBlock
from models import more, rank, start
from torch import nn

import onefold
from onefold.moe.adapted_experts import adapt_experts


def adapted_model(num_adapters: int = 1) -> Any:
    import peft

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    model = peft.get_peft_model(make_model("Mixtral"), settings)
    for number in range(1, num_adapters):
        model.add_adapter(f"other{number}", settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would train the other factor in the second step only
            nn.init.normal_(parameter, std=0.1)
    return model


class MixedExperts(StackedExperts):
    """Stacked experts with a parameter that all of them share."""

    def __init__(self) -> None:
        super().__init__(16, 64)
        self.mix = nn.Parameter(torch.eye(16))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens @ self.mix, index, weights)


class MixedBlock(ListedBlock):
    """A block with a list of experts and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.mix = nn.Parameter(torch.eye(16))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(hidden @ self.mix)


def model_with_own_parameter(kind: str, parameter: str) -> Any:
    """Return a model whose expert layer has an adapted parameter of its own."""
    import peft

    model: Any = make_model(kind)
    if kind == "listed":
        model.blocks[0] = MixedBlock()
    else:
        model.experts = onefold.experts(MixedExperts(), count="num_parts")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["head"], target_parameters=[parameter]))
    for name, each in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(each, std=0.1)
    return model


def train_own_parameter(kind: str, parameter: str) -> str:
    model = model_with_own_parameter(kind, parameter)
    reference = copy.deepcopy(model)
    engine = start(model, settings_of(3, 2))
    try:
        losses, norms = train(engine)
    except NotImplementedError as error:
        return str(error)
    finally:
        engine.destroy()
    expected, expected_norms = train_plainly(reference, dist.get_world_size())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=1e-5)
    return "no error"


@pytest.mark.parametrize(("kind", "parameter"), [("listed", "blocks.0.mix"), ("even", "experts.mix")])
def test_parameters_that_are_not_divided_are_adapted(on_ranks, kind, parameter):
    assert on_ranks(2, train_own_parameter, kind, parameter) == ["no error"] * 2


def test_an_adapted_vector_of_each_expert_is_refused(on_ranks):
    for found in on_ranks(2, train_own_parameter, "even", "experts.up_bias"):
        assert "adapts up_bias, which has one vector for each divided expert" in found


def test_only_adapters_of_peft_are_replaced():
    class ParamWrapper(nn.Linear):
        """A module of the program."""

    assert adapt_experts(ParamWrapper(2, 2), {}) == []


def train_adapted(size: int, stage: int) -> bool:
    model = adapted_model()
    reference = copy.deepcopy(model)
    engine = start(model, settings_of(stage, size))
    losses, norms = train(engine)
    weights = weights_of(model)
    experts = model.base_model.model.model.layers[0].mlp.experts
    with model.disable_adapter(), torch.no_grad():
        plain = engine(**batch_of(0, rank())).loss
    engine.destroy()
    expected, expected_norms = train_plainly(reference, dist.get_world_size())
    with reference.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(plain, reference(**batch_of(0, rank())).loss)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=1e-5)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-5, msg=name)
    return "forward" not in vars(experts)


@pytest.mark.parametrize(
    ("world", "size", "stage"), [(2, 2, 3), (2, 1, 3), more(2, 1, 2), more(2, 2, 1), more(4, 2, 3)]
)
def test_adapters_of_experts_train_as_in_plain_torch(on_ranks, world, size, stage):
    assert all(on_ranks(world, train_adapted, size, stage))


def use_two_adapters(size: int) -> str:
    model = adapted_model(2)
    model.base_model.set_adapter(["default", "other1"])
    engine = start(model, settings_of(3, size))
    try:
        with torch.no_grad():
            loss = engine(**batch_of(0, rank())).loss
        reference = adapted_model(2)
        reference.load_state_dict(weights_of(model))
        reference.base_model.set_adapter(["default", "other1"])
        with torch.no_grad():
            torch.testing.assert_close(loss, reference(**batch_of(0, rank())).loss)
    except NotImplementedError as error:
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def test_two_adapters_are_summed_or_refused(on_ranks):
    assert on_ranks(2, use_two_adapters, 1) == ["no error"] * 2
    for found in on_ranks(2, use_two_adapters, 2):
        assert "adapts divided experts by 2 adapters: default, other1. Activate one." in found
