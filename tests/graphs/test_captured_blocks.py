"""Captured blocks: bits of eager steps in every stage, and what stays eager. A recorder stands in for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
from graph_cases import (
    CASES,
    EAGER,
    DrawingBlock,
    ReadingBlock,
    StoringBlock,
    hooked,
    in_another_order,
    kept_gradients,
    odd_programs,
    other_outputs,
    planned_gradients,
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
        more(0, "plain", 1), more(1, "accumulation", 1), more(2, "clipping", 1), more(3, "plain", 1),
        more(2, "offload", 1), (3, "fp16", 1),
        more(3, "accumulation", 2), (2, "overlap", 2), more(0, "fp16", 1), more(2, "autocast", 1),
        more(3, "offload", 2), more(3, "fp32", 2), more(1, "plain", 2),
    ],
)  # fmt: skip
def test_bits_are_those_of_eager_steps(on_ranks, tmp_path, world, case, stage):
    assert case in CASES
    assert on_ranks(world, recorded, problems, str(tmp_path), stage, case) == [[]] * world


@pytest.mark.parametrize(
    ("stage", "case"), [(0, "fp16"), more(1, "accumulation"), more(2, "plain"), more(2, "clipping"), more(2, "overlap"),
                        more(0, "fp32"), more(2, "autocast"), more(2, "offload")],
)  # fmt: skip
def test_a_model_captured_as_a_whole_has_the_bits_of_eager_steps(on_ranks, tmp_path, case, stage):
    assert on_ranks(1, recorded, problems, str(tmp_path), stage, case, "model") == [[]]


@pytest.mark.parametrize("stage", [1, more(0), more(2)])
def test_several_ranks_capture_the_model_if_they_are_asked_to(on_ranks, tmp_path, stage):
    assert on_ranks(2, recorded, problems, str(tmp_path), stage, "clipping", "model") == [[], []]


def test_gradients_of_a_captured_model_may_be_kept_and_written(on_ranks):
    ((eager, graphs),) = on_ranks(1, recorded, kept_gradients)
    assert graphs == eager


def test_a_backward_from_another_output_is_refused(on_ranks):
    (((eager, graphs), error),) = on_ranks(1, recorded, other_outputs)
    assert graphs == eager
    assert "an output that had no gradient" in error


@pytest.mark.parametrize("kind", [StoringBlock, DrawingBlock])
def test_a_model_that_a_graph_cannot_repeat_runs_eagerly(on_ranks, kind):
    ((reasons, num_replays),) = on_ranks(1, recorded, reasons_of, kind, "model")
    assert num_replays == 0
    assert any(EAGER[kind] in reason for reason in reasons)


@pytest.mark.parametrize("kind", [kind for kind in EAGER if kind is not ReadingBlock])
def test_blocks_that_graphs_cannot_repeat_run_eagerly(on_ranks, kind):
    ((reasons, num_replays),) = on_ranks(1, recorded, reasons_of, kind)
    assert num_replays == 0
    assert len(reasons) == 1
    assert EAGER[kind] in reasons.pop()


def test_hooks_run(on_ranks):
    assert on_ranks(1, recorded, hooked) == [[4, 4, 3]]


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_programs_that_hold_several_graphs(on_ranks, scope):
    ((eager, graphs, error),) = on_ranks(1, recorded, odd_programs, scope)
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


@pytest.mark.parametrize(
    ("scope", "stage", "is_whole"), [("model", 2, True), ("on", 2, True), ("blocks", 2, False), ("on", 3, False)]
)
def test_the_plan_counts_the_gradients_of_a_captured_model(on_ranks, scope, stage, is_whole):
    ((in_use, gradients),) = on_ranks(1, recorded, planned_gradients, scope, stage)
    assert (in_use == gradients) == is_whole
    assert in_use <= gradients
