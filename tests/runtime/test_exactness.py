"""The exactness contract, points 1 to 4 and 7, bit for bit on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import covering
from models import Net, Trace, batches, config, first_difference, more, net, precision, rank, start, train

WORLDS = [1, 2, 3, 4]
STAGES = [0, 1, 2, 3]


def run_stages(dtype: str, accumulation: int, clipping: float, **more: Any) -> dict[int, Trace]:
    traces = {}
    for stage in STAGES:
        settings = config(
            stage, gradient_accumulation_steps=accumulation, gradient_clipping=clipping, **precision(dtype), **more
        )
        engine = start(net(), settings)
        traces[stage] = train(engine, 3 * accumulation)
        assert engine.skipped_steps == 0
        engine.destroy()
    return traces


@covering(
    world=(2, 3, more(1), more(4)),
    dtype=("fp32", "bf16", "fp16"),
    clipping=(0.3, 0.0),
    strength=1,
    always=[(2, "fp32", 0.3), (2, "bf16", 0.3), (2, "fp16", 0.0)],
)
def test_stages_are_bit_equal_without_accumulation(on_ranks, world, dtype, clipping):
    for traces in on_ranks(world, run_stages, dtype, 1, clipping):
        for stage in (1, 2, 3):
            assert first_difference(traces[stage], traces[0]) is None, f"stage {stage} beside stage 0"


@covering(world=(2, more(1), more(3), more(4)), dtype=("bf16", more("fp32"), more("fp16")), strength=1)
def test_stages_that_keep_whole_gradients_are_bit_equal_with_accumulation(on_ranks, world, dtype):
    results = on_ranks(world, run_stages, dtype, 3, 0.3)
    for traces in results:
        assert first_difference(traces[1], traces[0]) is None
        # Stages 2 and 3 shard gradients alike.
        assert first_difference(traces[3], traces[2]) is None
        # Sharded gradients round each micro-step for the wire, whole ones their sum: close, not equal.
        assert traces[2].losses == pytest.approx(traces[1].losses, rel=1e-2)
    if world == 1:
        assert first_difference(results[0][2], results[0][1]) is None


@pytest.mark.parametrize("world", [3, more(2)])
def test_all_ranks_hold_the_same_weights(on_ranks, world):
    results = on_ranks(world, run_stages, "bf16", 2, 0.3)
    for stage in STAGES:
        for other in results[1:]:
            assert first_difference(other[stage].weights, results[0][stage].weights) is None


def run_variants(stage: int, variants: list[dict[str, Any]]) -> list[Trace]:
    traces = []
    for extra in variants:
        engine = start(net(depth=5), config(stage, gradient_accumulation_steps=2, gradient_clipping=0.3, **extra))
        traces.append(train(engine, 4))
        engine.destroy()
    return traces


@covering(stage=(1, 3, more(0), more(2)))
def test_buckets_and_overlap_never_move_a_bit(on_ranks, stage):
    variants: list[dict[str, Any]] = [{}]
    variants += [{"zero_optimization": {"overlap_comm": overlap}} for overlap in (False, True)]
    variants += [
        {"zero_optimization": {"reduce_bucket_size": size, "allgather_bucket_size": size, "overlap_comm": True}}
        for size in (2, 10_000, 50_000)
    ]
    for traces in on_ranks(3, run_variants, stage, variants):
        for extra, trace in zip(variants[1:], traces[1:], strict=True):
            assert first_difference(trace, traces[0]) is None, extra


def sums_of_known_gradients(wire: str | None) -> dict[str, Any]:
    """Gradients whose sum depends on the order of addition: the engine's must be the ordered fp32 sum."""
    model = torch.nn.Linear(64, 64, bias=False)
    more = {} if wire is None else {"communication_data_type": wire}
    engine = start(model, config(2, gradient_allreduce_op="sum", **more))
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(rank())) * 10.0 ** (3 * rank())
    (engine.module.weight * values).sum().backward()
    run = engine.state.schedule.units[0].trained_params[0]
    start_, stop = run.layout.shard_range(rank())
    pieces = []
    for other in range(engine.world_size):
        piece = torch.randn(64, 64, generator=torch.Generator().manual_seed(other)) * 10.0 ** (3 * other)
        line = torch.zeros(run.layout.total)
        line[: 64 * 64] = piece.flatten()
        pieces.append(line[start_:stop] if wire is None else line[start_:stop].bfloat16().float())
    expected = {
        2: lambda p: p[0] + p[1],
        3: lambda p: (p[0] + p[1]) + p[2],
        4: lambda p: (p[0] + p[1]) + (p[2] + p[3]),
    }[engine.world_size](pieces)
    return {"got": run.grad.shard.value.clone(), "expected": expected}


@covering(wire=(None, "bf16"), world=(3, 4, 2), strength=1)
def test_the_reduction_adds_along_one_tree_in_fp32(on_ranks, world, wire):
    for result in on_ranks(world, sums_of_known_gradients, wire):
        assert result["got"].dtype == torch.float32
        assert first_difference(result["got"], result["expected"]) is None


def norm_and_gradients() -> tuple[float, float]:
    """The engine's norm beside a norm of the averaged gradient computed by plain torch in fp64."""
    engine = start(net(), config(1))
    x, y = batches(1)[0]
    reference = Net()
    reference.load_state_dict(engine.module.state_dict())
    reference(x, y).backward()
    gradients = [parameter.grad.double() for parameter in reference.parameters()]
    if engine.world_size > 1:
        for gradient in gradients:
            torch.distributed.all_reduce(gradient)
    norm = torch.stack([(gradient / engine.world_size).square().sum() for gradient in gradients]).sum().sqrt()
    engine.backward(engine(x, y))
    engine.step()
    return engine.get_global_grad_norm(), norm.item()


@pytest.mark.parametrize("world", WORLDS)
def test_the_norm_is_that_of_the_averaged_gradient(on_ranks, world):
    results = on_ranks(world, norm_and_gradients)
    assert len({got for got, _ in results}) == 1
    for got, expected in results:
        assert got == pytest.approx(expected, rel=1e-6)


def layouts() -> list[tuple[int, int, list[int]]]:
    engine = start(net(), config(2))
    return [
        (run.layout.shard_size, run.layout.total, [member.start for member in run.layout.members])
        for unit in engine.state.schedule.units
        for run in unit.params
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_shards_and_parameters_are_aligned(on_ranks, world):
    for shard_size, total, starts in on_ranks(world, layouts)[0]:
        assert shard_size % 2048 == 0
        assert shard_size * world == total
        assert all(start % 256 == 0 for start in starts)


def resting_dtypes(dtype: str, accumulation: int) -> set[torch.dtype]:
    engine = start(net(), config(1, gradient_accumulation_steps=accumulation, **precision(dtype)))
    for x, y in batches(accumulation):
        engine.backward(engine(x, y))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    return {run.grad.shard.value.dtype for unit in engine.state.schedule.units for run in unit.trained_params}


def test_a_reduced_gradient_rests_in_the_narrowest_exact_dtype(on_ranks):
    assert on_ranks(1, resting_dtypes, "bf16", 1)[0] == {torch.bfloat16}
    assert on_ranks(1, resting_dtypes, "bf16", 2)[0] == {torch.float32}
    assert on_ranks(2, resting_dtypes, "bf16", 1)[0] == {torch.float32}
