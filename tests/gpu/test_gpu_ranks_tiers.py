"""Where states rest and how they travel, on several NCCL ranks that share one GPU: second shards, host and disk, the
exchange over the host, nodes, MiCS, and quantized wires.

Inside one node runs are compared to the bit. Between nodes NCCL adds in an order of its own, and wires round: there
they are compared within that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Trace, assert_alike, batches, config, first_difference, net, precision, start, train
from test_gpu_offload import check_tiers, run_tiers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU = {"device": "cpu"}
# Nothing is kept whole, so that every use gathers.
NOTHING_KEPT = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def run(stage: int, dtype: str, zero: dict[str, Any]) -> tuple[Trace, dict[str, int], str]:
    """A run, the bytes of one more step by operation, and the collective that carried them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    zero = {**zero, **NOTHING_KEPT} if stage == 3 else zero
    settings = config(stage, zero_optimization=zero, gradient_clipping=0.3, **precision(dtype))
    engine = start(net(width=64, depth=4), settings)
    trace = train(engine, 6)
    before = engine.ledger.copy()
    x, y = batches(1, seed=1)[0]
    engine.backward(engine(x, y))
    engine.step()
    sent: dict[str, int] = {}
    for row in engine.ledger.since(before).rows():
        sent[row.operation] = sent.get(row.operation, 0) + row.bytes
    name = engine.model_memory.collective_name
    engine.destroy()
    return trace, sent, name


def traces(found: list[Any]) -> list[Trace]:
    for other in found[1:]:
        assert first_difference(other[0].weights, found[0][0].weights) is None, "all ranks have the same weights"
    return [each[0] for each in found]


# -- inside one node ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_a_second_shard_inside_a_node_moves_no_bit(on_nccl_ranks, size):
    expected = traces(on_nccl_ranks(4, run, 0, "bf16", {}))
    found = on_nccl_ranks(4, run, 3, "bf16", {"zero_hpz_partition_size": size})
    assert_alike(traces(found), expected, exact=True)


@pytest.mark.parametrize(("dtype", "accumulation"), [("bf16", 2), ("fp32", 1)])
def test_tiers_below_the_device_are_bit_equal(on_nccl_ranks, dtype, accumulation):
    check_tiers(on_nccl_ranks(2, run_tiers, dtype, accumulation, "auto"))


@pytest.mark.parametrize(
    ("stage", "dtype", "zero"),
    [(3, "bf16", {}), (2, "fp32", {}), (3, "bf16", {"offload_optimizer": CPU, "offload_param": CPU})],
)
def test_the_exchange_over_the_host_trains_as_nccl_does(on_nccl_ranks, staged, stage, dtype, zero):
    """Of two numbers there is one sum, whoever adds them."""
    expected, found = on_nccl_ranks(2, run, stage, dtype, zero), staged.run(run, stage, dtype, zero)
    assert_alike(traces(found), traces(expected), exact=True)
    assert [name for *_, name in found] == ["stagedexchange"] * 2
    assert "stagedexchange" not in [name for *_, name in expected]


# -- two nodes of two ranks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_node(on_nccl_ranks) -> list[Any]:
    return on_nccl_ranks(4, run, 3, "fp32", {})


@pytest.fixture(scope="module")
def plain(on_nccl_ranks) -> list[Any]:
    return on_nccl_ranks(4, run, 3, "fp32", {}, node_size=2)


def test_two_nodes_train_as_one(one_node, plain):
    assert_alike(traces(plain), traces(one_node), exact=True)
    assert {name for *_, name in one_node} == {"alltoall"}
    assert {name for *_, name in plain} == {"twolevel"}


@pytest.mark.parametrize(
    "zero",
    [
        {"zero_hpz_partition_size": 2},
        {"mics_shard_size": 2},
        {"offload_optimizer": CPU, "offload_param": CPU},
        {"stage": 2, "offload_optimizer": CPU},
        {"stage": 0},
    ],
    ids=["hpZ", "MiCS", "offload", "stage 2 offload", "stage 0"],
)
def test_other_places_of_states_train_alike(on_nccl_ranks, plain, zero):
    stage = zero.get("stage", 3)
    found = on_nccl_ranks(4, run, stage, "fp32", zero, node_size=2)
    assert_alike(traces(found), traces(plain), exact=False)
    if "mics_shard_size" in zero:
        assert found[0][1]["reduce across"] > 0


QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 4}}
WIRES: dict[str, dict[str, Any]] = {
    "qwZ": QWZ,
    "qgZ": QGZ,
    "LoCo": {**QGZ, **LOCO},
    "all": {**QWZ, **QGZ, **LOCO, "zero_hpz_partition_size": 2},
}


@pytest.mark.parametrize("name", WIRES)
def test_quantized_wires_stay_close(on_nccl_ranks, plain, name):
    keys = WIRES[name]
    found = on_nccl_ranks(4, run, 3, "fp32", keys, node_size=2)
    for (mine, sent, _), (theirs, expected, _) in zip(found, plain, strict=True):
        assert mine.losses != theirs.losses, "nothing was rounded"
        assert mine.losses == pytest.approx(theirs.losses, rel=0.02)
        if "zero_quantized_weights" in keys:  # int8 for fp32; a second shard is gathered as it is
            assert sent["gather"] < (0.5 if "zero_hpz_partition_size" in keys else 0.26) * expected["gather"]
        if "zero_quantized_gradients" in keys:  # int8 inside a node; across it int4, of half as many
            assert 0 < sent["reduce across"] < 0.3 * sent["reduce inside"] < 0.1 * expected["reduce-scatter"]
    traces(found)
    if name == "LoCo":
        without = on_nccl_ranks(4, run, 3, "fp32", QGZ, node_size=2)
        assert found[0][0].losses != without[0][0].losses, "no error was fed back"
