"""Strategies for inputs that are almost valid, and the runs of them: a few in the first tier, many in the slow one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from limited import LimitedProcess, Target

CORPUS = Path(__file__).parent / "corpus"
FEW, MANY = 15, 600
EFFORTS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]

NUMBERS = st.one_of(
    st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, -(2**63) - 1]), st.floats(), st.booleans()
)
WORDS = st.one_of(
    st.text(max_size=20), st.sampled_from(["", "auto", "none", "inf", "nan", "1e999", "0x10", "\0", "../.."])
)
JSON = st.recursive(
    st.none() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


def fuzz(
    run: Callable[[Any], object], strategy: st.SearchStrategy[Any], effort: int, examples: tuple[Any, ...] = ()
) -> None:
    """Run a function on `effort` generated inputs: always the same ones if they are few."""

    @settings(
        max_examples=effort, deadline=None, derandomize=effort == FEW, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def check(value: Any) -> None:
        run(value)

    for value in examples:
        check = example(value)(check)
    check()


@contextmanager
def limited(prepare: Target, target: Target, *allowed: type[Exception]) -> Iterator[Callable[[Any], bool]]:
    """Yield a function that runs a target in a process with little memory."""
    process = LimitedProcess(prepare, target, allowed)
    try:
        yield process.run
    finally:
        process.close()


def corpus(name: str) -> tuple[bytes, ...]:
    """Return the inputs that were found earlier for a target."""
    return tuple(path.read_bytes() for path in sorted((CORPUS / name).glob("*")))


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid input with bytes changed, removed, inserted or repeated."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([1, 1, 2, 4, 8, 64]))
        match draw(st.sampled_from(["flip", "set", "cut", "insert", "repeat", "end"])):
            case "flip" if data:
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[place : place + length] = draw(st.sampled_from([b"\xff", b"\0", b"\x7f"])) * length
            case "cut":
                del data[place : place + length]
            case "insert":
                data[place:place] = draw(st.binary(max_size=16))
            case "repeat":
                data[place:place] = data[place : place + length] * draw(st.integers(1, 8))
            case "end":
                del data[place:]
    return bytes(data)


@st.composite
def edited(draw: st.DrawFn, valid: Any) -> Any:
    """A JSON document with some values and keys replaced, removed or repeated."""
    document = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(document))
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "remove", "rename", "repeat"])):
            case "replace":
                parent[key] = draw(JSON)
            case "remove":
                del parent[key]
            case "rename" if isinstance(parent, dict):
                parent[draw(WORDS)] = parent.pop(key)
            case "repeat" if isinstance(parent, list):
                parent.append(parent[key])
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
