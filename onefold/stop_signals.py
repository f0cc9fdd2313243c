"""The signals with which schedulers stop a job, as the launcher and the ranks treat them.

[Note: stop signals of a rank]
Python runs a signal handler on the main thread, between two operations. A rank that waits in a collective would receive
a signal only after the wait, and could not keep a time limit. So a thread reads the numbers of signals from a pipe
that Python's C handler writes to at once (`signal.set_wakeup_fd`). It sets the flag that the next step reads, ends the
process when the time is over, and ends it at once after a second signal. The handler itself does nothing.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

# Signals that the launcher forwards to its ranks.
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FORWARDED = tuple(signal.Signals[name] for name in _FORWARDED if hasattr(signal, name))  # Windows has the first two
# The exit codes of a program that has ended because of such a signal, but was not killed by it.
EXIT_CODES = frozenset(128 + number for number in FORWARDED)
# Two signals within this time are one request: a terminal and a scheduler also send them to the ranks.
SAME_SIGNAL_SECONDS = 1.0
# The time that a rank may take to stop, unless its config gives another.
STOP_SECONDS = 30.0
# The environment variable with the file in which a rank records another time for its launcher, and the names of the
# signals that stop it.
STOP_SECONDS_FILE = "ONEFOLD_STOP_SECONDS_FILE"

# Bytes in the pipe other than signals: the thread ends, and other ranks have requested the stop.
_CLOSE, _OTHER_RANK = 0, 128


class StopListener:
    """Receives stop signals in this process: records the first, and ends the process after a second or a time limit.

    All engines of a process share one listener. Only the main thread can open it.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal that requested a stop, or 0. It stays set."""
        self._seconds = 0.0
        self._num_users = 0
        self._previous: dict[int, Any] = {}
        self._owns_wakeup = False

    def open(self, numbers: Iterable[int], seconds: float) -> None:
        """Handle these signals until as many calls of `close`. The longest of several time limits applies."""
        self._num_users += 1
        self._seconds = max(self._seconds, seconds)
        if not self._previous:
            self._start()
        for number in set(numbers) - self._previous.keys():
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
        if path := os.environ.get(STOP_SECONDS_FILE):
            with suppress(OSError), open(path, "w") as file:  # of a launcher that has ended
                file.write(f"{self._seconds}\n{' '.join(signal.Signals(number).name for number in self._previous)}\n")

    def close(self) -> None:
        """Restore the previous handlers if no engine is left. The time limit of a requested stop remains."""
        self._num_users -= 1
        if self._num_users or self.number or threading.current_thread() is not threading.main_thread():
            return
        self._restore()
        os.write(self._pipe, bytes([_CLOSE]))
        self._thread.join()

    def request(self, number: int) -> None:
        """Request a stop of this process because another rank has received a signal."""
        if not self.number:
            self.number = number
            os.write(self._pipe, bytes([_OTHER_RANK | number]))

    def _start(self) -> None:
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._thread = threading.Thread(target=self._watch, args=(read, self._pipe), name="onefold-stop", daemon=True)
        self._thread.start()
        before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        self._owns_wakeup = before == -1
        if not self._owns_wakeup:  # of an event loop
            signal.set_wakeup_fd(before)

    def _restore(self) -> None:
        if self._owns_wakeup:
            signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if not self._num_users and not self.number:  # the last engine was closed on another thread
            self._restore()
            os.kill(os.getpid(), number)
            return
        if not self._owns_wakeup:
            os.write(self._pipe, bytes([number]))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _watch(self, read: int, write: int) -> None:
        """Read signals from the pipe until it is closed. Runs on a thread."""
        first, deadline = math.inf, math.inf
        while True:
            left = deadline - time.monotonic()
            if not select.select([read], [], [], None if left == math.inf else max(0.0, left))[0]:
                _end_process(self.number, f"it has not stopped within {self._seconds:g} s")
            (byte,) = os.read(read, 1)
            now = time.monotonic()
            if byte == _CLOSE:
                break
            if byte & _OTHER_RANK:
                deadline = min(deadline, now + self._seconds)
            elif byte in self._previous and self._num_users:
                if now - first > SAME_SIGNAL_SECONDS:
                    _end_process(byte, "a second signal has arrived")
                self.number = self.number or byte
                first, deadline = min(first, now), min(deadline, now + self._seconds)
        os.close(read)
        os.close(write)

    def leave_to_parent(self) -> None:
        """Stop listening in a forked process, such as a data loader worker, which must not stop the job.

        Signals for users do not end it, because a scheduler may send them to all processes, and the parent needs it.
        """
        if not self._previous:
            return
        if self._owns_wakeup:
            signal.set_wakeup_fd(-1)
        for number in self._previous:
            is_for_users = number in (signal.SIGUSR1, signal.SIGUSR2)
            signal.signal(number, signal.SIG_IGN if is_for_users else signal.SIG_DFL)
        self._previous.clear()


def _end_process(number: int, reason: str) -> None:
    rank = os.environ.get("RANK", "0")
    text = f"onefold: rank {rank} received {signal.Signals(number).name} and ends without a further save: {reason}\n"
    with suppress(OSError):
        os.write(2, text.encode())
    os._exit(128 + number)


LISTENER = StopListener()
"""The listener of this process."""
os.register_at_fork(after_in_child=LISTENER.leave_to_parent)
