"""Forecasts of mixtures of experts: active parameters, advice on expert parallelism, and LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import make_model
from listed_cases import WIDTH, Expert
from models import more
from torch import nn

from onefold.comm.nodes import Nodes
from onefold.compat.moe_layer import MoE
from onefold.config import ConfigError, load_config
from onefold.log import format_bytes
from onefold.moe import count_parameters
from onefold.tools.cli.main import build_parser
from onefold.tools.cli.plan_command import ask
from onefold.tools.estimate.dry_run import META, dry_run
from onefold.tools.estimate.expert_advice import expert_notes, hint_at_experts, possible_settings
from onefold.tools.estimate.forecast import forecast
from onefold.tools.estimate.machines import adjust, find_machine
from onefold.tools.estimate.models import ModelSource, from_transformers
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, Setting

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
OF_EXPERTS = 2 * 8 * 3 * 64 * 256


def question(link: float = 1e6, **keys: Any) -> Question:
    machine = adjust(find_machine("4xh100"), nodes=2, across=link)
    return Question(from_transformers("mixtral", MIXTRAL), machine, {**DEFAULT_CONFIG, **keys}, 1, 32)


def test_active_parameters_are_counted():
    counts = count_parameters(make_model("Mixtral"))
    assert counts.of_experts == 2 * 8 * 3 * 16 * 64
    assert counts.total - counts.active == counts.of_experts * 6 // 8
    for model, per_token in ((make_model("MoE"), 2), (make_model("MoE", k=1), 1)):
        counts = count_parameters(model)
        assert counts.total - counts.active == counts.of_experts * (4 - per_token) // 4
    assert count_parameters(make_model("even")).active is None  # no module tells the number of experts of a token
    plain = nn.Linear(3, 3)
    assert count_parameters(plain) == type(counts)(12, 0, 12)


@pytest.mark.slow
def test_advice_compares_bytes_inside_and_across_nodes():
    asked = question()
    assert f"{OF_EXPERTS:,} in experts" in expert_notes(asked)[0]
    stage_3 = Setting("stage 3", {"stage": 3, "overlap_comm": True})
    quantized = Setting("quantized", {**stage_3.zero, "zero_quantized_weights": True})
    found = forecast(asked, [stage_3, quantized], finds_batch=False)
    hint = hint_at_experts(asked, found[0], found)
    assert hint.startswith(" With onefold.expert_parallel_size 2, it takes about")  # experts stay inside nodes
    divided = forecast(asked.with_key("onefold", "expert_parallel_size", 2), [stage_3], finds_batch=False)[0]
    assert f"{format_bytes(divided.traffic.across)} of a node to others in a step instead of" in hint
    assert divided.traffic.across < found[0].traffic.across / 5
    assert "With onefold.expert_parallel_size 2, stage 3 takes about" in hint_at_experts(asked, found[1], found)
    fast = question(1e15)
    found = forecast(fast, [stage_3], finds_batch=False)
    assert "Expert parallelism does not pay: " in hint_at_experts(fast, found[0], found)


def test_advice_forecasts_each_size_once():
    built = []

    def build() -> nn.Module:
        built.append(1)
        with META:
            return OneMoE()

    def loss_of(batch: int, length: int) -> Any:
        return lambda call: call(torch.zeros(batch, length, WIDTH, device=META))

    asked = Question(ModelSource("one", build, loss_of), find_machine("2xh100"), DEFAULT_CONFIG, 1, 8)
    (best,) = forecast(asked, [Setting("stage 3", {"stage": 3, "overlap_comm": True})], finds_batch=False)
    built.clear()
    assert hint_at_experts(asked, best, [best])
    assert len(built) == 2  # for the number of experts, and for a size of 2


def test_settings_that_cannot_be_combined_are_left_out():
    names = {each.name for each in possible_settings(question(onefold={"expert_parallel_size": 8}))}
    assert "stage 3" in names
    assert not any("hpZ" in name or "qwZ" in name for name in names)
    assert any("hpZ" in each.name for each in possible_settings(question()))
    with pytest.raises(ConfigError, match="does not divide the 8 ranks"):
        possible_settings(question(onefold={"expert_parallel_size": 3}))


@pytest.mark.parametrize("size", [4, more(1)])
def test_lora_on_stacked_experts_is_planned(size):
    source = from_transformers("mixtral", MIXTRAL, lora=4)
    found = run_dry(source.build(), source.loss_of(1, 32), size)
    trained = [spec for unit in found.units for spec in unit if spec.trainable]
    assert any("experts" in member.name for spec in trained for member in spec.layout.members)
    assert found.traffic is not None


class OneMoE(nn.Module):
    """A model of DeepSpeed's layer, whose `ep_size` may request a division."""

    def __init__(self, ep_size: int = 1) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(WIDTH, WIDTH), MoE(WIDTH, Expert(), 4, ep_size, k=2)

    def example_inputs(self, batch: int, length: int) -> list[torch.Tensor]:
        return [torch.zeros(batch, length, WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.first(x))[0].square().mean()


@pytest.mark.parametrize(("size", "ep_size"), [(1, 1), (2, 1), (1, 2)])
def test_deepspeeds_layer_is_planned(size, ep_size):
    with torch.device("meta"):
        model = OneMoE(ep_size)
    found = run_dry(model, lambda call: call(torch.zeros(2, 8, WIDTH, device="meta")), size)
    assert any(row.operation == "tokens" for row in found.traffic.rows()) == (size * ep_size > 1)


def planned() -> nn.Module:
    """Return the model that `onefold plan --model test_expert_forecasts:planned` builds."""
    return OneMoE(ep_size=2)


def test_a_plan_has_the_division_that_the_layers_request(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    arguments = ["plan", "--model", "test_expert_forecasts:planned", "--machine", "2xA100"]
    assert ask(build_parser().parse_args(arguments)).config["onefold"] == {"expert_parallel_size": 2}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({**DEFAULT_CONFIG, "onefold": {"expert_parallel_size": 4}}))
    with pytest.raises(ConfigError, match="expert_parallel_size is 4 in the config, but the expert layers of the mod"):
        ask(build_parser().parse_args([*arguments, "--config", str(given)]))


def run_dry(model: nn.Module, loss_of: Any, size: int) -> Any:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {**DEFAULT_CONFIG, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    return dry_run(
        model, load_config({**config, "onefold": {"expert_parallel_size": size}}), Nodes.of_size(4, 4), loss_of
    )
