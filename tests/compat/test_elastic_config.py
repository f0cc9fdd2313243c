"""DeepSpeed's functions for elastic batch sizes, with the calls of its own tests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from onefold.compat.deepspeed.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from onefold.compat.deepspeed.runtime.config import DeepSpeedConfigError

from onefold.compat.config import DeepSpeedConfig

RELEASE = "0.19.8"


def given(**more: Any) -> dict[str, Any]:
    section = {
        "enabled": True, "max_train_batch_size": 10_000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
        "max_gpus": 1500, "min_time": 20, "version": 0.1,
    }  # fmt: skip
    return {"elasticity": {**section, **more}}


def compute(config: dict[str, Any], *args: Any, release: str = RELEASE, **kwargs: Any) -> Any:
    return compute_elastic_config(config, release, *args, **kwargs)


def test_the_batch_and_the_numbers_of_gpus(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    batch, valid = compute(given())
    assert (batch, len(valid), type(valid)) == (9792, 23, list)
    assert compute(given(), world_size=64) == (batch, valid, 17)
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute(given(), world_size=128)


def test_the_number_of_gpus_of_the_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for config, more in ((given(), {"return_microbatch": True}), (given(version=0.2), {})):
        with pytest.raises(ElasticityConfigError, match="Pass world_size, or set the environment variable"):
            compute(config, **more)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute(given(), return_microbatch=True)[::2] == (9792, 17)
    assert len(compute(given(version=0.2))) == 2
    assert len(compute(given(version=0.2), return_microbatch=True)) == 3
    monkeypatch.setenv("WORLD_SIZE", "128")
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute(given(), return_microbatch=True)


def test_ranks_of_a_model_count_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    config = given(version=0.2, model_parallel_size=4, num_gpus_per_node=8)
    batch, valid, micro = compute(config, return_microbatch=True)
    assert 4 in valid
    assert batch // 4 % micro == 0


@pytest.mark.parametrize(
    "more",
    [
        {"enabled": False},
        {"version": "0.3"},
        {"max_train_batch_size": None},
        {"micro_batch_sizes": []},
        {"micro_batch_sizes": 5},
        {"micro_batch_sizes": [1, 4, -1, 2, -10]},
        {"micro_batch_sizes": ["a", None, 0.5]},
        {"micro_batch_sizes": [2, 0.5, 4]},
        {"min_gpus": -1},
        {"max_gpus": -1},
        {"model_parallel_size": 4, "num_gpus_per_node": 8},
        {"model_parallel_size": 16, "num_gpus_per_node": 8, "version": 0.2},
    ],
)
def test_configs_that_cannot_be_used_have_deepspeeds_error(more):
    with pytest.raises(ElasticityConfigError):
        compute(given(**more), world_size=64)


def test_other_errors():
    with pytest.raises(ElasticityConfigError, match="has no elasticity"):
        compute({})
    with pytest.raises(ElasticityError, match=r"DeepSpeed 0\.2 has no elasticity"):
        compute(given(), release="0.2")
    with pytest.raises(ValueError, match="as a dict, not str"):
        compute("ds_config.json")  # type: ignore[arg-type]
    assert issubclass(ElasticityError, DeepSpeedConfigError)
    assert elasticity_enabled(given())
    assert not elasticity_enabled({})


def test_the_config_of_the_scheduler_is_compared(monkeypatch):
    ours = given()["elasticity"]
    ensure_immutable_elastic_config(ours)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(ours))
    ensure_immutable_elastic_config(ours)
    with pytest.raises(ElasticityConfigError, match=r"elasticity\.max_train_batch_size is 9000"):
        ensure_immutable_elastic_config({**ours, "max_train_batch_size": 9000})


def test_a_config_object_has_the_elastic_batch():
    section = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3]}
    config = DeepSpeedConfig({"elasticity": section})
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (12, 3)
    assert config.gradient_accumulation_steps == 4
    assert config.elasticity_enabled
    config._configure_train_batch_size()
    assert config.train_batch_size == 12
    with pytest.raises(ElasticityConfigError, match="train_batch_size and elasticity"):
        DeepSpeedConfig({"train_batch_size": 2, "elasticity": section})
