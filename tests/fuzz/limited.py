"""A process with little memory that reads generated inputs: an error of the project is fine, all else is a finding.

The process is forked once and reads one input after another, because an import of torch takes seconds. It may allocate
`MEMORY` beyond what it had at the start, must respond within `SECONDS`, and may start no process, connect nowhere and
write no file: an audit hook of Python reports that.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 1 << 30
SECONDS = 60.0
_FORBIDDEN = (
    "os.exec", "os.fork", "os.forkpty", "os.kill", "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir",
    "os.spawn", "os.symlink", "os.system", "shutil.rmtree", "socket.bind", "socket.connect", "subprocess.Popen",
)  # fmt: skip

Target = Callable[[Path, Any], object]


class Finding(AssertionError):
    """An input that crashes, hangs, needs unbounded memory, or raises an error that is not of the project."""


class LimitedProcess:
    """A process that runs one target. It is started again after a finding."""

    def __init__(self, prepare: Target, target: Target, allowed: tuple[type[Exception], ...]) -> None:
        """`prepare` writes an input to a folder, from which `target` reads it. `target` may raise what is `allowed`."""
        self._prepare, self._target, self._allowed = prepare, target, allowed
        self._process: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="onefold-fuzz-")

    def run(self, value: Any) -> bool:
        """Return whether the target has accepted the input. Raise `Finding` for anything but acceptance and refusal."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send(value)
            if not self._pipe.poll(SECONDS):
                raise Finding(f"no result after {SECONDS:.0f} s of {value!r:.300}")
            outcome, text = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            self.stop()
            raise Finding(f"the process ended with {code} at {value!r:.300}") from None
        except Finding:
            self.stop()
            raise
        if outcome == "finding":
            raise Finding(f"{text}\nfrom {value!r:.300}")
        return bool(outcome == "accepted")

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def close(self) -> None:
        """End the process and remove its folder."""
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe()
        folder = Path(self._folder.name)
        self._process = context.Process(
            target=_serve, args=(there, folder, self._prepare, self._target, self._allowed), daemon=True
        )
        self._process.start()
        there.close()


def _causes(error: BaseException | None) -> list[str]:
    """Return an error and those from which it was raised."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return found


def _serve(pipe: Any, folder: Path, prepare: Target, target: Target, allowed: Any) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seen: list[str] = []
    running = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if running and event in _FORBIDDEN:
            seen.append(f"{event}{arguments!r:.100}")
        if running and event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            seen.append(f"open for writing {arguments!r:.100}")

    sys.addaudithook(audit)
    while True:
        try:
            value = pipe.recv()
        except EOFError:
            return
        outcome = ("accepted", "")
        prepare(folder, value)
        running = True
        try:
            target(folder, value)
        except allowed as error:
            ran_out = [text for text in _causes(error) if "MemoryError" in text or "enough memory" in text]
            outcome = ("finding", f"it has run out of memory: {ran_out}") if ran_out else ("refused", str(error))
        except BaseException:
            running = False
            outcome = ("finding", traceback.format_exc()[-3000:])
        running = False
        if seen:
            outcome = ("finding", f"it has executed {seen}")
            seen.clear()
        pipe.send(outcome)
