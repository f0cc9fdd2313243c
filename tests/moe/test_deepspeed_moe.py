"""DeepSpeed's layer `MoE`: gating within a capacity, training with divided experts, its helpers and its checkpoints."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_cases import make_model, settings_of, train_beside_torch
from listed_cases import WIDTH, BiasedExpert, Expert
from models import more, start
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.checkpoint.deepspeed.zero_checkpoint import read_checkpoint
from onefold.checkpoint.tools.import_checkpoint import import_deepspeed
from onefold.compat import moe_utils
from onefold.compat.moe_layer import Experts, MoE, MOELayer

FIXTURE = Path(__file__).parent.parent / "fixtures" / "deepspeed"
SPEC = importlib.util.spec_from_file_location("moe_fixture", FIXTURE / "moe_model.py")
fixture: Any = importlib.util.module_from_spec(SPEC)  # type: ignore[arg-type]
sys.modules[SPEC.name] = fixture  # type: ignore[union-attr]
SPEC.loader.exec_module(fixture)  # type: ignore[union-attr]


def gated(layer: MoE, x: torch.Tensor, k: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Compute GShard's gating token by token, with the weights of a layer."""
    experts, num = layer.deepspeed_moe.experts.deepspeed_experts, layer.num_experts
    gates = F.linear(x, layer.deepspeed_moe.gate.wg.weight).softmax(-1)
    ranked = [sorted(range(num), key=lambda expert, row=row: -row[expert].item()) for row in gates.detach()]
    taken, kept = [0] * num, [[] for _ in x]
    for choice in range(k):
        for token, order in enumerate(ranked):
            taken[order[choice]] += 1
            if taken[order[choice]] <= capacity:
                kept[token].append(order[choice])
    outputs = []
    for token, chosen in enumerate(kept):
        total = sum((gates[token, expert] for expert in chosen), torch.zeros(())) if k == 2 else torch.ones(())
        parts = [experts[expert](x[token]) * gates[token, expert] / total for expert in chosen]
        outputs.append(sum(parts, torch.zeros_like(x[token])))
    share = torch.tensor([sum(order[0] == expert for order in ranked) / len(x) for expert in range(num)])
    return torch.stack(outputs), num * (gates.mean(0) * share).sum(), taken


@pytest.mark.parametrize(("k", "factor", "minimum"), [(1, 0.5, 1), (1, 1.0, 4), (2, 0.4, 1), (2, 2.0, 1)])
@pytest.mark.parametrize("trains", [True, False])
def test_the_layer_gates_as_gshard(k, factor, minimum, trains):
    torch.manual_seed(k)
    layer = make_model("MoE", k=k, capacity_factor=factor, eval_capacity_factor=2 * factor, min_capacity=minimum)
    layer = layer.blocks[0].moe.train(trains)
    x = torch.randn(2, 15, WIDTH)
    plain = x.flatten(0, 1).clone().requires_grad_()
    capacity = max(math.ceil(30 / 4 * factor * k * (1 if trains else 2)), minimum)
    expected, expected_loss, counts = gated(layer, plain, k, capacity)
    ours = x.clone().requires_grad_()
    output, loss, found = layer(ours)
    assert any(count > capacity for count in counts) or factor >= 1 or not trains
    torch.testing.assert_close(output.flatten(0, 1), expected)
    torch.testing.assert_close(loss, expected_loss)
    assert found.tolist() == counts
    (output.square().sum() + loss).backward()
    (expected.square().sum() + expected_loss).backward()
    torch.testing.assert_close(ours.grad.flatten(0, 1), plain.grad)


def test_a_layer_is_copied_after_a_forward():
    """The loss of the last forward has a graph, which cannot be copied."""
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, use_rts=False)
    tokens = torch.randn(2, 4, WIDTH)
    expected = layer(tokens)[0]
    copied = copy.deepcopy(layer)
    assert layer.deepspeed_moe.l_aux is not None
    assert copied.deepspeed_moe.l_aux is copied.deepspeed_moe.exp_counts is None
    assert torch.equal(copied(tokens)[0], expected)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "factor", "capacity"),
    [(400, 8, 1, 1.1, 55), (400, 8, 2, 1.1, 110), (15, 4, 1, 1.0, 4), (100, 8, 1, 1.25, 16), (7, 8, 2, 1.0, 4)],
)
def test_capacities_are_rounded_as_in_deepspeed(tokens, num_experts, k, factor, capacity):
    """The numbers are those of DeepSpeed 0.19.8, which computes in fp32. In fp64, the first two are 56 and 111."""
    gate = MoE(WIDTH, Expert(), num_experts, k=k, capacity_factor=factor).deepspeed_moe.gate
    assert gate.capacity(tokens) == capacity


