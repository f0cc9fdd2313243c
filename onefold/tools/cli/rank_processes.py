"""The processes of the ranks of one node, each in a process group of its own, and the way in which each ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from onefold.redaction import redact
from onefold.stop_signals import EXIT_CODES, STOP_SECONDS, STOP_SECONDS_FILE

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True)
class RankEnd:
    """How and when a rank ended by itself."""

    rank: int
    pid: int
    exit_code: int
    """The exit code of the process, or the number of the signal that killed it as a negative number."""
    when: float
    """The time of the exception if the rank has recorded one, otherwise the time at which the process ended."""
    message: str = ""
    traceback: str = ""

    @property
    def was_asked(self) -> bool:
        """Whether the program has ended after a request to stop, with 128 plus the number of the signal."""
        return self.exit_code in EXIT_CODES

    @property
    def reason(self) -> str:
        """The exit code or the signal, in words."""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        with suppress(ValueError):
            name = signal.Signals(-self.exit_code).name
            return f"{name} (the node may be out of memory)" if self.exit_code == -signal.SIGKILL else name
        return f"signal {-self.exit_code}"


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the failure that came first, or None if no rank failed. The others failed because that rank was gone."""
    return min((end for end in ends if end.exit_code), key=lambda end: end.when, default=None)


class ForkedRank:
    """A rank that was forked by the server, and whose parent is this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> None:
        """Reap the process."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)


class RankProcess:
    """The process of one rank. A thread waits for its end, so that the order in which ranks end is known.

    The thread does not reap the process. Its id stays reserved until `kill` has ended the process group, so that the
    group of another process is never killed.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedRank,
        environment: Mapping[str, str],
        rank: int,
        changed: threading.Condition,
    ) -> None:
        self.rank = rank
        self.exit_code: int | None = None
        """None until the process has ended. Negative if a signal killed it."""
        self._ended_at = 0.0
        self._changed = changed
        self._error_file = environment["TORCHELASTIC_ERROR_FILE"]
        self._stop_seconds_file = environment[STOP_SECONDS_FILE]
        self._process = process
        self.pid = process.pid
        self._watcher = threading.Thread(target=self._watch, name=f"onefold-rank-{rank}", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        """Wait for the end of the process, and record it."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        now = time.time()
        assert found is not None
        with self._changed:
            self._ended_at = now
            self.exit_code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            self._changed.notify_all()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank, but not to its children: a data loader must not end before the rank stops."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process group of the rank. `reap` must follow."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait until the rank has ended. Other members of its process group may outlive it."""
        if self._process.returncode is None:
            self._watcher.join()
            self._process.wait()

    def stop_seconds(self) -> float:
        """Return the time that the rank gives itself to stop."""
        lines = self._stop_lines()
        return float(lines[0]) if lines else STOP_SECONDS

    def stop_signals(self) -> list[signal.Signals]:
        """Return the signals after which the rank stops with a checkpoint; none if it handles no signals."""
        return [signal.Signals[name] for name in " ".join(self._stop_lines()[1:]).split()]

    def _stop_lines(self) -> list[str]:
        """Return the time and the signals that the rank has recorded."""
        try:
            with open(self._stop_seconds_file) as file:
                lines = file.read().splitlines()
        except OSError:  # the rank handles no signals
            return []
        return lines if len(lines) > 1 else []  # the rank is writing them

    def end(self) -> RankEnd:
        """Return how the rank ended, with the error that it recorded."""
        assert self.exit_code is not None
        error = _read_error(self._error_file)
        extra = error.get("extraInfo", {})
        when = self._ended_at
        if "exact_timestamp" in extra:
            when = min(when, float(extra["exact_timestamp"]))
        elif "timestamp" in extra:  # of torch's `record`, in whole seconds, rounded down
            when = min(when, float(extra["timestamp"]) + 1)
        message, trace = str(error.get("message", "")), str(extra.get("py_callstack", ""))
        return RankEnd(self.rank, self.pid, self.exit_code, when, message, trace)


def _read_error(path: str) -> dict[str, Any]:
    """Return the error that a rank has recorded for the launcher; an empty dict if there is none."""
    try:
        with open(path) as file:
            message = json.load(file)["message"]
    except (OSError, ValueError, KeyError, TypeError):  # a rank may be killed while it writes
        return {}
    return message if isinstance(message, dict) else {"message": message}


# -- reports ---------------------------------------------------------------------------------------------------------


def report_failure(end: RankEnd) -> int:
    """Print how a rank failed, and return the exit code of the launcher."""
    if end.exit_code in (EXIT_INTERRUPTED, EXIT_BROKEN_PIPE):
        return end.exit_code
    if end.was_asked:
        return report_signal(signal.Signals(end.exit_code - 128))
    if end.exit_code == EXIT_USAGE and end.message:
        print_error(f"onefold: {end.message}")
        return EXIT_USAGE
    print_error(end.traceback.rstrip())
    print_error(f"onefold: rank {end.rank} (node {socket.gethostname()}, pid {end.pid}) failed: {end.reason}")
    return 128 - end.exit_code if end.exit_code < 0 else end.exit_code


def report_signal(number: signal.Signals) -> int:
    """Print the signal that stopped the job, and return the exit code of the launcher."""
    print_error(f"onefold: stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}; all ranks have ended")
    return 128 + number


def print_error(text: str) -> None:
    """Print text to stderr without secrets of the environment, unless it is empty."""
    if text:
        print(redact(text), file=sys.stderr, flush=True)
