"""Offload: the same bits in every tier, the bytes the plan says, on the host and in real files."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from models import batches, config, first_difference, more, net, precision, start, train, weights_of

import onefold

CPU = {"device": "cpu"}


def nvme(folder: str, **options: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, **options}


def variants(folder: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """name -> stage and the keys that offload."""
    on_disk, few = nvme(folder), nvme(folder, buffer_count=1, buffer_size=2048)
    return {
        "1 cpu": (1, {"offload_optimizer": CPU}),
        "2 cpu": (2, {"offload_optimizer": CPU}),
        "3 cpu": (3, {"offload_optimizer": CPU}),
        "2 half": (2, {"offload_optimizer": {**CPU, "ratio": 0.5}}),
        "3 cpu cpu": (3, {"offload_optimizer": CPU, "offload_param": CPU}),
        "3 half cpu": (3, {"offload_optimizer": {**CPU, "ratio": 0.5}, "offload_param": CPU}),
        "3 cpu disk": (3, {"offload_optimizer": CPU, "offload_param": on_disk}),
        "1 disk": (1, {"offload_optimizer": on_disk}),
        "2 disk": (2, {"offload_optimizer": {**few, "pipeline_read": False, "pipeline_write": False}}),
        "3 disk cpu": (3, {"offload_optimizer": on_disk, "offload_param": CPU}),
        "3 disk disk": (3, {"offload_optimizer": few, "offload_param": few}),
        "3 params cpu": (3, {"offload_param": CPU}),
    }


def states_of(engine: onefold.Engine) -> list[torch.Tensor]:
    """Masters and both moments of some parameters, whole."""
    from onefold.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = []
    for name, parameter in engine.module.named_parameters():
        if "blocks.1" in name or "embed" in name:
            found.append(safe_get_full_fp32_param(parameter))
            found += [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
    return found


def run_tiers(dtype: str, accumulation: int, overlap: bool | None, names: list[str] | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        common = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.3, **precision(dtype)}
        found: dict[str, Any] = {}
        for name, (stage, keys) in {"reference": (2, {}), **variants(folder)}.items():
            if names is not None and name not in ("reference", *names):
                continue
            engine = start(net(), config(stage, zero_optimization={**keys, "overlap_comm": overlap}, **common))
            trace = train(engine, 3 * accumulation)
            found[name] = trace, states_of(engine), engine.skipped_steps
            model = engine.module
            engine.destroy()
            # What rested below the device is still the model's.
            assert first_difference(weights_of(model), trace.weights) is None, name
        left = [str(path) for path in Path(folder).rglob("*") if path.is_file()]
        return {"found": found, "left": left}


def check_tiers(results: list[dict[str, Any]]) -> None:
    for result in results:
        reference, states, _ = result["found"].pop("reference")
        for name, (trace, other, skipped) in result["found"].items():
            assert skipped == 0, name
            assert first_difference(trace, reference) is None, name
            assert first_difference(other, states) is None, name
        assert result["left"] == []


@covering(world=(1, 2, more(3), more(4)), dtype=("fp16", "bf16", more("fp32")), strength=1)
def test_every_tier_is_bit_equal(on_ranks, world, dtype):
    check_tiers(on_ranks(world, run_tiers, dtype, 1, True, None))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_tier_is_bit_equal_with_accumulation(on_ranks, world, dtype):
    check_tiers(on_ranks(world, run_tiers, dtype, 3, True, None))


def delayed_and_by_hand(stage: int) -> tuple[Any, ...]:
    """The delayed step, beside a plain loop on one copy of the weights that are used and one that are stepped."""
    keys = {"offload_optimizer": CPU, **({"offload_param": CPU} if stage == 3 else {})}
    engine = start(net(), config(stage, zero_optimization=keys, onefold={"delayed_host_step": True}))
    losses = []
    for x, y in batches(5):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    described = engine.describe()
    engine.module_state_dict()
    weights = weights_of(engine.module)
    engine.destroy()

    used, stepped = net(), net()
    for model in (used, stepped):
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
    optimizer = torch.optim.AdamW(stepped.parameters(), lr=1e-2, weight_decay=0.1)
    by_hand = []
    for x, y in batches(5):
        loss = used(x, y)
        used.zero_grad()
        loss.backward()
        by_hand.append(loss.item())
        # Only now are the last step's weights used; this step's come after the next.
        with torch.no_grad():
            for old, new in zip(used.parameters(), stepped.parameters(), strict=True):
                new.grad = old.grad.clone()
                dist.all_reduce(new.grad)
                new.grad /= dist.get_world_size()
                old.copy_(new)
        optimizer.step()
    return losses, by_hand, weights, stepped.state_dict(), described


@covering(stage=(2, 3), world=(1, 2), strength=1)
def test_a_delayed_step_uses_weights_one_step_old(on_ranks, world, stage):
    for result in on_ranks(world, delayed_and_by_hand, stage):
        losses, by_hand, weights, expected, described = result
        assert losses == pytest.approx(by_hand, rel=1e-5)
        assert losses[0] != losses[1]
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)
        assert "INEXACT" in described
        assert re.search(r"offloaded step    by the host [\d,]+ parameters$", described, re.MULTILINE)
