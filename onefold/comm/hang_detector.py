"""The hang detector: finds ranks that wait for different things, names them on every rank, and ends their waits.

[Note: how a hang is found]
*Threads.* There is one detector per process group, with one thread, `onefold-watch`. It runs while an engine exists,
and for some seconds around waits without an engine. It is joined when the last engine is closed and before the
interpreter finalizes, because a thread inside the store or the backend would abort a process that finalizes.

*What is reported.* The program's threads call `waiting_for(name)` around everything that waits for other ranks, and
around launches of collectives. On this path the name is recorded in memory, nothing more (`guard.py`). Four
times a second the thread takes a snapshot. If a wait lasts, the thread writes a `WaitNote` to the store of the process
group, and reads the notes of the other ranks (`detector_store.py`). A rank that blocks in a torch.distributed call of
the user's program is found by its stack, and has a note too (`main_thread.py`). A rank whose process ends in an orderly
way leaves a last note.

*When a verdict is reached.* All of this must hold: every rank has a note; each wait has lasted for `PATIENCE`; the
notes are the same at two consecutive looks; they do not all name one operation (`wait_notes.is_stuck`). Ranks that are
merely slow have no note, so they are never stuck. Calls of the user's program are compared with the engine's waits,
not with each other. A verdict is also reached when a rank has died, or when the device has waited for longer than the
group's timeout.

*What follows.* The first rank that finds the hang writes the verdict to the store. Every rank logs it. Two looks later,
when all ranks have seen it, each rank breaks its connections (`connections.py`), which wakes every thread that waits in
a backend. Waits of an engine then raise the verdict as `Disagreement`; calls of the user's program raise the error of
the backend. Everything that an engine does afterwards raises the verdict.

[Note: waits of the device]
On NCCL the host launches collectives and the device waits. The host then blocks at any later place, such as
`loss.item()`. There ranks compare how many collectives they have launched: all ranks reach a host exchange after the
same launches, so a rank in an exchange waits in vain for one that has launched more (`wait_notes.is_ahead`). At a step,
which hosts reach before their devices, ranks compare their number of reductions. A rank that has not begun a wait or a
launch for a while writes a note that says how far it is. That note alone proves nothing, because the rank may compute.
A dead process writes no heartbeats, and connections to it are closed.

The results of an aborted collective are arbitrary. The verdict is therefore set before the communicators are aborted,
and is raised after the device has stopped. torch's own error handling would end the process before; `init_distributed`
switches it off for groups that it makes ([Note: torch's NCCL switches] in `mesh.py`). Its timeout is checked here.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import count
from typing import NoReturn

import torch.distributed as dist

from onefold.comm.connections import Connections, is_backend_error
from onefold.comm.detector_store import DetectorStore
from onefold.comm.guard import Activity, Disagreement, Guard, RankActivity, Wait, has_device_work, wait_for_device
from onefold.comm.main_thread import MainThreadProbe
from onefold.comm.wait_notes import WaitNote, describe, describe_loss, is_ahead, is_stuck
from onefold.log import logger

# Seconds that a wait must last before it is part of a verdict.
PATIENCE = 3.0
_PERIOD = 0.25
_STALE = 4 * _PERIOD
# Without an engine the thread ends when nothing has waited for this long.
_IDLE = 2.0
# The thread stops within a period; a call to a store whose node is gone may take longer.
_JOIN_SECONDS = 10.0
# How long threads that wait for other ranks may finish at the end, before their connections are broken.
_WAKE_SECONDS = 1.0


class HangDetector:
    """Compares what this rank waits for with the other ranks of a process group."""

    def __init__(self, world: dist.ProcessGroup, generation: int) -> None:
        self.world = world
        self.rank, self.size = dist.get_rank(world), dist.get_world_size(world)
        # Why the job is stuck, or None. Either thread may set it, to the text that the store holds; nothing clears it.
        self.verdict: str | None = None
        self.store = DetectorStore(self.rank, self.size, generation, _STALE)
        self.connections = Connections(world, self.rank)
        self.activity = RankActivity()
        self._main_thread = MainThreadProbe()
        self._user_group: dist.ProcessGroup | None = None
        self._previous_notes: dict[int, WaitNote] = {}
        # When to break connections. Set with the verdict; the detector's thread acts on it and clears it.
        self._break_at: float | None = None
        self._holders: set[int] = set()
        # The last unexpected error of a look, which is logged once.
        self._last_error = ""
        self._thread = _PeriodicThread("onefold-watch", self.activity, self._look_safely, self._is_needed)

    # -- the interface of the program's threads -----------------------------------------------------------------

    def make_guard(self, *groups: dist.ProcessGroup) -> Guard:
        """Return the guard of an engine that communicates over these groups."""
        for group in groups:
            self.connections.add(group)
        return Guard(self)

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Return a context around a wait for other ranks that no engine makes."""
        return nullcontext() if self.size == 1 else Wait(self, what)

    def start_thread(self) -> None:
        """Start the thread unless it runs."""
        self._thread.start()

    def check(self) -> None:
        """Raise `Disagreement` if the job is stuck."""
        if self.verdict is not None:
            self.raise_verdict(self.verdict)

    def announce(self, verdict: str) -> None:
        """Set and log a verdict that all ranks know. Connections are broken a little later."""
        self.verdict = verdict
        logger.error("%s", verdict)
        # Every rank looks once more before any connection breaks, so that all report the same verdict.
        self._break_at = time.monotonic() + 2 * _PERIOD

    def fail(self, verdict: str) -> NoReturn:
        """Raise a verdict that every rank has reached, and end the waits of devices for each other."""
        if self.connections.device_waits:
            self.announce(verdict)
        self.raise_verdict(verdict)

    def raise_verdict(self, verdict: str, cause: BaseException | None = None) -> NoReturn:
        """Raise the verdict, once the device does not wait for other ranks any more.

        A process that ends while its device waits would take others that share the GPU with it.
        """
        if self.connections.device_waits and not self._thread.is_current:
            if self._break_at is None and not self.connections.are_broken.is_set():
                self._break_at = time.monotonic() + 2 * _PERIOD
            self._thread.start()
            if not self.connections.are_broken.wait(8 * _PERIOD):
                self.break_connections()
            wait_for_device(8 * _PERIOD)
        raise Disagreement(verdict) from cause

    def hold(self, holder: int) -> None:
        """Keep the thread running until `release(holder)`, because other ranks may wait for this one."""
        if self.size > 1:
            self._holders.add(holder)
            self._thread.start()

    def release(self, holder: int) -> None:
        """Undo `hold`. The thread stops with the last holder."""
        if holder in self._holders:
            self._holders.discard(holder)
            if not self._holders:
                self._thread.stop()

    def close(self) -> None:
        """Stop the thread for good."""
        self._thread.stop(for_good=True)

    def report_end(self) -> None:
        """Stop the thread, and write to the store that this process ends."""
        self.close()
        if self.size > 1:
            self.store.write_end(self.activity.snapshot().num_launched)

    def break_connections(self) -> None:
        """End every wait for other ranks, here and on them."""
        self.connections.break_all(self._user_group)

    def end_failed_wait(self, wait: Wait, error: BaseException | None) -> None:
        """End a wait that raised, or during which a verdict was reached: a broken wait may look like a success."""
        backend_error = error if error is not None and is_backend_error(error) else None
        verdict = self._explain(wait, backend_error) if backend_error is not None else self.verdict
        self.activity.end_wait(wait)
        if verdict is not None and (error is None or backend_error is not None):
            self.raise_verdict(verdict, error)

    def _explain(self, wait: Wait, error: BaseException) -> str:
        """Return the verdict for an error of the backend, by what is known about the other ranks."""
        with suppress(RuntimeError):
            self.verdict = self.verdict or self.store.read_verdict()
        if self.verdict is None:
            mine = self._note_of_wait(wait, self.activity.snapshot())
            self.store.write_note(mine)
            notes = {**self.store.read_notes(alive=False), self.rank: mine}
            waiting = {rank: note for rank, note in notes.items() if not note.computes}
            # A dead rank may have left a note of an earlier wait, so closed connections are looked at first.
            others = [rank for rank in range(self.size) if rank != self.rank]
            if dead := [rank for rank in others if self.connections.is_closed(rank) and not self.store.has_ended(rank)]:
                verdict = describe_loss(dead, notes)
            elif len({note.what for note in waiting.values()}) > 1:
                verdict = describe(waiting)
            else:
                verdict = f"rank {self.rank}: {mine.what} failed, because another rank has ended: {error}"
            with suppress(RuntimeError):  # all ranks report what the first one found
                verdict = self.store.propose_verdict(verdict)
            self.verdict = verdict
        return self.verdict

    # -- requests to leave the recorded order -------------------------------------------------------------------

    def write_request(self, pass_number: int) -> None:
        """Request that all ranks leave the recorded order in a pass."""
        if self.size > 1:
            self.store.write_request(pass_number)

    def furthest_progress(self, pass_number: int) -> int:
        """Return the largest number of launches in a pass among ranks that wait and have seen a request for it."""
        notes = self.store.read_notes(alive=False).values()
        return max((note.progress for note in notes if note.pass_number == pass_number and note.saw_request), default=0)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _is_needed(self) -> bool:
        activity = self.activity.snapshot()
        is_used = bool(self._holders) or activity.wait is not None or time.monotonic() - activity.changed_at <= _IDLE
        return is_used and dist.group.WORLD is self.world

    def _look_safely(self) -> None:
        try:
            self.look()
        except RuntimeError:  # the store fails: the node of rank 0, which serves it, may be gone
            with suppress(RuntimeError):
                self._look_without_store()
        except Exception as error:  # without this thread, ranks that diverge would wait for each other until a timeout
            if repr(error) != self._last_error:
                self._last_error = repr(error)
                logger.exception("the hang detector of rank %d failed, and will try again", self.rank)

    def look(self) -> None:
        """Write this rank's note, compare the notes of all ranks, and act on a verdict."""
        if self._break_at is not None:
            if time.monotonic() > self._break_at:
                self.break_connections()
                self._break_at = None
            return
        if self.connections.device_waits and self._holders:
            self.store.write_heartbeat()
        activity = self.activity.snapshot()
        mine = self._own_note(activity)
        if mine is None:
            self._previous_notes = {}
            return
        self.store.write_note(mine)
        if not mine.lasts or (mine.computes and self.verdict is not None):
            return
        verdict = self.store.read_verdict()
        if verdict is None and (found := self._compare(mine, activity)):
            verdict = self.store.propose_verdict(found)
        if verdict is not None:
            self.announce(verdict)

    def _look_without_store(self) -> None:
        mine = self._own_note(self.activity.snapshot())
        is_waiting = mine is not None and mine.lasts and self.verdict is None
        if mine is not None and is_waiting and self.rank != 0 and self.connections.is_closed(0):
            self.announce(describe_loss([0], {self.rank: mine}))

    def _compare(self, mine: WaitNote, activity: Activity) -> str:
        """Return why the job is stuck, or an empty string."""
        notes = {**self.store.read_notes(), self.rank: mine}
        if dead := self._dead_ranks(notes):
            return describe_loss(dead, notes)
        if overdue := self._describe_overdue(activity):
            return overdue
        stuck = (len(notes) == self.size and is_stuck(notes)) or (self.connections.device_waits and is_ahead(notes))
        is_confirmed = stuck and notes == self._previous_notes
        self._previous_notes = notes if stuck else {}
        return describe(notes) if is_confirmed else ""

    # -- this rank's note ---------------------------------------------------------------------------------------

    def _own_note(self, activity: Activity) -> WaitNote | None:
        """Return the note of the engine's wait, else of a call of the user's program, else of the device."""
        if activity.wait is not None:
            is_new = time.monotonic() - activity.wait.since < _PERIOD
            return None if is_new else self._note_of_wait(activity.wait, activity)
        call = self._main_thread.find_blocked_call(PATIENCE)
        if call is None:
            return self._note_of_device(activity)
        self._user_group = call.group
        return WaitNote(0, call.what, ours=False, ranks=call.ranks, lasts=True)

    def _note_of_wait(self, wait: Wait, activity: Activity) -> WaitNote:
        lasts = time.monotonic() - wait.since >= PATIENCE
        note = WaitNote(wait.number, wait.what, lasts=lasts, launched=activity.num_launched)
        return self._with_progress(note, wait.guard)

    def _note_of_device(self, activity: Activity) -> WaitNote | None:
        """Return the note of a rank that has begun no wait and no launch for a while, where the device waits."""
        stalled = time.monotonic() - activity.changed_at
        if not self.connections.device_waits or not self._holders:
            return None
        if stalled < 2 * _PERIOD or not activity.num_launched:
            return None
        what = f"its computation, after it launched the {activity.last_launch}"
        note = WaitNote(activity.num_waits, what, ours=False, lasts=stalled >= PATIENCE, computes=True)
        return self._with_progress(replace(note, launched=activity.num_launched), activity.last_guard)

    def _with_progress(self, note: WaitNote, guard: Guard | None) -> WaitNote:
        """Add the engine's progress, and deliver a request of another rank for that pass."""
        if guard is None:
            return note
        pass_number, num_launched = guard.progress
        if not guard.saw_request(pass_number) and self.store.has_request(pass_number):
            guard.deliver_request(pass_number)
        saw_request = guard.saw_request(pass_number)
        return replace(note, pass_number=pass_number, progress=num_launched, saw_request=saw_request)

    # -- ranks that have died, and devices that wait for too long -----------------------------------------------

    def _dead_ranks(self, notes: dict[int, WaitNote]) -> list[int]:
        """Return the ranks without heartbeats whose connections are closed. A silent rank may only be paused."""
        if not self.connections.device_waits:
            return []  # a host that waits for a dead rank on gloo gets an error
        silent = [rank for rank in range(self.size) if rank not in notes and self.store.is_silent(rank)]
        return [rank for rank in silent if self.connections.is_closed(rank)]

    def _describe_overdue(self, activity: Activity) -> str:
        """Return an error message if the device has waited for longer than the timeout of its group."""
        stalled = time.monotonic() - activity.changed_at
        if not self.connections.device_waits or activity.wait is not None:
            return ""
        if stalled < self.connections.device_timeout or not has_device_work():
            return ""
        return (
            f"rank {self.rank}: the {activity.last_launch} has not completed in {stalled:.0f} s, the timeout of the "
            "process group. Check the logs of the other ranks, or raise it with init_distributed(timeout=...)."
        )


