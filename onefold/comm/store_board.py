"""A notice board that all ranks see: small JSON notes in the store of the process group, the newest under each name.

Unlike a collective it asks nothing of a rank that has nothing to say, and any thread may use it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from onefold.comm.mesh import Group

# A rank whose beat has not changed for this long is taken to be gone.
SILENCE = 15.0
_SHORTEST, _LONGEST = 0.001, 0.05


class RankTimeout(RuntimeError):
    """A rank that others wait for has stopped answering."""


class Board:
    """Notes of one engine's ranks. `name` is the same on all of them, and no other board's."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self._prefix = f"onefold/board/{name}/"
        alone = group.size == 1 or group.is_imagined
        self._store = HashStore() if alone else dist.distributed_c10d._get_default_store()
        self._mutex = threading.Lock()
        self._beat = 0

    def post(self, name: str, note: dict[str, Any]) -> None:
        self._store.set(self._prefix + name, json.dumps(note))

    def read(self, name: str) -> dict[str, Any] | None:
        if not self._store.check([self._prefix + name]):
            return None
        note: dict[str, Any] = json.loads(self._store.get(self._prefix + name))
        return note

    def forget(self, name: str) -> None:
        self._store.delete_key(self._prefix + name)

    def beat(self) -> None:
        """This rank is alive, whatever its main thread does."""
        with self._mutex:
            self._beat += 1
            self.post(f"beat/{self.group.rank}", {"beat": self._beat})

    def wait(self, ready: Callable[[], bool], whom: Callable[[], list[int]], what: str) -> None:
        """Until `ready`. Raises where one of the ranks that are waited for no longer beats."""
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
                        f"{what}: rank {rank} has not answered for {SILENCE:.0f} s; it has ended, or has no engine"
                    )
