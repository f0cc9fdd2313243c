"""The agent of the launcher: which rank it names, what it ends, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import more
from processes import MarkedJob, marked_job, wait_until

pytestmark = pytest.mark.program

# Each rank writes a file when it is ready, named by its start and its rank.
HEAD = """
import os, pathlib, signal, subprocess, sys, time
rank, start = int(os.environ["RANK"]), int(os.environ["ONEFOLD_RESTARTS"])
folder = pathlib.Path(__file__).parent
def ready(name="ready", text=""): 
    part = folder / f"{name}.{start}.{rank}.part"
    part.write_text(text or str(os.getpid()))
    part.rename(folder / f"{name}.{start}.{rank}")
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


def script(job: MarkedJob, text: str) -> str:
    path = job.folder / "script.py"
    path.write_text(HEAD + text)
    return str(path)


def wait_for_files(job: MarkedJob, *names: str) -> list[str]:
    wait_until(lambda: all((job.folder / name).exists() for name in names))
    return [(job.folder / name).read_text() for name in names]


def test_a_killed_rank_is_named_when_all_are_restarted(job: MarkedJob) -> None:
    path = script(
        job,
        "ready()\n"
        "if start == 0 and rank == 1:\n    time.sleep(60)\n"
        "if start == 0:\n"
        "    pid = int((wait_for('ready.0.1'), (folder / 'ready.0.1').read_text())[1])\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    time.sleep(0.05)\n"
        "    raise ConnectionError('the consequence')\n",
    )
    launcher = job.launch("--nproc", "2", "--max-restarts", "1", path)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, stderr
    assert "onefold: rank 1 (" in stderr
    assert "failed: SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert stderr.endswith("onefold: restarting all ranks, restart 1 of 1\n")


@pytest.mark.parametrize("program", [False, more(True)])
def test_ranks_end_with_a_launcher_that_is_killed(job: MarkedJob, program: bool) -> None:
    path = script(job, "ready()\ntime.sleep(600)\n")
    command = ["--no_python", "sh", "-c", f": > {job.folder}/ready.0.$RANK; exec sleep 600"] if program else [path]
    launcher = job.launch("--nproc", "2", *command)
    wait_for_files(job, "ready.0.0", "ready.0.1")
    assert len(job.pids()) == 3
    launcher.kill()
    job.wait_until_gone(5)
    assert len(job.folders()) == 1
    # The next launcher removes the folder, but not that of one that runs.
    (job.folder / "ready.0.0").unlink()
    other = job.launch("--nproc", "1", path)
    wait_for_files(job, "ready.0.0")
    running = job.folders()
    assert len(running) == 1
    done = job.launch("--nproc", "1", "--no_python", "true")
    assert done.wait(60) == 0
    assert job.folders() == running
    other.terminate()
    assert other.wait(60) == 128 + signal.SIGTERM
    assert job.folders() == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, more(signal.SIGTERM), more(signal.SIGHUP)])
def test_a_signal_to_the_launcher_ends_all_ranks(job: MarkedJob, number: signal.Signals) -> None:
    path = script(job, "children = subprocess.Popen(['sleep', '600'])\nready()\ntime.sleep(600)\n")
    launcher = job.launch("--nproc", "2", "--max-restarts", "3", path)
    wait_for_files(job, "ready.0.0", "ready.0.1")
    assert len(job.pids()) == 5
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert stderr.partition("\n")[2] == f"onefold: stopped by {number.name}; all ranks have ended\n"
    job.wait_until_gone(2)
    assert job.folders() == []


@pytest.mark.slow
def test_ranks_may_take_their_time_until_a_second_signal(job: MarkedJob) -> None:
    path = script(
        job,
        "signal.signal(signal.SIGTERM, lambda *_: ready('told'))\nready()\n"
        "wait_for('told.0.0')\ntime.sleep(600 if sys.argv[1] == 'stubborn' else 1)\nready('saved')\n",
    )
    launcher = job.launch("--nproc", "2", path, "quick")
    wait_for_files(job, "ready.0.0", "ready.0.1")
    launcher.terminate()
    assert launcher.wait(30) == 128 + signal.SIGTERM
    assert (job.folder / "saved.0.0").exists()
    assert (job.folder / "saved.0.1").exists()
    for file in job.folder.glob("*.0.*"):
        file.unlink()

    launcher = job.launch("--nproc", "2", path, "stubborn")
    wait_for_files(job, "ready.0.0", "ready.0.1")
    launcher.terminate()
    wait_for_files(job, "told.0.0", "told.0.1")
    launcher.terminate()  # at the same time as the first, so it counts as the same
    time.sleep(1.2)
    assert launcher.poll() is None
    launcher.terminate()
    assert launcher.wait(5) == 128 + signal.SIGTERM
    job.wait_until_gone(2)


