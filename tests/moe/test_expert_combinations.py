"""Divided experts with other features: alike with and without division, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from expert_cases import make_model, settings_of, train, weights_of
from models import config, more, start

from onefold.config import ConfigError, check_topology, load_config

ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
CPU, CPU_PARAM = {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("zero_optimization.zero_hpz_partition_size", {"zero_optimization": {"zero_hpz_partition_size": 2}}),
        ("zero_optimization.mics_shard_size", {"zero_optimization": {"mics_shard_size": 2}}),
        ("zero_optimization.zero_quantized_weights", {"zero_optimization": {"zero_quantized_weights": True}}),
        (
            "zero_optimization.zero_quantized_nontrainable_weights",
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
        ),
        ("zero_optimization.zero_quantized_gradients", {"zero_optimization": {"zero_quantized_gradients": True}}),
        ("onefold.batch_chunks", {"onefold": {"expert_parallel_size": 2, "batch_chunks": 2}}),
        ("onefold.cuda_graphs", {"onefold": {"expert_parallel_size": 2, "cuda_graphs": "blocks"}}),
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
    ],
)
def test_keys_that_cannot_be_combined_are_named(name, keys):
    document = config(3, **{"onefold": {"expert_parallel_size": 2}, **keys})
    with pytest.raises(ConfigError, match=rf"expert_parallel_size = 2 and {name} cannot be combined yet"):
        check_topology(load_config(document), 4)


def train_with(
    kind: str, size: int, keys: dict[str, Any], folder: str
) -> tuple[list[float], dict[str, Any], int, list[float]]:
    zero = keys.get("zero_optimization", {})
    for section in zero.values():
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = folder
    engine = start(make_model(kind), settings_of(3, size, optimizer=ADAM, **keys))
    divided = sum(param.spec.num_expert_parts > 1 for unit in engine.state.schedule.units for param in unit.params)
    losses, norms = train(engine, 4)
    weights = weights_of(engine.module)
    engine.destroy()
    return losses, weights, divided, norms


NVME = {"device": "nvme", "pin_memory": False}


@pytest.mark.parametrize("kind", ["listed", more("Mixtral")])
@pytest.mark.parametrize(
    "keys",
    [
        {"zero_optimization": {"offload_optimizer": NVME, "offload_param": NVME}, "bf16": {"enabled": True}},
        more({"zero_optimization": CPU, "onefold": {"delayed_host_step": True}}),
        more({"zero_optimization": CPU | CPU_PARAM, "bf16": {"enabled": True}, "onefold": {"device_cache": 1}}),
        more({"zero_optimization": CPU, "bf16": {"enabled": True}, "onefold": {"master_dtype": "bf16_int16"}}),
        more({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    ],
)
def test_features_give_the_results_of_a_run_without_division(on_ranks, tmp_path, kind, keys):
    whole, divided = (on_ranks(2, train_with, kind, size, keys, str(tmp_path))[0] for size in (1, 2))
    assert divided[2] > 0 == whole[2]
    rounds = "bf16" in keys or "torch_autocast" in keys
    assert divided[0] == pytest.approx(whole[0], rel=2e-2 if rounds else 1e-5)
    assert divided[3] == pytest.approx(whole[3], rel=5e-2 if rounds else 1e-4)  # AdamW steps alike with other scales
    for name, value in whole[1].items():
        difference = (divided[1][name].float() - value.float()).abs().mean()
        assert difference <= (0.1 if rounds else 1e-3) * value.float().abs().mean() + 1e-5, name
