"""The role of all ranks but the first in a save: serve the requests of rank 0, and await its verdict."""

from __future__ import annotations

from collections import deque
from typing import Any

from onefold.checkpoint.format import folder
from onefold.checkpoint.saving.rank_shard_writer import SaveError, SaveRequest
from onefold.comm import Board, Disagreement, Guard

# Number of requests that are kept on the board and in memory for slow ranks.
REMEMBERED = 64
# The refusal of a peer copy because another save is in progress.
BUSY = "busy"


class CopyDeclined(SaveError):
    """Rank 0 does not begin a peer copy now."""


class SaveParticipant:
    """The role of other ranks: serve the requests in order, from the program's calls or from the listener."""

    def __init__(self, board: Board, guard: Guard) -> None:
        self._board, self._guard = board, guard
        self._served = 0
        # Requests that the listener has served and that the program may still call `save_checkpoint` for.
        self._passed: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)

    def next_note(self) -> dict[str, Any] | None:
        """Return the oldest request or refusal that this rank has not served, or None."""
        newest = self._board.read("requests")
        if newest is None or newest["number"] <= self._served:
            return None
        return self._board.read(f"request/{max(self._served + 1, newest['number'] - REMEMBERED + 1)}")

    def take(self, note: dict[str, Any]) -> bool:
        """Mark a request as served by the listener. Return False if a call of the program has served it."""
        if note["number"] <= self._served:
            return False
        self._served = note["number"]
        self._passed.append(note)
        return True

    def find_request(self, steps: int | None, tag: str) -> tuple[SaveRequest, bool]:
        """Return the request that matches a call of this rank's program, and whether the listener has served it."""
        same = [note for note in self._passed if note["steps"] == steps]
        note = next((note for note in same if note["tag"] == tag), same[0] if same else None)
        if note is not None:
            while self._passed.popleft() is not note:  # the program does not call for earlier requests any more
                pass
            return as_request(note), True

        def ready() -> bool:
            nonlocal note
            if self._guard.verdict is not None:
                raise Disagreement(self._guard.verdict)
            note = self.next_note()
            return note is not None

        with self._guard.waiting_for("save_checkpoint, for rank 0"):
            self._board.wait(ready, lambda: [0], "save_checkpoint")
        assert note is not None
        self._served = note["number"]
        return as_request(note), False

    def await_verdict(self, request: SaveRequest) -> None:
        """Wait until rank 0 has published the checkpoint. Raise a SaveError if publishing failed."""
        error: str | None = None

        def ready() -> bool:
            nonlocal error
            try:
                note = self._board.read("verdict")
            except RuntimeError:  # rank 0 hosts the board and has exited, so look for the manifest on disk
                if not folder.is_published(request.folder, as_latest=request.save_latest):
                    error = f"rank 0 has ended before {request.tag} was published"
                return True
            if note is None or note["number"] < request.number:
                return False
            # The verdict of a later save has replaced this one. Rank 0 has already raised the error, if any.
            error = note.get("error") if note["number"] == request.number else None
            return True

        self._board.wait(ready, lambda: [0], f"save_checkpoint of {request.tag}")
        if error is not None:
            raise SaveError(error)


def as_request(note: dict[str, Any]) -> SaveRequest:
    if note.get("refused") == BUSY:
        raise CopyDeclined
    if "refused" in note:
        raise SaveError(f"rank 0 cannot save: {note['refused']}")
    return SaveRequest(**note)
