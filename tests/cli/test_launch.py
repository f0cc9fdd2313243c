"""The launcher: who runs where, and what a person sees of ranks that work, fail, die or are interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models import more

from onefold.tools.cli.launch import choose, find_this_node, job_of_this_node, limit, parse_choice, read_hostfile
from onefold.tools.cli.main import build_parser, main
from onefold.tools.cli.rank_script import PYTHON_RANK
from onefold.tools.cli.ranks import Job
from onefold.tools.cli.usage import UsageError

pytestmark = pytest.mark.program

NODES = {"node1": (0, 1, 2, 3), "node2": (0, 1)}


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "onefold.tools.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(*arguments: str) -> tuple[int, str, str]:
    process = start("launch", *arguments)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    # One write a line: the lines of two ranks may mix, their characters may not.
    head = "import os, sys, time; rank = int(os.environ['RANK'])\ndef say(text): os.write(1, f'{text}\\n'.encode())\n"
    path.write_text(head + text)
    return str(path)


def test_a_rank_writes_whole_lines(tmp_path: Path) -> None:
    """Receive each write of a rank as one message. Ranks share the terminal, where the parts of lines would mix."""
    text = (
        "for stream in (sys.stdout, sys.stderr):\n    print('step', 1, 'loss', 0.5, file=stream)\nprint('end', end='')"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        command = [*PYTHON_RANK, script(tmp_path, text)]
        subprocess.run(command, stdout=theirs, stderr=theirs, env={**os.environ, "RANK": "0"}, check=True)
        ours.setblocking(False)
        received = [ours.recv(100) for _ in range(3)]
    assert received == [b"step 1 loss 0.5\n", b"step 1 loss 0.5\n", b"end"]


# -- hostfiles and choices ---------------------------------------------------------------------------------------


def test_hostfile_is_read_in_order_with_comments(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode2 slots=2\n\nnode1   slots=4  # the big one\n")
    assert list(read_hostfile(file).items()) == [("node2", (0, 1)), ("node1", (0, 1, 2, 3))]


@pytest.mark.parametrize(
    "text",
    [
        "node1\n",
        "node1 slots=x\n",
        "node1 slots=2\nnode1 slots=2\n",
        "# nothing\n",
        "node1 slots=99999999999\n",
        "\xff",
    ],
)
def test_bad_hostfiles_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="hosts"):
        read_hostfile(file)


def test_hostfiles_that_are_no_files_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "hosts").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "hosts-pipe")
    for path in (tmp_path, tmp_path / "hosts", tmp_path / "hosts-pipe"):
        with pytest.raises(UsageError, match="not a file"):
            read_hostfile(path)


def test_choices_read_as_deepspeed_writes_them() -> None:
    assert parse_choice("node1:2,0@node2") == {"node1": (0, 2), "node2": None}


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", NODES),
        ("node1:0,2@node2", "", {"node1": (0, 2), "node2": (0, 1)}),
        ("node2", "", {"node2": (0, 1)}),
        ("", "node1:0,2", {"node1": (1, 3), "node2": (0, 1)}),
        ("", "node1", {"node2": (0, 1)}),
        ("", "node1@node2:0", {"node2": (1,)}),
    ],
)
def test_include_and_exclude(include: str, exclude: str, left: dict[str, tuple[int, ...]]) -> None:
    assert choose(NODES, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude"), [("node1", "node2"), ("node3", ""), ("node2:7", ""), ("", "node1@node2"), ("node1:a", "")]
)
def test_impossible_choices_are_refused(include: str, exclude: str) -> None:
    with pytest.raises(UsageError):
        choose(NODES, include, exclude)


def test_limits_take_the_first_nodes_and_slots() -> None:
    assert limit(NODES, 1, 2) == {"node1": (0, 1)}
    with pytest.raises(UsageError, match="only 2 slots"):
        limit(NODES, None, 3)


def test_this_node_is_found_by_name_or_address() -> None:
    name = os.uname().nodename
    assert find_this_node({"203.0.113.7": (0,), name: (0,)}) == 1
    assert find_this_node({"203.0.113.7": (0,), "127.0.0.1": (0,)}) == 1
    assert find_this_node({"203.0.113.7": (0,)}) is None


def place(*flags: str) -> Job:
    return job_of_this_node(build_parser().parse_args(["launch", *flags, "script.py"]))


def test_place_alone_and_among_several(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("203.0.113.7 slots=8\n127.0.0.1 slots=4\n")
    assert place("--num_gpus", "3") == Job(3, 1, 0, None, None)
    assert place("--num_nodes", "2", "--node_rank", "1", "--master_addr", "a", "--nproc", "8") == Job(
        8, 2, 1, "a", 29500
    )
    assert place("-H", str(hosts)) == Job(4, 2, 1, "203.0.113.7", 29500, "0,1,2,3")
    assert place("-H", str(hosts), "-i", "127.0.0.1:1,3") == Job(2, 1, 0, None, None, "1,3")


def test_several_nodes_get_the_exact_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("203.0.113.7 slots=8\n203.0.113.8 slots=8\n")
    with pytest.raises(UsageError, match="--node_rank"):
        place("-H", str(hosts))
    assert "203.0.113.8: onefold launch --node_rank 1 --master_addr 203.0.113.7" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--num_nodes", "2"],
        ["--num_gpus", "0"],
        ["--node_rank", "1"],
        ["--hostfile", "no-such-file"],
        ["--module", "--no_python"],
        ["--module"],
        ["--no_python"],
        ["--master_port", "99999"],
        ["--master_port", "0"],
        ["--master_port", "x"],
        ["--nprocs", "2"],
        [],
    ],
)
def test_wrong_use_is_one_message_and_exit_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *flags, "no-such-script.py"]) == 2
    assert re.fullmatch(r"onefold: .+\n", capsys.readouterr().err)


def test_a_port_in_use_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "pass\n")
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(family) as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            assert main(["launch", "--nproc", "2", "--master_port", str(port), path]) == 2
        said = f"onefold: --master_port {port} is in use on this node. Leave --master_port out to use a free one.\n"
        assert capsys.readouterr().err == said


def test_ranks_that_cannot_meet_are_one_message() -> None:
    """Here the port is taken after it was looked at."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = f"Job(1, master_port={port})"
        code = f"from onefold.tools.cli.ranks import Job, run_ranks\nprint(run_ranks(['true'], {job}))\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "1\n", done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[W")]  # of torch's C++
    assert len(lines) == 1
    assert lines[0].startswith(f"onefold: the ranks cannot connect to localhost:{port}: ")


