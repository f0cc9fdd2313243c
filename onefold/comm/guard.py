"""An engine's side of the hang guard: where it is in the program that all ranks follow ([Note: comparing notes]).

Notes also serve ranks that must diverge from a program they all follow: a note says how far its rank has come, and a
mark in the store (`ask`) reaches every rank whose wait lasts, so that a rank with something to say is heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from onefold.comm.mesh import Group
from onefold.comm.watch import watch_world


class Guard:
    """Names the waits of one rank in one group."""

    def __init__(self, group: Group) -> None:
        # Where this rank is in the program it follows: which pass, and how many launches.
        self.passes = 0
        self.progress = 0
        self.asked = False
        self._watch = watch_world()
        self._watch.may_break(group.host_group)

    def waiting(self, operation: str, units: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Around anything that waits for other ranks."""
        return self._watch.waiting(f"{operation} {', '.join(units)}" if units else operation, self)

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
        """The launches of this pass made by ranks that wait and have heard, at the most.

        Only those count: they will not launch more, so that where ranks diverge does not depend on who was faster.
        """
        notes = self._watch.others_notes(alive=False).values()
        return max((note.progress for note in notes if note.passes == self.passes and note.heard), default=0)
