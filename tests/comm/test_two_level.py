"""Collectives that cross between nodes once a node: the bits of one level, on nodes of any sizes, and fewer bytes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from models import Trace, config, first_difference, more, net, precision, start, train

from onefold.comm import AllGatherOp, Ledger, Reduction, data_group, make_collective, mesh, tree
from onefold.comm.nodes import Nodes
from onefold.comm.tree import add_branches, add_tree, branches_of
from onefold.config import ConfigError, check_topology, load_config

CPU = torch.device("cpu")
Sent = dict[tuple[str, str], int]


# -- nodes and branches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "sizes"),
    [
        ([2, 2, 2, 2], (2, 2)),
        ([2, 2, 1, 1], (2, 1, 1)),
        ([1, 3, 3, 3], (1, 3)),
        ([4, 4, 4, 4], (4,)),
        ([1, 1], (1, 1)),
        ([3, 3, 3, 3], (4,)),  # of another group of ranks: it does not fit
        ([2, 1, 2, 1], (4,)),
        ([0, 1], (2,)),
    ],
)
def test_nodes_are_what_the_launcher_says(told, sizes):
    assert Nodes.from_launcher(told).sizes == sizes


def test_a_rank_has_one_agent_on_each_node():
    nodes = Nodes((2, 1, 3))
    assert [nodes.of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [[nodes.agent(node, rank) for node in range(3)] for rank in range(6)] == [
        [0, 2, 3], [1, 2, 4], [0, 2, 3], [0, 2, 3], [1, 2, 4], [0, 2, 5],
    ]  # fmt: skip
    assert (nodes.common_size, Nodes((2, 2)).common_size) == (6, 2)
    assert [nodes.among(range(first, first + 2)).sizes for first in (0, 2, 4)] == [(2,), (1, 1), (2,)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 1 << 30), st.booleans())
def test_branches_of_nodes_add_up_to_the_tree_over_ranks(sizes, seed, add):
    nodes = Nodes(tuple(sizes))
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(5, generator=generator) * 10.0 ** (rank % 5) for rank in range(nodes.num_ranks)]
    sums = {}
    for node in range(len(sizes)):
        for branch in branches_of(nodes.ranks(node), nodes.num_ranks):
            sums[branch] = torch.empty(5)
            add_tree([pieces[rank] for rank in branch], sums[branch])
    expected, found = torch.ones(5), torch.ones(5)
    add_tree(pieces, expected, add=add)
    add_branches(sums, found, add=add)
    assert torch.equal(found, expected)


def test_a_node_of_a_power_of_two_in_its_place_is_one_branch():
    for size in (1, 2, 4, 8):
        nodes = Nodes.of_size(size, 32)
        assert all(len(branches_of(nodes.ranks(node), 32)) == 1 for node in range(32 // size))
    assert branches_of(range(3, 6), 6) == [range(3, 4), range(4, 6)]


# -- collectives -------------------------------------------------------------------------------------------------------


def moved(
    kind: str, sizes: tuple[int, ...], dtype: torch.dtype, inbox: int, node_sums: torch.dtype, add: bool
) -> tuple[list[torch.Tensor], Sent]:
    """Three gradients are reduced, the sums gathered, all and by spans; what came out, and what was sent."""
    group, ledger = replace(data_group(1), nodes=Nodes(sizes)), Ledger()
    collective = make_collective(kind, group, ledger, CPU, node_sums=node_sums)
    assert type(collective).__name__ == ("TwoLevel" if kind == "auto" and 1 < len(sizes) < group.size else "Exchange")
    tree.INBOX_BYTES, before = inbox, tree.INBOX_BYTES
    generator = torch.Generator().manual_seed(group.rank)
    found, pending = [], []
    try:
        for number, width in enumerate((64, 1000, 2048)):
            source = (torch.randn(group.size * width, generator=generator) * 10.0 ** (group.rank % 3)).to(dtype)
            target = torch.ones(width) if add else source[group.rank * width : (group.rank + 1) * width]
            reductions = [Reduction(source, target, dtype, add)]
            if number:  # a gradient that is cast for the wire, beside it
                reductions.append(Reduction(source.float() + 1, torch.zeros(width), dtype, add=True))
            pending.append(collective.start_reduce_scatter(reductions))
            found += [reduction.target for reduction in reductions]
        for each in pending:
            each.finish()
        lines = [torch.zeros(group.size * target.numel(), dtype=target.dtype) for target in found]
        pending = [collective.start_gather([AllGatherOp(line, own)]) for line, own in zip(lines, found, strict=True)]
        if group.size % 2 == 0:
            lines.append(torch.zeros(200))
            pending.append(collective.start_gather([AllGatherOp(lines[-1], found[-1][:100].float(), span=2)]))
        for each in pending:
            each.finish()
    finally:
        tree.INBOX_BYTES = before
    rows = {(row.operation, row.group): row.bytes for row in ledger.rows() if row.bytes}
    return [*(each.clone() for each in found), *lines], rows


SIZES = [(2, 2), (1, 1, 2), (1, 3), (4,), (1, 1, 1, 1), (2, 1, 1)]


@covering(sizes=SIZES, dtype=(torch.float32, torch.bfloat16), inbox=(1 << 27, 3000), add=(False, True), strength=1)
def test_two_levels_give_the_bits_of_one(on_ranks, sizes, dtype, inbox, add):
    expected = on_ranks(4, moved, "exchange", sizes, dtype, inbox, torch.float32, add)
    found = on_ranks(4, moved, "auto", sizes, dtype, inbox, torch.float32, add)
    for (mine, _), (theirs, _) in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 3), (2, 4), (2, 2, 2), (1, 5), (2, 3)], ids=str)
def test_two_levels_give_the_bits_of_one_on_more_ranks(on_ranks, sizes):
    for dtype in (torch.float32, torch.float16):
        expected = on_ranks(sum(sizes), moved, "exchange", sizes, dtype, 3000, torch.float32, False)
        found = on_ranks(sum(sizes), moved, "auto", sizes, dtype, 3000, torch.float32, False)
        for (mine, _), (theirs, _) in zip(found, expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_traffic_crosses_once_a_node(on_ranks):
    """On two nodes of two ranks: gathers cross half as often, sums of two in fp32 as two gradients in bf16."""
    for dtype, of_reductions in ((torch.float32, 0.5), (torch.bfloat16, 1.0)):
        (_, flat), *_ = on_ranks(4, moved, "exchange", (2, 2), dtype, 1 << 27, torch.float32, True)
        (_, sent), *_ = on_ranks(4, moved, "auto", (2, 2), dtype, 1 << 27, torch.float32, True)
        assert sent["gather", "across"] == flat["gather", "across"] / 2
        assert sent["reduce-scatter", "across"] == of_reductions * flat["reduce-scatter", "across"]


def test_sums_that_cross_in_16_bits_are_rounded_once(on_ranks):
    exact = on_ranks(4, moved, "auto", (2, 2), torch.bfloat16, 1 << 27, torch.float32, True)
    found = on_ranks(4, moved, "auto", (2, 2), torch.bfloat16, 1 << 27, torch.bfloat16, True)
    for (mine, sent), (theirs, before) in zip(found, exact, strict=True):
        assert sent["reduce-scatter", "across"] == before["reduce-scatter", "across"] / 2
        assert any(not torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1.0)  # of sums of 100 and of -100


# -- engines -----------------------------------------------------------------------------------------------------------


def trained(stage: int, dtype: str, sizes: tuple[int, ...], extra: dict[str, Any]) -> tuple[Trace, Sent, str]:
    """With nodes as a launcher tells each of its ranks, which may be of different sizes."""
    rank = torch.distributed.get_rank()
    nodes = Nodes(sizes)
    before, mesh._mesh = mesh._mesh, None
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[nodes.of(rank)])
    try:
        engine = start(net(), config(stage, gradient_clipping=0.5, **precision(dtype), **extra))
        trace = train(engine, 4 * engine.batch.accumulation)
        sent = {(row.operation, row.group): row.bytes for row in engine.ledger.rows() if row.bytes}
        return trace, sent, engine.model_memory.collective_name
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        mesh._mesh = before


@covering(stage=(1, 3, more(0), more(2)), dtype=("bf16", "fp32"), strength=1)
def test_training_does_not_depend_on_how_ranks_are_spread(on_ranks, stage, dtype):
    one, *spread = [on_ranks(4, trained, stage, dtype, sizes, {}) for sizes in [(4,), (2, 2), (2, 1, 1), (1,) * 4]]
    assert {name for _, _, name in one} == {"exchange"}
    assert {name for _, _, name in spread[0] + spread[1]} == {"twolevel"}
    for other in spread:
        assert first_difference([trace for trace, *_ in other], [trace for trace, *_ in one]) is None
    assert spread[0][0][1]["reduce-scatter", "across"] > 0


@pytest.mark.parametrize("accumulation", [1, more(2)])
def test_sixteen_bits_between_nodes_by_a_key(on_ranks, accumulation):
    settings = {"gradient_accumulation_steps": accumulation}
    exact = on_ranks(4, trained, 3, "bf16", (2, 2), settings)
    rounded = on_ranks(4, trained, 3, "bf16", (2, 2), {**settings, "onefold": {"node_sums_dtype": "bf16"}})
    for (mine, sent, _), (theirs, before, _) in zip(rounded, exact, strict=True):
        assert sent["reduce-scatter", "across"] == before["reduce-scatter", "across"] / 2
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-2)
        assert first_difference(mine, theirs) is not None


def test_sums_in_fp16_need_a_loss_scale():
    settings = {"train_batch_size": 4, "onefold": {"node_sums_dtype": "fp16"}}
    with pytest.raises(ConfigError, match=r"onefold\.node_sums_dtype = \"fp16\" needs fp16\.enabled"):
        check_topology(load_config(settings), 4)
    check_topology(load_config({**settings, "fp16": {"enabled": True}}), 4)
