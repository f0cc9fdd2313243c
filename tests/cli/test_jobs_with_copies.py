"""Jobs with peer copies: ranks and whole nodes are killed, and the others resume from memory, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import flip
from processes import MarkedJob, marked_job, wait_until
from test_elastic_nodes import SCRIPT, Step, final_steps, free_port, scripted, steps

from onefold.checkpoint.format.peer_copy import files_of, list_copies, read_complete
from onefold.job_secret import JOB_SECRET

pytestmark = pytest.mark.program
SECRET = "a secret of this test"
NEVER = 10**6


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


def launch(job: MarkedJob, *flags: str, every: int = 2, **options: Any) -> subprocess.Popen[str]:
    given = {"folder": str(job.folder), "steps": 6, "save_every": NEVER, "onefold": {"peer_copies": {"every": every}}}
    return job.launch(*flags, SCRIPT, json.dumps({**given, **options}), **{JOB_SECRET: SECRET})


class CopyingNodes:
    """The launchers of a job with one rank on each node. Give each step `seconds`, in which copies are mirrored."""

    def __init__(self, job: MarkedJob, nodes: str, **options: Any) -> None:
        self.job, self.options = job, options
        self.flags = ["--nproc", "1", "--nnodes", nodes, "--max-restarts", "3", "--master_addr", "127.0.0.1"]
        self.flags += ["--master_port", free_port()]

    def start(self, node_rank: int) -> subprocess.Popen[str]:
        return launch(self.job, *self.flags, "--node_rank", str(node_rank), **self.options)


def of_rank(job: MarkedJob, rank: int, start: int = 0) -> tuple[int, Path]:
    """Return the process and the folder of a rank."""
    pid, _, folder = (job.folder / f"rank.{start}.{rank}").read_text().partition(" ")
    return int(pid), Path(folder)


def kill_node(job: MarkedJob, launcher: subprocess.Popen[str]) -> None:
    """Kill the launcher of a node, and wait until its rank has ended."""
    before = len(job.pids())
    launcher.kill()
    wait_until(lambda: len(job.pids()) <= before - 2)


def wait_for_pause(job: MarkedJob, ranks: int) -> None:
    wait_until(lambda: len(list(job.folder.glob("paused.*"))) == ranks, 240)


def wait_for_copy(job: MarkedJob, number: int) -> Path:
    """Wait until a copy is complete on the node of rank 0, and return its folder there."""
    _, folder = of_rank(job, 0)
    wait_until(lambda: f"-{number:08}-" in (read_complete(folder) or ""), 60)
    return folder / str(read_complete(folder))


def ends_well(launcher: subprocess.Popen[str]) -> str:
    _, stderr = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, stderr
    return stderr


def of_start(job: MarkedJob, start: int) -> list[Step]:
    return [step for step in steps(job) if step.start == start]


# -- one node ----------------------------------------------------------------------------------------------------------


def test_ranks_resume_from_memory_after_one_is_killed(job: MarkedJob) -> None:
    """Nothing is saved to disk. Step 5 is repeated with the same norm."""
    launcher = launch(job, "--nproc", "2", "--max-restarts", "1", "--fork-server", pause=[0, 6])
    wait_for_pause(job, 2)
    copy = wait_for_copy(job, 2)
    pid, folder = of_rank(job, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    os.kill(pid, signal.SIGKILL)
    assert "restart 1 of 1" in ends_well(launcher)
    assert not (job.folder / "saved").exists()
    assert [step.step for step in of_start(job, 1)] == [5, 6]
    assert of_start(job, 1)[0].norm == of_start(job, 0)[-1].norm
    assert not folder.exists(), "the launcher removes the copies"
    assert copy.parent == folder


def test_a_launcher_that_does_not_restart_ranks_is_named(job: MarkedJob) -> None:
    launcher = launch(job, "--nproc", "1")
    _, stderr = launcher.communicate(timeout=240)
    assert launcher.returncode
    assert f"Node 0 ({socket.gethostname()}) has none: its launcher does not restart ranks. Start all" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_folder_is_removed_with_the_launcher_or_by_the_next_one(job: MarkedJob, number: signal.Signals) -> None:
    launcher = launch(job, "--nproc", "1", "--max-restarts", "1", pause=[0, 5])
    wait_for_pause(job, 1)
    _, folder = of_rank(job, 0)
    assert folder.parent == Path("/dev/shm")
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    job.wait_until_gone()
    assert folder.exists() == (number is signal.SIGKILL)
    if number is signal.SIGKILL:
        (job.folder / "go").touch()
        ends_well(launch(job, "--nproc", "1", "--max-restarts", "1", steps=1))
        assert not folder.exists()


@pytest.mark.slow
def test_a_damaged_copy_is_skipped(job: MarkedJob) -> None:
    launcher = launch(job, "--nproc", "2", "--max-restarts", "1", pause=[0, 6])
    wait_for_pause(job, 2)
    (path,) = wait_for_copy(job, 2).glob("data-*/rank-00001.safetensors")
    flip(path, path.stat().st_size - 1)
    os.kill(of_rank(job, 0)[0], signal.SIGKILL)
    stderr = ends_well(launcher)
    assert "damaged, the checksum does not match" in stderr
    assert [step.step for step in of_start(job, 1)] == [3, 4, 5, 6]
    norms = {step.step: step.norm for step in of_start(job, 0)}
    assert {step.step: step.norm for step in of_start(job, 1)[:3]} == {step: norms[step] for step in (3, 4, 5)}


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_copies_leaves_the_copy_before(
    job: MarkedJob, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rank 1 is killed when the folder of the second copy appears, before or after this copy is complete."""
    launcher = launch(job, "--nproc", "2", "--max-restarts", "1", pause=[0, 4], steps=8)
    wait_for_pause(job, 2)
    first = wait_for_copy(job, 1)
    (job.folder / "go").touch()
    wait_until(lambda: len(list_copies(first.parent)) == 2, 60)
    os.kill(of_rank(job, 1)[0], signal.SIGKILL)
    ends_well(launcher)
    assert of_start(job, 1)[0].step in (3, 5)
    assert final_steps(job) == scripted(tmp_path_factory.mktemp("scripted"), (2, 8))


