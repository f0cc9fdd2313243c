"""What a rank reports to the hang detector, and what an engine receives from it.

Every wait for other ranks, and every launch of a collective, runs inside `Guard.waiting_for` or `Guard.launching`,
which record its name in memory. The engine receives two things: the verdict, as an exception, and the requests of other
ranks to leave the recorded order of collectives. `hang_detector.py` compares ranks.

[Note: who writes what]
The threads of the program record; the detector's thread reads. `RankActivity` protects its fields by one lock and
returns them as one snapshot. `Guard` has one writer per field, and replaces the pass number and the progress in it
together, so that a reader never sees the progress of one pass under the number of another:

    field                  written by            read by
    RankActivity.*         threads that wait      detector
    Guard.progress         training thread        detector
    Guard._requested_in    detector               training thread
    Guard._answered_in     training thread        training thread
    _last_event            training thread        detector
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple, NoReturn, Protocol

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


class Disagreement(RuntimeError):
    """Ranks are set up differently, wait for different things, or one of them has ended."""


class PassProgress(NamedTuple):
    """The number of an engine's pass, and of the collectives that were launched in it."""

    pass_number: int = 0
    num_launched: int = 0


class Guard:
    """The waits, launches and progress of one engine on one rank. A fake process group has no detector."""

    def __init__(self, detector: Detector | None = None) -> None:
        self._detector = detector
        self.progress = PassProgress()
        # A request belongs to one pass and is recorded as the number of that pass, so that one that arrives after the
        # next pass has begun has no effect.
        self._requested_in = -1
        self._answered_in = -1

    # -- waits and the verdict ----------------------------------------------------------------------------------

    def waiting_for(self, operation: str, units: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Return a context around a wait for other ranks."""
        if self._detector is None or self._detector.size == 1:
            return _NOTHING
        return Wait(self._detector, f"{operation} {', '.join(units)}" if units else operation, self)

    def launching(self, operation: str, units: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context around the launch of a collective."""
        if self._detector is None or self._detector.size == 1:
            return _NOTHING
        return Wait(self._detector, f"{operation} {', '.join(units)}" if units else operation, self, launches=True)

    def start(self) -> None:
        """Keep the detector running until `close`, because other ranks may wait for this one."""
        if self._detector is not None:
            self._detector.hold(id(self))

    def close(self) -> None:
        """Release the detector. Its thread ends with the last engine."""
        if self._detector is not None:
            self._detector.release(id(self))

    def check(self) -> None:
        """Raise `Disagreement` if the job is stuck."""
        if self._detector is not None:
            self._detector.check()

    @property
    def verdict(self) -> str | None:
        """Why the job is stuck, or None. For waits that are not in the backend, and so are not woken."""
        return self._detector.verdict if self._detector is not None else None

    def fail(self, verdict: str) -> NoReturn:
        """Raise a verdict that every rank has reached, and end the waits of devices for each other."""
        if self._detector is None:
            raise Disagreement(verdict)
        self._detector.fail(verdict)

    # -- progress in a pass, and requests to leave the recorded order -------------------------------------------

    def number_passes_from(self, first: int) -> None:
        """Set the number before the next pass. Ranks agree on it, and passes of two engines have different ones."""
        self.progress = PassProgress(first)

    def begin_pass(self) -> None:
        """Begin the next pass, without launches and without a request."""
        self.progress = PassProgress(self.progress.pass_number + 1)

    def record_launches(self, num_launched: int) -> None:
        """Record how many collectives this rank has launched in the pass."""
        self.progress = PassProgress(self.progress.pass_number, num_launched)

    def request_divergence(self) -> None:
        """Request that all ranks leave the recorded order in this pass. It reaches every rank whose wait lasts."""
        if self._detector is not None:
            self._detector.write_request(self.progress.pass_number)

    def deliver_request(self, pass_number: int) -> None:
        """Record that another rank has requested to leave the order in this pass. The detector's thread calls this."""
        self._requested_in = pass_number

    def saw_request(self, pass_number: int) -> bool:
        """Return whether a request for this pass was delivered."""
        return self._requested_in == pass_number

    @property
    def divergence_requested(self) -> bool:
        """Whether another rank has requested to leave the order in this pass, and this rank has not done so."""
        current = self.progress.pass_number
        return self._requested_in == current and self._answered_in != current

    def answer_request(self) -> None:
        """Ignore requests for the rest of the pass, because this rank has left the recorded order."""
        self._answered_in = self.progress.pass_number

    def furthest_progress(self) -> int:
        """Return the largest number of launches in this pass among ranks that wait and have seen the request.

        Other ranks are left out: they may launch more, and where ranks diverge must not depend on which is faster.
        """
        return self._detector.furthest_progress(self.progress.pass_number) if self._detector is not None else 0


class Wait:
    """A wait for other ranks, or with `launches` the launch of a collective, as a context.

    It is a class instead of a generator, because every launch of a collective makes one.
    """

    __slots__ = ("_detector", "guard", "launches", "number", "since", "what")

    def __init__(self, detector: Detector, what: str, guard: Guard | None = None, *, launches: bool = False) -> None:
        self._detector, self.what, self.guard, self.launches = detector, what, guard, launches
        self.number, self.since = 0, 0.0

    def __enter__(self) -> None:
        detector = self._detector
        if detector.verdict is not None:
            detector.check()
        detector.activity.begin_wait(self)
        if not detector.activity.is_watched:
            detector.start_thread()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        detector = self._detector
        if error is None and detector.verdict is None:
            detector.activity.end_wait(self)
        else:
            detector.end_failed_wait(self, error)


class Activity(NamedTuple):
    """A snapshot of what the rank does."""

    wait: Wait | None
    num_waits: int
    num_launched: int
    last_launch: str
    last_guard: Guard | None
    """The guard of the engine that made the last launch."""
    changed_at: float
    """When the last wait began, in seconds of `time.monotonic`."""


class RankActivity:
    """The waits and launches of all threads of this process."""

    def __init__(self) -> None:
        # Whether the detector's thread runs.
        self.is_watched = False
        # Reentrant, because the garbage collector may close an engine, which waits, while this thread holds the lock.
        self._lock = threading.RLock()
        self._waits: list[Wait] = []
        self._num_waits = 0
        self._num_launched = 0
        self._last_launch = ""
        self._last_guard: Guard | None = None
        self._changed_at = 0.0

    def begin_wait(self, wait: Wait) -> None:
        """Record the beginning of a wait, and assign its number."""
        with self._lock:
            self._num_waits += 1
            wait.number, wait.since = self._num_waits, time.monotonic()
            self._changed_at = wait.since
            if wait.launches:
                self._num_launched += 1
                self._last_launch, self._last_guard = wait.what, wait.guard
            self._waits.append(wait)

    def end_wait(self, wait: Wait) -> None:
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
                self._last_guard,
                self._changed_at,
            )


class Detector(Protocol):
    """The hang detector, as far as guards and waits use it. `hang_detector.HangDetector` implements it."""

    size: int
    verdict: str | None
    activity: RankActivity

    def start_thread(self) -> None: ...

    def check(self) -> None: ...

    def fail(self, verdict: str) -> NoReturn: ...

    def end_failed_wait(self, wait: Wait, error: BaseException | None) -> None: ...

    def hold(self, holder: int) -> None: ...

    def release(self, holder: int) -> None: ...

    def write_request(self, pass_number: int) -> None: ...

    def furthest_progress(self, pass_number: int) -> int: ...


# -- the last collective on the device ---------------------------------------------------------------------------------

_last_event: torch.cuda.Event | None = None


def record_device_launch(event: torch.cuda.Event) -> None:
    """Keep the event recorded behind the collective that was launched last on the device."""
    global _last_event
    _last_event = event


def has_device_work() -> bool:
    """Return whether the collective that was launched last on the device has not ended."""
    event = _last_event
    return event is not None and not event.query()


def wait_for_device(seconds: float) -> None:
    """Wait until the collective that was launched last has ended, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    with suppress(RuntimeError):
        while has_device_work() and time.monotonic() < deadline:
            time.sleep(0.01)
