"""Ranks that make no progress: they are named with their operation, all stacks are written, and a restart continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import MarkedJob, marked_job

from onefold.recovery.stall_watch import EXIT_STALLED

pytestmark = pytest.mark.program
SCRIPT = str(Path(__file__).parent / "stall_script.py")
STEPS = 5

QUICK: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "loader": {"place": "loader"},
}
SLOW: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "forward": {"place": "forward"},
    "write": {"place": "write"},
    "program": {"place": "program"},
    "rank 0": {"place": "loader", "stuck_rank": 0},
    "write in the background": {"place": "write", "background": True},
    "swap": {"place": "read", "swaps": True},
    "Python's lock": {"place": "forward", "how": "with Python's lock"},
    "stopped": {"place": "stopped"},
    "paused": {"place": "paused", "paused_seconds": 7, "seconds": 12},
    "rank 0 stopped": {"place": "stopped", "stuck_rank": 0},
}


class Ended(NamedTuple):
    codes: list[list[int]]
    """The exit codes of both ranks, in the first start and in the second."""
    folder: Path

    @property
    def stacks(self) -> str:
        return (self.folder / "run" / "stacks.txt").read_text()

    @property
    def beats(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "run" / "heartbeats.json").read_text())["ranks"]

    def losses(self) -> list[dict[str, set[str]]]:
        """Return the losses of each step, by rank. Steps after the last checkpoint are taken twice."""
        found: list[dict[str, set[str]]] = [{}, {}]
        for rank in range(2):
            for line in (self.folder / f"losses.{rank}").read_text().splitlines():
                step, loss = line.split()
                found[rank].setdefault(step, set()).add(loss)
        return found


def run_all(jobs: dict[str, dict[str, Any]], folder: Path) -> dict[str, Ended]:
    """Run all jobs at the same time."""
    given = []
    for name, options in jobs.items():
        (folder / name).mkdir()
        given.append({"folder": str(folder / name), **options})
    done = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(given)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    starts = json.loads(done.stdout)
    return {name: Ended([starts[0][number], starts[1][number]], folder / name) for number, name in enumerate(jobs)}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_all(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_all(SLOW, tmp_path_factory.mktemp("slow"))


def check(found: Ended, undisturbed: Ended, verdict: str) -> None:
    """Check the verdict, the exit codes, the stacks of both ranks, and the losses after the second start."""
    assert found.codes == [[EXIT_STALLED, EXIT_STALLED], [0, 0]]
    first, *rest = found.stacks.splitlines()
    assert verdict in first
    assert "The bound is 4 s (onefold.stall)" in first
    assert [line for line in rest if line.startswith("====")] == ["==== rank 0", "==== rank 1"]
    assert found.stacks.count("thread MainThread:") == 2
    for rank in range(2):
        assert (
            f"StalledError: {first.partition(' ')[2].partition(' ')[2]}"
            in found.folder.joinpath(f"stderr.0.{rank}").read_text()
        )
    assert found.losses() == undisturbed.losses()


def test_an_undisturbed_run_is_left_alone(quick: dict[str, Ended]) -> None:
    found = quick["undisturbed"]
    assert found.codes == [[0, 0], [0, 0]]
    assert [len(losses) for losses in found.losses()] == [STEPS, STEPS]
    assert sorted(path.name for path in (found.folder / "run").iterdir()) == ["heartbeats.json"]
    assert [beat["rank"] for beat in found.beats] == [0, 1]
    assert (found.beats[0]["step"], found.beats[0]["ended"]) == (STEPS, True)  # the other rank may still end


def test_a_stuck_rank_is_named(quick: dict[str, Ended]) -> None:
    found = quick["loader"]
    check(found, quick["undisturbed"], " rank 1 has waited ")
    assert "s in the data loader's next batch, at" in found.stacks.splitlines()[0]
    assert ", in main" in found.stacks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "operation"),
    [
        ("forward", "rank 1 has waited ", "s in the forward, at"),
        ("write", "rank 1 has waited ", "s in the write of "),
        ("program", "rank 1 has waited ", "its program, between two calls of the engine, at"),
        ("rank 0", "rank 0 has waited ", "the data loader's next batch"),
        ("write in the background", "rank 1 has waited ", "the write of "),
        ("swap", "rank 1 has waited ", "the swap read of "),
    ],
)
def test_other_stuck_ranks_are_named(slow: dict[str, Ended], name: str, verdict: str, operation: str) -> None:
    check(slow[name], slow["undisturbed"], verdict)
    first = slow[name].stacks.splitlines()[0]
    assert operation in first
    assert name != "write" or str(slow[name].folder / "saved") in first


@pytest.mark.slow
def test_a_rank_in_c_code_that_holds_pythons_lock(slow: dict[str, Ended]) -> None:
    found = slow["Python's lock"]
    assert found.codes[0][0] == EXIT_STALLED
    assert found.codes[1] == [0, 0]
    assert "has sent no heartbeat for" in found.stacks.splitlines()[0]
    own = found.stacks.partition("==== rank 1")[2]
    assert "in stuck" in own, "faulthandler has written the stack"
    assert found.losses() == slow["undisturbed"].losses()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_noticed(slow: dict[str, Ended], rank: int) -> None:
    found = slow["rank 0 stopped" if rank == 0 else "stopped"]
    assert found.codes[0][1 - rank] == EXIT_STALLED
    assert found.codes[0][rank] == -signal.SIGKILL
    first = found.stacks.splitlines()[0]
    assert f" rank {rank}" in first
    assert "its process is stopped" in first
    assert "no answer within" in found.stacks.partition(f"==== rank {rank}")[2]
    assert found.losses() == slow["undisturbed"].losses()


@pytest.mark.slow
def test_a_rank_that_is_paused_for_less_than_the_bound_continues(slow: dict[str, Ended]) -> None:
    found = slow["paused"]
    assert found.codes == [[0, 0], [0, 0]]
    assert not (found.folder / "run" / "stacks.txt").exists()
    assert found.losses() == slow["undisturbed"].losses()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_the_launcher_restarts_the_job(job: MarkedJob, slow: dict[str, Ended]) -> None:
    options = json.dumps({"folder": str(job.folder), "place": "loader"})
    launcher = job.launch("--nproc", "2", "--max-restarts", "1", SCRIPT, options)
    _, stderr = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, stderr
    assert "StalledError: rank 1 has waited" in stderr
    assert f"failed: exit code {EXIT_STALLED}" in stderr
    assert Ended([], job.folder).losses() == slow["undisturbed"].losses()
    job.wait_until_gone(5)
