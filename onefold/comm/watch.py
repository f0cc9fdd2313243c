"""One thread a process that looks for hangs: ranks compare what they wait for; if they differ, all of them raise.

[Note: comparing notes]
The hot path only writes down what it waits for. The thread looks four times a second. While a wait lasts it keeps a
note in the store of the process group and reads the others'; a rank that waits in a call of its own inside
torch.distributed has a note too ([Note: a rank that left no note]), and one that has ended left a last one. Only when
every rank has such a note, each has stood for `PATIENCE`, they still stand at the next look, and they do not all name
one operation, is the job stuck: ranks that are merely slow have no note. Calls of a program's own are not compared with
each other, only with ours. The verdict goes to the store, every rank logs it, and a moment later each breaks its
connections, which is the one way to wake a thread that waits in the backend: our waits then raise the verdict, the
program's own calls whatever the backend says.

[Note: waits of the device]
On NCCL the host does not wait: it launches, and the device waits, so that a host blocks anywhere later, say in the
program's own `loss.item()`. There ranks compare how many collectives they have launched. All ranks come to a meeting
after the same launches, so one that stands in a meeting while another has launched more will never be met; at a step,
which hosts come to before their devices, they compare how many reductions they have launched. A rank that has launched
and waited for nothing new for a while leaves a note that says how far it is; by itself it means nothing, as the rank
may compute. A rank whose process is gone beats no more, and connections to it are found closed. When the verdict is
known on every rank the communicators are aborted. What the device computes after that is arbitrary, so the verdict is
set before, and everything that an engine does next raises it, once the device has come to an end. torch's own handling
of errors ends processes at once, and is switched off for groups that onefold makes (`init_distributed`): what it would
have ended after the group's timeout is ended here.

The thread runs while an engine stands, and a little longer around waits without one; it is joined when the last engine
goes and when the process ends, since a thread inside the store or the backend aborts a process that finalizes.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import astuple, replace
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from onefold.comm.stacks import MainThread
from onefold.comm.wait_notes import ENDED, Note, describe, describe_loss, is_ahead, is_stuck
from onefold.log import logger

PATIENCE = 3.0
_PERIOD = 0.25
_STALE = 4 * _PERIOD
# How often a rank shows that it lives, and how long it may be silent before connections to it are tried.
_BEAT, _SILENT = 1.0, 2.5
_PROBE_TAG = (1 << 20) + 2
# Without an engine the thread ends when nobody has waited for this long.
_IDLE = 2.0
# The thread answers to its end within a look; a store whose host is gone may take longer.
_JOIN_SECONDS = 10.0
# At the end, for threads that wait for other ranks, before their connections are broken.
_WOKEN_SECONDS = 1.0


class Disagreement(RuntimeError):
    """Ranks are not made alike, wait for different things, or one of them has left."""


class Watch:
    """The waits of this rank in one process group, and the thread that looks at them."""

    def __init__(self, world: dist.ProcessGroup, generation: int) -> None:
        self.world = world
        self.rank, self.size = dist.get_rank(world), dist.get_world_size(world)
        self.verdict: str | None = None
        # How often ranks have compared what they are made of, and the digest they agreed on last.
        self.rounds = 0
        self.agreed = ""
        # A connection of its own: a wait of the main thread in the store would make this one wait too.
        store = dist.distributed_c10d._get_default_store()
        self.store: Any = store.clone() if self.size > 1 else store  # type: ignore[attr-defined]
        self._prefix = f"onefold/{generation}/"
        self._breakable: list[dist.ProcessGroup] = [world] if _is_gloo(world) else []
        # Groups whose waits are the device's.
        self.device_groups: list[dist.ProcessGroup] = []
        # Collectives launched so far, the last of them, and the engine's guard it was launched under.
        self.launched = 0
        self._last_launch = ""
        self._last_guard: weakref.ref[Guard] | None = None
        self._progress: tuple[int, int, float] = (0, 0, 0.0)
        self._beaten = 0.0
        self._lives: dict[int, tuple[str, float]] = {}
        self._probes: list[Any] = []
        self._waiting: tuple[int, str, Guard | None] | None = None
        self._since = 0.0
        self._number = 0
        self._last_wait = 0.0
        self._beat = 0
        self._beats: dict[int, tuple[int, float, float]] = {}
        self._before: dict[int, Note] = {}
        self._main = MainThread()
        self._called: dist.ProcessGroup | None = None
        self._break_at: float | None = None
        self._broken = threading.Event()
        self._holders: set[int] = set()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._over = False

    # -- what waits call ----------------------------------------------------------------------------------------

    def waiting(
        self, what: str, traveller: Guard | None = None, *, launches: bool = False
    ) -> AbstractContextManager[None]:
        """Around anything that waits for other ranks, or `launches` what other ranks must launch too."""
        if self.size == 1:
            return nullcontext()
        return _Wait(self, what, traveller, launches)

    def check(self) -> None:
        """Raise once it is certain that the job is stuck: nothing that other ranks are needed for is true any more."""
        if self.verdict is not None:
            self.refuse(self.verdict)

    def refuse(self, verdict: str, cause: BaseException | None = None) -> NoReturn:
        """Raise the verdict, once the device waits for no other rank any more: a process that ended while it does would
        take others that share its GPU with it.
        """
        if self.device_groups and threading.current_thread() is not self._thread:
            if self._break_at is None and not self._broken.is_set():
                self._break_at = time.monotonic() + 2 * _PERIOD
            self._start()
            if not self._broken.wait(8 * _PERIOD):
                self.break_connections()
            _wait_for_device(8 * _PERIOD)
        raise Disagreement(verdict) from cause

    def may_break(self, group: dist.ProcessGroup) -> None:
        """A group whose connections are broken when the job is stuck."""
        groups = self._breakable if _is_gloo(group) else self.device_groups
        if group not in groups:
            groups.append(group)

    def hold(self, holder: int) -> None:
        """Watch until every holder has let go, also while nobody waits."""
        if self.size > 1:
            self._holders.add(holder)
            self._start()

    def let_go(self, holder: int) -> None:
        """The last one to let go ends the thread."""
        if holder in self._holders:
            self._holders.discard(holder)
            if not self._holders:
                self._end()

    def others_notes(self, *, alive: bool = True) -> dict[int, Note]:
        """What other ranks wait for now. A rank that has gone on writes no more, and hosts' clocks differ, so only what
        changes is known to be `alive`; a note that was only just read may be an old one.
        """
        notes: dict[int, Note] = {}
        with suppress(RuntimeError):
            for rank in range(self.size):
                if rank != self.rank and self.has_left(rank):
                    launched = int(self.store.get(self.key("left", rank)))
                    notes[rank] = Note(0, ENDED, lasts=True, launched=launched)
                elif rank != self.rank and self.store.check([self.key("wait", rank)]):
                    *fields, beat = json.loads(self.store.get(self.key("wait", rank)))
                    now = time.monotonic()
                    last, changed, read = self._beats.get(rank, (None, float("-inf"), now))
                    if beat != last:
                        changed, read = (now, now) if last is not None else (changed, now)
                        self._beats[rank] = (beat, changed, read)
                    if last is not None and now - (changed if alive else read) < _STALE:
                        note = Note(*fields)
                        notes[rank] = note if note.ranks is None else replace(note, ranks=tuple(note.ranks))
        return notes

    def has_left(self, rank: int) -> bool:
        """Whether a rank's process has ended."""
        return bool(self.store.check([self.key("left", rank)]))

    def key(self, *words: object) -> str:
        return self._prefix + "/".join(map(str, words))

    def _explain(self, error: RuntimeError) -> str:
        """The backend gave a wait up: by our own verdict, by another rank's, or because a rank is gone."""
        with suppress(RuntimeError):
            if self.verdict is None and self.store.check([self.key("verdict")]):
                self.verdict = self.store.get(self.key("verdict")).decode()
        if self.verdict is None:
            mine = self._note()
            assert mine is not None
            self._publish(mine)
            notes = {**self.others_notes(alive=False), self.rank: mine}
            stands = {rank: note for rank, note in notes.items() if not note.computes}
            # A rank that is gone may have left a note of an earlier wait.
            if lost := [rank for rank in range(self.size) if rank != self.rank and self._is_lost(rank)]:
                verdict = describe_loss(lost, notes)
            elif len({note.what for note in stands.values()}) > 1:
                verdict = describe(stands)
            else:
                verdict = f"rank {self.rank}: {mine.what} failed, another rank has left or is gone: {error}"
            with suppress(RuntimeError):  # all ranks say what the first one found
                verdict = self.store.compare_set(self.key("verdict"), "", verdict).decode()
            self.verdict = verdict
        return self.verdict

    # -- the thread ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._over:
                self._stop = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name="onefold-watch", daemon=True)
                self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_PERIOD):
            if dist.group.WORLD is not self.world:
                break
            try:
                self.look()
            except RuntimeError:  # the store fails: its host may be gone
                with suppress(RuntimeError):
                    self._look_without_store()
            if not self._holders and self._waiting is None and time.monotonic() - self._last_wait > _IDLE:
                break
        if self._thread is threading.current_thread():
            self._thread = None
            if self._waiting is not None and dist.group.WORLD is self.world:  # one that began meanwhile
                self._start()

    def _end(self, *, for_good: bool = False) -> None:
        self._over = self._over or for_good
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def leave(self) -> None:
        """The process ends: nobody need wait for this rank, and no thread may stay in the store."""
        self._end(for_good=True)
        if self.size > 1:
            with suppress(RuntimeError):
                self.store.set(self.key("left", self.rank), str(self.launched))

    def look(self) -> None:
        """One look at this rank's wait, and if it lasts at the other ranks'."""
        if self._break_at is not None:
            if time.monotonic() > self._break_at:
                self.break_connections()
                self._break_at = None
            return
        self._show_life()
        if self._progress[:2] != (self._number, self.launched):
            self._progress = (self._number, self.launched, time.monotonic())
        mine = self._mine()
        if mine is None:
            self._before = {}
            return
        self._publish(mine)
        if not mine.lasts or (mine.computes and self.verdict is not None):
            return
        if self.store.check([self.key("verdict")]):
            self.conclude(self.store.get(self.key("verdict")).decode())
            return
        notes = {**self.others_notes(), self.rank: mine}
        found = ""
        if lost := self._lost_ranks(notes):
            found = describe_loss(lost, notes)
        elif late := self._overdue():
            found = late
        elif (len(notes) == self.size and is_stuck(notes)) or (self.device_groups and is_ahead(notes)):
            found = describe(notes) if notes == self._before else ""
            self._before = notes
        else:
            self._before = {}
        if found:
            self.conclude(self.store.compare_set(self.key("verdict"), "", found).decode())

    def _mine(self) -> Note | None:
        """What this rank would tell the others now."""
        if self._waiting is not None:
            return self._note() if time.monotonic() - self._since >= _PERIOD else None
        return self._note_of_the_program() or self._note_of_the_device()

    def _look_without_store(self) -> None:
        mine = self._mine()
        if mine is not None and mine.lasts and self.verdict is None and self.rank != 0 and self._is_gone(0):
            self.conclude(describe_loss([0], {self.rank: mine}))

    def conclude(self, verdict: str) -> None:
        self.verdict = verdict
        logger.error("%s", verdict)
        # Every rank looks once more before any connection breaks, so that all say the same.
        self._break_at = time.monotonic() + 2 * _PERIOD

    def _note(self) -> Note | None:
        waiting, waited = self._waiting, time.monotonic() - self._since
        if waiting is None:
            return None
        number, what, at = waiting
        return self._at(at, Note(number, what, lasts=waited >= PATIENCE, launched=self.launched))

    def _at(self, guard: Guard | None, note: Note) -> Note:
        """With where the rank is in the program of an engine."""
        if guard is None:
            return note
        if not guard.asked:
            with suppress(RuntimeError):
                guard.asked = self.store.check([self.mark(guard.passes)])
        return replace(note, passes=guard.passes, progress=guard.progress, heard=guard.asked)

    def mark(self, passes: int) -> str:
        """Where a rank says that it wants to be heard in a pass."""
        return self.key("asks", passes)

    def _note_of_the_program(self) -> Note | None:
        call = self._main.look(PATIENCE)
        if call is None:
            return None
        self._called = call.group
        return Note(0, call.what, ours=False, ranks=call.ranks, lasts=True)

    # -- where the device waits ---------------------------------------------------------------------------------

    def _note_of_the_device(self) -> Note | None:
        """Of a rank that has launched and waited for nothing new for a while."""
        if not self.device_groups or not self._holders:
            return None
        number, launched, since = self._progress
        now = time.monotonic()
        if now - since < 2 * _PERIOD or not launched:
            return None
        what = f"its own computation, after it had launched the {self._last_launch}"
        note = Note(number, what, ours=False, lasts=now - since >= PATIENCE, launched=launched, computes=True)
        return self._at(self._last_guard() if self._last_guard is not None else None, note)

    def _overdue(self) -> str | None:
        """Whether the device has waited for longer than the group allows, which torch would end the process for."""
        stalled, event = time.monotonic() - self._progress[2], _last_event
        if not self.device_groups or event is None or self._waiting is not None:
            return None
        limit = self.device_groups[0]._get_backend(torch.device("cuda")).options._timeout.total_seconds()
        if stalled < limit or event.query():
            return None
        return (
            f"rank {self.rank}: the {self._last_launch} has not ended for {stalled:.0f} s, the process group's timeout"
        )

    def _show_life(self) -> None:
        if self.device_groups and self._holders and time.monotonic() - self._beaten >= _BEAT:
            self._beaten = time.monotonic()
            self.store.set(self.key("lives", self.rank), str(self._beaten))

    def _lost_ranks(self, notes: dict[int, Note]) -> list[int]:
        """Ranks that have been silent for a while, and whose connections are closed."""
        if not self.device_groups:
            return []  # a host that waits for a rank on gloo is woken when that is gone
        lost, now = [], time.monotonic()
        for rank in range(self.size):
            if rank in notes or not self.store.check([self.key("lives", rank)]):
                continue
            beat = self.store.get(self.key("lives", rank)).decode()
            last, since = self._lives.get(rank, ("", now))
            if beat != last:
                last, since = self._lives[rank] = (beat, now)
            if now - since >= _SILENT:
                if self._is_gone(rank):
                    lost.append(rank)
                self._lives[rank] = (beat, now)  # paused, as it seems: try again after a while
        return lost

    def _is_lost(self, rank: int) -> bool:
        """Whether a rank is gone and did not say that it would."""
        return self._is_gone(rank) and not self.has_left(rank)

    def _is_gone(self, rank: int) -> bool:
        """Whether the connection to a rank is closed."""
        group = self._breakable[-1] if self._breakable else None
        if group is None or rank not in dist.get_process_group_ranks(group):
            return False
        try:
            # Never received; what is sent must outlive the connection.
            self._probes.append((probe := torch.zeros(1), dist.isend(probe, rank, group=group, tag=_PROBE_TAG)))
        except RuntimeError:
            return True
        return False

    def _publish(self, note: Note) -> None:
        with suppress(RuntimeError):  # the store's host may be gone already
            self._beat += 1
            self.store.set(self.key("wait", self.rank), json.dumps([*astuple(note), self._beat]))

    def break_connections(self) -> None:
        """Let every wait in these groups raise, here and on their other ranks, and end those of the device."""
        for group in dict.fromkeys([*self._breakable, *([self._called] if self._called is not None else [])]):
            # A receive that times out makes gloo close the pairs of its group, and every wait on them raises.
            with suppress(RuntimeError):
                members = [rank for rank in dist.get_process_group_ranks(group) if rank != self.rank]
                if members and _is_gloo(group):
                    work = dist.irecv(torch.zeros(1), members[0], group=group, tag=(1 << 20) + 1)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))
        for group in self.device_groups:
            # Not `destroy`, which would wait for the other ranks.
            with suppress(RuntimeError):
                group._get_backend(torch.device("cuda")).abort()
        self._broken.set()