def test_a_restart_sends_no_sigterm_and_leaves_no_children(job: MarkedJob) -> None:
    path = script(
        job,
        "ready()\n"
        "if start == 1:\n    wait_for('go')\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, lambda *_: ready('sigterm'))\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "wait_for('ready.0.0'), wait_for('ready.0.1')\n"
        "if rank == 1:\n    raise ValueError('once')\n"
        "time.sleep(600)\n",
    )
    launcher = job.launch("--nproc", "2", "--max-restarts", "1", path)
    wait_for_files(job, "ready.1.0", "ready.1.1")
    assert len(job.pids()) == 3, "the launcher and two new ranks"
    (job.folder / "go").touch()
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, stderr
    assert stderr.count("ValueError: once") == 1
    assert not list(job.folder.glob("sigterm*"))


def test_a_rank_that_does_not_react_is_killed_two_seconds_after_a_failure(job: MarkedJob) -> None:
    path = script(job, "ready()\nwait_for('ready.0.0'), wait_for('ready.0.1')\nwait_for(f'go{rank}')\nsys.exit(3)\n")
    launcher = job.launch("--nproc", "2", path)
    pids = [int(text) for text in wait_for_files(job, "ready.0.0", "ready.0.1")]
    os.kill(pids[0], signal.SIGSTOP)
    (job.folder / "go1").touch()
    _, stderr = launcher.communicate(timeout=10)
    assert launcher.returncode == 3, stderr
    assert "onefold: rank 1 (" in stderr
    job.wait_until_gone(2)


def test_a_program_that_was_asked_to_stop_is_not_restarted(job: MarkedJob) -> None:
    # One rank still saves for longer than the time that is left to ranks after a failure.
    path = script(job, "time.sleep(3 * rank)\nready('saved')\nsys.exit(128 + signal.SIGUSR1)\n")
    launcher = job.launch("--nproc", "2", "--max-restarts", "3", path)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGUSR1
    assert stderr.partition("\n")[2] == "onefold: stopped by SIGUSR1; all ranks have ended\n"
    assert (job.folder / "saved.0.1").exists()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def is_open(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


COUNTS = "ready('counts', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"


@pytest.mark.slow
def test_nodes_agree_on_the_number_of_restarts(job: MarkedJob) -> None:
    """The ranks of node 0 do not fail. Its launcher restarts them because the other node waits in the rendezvous."""
    path = script(job, f"{COUNTS}if start < 2:\n    time.sleep(600 if rank == 0 else 1)\n    sys.exit(5)\n")
    port, nodes = free_port(), []
    for node in ("0", "1"):
        flags = ["--num_nodes", "2", "--node_rank", node, "--master_addr", "127.0.0.1", "--master_port", port]
        nodes.append(job.launch("--nproc", "1", *flags, "--max-restarts", "2", path))
    said = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    for start in range(3):
        assert wait_for_files(job, f"counts.{start}.0", f"counts.{start}.1") == [str(start)] * 2
    assert all("onefold: restarting all ranks, restart 2 of 2" in text for text in said), said


@pytest.mark.slow
def test_a_new_launcher_of_a_node_starts_ranks_that_were_restarted(job: MarkedJob) -> None:
    path = script(job, f"{COUNTS}if start == 0:\n    time.sleep(600)\n")
    port = free_port()
    flags = ["--nproc", "1", "--num_nodes", "2", "--master_addr", "127.0.0.1", "--master_port", port]
    nodes = [job.launch(*flags, "--node_rank", "0", "--max-restarts", "2", path)]
    wait_until(lambda: is_open(port))  # both run on this machine, and the first one hosts the store
    nodes.append(job.launch(*flags, "--node_rank", "1", "--max-restarts", "2", path))
    wait_for_files(job, "counts.0.0", "counts.0.1")
    nodes[1].kill()
    again = job.launch(*flags, "--node_rank", "1", "--max-restarts", "2", path)
    _, stderr = again.communicate(timeout=120)
    assert again.returncode == 0, stderr
    assert nodes[0].wait(60) == 0
    # No rank has failed. A node whose new launcher is not there after 10 seconds is lost, which is a restart.
    assert wait_for_files(job, "counts.1.0", "counts.1.1") in (["0", "0"], ["1", "1"])
