"""All saves of an engine on one rank: what the engine calls, rank 0's side, the other ranks' side, the listener.

[Note: who joins a save], in `onefold/checkpoint/saving/rank_writer.py`, shows one save from top to bottom.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from onefold.checkpoint.format import folder, plain_data
from onefold.checkpoint.format.files import read_small
from onefold.checkpoint.format.manifest import MAX_BYTES, Manifest, join_parts
from onefold.checkpoint.format.shard_files import ShardRecord, Slot
from onefold.checkpoint.saving.rank_writer import (
    Phase,
    RankWriter,
    Savable,
    SaveError,
    SaveHeader,
    SaveOptions,
    SaveRequest,
    Staging,
    record_name,
)
from onefold.comm import Board, Disagreement, Guard, RankTimeout
from onefold.log import logger

PERIOD = 0.25
# Before the listener does a rank's part, its own program gets this long to come to its own call.
COURTESY = 0.5
# How long a rank whose program is through with the engine waits for a last request, unless rank 0 is through as well.
LINGER = 3.0
# Requests that stay on the board and in memory for a rank that comes late to them.
_REMEMBERED = 64
# Removes old checkpoints of a folder.
AfterPublish = Callable[[Path], object]
"""Is given the folder of a tag that has just been published."""


class Saver:
    """One rank's side of all saves of an engine: at most one is under way, in the foreground or in a thread."""

    def __init__(
        self, owner: Savable, board: Board, guard: Guard, after_publish: AfterPublish, written_by: str
    ) -> None:
        self._owner = weakref.ref(owner)
        self._board, self._guard, self._rank = board, guard, board.group.rank
        self._leader = Leader(board, after_publish, written_by)
        self._follower = Follower(board, guard)
        self._staging = Staging()
        self._copying: RankWriter | None = None
        # One part at a time, whichever thread does it.
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._listener: threading.Thread | None = None
        if board.group.size > 1:
            self._listener = threading.Thread(
                target=_listen, args=(weakref.ref(self), self._stop), name="onefold-save-listener", daemon=True
            )
            self._listener.start()
            weakref.finalize(self, self._stop.set)

    # -- what the engine calls ----------------------------------------------------------------------------------

    def save(
        self, options: SaveOptions, make_header: Callable[[], SaveHeader], validate_tag: Callable[[str], None]
    ) -> None:
        """Save, and in a foreground save wait for the verdict. `make_header` is called on rank 0 only."""
        owner = self._owner()
        assert owner is not None
        with self._mutex:
            self.finish()
            if self._rank == 0:
                led = self._leader.open(owner, options, make_header)
                self._take_part(owner, led.request, partial(self._leader.conclude, led), validate_tag, led.slots)
            else:
                request, is_served = self._follower.find_request(owner.steps_done(), options.tag)
                conclude = partial(self._follower.await_verdict, request)
                if is_served:  # by the listener
                    validate_tag(request.tag)
                    self._keep_error(conclude)
                else:
                    self._take_part(owner, request, conclude, validate_tag)
            if not options.background:
                self.finish()

    def _take_part(
        self,
        owner: Savable,
        request: SaveRequest,
        conclude: Callable[[], None],
        validate_tag: Callable[[str], None],
        extra: Sequence[Slot] = (),
    ) -> None:
        """Do this rank's part here, or its second half in the background; then conclude: publish, or hear of it."""
        part = RankWriter(self._board, self._staging, request)

        def complete() -> None:
            with _failing_together(part, conclude):
                part.complete()
            conclude()

        with _failing_together(part, conclude):
            validate_tag(request.tag)
            if request.background:
                self._copying = part
            part.prepare(owner, extra, joined=False)
            if request.background:
                self._start_thread(partial(self._keep_error, complete))
        if not request.background:
            self._keep_error(complete)
        elif self._rank == 0:
            # From now on any rank's program may write to its weights.
            try:
                self._leader.await_parts(request, Phase.WEIGHTS_COPIED)
            except (SaveError, RankTimeout):
                self.finish()
                raise

    def _start_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="onefold-save")
        thread.start()
        self._thread = thread

    def _keep_error(self, work: Callable[[], None]) -> None:
        """Run work and keep its error for `finish`, or for the next step, at which all ranks are told."""
        try:
            work()
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the save under way, if any, and raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def failed(self) -> bool:
        """Whether a background save has ended badly and nobody was told yet."""
        return self._error is not None

    def wait_until_states_copied(self) -> None:
        """Before optimizer states change: wait until the background save has copied them."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.states_copied.wait()
            if self._rank == 0:
                # No rank takes the next step before rank 0 is there.
                with suppress(SaveError, RankTimeout):  # what failed is told by the thread that publishes
                    self._leader.await_parts(copying.request, Phase.STATES_COPIED)

    def stop(self) -> None:
        """End the listener and finish the save under way: the engine is being destroyed."""
        self._stop.set()
        # The last one to hold the engine may be one of these threads.
        for thread in (self._thread, self._listener):
            if thread is not None and thread is not threading.current_thread() and thread.is_alive():
                thread.join()
        if self._error is not None:
            logger.error("%s", self._error)

    def linger(self, owner: Savable, seconds: float | None) -> None:
        """Its program is done; wait for a last save of rank 0: so many seconds, or until rank 0 is done or gone."""
        if self._stop.is_set() or self._board.group.size == 1:
            return
        if self._rank == 0:
            self._board.post("left", {})
            return
        started = time.monotonic()

        def done() -> bool:
            nonlocal started
            note = self._follower.next_note()
            if note is not None:
                with self._mutex:
                    self._serve(owner, note, start=lambda work: work())
                started = time.monotonic()
            over = seconds is not None and time.monotonic() - started > seconds
            return over or self._board.read("left") is not None or self._guard.verdict is not None

        guarded = self._guard.waiting_for("the end of its program") if seconds is None else nullcontext()
        with suppress(RankTimeout), guarded:
            self._board.wait(done, lambda: [0], "the end of the program")

    # -- the listener -------------------------------------------------------------------------------------------

    def listen(self, since: float | None) -> float | None:
        """Look at the board once. Returns when a request was first seen that this rank has not served yet."""
        if self._rank == 0:
            self._board.beat()  # for whoever waits for its request or its verdict
            return None
        note = self._follower.next_note()
        if note is not None or self._mutex.locked() or (self._thread is not None and self._thread.is_alive()):
            self._board.beat()  # for rank 0, which waits for this rank's part
        if note is None:
            return None
        if since is None or time.monotonic() - since < COURTESY:
            return since or time.monotonic()
        owner = self._owner()
        steps = owner.steps_done() if owner is not None else None
        behind = steps is None or note["steps"] is None or steps < note["steps"]
        if owner is None or (behind and "refused" not in note) or not self._mutex.acquire(blocking=False):
            return since
        try:
            # Its program does not save: this rank's part is done beside whatever it waits for.
            self._serve(owner, note, start=self._start_thread)
        finally:
            self._mutex.release()
        return None

    def _serve(self, owner: Savable, note: dict[str, Any], start: Callable[[Callable[[], None]], None]) -> None:
        """Do this rank's part without its program, unless rank 0 has refused the save or the part is done."""
        if self._follower.take(note) and "refused" not in note:
            part = RankWriter(self._board, self._staging, SaveRequest(**note))
            with part.reporting():
                start(partial(self._join, owner, part))

    def _join(self, owner: Savable, part: RankWriter) -> None:
        """Do this rank's part in the listener's thread. Rank 0's program is told of an error, this rank's is not."""
        try:
            with part.reporting():
                if part.request.background:
                    self._copying = part  # before rank 0 hears of the copy, and lets the program go on to its next step
                part.prepare(owner, joined=True)
                part.complete()
        except Exception:
            logger.exception("rank %d could not join the save of %s", self._rank, part.request.tag)