class _Wait:
    """A wait of this rank, for as long as it lasts. A class and no generator, as every launch makes one."""

    __slots__ = ("_before", "_launches", "_traveller", "_watch", "_what")

    def __init__(self, watch: Watch, what: str, traveller: Guard | None, launches: bool) -> None:
        self._watch, self._what, self._traveller, self._launches = watch, what, traveller, launches

    def __enter__(self) -> None:
        watch = self._watch
        if watch.verdict is not None:
            watch.refuse(watch.verdict)
        self._before = (watch._waiting, watch._since)
        watch._number += 1
        if self._launches:
            watch.launched += 1
            watch._last_launch = self._what
            watch._last_guard = self._traveller.reference if self._traveller is not None else None
        watch._since = watch._last_wait = time.monotonic()
        watch._waiting = (watch._number, self._what, self._traveller)
        if watch._thread is None:
            watch._start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        watch = self._watch
        verdict = watch.verdict  # a wait that was broken may seem to have succeeded
        if isinstance(error, RuntimeError) and not isinstance(error, Disagreement) and of_backend(error):
            verdict = watch._explain(error)
        watch._waiting, watch._since = self._before
        if verdict is not None and (error is None or of_backend(error)):
            watch.refuse(verdict, error)


# Gloo's errors have no class of their own; most name its file.
_GLOO_SAYS = ("gloo/", "pair closure", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def of_backend(error: BaseException) -> bool:
    """Whether the network or the store failed, and not what travels through it."""
    plain = type(error) is RuntimeError and any(words in str(error) for words in _GLOO_SAYS)
    return plain or isinstance(error, dist.DistError)


_worlds = count(1)
_watch: Watch | None = None
_last_event: torch.cuda.Event | None = None
_beside: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def watch_world() -> Watch:
    """The watch over the ranks of the default process group."""
    global _watch
    world = dist.group.WORLD
    assert world is not None, "init_distributed comes first"
    if _watch is None or _watch.world is not world:
        if _watch is not None:
            _watch._end(for_good=True)
        atexit.unregister(_leave)
        atexit.register(_leave)
        _watch = Watch(world, next(_worlds))
    return _watch


def note_event(event: torch.cuda.Event) -> None:
    """A collective was launched on a device, and this event lies behind it."""
    global _last_event
    _last_event = event


def _wait_for_device(seconds: float) -> None:
    """Until what was launched last has ended, or has been waited for this long."""
    deadline, event = time.monotonic() + seconds, _last_event
    with suppress(RuntimeError):
        while event is not None and not event.query() and time.monotonic() < deadline:
            time.sleep(0.01)


def start_beside(run: Callable[[], None], name: str) -> None:
    """A thread that may wait for other ranks. A process that fails can end all the same: they are woken by force."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _beside.add(thread)
    thread.start()


def _leave() -> None:
    """Before the interpreter finalizes: a thread that is inside the backend then would abort the process."""
    for patience in (_WOKEN_SECONDS, _JOIN_SECONDS):
        deadline = time.monotonic() + patience
        for thread in list(_beside):
            thread.join(max(0.0, deadline - time.monotonic()))
        if _watch is not None and any(thread.is_alive() for thread in _beside):
            _watch.break_connections()
    if _watch is not None:
        _watch.leave()


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in str(dist.get_backend(group))


class _NoWatch:
    """Where other ranks are imagined, no wait lasts and nothing is lost."""

    size, verdict = 1, None
    store: Any = None
    device_groups: Sequence[dist.ProcessGroup] = ()

    def waiting(self, what: str, traveller: Guard | None = None, *, launches: bool = False) -> nullcontext[None]:
        return nullcontext()

    def ignore(self, *_: object) -> None:
        pass

    check = may_break = hold = let_go = ignore

    def others_notes(self, *, alive: bool = True) -> dict[int, Note]:
        return {}

    def mark(self, passes: int) -> str:
        return ""

    def conclude(self, verdict: str) -> None:
        self.refuse(verdict)

    def refuse(self, verdict: str) -> NoReturn:
        raise Disagreement(verdict)


class Guard:
    """An engine's side of the hang guard: names the waits of one rank in one group, and where it is in its program.
    Notes also serve ranks that must diverge from a program they all follow: a note says how far its rank has come, and
    a mark in the store (`ask`) reaches every rank whose wait lasts, so that a rank with something to say is heard.
    """

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        # Where this rank is in the program it follows: which pass, and how many launches.
        self.passes = 0
        self.progress = 0
        self.asked = False
        self.reference = weakref.ref(self)
        self._watch = watch_world() if groups else _NoWatch()
        for group in groups:
            self._watch.may_break(group)

    def waiting(self, operation: str, units: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Around anything that waits for other ranks."""
        return self._watch.waiting(f"{operation} {', '.join(units)}" if units else operation, self)

    def launching(self, operation: str, units: Sequence[str]) -> AbstractContextManager[None]:
        """Around the launch of a collective."""
        return self._watch.waiting(f"{operation} {', '.join(units)}" if units else operation, self, launches=True)

    def check(self) -> None:
        """Raise once it is certain that the job is stuck."""
        self._watch.check()

    def give_up(self, verdict: str) -> NoReturn:
        """Every rank knows that they will not come together, though devices may still wait for each other."""
        if self._watch.device_groups:
            self._watch.conclude(verdict)
        self._watch.refuse(verdict)

    def watch(self) -> None:
        """From now on also while nobody waits here: others may wait for this rank."""
        self._watch.hold(id(self))

    def close(self) -> None:
        """The engine goes; with the last one the thread ends."""
        self._watch.let_go(id(self))

    @property
    def verdict(self) -> str | None:
        """Why the job is stuck, once that is certain: for waits that the backend does not wake."""
        return self._watch.verdict

    def ask(self) -> None:
        """Let every rank that comes to wait in this pass know that this one wants to be heard."""
        if self._watch.size > 1:
            self._watch.store.set(self._watch.mark(self.passes), "1")

    def furthest(self) -> int:
        """The launches of this pass made by ranks that wait and have heard, at the most. Only those count: they will
        not launch more, so that where ranks diverge does not depend on who was faster.
        """
        notes = self._watch.others_notes(alive=False).values()
        return max((note.progress for note in notes if note.passes == self.passes and note.heard), default=0)
