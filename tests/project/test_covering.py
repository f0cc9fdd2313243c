"""The helper that chooses cases: every pair is covered, the choice is stable, the rest is slow and nothing is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from covering import choose, covering
from hypothesis import given
from hypothesis import strategies as st
from models import more


def tiers(mark: pytest.MarkDecorator) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return the cases of the first tier and those of the slow one."""
    first: list[tuple[Any, ...]] = []
    slow: list[tuple[Any, ...]] = []
    for param in mark.args[1]:
        (slow if any(mark.name == "slow" for mark in param.marks) else first).append(tuple(param.values))
    return first, slow


def pairs(cases: list[tuple[Any, ...]]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_every_pair_is_covered_and_nothing_is_lost(sizes):
    dimensions = {f"d{number}": range(size) for number, size in enumerate(sizes)}
    product = list(itertools.product(*dimensions.values()))
    first, slow = tiers(covering(**dimensions))
    assert pairs(first) == pairs(product)
    assert sorted(first + slow) == product
    largest = sorted(sizes)[-2:]
    assert largest[0] * largest[1] <= len(first) <= len(product)


def test_the_choice_is_small_and_stable():
    """A test's first tier changes only where its decorator does."""
    mark = covering(stage=(0, 1, 2, 3), dtype=("fp32", "bf16"), overlap=(True, False))
    assert mark.args[0] == "stage,dtype,overlap"
    assert [param.id for param in mark.args[1] if not param.marks] == [
        "stage 0-fp32-overlap",
        "stage 0-bf16-no overlap",
        "stage 1-fp32-no overlap",
        "stage 1-bf16-overlap",
        "stage 2-fp32-overlap",
        "stage 2-bf16-no overlap",
        "stage 3-fp32-overlap",
        "stage 3-bf16-no overlap",
    ]


def test_with_strength_1_every_value_occurs():
    first, slow = tiers(covering(stage=(0, 1, 2, 3), dtype=("fp32", "bf16"), world=(2, 3), strength=1))
    assert len(first) == 4
    assert len(slow) == 12
    assert [set(values) for values in zip(*first, strict=True)] == [{0, 1, 2, 3}, {"fp32", "bf16"}, {2, 3}]


def test_a_value_that_is_marked_slow_stays_in_the_slow_tier():
    first, slow = tiers(covering(stage=(more(0), 2, 3), world=(2, more(3))))
    assert first == [(2, 2), (3, 2)]
    assert slow == [(0, 2), (0, 3), (2, 3), (3, 3)]


def test_cases_may_be_asked_for_and_ruled_out():
    first, slow = tiers(
        covering(
            stage=(0, 1, 2, 3),
            tier=("device", "host", "disk"),
            where=lambda stage, tier: tier != "disk" or stage == 3,
            always=[(3, "host")],
            strength=1,
        )
    )
    assert (3, "host") in first
    assert len(first + slow) == 9
    assert not [case for case in first + slow if case[1] == "disk" and case[0] != 3]
    assert {stage for stage, _ in first} == {0, 1, 2, 3}
    assert {tier for _, tier in first} == {"device", "host", "disk"}
    with pytest.raises(ValueError, match="no combination of stage, tier"):
        covering(stage=(0, 1), tier=("device", "host"), always=[(2, "host")])


def test_values_without_a_hash_are_told_apart():
    assert len(choose([({"a": 1}, 1), ({"a": 2}, 1), ({"a": 1}, 2), ({"a": 2}, 2)], 2)) == 4
