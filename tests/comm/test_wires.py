"""ZeRO++: hpZ is bit-equal to stage 3, quantized wires stay close, bytes equal the formulas inside and across nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Net, batches, config, first_difference, more, net, precision, start, train, weights_of

import onefold
from onefold.comm import AllGatherOp, ErrorFeedback, Ledger, Reduction, data_group, make_collective
from onefold.comm.codec import Codec
from onefold.comm.quantized import Wires
from onefold.plan import Feedback

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benchmarks lie beside the package, and are not installed

from benchmarks.traffic import ways

NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "hpZ": {"zero_hpz_partition_size": 2},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "LoCo": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 4}},
    "all": {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
}


def run(names: list[str], dtype: str, node_size: int, accumulation: int, steps: int) -> dict[str, Any]:
    found = {}
    for name in names:
        zero = {**SETTINGS[name], **NOTHING_KEPT}
        settings = config(
            3,
            zero_optimization=zero,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=0.3,
            onefold={"node_size": node_size},
            **precision(dtype),
        )
        engine = start(net(), settings)
        trace = train(engine, steps * accumulation)
        # Reading the weights has gathered them: one step more, and the next one is like all others.
        for number, (x, y) in enumerate(batches(2 * accumulation, seed=5)):
            if number == accumulation:
                before = engine.ledger.copy()
            engine.backward(engine(x, y))
            engine.step()
        rows = {(row.operation, row.group): row.bytes for row in engine.ledger.since(before).rows() if row.bytes}
        found[name] = trace, rows, [run.layout.total for unit in engine.state.schedule.units for run in unit.params]
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "node_size", "accumulation"), [(4, 2, 2), more(2, 2, 1), more(2, 2, 2), more(4, 2, 1)]
)
def test_hpz_is_bit_equal_to_stage_3(on_ranks, world, node_size, accumulation):
    for found in on_ranks(world, run, ["stage 3", "hpZ"], "bf16", node_size, accumulation, 3):
        assert first_difference(found["hpZ"][0], found["stage 3"][0]) is None


@pytest.mark.slow
@pytest.mark.parametrize("node_size", [2, 1, 4])
def test_quantized_wires_stay_close(on_ranks, node_size):
    names = ["qwZ", "qgZ", "LoCo", "all"]
    for found in on_ranks(4, run, ["stage 3", *names], "bf16", node_size, 1, 6):
        exact = found["stage 3"][0]
        for name in names:
            coded = found[name][0]
            assert not exact.same(coded), name
            assert coded.losses == pytest.approx(exact.losses, rel=2e-2), name


# What `benchmarks.traffic` calls them, whose table for many nodes stands in docs/design.md.
IN_THE_DOCS = {
    "stage 3": "two levels: sums cross in fp32",
    "hpZ": "two levels, hpZ",
    "qwZ": "two levels, qwZ",
    "qgZ": "two levels, qgZ",
    "all": "two levels, all three",
}


def traffic(name: str, totals: list[int], world: int, node: int, accumulation: int) -> dict[tuple[str, str], int]:
    """Bytes that one rank sends in a step of bf16: (operation, group) -> bytes. Groups are on one host, or across."""
    keys, sent = SETTINGS[name], {}
    nodes, code8, code4 = world // node, Codec(8), Codec(4)
    near = node - 1

    def add(operation: str, group: str, num_bytes: int) -> None:
        if num_bytes:
            sent[operation, group] = sent.get((operation, group), 0) + num_bytes

    for total in totals:
        shard = total // world
        row = code8.row_bytes(shard) if "zero_quantized_weights" in keys else 2 * shard
        everywhere, second = 2 * accumulation, 0
        if "zero_hpz_partition_size" in keys:
            everywhere, second = 1, 2 * accumulation - 1
        add("gather", "data", everywhere * near * nodes * row + second * near * 2 * total // node)
        add("gather", "across", everywhere * (nodes - 1) * row)
        if "zero_quantized_gradients" in keys:
            add("reduce inside", "data", accumulation * near * code8.row_bytes(nodes * shard))
            add("reduce across", "across", accumulation * (nodes - 1) * code4.row_bytes(shard))
        else:
            add("reduce-scatter", "data", accumulation * near * nodes * 2 * shard)
            add("reduce-scatter", "across", accumulation * (nodes - 1) * 4 * shard)
    return sent


@pytest.mark.parametrize("accumulation", [1, more(2)])
def test_bytes_inside_and_across_nodes_equal_the_formulas(on_ranks, accumulation):
    names = list(SETTINGS)
    for found in on_ranks(4, run, names, "bf16", 2, accumulation, 2):
        for name in names:
            _, rows, totals = found[name]
            moved = {key: num for key, num in rows.items() if key[0] not in ("synchronize", "broadcast")}
            assert moved == traffic(name, totals, 4, 2, accumulation), name
            if accumulation == 1 and name in IN_THE_DOCS:
                left = 2 * sum(num for (_, group), num in moved.items() if group == "across")  # of both ranks of a node
                way = next(way for way in ways(nodes=2, ranks=2) if way.name.startswith(IN_THE_DOCS[name]))
                assert left == pytest.approx(way.left * 2 * sum(totals), rel=1e-9)


def look_and_write(name: str) -> tuple[bool, bool, str]:
    """Whether weights read from outside are those of the masters, whether a look changes training, and an error."""
    traces = []
    for looks in (False, True):
        settings = config(3, zero_optimization={**SETTINGS[name], **NOTHING_KEPT}, onefold={"node_size": 2})
        engine = start(net(), {**settings, **precision("bf16")})
        losses, exact = [], True
        for x, y in batches(4):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if looks:
                whole = weights_of(engine.module)
                for key, parameter in engine.module.named_parameters():
                    exact &= torch.equal(whole[key], onefold.utils.safe_get_full_fp32_param(parameter).bfloat16())
        traces.append(losses)
    block, told = engine.module.blocks[0], ""

    def write(*_: object) -> None:
        with onefold.zero.GatheredParameters(list(block.parameters()), modifier_rank=0):
            pass

    handle = block.register_forward_hook(write)
    try:
        engine(*batches(1)[0])
    except RuntimeError as error:
        told = str(error)
    handle.remove()
    engine.destroy()
    return exact, traces[0] == traces[1], told


@pytest.mark.parametrize("name", [more("hpZ"), more("qwZ"), "all"])
def test_weights_are_exact_from_outside(on_ranks, name):
    for exact, same, told in on_ranks(4, look_and_write, name):
        assert exact
        assert same
        assert ("would round all of its values" in told) == (name != "hpZ")


def errors_beside_the_formula(beta: float, rounds: int) -> list[tuple[float, float, float]]:
    """For each reduction: the largest difference of the kept error, and of the sum, to those by hand; and one step of
    the int8 in which errors are kept.
    """
    group, device = data_group(1), torch.device("cpu")
    numel = group.size * 2048
    codec, lost = Codec(4), ErrorFeedback()
    wires = Wires(inside=Codec(8), across=codec, feedback=Feedback(beta, 1 << 20))
    collective = make_collective("exchange", group, Ledger(), device, wires)
    errors, found = [torch.zeros(group.size, 2048) for _ in range(group.size)], []
    for number in range(rounds):
        sources = [
            torch.randn(numel, generator=torch.Generator().manual_seed(100 * number + r)) for r in range(group.size)
        ]
        target = torch.zeros(2048)
        mine = sources[group.rank].clone()
        collective.start_reduce_scatter([Reduction(mine, target, torch.float32, False, error=lost)]).finish()
        total = torch.zeros(2048)
        for r, source in enumerate(sources):
            rows = source.view(group.size, -1) + errors[r]
            decoded = codec.decode(codec.encode(rows))
            total += decoded[group.rank]
            errors[r] = beta * errors[r] + (1 - beta) * (rows - decoded)
        kept, expected = Codec(8).decode(lost.kept["across"]), errors[group.rank]
        found.append(
            (
                (kept - expected).abs().max().item(),
                (target - total).abs().max().item(),
                expected.abs().max().item() / 127,
            )
        )
        for r in range(group.size):  # errors rest as integers, on every rank
            errors[r] = Codec(8).decode(Codec(8).encode(errors[r]))
    return found


@pytest.mark.parametrize("beta", [0.8, 0.2])
def test_error_feedback_is_a_moving_average_of_what_was_lost(on_ranks, beta):
    for found in on_ranks(2, errors_beside_the_formula, beta, 4):
        for kept, total, step in found:
            assert kept <= step
            assert total <= 1e-5


def coded_lines(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A line that is gathered as integers, and what every rank has put into it."""
    group = data_group(1)
    collective = make_collective("exchange", group, Ledger(), torch.device("cpu"), Wires(parameters=Codec(8)))
    own = torch.randn(2048, generator=torch.Generator().manual_seed(group.rank), dtype=dtype)
    line = torch.zeros(group.size * 2048, dtype=dtype)
    collective.start_gather([AllGatherOp(line, own, lossy=True)]).finish()
    return line, own