def test_tokens_are_kept_at_random_and_second_experts_sampled():
    torch.manual_seed(0)
    tokens = torch.randn(64, WIDTH)
    gate = MoE(WIDTH, Expert(), 4, capacity_factor=0.5).deepspeed_moe.gate
    some, others = gate(tokens), gate(tokens)
    assert torch.equal(some.index, others.index)
    assert not torch.equal(some.kept, others.kept)
    for expert, count in enumerate(some.counts.tolist()):
        assert int(some.kept[some.index == expert].sum()) == min(count, 8)
    gate = MoE(WIDTH, Expert(), 4, k=2).deepspeed_moe.gate
    some, others = gate(tokens), gate(tokens)
    assert torch.equal(some.index[:, 0], others.index[:, 0])
    assert not torch.equal(some.index[:, 1], others.index[:, 1])
    assert not (some.index[:, 0] == some.index[:, 1]).any()


@pytest.mark.parametrize("policy", ["RSample", "Jitter"])
def test_noise_is_for_training_only(policy):
    torch.manual_seed(0)
    tokens = torch.randn(256, WIDTH) / 10
    gate = MoE(WIDTH, Expert(), 4, noisy_gate_policy=policy, use_rts=False).deepspeed_moe.gate
    noisy, others, plain, same = gate(tokens), gate(tokens), gate.eval()(tokens), gate(tokens)
    assert not torch.equal(noisy.weights, others.weights)
    assert torch.equal(plain.weights, same.weights)


def test_the_parts_of_the_layer_have_the_contracts_of_deepspeed():
    torch.manual_seed(0)
    layer, x = MoE(WIDTH, Expert(), 4, k=2, top2_2nd_expert_sampling=False), torch.randn(2, 8, WIDTH)
    output, loss, counts = layer(x)
    inner = layer.deepspeed_moe
    assert inner.l_aux is loss
    assert inner.exp_counts is counts
    made = MOELayer(inner.gate, inner.experts, "ep_size_1", 1, 4)
    torch.testing.assert_close(made(x), output)
    assert (made.ep_group_name, made.ep_size, made.num_local_experts) == ("ep_size_1", 1, 4)
    with pytest.raises(ValueError, match="the gate chooses among 4 experts, but the list has 2"):
        MOELayer(inner.gate, Experts(Expert(), 2), "ep_size_2", 2, 2)
    one, two = Experts(Expert()), Experts(BiasedExpert(), 2, "ep_size_1")
    assert len(one.deepspeed_experts) == one.num_local_experts == 1
    chunks = torch.randn(1, 4, 3, WIDTH)
    expected = [expert(chunk) for expert, chunk in zip(two.deepspeed_experts, chunks.chunk(2, dim=1), strict=True)]
    torch.testing.assert_close(two(chunks), torch.cat(expected, dim=1))


def test_unused_tokens_and_tokens_that_are_never_dropped():
    torch.manual_seed(0)
    x = torch.randn(1, 8, WIDTH)
    layer = MoE(WIDTH, Expert(), 4, drop_tokens=False, capacity_factor=0.01)
    output, _, counts = layer(x, used_token=torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]))
    assert (output[0].abs().sum(1) > 0).tolist() == [True, True, True, False, True, True, True, True]
    assert int(counts.sum()) == 7


def test_a_residual_expert_is_added_by_its_weight():
    torch.manual_seed(0)
    layer, x = MoE(WIDTH, Expert(), 4, use_residual=True), torch.randn(1, 8, WIDTH)
    layer.eval()
    with torch.no_grad():
        layer.coefficient.bias.copy_(torch.tensor([-100.0, 100.0]))
        torch.testing.assert_close(layer(x)[0], layer.mlp(x))


