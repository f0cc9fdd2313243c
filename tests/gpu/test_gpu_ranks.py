"""Several NCCL ranks on one GPU ([Note: NCCL ranks on one GPU] in ranks.py): what is sharded, as on CPU ranks.

Ways of running a model are in test_gpu_ranks_models.py; tiers, wires and nodes in test_gpu_ranks_tiers.py. Between GPUs
the same calls are made; that has not been run.

Tests stand in the order of their ranks: another number of them starts other processes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    ROUNDING,
    Trace,
    assert_alike,
    batches,
    config,
    first_difference,
    net,
    precision,
    rank,
    start,
    train,
    weights_of,
)
from torch import nn

import onefold
from onefold.comm import local_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(settings: dict[str, Any], init: bool = False) -> Trace:
    with onefold.zero.Init(config_dict_or_path=settings) if init else local_device():  # a seed gives others there
        torch.manual_seed(5)
        model = net(tied=True)
    engine = start(model, settings)
    trace = train(engine, 4 * engine.batch.accumulation)
    engine.destroy()
    return trace


def host_syncs(stage: int) -> int:
    """How often a step makes the host wait for the device, once programs are followed."""
    engine = start(net(), config(stage, **precision("bf16")))
    train(engine, 4)
    (x, y), *_ = batches(1)
    engine.module  # noqa: B018 - waits for what is in flight
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.backward(engine(x, y))
        engine.step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_step_waits_for_all_that_is_queued(on_nccl_ranks, stage):
    """The hang detector looks at counters of the host: it asks the device for nothing. The norm is waited for alone
    (test_gpu_steps.py).
    """
    assert on_nccl_ranks(2, host_syncs, stage) == [0, 0]


def evaluated_unevenly() -> list[float]:
    """Ranks evaluate different numbers of batches, then train on."""
    engine = start(net(), config(3, **precision("bf16")))
    train(engine, 2)
    engine.eval()
    with torch.no_grad():
        for x, y in batches(1 + 2 * rank(), seed=7):
            engine(x, y)
    engine.train()
    return train(engine, 2, seed=1).losses


def trained_without_evaluation() -> list[float]:
    engine = start(net(), config(3, **precision("bf16")))
    train(engine, 2)
    return train(engine, 2, seed=1).losses


def test_ranks_may_evaluate_different_numbers_of_batches(on_nccl_ranks):
    assert on_nccl_ranks(2, evaluated_unevenly) == on_nccl_ranks(2, trained_without_evaluation)


def written_whole() -> bool:
    engine = start(net(), config(3, **precision("bf16")))
    head: nn.Parameter = engine.module.head.weight
    with onefold.zero.GatheredParameters(head, modifier_rank=1):
        if rank() == 1:
            head.data.fill_(0.5)
    streamed = {name: bool((value == 0.5).all()) for bucket in onefold.zero.stream_weights(engine.module)
                for name, value in bucket.items()}  # fmt: skip
    return streamed["head.weight"] and not streamed["embed.weight"]


def test_whole_parameters_are_written_and_streamed(on_nccl_ranks):
    assert on_nccl_ranks(2, written_whole) == [True, True]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("world", [2, 4])
def test_stages_train_alike(on_nccl_ranks, world, dtype):
    def run(stage: int, accumulation: int, *init: bool, overlap: bool = True) -> list[Trace]:
        zero = {"overlap_comm": overlap}
        more = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.3, **precision(dtype)}
        return on_nccl_ranks(world, trained, config(stage, zero_optimization=zero, **more), *init)

    expected = run(0, 1)
    for other in expected[1:]:
        assert first_difference(other.weights, expected[0].weights) is None, "all ranks have the same weights"
    for stage in (1, 2, 3):
        assert_alike(run(stage, 1), expected, exact=True)
    # Sharded gradients are added up over ranks in each micro-step, whole ones when all have been added: two kinds.
    whole, sharded = run(0, 2), run(2, 2, overlap=False)
    assert_alike(sharded, whole, exact=False, dtype=dtype)
    assert_alike(run(1, 2), whole, exact=True)
    assert_alike(run(1, 2, overlap=False), whole, exact=True)
    for stage, overlap in ((2, True), (3, False), (3, True)):
        assert_alike(run(stage, 2, overlap=overlap), sharded, exact=True)
    assert_alike(run(3, 2, True), sharded, exact=True)


def test_nccls_own_sums_are_equal_to_rounding(on_nccl_ranks):
    found = on_nccl_ranks(4, trained, config(3, onefold={"collective": "native"}))
    assert_alike(found, on_nccl_ranks(4, trained, config(0)), exact=False)


def saved(folder: str) -> list[float]:
    engine = start(net(), config(3, **precision("bf16")))
    weights = train(engine, 2).weights
    engine.save_checkpoint(folder)
    return [weights[name].double().sum().item() for name in sorted(weights)]


def loaded(folder: str, stage: int) -> list[float]:
    engine = start(net(seed=9), config(stage, **precision("bf16")))
    engine.load_checkpoint(folder)
    weights = weights_of(engine.module)
    sums = [weights[name].double().cpu().sum().item() for name in sorted(weights)]
    train(engine, 1)
    return sums


def test_checkpoints_load_on_other_numbers_of_ranks(on_nccl_ranks, tmp_path: Path):
    expected = on_nccl_ranks(4, saved, str(tmp_path))[0]
    for world, stage in ((2, 3), (2, 1), (1, 3)):
        for found in on_nccl_ranks(world, loaded, str(tmp_path), stage):
            assert found == expected
