"""The stall watch: ends a job in which a rank makes no progress, names the rank, and writes the stacks of all ranks.

[Note: how a stall is found]
*Progress.* Every period a thread, `onefold-stall`, looks at what this rank does: the phase of the engine, waits for
other ranks (`comm/guard.py`), requests to disks (`disk_waits.py`) and the stack of the training thread. Progress is
any difference to the look before. A request to a disk is timed by itself, also in a background thread.

*Other ranks.* A second thread, `onefold-beat`, writes a heartbeat to the store of the process group and reads those of
the others: rank 0 of all ranks, the others of rank 0. It may block, if the process that serves the store is stopped;
the first thread measures that. A third thread, on rank 0, writes the heartbeats to the folder of the run and publishes
them as metrics. It may block on a disk.

*The end.* The first rank that finds a stall writes the verdict to the store. Every rank then writes its stacks to the
store, rank 0 joins them to one file, and all processes end with `EXIT_STALLED`. Nothing of this waits for the training
thread. A rank whose thread cannot run, because C code holds Python's lock, has its stacks written by `faulthandler`,
which needs no lock.

*Pauses.* A process that was stopped and continues finds that its last look was long ago. It measures anew.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from onefold.comm import world_detector
from onefold.comm.guard import has_device_work
from onefold.comm.main_thread import MainThreadProbe
from onefold.disk_waits import longest_disk_wait, num_disk_requests, record_disk_waits
from onefold.errors import ConfigError
from onefold.log import logger
from onefold.recovery.rank_beats import (
    RankBeat,
    SilentRanks,
    StalledError,
    all_wait,
    beats_file,
    describe_common_wait,
    describe_silence,
    describe_silent_store,
    describe_stall,
)
from onefold.recovery.stall_store import StallStore
from onefold.recovery.thread_stacks import format_stacks, place_of, save_waits_for_ranks

EXIT_STALLED = 75
"""The exit code of all ranks after a stall: EX_TEMPFAIL, "try again". A launcher restarts the job."""
HEARTBEATS, STACKS = "heartbeats.json", "stacks.txt"
# The longest time between two looks.
_PERIOD = 1.0
# A call of torch.distributed counts as a wait after this time.
_PATIENCE = 1.0
# How long ranks wait for a verdict of all ranks, for the stacks of the others, and for the end of their own report.
_VERDICT_SECONDS, _STACKS_SECONDS, _REPORT_SECONDS = 4.0, 4.0, 10.0
_JOIN_SECONDS = 5.0
# How long the rank that may serve the store lets the others read its last key.
_LINGER_SECONDS = 0.5


@dataclass(frozen=True)
class StallBounds:
    """The bounds of a watch, and the folder of its files."""

    seconds: float
    first_step_seconds: float
    folder: Path


@dataclass(frozen=True)
class _Verdict:
    text: str
    joiner: int = 0
    """The rank that joins the stacks."""

    def to_text(self) -> str:
        return json.dumps([self.text, self.joiner])

    @staticmethod
    def of(text: str) -> _Verdict:
        return _Verdict(*json.loads(text))


class StallWatch:
    """Watches the progress of this rank, and on rank 0 of all ranks. See [Note: how a stall is found]."""

    def __init__(self, bounds: StallBounds, publish: Callable[[Mapping[int, RankBeat]], None]) -> None:
        self.bounds = bounds
        self._publish = publish
        self._detector = world_detector()
        self._rank, self._size = self._detector.rank, self._detector.size
        self._period = min(_PERIOD, bounds.seconds / 4)
        self._process = os.getpid()
        # Written by the training thread.
        self._phase, self._step, self._num_events = "", 0, 0
        self._has_stepped = False
        self._thread = threading.get_ident()
        # Written by `onefold-stall`.
        self._probe = MainThreadProbe()
        self._seen: tuple[object, ...] = ()
        self._looked_at = self._changed_at = self._resumed_at = time.monotonic()
        self._beat = RankBeat(self._rank, host=socket.gethostname(), pid=os.getpid(), doing="its start")
        self._found: _Verdict | None = None
        self._found_at = 0.0
        # Written by `onefold-beat`.
        self._verdict: _Verdict | None = None
        self._beats: dict[int, RankBeat] = {}
        watched = range(1, self._size) if self._rank == 0 else range(1)
        self._silence = SilentRanks(watched, self._looked_at)
        self._lock = threading.Lock()
        self._called_at: float | None = None

        self._open_dump()
        self._postpone_dump()
        name = self._detector.store.key("stall")
        self._store = StallStore(self._rank, self._size, name) if self._size > 1 else None
        self._report_store = StallStore(self._rank, self._size, name) if self._size > 1 else None
        record_disk_waits(enabled=True)
        if self._store is not None:
            self._store.write_beat(self._beat)
        self._stop = threading.Event()
        self._threads = [self._start("onefold-stall", self._look)]
        if self._size > 1:
            self._threads.append(self._start("onefold-beat", self._exchange, last=self._write_end))
        if self._rank == 0:
            self._threads.append(self._start("onefold-heartbeats", self._write_beats, last=self._write_last_beats))
        atexit.register(self.close)

    # -- the interface of the training thread ---------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Record that the training thread is in a phase of the engine."""
        self._thread, self._phase = threading.get_ident(), name
        self._num_events += 1
        try:
            with inner:
                yield
        finally:
            self._phase = ""
            self._num_events += 1

    def record_step(self, step: int) -> None:
        """Record that the training thread has completed an optimizer step."""
        self._step, self._has_stepped = step, True

    def close(self) -> None:
        """Stop watching. The last heartbeat says that this rank has ended."""
        atexit.unregister(self.close)
        if os.getpid() != self._process or self._stop.is_set():
            return
        self._beat = self._own_beat(time.monotonic())
        record_disk_waits(enabled=False)
        faulthandler.cancel_dump_traceback_later()
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._dump.close()
        with suppress(OSError):
            if not self._dump_path.stat().st_size:
                self._dump_path.unlink()

    # -- onefold-stall: the progress of this rank -----------------------------------------------------------------

    def _start(self, name: str, work: Callable[[], None], last: Callable[[], None] | None = None) -> threading.Thread:
        """Start a thread that calls `work` every period, and `last` once at the end."""

        def run() -> None:
            with suppress(RuntimeError):  # the store is gone, because the process that serves it has ended
                while not self._stop.wait(self._period):
                    work()
                if last is not None:
                    last()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > self.bounds.seconds / 2:
            self._resumed_at = self._changed_at = now
            with self._lock:
                self._silence.restart(now)
                self._called_at = now if self._called_at is not None else None
        self._looked_at = now
        self._postpone_dump()
        self._beat = beat = self._own_beat(now)
        if self._found is None and (found := self._problem(beat, now)) is not None:
            self._found, self._found_at = found, now
        if self._found is not None and (self._size == 1 or now - self._found_at > _VERDICT_SECONDS):
            self._verdict = self._verdict or self._found
        if self._verdict is not None:
            self._end(self._verdict)

    def _own_beat(self, now: float) -> RankBeat:
        """Return what this rank does, and for how long."""
        doing, waits = self._describe_thread()
        activity = self._detector.activity.snapshot()
        # Requests to disks count only where the training thread may wait for them, and not those of a save under it.
        num_requests = num_disk_requests() if self._phase else 0
        number = activity.wait.number if activity.wait is not None else 0
        seen = (self._num_events, self._step, activity.num_waits, number, num_requests, waits)
        if seen != self._seen:
            self._seen, self._changed_at = seen, now
        since = self._changed_at
        disk = longest_disk_wait()
        if disk is not None and now - (disk_since := max(disk.since, self._resumed_at)) > self._bound:
            doing, waits, since = disk.what, False, disk_since
        return replace(
            self._beat, number=self._beat.number + 1, time=time.time(), step=self._step, doing=doing,
            seconds=now - since, waits=waits,
        )  # fmt: skip

    def _describe_thread(self) -> tuple[str, bool]:
        """Return what the training thread does, and whether it waits for other ranks."""
        frames, activity = sys._current_frames(), self._detector.activity.snapshot()
        place = place_of(frames.get(self._thread))
        if self._size > 1 and (place.waits_for_ranks or (place.waits_for_save and save_waits_for_ranks(frames))):
            return activity.wait.what if activity.wait is not None else place.operation or "a collective", True
        call = self._probe.find_blocked_call(_PATIENCE) if self._size > 1 else None
        if call is not None:
            return call.what, True
        if self._detector.connections.device_waits and has_device_work():
            return f"its computation, after it launched the {activity.last_launch}", True
        phase = f"the {self._phase}" if self._phase else "its program, between two calls of the engine"
        where = f", at {place.line}" if place.line else ""
        return f"{place.operation or phase}{where}", False

    @property
    def _bound(self) -> float:
        return self.bounds.seconds if self._has_stepped else self.bounds.first_step_seconds

    def _problem(self, beat: RankBeat, now: float) -> _Verdict | None:
        """Return why the ranks must end, or None."""
        bound = self.bounds.seconds
        if not beat.waits and beat.seconds > self._bound:
            return _Verdict(describe_stall(beat, self._bound))
        with self._lock:
            beats, called_at = dict(self._beats), self._called_at
            silent, seconds = self._silence.longest(beats, now)
        if called_at is not None and now - called_at > bound:
            is_of_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            return _Verdict(describe_silent_store(is_of_rank_0, now - called_at, bound), joiner=1)
        if seconds > bound:
            return _Verdict(describe_silence(silent, beats.get(silent), seconds, bound), joiner=int(silent == 0))
        if self._rank == 0 and all_wait(beats | {0: beat}, self._size, self._bound):
            return _Verdict(describe_common_wait(beats | {0: beat}, self._bound))
        return None

    # -- onefold-beat and onefold-heartbeats ----------------------------------------------------------------------

    def _exchange(self) -> None:
        """Write this rank's heartbeat, read those of others, and agree on a verdict."""
        assert self._store is not None
        with self._lock:
            self._called_at = time.monotonic()
        self._store.write_beat(self._beat)
        if self._found is not None:
            self._verdict = _Verdict.of(self._store.propose_verdict(self._found.to_text()))
        elif (text := self._store.read_verdict()) is not None:
            self._verdict = _Verdict.of(text)
        beats = self._store.read_beats(range(self._size if self._rank == 0 else 1))
        with self._lock:
            self._called_at = None
            self._beats = beats
            self._silence.update(beats, time.monotonic())

    def _write_end(self) -> None:
        self._beat = replace(self._beat, ended=True)
        self._exchange()

    def _write_beats(self) -> None:
        """Write the heartbeats of all ranks to the folder of the run, and publish them."""
        with self._lock:
            beats = self._beats | {0: self._beat}
        self._publish(beats)
        path = self.bounds.folder / HEARTBEATS
        try:
            part = path.with_name(f".{HEARTBEATS}.part")
            part.write_text(beats_file(beats, self._size, time.time()))
            os.replace(part, path)
        except OSError as error:  # training does not depend on it
            logger.warning("onefold.stall: %s cannot be written: %s", path, error.strerror)

    def _write_last_beats(self) -> None:
        """Write the heartbeats of the end, after this rank's own is in the store."""
        if self._size > 1:
            self._threads[1].join(_JOIN_SECONDS)
        self._beat = replace(self._beat, ended=True)
        self._write_beats()

    # -- the end --------------------------------------------------------------------------------------------------

    def _open_dump(self) -> None:
        """Open the file to which `faulthandler` writes the stacks of this rank if Python cannot."""
        folder = self.bounds.folder
        self._dump_path = folder / f"stacks.rank{self._rank}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._dump = self._dump_path.open("w")
        except OSError as error:
            raise ConfigError(
                f"onefold.stall: {folder} cannot be written on rank {self._rank}: {error.strerror}. Name another "
                "folder with onefold.stall.folder."
            ) from None

    def _postpone_dump(self) -> None:
        """Let `faulthandler` write the stacks unless this is called again within the bound."""
        # Without other ranks nothing else ends a process whose lock is never released.
        faulthandler.dump_traceback_later(self.bounds.seconds, file=self._dump, exit=self._size == 1)

    def _end(self, verdict: _Verdict) -> None:
        """Report the verdict and the stacks, and end the process, even if the report does not return."""
        faulthandler.cancel_dump_traceback_later()
        thread = threading.Thread(target=self._report, args=(verdict,), name="onefold-stall-report", daemon=True)
        thread.start()
        thread.join(_REPORT_SECONDS)
        os._exit(EXIT_STALLED)

    def _report(self, verdict: _Verdict) -> None:
        stacks = f"{self._beat.sentence}\n\n{format_stacks()}"
        with suppress(RuntimeError, OSError):
            self._write_stacks(verdict, stacks)
        text = f"{verdict.text} The stacks of all ranks are in {self.bounds.folder / STACKS}."
        # The hook of `onefold launch` records the error for the launcher; Python's prints it.
        sys.excepthook(StalledError, StalledError(text), None)

    def _write_stacks(self, verdict: _Verdict, stacks: str) -> None:
        """Write the stacks of all ranks to one file, on the rank that joins them."""
        deadline, found = time.monotonic() + _STACKS_SECONDS, {self._rank: stacks}
        store = self._report_store
        if store is not None and self._called_at is not None and self._rank != 0 and verdict.joiner != 0:
            store = None  # the store may not answer
        if store is None and self._size > 1:
            self._dump.write(stacks)
            self._dump.flush()
            time.sleep(_STACKS_SECONDS / 2)  # the others do the same
        elif store is not None:
            store.write_stacks(stacks)
        if self._rank != verdict.joiner and store is not None:
            while not store.are_joined and time.monotonic() < deadline + 1:
                time.sleep(0.1)
        if self._rank != verdict.joiner:
            return
        while store is not None and len(found) < self._size and time.monotonic() < deadline:
            for rank in set(range(self._size)) - found.keys():
                if (theirs := store.read_stacks(rank)) is not None:
                    found[rank] = theirs
            time.sleep(0.1)
        with (self.bounds.folder / STACKS).open("a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {verdict.text}\n")
            for rank in range(self._size):
                file.write(f"\n==== rank {rank}\n{found.get(rank) or self._stacks_in_file(rank)}")
            file.write("\n")
        if store is not None:
            store.write_joined()
            time.sleep(_LINGER_SECONDS)

    def _stacks_in_file(self, rank: int) -> str:
        """Return the stacks that a rank has written without the store, or that `faulthandler` has written for it."""
        text = ""
        with suppress(OSError):
            text = self._dump_path.with_name(f"stacks.rank{rank}.txt").read_text(errors="replace")
        return text or f"no answer within {_STACKS_SECONDS:.0f} s: the process is stopped or cannot be reached\n"


# -- the watch of this process -----------------------------------------------------------------------------------------

_watch: StallWatch | None = None
_users: set[int] = set()


def open_watch(user: int, bounds: StallBounds, publish: Callable[[Mapping[int, RankBeat]], None]) -> StallWatch:
    """Return the watch of this process, and start it for its first user."""
    global _watch
    if _watch is not None and _users and _watch.bounds != bounds:
        raise ConfigError(
            "onefold.stall differs from that of another engine in this process. Write the same section in both configs."
        )
    if _watch is None or not _users:
        _watch = StallWatch(bounds, publish)
    _users.add(user)
    return _watch


def close_watch(user: int) -> None:
    """Stop the watch after its last user."""
    global _watch
    _users.discard(user)
    if not _users and _watch is not None:
        _watch.close()
        _watch = None