# -- real ranks --------------------------------------------------------------------------------------------------


def test_ranks_get_their_environment_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    path = script(
        tmp_path,
        "import json, beside\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS']\n"
        "say(json.dumps([beside.value, sys.argv[1:], __name__] + [os.environ[name] for name in names]))\n",
    )
    code, stdout, stderr = launch("--nproc", "2", "--no_local_rank", path, "--stage", "2", "--nproc=9")
    assert (code, stderr) == (0, f"onefold: starting 2 ranks of {path}\n")
    told = sorted((json.loads(line) for line in stdout.splitlines()), key=lambda line: line[3])
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, line in enumerate(told):
        assert line[:3] == [7, ["--stage", "2", "--nproc=9"], "__main__"]
        assert line[3:6] == [str(rank), str(rank), "2"]
        assert line[7] == os.environ.get("OMP_NUM_THREADS", threads)


def test_a_failing_rank_shows_its_traceback_once_and_nothing_else(tmp_path: Path) -> None:
    # Rank 0 fails as peers do: just after, and because of the first.
    path = script(
        tmp_path,
        "gone = __file__ + '.gone'\n"
        "if rank == 1:\n"
        "    open(gone, 'w').close()\n"
        "    raise ValueError('the cause')\n"
        "while not os.path.exists(gone):\n"
        "    time.sleep(0.05)\n"
        "time.sleep(1)\n"
        "raise ConnectionError('the consequence')\n",
    )
    code, _, stderr = launch("--nproc", "2", path)
    assert code == 1
    lines = stderr.splitlines()[1:]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{path}", line 6')
    assert stderr.count("ValueError: the cause") == 1
    assert "the consequence" not in stderr
    assert re.fullmatch(r"onefold: rank 1 \(node .+, pid \d+\) failed: exit code 1", lines[-1])
    assert stderr.count("Traceback") == 1
    assert len(lines) <= 7


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_tells_why_is_named_all_the_same(tmp_path: Path) -> None:
    # The first half of what it tells is written, and the other never is.
    path = script(
        tmp_path,
        "import json\n"
        "def dump(told, file):\n"
        "    file.write(json.dumps(told)[:20])\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
        "json.dump = dump\n"
        "raise ValueError('the cause')\n",
    )
    code, _, stderr = launch("--nproc", "1", path)
    assert code == 128 + 9
    assert "Traceback" not in stderr
    assert re.search(r"onefold: rank 0 \(node .+, pid \d+\) failed: SIGKILL", stderr)


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    path = script(tmp_path, "if rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(0.2)\nraise ConnectionError\n")
    code, _, stderr = launch("--nproc", "2", path)
    assert code == 128 + signal.SIGKILL
    line = stderr.partition("\n")[2]
    assert re.fullmatch(r"onefold: rank 1 \(node .+, pid \d+\) failed: SIGKILL \(the node .* memory\)\n", line)


@pytest.mark.parametrize(("killed_first", "blamed"), [more(True, 1), more(False, 0)])
def test_of_a_killed_and_a_failed_rank_the_earlier_is_named(tmp_path: Path, killed_first: bool, blamed: int) -> None:
    # The other follows within the second in which a time in whole seconds would show no order.
    waits = "while not os.path.exists(gone):\n        time.sleep(0.001)\n    time.sleep(0.1)"
    path = script(
        tmp_path,
        "import pathlib\n"
        "gone = __file__ + '.gone'\n"
        "if rank == 1:\n"
        f"    {'pathlib.Path(gone).touch()' if killed_first else waits}\n"
        "    os.kill(os.getpid(), 9)\n"
        "else:\n"
        f"    {waits if killed_first else 'pathlib.Path(gone).touch()'}\n"
        "    raise ValueError('of rank 0')\n",
    )
    code, _, stderr = launch("--nproc", "2", path)
    assert f"onefold: rank {blamed} (" in stderr
    assert ("ValueError" in stderr, code) == ((False, 137) if killed_first else (True, 1))


def test_a_restart_shows_why_and_goes_on(tmp_path: Path) -> None:
    path = script(tmp_path, "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('once')\n")
    code, _, stderr = launch("--nproc", "2", "--max-restarts", "1", path)
    assert code == 0, stderr
    assert stderr.count("ValueError: once") == 1
    assert "restart 1 of 1" in stderr


def test_interrupt_ends_the_ranks_quietly(tmp_path: Path) -> None:
    process = start("launch", "--nproc", "2", script(tmp_path, "say(os.getpid())\ntime.sleep(60)\n"))
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.partition("\n")[2] == "onefold: stopped by Ctrl-C; all ranks have ended\n"
    time.sleep(0.1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_other_programs_and_modules_run_too(tmp_path: Path) -> None:
    assert launch("--no_python", "sh", "-c", "exit 5")[0] == 5
    code, stdout, _ = launch("--module", "json.tool", "--help")
    assert code == 0
    assert "usage" in stdout
