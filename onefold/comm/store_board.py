"""JSON messages between ranks in the store of the process group, the newest under each name.

Unlike a collective, a message needs no call on the ranks that do not read it, and any thread may use the board.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from onefold.comm.mesh import Group
from onefold.comm.signed_store import SignedStore

# A rank without a heartbeat for this long counts as dead.
SILENCE = 15.0
_SHORTEST, _LONGEST = 0.001, 0.05


class RankTimeout(RuntimeError):
    """A rank that others wait for has sent no heartbeat for `SILENCE` seconds."""


class Board:
    """The messages of one engine's ranks. `name` is the same on all ranks, and differs between boards."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self._prefix = f"onefold/board/{name}/"
        self._store = SignedStore.of_job(alone=group.size == 1 or group.is_fake)
        self._mutex = threading.Lock()
        self._beat = 0

    def post(self, name: str, note: dict[str, Any]) -> None:
        """Write a message, and replace an earlier one of this name."""
        self._store.set(self._prefix + name, json.dumps(note))

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the message of a name, or None. A message that no process of this job wrote counts as none."""
        text = self._store.find(self._prefix + name)
        note: dict[str, Any] | None = None if text is None else json.loads(text)
        return note

    def forget(self, name: str) -> None:
        """Remove the message of a name."""
        self._store.remove(self._prefix + name)

    def beat(self) -> None:
        """Write this rank's heartbeat. A background thread calls this, whatever the main thread does."""
        with self._mutex:
            self._beat += 1
            self.post(f"beat/{self.group.rank}", {"beat": self._beat})

    def wait(self, ready: Callable[[], bool], whom: Callable[[], list[int]], what: str) -> None:
        """Wait until `ready` returns True. Raise `RankTimeout` if a rank of `whom()` sends no more heartbeats."""
        started, last = time.monotonic(), dict[int, tuple[Any, float]]()
        while not ready():
            waited = time.monotonic() - started
            time.sleep(min(max(waited / 20, _SHORTEST), _LONGEST))
            for rank in whom() if waited > 1 else []:
                beat, now = None, time.monotonic()
                with suppress(RuntimeError):
                    beat = self.read(f"beat/{rank}")
                before, since = last.setdefault(rank, (beat, now))
                if beat != before:
                    last[rank] = (beat, now)
                elif now - since > SILENCE:
                    raise RankTimeout(
                        f"{what}: rank {rank} has not responded for {SILENCE:.0f} s. It has ended or has no engine. "
                        "Check its log."
                    )
