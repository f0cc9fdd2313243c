"""The step under the backward on a GPU: bits, a write that comes too late, and less traffic from the device cache."""

from __future__ import annotations

import pytest
import torch
from models import batches
from test_early_step import check, make, run_both

from onefold.plan.device_cache import cached_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("world", "accumulation", "own"), [
    (1, 1, {"offloaded_step": "both"}), (1, 3, {"offloaded_step": "device", "device_cache": 1}),
    (1, 2, {"offloaded_step": "host"}), (1, 2, {}),
    (1, 1, {"offloaded_step": "device", "state_dtype": "int8", "device_cache": 1e-4}),
    (2, 2, {"offloaded_step": "both", "device_cache": 1}), (2, 1, {}),
])  # fmt: skip
def test_bits_are_those_of_a_step_after_the_backward(on_nccl_ranks, tmp_path, world, accumulation, own):
    names = ["1 cpu", "3 cpu", "3 cpu cpu"]
    check(on_nccl_ranks(world, run_both, str(tmp_path), names, accumulation, own))


def write_late(folder: str) -> str:
    engine = make(folder, "2 cpu")
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    with torch.no_grad():
        engine.module.blocks[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        engine.step()
    engine.destroy()
    return str(caught.value)


def test_a_write_before_the_step_is_refused(on_nccl_ranks, tmp_path):
    for told in on_nccl_ranks(1, write_late, str(tmp_path)):
        assert "were written between backward and step" in told


def fill_cache(folder: str, accumulation: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Bytes of the third step with a cache that the engine measures, planned and counted, and the cache's bytes."""
    engine = make(folder, "3 cpu cpu", accumulation, early=False)
    for number in range(3):
        before = engine.ledger.copy()
        for x, y in batches(accumulation, seed=number):
            engine.backward(engine(x, y))
            engine.step()
        engine.wait_for_step()
        engine.state.step.wait_for_host()
        since = engine.ledger.since(before)
    crossing = engine.model_memory.planned_offload_traffic()
    planned, held = engine.model_memory.planned_bytes(), engine.model_memory.held_bytes()
    counted = {way: since.bytes(way) for way in ("down", "up")}
    engine.destroy()
    return counted, {"down": crossing.down, "up": crossing.up}, planned.parameters, held.parameters


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_measured_cache_saves_the_planned_traffic(on_nccl_ranks, tmp_path, accumulation):
    for counted, planned, planned_bytes, held in on_nccl_ranks(1, fill_cache, str(tmp_path), accumulation):
        assert counted["down"] == planned["down"]
        assert counted["up"] <= planned["up"], "units that stay unsharded are gathered less often"
        assert held == planned_bytes


def outgrow_cache(folder: str) -> list[tuple[int, float]]:
    """Bytes of the cache and the loss after each step. The fifth step needs more memory than before."""
    engine = make(folder, "3 cpu cpu", early=False, onefold={"device_memory": 1.0})
    found = []
    for number in range(6):
        x, y = batches(1, seed=number)[0]
        if number == 4:
            torch.empty(int(0.97e9), dtype=torch.uint8, device="cuda")
        engine.backward(loss := engine(x, y))
        engine.step()
        specs = [param.spec for unit in engine.state.schedule.units for param in unit.params]
        found.append((cached_bytes(specs, engine.state.plan), loss.item()))
    engine.destroy()
    return found


def test_copies_are_freed_when_the_job_needs_their_memory(on_nccl_ranks, tmp_path):
    (found,) = on_nccl_ranks(1, outgrow_cache, str(tmp_path))
    sizes = [size for size, _ in found]
    assert sizes[0] > 0
    assert sizes[1] >= sizes[0]
    assert sizes[1] == sizes[3]
    assert sizes[4] < sizes[3]
