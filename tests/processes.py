"""Jobs whose processes are found again, also after their launcher has gone: by a variable in their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "ONEFOLD_TEST_JOB"
COMMAND = (sys.executable, "-m", "onefold.tools.cli.main")


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition is not met in time"
        time.sleep(0.02)


class MarkedJob:
    """A command whose processes, and all that they start, have one mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a process of the job. Its temporary files are in the folder of the job."""
        name, _, value = self.mark.partition("=")
        own = {**os.environ, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", name: value, **environment}
        process = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def launch(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start `onefold launch`."""
        return self.start([*COMMAND, "launch", *arguments], **environment)

    def pids(self) -> list[int]:
        """Return the processes of the job that run, without the ones that only wait to be reaped."""
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                if path.name.isdecimal() and self.mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def wait_until_gone(self, seconds: float = 10) -> None:
        """Fail unless all processes of the job end within this time."""
        wait_until(lambda: not self.pids(), seconds)

    def folders(self) -> list[str]:
        """Return the temporary folders of launchers."""
        return sorted(path.name for path in self.folder.glob("onefold_launch_*"))


@contextmanager
def marked_job(folder: Path) -> Iterator[MarkedJob]:
    """Make a job, and kill what is left of it at the end."""
    job = MarkedJob(folder)
    try:
        yield job
    finally:
        for pid in job.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in job.started:
            process.communicate(timeout=30)
