"""Several NCCL ranks on one GPU ([Note: NCCL ranks on one GPU] in ranks.py): what is sharded, as on CPU ranks.

NCCL adds up in an order of its own, so stages are compared within rounding. Between GPUs the same calls are made; that
has not been run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import batches, config, net, precision, rank, start, weights_of
from torch import nn

import onefold

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# How far losses may be apart, relatively, and weights in the mean: where 16-bit sums round a small gradient to another
# sign, Adam moves one weight the other way.
DTYPES = {"fp32": (1e-5, 1e-6), "bf16": (3e-2, 1e-3), "fp16": (5e-3, 3e-4)}


def train(engine: onefold.Engine, num: int, seed: int = 0) -> list[float]:
    losses = []
    for x, y in batches(num, seed=seed):
        loss = engine(x.cuda(), y.cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(settings: dict[str, Any], init: bool = False) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
    with onefold.zero.Init(config_dict_or_path=settings, enabled=init):
        torch.manual_seed(5)
        model = net(tied=True)
    engine = start(model, settings)
    losses = train(engine, 4 * engine.gradient_accumulation_steps())
    weights = {name: weight.float().cpu() for name, weight in weights_of(engine.module).items()}
    return losses, weights, {row.operation for row in engine.ledger.rows()}


def assert_close(found: Any, expected: Any, dtype: str) -> None:
    of_losses, of_weights = DTYPES[dtype]
    for got, wanted in zip(found, expected, strict=True):
        assert got[0] == pytest.approx(wanted[0], rel=of_losses)
        for name, weight in wanted[1].items():
            assert (got[1][name] - weight).abs().mean() < of_weights, name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stages_train_alike(on_nccl_ranks, world, dtype):
    more = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3, **precision(dtype)}
    expected = on_nccl_ranks(world, trained, config(0, **more))
    for other in expected[1:]:
        for name, weight in expected[0][1].items():
            assert torch.equal(other[1][name], weight), "all ranks have the same weights"
    for stage in (1, 2, 3):
        for overlap in (False, True):
            settings = config(stage, zero_optimization={"overlap_comm": overlap}, **more)
            assert_close(on_nccl_ranks(world, trained, settings), expected, dtype)
    assert_close(on_nccl_ranks(world, trained, config(3, **more), True), expected, dtype)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {"stage": 3, "zero_hpz_partition_size": 2},
        {"stage": 3, "mics_shard_size": 2},
    ],
)
def test_other_places_of_states_train_alike(on_nccl_ranks, zero):
    expected = on_nccl_ranks(4, trained, config(0, **precision("bf16")), node_size=2)
    settings = config(3, zero_optimization=zero, **precision("bf16"))
    assert_close(on_nccl_ranks(4, trained, settings, node_size=2), expected, "bf16")


def test_quantized_wires_stay_close(on_nccl_ranks):
    expected = on_nccl_ranks(4, trained, config(0, **precision("bf16")), node_size=2)
    wires = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    found = on_nccl_ranks(4, trained, config(3, zero_optimization=wires, **precision("bf16")), node_size=2)
    for got, wanted in zip(found, expected, strict=True):
        assert got[0] == pytest.approx(wanted[0], rel=0.02)


def evaluated_unevenly() -> list[float]:
    """Ranks evaluate different numbers of batches, then train on."""
    engine = start(net(), config(3, **precision("bf16")))
    train(engine, 2)
    engine.eval()
    with torch.no_grad():
        for x, y in batches(1 + 2 * rank(), seed=7):
            engine(x.cuda(), y.cuda())
    engine.train()
    return train(engine, 2, seed=1)


def trained_without_evaluation() -> list[float]:
    engine = start(net(), config(3, **precision("bf16")))
    train(engine, 2)
    return train(engine, 2, seed=1)


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


def saved(folder: str) -> list[float]:
    engine = start(net(), config(3, **precision("bf16")))
    train(engine, 2)
    engine.save_checkpoint(folder)
    weights = weights_of(engine.module)
    return [weights[name].double().sum().item() for name in sorted(weights)]


def loaded(folder: str, stage: int) -> list[float]:
    engine = start(net(seed=9), config(stage, **precision("bf16")))
    engine.load_checkpoint(folder)
    weights = weights_of(engine.module)
    sums = [weights[name].double().sum().item() for name in sorted(weights)]
    train(engine, 1)
    return sums


def test_checkpoints_load_on_other_numbers_of_ranks(on_nccl_ranks, tmp_path: Path):
    expected = on_nccl_ranks(4, saved, str(tmp_path))[0]
    for world, stage in ((2, 3), (2, 1), (1, 3)):
        for found in on_nccl_ranks(world, loaded, str(tmp_path), stage):
            assert found == expected
