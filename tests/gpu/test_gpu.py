"""On a CUDA device: NCCL at world size 1, and two ranks on one GPU over the host-staged exchange.

Several NCCL ranks are in test_gpu_ranks.py.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from models import batches, config, net, precision, start, weights_of
from torch import nn

import onefold
from onefold.comm import Ledger, Native, Reduction, data_group
from onefold.optim.pipeline import TILE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train_on_gpu(stage: int, dtype: str, accumulation: int, overlap: bool, collective: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings = config(
        stage,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.3,
        zero_optimization={"overlap_comm": overlap, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000},
        onefold={"collective": collective},
        **precision(dtype),
    )
    engine = start(net(depth=4), settings)
    assert engine.device.type == "cuda"
    losses = []
    for x, y in batches(4 * accumulation):
        loss = engine(x.cuda(), y.cuda())
        engine.backward(loss)
        planned, held = engine.model_memory.planned_bytes(), engine.model_memory.held_bytes()
        engine.step()
        losses.append(loss.item())
    weights = {name: weight.cpu() for name, weight in weights_of(engine.module).items()}
    return {
        "losses": losses,
        "weights": weights,
        "bytes": (planned.total, held.total),
        "collective": engine.model_memory.collective_name,
        "calls": {row.operation: row.calls for row in engine.ledger.rows()},
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["losses"] == other["losses"] and all(
        torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"]
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_stages_are_bit_equal_on_one_gpu(nccl, dtype):
    runs = [nccl.run(train_on_gpu, stage, dtype, 1, True, "auto")[0] for stage in (0, 1, 2, 3)]
    for run in runs:
        assert same(runs[0], run)
        assert run["bytes"][0] == run["bytes"][1]


def test_nccl_itself_carries_the_collectives(nccl):
    native = nccl.run(train_on_gpu, 3, "bf16", 1, True, "native")[0]
    assert native["collective"] == "native"
    assert native["calls"]["reduce-scatter"] > 0
    assert native["calls"]["gather"] > 0
    assert same(native, nccl.run(train_on_gpu, 3, "bf16", 1, True, "exchange")[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_ranks_on_one_gpu_over_the_host(staged, dtype, accumulation):
    """Streams, events and order: overlapped runs equal serial ones bit for bit, in every stage."""
    runs = {
        (stage, overlap): staged.run(train_on_gpu, stage, dtype, accumulation, overlap, "auto")
        for stage in (0, 1, 2, 3)
        for overlap in (False, True)
    }
    for (stage, _), results in runs.items():
        assert results[0]["collective"] == "stagedexchange"
        reference = runs[(0 if accumulation == 1 or stage < 2 else 2, False)]
        for rank in (0, 1):
            assert same(results[rank], reference[rank])
        assert all(
            torch.equal(results[0]["weights"][name], results[1]["weights"][name]) for name in results[0]["weights"]
        )


def streams_used() -> tuple[bool, bool, bool]:
    """The native collective runs on its own stream, and finishing makes the compute stream wait for it."""
    device = torch.device("cuda", 0)
    collective = Native(data_group(), Ledger(), device)
    lane = collective._comm_stream.stream
    source, target = torch.ones(1 << 24, device=device), torch.zeros(1 << 24, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the compute stream is busy: the lane must wait for it before it reads
    source.mul_(3)
    pending = collective.start_reduce_scatter([Reduction(source, target, torch.float32, add=False)])
    busy = not lane.query()
    pending.finish()
    total = target.sum()  # queued on the compute stream, behind the event
    return lane != torch.cuda.current_stream(), busy, total.item() == 3.0 * (1 << 24)


def test_collectives_overlap_on_a_stream_of_their_own(nccl):
    assert nccl.run(streams_used)[0] == (True, True, True)


def waits_for_all_that_is_queued(stage: int, settings: dict[str, Any]) -> int:
    engine = start(net().cuda(), config(stage, **settings))
    x, y = (tensor.cuda() for tensor in batches(1)[0])
    for _ in range(2):
        engine.backward(engine(x, y))
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.backward(engine(x, y))
        engine.step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("settings", [{"bf16": {"enabled": True}}, {}, {"onefold": {"nonfinite_gradients": "ignore"}}])
def test_no_step_waits_for_all_that_is_queued(nccl, stage, settings):
    assert nccl.run(waits_for_all_that_is_queued, stage, settings) == [0]


def freed(stage: int) -> tuple[int, int]:
    evaluated_on_gpu(stage)  # what libraries allocate once
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine: onefold.Engine | None = start(net(width=256), config(stage, bf16={"enabled": True}))
    assert engine is not None
    x, y = (tensor.cuda() for tensor in batches(1)[0])
    engine.backward(engine(x, y))
    engine.step()
    del engine, x, y
    gc.collect()
    return before, torch.cuda.memory_allocated()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_deleted_engine_frees_the_gpu(nccl, stage):
    before, after = nccl.run(freed, stage)[0]
    assert after <= before


def at_rest_on_gpu() -> tuple[list[int], int]:
    """Bytes allocated after each step at stage 3, and what masters and moments come to."""
    evaluated_on_gpu(3)  # what libraries allocate once
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = start(net(width=512), config(3, bf16={"enabled": True}, zero_optimization={
        "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    }))  # fmt: skip
    x, y = (tensor.cuda() for tensor in batches(1)[0])
    found = []
    for _ in range(4):
        engine.backward(engine(x, y))
        engine.step()
        torch.cuda.synchronize()
        gc.collect()
        found.append(torch.cuda.memory_allocated() - before)
    held = engine.model_memory.held_bytes()
    assert held.parameters == held.gradients == 0
    return found, held.masters + held.states


def test_memory_at_rest_is_masters_and_moments(nccl):
    found, states = nccl.run(at_rest_on_gpu)[0]
    assert found[1] == found[2] == found[3]
    scratch = 4 * TILE["cuda"]  # the step's own tile
    assert states <= found[-1] < 1.1 * states + scratch


def evaluated_on_gpu(stage: int) -> torch.Tensor:
    engine = start(net(), config(stage, bf16={"enabled": True}))
    x, y = (tensor.cuda() for tensor in batches(1)[0])
    engine.backward(engine(x, y))
    engine.step()
    with torch.inference_mode():
        logits = engine.module.logits(x)
    engine.backward(engine(x, y))
    engine.step()
    return logits.float().cpu()


def test_bare_evaluation_between_steps_on_the_gpu(nccl, staged):
    for pool in (nccl, staged):
        assert torch.equal(pool.run(evaluated_on_gpu, 3)[0], pool.run(evaluated_on_gpu, 0)[0])


def compiled_on_gpu(stage: int) -> tuple[list[float], list[float]]:
    losses = []
    for compiles in (False, True):
        engine = start(net(width=64), config(stage, bf16={"enabled": True}))
        if compiles:
            engine.compile()
        losses.append([])
        for x, y in batches(4):
            loss = engine(x.cuda(), y.cuda())
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    return losses[0], losses[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_blocks_on_the_gpu(nccl, stage):
    eager, compiled = nccl.run(compiled_on_gpu, stage)[0]
    torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)


def save_and_resume(folder: str, saving: int, loading: int, dtype: str, background: bool, alone: bool) -> bool:
    """A run with dropout, saved on the way, beside one that goes on from the checkpoint."""

    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(depth=3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = torch.nn.functional.dropout(self.net.embed(x), 0.3)
            for block in self.net.blocks:
                h = block(h)
            return torch.nn.functional.cross_entropy(self.net.head(h).float().flatten(0, 1), y.flatten())

    def go(engine: onefold.Engine, seed: int) -> list[float]:
        losses = []
        for x, y in batches(3, seed=seed):
            loss = engine(x.cuda(), y.cuda())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = start(Dropping(), config(saving, **precision(dtype)))
    go(engine, 1)
    if not alone or torch.distributed.get_rank() == 0:
        engine.save_checkpoint(folder, background=background)
    straight = go(engine, 2), {name: weight.cpu() for name, weight in weights_of(engine.module).items()}
    engine.wait_for_checkpoint()
    other = start(Dropping(), config(loading, **precision(dtype)))
    path, _ = other.load_checkpoint(folder)
    assert path is not None
    again = go(other, 2), {name: weight.cpu() for name, weight in weights_of(other.module).items()}
    return straight[0] == again[0] and all(torch.equal(straight[1][name], again[1][name]) for name in straight[1])


@pytest.mark.parametrize(("saving", "loading"), [(0, 3), (1, 2), (2, 1), (3, 0), (3, 3)])
@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_on_the_gpu(nccl, staged, tmp_path, saving, loading, background):
    for name, pool in (("nccl", nccl), ("staged", staged)):
        assert all(pool.run(save_and_resume, str(tmp_path / name), saving, loading, "bf16", background, False))


@pytest.mark.parametrize("stage", [1, 3])
def test_rank_0_saves_alone_on_the_gpu(staged, tmp_path, stage):
    assert all(staged.run(save_and_resume, str(tmp_path), stage, 2, "fp32", False, True))


def built_where() -> tuple[set[str], int, int]:
    """Where modules are built under zero.Init, and bytes that initialize moves between host and device."""
    places: set[str] = set()

    class Layer(nn.Linear):
        def reset_parameters(self) -> None:
            places.add(self.weight.device.type)
            super().reset_parameters()

    settings = config(3, **precision("bf16"))
    with onefold.zero.Init(config_dict_or_path=settings):
        nn.Sequential(*(Layer(64, 64) for _ in range(2)))
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        start(model, settings)
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    copies = [event for event in events if "Memcpy" in event.name() and "DtoD" not in event.name()]
    return places, sum(event.nbytes() for event in copies), sum(weight.nbytes for weight in model.parameters())


def test_models_are_built_on_the_device_and_stay_there(nccl):
    places, copied, _ = nccl.run(built_where)[0]
    assert places == {"cuda"}
    assert copied < 10_000
