"""The helper that says where two runs part: a failure is as good as what it names."""

from __future__ import annotations

import torch
from models import Trace, first_difference


def trace(**changed) -> Trace:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}
    return Trace(**{"losses": [3.0, 2.0], "norms": [1.0, None], "weights": weights, **changed})


def test_equal_runs_have_no_difference():
    assert first_difference(trace(), trace()) is None
    assert trace().same(trace())


def test_the_first_difference_is_named_with_its_step_and_both_values():
    assert first_difference(trace(losses=[3.0, 2.5]), trace()) == "step 1: loss: 2.5, expected 2.0"
    # The norm of a step comes before the loss of the next.
    assert first_difference(trace(norms=[1.5, None], losses=[3.0, 9.0]), trace()) == "step 0: norm: 1.5, expected 1.0"
    assert first_difference(trace(losses=[3.0, 2.0, 1.0]), trace()) == "losses: 3 of them, 2 were expected"
    assert not trace(losses=[3.0, 2.5]).same(trace())


def test_weights_are_named_with_their_first_element():
    other = trace()
    other.weights["a"][1, 0] = -1
    assert first_difference(other, trace()) == "weights a[3]: -1.0, expected 3.0; 1 of 6 elements differ"
    del other.weights["a"]
    assert first_difference(other, trace()) == "weights a: is only in what was expected"
    other = trace(weights={**trace().weights, "b": torch.zeros(2, dtype=torch.float64)})
    assert first_difference(other, trace()) == "weights b: torch.float64 (2,), expected torch.float32 (2,)"


def test_what_is_not_a_number_is_a_difference():
    nan = float("nan")
    assert first_difference(trace(losses=[nan, 2.0]), trace(losses=[nan, 2.0])) is not None
    assert first_difference({"w": torch.tensor([nan])}, {"w": torch.tensor([nan])}) is not None


def test_nested_results_are_gone_through():
    assert first_difference([{"x": (1, "y")}], [{"x": (1, "z")}]) == "[0]x[1]: 'y', expected 'z'"
    assert first_difference([1, 2], [1]) == ": 2 of them, 1 were expected"
    assert first_difference({"x": None}, {"x": torch.ones(1)}) == "x: NoneType, expected Tensor"
