"""Elastic batch sizes: the numbers of DeepSpeed's tests, and properties of every config."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onefold.config import Batch, Config, ConfigError, load_config, solve_batch
from onefold.config.elasticity import (
    Elasticity,
    ElasticityConfigError,
    ElasticityIncompatibleWorldSize,
    check_elasticity,
    solve_elastic,
)

# The config of DeepSpeed's tests/unit/elasticity/test_elastic.py.
TEN_THOUSAND = {
    "max_train_batch_size": 10_000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}
SIXTEEN = {"max_train_batch_size": 64, "min_gpus": 16, "max_gpus": 16, "num_gpus_per_node": 8, "version": 0.2}


def elastic(top: dict[str, Any] | None = None, **section: Any) -> Config:
    return load_config({"elasticity": {"enabled": True, **section}, **(top or {})})


def test_the_published_batch():
    solved = solve_elastic(elastic(**TEN_THOUSAND).elasticity)
    assert (solved.train, len(solved.valid)) == (9792, 23)


@pytest.mark.parametrize(
    ("section", "num_ranks", "train", "micro"),
    [
        (TEN_THOUSAND, 64, 9792, 17),
        ({**TEN_THOUSAND, "max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7], "min_gpus": 1}, 4, 24, 3),
        ({**SIXTEEN, "micro_batch_sizes": [4, 8]}, 16, 64, 4),
        ({**SIXTEEN, "micro_batch_sizes": [4, 8], "model_parallel_size": 2}, 8, 64, 8),
        ({**SIXTEEN, "micro_batch_sizes": [4, 8], "model_parallel_size": 4}, 4, 64, 8),
        ({**SIXTEEN, "micro_batch_sizes": [8], "model_parallel_size": 2}, 8, 64, 8),
        ({**SIXTEEN, "micro_batch_sizes": [8], "model_parallel_size": 4}, 4, 64, 8),
    ],
)
def test_micro_batches_of_deepspeeds_tests(section, num_ranks, train, micro):
    given = elastic(**section).elasticity
    solved = solve_elastic(given, num_ranks)
    assert (solved.train, solved.micro(given, num_ranks)) == (train, micro)


def test_a_least_common_multiple_above_the_maximum_is_no_base():
    section = {**TEN_THOUSAND, "max_train_batch_size": 100, "micro_batch_sizes": [8, 10, 12], "min_gpus": 1}
    assert solve_elastic(elastic(**section).elasticity).train == 96


def test_the_larger_or_the_smaller_of_two_batches():
    """Check two batches that are valid for equally many numbers of ranks."""
    sizes = {"max_train_batch_size": 100, "micro_batch_sizes": [9, 10], "max_gpus": 2}
    larger, smaller = (solve_elastic(elastic(**sizes, prefer_larger_batch=way).elasticity) for way in (True, False))
    assert (larger.train, smaller.train) == (90, 54)
    assert larger.valid == smaller.valid == (1, 2)


def test_the_batch_of_a_job_follows_from_the_number_of_ranks():
    config = elastic(max_train_batch_size=24, micro_batch_sizes=[2, 3], version=0.1)
    assert solve_batch(config, 1) == Batch(24, 3, 8, 1)
    assert solve_batch(config, 4) == Batch(24, 3, 2, 4)
    assert solve_batch(config, 12) == Batch(24, 2, 1, 12)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"5 data-parallel ranks .* are 1, 2, 3, 4, 6, 8, 12\."):
        solve_batch(config, 5)


def test_version_2_adapts_the_batch_to_other_numbers_and_says_so():
    config = elastic(max_train_batch_size=24, micro_batch_sizes=[2, 3])
    batch = solve_batch(config, 5)
    assert (batch.train, batch.micro, batch.accumulation) == (20, 2, 2)
    assert "the train batch is 20, because 5 ranks do not divide the train batch 24" in batch.notices[0]
    assert solve_batch(config, 4).notices == ()
    smaller = elastic(max_train_batch_size=24, micro_batch_sizes=[2, 3], prefer_larger_batch=False)
    assert solve_batch(smaller, 5).train == 15
    for world in (13, 25):  # above the maximum batch with every micro-batch
        with pytest.raises(ElasticityIncompatibleWorldSize, match=f"{world} data-parallel ranks"):
            solve_batch(config, world)


def test_numbers_outside_of_the_bounds():
    bounds = {"max_train_batch_size": 24, "micro_batch_sizes": [2, 3], "min_gpus": 2, "max_gpus": 4}
    for world in (1, 6):
        with pytest.raises(ElasticityIncompatibleWorldSize, match="within min_gpus = 2 and max_gpus = 4"):
            solve_batch(elastic(**bounds, version=0.1), world)
        assert solve_batch(elastic(**bounds), world).notices
    assert solve_batch(elastic(**bounds), 2).notices == ()


def test_nodes_are_added_whole():
    config = elastic(max_train_batch_size=64, micro_batch_sizes=[2, 4], num_gpus_per_node=4, max_gpus=16)
    assert solve_elastic(config.elasticity).valid == (4, 8, 16)


def test_ranks_of_a_sequence_count_once():
    config = elastic(
        {"sequence_parallel_size": 2}, max_train_batch_size=16, micro_batch_sizes=[2], num_gpus_per_node=4,
        model_parallel_size=2,
    )  # fmt: skip
    assert solve_batch(config, 8) == Batch(16, 2, 2, 4)
    other = elastic(max_train_batch_size=16, micro_batch_sizes=[2], num_gpus_per_node=4, model_parallel_size=2)
    with pytest.raises(ElasticityConfigError, match="model_parallel_size = 2 differs from sequence_parallel_size = 1"):
        solve_batch(other, 8)


GOOD = {"max_train_batch_size": 24, "micro_batch_sizes": [2, 3]}


@pytest.mark.parametrize(
    ("section", "top", "told"),
    [
        ({}, {}, "needs elasticity.max_train_batch_size"),
        ({"max_train_batch_size": 24}, {}, "needs elasticity.micro_batch_sizes"),
        ({**GOOD, "micro_batch_sizes": [2, 25]}, {}, "contains 25, but max_train_batch_size = 24"),
        ({**GOOD, "version": "0.3"}, {}, "elasticity.version = 0.3 is not known"),
        ({**GOOD, "version": 0.1, "model_parallel_size": 2}, {}, "needs elasticity.version 0.2"),
        ({**GOOD, "model_parallel_size": 16, "num_gpus_per_node": 8}, {}, "does not divide elasticity.num_gpus_per"),
        ({**GOOD, "min_gpus": 8, "max_gpus": 4}, {}, "elasticity.max_gpus = 4 is below min_gpus = 8"),
        ({**GOOD, "num_gpus_per_node": 8, "max_gpus": 4}, {}, "num_gpus_per_node = 8"),
        (GOOD, {"train_batch_size": 8}, "train_batch_size and elasticity.enabled are both given"),
        (GOOD, {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, "ignore_non_elastic_batch"),
        ({**GOOD, "min_gpus": -1}, {}, "elasticity.min_gpus = -1: expected at least 1"),
        ({**GOOD, "max_gpus": -1}, {}, "elasticity.max_gpus = -1: expected at least 1"),
        ({**GOOD, "micro_batch_sizes": [1, -1]}, {}, "micro_batch_sizes[1] = -1: expected at least 1"),
        ({**GOOD, "micro_batch_sizes": [2, 0.5, 4]}, {}, "micro_batch_sizes[1] = 0.5: expected a whole number"),
    ],
)
def test_contradictions_name_the_key(section, top, told):
    with pytest.raises(ConfigError) as caught:
        elastic(top, **section)
    assert told in str(caught.value)


def test_other_batch_keys_may_be_ignored():
    top = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    config = elastic(top, **GOOD, ignore_non_elastic_batch_info=True)
    assert solve_batch(config, 2) == Batch(24, 3, 4, 2)
    assert solve_batch(load_config({"train_batch_size": 6, "elasticity": {**GOOD}}), 2) == Batch(6, 3, 1, 2)


def test_keys_without_effect_cause_notices():
    notices = "\n".join(elastic(**GOOD, min_time=20, version=0.1, num_gpus_per_node=8).notices)
    assert "elasticity.min_time = 20: the launcher decides" in notices
    assert "elasticity.num_gpus_per_node: it has no effect with elasticity.version 0.1" in notices


def test_a_range_without_a_valid_number_raises():
    with pytest.raises(ElasticityConfigError, match="no number of GPUs from 7 to 7"):
        solve_elastic(elastic(**GOOD, min_gpus=7, max_gpus=7).elasticity)


def test_the_example_of_the_docs():
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    (example,) = re.findall(r"```json elastic\.json\n(.*?)```", page, re.DOTALL)
    config = load_config(json.loads(example))
    solved = solve_elastic(config.elasticity)
    listed = re.search(rf"Here it is {solved.train}, for ([\d,\s]+) or (\d+) ranks", page)
    assert listed is not None
    assert [int(number) for number in re.findall(r"\d+", listed.group(0))[1:]] == list(solved.valid)
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for world, *batch in (map(int, row) for row in rows):
        assert solve_batch(config, world) == Batch(*batch, world)
    version_2 = replace(config, elasticity=replace(config.elasticity, version=0.2))
    adapted = solve_batch(version_2, 7).train
    assert f"On 7 ranks this config then has the train batch {adapted}." in " ".join(page.split())


def test_large_numbers_take_no_time():
    """Check primes around the largest batch, whose least common multiple has many digits."""
    primes = [999_999_999_989, 999_999_000_001, 999_983, 1]
    assert solve_elastic(elastic(max_train_batch_size=10**12, micro_batch_sizes=primes * 50).elasticity).valid
    with pytest.raises(ConfigError, match="max_train_batch_size = 10000000000000: expected a whole number from 1"):
        elastic(max_train_batch_size=10**13, micro_batch_sizes=[1])


@st.composite
def sections(draw: st.DrawFn) -> Elasticity:
    version = draw(st.sampled_from((0.1, 0.2)))
    parallel = draw(st.sampled_from((1, 2, 4))) if version == 0.2 else 1
    found = Elasticity(
        enabled=True,
        max_train_batch_size=draw(st.integers(1, 5000)),
        micro_batch_sizes=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))),
        min_gpus=draw(st.integers(1, 50)),
        max_gpus=draw(st.integers(1, 5000)),
        num_gpus_per_node=parallel * draw(st.integers(1, 4)) if version == 0.2 else 1,
        model_parallel_size=parallel,
        prefer_larger_batch=draw(st.booleans()),
        version=version,
    )
    try:
        check_elasticity(found)
    except ElasticityConfigError:
        assume(False)
    return found


@given(sections(), st.integers(1, 200))
def test_a_valid_number_of_ranks_divides_the_batch_into_a_micro_batch(section: Elasticity, num_ranks: int) -> None:
    try:
        solved = solve_elastic(section, num_ranks)
    except ElasticityIncompatibleWorldSize:
        return
    assert num_ranks in solved.valid
    assert 0 < solved.train <= (section.max_train_batch_size or 0)
    for number in solved.valid:
        micro = solved.micro(section, number)
        assert micro in section.micro_batch_sizes
        assert solved.train % (micro * number) == 0
        larger = [size for size in section.micro_batch_sizes if solved.train // number % size == 0]
        assert micro == max(larger)


@given(sections())
def test_every_number_that_is_not_listed_is_not_valid(section: Elasticity) -> None:
    """Compare with a search over all numbers."""
    try:
        solved = solve_elastic(section)
    except ElasticityConfigError:
        return
    nodes = section.num_gpus_per_node
    ranks = nodes // section.model_parallel_size
    per_node = solved.train // ranks
    expected = [
        count * ranks
        for count in range(max(1, section.min_gpus // nodes), min(section.max_gpus // nodes, per_node) + 1)
        if any(per_node % (count * size) == 0 for size in section.micro_batch_sizes)
    ]
    assert list(solved.valid) == expected
