"""The keys of the stall watch in the store of the process group: heartbeats, the verdict, and stacks.

beat/RANK       the heartbeat of a rank
verdict         why the ranks end; the first rank that writes it decides
stacks/RANK     the Python stacks of a rank
joined          rank 0 has written the stacks of all ranks to one file
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from onefold.recovery.rank_beats import RankBeat

# Stores limit the size of a value.
_MAX_STACKS = 1 << 20


class StallStore:
    """One rank's access to the keys, over a connection of its own, on which one thread may block."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        default: Any = dist.distributed_c10d._get_default_store()
        self._connection: Any = default.clone() if size > 1 else default
        self._rank, self._size, self._prefix = rank, size, f"onefold/stall/{name}/"
        self._seen: set[int] = set()

    def write_beat(self, beat: RankBeat) -> None:
        """Replace the heartbeat of this rank."""
        self._connection.set(self._key("beat", self._rank), beat.to_text())

    def read_beats(self, ranks: range) -> dict[int, RankBeat]:
        """Return the last heartbeats of those ranks that have written one."""
        self._seen |= {rank for rank in ranks if rank not in self._seen and self._has("beat", rank)}
        found = [rank for rank in ranks if rank in self._seen]
        texts = self._connection.multi_get([self._key("beat", rank) for rank in found]) if found else []
        return {rank: RankBeat.of(text) for rank, text in zip(found, texts, strict=True)}

    def propose_verdict(self, verdict: str) -> str:
        """Write a verdict unless there is one, and return the one that holds for all ranks."""
        decided: str = self._connection.compare_set(self._key("verdict"), "", verdict).decode()
        return decided

    def read_verdict(self) -> str | None:
        return self._connection.get(self._key("verdict")).decode() if self._has("verdict") else None

    def write_stacks(self, stacks: str) -> None:
        self._connection.set(self._key("stacks", self._rank), stacks.encode()[:_MAX_STACKS])

    def read_stacks(self, rank: int) -> str | None:
        """Return the stacks of a rank, or None if it has not written them."""
        if not self._has("stacks", rank):
            return None
        return self._connection.get(self._key("stacks", rank)).decode(errors="replace")  # type: ignore[no-any-return]

    def write_joined(self) -> None:
        self._connection.set(self._key("joined"), "1")

    @property
    def are_joined(self) -> bool:
        """Whether the stacks of all ranks are in one file."""
        return self._has("joined")

    def _key(self, *words: object) -> str:
        return self._prefix + "/".join(map(str, words))

    def _has(self, *words: object) -> bool:
        return bool(self._connection.check([self._key(*words)]))