@contextmanager
def _failing_together(part: RankWriter, conclude: Callable[[], None]) -> Iterator[None]:
    """What is raised inside is told to all ranks; then the save is concluded, which raises the reasons of all."""
    try:
        with part.reporting():
            yield
    except Exception:
        conclude()
        raise
    except BaseException:  # the user interrupts: that is what is raised here
        with suppress(SaveError, RankTimeout):
            conclude()
        raise


def _listen(reference: weakref.ref[Saver], stop: threading.Event) -> None:
    """The listener's thread. Any other error than of the store ends its beats too, so that nobody waits for ever."""
    since: float | None = None
    while not stop.wait(PERIOD):
        saver = reference()
        if saver is None:
            return
        with suppress(RuntimeError):  # the store's node may be gone already
            since = saver.listen(since)
        del saver


# -- rank 0 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenSave:
    """A save that rank 0 has requested: what it puts into the manifest, its own slots, the lock of the data folder."""

    request: SaveRequest
    header: SaveHeader
    slots: Sequence[Slot]
    lock: ExitStack


class Leader:
    """Rank 0's side of all saves: each is opened with a request to all ranks, and concluded with a verdict."""

    def __init__(self, board: Board, after_publish: AfterPublish, written_by: str) -> None:
        self._board, self._after_publish, self._written_by = board, after_publish, written_by
        self._num_ranks = board.group.size
        self._number = 0

    def open(self, owner: Savable, options: SaveOptions, make_header: Callable[[], SaveHeader]) -> OpenSave:
        """Make the data folder and post the request; or post why there is none, and raise it."""
        self._number += 1
        steps, lock = owner.steps_done(), ExitStack()
        try:
            header = make_header()
            if steps is None:
                raise SaveError("the last step failed half-way, so there is no state to save: load the last checkpoint")
            tree, tensors = plain_data.encode(header.state, "state")
            save_dir = os.path.abspath(options.save_dir)
            data = lock.enter_context(folder.new_data_folder(Path(save_dir, folder.check_tag(options.tag))))
            asked = {**asdict(options), "save_dir": save_dir}
            request = SaveRequest(**asked, number=self._number, steps=steps, data=data.name, buffers=header.buffers)
            self._post(asdict(request))
        except BaseException as error:
            lock.close()
            refused = f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):  # the store may be gone
                self._post({"number": self._number, "steps": steps, "tag": options.tag, "refused": refused})
            if isinstance(error, OSError):
                raise SaveError(f"cannot save to {options.save_dir}, tag {options.tag}: {error}") from error
            raise
        slots = [Slot.whole(f"state/{key}", tensor) for key, tensor in tensors.items()]
        return OpenSave(request, replace(header, state=tree), slots, lock)

    def _post(self, note: dict[str, Any]) -> None:
        """Post one note a request, so that a rank misses none, and the number of the newest."""
        self._board.post(f"request/{note['number']}", note)
        self._board.post("requests", {"number": note["number"]})
        if note["number"] > _REMEMBERED:
            self._board.forget(f"request/{note['number'] - _REMEMBERED}")

    def await_parts(self, request: SaveRequest, phase: Phase) -> None:
        """Wait until every rank's part has reached a phase. Raises the reasons of those that failed."""
        answers: dict[int, str] = {}

        def missing() -> list[int]:
            for rank in range(self._num_ranks):
                note = self._board.read(f"part/{rank}") if rank not in answers else None
                if note is not None and (note["number"], note["phase"]) >= (request.number, phase):
                    # One of a later save says that this one is over.
                    answers[rank] = note.get("error", "") if note["number"] == request.number else ""
            return [rank for rank in range(self._num_ranks) if rank not in answers]

        self._board.wait(lambda: not missing(), missing, f"save_checkpoint of {request.tag}")
        if problems := [f"rank {rank}: {error}" for rank, error in sorted(answers.items()) if error]:
            raise SaveError("; ".join(problems))

    def conclude(self, save: OpenSave) -> None:
        """Once every rank has written: publish the checkpoint, or fail on every rank alike."""
        request = save.request
        with save.lock:
            try:
                self.await_parts(request, Phase.WRITTEN)
                self._publish(request, save.header)
            except BaseException as error:
                message = f"checkpoint {request.tag} was not saved to {request.save_dir}: {error}"
                with suppress(RuntimeError):
                    self._board.post("verdict", {"number": request.number, "error": message})
                # Otherwise the manifest stands, and writing `latest` failed.
                if not folder.is_published(request.folder, as_latest=False):
                    with suppress(OSError):
                        shutil.rmtree(request.folder)
                        request.folder.parent.rmdir()  # unless the tag has an earlier checkpoint
                if isinstance(error, Exception):
                    raise SaveError(message) from error
                raise
            self._board.post("verdict", {"number": request.number})
            self._clean(request)

    def _publish(self, request: SaveRequest, header: SaveHeader) -> None:
        records = [_read_record(request.folder, rank) for rank in range(self._num_ranks)]
        manifest = Manifest(
            tag=request.tag,
            saved=datetime.now(UTC).isoformat(),
            global_steps=request.steps,
            world_size=self._num_ranks,
            files=tuple(record.file for record in records),
            tensors=join_parts(part for rank, record in enumerate(records) for part in record.numbered(rank)),
            parameters=header.parameters,
            state=header.state,
            ranks=[record.own for record in records],
            aliases=header.aliases,
            left_out=header.left_out,
            writer=self._written_by,
        )
        folder.publish(Path(request.save_dir), manifest, save_latest=request.save_latest)

    def _clean(self, request: SaveRequest) -> None:
        """Remove old files of a checkpoint that is published. One that cannot be removed is no reason to fail."""
        try:
            for rank in range(self._num_ranks):
                (request.folder / record_name(rank)).unlink(missing_ok=True)
            folder.clean(request.folder.parent)
            self._after_publish(request.folder.parent)
        except OSError as error:
            logger.warning("checkpoint %s is saved, but old files could not be removed: %s", request.tag, error)


