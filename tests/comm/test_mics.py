"""MiCS: shards over parts of the ranks, replicated across them. All parts hold the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import Net, Trace, batches, config, first_difference, more, net, precision, start, train, weights_of

import onefold
from onefold.comm import AllGatherOp, Ledger, Reduction, data_group, make_collective
from onefold.config import ConfigError
from onefold.plan import Tier
from onefold.plan.plan import DTYPES

NOTHING_KEPT = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def engine_of(part: int | None, dtype: str = "bf16", accumulation: int = 1, **zero: Any) -> Any:
    zero = {"mics_shard_size": part, **zero} if part is not None else zero
    settings = config(
        3,
        zero_optimization={**zero, **NOTHING_KEPT},
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.3,
        onefold={"node_size": 2},
        **precision(dtype),
    )
    return start(net(), settings)


def run(part: int | None, dtype: str, accumulation: int) -> Any:
    engine = engine_of(part, dtype, accumulation)
    trace = train(engine, 4 * accumulation)
    held = engine.state.step.states.state_bytes(Tier.DEVICE), engine.state.step.master_bytes(Tier.DEVICE)
    assert ("sharded over every 2 ranks" in engine.describe()) == (part == 2 < engine.world_size)
    for number, (x, y) in enumerate(batches(2 * accumulation, seed=5)):
        if number == accumulation:
            before = engine.ledger.copy()
        engine.backward(engine(x, y))
        engine.step()
    rows = {(row.operation, row.group): row.bytes for row in engine.ledger.since(before).rows() if row.bytes}
    totals = [each.layout.total for unit in engine.state.schedule.units for each in unit.params]
    engine.destroy()
    return trace, held, rows, totals


def mean_losses(found: list[Any]) -> list[float]:
    """Over ranks, by step."""
    return [sum(losses) / len(found) for losses in zip(*(trace.losses for trace, *_ in found), strict=True)]


def weights_after_training(part: int | None, dtype: str) -> dict[str, torch.Tensor]:
    zero = {**NOTHING_KEPT, **({"mics_shard_size": part} if part else {})}
    engine = start(net(), config(3, zero_optimization=zero, **precision(dtype)))
    train(engine, 4)
    return {name: weight.clone() for name, weight in weights_of(engine.module).items()}


@pytest.mark.parametrize("dtype", ["bf16", more("fp32")])
def test_parts_of_two_add_branches_of_the_tree_of_all_ranks(on_ranks, dtype):
    """Without clipping: the norm of other shards may round differently."""
    expected = on_ranks(4, weights_after_training, None, dtype)
    for found, wanted in zip(on_ranks(4, weights_after_training, 2, dtype), expected, strict=True):
        for name, weight in wanted.items():
            assert first_difference(found[name], weight) is None, name


@covering(dtype=("bf16", more("fp32")), accumulation=(2, more(1)))
def test_parts_hold_the_same_bits_and_stay_close_to_stage_3(on_ranks, dtype, accumulation):
    found = on_ranks(4, run, 2, dtype, accumulation)
    exact = on_ranks(4, run, None, dtype, accumulation)
    for trace, held, rows, totals in found:
        assert (
            first_difference(Trace([], trace.norms, trace.weights), Trace([], found[0][0].norms, found[0][0].weights))
            is None
        )
        # Sums of parts are added in another order than those of ranks, in fp32 either way.
        assert mean_losses(found) == pytest.approx(mean_losses(exact), rel=1e-5)
        assert [norm for norm in trace.norms if norm] == pytest.approx([n for n in exact[0][0].norms if n], rel=1e-5)
        rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype == "fp32" else {"rtol": 2**-7, "atol": 1e-5}
        for name, weight in exact[0][0].weights.items():
            torch.testing.assert_close(
                trace.weights[name], weight, **rounding, msg=lambda told, name=name: f"{name}: {told}"
            )
        # Parameters travel inside a host only; gradients inside, and their sums once round across.
        moved = {key: num for key, num in rows.items() if key[0] not in ("synchronize", "broadcast")}
        shards = sum(totals) // 2
        assert sum(held) == 12 * shards
        assert moved == {
            ("gather", "data"): 2 * accumulation * shards * (4 if dtype == "fp32" else 2),
            ("reduce inside", "data"): accumulation * shards * (4 if dtype == "fp32" else 2),
            ("reduce across", "across"): accumulation * shards * 4,
        }


def test_one_part_is_stage_3(on_ranks):
    for one, exact in zip(on_ranks(2, run, 2, "bf16", 1), on_ranks(2, run, None, "bf16", 1), strict=True):
        assert first_difference(one[0], exact[0]) is None


def reduce_and_gather(replicas: int, wire: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    group, ledger = data_group(replicas=replicas), Ledger()
    collective = make_collective("exchange", group, ledger, torch.device("cpu"))
    source = (torch.arange(group.num_shards * 10.0) + 1) * (group.rank + 1)
    target = torch.ones(10)
    collective.start_reduce_scatter([Reduction(source, target, DTYPES[wire], add=True)]).finish()
    line = torch.zeros(group.num_shards * 10)
    collective.start_gather([AllGatherOp(line, target)]).finish()
    return source, target, line, ledger.bytes("reduce inside")


@pytest.mark.parametrize(
    ("world", "replicas", "wire"),
    [(4, 2, "bf16"), more(4, 2, "fp32"), more(4, 4, "fp32"), more(3, 3, "fp32"), (2, 2, "fp32")],
)
def test_sums_over_all_ranks_and_gathers_inside_a_part(on_ranks, world, replicas, wire):
    """All values are small integers, which bf16 holds exactly."""
    found = on_ranks(world, reduce_and_gather, replicas, wire)
    size = world // replicas
    total = sum(source for source, *_ in found).view(size, 10) + 1
    for rank, (_, target, line, sent) in enumerate(found):
        assert sent == (size - 1) * 10 * DTYPES[wire].itemsize
        assert torch.equal(target, total[rank % size])
        assert torch.equal(line, total.view(-1))


def save_and_load(folder: Path, writes: int | None, reads: int | None) -> bool:
    first = engine_of(writes)
    train(first, 3)
    first.save_checkpoint(str(folder))
    second = engine_of(reads)
    second.load_checkpoint(str(folder))
    same = True
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            get = onefold.utils.safe_get_full_optimizer_state
            same &= torch.equal(get(one, name), get(other, name))
        same &= torch.equal(onefold.utils.safe_get_full_fp32_param(one), onefold.utils.safe_get_full_fp32_param(other))
    x, y = batches(1)[0]
    second.backward(second(x, y))
    second.step()
    first.destroy()
    second.destroy()
    return same


@pytest.mark.parametrize(("writes", "reads"), [(2, None), more(None, 2), more(2, 2)])
def test_checkpoints_go_to_any_other_plan(on_ranks, tmp_path, writes, reads):
    assert all(on_ranks(4, save_and_load, tmp_path, writes, reads))
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    numel = sum(parameter.numel() for parameter in Net().parameters())
    assert stored < 20 * numel + 200_000  # each byte once: masters, two moments, and the 16-bit weights at most


def with_other_keys() -> list[str]:
    told = []
    for part, zero in ((3, {}), (1, {}), (2, {"zero_hpz_partition_size": 2}), (2, {"zero_quantized_gradients": True})):
        with pytest.raises(ConfigError) as caught:
            engine_of(part, **zero)
        told.append(str(caught.value))
    engine = engine_of(2, zero_quantized_weights=True, offload_optimizer={"device": "cpu"})
    train(engine, 2)
    engine.destroy()
    return told


def test_what_does_not_go_together_is_named(on_ranks):
    for told in on_ranks(4, with_other_keys):
        assert "mics_shard_size = 3 does not divide the 4 ranks of this job. Use one of 1, 2, 4" in told[0]
        assert "stage 0" in told[1]
        assert "leave out zero_hpz_partition_size" in told[2]
        assert "leave out zero_quantized_gradients" in told[3]
