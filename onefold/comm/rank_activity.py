"""What this rank publishes for the hang detector: its waits, its launches, and its progress in a pass.

[Note: who writes what]
The threads of the program publish; the detector's thread reads. `RankActivity` guards its fields by one lock and hands
them out as one snapshot. `PassTracker` has one writer per field, and replaces the pass number and the progress in it
together, so that a reader never sees the progress of one pass under the number of another:

    field                      written by                read by
    RankActivity.*             threads that wait          detector
    PassTracker.progress       training thread            detector
    PassTracker._requested_in  detector                   training thread
    PassTracker._answered_in   training thread            training thread
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple


class PassProgress(NamedTuple):
    """How far an engine has come: the number of the pass, and the collectives that it has launched in that pass."""

    pass_number: int = 0
    num_launched: int = 0


class PassTracker:
    """The progress of one engine, and the requests of other ranks to leave the recorded order.

    A request belongs to one pass. It is handed over as the number of that pass, so that one that arrives late, after
    the next pass has begun, has no effect.
    """

    __slots__ = ("_answered_in", "_requested_in", "progress")

    def __init__(self) -> None:
        self.progress = PassProgress()
        self._requested_in = -1
        self._answered_in = -1

    def number_passes_from(self, first: int) -> None:
        """Set the number before the first pass."""
        self.progress = PassProgress(first)

    def begin_pass(self) -> None:
        """Begin the next pass, without launches and without a request."""
        self.progress = PassProgress(self.progress.pass_number + 1)

    def record_launches(self, num_launched: int) -> None:
        """Publish how many collectives were launched in this pass."""
        self.progress = PassProgress(self.progress.pass_number, num_launched)

    def deliver_request(self, pass_number: int) -> None:
        """Record that another rank has requested to leave the order in this pass. The detector's thread calls this."""
        self._requested_in = pass_number

    def saw_request(self, pass_number: int) -> bool:
        """Return whether a request for this pass was delivered."""
        return self._requested_in == pass_number

    @property
    def has_open_request(self) -> bool:
        """Whether a request for the current pass was delivered and not answered yet."""
        current = self.progress.pass_number
        return self._requested_in == current and self._answered_in != current

    def answer_request(self) -> None:
        """Ignore requests for the rest of the current pass."""
        self._answered_in = self.progress.pass_number


class CurrentWait:
    """A wait of this rank that has not ended. `begin_wait` sets the number and the time."""

    __slots__ = ("number", "since", "tracker", "what")

    def __init__(self, what: str, tracker: PassTracker | None = None) -> None:
        self.what, self.tracker = what, tracker
        self.number, self.since = 0, 0.0


class Activity(NamedTuple):
    """What the rank does at one moment."""

    wait: CurrentWait | None
    num_waits: int
    num_launched: int
    last_launch: str
    last_tracker: PassTracker | None
    """The progress of the engine that made the last launch."""
    changed_at: float
    """When the last wait began, in seconds of `time.monotonic`."""


class RankActivity:
    """The waits and launches of all threads of this process."""

    def __init__(self) -> None:
        # Reentrant, because the garbage collector may close an engine, which waits, while this thread holds the lock.
        self._lock = threading.RLock()
        self._waits: list[CurrentWait] = []
        self._num_waits = 0
        self._num_launched = 0
        self._last_launch = ""
        self._last_tracker: PassTracker | None = None
        self._changed_at = 0.0

    def begin_wait(self, wait: CurrentWait, launches: bool) -> None:
        """Record the beginning of a wait, and with `launches` the launch of a collective."""
        with self._lock:
            self._num_waits += 1
            wait.number, wait.since = self._num_waits, time.monotonic()
            self._changed_at = wait.since
            if launches:
                self._num_launched += 1
                self._last_launch, self._last_tracker = wait.what, wait.tracker
            self._waits.append(wait)

    def end_wait(self, wait: CurrentWait) -> None:
        """Record the end of a wait. An outer wait of the same thread continues."""
        self._waits.remove(wait)  # one atomic operation needs no lock

    def snapshot(self) -> Activity:
        """Return what the rank does now. The current wait is the one that began last."""
        with self._lock:
            waits = self._waits[-1:]
            return Activity(
                waits[0] if waits else None,
                self._num_waits,
                self._num_launched,
                self._last_launch,
                self._last_tracker,
                self._changed_at,
            )
