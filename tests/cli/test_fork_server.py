"""Ranks that are forked from a process that has imported torch: what a script sees, how they restart and end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import MarkedJob, marked_job, wait_until

from onefold.tools.cli.main import main

pytestmark = pytest.mark.program

# Writes what a script can see of its interpreter.
SCRIPT = """
import atexit, json, os, pathlib, random, resource, signal, sys, threading
had_torch = "torch" in sys.modules
folder, rank, start = pathlib.Path(sys.argv[1]), os.environ.get("RANK", "0"), os.environ.get("ONEFOLD_RESTARTS", "0")
import __main__, beside, torch, numpy
seen = {
    "argv": sys.argv, "name": __name__, "file": __file__, "main": __main__.__file__, "path": sys.path[0], "x": beside.x,
    "cwd": os.getcwd(), "umask": os.umask(0o22), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "signals": {number: str(signal.getsignal(number)) for number in map(int, signal.valid_signals())},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [(stream.fileno(), stream.line_buffering, stream.write_through) for stream in (sys.stdout, sys.stderr)],
    "main thread": threading.current_thread() is threading.main_thread(),
    "threads": (threading.active_count(), torch.get_num_threads()),
    "flags": str(sys.flags), "cuda": torch.cuda.is_initialized(),
    "variables": {name: value for name, value in os.environ.items() if name.startswith(("OMP", "PYTHON", "MY_"))},
}
own = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "torch": had_torch,
    "world": os.environ.get("WORLD_SIZE"),
    "random": [random.random(), float(numpy.random.rand()), torch.initial_seed()],
}
atexit.register(lambda: (folder / f"ended.{start}.{rank}").touch())
(folder / f"seen.{start}.{rank}").write_text(json.dumps([seen, own]))
print("printed by", rank)
if start == "0" and rank == "1":
    while not (folder / "seen.0.0").exists():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
if start == "0" and "RANK" in os.environ:
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    (tmp_path / "beside.py").write_text("x = 7\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    with marked_job(tmp_path) as made:
        yield made


def seen(job: MarkedJob, start: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    what, own = json.loads((job.folder / f"seen.{start}.{rank}").read_text())
    return what, own


def test_a_script_sees_a_fresh_interpreter_also_after_a_restart(job: MarkedJob) -> None:
    """Compare with a rank that is not forked. The exit code and the exit handlers are those of the script."""
    arguments = [str(job.folder / "script.py"), str(job.folder), "5"]
    flags = ["--nproc", "2", "--max-restarts", "1", "--fork-server"]
    launcher = job.launch(*flags, *arguments, MY_VARIABLE="a\nb")
    stdout, stderr = launcher.communicate(timeout=240)
    assert launcher.returncode == 5, stderr
    assert "failed: SIGKILL" in stderr
    assert "restart 1 of 1" in stderr
    assert stdout.count("printed by") == 4
    forked = [seen(job, start, rank) for start in (0, 1) for rank in (0, 1)]
    assert (job.folder / "ended.1.0").exists()
    job.wait_until_gone()

    command = [sys.executable, "-u", "-m", "onefold.tools.cli.rank_script", *arguments]
    assert job.start(command, MY_VARIABLE="a\nb").wait(60) == 5
    fresh, _ = seen(job, 0, 0)
    assert [what for what, _ in forked] == [fresh] * 4
    for _, own in forked:
        assert own["parent"] == launcher.pid
        assert own["session"] == own["pid"]
        assert own["torch"]
        assert own["world"] == "2"
    for number in range(3):
        assert len({own["random"][number] for _, own in forked}) == 4, "random numbers are seeded for each rank"


@pytest.mark.slow
def test_the_server_and_its_ranks_end_with_the_launcher(job: MarkedJob) -> None:
    script = job.folder / "sleep.py"
    script.write_text("import os, sys, time\nopen(sys.argv[1] + '.' + os.environ['RANK'], 'w')\ntime.sleep(600)\n")
    for number in (signal.SIGKILL, signal.SIGTERM):
        launcher = job.launch("--nproc", "2", "--fork-server", str(script), str(job.folder / number.name))
        wait_until(lambda: len(list(job.folder.glob(f"{number.name}.*"))) == 2)  # noqa: B023
        assert len(job.pids()) == 4
        launcher.send_signal(number)
        launcher.wait(30)
        job.wait_until_gone(5)


@pytest.mark.slow
def test_workers_and_modules_run_in_forked_ranks(job: MarkedJob) -> None:
    """Data loader workers are forked or spawned by the rank; a spawned one imports the script again."""
    package = job.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "job.py").write_text(
        "import sys, torch\n"
        "def double(row): return 2 * row\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return double(index)\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context=method)\n"
        "        assert [int(row) for row in loader] == [0, 2, 4, 6]\n"
        "    print('loaded')\n"
    )
    launcher = job.start(
        [
            sys.executable,
            "-m",
            "onefold.tools.cli.main",
            "launch",
            "--nproc",
            "1",
            "--fork-server",
            "-m",
            "package.job",
        ],
        PYTHONPATH=f"{job.folder}:{os.environ.get('PYTHONPATH', '')}",
    )
    stdout, stderr = launcher.communicate(timeout=240)
    assert (launcher.returncode, stdout) == (0, "loaded\n"), stderr


@pytest.mark.slow
def test_threads_at_import_are_an_error(job: MarkedJob) -> None:
    (job.folder / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'onefold.tools.cli.fork_server' in ' '.join(sys.orig_argv):\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    path = f"{job.folder}:{os.environ.get('PYTHONPATH', '')}"
    launcher = job.launch("--nproc", "1", "--fork-server", str(job.folder / "script.py"), PYTHONPATH=path)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "onefold: --fork-server: 1 threads were started when torch was imported" in stderr
    job.wait_until_gone()


def test_programs_are_not_forked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--fork-server", "--no_python", "true"]) == 2
    assert "--fork-server starts Python scripts only" in capsys.readouterr().err
