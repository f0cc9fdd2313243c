"""Models that torchao has converted train in every stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import batches, config, first_difference, more, start, train
from test_fp8 import Wide

from onefold.config import load_config


def converted(options: dict[str, Any], *, before: bool) -> tuple[Any, torch.optim.Optimizer]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = replace(Float8LinearConfig(**options), emulate=True)
    convert_to_float8_training(model, config=made, module_filter_fn=lambda _, name: "blocks" in name)
    return model, optimizer if before else torch.optim.SGD(model.parameters(), lr=0.1)


def problems_of_stages(options: dict[str, Any], before: bool) -> list[str | None]:
    settings = {key: value for key, value in config(0).items() if key != "optimizer"}
    plain, sgd = converted({}, before=True)
    losses = []
    for x, y in batches(4) if torch.distributed.get_world_size() == 1 else ():
        sgd.zero_grad()
        loss = plain(x, y)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    found, expected = [], None
    for stage in range(4):
        model, optimizer = converted(options, before=before)
        engine = start(model, settings | {"zero_optimization": config(stage)["zero_optimization"]}, optimizer=optimizer)
        got = train(engine, 4)
        kinds = {type(block.up).__name__ for block in engine.module.blocks}
        found.append(None if kinds == {"Float8Linear"} else f"stage {stage}: {kinds}")
        expected = expected or got
        found.append(first_difference(got, expected, f"stage {stage}: "))
        if losses:
            found.append(first_difference(got.losses, losses, f"stage {stage}: plain torch: "))
    return [each for each in found if each]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("world", "before"), [(1, True), (2, True), more(2, False)])
def test_stages_are_bit_equal(on_ranks, world, before, wrapped):
    pytest.importorskip("torchao.float8")
    options = {"enable_fsdp_float8_all_gather": True} if wrapped else {}
    assert on_ranks(world, problems_of_stages, options, before) == [[]] * world


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, (True, None)),
        ({"backend": "AO", "enable_fsdp_float8_all_gather": True}, (True, None)),
        ({"backend": "AO", "enable_fsdp_float8_all_gather": False}, (True, False)),
    ],
)
def test_a_config_of_accelerate_selects_fp8(section, expected):
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "mixed_precision": "fp8"}
    found = load_config(document | {"fp8_config": section})
    assert found.bf16.enabled
    assert (found.fp8.enabled, found.fp8.all_gather) == expected
    assert not found.refusals


def test_other_backends_of_accelerate_are_refused():
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "mixed_precision": "fp8"}
    assert "fp8_config.backend = TE" in load_config(document | {"fp8_config": {"backend": "TE"}}).refusals[0]