def test_arguments_without_effect_or_support_are_named(monkeypatch):
    warned = []
    monkeypatch.setattr("onefold.compat.moe_layer.logger.warning", warned.append)
    MoE(WIDTH, Expert(), 4, use_tutel=True)
    assert "use_tutel has no effect" in warned[0]
    for arguments, message in (
        ({"enable_expert_tensor_parallelism": True}, "enable_expert_tensor_parallelism divides each expert"),
        ({"k": 3}, "k = 3, but a token has one or two experts"),
        ({"ep_size": 3}, "ep_size = 3 does not divide num_experts = 4"),
        ({"noisy_gate_policy": "other"}, "noisy_gate_policy = 'other'"),
    ):
        with pytest.raises(ValueError, match=message):
            MoE(WIDTH, Expert(), 4, **arguments)


def test_parameters_of_experts_have_groups_of_their_own():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, Expert(), 4, ep_size=2))
    parameters = list(model.parameters())
    assert moe_utils.has_moe_layers(model) == (True, 4)
    assert moe_utils.has_moe_layers(model[0]) == (False, 0)
    shared, of_experts = moe_utils.split_params_into_shared_and_expert_params(parameters)
    assert (len(shared), len(of_experts)) == (3, 16)
    groups = moe_utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": parameters, "name": "all", "lr": 1.0}
    )
    assert [(each["name"], each.get("moe"), each["lr"], len(each["params"])) for each in groups] == [
        ("all", None, 1.0, 3),
        ("ep_size_2", True, 1.0, 16),
    ]
    assert [moe_utils.is_moe_param_group(group) for group in groups] == [False, True]
    assert moe_utils.configure_moe_param_groups(parameters)[0]["name"] == "dense-params"
    assert moe_utils.configure_moe_param_groups(groups) is groups  # they are split already
    for parameter in of_experts[:5]:
        parameter.grad = torch.zeros_like(parameter)
    found = moe_utils.split_params_grads_into_shared_and_expert_params(parameters)
    assert [len(each) for each in found] == [0, 5]


@pytest.mark.parametrize(
    ("changes", "keys", "stage"),
    [
        ({"capacity_factor": 0.5, "use_residual": True, "returns_bias": True}, {}, 3),
        more({"k": 1, "capacity_factor": 0.5, "use_residual": True}, {}, 3),
        more({"k": 1, "ep_size": 2, "min_capacity": 1}, {"gradient_accumulation_steps": 2}, 2),
        more({"drop_tokens": False}, {}, 1),
    ],
)
def test_each_rank_drops_its_own_tokens(on_ranks, changes, keys, stage):
    found = on_ranks(2, train_beside_torch, "MoE", 2, stage, changes, keys)
    assert found[0]["divided"]


def test_a_model_of_one_layer_is_divided(on_ranks):
    """No other module repeats, so the structural cut would make a unit of each expert."""
    assert on_ranks(2, train_one_layer) == [True, True]


def train_one_layer() -> bool:
    torch.manual_seed(0)
    model = nn.ModuleDict({"moe": MoE(WIDTH, Expert(), 4, ep_size=2)})
    model.forward = lambda x: model["moe"](x)[0].square().mean()
    engine = start(model, settings_of(3, 1))
    parts = [param.spec.num_expert_parts for unit in engine.state.schedule.units for param in unit.params]
    engine.backward(engine(torch.randn(2, 9, WIDTH)))
    engine.step()
    engine.destroy()
    return 2 in parts


# -- checkpoints of DeepSpeed ------------------------------------------------------------------------------------------


def copy_checkpoint(folder: Path, name: str = "moe_stage2") -> Path:
    """Copy a checkpoint with the files of experts that both have. Return the folder of its step."""
    shutil.copytree(FIXTURE / "moe_stage2", folder)
    shutil.copytree(FIXTURE / name, folder, dirs_exist_ok=True)
    return folder / "global_step3"


@pytest.mark.parametrize("name", ["moe_stage2", "moe_stage2_cut"])
def test_checkpoints_have_all_experts(tmp_path, name):
    expected = load_file(FIXTURE / "moe_stage2" / "expected.safetensors")
    copy_checkpoint(tmp_path / "saved", name)
    found = read_checkpoint(tmp_path / "saved")
    tensors = dict(found.tensors())
    assert {name.removeprefix("model/") for name in tensors if name.startswith("model/")} == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[f"model/{name}"], value), name
        assert tensors[f"optimizer/{name}/exp_avg"].shape == value.shape
        assert bool(found.parameters[name]) == ("deepspeed_experts" in name)


