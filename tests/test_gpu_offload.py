"""Offload on a CUDA device: streams, page-locked memory, the host's step beside the device."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from models import batches, config, net, precision, start, weights_of

from onefold.plan import Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU = {"device": "cpu"}


def run_tiers(dtype: str, accumulation: int, collective: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "buffer_size": 4096}
        for name, stage, keys in [
            ("device", 2, {}),
            ("1 cpu", 1, {"offload_optimizer": CPU}),
            ("2 cpu", 2, {"offload_optimizer": CPU}),
            ("2 unpinned", 2, {"offload_optimizer": {**CPU, "pin_memory": False}}),
            ("3 cpu", 3, {"offload_optimizer": CPU}),
            ("3 cpu cpu", 3, {"offload_optimizer": CPU, "offload_param": CPU}),
            ("3 disk disk", 3, {"offload_optimizer": disk, "offload_param": disk}),
            ("2 disk", 2, {"offload_optimizer": disk}),
            ("2 half", 2, {"offload_optimizer": {**CPU, "ratio": 0.5}}),
        ]:
            settings = config(
                stage,
                gradient_accumulation_steps=accumulation,
                gradient_clipping=0.3,
                zero_optimization={**keys, "overlap_comm": True},
                onefold={"collective": collective},
                **precision(dtype),
            )
            engine = start(net(width=64, depth=6), settings)
            losses = []
            for x, y in batches(4 * accumulation):
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.wait_for_step()
            planned = {tier: engine.planned_bytes(tier) for tier in Tier}
            held = {tier: engine.held_bytes(tier) for tier in Tier}
            weights = {key: weight.cpu() for key, weight in weights_of(engine.module).items()}
            found[name] = losses, weights, planned, held
            model = engine.module
            engine.destroy()
            # What rests below the device is still the model's when the engine has gone.
            left = {key: weight.cpu() for key, weight in weights_of(model).items()}
            assert all(torch.equal(weights[key], left[key]) for key in weights), name
    return found


def check_tiers(results: list[dict[str, Any]]) -> None:
    for found in results:
        device, _half = found.pop("device"), found.pop("2 half")
        losses, weights, *_ = found["2 cpu"]
        # A GPU's fused kernel rounds differently from a CPU's: close, not equal.
        assert losses == pytest.approx(device[0], rel=2e-3)
        for name, (theirs, other, planned, held) in found.items():
            assert theirs == losses, name
            assert all(torch.equal(weights[key], other[key]) for key in weights), name
            for tier in (Tier.HOST, Tier.NVME):
                assert held[tier].masters == planned[tier].masters, (name, tier)
                assert held[tier].states == planned[tier].states, (name, tier)
        assert found["3 disk disk"][3][Tier.NVME].states > 0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("world", [1, 2])
def test_tiers_below_the_device_are_bit_equal(request, world, dtype, accumulation):
    pool = request.getfixturevalue("nccl" if world == 1 else "staged")
    check_tiers(pool.run(run_tiers, dtype, accumulation, "exchange"))


def slow_host() -> tuple[list[float], list[float]]:
    """The device must not run ahead of a host that is slow, nor free what is still being copied."""
    losses = []
    for slow in (False, True):
        engine = start(
            net(width=256, depth=6), config(2, bf16={"enabled": True}, zero_optimization={"offload_optimizer": CPU})
        )
        if slow:
            tiler, before = engine.state.step._host._tiler, engine.state.step._host._tiler.step

            def wait_first(*args: Any, before: Any = before, **kwargs: Any) -> None:
                import time

                time.sleep(0.02)
                before(*args, **kwargs)

            tiler.step = wait_first
        found = []
        for x, y in batches(6):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            found.append(loss)
        losses.append([loss.item() for loss in found])
        engine.destroy()
    return losses[0], losses[1]


def test_a_slow_host_changes_nothing(nccl):
    fast, slow = nccl.run(slow_host)[0]
    assert fast == slow


def parked() -> tuple[int, int, list[float], list[float]]:
    """Bytes that were freed, bytes that the engine holds, and losses with and without it."""
    traces = []
    for leaves in (False, True):
        engine = start(net(width=512, depth=4), config(2, bf16={"enabled": True}))
        losses = []
        for number, (x, y) in enumerate(batches(4)):
            if leaves and number == 2:
                before = torch.cuda.memory_allocated()
                engine.offload_states()
                freed, held = before - torch.cuda.memory_allocated(), engine.planned_bytes()
                engine.reload_states()
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        traces.append(losses)
        engine.destroy()
    return freed, held.total - held.gradients, traces[0], traces[1]


def test_states_leave_the_device_and_come_back(nccl):
    freed, held, straight, left = nccl.run(parked)[0]
    assert straight == left
    assert freed >= held
