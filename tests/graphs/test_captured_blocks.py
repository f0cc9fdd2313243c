"""Captured blocks: bits of eager steps in every stage, and what stays eager. A recorder stands in for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
from graph_cases import (
    CASES,
    EAGER,
    ReadingBlock,
    hooked,
    in_another_order,
    odd_programs,
    problems,
    reasons_of,
    remembered,
    with_other_masks,
)
from models import more
from recorded_graphs import recorded_graphs


def recorded(case: Any, *args: Any) -> Any:
    with recorded_graphs(pytest.MonkeyPatch()):
        return case(*args)


@pytest.mark.parametrize(
    ("stage", "case", "world"),
    [
        (0, "plain", 1), (1, "accumulation", 1), (2, "clipping", 1), (3, "plain", 1), (2, "offload", 1), (3, "fp16", 1),
        (3, "accumulation", 2), (2, "overlap", 2), more(0, "fp16", 1), more(2, "autocast", 1), more(3, "offload", 2),
        more(3, "fp32", 2), more(1, "plain", 2),
    ],
)  # fmt: skip
def test_bits_are_those_of_eager_steps(on_ranks, tmp_path, world, case, stage):
    assert case in CASES
    assert on_ranks(world, recorded, problems, str(tmp_path), stage, case) == [[]] * world


@pytest.mark.parametrize("kind", [kind for kind in EAGER if kind is not ReadingBlock])
def test_blocks_that_graphs_cannot_repeat_run_eagerly(on_ranks, kind):
    ((reasons, num_replays),) = on_ranks(1, recorded, reasons_of, kind)
    assert num_replays == 0
    assert len(reasons) == 1
    assert EAGER[kind] in reasons.pop()


def test_hooks_run(on_ranks):
    assert on_ranks(1, recorded, hooked) == [[4, 4, 3]]


def test_programs_that_hold_several_graphs(on_ranks):
    ((eager, graphs, error),) = on_ranks(1, recorded, odd_programs)
    assert graphs == eager
    assert "second time" in error


def test_outputs_that_a_program_keeps_are_not_overwritten(on_ranks):
    ((eager, graphs),) = on_ranks(1, recorded, remembered)
    assert graphs == eager


def test_blocks_that_shared_an_argument_may_get_different_ones(on_ranks):
    ((eager, graphs),) = on_ranks(1, recorded, with_other_masks)
    assert graphs == eager


def test_backwards_in_another_order_are_refused(on_ranks):
    (error,) = on_ranks(1, recorded, in_another_order)
    assert "runs in another order than in the step in which it was captured" in error
