"""The hang guard: when a wait lasts too long, ranks compare what they wait for; if they differ, all of them raise.

[Note: comparing notes]
The hot path only writes down what it waits for. A thread looks once a second; when the same wait has lasted
`PATIENCE`, it puts a note into the store of the process group and reads the others'. Only when every rank has such a
note, and they still stand a second later, and they do not all name one operation, is the job stuck: ranks that are
merely slow have no note. The thread then breaks this rank's connections, which is the one way to wake a thread that
waits in the backend, and the wait raises with all ranks' notes.

Notes also serve ranks that must part from a program they all follow: a note says how far its rank has come, and a
mark in the store (`ask`) reaches every rank whose wait lasts, so that a rank with something to say is heard.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from onefold.comm.mesh import Group

PATIENCE = 3.0
_PERIOD = 0.25

Note = tuple[int, str, int, int, bool]


class Disagreement(RuntimeError):
    """Ranks wait for different things, or one of them has left."""


class Guard:
    """Watches the waits of one rank in one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # Where this rank is in the program it follows: which pass, and how many launches.
        self.passes = 0
        self.progress = 0
        self.asked = False
        self._waiting: tuple[int, str] | None = None
        self._since = 0.0
        self._number = 0
        self._beat = 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._verdict: str | None = None
        self._store = dist.distributed_c10d._get_default_store()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @contextmanager
    def waiting(self, operation: str, units: Sequence[str] = ()) -> Iterator[None]:
        """Around anything that waits for other ranks."""
        if self._group.size == 1:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._stop), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._stop.set)
        before = (self._waiting, self._since)
        self._number += 1
        self._since = time.monotonic()
        self._waiting = (self._number, f"{operation} {', '.join(units)}".strip())
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, Disagreement):
                raise
            raise Disagreement(self._explain(error)) from error
        finally:
            self._waiting, self._since = before

    def _explain(self, error: RuntimeError) -> str:
        """The backend gave a wait up: by our own verdict, by another rank's, or because a rank is gone."""
        if self._verdict is None:
            mine = self._note()
            assert mine is not None
            self._publish(mine)
            notes = {**self._others_notes(), self._group.rank: mine}
            if len({note[1] for note in notes.values()}) > 1:
                self._verdict = self._describe(notes)
            else:
                self._verdict = f"rank {self._group.rank}: {mine[1]} failed, another rank has left or is gone: {error}"
        return self._verdict

    @property
    def verdict(self) -> str | None:
        """Why the job is stuck, once that is certain: for waits that the backend does not wake."""
        return self._verdict

    def ask(self) -> None:
        """Let every rank that comes to wait in this pass know that this one wants to be heard."""
        if self._group.size > 1:
            self._store.set(self._mark(), "1")

    def furthest(self) -> int:
        """The launches of this pass made by ranks that wait and have heard, at the most.

        Only those count: they will not launch more, so that where ranks part does not depend on who was faster.
        """
        notes = self._others_notes().values()
        return max((note[3] for note in notes if note[2] == self.passes and note[4]), default=0)

    def _note(self) -> Note | None:
        waiting = self._waiting
        return None if waiting is None else (*waiting, self.passes, self.progress, self.asked)

    def _mark(self) -> str:
        return f"onefold/asks/{self._group.process_group.group_name}/{self.passes}"

    # -- the thread ---------------------------------------------------------------------------------------------

    def look(self, before: dict[int, Note]) -> dict[int, Note]:
        """One look. Returns the notes of all ranks if they differ, to be compared with those of the next look."""
        waited = time.monotonic() - self._since
        if self._waiting is None or waited < _PERIOD:
            return {}
        with suppress(RuntimeError):
            self.asked = self.asked or self._store.check([self._mark()])
        mine = self._note()
        if mine is None:
            return {}
        self._publish(mine)
        if waited < PATIENCE:
            return {}
        notes = {**self._others_notes(), self._group.rank: mine}
        if len(notes) < self._group.size or len({note[1] for note in notes.values()}) == 1:
            return {}
        if notes == before and self._note() == mine:
            self._verdict = self._describe(notes)
            self._break_connections()
            return {}
        return notes

    def _publish(self, note: Note) -> None:
        with suppress(RuntimeError):  # the store's host may be gone already
            self._beat += 1
            self._store.set(self._key(self._group.rank), json.dumps([*note, self._beat]))

    def _others_notes(self) -> dict[int, Note]:
        notes: dict[int, Note] = {}
        with suppress(RuntimeError):
            for rank in self._group.peers:
                if self._store.check([self._key(rank)]):
                    *note, beat = json.loads(self._store.get(self._key(rank)))
                    last, since = self._beats.get(rank, (None, 0.0))
                    if beat != last:
                        self._beats[rank] = (beat, time.monotonic())
                    # A rank that has gone on writes no more, and hosts' clocks differ: only what changes is fresh.
                    if last is not None and (beat != last or time.monotonic() - since < 4 * _PERIOD):
                        notes[rank] = (note[0], note[1], note[2], note[3], note[4])
        return notes

    def _key(self, rank: int) -> str:
        return f"onefold/waits/{self._group.process_group.group_name}/{rank}"

    def _describe(self, notes: dict[int, Note]) -> str:
        by_operation: dict[str, list[str]] = {}
        for rank in sorted(notes):
            by_operation.setdefault(notes[rank][1], []).append(str(rank))
        stands = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} at {what}" for what, ranks in by_operation.items()
        )
        return (
            f"the ranks wait for different collectives: {stands}. Their programs have parted: let every rank call "
            "the same modules in the same order, or put the modules that only some ranks run into one unit with "
            "zero_optimization.leaf_module (or onefold.utils.set_z3_leaf_modules)"
        )

    def _break_connections(self) -> None:
        # A receive that times out makes gloo close the pairs of its group, and every wait on them raises.
        with suppress(RuntimeError):
            peer = self._group.global_rank(self._group.peers[0])
            work = dist.irecv(torch.zeros(1), peer, group=self._group.host_group, tag=(1 << 20) + 1)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _watch(reference: weakref.ref[Guard], stop: threading.Event) -> None:
    before: dict[int, Note] = {}
    while not stop.wait(_PERIOD):
        guard = reference()
        if guard is None:
            return
        before = guard.look(before)
        del guard
