"""Muon on a GPU: torch's to the bit on one rank, the same bits in every stage and tier, on several NCCL ranks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Net, Trace, batches, config, first_difference, precision, start, train, weights_of
from test_muon import WIDTH, muon, run_tiers

from onefold.comm import local_device
from onefold.optim import matrix_rules

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


@pytest.mark.parametrize("momentum", [0.95, 0.3])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_averages_are_those_of_torch(momentum: float, nesterov: bool, dtype: torch.dtype, on_gpu: bool) -> None:
    kernels = matrix_rules._kernels(torch.empty(1, device="cuda"))
    assert kernels is not None
    gradient, mean = torch.randn(100_003, device="cuda").to(dtype), torch.randn(100_003, device="cuda")
    update, wanted = torch.empty_like(mean, dtype=torch.bfloat16), mean.clone()
    factor = torch.tensor(0.37, device="cuda") if on_gpu else 0.37
    kernels.average(gradient, factor, None, mean, update, momentum, nesterov=nesterov)
    scaled = gradient.float() * 0.37
    wanted.lerp_(scaled, 1 - momentum)
    assert torch.equal(mean, wanted)
    assert torch.equal(update, (scaled.lerp(wanted, momentum) if nesterov else wanted).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_moves_are_those_of_torch(dtype: torch.dtype | None) -> None:
    """With weights that were written from outside, where there are weights."""
    kernels = matrix_rules._kernels(torch.empty(1, device="cuda"))
    master, update = torch.randn(100_003, device="cuda"), torch.randn(100_003, device="cuda").bfloat16()
    weights, wanted = master.to(dtype) if dtype else None, master.clone()
    if weights is not None:
        weights[::1000] = 0.5
        wanted[::1000] = torch.where(wanted[::1000].to(dtype) == 0.5, wanted[::1000], 0.5)
    kernels.move(master, update, weights, None, 0.9997, -0.0213, takes_over=weights is not None)
    wanted.mul_(0.9997).add_(update, alpha=-0.0213)
    assert torch.equal(master, wanted)
    assert weights is None or torch.equal(weights, wanted.to(dtype))


@pytest.mark.parametrize("rule", [matrix_rules.MuonRule(), matrix_rules.ShampooRule()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512), (1024, 1024)])
def test_work_needs_the_memory_that_is_planned(rule: Any, shape: tuple[int, int]) -> None:
    hyper = {"ns_coefficients": "quintic", "ns_steps": 5, "eps": 1e-7, "covariance_decay": 0.95,
             "covariance_eps": 1e-6, "root_every": 1}  # fmt: skip
    kept: dict[str, torch.Tensor] = {}
    for step in (1, 2, 3):
        matrix = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = rule.work(matrix, kept, hyper, step)
        peak = torch.cuda.max_memory_allocated() - before
    assert sum(value.nbytes for value in kept.values()) == rule.kept_bytes(*shape)
    planned = rule.workspace(*shape) + result.nbytes
    assert 0.4 * planned < peak < 1.05 * planned + (1 << 20), (peak, planned)


def skipped(has_kernels: bool, zero: dict[str, Any]) -> tuple[str | None, int, bool, Trace]:
    """A step with gradients that are not finite: what it has changed, how many there were, whether the device decides,
    and the steps after it.
    """
    usual = matrix_rules._kernels
    if not has_kernels:
        matrix_rules._kernels = lambda tensor: None
    own = {"nonfinite_gradients": "skip"}
    settings = config(2, gradient_clipping=0.3, optimizer=muon(), zero_optimization=zero, onefold=own)
    engine = start(on_device(), {**settings, **precision("bf16")})
    train(engine, 2)

    def held() -> list[torch.Tensor]:
        engine.wait_for_step()
        stores = engine.state.step.stores
        return [buffer.fetch().clone() for store in stores for buffer in (store.master, *store.states.values())]

    before = held()
    (x, y), *_ = batches(1)
    engine.backward(engine(x, y) * torch.inf)
    engine.step()
    told = first_difference(held(), before)
    queued = engine.state.step.can_be_decided_later(engine.optimizer)
    trace, num_skipped = train(engine, 2), engine.skipped_steps
    engine.destroy()
    matrix_rules._kernels = usual
    return told, num_skipped, queued, trace


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "host"])
def test_a_step_that_is_none_changes_nothing(on_nccl_ranks, zero):
    traces = []
    for has_kernels in (True, False):
        ((told, num_skipped, queued, trace),) = on_nccl_ranks(1, skipped, has_kernels, zero)
        assert told is None
        assert num_skipped == 1
        assert queued == (not zero)
        traces.append(trace)
    assert first_difference(*traces) is None


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
