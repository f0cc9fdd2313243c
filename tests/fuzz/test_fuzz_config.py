"""Configs: any document loads or is a ConfigError, quickly and in little memory."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from generated import EFFORTS, JSON, NUMBERS, WORDS, corpus, damaged, fuzz, limited
from hypothesis import strategies as st

from onefold.config import Config, ConfigError, load_config
from onefold.config.elasticity import solve_elastic
from onefold.config.keys import walk

VALID = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "overlap_comm": True},
    "bf16": {"enabled": True},
    "onefold": {"units": ["Block"], "stop": {"signals": ["SIGTERM"]}},
}
PATHS = sorted(path for path, entry in walk(Config) if entry.section is None)
VALUES = JSON | NUMBERS.map(str) | st.sampled_from([True, False, None, "auto", "cpu", "nvme", 0, 1, 2, 3, 1e-3, [1, 2]])
YAML = b"""
a: &a [1, 2]
zero_optimization: {stage: 3, <<: {overlap_comm: true}}
train_micro_batch_size_per_gpu: !!int "4"
optimizer:
  type: AdamW
  params: {lr: 1e-3, betas: [0.9, .inf]}
onefold: {units: [Block, *a]}
"""
# Aliases that would expand to 10**9 values.
LAUGHS = b"a: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(
    b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (k + 1, k + 1, *[k] * 10) for k in range(97, 106)
)


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of the schema, at their places, with any values."""
    found: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1} if draw(st.booleans()) else {}
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=6)):
        *sections, name = path.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                break
        else:
            place[name] = draw(VALUES)
    return found


def load(folder: Path, value: Any) -> None:
    load_config(value)


def nothing(folder: Path, value: Any) -> None:
    """Need no file."""


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_value_of_any_key_loads_or_is_a_config_error(effort: int) -> None:
    with limited(nothing, load, ConfigError) as run:
        assert run(VALID)
        fuzz(run, settings() | st.dictionaries(WORDS, JSON), effort)


def write_documents(folder: Path, data: bytes) -> None:
    for suffix in ("json", "yaml"):
        (folder / f"config.{suffix}").write_bytes(data)


def load_documents(folder: Path, data: bytes) -> None:
    refused: list[ConfigError] = []
    # PyYAML is slow: what is large is read as JSON only.
    others = (folder / "config.yaml", base64.urlsafe_b64encode(data).decode()) if len(data) < 50_000 else ()
    for source in (folder / "config.json", *others):
        try:
            load_config(str(source))
        except ConfigError as error:
            refused.append(error)
    if len(refused) == 1 + len(others):
        raise refused[0]


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_document_loads_or_is_a_config_error(effort: int) -> None:
    valid = json.dumps(VALID).encode()
    deep = (
        b"[" * 5_000,
        b'{"a":' * 5_000,
        b"- " * 5_000,
        b"{a: " * 5_000,
        b"9" * 100_000,
        b"[" * 900 + b"]" * 900,
    )
    bombs = (
        LAUGHS,
        b'{"a": 1e999999999}',
        b"a: !!python/object/apply:os.system [id]",
        b"? [a]\n: 1",
        b"&a [*a]",
        *deep,
    )
    with limited(write_documents, load_documents, ConfigError) as run:
        assert run(valid)
        fuzz(
            run,
            damaged(valid) | damaged(YAML) | st.binary() | st.text().map(str.encode),
            effort,
            (*bombs, *corpus("config")),
        )


ELASTIC = {
    "enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1, "max_gpus": 10000,
    "min_time": 20, "version": 0.1, "num_gpus_per_node": 1, "model_parallel_size": 1, "prefer_larger_batch": True,
    "ignore_non_elastic_batch_info": True,
}  # fmt: skip


@st.composite
def elastic_sections(draw: st.DrawFn) -> tuple[dict[str, Any], int | None]:
    section = dict(ELASTIC)
    large = st.integers(1, 10**6) | st.sampled_from([1, 2, 10**9, 2**63, 10**18])
    for name in draw(st.lists(st.sampled_from(sorted(ELASTIC)), max_size=5)):
        section[name] = draw(st.lists(large, max_size=5) if name == "micro_batch_sizes" else large | VALUES)
    return section, draw(st.none() | st.integers(-1, 10**7))


def solve(folder: Path, value: tuple[dict[str, Any], int | None]) -> None:
    section, num_ranks = value
    solve_elastic(load_config({"elasticity": section}).elasticity, num_ranks)


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_elasticity_is_solved_or_is_a_config_error(effort: int) -> None:
    huge = {**ELASTIC, "max_train_batch_size": 10**18, "micro_batch_sizes": [1, 999_999_937], "max_gpus": 10**18}
    primes = {**ELASTIC, "max_train_batch_size": 2**62, "micro_batch_sizes": [999_999_937, 999_999_929, 999_999_893]}
    with limited(nothing, solve, ConfigError) as run:
        assert run((ELASTIC, None))
        fuzz(run, elastic_sections(), effort, ((huge, None), (huge, 8), (primes, None)))