# -- several nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_job_continues_from_the_copy_of_a_node_that_is_killed(
    job: MarkedJob, stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nodes = CopyingNodes(job, "1:2", pause=[0, 6], stage=stage, seconds=0.7)
    first, second = nodes.start(0), nodes.start(1)
    wait_for_pause(job, 2)
    copy = wait_for_copy(job, 2)
    lost = of_rank(job, 1)[1]
    assert lost != copy.parent
    assert {path.rpartition("/")[2] for path in files_of(copy)} >= {"rank-00000.safetensors", "rank-00001.safetensors"}
    kill_node(job, second)
    (job.folder / "go").touch()
    assert "onefold: restarting all ranks on 1 node, restart 1 of 3" in ends_well(first)
    assert [step[1:3] for step in of_start(job, 1)] == [(5, 1), (6, 1)]
    assert not (job.folder / "saved").exists()
    expected = scripted(tmp_path_factory.mktemp("scripted"), (2, 4), (1, 6), stage=stage)
    assert final_steps(job) == expected


@pytest.mark.slow
def test_a_new_node_fetches_the_parts_of_the_lost_one(job: MarkedJob, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With three nodes, no node has all parts."""
    nodes = CopyingNodes(job, "3:3", pause=[0, 6], seconds=0.7)
    launchers = [nodes.start(rank) for rank in (0, 1, 2)]
    wait_for_pause(job, 3)
    wait_for_copy(job, 2)
    kill_node(job, launchers[2])
    (job.folder / "go").touch()
    launchers[2] = nodes.start(1)
    for launcher in launchers:
        ends_well(launcher)
    assert [step[1:3] for step in of_start(job, 1)] == [(5, 3), (6, 3)]
    assert final_steps(job) == scripted(tmp_path_factory.mktemp("scripted"), (3, 6))


@pytest.mark.slow
def test_a_copy_that_was_not_mirrored_is_not_used(job: MarkedJob, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The launcher of the second node stops, so that neither node has the shard of the other in the second copy."""
    nodes = CopyingNodes(job, "1:2", pause=[0, 4], steps=None, seconds=0.1)
    first, second = nodes.start(0), nodes.start(1)
    wait_for_pause(job, 2)
    copy = wait_for_copy(job, 1)
    second.send_signal(signal.SIGSTOP)
    (job.folder / "go").touch()
    wait_until(lambda: len(steps(job)) >= 9, 60)
    assert len(list_copies(copy.parent)) == 2, "the third copy has not begun"
    second.kill()
    ends_well(first)
    resumed = of_start(job, 1)
    assert [step[1:3] for step in resumed] == [(step, 1) for step in range(3, 8)]
    expected = scripted(tmp_path_factory.mktemp("scripted"), (2, 2), (1, 7))
    assert [step[1:] for step in resumed] == expected[2:]
