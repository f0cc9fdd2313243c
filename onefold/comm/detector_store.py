"""The hang detector's keys in the store of the process group: notes, heartbeats, requests and the verdict.

The keys of one process group:

    wait/RANK       the note of a rank that waits, with a counter that grows at each write
    ended/RANK      the rank's process has ended; the value is its number of launches
    alive/RANK      a heartbeat, written if the device waits and the host does not
    request/PASS    a rank requests to leave the recorded order in this pass
    verdict         why the job is stuck; the first rank that writes it decides
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import astuple, replace

from onefold.comm.signed_store import SignedStore
from onefold.comm.wait_notes import ENDED, WaitNote

# How often a rank writes its heartbeat, and after how long without one it counts as silent.
_BEAT_SECONDS, _SILENT_SECONDS = 1.0, 2.5


class DetectorStore:
    """One rank's access to the keys."""

    def __init__(self, rank: int, size: int, generation: int, stale_seconds: float) -> None:
        # Use a separate connection: one on which the main thread blocks would block the detector's thread too.
        self.connection = SignedStore.of_job(separate=size > 1)
        self._rank, self._size = rank, size
        self._prefix = f"onefold/{generation}/"
        self._stale_seconds = stale_seconds
        self._num_written = 0
        # Per rank: the counter of the last note, when it changed, and when it was first read.
        self._counters: dict[int, tuple[int, float, float]] = {}
        self._last_beat = 0.0
        self._beats: dict[int, tuple[str, float]] = {}

    def key(self, *words: object) -> str:
        """Return a key of this process group, which a later one in the same store does not share."""
        return self._prefix + "/".join(map(str, words))

    def _find(self, *words: object) -> str | None:
        found = self.connection.find(self.key(*words))
        return None if found is None else found.decode()

    # -- notes --------------------------------------------------------------------------------------------------

    def write_note(self, note: WaitNote) -> None:
        """Write this rank's note. A store that cannot be reached is ignored: its node may be gone."""
        with suppress(RuntimeError):
            self._num_written += 1
            self.connection.set(self.key("wait", self._rank), json.dumps([*astuple(note), self._num_written]))

    def read_notes(self, *, alive: bool = True) -> dict[int, WaitNote]:
        """Return the notes of the other ranks that wait now, and of those that have ended.

        A rank that stops waiting leaves its last note behind, and the clocks of nodes differ. A note therefore counts
        as `alive` only if its counter has changed since an earlier read. With `alive=False` a note counts once it was
        read before, even if it has not changed.
        """
        notes: dict[int, WaitNote] = {}
        with suppress(RuntimeError):
            for rank in range(self._size):
                if rank == self._rank:
                    continue
                if (launched := self._find("ended", rank)) is not None:
                    notes[rank] = WaitNote(0, ENDED, lasts=True, launched=int(launched))
                elif (note := self._read_note(rank, alive)) is not None:
                    notes[rank] = note
        return notes

    def _read_note(self, rank: int, alive: bool) -> WaitNote | None:
        if (text := self._find("wait", rank)) is None:
            return None
        *fields, counter = json.loads(text)
        now = time.monotonic()
        last, changed, read = self._counters.get(rank, (None, float("-inf"), now))
        if counter != last:
            changed, read = (now, now) if last is not None else (changed, now)
            self._counters[rank] = (counter, changed, read)
        if last is None or now - (changed if alive else read) >= self._stale_seconds:
            return None
        note = WaitNote(*fields)
        return note if note.ranks is None else replace(note, ranks=tuple(note.ranks))

    # -- processes that have ended ------------------------------------------------------------------------------

    def write_end(self, num_launched: int) -> None:
        """Write that this rank's process ends."""
        with suppress(RuntimeError):
            self.connection.set(self.key("ended", self._rank), str(num_launched))

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has ended in an orderly way."""
        return self._find("ended", rank) is not None

    def write_heartbeat(self) -> None:
        """Write that this rank is alive, once a second at most."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self.connection.set(self.key("alive", self._rank), str(self._last_beat))

    def is_silent(self, rank: int) -> bool:
        """Return whether a rank has stopped to write heartbeats. If it has, measure its silence anew from now on."""
        if (beat := self._find("alive", rank)) is None:
            return False
        now = time.monotonic()
        last, since = self._beats.get(rank, ("", now))
        if beat != last:
            last, since = self._beats[rank] = (beat, now)
        if now - since < _SILENT_SECONDS:
            return False
        self._beats[rank] = (beat, now)
        return True

    # -- requests and the verdict -------------------------------------------------------------------------------

    def write_request(self, pass_number: int) -> None:
        """Request that every rank that waits in this pass leaves the recorded order."""
        self.connection.set(self.key("request", pass_number), "1")

    def has_request(self, pass_number: int) -> bool:
        """Return whether a rank has requested to leave the recorded order in this pass."""
        with suppress(RuntimeError):
            return self._find("request", pass_number) is not None
        return False

    def read_verdict(self) -> str | None:
        """Return the verdict that a rank has written, if any."""
        return self._find("verdict")

    def propose_verdict(self, verdict: str) -> str:
        """Write a verdict unless there is one, and return the one that holds for all ranks."""
        return self.connection.set_once(self.key("verdict"), verdict).decode()
