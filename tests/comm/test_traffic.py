"""The ledger's bytes equal the lower bounds: what a step must send, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, more, net, precision, start

from onefold.comm import AllGatherOp, Exchange, Ledger, Native, Reduction, data_group
from onefold.comm.agreement import ROW


def traffic(stage: int, dtype: str, accumulation: int, **more: Any) -> dict[str, Any]:
    engine = start(net(), config(stage, gradient_accumulation_steps=accumulation, **precision(dtype), **more))
    elements = sum(run.layout.total for unit in engine.state.schedule.units for run in unit.trained_params)
    data = batches(2 * accumulation)
    for x, y in data[:accumulation]:  # the first step also agrees on the order
        engine.backward(engine(x, y))
        engine.step()
    engine.module  # noqa: B018 - reading it waits for what is in flight
    engine.ledger.clear()
    for x, y in data[accumulation:]:
        engine.backward(engine(x, y))
        engine.step()
    return {
        "P": elements,
        "reduce": engine.ledger.bytes("reduce-scatter"),
        "gather": engine.ledger.bytes("gather"),
        "reduce calls": engine.ledger.calls("reduce-scatter"),
        "gather calls": engine.ledger.calls("gather"),
        "scalars": engine.ledger.bytes("synchronize"),
        "operations": sorted(row.operation for row in engine.ledger.rows()),
    }


@covering(world=(2, 1, 4, more(3)), dtype=("fp32", "bf16"), accumulation=(3, 1), strength=1)
def test_bytes_of_a_step_equal_the_formulas(on_ranks, world, dtype, accumulation):
    others, size = world - 1, {"fp32": 4, "bf16": 2}[dtype]
    for stage, reductions, gathered in ((0, 1, 4), (1, 1, size), (2, accumulation, size)):
        for got in on_ranks(world, traffic, stage, dtype, accumulation):
            assert got["P"] % world == 0
            # f P = P (N - 1) / N
            assert got["reduce"] == reductions * size * others * got["P"] // world
            assert got["gather"] == gathered * others * got["P"] // world
            # Beside them, one row of integers a step: partial square sum, the late flag, and where the rank is.
            assert got["scalars"] == ROW * 8 * others
            assert set(got["operations"]) <= {"reduce-scatter", "gather", "synchronize"}


def test_the_wire_dtype_is_what_travels(on_ranks):
    for got in on_ranks(2, traffic, 2, "bf16", 1, communication_data_type="fp32"):
        assert got["reduce"] == 4 * got["P"] // 2
    for got in on_ranks(2, traffic, 2, "fp32", 1, communication_data_type="bf16"):
        assert got["reduce"] == 2 * got["P"] // 2


def test_buckets_coalesce_small_units(on_ranks):
    few = on_ranks(2, traffic, 2, "fp32", 1)[0]
    many = on_ranks(2, traffic, 2, "fp32", 1, zero_optimization={"reduce_bucket_size": 2, "allgather_bucket_size": 2})[
        0
    ]
    assert few["reduce calls"] == 1
    assert few["gather calls"] == 1
    # blocks and the root, which holds the small embedding and head
    assert many["reduce calls"] == 4
    assert many["gather calls"] == 4
    assert few["reduce"] == many["reduce"]


def in_flight(limit: int) -> int:
    """The most elements that were on the wire at once during a backward."""
    engine = start(net(depth=6), config(1, zero_optimization={"overlap_comm": True, "reduce_bucket_size": limit}))
    flights, most = engine.state.schedule.in_flight, [0]
    starts = flights.collective.start_reduce_scatter

    def counting(reductions: Any) -> Any:
        pending = starts(reductions)
        flying = sum(flight.num_elements for flight in flights.reductions)
        most[0] = max(most[0], flying + sum(reduction.source.numel() for reduction in reductions))
        return pending

    flights.collective.start_reduce_scatter = counting  # type: ignore[method-assign]
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    return most[0]


def test_reduce_bucket_size_limits_what_is_in_flight(on_ranks):
    unit = 4096  # every unit of this model is padded to 2 x 2048 elements
    assert on_ranks(2, in_flight, 2 * unit)[0] == 2 * unit
    assert on_ranks(2, in_flight, 1)[0] == unit


def collectives(
    kind: str, dtype: torch.dtype, wire: torch.dtype, add: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group, ledger = data_group(), Ledger()
    device = torch.device("cpu")
    collective = Exchange(group, ledger, device) if kind == "exchange" else Native(group, ledger, device)
    size = 2048
    sources = [
        torch.randn(group.size * size, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(group.size)
    ]
    target = torch.ones(size)
    collective.start_reduce_scatter([Reduction(sources[group.rank].clone(), target, wire, add)]).finish()
    mine = slice(group.rank * size, (group.rank + 1) * size)
    expected = torch.zeros(size)
    for source in sources:
        expected += source[mine].to(wire).float()
    line = torch.zeros(group.size * 64)
    line[group.rank * 64 : (group.rank + 1) * 64] = group.rank + 1
    collective.start_gather([AllGatherOp(line)]).finish()
    return target, expected + (1.0 if add else 0.0), line


@covering(
    kind=("exchange", "native"),
    world=(2, 3),
    add=(False, True),
    dtype=(torch.float32, torch.bfloat16),
    wire=(torch.float32, torch.bfloat16),
    where=lambda dtype, wire, **_: dtype.itemsize >= wire.itemsize,
)
def test_both_collectives_reduce_and_gather(on_ranks, kind, world, add, dtype, wire):
    for got, expected, line in on_ranks(world, collectives, kind, dtype, wire, add):
        if kind == "exchange" and not add:
            assert torch.equal(got, expected)
        else:
            tolerance = 1e-5 if wire == torch.float32 else 5e-2
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert line.tolist() == [float(rank + 1) for rank in range(world) for _ in range(64)]


def gathered_together(kind: str, dtypes: list[torch.dtype]) -> list[list[float]]:
    group, ledger, device = data_group(), Ledger(), torch.device("cpu")
    collective = Exchange(group, ledger, device) if kind == "exchange" else Native(group, ledger, device)
    lines = [torch.zeros(group.size * 3, dtype=dtype) for dtype in dtypes]
    ops = [AllGatherOp(line, torch.full((3,), 7.0 + group.rank)) for line in lines]
    collective.start_gather(ops).finish()
    return [line.tolist() for line in lines]


@pytest.mark.parametrize("kind", ["exchange", "native"])
def test_flat_parameters_of_several_dtypes_are_gathered_together(on_ranks, kind):
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.uint8]
    assert on_ranks(2, gathered_together, kind, dtypes) == [[[7.0] * 3 + [8.0] * 3] * 4] * 2


def native_beside_exchange() -> list[list[float]]:
    losses = []
    for kind in ("native", "exchange"):
        engine = start(net(), config(2, onefold={"collective": kind}))
        found = []
        for x, y in batches(4):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        losses.append(found)
    return losses


def test_training_with_native_collectives_agrees(on_ranks):
    native, exchange = on_ranks(3, native_beside_exchange)[0]
    assert native == pytest.approx(exchange, rel=1e-5)
