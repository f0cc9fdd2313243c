"""The hang detector where the device waits, on NCCL: who waits where, or who is gone, in seconds and on every rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port, rank_environment, start_mps, stop_mps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROGRAM = Path(__file__).with_name("faults.py")
SECONDS = 10.0

Told = dict[str, Any]
# A rank that skips a step comes to the next one, unless even the launch of the reductions before it waits.
SKIPPED = (
    r"rank 0 (at the step; rank 1 at reduction of|is at a step after \d+ reductions; rank 1 is at a step after \d+)"
)
# What each rank ends with; a signal as a negative number. What rank 0 says, and rank 1 where it is there to hear.
CASES: dict[tuple[str, int], tuple[list[int], list[str]]] = {
    ("skips a step", 1): ([1, 1], [SKIPPED]),
    ("skips a step", 2): ([1, 1], [SKIPPED]),
    ("skips a step", 3): ([1, 1], ["rank 0 is at the step", "rank 1 is at the beginning of a pass"]),
    ("calls once more", 3): ([1, 1], ["rank 0 is at the step", "rank 1 is at the beginning of a pass"]),
    ("exits", 1): ([1, 3], ["rank 1 at the end of its program"]),
    ("exits", 3): ([1, 3], ["rank 1 at the end of its program"]),
    ("is killed", 1): ([1, -signal.SIGKILL], ["rank 1 has ended"]),
    ("is killed", 3): ([1, -signal.SIGKILL], ["rank 1 has ended"]),
    ("raises", 2): ([1, 1], ["rank 1 at the end of its program"]),
    ("sleeps", 1): ([0, 0], []),
    ("sleeps", 3): ([0, 0], []),
}


def start(kind: str, stage: int, world: int) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(PROGRAM), kind, str(stage)],
            env={**os.environ, **rank_environment(rank, world, port, backend="nccl")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[tuple[str, int], list[tuple[int | None, Told | None, str]]]]:
    """All cases at once, since most of their time is spent in starting: exit code, what was told, the log."""
    with_mps = start_mps()
    running = {case: start(*case, world=2) for case in CASES}
    found = {}
    for case, ranks in running.items():
        found[case] = []
        for process in ranks:
            try:
                out, log = process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
                out, log = process.communicate()
            lines = [line for line in out.splitlines() if line.startswith("{")]
            found[case].append((process.returncode, json.loads(lines[-1]) if lines else None, log))
    yield found
    if with_mps:
        stop_mps()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, stage {case[1]}")
def test_every_rank_hears_of_a_fault_within_seconds(ended, case):
    codes, words = CASES[case]
    ranks = ended[case]
    print({rank: told and (round(told["seconds"], 1), told["text"]) for rank, (_, told, _) in enumerate(ranks)})
    for code, (found, told, log) in zip(codes, ranks, strict=True):
        assert found == code, log[-3000:]
        if words and code == 1 and "bad sample" not in log:
            assert told is not None
            assert told["error"] == "Disagreement"
            assert told["seconds"] < SECONDS
            for each in words:
                assert re.search(each, told["text"])