def test_every_rank_computes_with_the_same_rounded_line(on_ranks):
    """Its own slice is rounded too; and who asks for fp64 does not want eight bits."""
    found = on_ranks(2, coded_lines, torch.float32)
    slices = torch.stack([own for _, own in found])
    rounded = Codec(8).decode(Codec(8).encode(slices)).view(-1)
    assert not torch.equal(rounded, slices.view(-1))
    for line, _ in found:
        assert first_difference(line, rounded) is None
    found = on_ranks(2, coded_lines, torch.float64)
    for line, _ in found:
        assert first_difference(line, torch.cat([own for _, own in found])) is None


def fsdp2(quantized: bool) -> tuple[list[float], int]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from onefold.fsdp import QuantizedAllGather, QuantizedReduceScatter

    torch.manual_seed(3)
    model = Net(width=32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gather, reduce = QuantizedAllGather(), QuantizedReduceScatter(node_size=1)
    if quantized:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches(6):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gather.ledger.bytes("gather") + reduce.ledger.bytes("reduce across")


def test_fsdp2_takes_the_wires(on_ranks):
    for (plain, none), (coded, sent) in zip(on_ranks(2, fsdp2, False), on_ranks(2, fsdp2, True), strict=True):
        assert none == 0
        assert sent > 0
        assert plain != coded
        assert coded == pytest.approx(plain, rel=2e-2)
