"""Divided experts train as in plain torch, and as in every other stage: losses, norms, weights, bytes, checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expert_cases import (
    LENGTH,
    MICRO,
    STEPS,
    batch_of,
    make_model,
    save_and_load,
    settings_of,
    train,
    train_beside_torch,
    weights_of,
)
from models import more, rank, start
from safetensors.torch import load_file

import onefold
from onefold.config import ConfigError
from onefold.moe.replaced_forward import ReplacedForward


def run(on_ranks: Any, world: int, kind: str, size: int, stage: int, changes: Any = None, **keys: Any) -> list[Any]:
    found: list[Any] = on_ranks(world, train_beside_torch, kind, size, stage, changes or {}, keys)
    return found


@pytest.mark.parametrize(("world", "size"), [(2, 2), more(4, 2), more(4, 4)])
@pytest.mark.parametrize("kind", ["Mixtral", more("Qwen3Moe"), more("GptOss")])
def test_models_of_transformers_train_as_plain_torch_and_alike_in_stages(on_ranks, world, size, kind):
    """Losses, norms, clipping and weights equal plain torch to rounding, and stages 1 to 3 are bit-equal."""
    found = [run(on_ranks, world, kind, size, stage, gradient_clipping=0.5) for stage in (3, 2, 1)]
    assert all(each[0]["divided"] for each in found)
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert one["losses"] == same["losses"]
            assert one["norms"] == same["norms"]
            for name, value in one["weights"].items():
                torch.testing.assert_close(value, same["weights"][name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("stage", [3, more(1), more(2), more(0)])
@pytest.mark.parametrize("routing", ["all to one", "none to some", more("other on each rank"), more("even")])
def test_experts_without_tokens_train_as_in_plain_torch(on_ranks, routing, stage):
    run(on_ranks, 4, routing, 4, stage)


def test_a_rank_may_route_no_tokens(on_ranks):
    run(on_ranks, 2, "even", 2, 3, {"skips": True})


@pytest.mark.parametrize(("world", "size"), [(4, 2), more(4, 4)])
def test_nodes_sum_the_gradients_of_the_own_experts(on_ranks, world, size):
    """Two nodes of two ranks: other gradients are summed inside nodes first."""
    found = run(on_ranks, world, "even", size, 2, onefold={"node_size": 2})
    assert found[0]["divided"]


def test_experts_without_whole_shards_are_computed_in_parts(on_ranks):
    """The weights of 8 x 3 x 5 elements have no whole shards, so they are gathered whole."""
    found = run(on_ranks, 2, "even", 2, 3, {"width": 3, "hidden": 5})
    assert found[0]["divided"] == 0


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_accumulation_steps": 2},
        more({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        more({"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}),
        more({"onefold": {"collective": "native"}}),
    ],
)
def test_features_train_with_divided_experts(on_ranks, keys):
    assert run(on_ranks, 2, "Mixtral", 2, 3, **keys)[0]["divided"]


def test_recomputed_layers_route_again(on_ranks):
    run(on_ranks, 2, "Mixtral", 2, 3, {"recomputes": True})


@pytest.mark.parametrize("stage", [3, more(1)])
def test_bytes_are_those_of_the_tokens_and_of_the_own_experts(on_ranks, stage):
    """Two of four ranks have the same experts: a rank sends their shards to one rank, and other shards to three."""
    found = run(on_ranks, 4, "even", 2, stage)[0]
    tokens, width, hidden = MICRO * LENGTH, 16, 64
    assert found["divided"] == 2 * 8 * width * hidden
    # Half of the two copies of each token go to the other part and back, in forward and backward.
    assert found["bytes"]["tokens"] == STEPS * 4 * tokens * width * 4
    own, rest = found["divided"] // 4 * 4, found["rest"] // 4 * 4
    assert found["bytes"]["reduce-scatter"] == STEPS * (own + 3 * rest)
    # In stage 1 other parameters are gathered once, after the step.
    num_gathers = found["num_gathers"] - (STEPS if stage == 1 else 0)
    num_of_rest = STEPS if stage == 1 else num_gathers
    assert num_gathers >= STEPS
    assert found["bytes"]["gather"] == num_gathers * own + num_of_rest * 3 * rest


@pytest.mark.parametrize(
    ("before", "world", "size"), [(2, 2, 1), more(4, 4, 4), more(4, 4, 2), more(4, 2, 2), more(4, 2, 1), more(4, 4, 1)]
)
@pytest.mark.parametrize("stage", [3, more(1)])
def test_checkpoints_are_loaded_by_any_division(on_ranks, tmp_path, before, world, size, stage):
    saved = on_ranks(before, save_and_load, str(tmp_path), "Mixtral", 2, 2, True, True)[0]
    loaded = on_ranks(world, save_and_load, str(tmp_path), "Mixtral", size, stage, False, False)[0]
    for name, value in saved["before"].items():
        torch.testing.assert_close(loaded["before"][name], value, rtol=0, atol=0, msg=name)
    exact = (before, world, size) == (4, 4, 2)
    if world == before:
        assert loaded["losses"] == (saved["losses"] if exact else pytest.approx(saved["losses"], rel=1e-5))
        assert loaded["norms"] == (saved["norms"] if exact else pytest.approx(saved["norms"], rel=1e-4))
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(
        exported["model.layers.0.mlp.experts.down_proj"], saved["before"]["model.layers.0.mlp.experts.down_proj"]
    )


def use_outside_of_training(folder: str) -> dict[str, Any]:
    """Gather, read and evaluate divided experts, and close the engine."""
    model = make_model("Mixtral")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = start(model, settings_of(3, 2))
    experts = model.model.layers[0].mlp.experts
    shapes = []
    with onefold.zero.GatheredParameters(list(experts.parameters())):
        shapes.append(tuple(experts.down_proj.shape))
        same = torch.equal(experts.down_proj, before["model.layers.0.mlp.experts.down_proj"])
    model.eval()
    ids = torch.arange(8).view(1, 8) + rank()
    with torch.no_grad():
        logits = engine(input_ids=ids).logits
        with onefold.zero.GatheredParameters(list(model.parameters())):
            gathered = engine(input_ids=ids).logits
        generated = model.generate(ids, max_new_tokens=3, do_sample=False, synced_gpus=True)
    full = onefold.utils.safe_get_full_fp32_param(experts.down_proj)
    engine.destroy()
    with torch.no_grad():
        plain_model = make_model("Mixtral").eval()
        plain = plain_model(input_ids=ids).logits
        plainly_generated = plain_model.generate(ids, max_new_tokens=3, do_sample=False)
    return {
        "shapes": shapes,
        "same": same and torch.equal(full, before["model.layers.0.mlp.experts.down_proj"]),
        "logits": (logits - plain).abs().max().item(),
        "gathered": (gathered - plain).abs().max().item(),
        "generated": torch.equal(generated, plainly_generated),
        "restored": "forward" not in vars(experts),
    }


def test_divided_experts_are_whole_outside_of_training(on_ranks, tmp_path):
    for found in on_ranks(2, use_outside_of_training, str(tmp_path)):
        assert found["shapes"] == [(8, 16, 64)]
        assert found["same"]
        assert found["restored"]
        assert found["generated"]
        assert found["logits"] < 1e-5
        assert found["gathered"] < 1e-5


def refused(kind: str, keys: dict[str, Any]) -> str:
    model = make_model(kind) if kind != "Linear" else torch.nn.Linear(4, 4)
    try:
        start(model, settings_of(3, 2) | keys).destroy()
    except ConfigError as error:
        return str(error)
    return "no error"


def test_what_cannot_be_divided_is_refused_by_name(on_ranks):
    assert "does not divide the 2 ranks" in on_ranks(2, refused, "Mixtral", {"onefold": {"expert_parallel_size": 3}})[0]
    assert "Linear has no expert layers" in on_ranks(2, refused, "Linear", {})[0]
    found = on_ranks(2, refused, "Mixtral", {"onefold": {"expert_parallel_size": 2, "cuda_graphs": "blocks"}})[0]
    assert "onefold.cuda_graphs cannot be combined" in found
    other = {"expert_parallel": {"enabled": True, "autoep_size": 1}}
    assert "expert_parallel.autoep_size = 1" in on_ranks(2, refused, "Mixtral", other)[0]
    assert "experts.scale seems to have an entry for each expert" in on_ranks(2, with_a_buffer)[0]
    with pytest.raises(ValueError, match="has no number of experts in its attribute 'num_experts'"):
        onefold.experts(torch.nn.Linear(4, 4))


def gather_all(model: torch.nn.Module) -> None:
    with onefold.zero.GatheredParameters(list(model.parameters())):
        pass


def with_a_buffer() -> str:
    model = make_model("even")
    model.experts.register_buffer("scale", torch.ones(8))
    try:
        start(model, settings_of(3, 2)).destroy()
    except ConfigError as error:
        return str(error)
    return "no error"


def routed() -> tuple[torch.Tensor, ...]:
    return torch.zeros(4, 16), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1)


def misuse(case: str) -> str:
    """Call expert layers in ways that would give wrong results."""
    model = make_model("even")
    engine = start(model, settings_of(3, 2))
    width = 16
    try:
        if case == "other tokens":
            tokens = torch.zeros(4, width, dtype=torch.float32 if rank() else torch.float64)
            with torch.no_grad():
                model.experts.forward(tokens, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
        elif case == "no expert":
            tokens, index, weights = routed()
            with torch.no_grad():
                model.experts.forward(tokens, index + 8 * rank(), weights)
        elif case == "gathered in use":
            with torch.no_grad():
                model.embed.register_forward_hook(lambda *_: gather_all(model))
                engine(**batch_of(0, rank()))
        elif case == "trained gathered":
            with onefold.zero.GatheredParameters(list(model.parameters())):
                engine.backward(engine(**batch_of(0, rank())))
        elif case == "copied":
            with onefold.zero.GatheredParameters(list(model.parameters())):
                copied = copy.deepcopy(model)
            forward: Any = copied.experts.forward
            assert not isinstance(forward, ReplacedForward)
            assert forward.__self__ is copied.experts
            batch = batch_of(0, rank())
            torch.testing.assert_close(copied(**batch), make_model("even")(**batch))
            return "plain"
        else:  # a penalty on all experts
            loss = engine(**{"input_ids": torch.zeros(1, 3, dtype=torch.long), "labels": torch.zeros(1, 3).long()})
            loss = loss + model.experts.up.square().sum()
            engine.backward(loss)
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def test_wrong_calls_are_named(on_ranks):
    for found in on_ranks(2, misuse, "other tokens"):
        assert "(rank 0: expert layer 0, 16 features, 1 experts for each, torch.float64, no gradients; " in found
    for found in on_ranks(2, misuse, "trained gathered"):
        assert "was trained inside GatheredParameters, with the experts of all ranks" in found
    for found in on_ranks(2, misuse, "no expert"):
        assert "experts was called with expert 8, which does not exist" in found
    for found in on_ranks(2, misuse, "gathered in use"):
        assert "is in use with the experts of this rank. Gather it outside of the forward" in found
    assert on_ranks(2, misuse, "copied") == ["plain"] * 2
    for found in on_ranks(2, misuse, "penalty"):
        assert "experts.up is gathered for its expert layer only" in found, found


def divided_by_deepspeeds_section() -> tuple[int, str]:
    section = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    engine = start(make_model("Mixtral"), settings_of(3, 1) | {"expert_parallel": section})
    found = engine.expert_parallel.size, engine.describe()
    engine.destroy()
    return found


def test_the_section_of_deepspeed_divides_experts(on_ranks):
    size, described = on_ranks(2, divided_by_deepspeeds_section)[0]
    assert size == 2
    assert "experts           2 layers of 8 experts, " in described
    assert "parameters active for a token, in 2 parts, of which this rank computes one" in described


def train_alone(
    size: int, keys: dict[str, Any], adapts: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    model = make_model("Mixtral")
    if adapts:  # the experts are frozen
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    engine = start(model, settings_of(3, size, **keys))
    losses, norms = train(engine)
    weights = weights_of(engine.module)
    engine.destroy()
    return losses, weights, norms


MUON = {"type": "Muon", "params": {"lr": 0.02}}
ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        more({"bf16": {"enabled": True}, "optimizer": ADAM}, 0.03),
        more({"fp16": {"enabled": True, "initial_scale_power": 8}, "optimizer": ADAM}, 0.02),
        more({"optimizer": MUON}, 1e-2),  # it orthogonalizes in bf16
        more({"optimizer": ADAM, "onefold": {"state_dtype": "int8", "int8_min_numel": 256}}, 1e-3),
    ],
)
def test_optimizers_and_dtypes_train_as_without_division(on_ranks, keys, tolerance):
    whole, divided = (on_ranks(2, train_alone, size, keys)[0] for size in (1, 2))
    assert divided[0] == pytest.approx(whole[0], rel=tolerance)
    assert divided[2] == pytest.approx(whole[2], rel=2 * tolerance)  # AdamW and Muon step alike with scaled gradients
    for name, value in whole[1].items():
        difference = (divided[1][name].float() - value.float()).abs().mean()
        assert difference <= 3 * tolerance * value.float().abs().mean() + 1e-6, name


def test_frozen_experts_are_divided_under_lora(on_ranks):
    whole, divided = (on_ranks(2, train_alone, size, {"optimizer": ADAM}, True)[0] for size in (1, 2))
    assert divided[0] == pytest.approx(whole[0], rel=1e-5)
    assert divided[2] == pytest.approx(whole[2], rel=1e-4)
    assert divided[0][0] != divided[0][-1]
