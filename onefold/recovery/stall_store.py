"""The keys of the stall watch in the store of the process group: heartbeats, the verdict, and stacks.

beat/RANK       the heartbeat of a rank
verdict         why the ranks end; the first rank that writes it decides
stacks/RANK     the Python stacks of a rank
joined          rank 0 has written the stacks of all ranks to one file
"""

from __future__ import annotations

from onefold.comm.signed_store import SignedStore
from onefold.recovery.rank_beats import RankBeat

# Stores limit the size of a value.
_MAX_STACKS = 1 << 20


class StallStore:
    """One rank's access to the keys, over a connection of its own, on which one thread may block."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        self._connection = SignedStore.of_job(separate=size > 1)
        self._rank, self._prefix = rank, f"{name}/"

    def write_beat(self, beat: RankBeat) -> None:
        """Replace the heartbeat of this rank."""
        self._connection.set(self._key("beat", self._rank), beat.to_text())

    def read_beats(self, ranks: range) -> dict[int, RankBeat]:
        """Return the last heartbeats of those ranks that have written one."""
        texts = {rank: self._connection.find(self._key("beat", rank)) for rank in ranks}
        return {rank: RankBeat.of(text) for rank, text in texts.items() if text is not None}

    def propose_verdict(self, verdict: str) -> str:
        """Write a verdict unless there is one, and return the one that holds for all ranks."""
        return self._connection.set_once(self._key("verdict"), verdict).decode()

    def read_verdict(self) -> str | None:
        return self._find("verdict")

    def write_stacks(self, stacks: str) -> None:
        self._connection.set(self._key("stacks", self._rank), stacks.encode()[:_MAX_STACKS])

    def read_stacks(self, rank: int) -> str | None:
        """Return the stacks of a rank, or None if it has not written them."""
        return self._find("stacks", rank)

    def write_joined(self) -> None:
        self._connection.set(self._key("joined"), "1")

    @property
    def are_joined(self) -> bool:
        """Whether the stacks of all ranks are in one file."""
        return self._find("joined") is not None

    def _key(self, *words: object) -> str:
        return self._prefix + "/".join(map(str, words))

    def _find(self, *words: object) -> str | None:
        found = self._connection.find(self._key(*words))
        return None if found is None else found.decode(errors="replace")
