"""The examples of docs/guards.md run, and its message is the one that is raised."""

from __future__ import annotations

import json
import math
import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from models import batches, net, start, weights_of
from test_reexecution import messages

from onefold.config import load_config
from onefold.recovery import replica_check
from onefold.recovery.executions import Difference, Finding, Kind, describe_differences
from onefold.recovery.rank_beats import RankBeat, describe_stall

PAGE = (Path(__file__).parents[2] / "docs" / "guards.md").read_text()


def example(kind: str, name: str = "") -> str:
    (found,) = re.findall(
        rf"^```{kind}{' ' if name else ''}{re.escape(name)}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
    )
    return found


@pytest.mark.parametrize("name", ["rollback.json", "spike.json", "replicas.json", "stall.json", "reexecute.json"])
def test_the_configs_load_without_notices(name):
    config = load_config(json.loads(example("json", name)))
    assert (config.notices, config.refusals) == ((), ())


def run_loop(folder: str) -> tuple[int, bool]:
    """Run the loop of the page with a batch whose gradient is not finite."""
    engine = start(net(), json.loads(example("json", "rollback.json")))
    seen: list[Any] = []

    def spoiled() -> Any:
        for number, batch in enumerate(batches(5)):
            hook = engine.module.head.weight.register_hook(lambda gradient: gradient * math.nan)
            if number != 3:
                hook.remove()
            seen.append(weights_of(engine.module)["head.weight"])
            yield batch
            hook.remove()

    with chdir(folder):
        exec(compile(example("python"), "docs/guards.md", "exec"), {"engine": engine, "batches": spoiled()})
    return engine.global_steps, bool((seen[4] == seen[0]).all())


def test_the_loop_rolls_back(on_ranks, tmp_path):
    assert on_ranks(2, run_loop, str(tmp_path)) == [(1, True)] * 2


def test_the_message_about_a_bit_flip(on_ranks):
    assert on_ranks(1, flip_message) == [example("text", "flip")]


def flip_message() -> str:
    engine = start(net(), json.loads(example("json", "reexecute.json")))
    engine._replay._is_reproducible = True
    place = "the gradient of unit blocks.1 (parameter group 0), in micro-step 2"
    differences = [Difference(0, 1, Kind.REDUCED), Difference(1, 0, Kind.GRADIENT)]
    with messages() as said:
        where = describe_differences(differences, [place, ""])
        engine._replay._conclude(Finding.FIRST_DIFFERS, "a gradient is not finite", where, differences)
    return f"{said[0]}\n"


def test_the_message_about_a_stall():
    doing = "the data loader's next batch, at train.py:41 in read_rows"
    beat = RankBeat(1, step=812, doing=doing, seconds=63)
    assert f"{describe_stall(beat, 60)}\n" == example("text", "stall")


def test_the_message_about_replicas():
    problem = "; ".join(replica_check._describe("unit blocks.1", [7, 7, 8, 7]))
    assert f"replicas differ before a step: {problem}. {replica_check._ADVICE}\n" == example("text", "replicas")
