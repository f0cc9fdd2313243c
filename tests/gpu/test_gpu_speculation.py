"""Speculative steps under the backward on a GPU: bits, and what the program does between a backward and its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batches, first_difference, weights_of
from test_speculation import BETWEEN, CASES, act_between, compare, early_step_of, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ["1 cpu", "3 cpu", "3 cpu cpu"]


@pytest.mark.parametrize(("world", "accumulation", "case", "own"), [
    (1, 1, "bf16", {"offloaded_step": "both"}), (1, 3, "bf16", {"offloaded_step": "device", "device_cache": 1}),
    (1, 2, "bf16", {"offloaded_step": "host"}), (1, 1, "int8 states", {"device_cache": 1e-4}), (1, 2, "fp16", {}),
    (2, 2, "bf16", {"offloaded_step": "both", "device_cache": 1}), (2, 1, "momentum", {}),
])  # fmt: skip
def test_bits_are_those_of_a_step_after_the_backward(on_nccl_ranks, tmp_path, world, accumulation, case, own):
    dtype, own_of_case, keys = CASES[case]
    given = (str(tmp_path), dtype, accumulation, {**own, **own_of_case}, keys, NAMES)
    for told in on_nccl_ranks(world, compare, *given):
        assert not any(told), told


@pytest.mark.parametrize("name", BETWEEN)
def test_the_program_may_act_between_a_backward_and_its_step(on_nccl_ranks, tmp_path, name):
    own = {"offloaded_step": "both", "device_cache": 1}
    assert on_nccl_ranks(1, act_between, str(tmp_path), name, own) == [[None]]


def write_unsharded(folder: str) -> list[str | None]:
    """The program writes to an unsharded weight, whose master is on the host, before the step."""
    results: list[Any] = []
    for early in (False, True):
        engine = make(folder, "2 cpu", "bf16", early=early, own={}, gradient_clipping=1e6)
        for number, (x, y) in enumerate(batches(4)):
            engine.backward(engine(x, y))
            if number == 2:
                with torch.no_grad():
                    engine.module.blocks[0].up.weight.mul_(2)
            engine.step()
        step = early_step_of(engine)
        assert not early or (step is not None and step.num_discarded == 1)
        results.append(weights_of(engine.module))
        engine.destroy()
    return [first_difference(results[1], results[0])]


def test_a_write_before_the_step_is_kept(on_nccl_ranks, tmp_path):
    assert on_nccl_ranks(1, write_unsharded, str(tmp_path)) == [[None]]