def _read_record(data: Path, rank: int) -> ShardRecord:
    try:
        record = ShardRecord.from_json(json.loads(read_small(data / record_name(rank), MAX_BYTES)))
        size = (data.parent / record.file.name).stat().st_size
    except FileNotFoundError:
        raise SaveError(
            f"rank {rank} has written its part, but rank 0 does not see it in {data}: save to a file system that all "
            "ranks share"
        ) from None
    if size != record.file.nbytes:
        raise SaveError(f"rank {rank} wrote {record.file.nbytes} bytes, rank 0 sees {size} of them in {data}")
    return record


# -- the other ranks ---------------------------------------------------------------------------------------------------


class Follower:
    """Another rank's side of all saves: requests are served in their order, by its program's calls or the listener."""

    def __init__(self, board: Board, guard: Guard) -> None:
        self._board, self._guard = board, guard
        self._served = 0
        # Requests that the listener has served, for calls of this rank's program that come after it.
        self._passed: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)

    def next_note(self) -> dict[str, Any] | None:
        """The oldest request, or refusal of one, that this rank has not served."""
        newest = self._board.read("requests")
        if newest is None or newest["number"] <= self._served:
            return None
        return self._board.read(f"request/{max(self._served + 1, newest['number'] - _REMEMBERED + 1)}")

    def take(self, note: dict[str, Any]) -> bool:
        """Mark a request as served by the listener; False where a call of the program has taken it meanwhile."""
        if note["number"] <= self._served:
            return False
        self._served = note["number"]
        self._passed.append(note)
        return True

    def find_request(self, steps: int | None, tag: str) -> tuple[SaveRequest, bool]:
        """The request that a call of this rank's program stands for, and whether the listener has served it."""
        same = [note for note in self._passed if note["steps"] == steps]
        note = next((note for note in same if note["tag"] == tag), same[0] if same else None)
        if note is not None:
            while self._passed.popleft() is not note:  # none before it will be called for
                pass
            return _as_request(note), True

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
        return _as_request(note), False

    def await_verdict(self, request: SaveRequest) -> None:
        """Wait until rank 0 has published the checkpoint; raise where it could not."""
        error: str | None = None

        def ready() -> bool:
            nonlocal error
            try:
                note = self._board.read("verdict")
            except RuntimeError:  # rank 0 held the board and has ended: what it left on disk speaks for it
                if not folder.is_published(request.folder, as_latest=request.save_latest):
                    error = f"rank 0 has ended before {request.tag} was published"
                return True
            if note is None or note["number"] < request.number:
                return False
            # After a later verdict there is nothing to tell: rank 0 has told its own program long ago.
            error = note.get("error") if note["number"] == request.number else None
            return True

        self._board.wait(ready, lambda: [0], f"save_checkpoint of {request.tag}")
        if error is not None:
            raise SaveError(error)


def _as_request(note: dict[str, Any]) -> SaveRequest:
    if "refused" in note:
        raise SaveError(f"rank 0 could not save: {note['refused']}")
    return SaveRequest(**note)