class _PeriodicThread:
    """A daemon thread that calls `work` every period while `is_needed` returns True."""

    def __init__(
        self, name: str, activity: RankActivity, work: Callable[[], None], is_needed: Callable[[], bool]
    ) -> None:
        self._name, self._activity, self._work, self._is_needed = name, activity, work, is_needed
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._is_over = False

    @property
    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Start the thread unless it runs, or was stopped for good."""
        with self._starting:
            if self._thread is None and not self._is_over:
                self._activity.is_watched, self._stop = True, threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name=self._name, daemon=True)
                self._thread.start()

    def stop(self, *, for_good: bool = False) -> None:
        """Stop the thread and join it."""
        self._is_over = self._is_over or for_good
        self._stop.set()
        thread, self._thread, self._activity.is_watched = self._thread, None, False
        if thread is None or thread is threading.current_thread():
            return
        if thread.ident is not None:  # otherwise it is being started, and ends at once, because its event is set
            thread.join(_JOIN_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_PERIOD) and self._is_needed():
            self._work()
        if self.is_current:
            self._thread, self._activity.is_watched = None, False
            if self._is_needed():  # a wait has begun after the last check
                self.start()


# -- the detector of this process --------------------------------------------------------------------------------------

_generations = count(1)
_detector: HangDetector | None = None
_communicating_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def world_detector() -> HangDetector:
    """Return the detector of the default process group, and make it if the group is new."""
    global _detector
    world = dist.group.WORLD
    assert world is not None, "init_distributed comes first"
    if _detector is None or _detector.world is not world:
        if _detector is not None:
            _detector.close()
        atexit.unregister(_end_process)
        atexit.register(_end_process)
        _detector = HangDetector(world, next(_generations))
    return _detector


def start_communicating_thread(run: Callable[[], None], name: str) -> None:
    """Start a thread that may wait for other ranks. Its waits are broken if the process ends before they do."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _communicating_threads.add(thread)
    thread.start()


def _end_process() -> None:
    """Wake and join all threads that may be inside the backend, where finalization would abort the process."""
    for patience in (_WAKE_SECONDS, _JOIN_SECONDS):
        deadline = time.monotonic() + patience
        for thread in list(_communicating_threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        if _detector is not None and any(thread.is_alive() for thread in _communicating_threads):
            _detector.break_connections()
    if _detector is not None:
        _detector.report_end()