def resume_from_deepspeed(folder: str, stage: int) -> list[float]:
    model = fixture.Mixture(MoE)
    parameters = {"params": list(model.parameters()), "name": "all"}
    groups = moe_utils.split_params_into_different_moe_groups_for_optimizer(parameters)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {**fixture.CONFIG, "zero_optimization": zero, "log_level": "error"}
    engine, *_ = onefold.initialize(model=model, model_parameters=groups, config=config)
    assert engine.expert_parallel.size == 2
    engine.load_checkpoint(folder)
    losses = []
    first = fixture.NUM_STEPS_SAVED
    for step in range(first, first + fixture.NUM_STEPS_CONTINUED):
        loss = engine(fixture.batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [3, more(1)])
def test_training_continues_as_deepspeed_did(on_ranks, tmp_path, stage):
    import_deepspeed(FIXTURE / "moe_stage2", tmp_path)
    continued = json.loads((FIXTURE / "moe_stage2" / "continued.json").read_text())
    for of_rank, losses in enumerate(on_ranks(fixture.WORLD_SIZE, resume_from_deepspeed, str(tmp_path), stage)):
        assert losses == pytest.approx([by_rank[of_rank] for by_rank in continued], rel=1e-4)


def test_files_of_experts_that_do_not_fit_are_named(tmp_path):
    step = copy_checkpoint(tmp_path / "saved")
    one, other = (step / f"layer_1_expert_{expert}_mp_rank_00_model_states.pt" for expert in (1, 3))
    kept = one.read_bytes()
    one.unlink()
    with pytest.raises(ValueError, match=r"files of experts \(layer, expert\) are missing: \[\(1, 1\)\]"):
        read_checkpoint(tmp_path / "saved")
    one.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="is not a parameter of expert 1"):
        read_checkpoint(tmp_path / "saved")
    one.write_bytes(kept)
    first = step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    first.write_bytes((step / "zero_pp_rank_1_mp_rank_00_optim_states.pt").read_bytes())
    with pytest.raises(ValueError, match="is not that of its file of experts"):
        read_checkpoint(tmp_path / "saved")


def rewrite(file: Path, change: Any) -> None:
    """Change the content of a file of DeepSpeed, of which this test uses plain values and tensors."""
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def test_more_experts_than_files_are_refused(tmp_path):
    step = copy_checkpoint(tmp_path / "saved")
    rewrite(step / "mp_rank_00_model_states.pt", lambda content: content.update(num_experts=[4, 10**12]))
    with pytest.raises(ValueError, match=r"num_experts is \[4, 1000000000000\], but there are 8 files of experts"):
        read_checkpoint(tmp_path / "saved")


def test_a_trained_expert_without_a_weight_is_named(tmp_path):
    step = copy_checkpoint(tmp_path / "saved")
    name = "layers.0.deepspeed_moe.experts.deepspeed_experts.2.up.bias"
    rewrite(step / "layer_0_expert_2_mp_rank_00_model_states.pt", lambda content: content.pop(name))
    with pytest.raises(ValueError, match=f"the master weight of '{name}' is not that of its file of experts"):
        read_checkpoint(tmp_path / "saved")


def test_files_of_other_versions_are_accepted_or_explained(tmp_path):
    """Some versions write a file of experts without an optimizer under ZeRO, and no shapes of parameters."""
    step = copy_checkpoint(tmp_path / "saved")
    torch.save({"optimizer": None}, step / "expp_rank_1_mp_rank_00_optim_states.pt")
    assert read_checkpoint(tmp_path / "saved").parameters
    torch.save({"optimizer": {"state": {}}}, step / "expp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"experts \(MoE\) of stage 0 are not supported"):
        read_checkpoint(tmp_path / "saved")
    (step / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    rewrite(step / "mp_rank_00_model_states.pt", lambda content: content.pop("param_shapes"))
    with pytest.raises(ValueError, match="has no param_shapes, which name the parameters of the flat vectors"):
        read_checkpoint(tmp_path / "saved")
