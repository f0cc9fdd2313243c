"""Muon on a GPU: torch's to the bit on one rank, the same bits in every stage and tier, on several NCCL ranks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Net, Trace, batches, config, first_difference, precision, start, train, weights_of
from test_muon import WIDTH, muon, run_tiers

from onefold.comm import local_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device() -> Net:
    with local_device():
        torch.manual_seed(5)
        return Net(width=WIDTH)


def run_stages(dtype: str, zero: dict[str, Any]) -> dict[int, Trace]:
    traces = {}
    for stage in range(4):
        settings = config(stage, gradient_clipping=0.3, optimizer=muon(), zero_optimization=zero, **precision(dtype))
        engine = start(on_device(), settings)
        traces[stage] = train(engine, 3)
        engine.destroy()
    return traces


def beside_torch(stage: int) -> str | None:
    model, plain = on_device(), on_device()
    matrices = [p for name, p in plain.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
    taken = {id(p) for p in matrices}
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW([p for p in plain.parameters() if id(p) not in taken], 1e-3, weight_decay=0.01, fused=True),
    ]
    engine = start(model, config(stage, optimizer=muon()))
    for x, y in batches(4):
        engine.backward(engine(x, y))
        engine.step()
        plain(x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    told = first_difference(weights_of(engine.module), weights_of(plain))
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", [0, 3])
def test_it_is_torchs_on_one_rank(on_nccl_ranks, stage):
    assert on_nccl_ranks(1, beside_torch, stage) == [None]


@pytest.mark.parametrize("world", [1, 2])
def test_every_tier_is_bit_equal(on_nccl_ranks, tmp_path, world):
    for traces, crossings in on_nccl_ranks(world, run_tiers, "bf16", str(tmp_path), 1):
        for name, trace in traces.items():
            assert first_difference(trace, traces["device"]) is None, name
        for name, (moved, planned) in crossings.items():
            assert moved == planned, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stages_are_bit_equal_on_two_ranks(on_nccl_ranks, dtype):
    for traces in on_nccl_ranks(2, run_stages, dtype, {"overlap_comm": True}):
        for stage in (1, 2, 3):
            assert first_difference(traces[stage], traces[0]) is None, f"stage {stage} beside stage 0"


def test_stages_are_bit_equal_on_four_ranks(on_nccl_ranks):
    for traces in on_nccl_ranks(4, run_stages, "bf16", {}):
        for stage in (1, 2, 3):
            assert first_difference(traces[stage], traces[0]) is None, f"stage {stage} beside stage 0"
