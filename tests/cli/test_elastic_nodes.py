"""Jobs with MIN:MAX nodes: several launchers on this machine, which fail, are stopped, join, and host the store."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from models import more
from processes import MarkedJob, marked_job, wait_until

from onefold.tools.cli.launch import job_of_this_node
from onefold.tools.cli.main import build_parser, main
from onefold.tools.cli.ranks import Job

pytestmark = pytest.mark.program

SCRIPT = str(Path(__file__).parent / "elastic_script.py")
SAVE = {"onefold": {"stop": {"save_to": "saved"}}}


class Step(NamedTuple):
    """One optimizer step of the job: its start, number, number of ranks, and gradient norm."""

    start: int
    step: int
    world: int
    norm: str


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Nodes:
    """The launchers of one job."""

    def __init__(self, job: MarkedJob, nodes: str, restarts: int = 3, **options: Any) -> None:
        self.job, self.options = job, options
        self.port = free_port()
        self.flags = ["--nproc", "1", "--nnodes", nodes, "--max-restarts", str(restarts)]

    def start(self, node_rank: int) -> subprocess.Popen[str]:
        """Start the launcher of a node. Node 0 hosts the store."""
        options = {"folder": str(self.job.folder), "steps": 6, **self.options}
        if "onefold" in options:
            options["onefold"] = {"stop": {"save_to": str(self.job.folder / "saved")}}
        flags = ["--master_addr", "127.0.0.1", "--master_port", self.port, "--node_rank", str(node_rank)]
        return self.job.launch(*self.flags, *flags, SCRIPT, json.dumps(options))

    def wait_for_pause(self, ranks: int) -> None:
        """Wait until the ranks pause."""
        wait_until(lambda: len(list(self.job.folder.glob("paused.*"))) == ranks, 240)

    def resume(self) -> None:
        """Let the ranks continue."""
        (self.job.folder / "go").touch()


def steps(job: MarkedJob) -> list[Step]:
    """Return the steps of the job in the order of their execution."""
    lines = (line.split() for line in (job.folder / "steps").read_text().splitlines())
    return [Step(int(start), int(step), int(world), norm) for start, step, world, norm in lines]


def final_steps(job: MarkedJob) -> list[tuple[int, int, str]]:
    """Return number, number of ranks and norm of each step, as it was executed last."""
    return [last[1:] for last in {step.step: step for step in steps(job)}.values()]


def scripted(folder: Path, *parts: tuple[int, int], stage: int = 2) -> list[tuple[int, int, str]]:
    """Return the steps of a job without faults: for each part, the number of ranks and the last step."""
    with marked_job(folder) as job:
        for ranks, last in parts:
            given = json.dumps({"folder": str(folder), "steps": last, "stage": stage})
            process = job.launch("--nproc", str(ranks), SCRIPT, given)
            _, stderr = process.communicate(timeout=240)
            assert process.returncode == 0, stderr
        return final_steps(job)


def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripted")


# -- arguments ---------------------------------------------------------------------------------------------------------


def place(*flags: str) -> Job:
    return job_of_this_node(build_parser().parse_args(["launch", "--nproc", "2", *flags, "script.py"]))


def test_the_node_of_the_store_is_found_by_its_address(tmp_path: Path) -> None:
    elastic = Job(2, 4, 0, "127.0.0.1", 29500, max_restarts=3, min_nodes=2)
    flags = ("--nnodes", "2:4", "--max-restarts", "3")
    assert place(*flags, "--master_addr", "127.0.0.1") == elastic
    assert place(*flags, "--master_addr", "203.0.113.7").node_rank == 1
    assert place(*flags, "--master_addr", "203.0.113.7", "--node_rank", "0").node_rank == 0
    hosts = tmp_path / "hosts"
    hosts.write_text("203.0.113.7 slots=2\n127.0.0.1 slots=2\n")
    found = place("-H", str(hosts), "--nnodes", "1:2")
    assert (found.min_nodes, found.num_nodes, found.node_rank, found.is_elastic) == (1, 2, 1, True)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nnodes", "1:2"], "--nnodes 1:2 needs --master_addr"),
        (["--nnodes", "2:1"], "the minimum exceeds the maximum"),
        (["--nnodes", "0:1"], "0:1"),
        (["--nnodes", "1:"], "1:"),
        (["--nnodes", "1:2", "--master_addr", "127.0.0.1", "-i", "a:0"], "need a --hostfile"),
        (["--nnodes", "1:2", "--master_addr", "127.0.0.1", "--node_rank", "2"], "--node_rank 2 does not exist"),
    ],
)
def test_wrong_numbers_of_nodes_are_one_message(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *flags, SCRIPT]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


# -- nodes that leave --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compared", [more(False), more(True)])
def test_the_job_continues_without_a_node_that_is_stopped(
    job: MarkedJob, compared: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The ranks of both nodes save after the same step. The remaining one accumulates twice as many micro-batches."""
    nodes = Nodes(job, "1:2", restarts=0, pause=[0, 3], **SAVE)
    first, second = nodes.start(0), nodes.start(1)
    nodes.wait_for_pause(2)
    second.terminate()
    nodes.resume()
    _, stderr = second.communicate(timeout=240)
    assert second.returncode == 128 + signal.SIGTERM, stderr
    _, stderr = first.communicate(timeout=240)
    assert first.returncode == 0, stderr
    assert "onefold: restarting all ranks on 1 node, because the nodes changed" in stderr
    assert "Traceback" not in stderr
    last = max(step.step for step in steps(job) if step.start == 0)
    worlds = [2] * last + [1] * (6 - last)
    assert [step[1:3] for step in steps(job)] == list(enumerate(worlds, start=1)), "no step is repeated"
    assert 3 <= last < 6
    if compared:
        assert final_steps(job) == scripted(folder_of(tmp_path_factory), (2, last), (1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["launcher", "rank"])
def test_the_job_continues_without_a_node_that_is_killed(
    job: MarkedJob, target: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nodes = Nodes(job, "1:2", pause=[0, 4], save_every=2, stage=3)
    first, second = nodes.start(0), nodes.start(1)
    nodes.wait_for_pause(2)
    before = set(job.pids()) - {first.pid, second.pid}
    if target == "launcher":
        second.kill()
    else:
        (victim,) = (pid for pid in before if parent(pid) == second.pid)
        os.kill(victim, signal.SIGKILL)
    nodes.resume()
    _, stderr = first.communicate(timeout=240)
    assert first.returncode == 0, stderr
    world = 1 if target == "launcher" else 2
    if target == "rank":
        _, other = second.communicate(timeout=240)
        assert second.returncode == 0, other
        assert "failed: SIGKILL" in other
    nodes_text = "1 node" if world == 1 else "2 nodes"
    assert f"onefold: restarting all ranks on {nodes_text}, restart 1 of 3" in stderr
    assert not before & set(job.pids())
    assert [step[1:3] for step in steps(job) if step.start == 1] == [(step, world) for step in (3, 4, 5, 6)]
    assert final_steps(job) == scripted(folder_of(tmp_path_factory), (2, 2), (world, 6), stage=3)


def parent(pid: int) -> int:
    match = re.search(r"^PPid:\s+(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


@pytest.mark.slow
def test_too_few_nodes_wait_for_others(job: MarkedJob) -> None:
    nodes = Nodes(job, "2:3", pause=[0, 3])
    launchers = [nodes.start(rank) for rank in (0, 1, 2)]
    nodes.wait_for_pause(3)
    for launcher in launchers[1:]:
        launcher.kill()
    nodes.resume()
    wait_until(lambda: len(job.pids()) == 1, 30)
    assert launchers[0].poll() is None
    other = nodes.start(1)
    for launcher in (launchers[0], other):
        _, stderr = launcher.communicate(timeout=240)
        assert launcher.returncode == 0, stderr
    assert {step.world for step in steps(job) if step.start == 1} == {2}


@pytest.mark.slow
def test_a_lost_node_uses_up_a_restart(job: MarkedJob) -> None:
    """The rank of the first node sleeps, and cannot see that the connection to the other is broken."""
    nodes = Nodes(job, "1:2", restarts=0, pause=[0, 3])
    first, second = nodes.start(0), nodes.start(1)
    nodes.wait_for_pause(2)
    second.kill()
    _, stderr = first.communicate(timeout=240)
    assert first.returncode == 1
    assert stderr.endswith("onefold: the job has lost a node and ends after 0 restarts (--max-restarts)\n")
    job.wait_until_gone()


# -- nodes that join ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_a_node_joins_after_the_ranks_have_saved(
    job: MarkedJob, saves: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without `onefold.stop`, the steps since the last checkpoint are repeated."""
    nodes = Nodes(job, "1:2", restarts=0, steps=None, seconds=0.2, save_every=20, **(SAVE if saves else {}))
    first = nodes.start(0)
    # The first start waits for further nodes.
    wait_until(lambda: (job.folder / "steps").exists() and len(steps(job)) >= 21, 240)
    second = nodes.start(1)
    for launcher in (first, second):
        _, stderr = launcher.communicate(timeout=240)
        assert launcher.returncode == 0, stderr
        assert "Traceback" not in stderr
    assert "onefold: restarting all ranks on 2 nodes, because the nodes changed" in stderr
    last = max(step.step for step in steps(job) if step.start == 0)
    resumed = [step for step in steps(job) if step.start == 1]
    saved = last if saves else last // 20 * 20
    assert [step[1:3] for step in resumed] == [(saved + number, 2) for number in range(1, 6)]
    assert final_steps(job)[: saved + 5] == scripted(folder_of(tmp_path_factory), (1, saved), (2, saved + 5))


def num_connections(port: str) -> int:
    """Return the number of connections to a port of this machine."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return sum(line[1].endswith(f":{int(port):04X}") and line[3] == "01" for line in lines)


@pytest.mark.slow
def test_a_node_without_a_place_ends_with_the_job(job: MarkedJob) -> None:
    nodes = Nodes(job, "1:2", pause=[0, 6])
    first, second = nodes.start(0), nodes.start(1)
    nodes.wait_for_pause(2)
    before = num_connections(nodes.port)
    third = nodes.start(1)
    wait_until(lambda: num_connections(nodes.port) > before)
    nodes.resume()
    assert [first.wait(240), second.wait(240)] == [0, 0]
    _, stderr = third.communicate(timeout=240)
    assert third.returncode == 1
    assert re.search("onefold: the job (is complete without this node|at .* has ended before)", stderr)


# -- the node of the store ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_nodes_end_with_the_node_of_the_store_and_start_again(job: MarkedJob) -> None:
    nodes = Nodes(job, "1:2", pause=[0, 4], save_every=2)
    first, second = nodes.start(0), nodes.start(1)
    nodes.wait_for_pause(2)
    first.kill()
    _, stderr = second.communicate(timeout=240)
    assert second.returncode == 1
    assert f"onefold: the store of the job at 127.0.0.1:{nodes.port} does not reply" in stderr
    job.wait_until_gone()
    nodes.resume()
    for launcher in (nodes.start(1), nodes.start(0)):
        _, stderr = launcher.communicate(timeout=240)
        assert launcher.returncode == 0, stderr
    assert [step.step for step in steps(job)] == [1, 2, 3, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_node_that_dies_between_rendezvous_and_start_is_replaced(job: MarkedJob) -> None:
    """A launcher that joins and dies sets no numbers of ranks, for which the others wait."""
    nodes = Nodes(job, "2:2", restarts=1)
    code = (
        "import os\n"
        "from onefold.job_secret import JobSecret\n"
        "from onefold.tools.cli.node_rendezvous import join_nodes\n"
        f"join_nodes(2, 2, '127.0.0.1', {nodes.port}, False, JobSecret(None)).next_rendezvous()\n"
        "os._exit(0)\n"
    )
    first = nodes.start(0)
    assert job.start([sys.executable, "-c", code]).wait(240) == 0
    second = nodes.start(1)
    for launcher in (first, second):
        _, stderr = launcher.communicate(timeout=240)
        assert launcher.returncode == 0, stderr
