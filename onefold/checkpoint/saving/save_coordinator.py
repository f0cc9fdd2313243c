"""Coordination of the saves of an engine between ranks.

The engine of every rank has a `SaveCoordinator`. It uses `SavePublisher` on rank 0, and `SaveParticipant` on the other
ranks. [Note: participation in a save], in `rank_shard_writer.py`, describes one save.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from onefold.checkpoint.format import folder, plain_data
from onefold.checkpoint.format.manifest import MAX_BYTES, Manifest, join_parts
from onefold.checkpoint.format.peer_copy import write_header
from onefold.checkpoint.format.shard_files import ShardRecord, Slot
from onefold.checkpoint.saving.rank_shard_writer import (
    Phase,
    RankShardWriter,
    Savable,
    SaveError,
    SaveHeader,
    SaveOptions,
    SaveRequest,
    Staging,
    record_name,
)
from onefold.checkpoint.saving.save_participant import BUSY, REMEMBERED, CopyDeclined, SaveParticipant
from onefold.comm import Board, Guard, RankTimeout
from onefold.log import logger
from onefold.storage.before_exit import join_before_exit
from onefold.storage.place import Place, absolute, file_size, place, read_small, remove_tree

PERIOD = 0.25
# The listener gives the program of its rank this many seconds to call `save_checkpoint`.
COURTESY = 0.5
# A rank that closes its engine waits this many seconds for a last request, unless rank 0 has closed its engine too.
LINGER = 3.0
AfterPublish = Callable[[Place], object]
"""A function that is called with the folder of each published tag, for example to remove old checkpoints."""


class SaveCoordinator:
    """The saves of an engine on one rank. At most one save is in progress, in the foreground or in a thread."""

    def __init__(
        self, owner: Savable, board: Board, guard: Guard, after_publish: AfterPublish, written_by: str
    ) -> None:
        self._owner = weakref.ref(owner)
        self._board, self._guard, self._rank = board, guard, board.group.rank
        self._publisher = SavePublisher(board, after_publish, written_by)
        self._participant = SaveParticipant(board, guard)
        self._staging = Staging()
        self._copying: RankShardWriter | None = None
        # The program's thread and the listener must not write shards at the same time.
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.failed_copy = ""
        """The name of the last peer copy that failed. On rank 0, on any rank; elsewhere, on this rank."""
        self._stop = threading.Event()
        self._listener: threading.Thread | None = None
        if board.group.size > 1:
            self._listener = threading.Thread(
                target=_listen, args=(weakref.ref(self), self._stop), name="onefold-save-listener", daemon=True
            )
            self._listener.start()
            weakref.finalize(self, self._stop.set)

    # -- interface of the engine --------------------------------------------------------------------------------

    def save(
        self, options: SaveOptions, make_header: Callable[[], SaveHeader], validate_tag: Callable[[str], None]
    ) -> None:
        """Save a checkpoint. A foreground save waits until it is published. `make_header` is called on rank 0 only."""
        owner = self._owner()
        assert owner is not None
        with self._mutex:
            self.finish()
            if self._rank == 0:
                save = self._publisher.start(owner, options, make_header)
                conclude = partial(self._publisher.conclude, save)
                self._participate(owner, save.request, conclude, validate_tag, save.slots)
            else:
                request, is_served = self._participant.find_request(owner.steps_done(), options.tag)
                conclude = partial(self._participant.await_verdict, request)
                if is_served:  # by the listener
                    validate_tag(request.tag)
                    self._keep_error(conclude)
                else:
                    self._participate(owner, request, conclude, validate_tag)
            if not options.background:
                self.finish()

    def copy(self, options: SaveOptions, make_header: Callable[[], SaveHeader], *, may_begin: bool) -> str:
        """Write a peer copy in the background, unless rank 0 may not begin one or a save is in progress.

        All ranks call this after the same step, and return the name of the copy, or "" if rank 0 has not begun one.
        Errors of the copy are logged: training goes on without it.
        """
        owner = self._owner()
        assert owner is not None
        with self._mutex:
            is_busy = self._thread is not None and self._thread.is_alive()
            if self._rank == 0 and (is_busy or self._error is not None or not may_begin):
                self._publisher.decline(owner, options.tag)
                return ""
            try:
                if self._rank == 0:
                    save = self._publisher.start(owner, options, make_header, is_copy=True)
                    request, slots = save.request, save.slots
                    conclude = partial(self._publisher.conclude, save)
                else:
                    request, is_served = self._participant.find_request(owner.steps_done(), options.tag)
                    if is_served:  # by the listener
                        return request.tag
                    slots, conclude = [], partial(self._participant.await_verdict, request)
            except CopyDeclined as declined:
                if str(declined):
                    _warn_of_copy(declined)
                return ""
            if self._thread is not None:  # rank 0 has concluded the save before
                self._thread.join()
                self._thread = None
            self._keep_error(lambda: self._participate(owner, request, conclude, lambda tag: None, slots), request)
            return request.tag

    def _fail_copy(self, name: str, error: Exception) -> None:
        self.failed_copy = name
        if self._rank == 0:
            _warn_of_copy(error)

    def _participate(
        self,
        owner: Savable,
        request: SaveRequest,
        conclude: Callable[[], None],
        validate_tag: Callable[[str], None],
        extra: Sequence[Slot] = (),
    ) -> None:
        """Write this rank's shard, and call `conclude`, which publishes on rank 0 and waits for that elsewhere.

        In a background save, the optimizer states are copied and the file is written in a thread.
        """
        writer = RankShardWriter(self._board, self._staging, request)

        def complete() -> None:
            with _failing_together(writer, conclude):
                writer.complete()
            conclude()

        with _failing_together(writer, conclude):
            validate_tag(request.tag)
            if request.background:
                self._copying = writer
            writer.prepare(owner, extra, joined=False)
            if request.background:
                self._start_thread(partial(self._keep_error, complete, request))
        if not request.background:
            self._keep_error(complete)
        elif self._rank == 0:
            # After `save` returns, the program may write to the weights of any rank.
            try:
                self._publisher.await_phase(request, Phase.WEIGHTS_COPIED)
            except (SaveError, RankTimeout):
                if not request.is_copy:
                    self.finish()
                raise

    def _start_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="onefold-save")
        thread.start()
        join_before_exit(thread)
        self._thread = thread

    def _keep_error(self, work: Callable[[], None], request: SaveRequest | None = None) -> None:
        """Run work and keep its error for `finish`, or for the next step, which reports it to all ranks.

        The error of a peer copy is logged instead.
        """
        try:
            work()
        except Exception as error:
            if request is None or not request.is_copy:
                self._error = error
            else:
                self._fail_copy(request.tag, error)

    def finish(self) -> None:
        """Wait for the save in progress, if any, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def failed(self) -> bool:
        """Whether a background save has failed and the error has not been raised yet."""
        return self._error is not None

    def wait_until_states_copied(self) -> None:
        """Wait until the background save has copied the optimizer states. Called before they change."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.states_copied.wait()
            if self._rank == 0:
                # No rank can run the next step without rank 0, so that this wait protects the states of all ranks.
                with suppress(SaveError, RankTimeout):  # the thread that publishes reports the error
                    self._publisher.await_phase(copying.request, Phase.STATES_COPIED)

    def stop(self) -> None:
        """Stop the listener and wait for the save in progress, because the engine is being destroyed."""
        self._stop.set()
        # One of these threads may hold the last reference to the engine and therefore run this method.
        for thread in (self._thread, self._listener):
            if thread is not None and thread is not threading.current_thread() and thread.is_alive():
                thread.join()
        if self._error is not None:
            logger.error("%s", self._error)

    def linger(self, owner: Savable, seconds: float | None) -> None:
        """Wait for a last save of rank 0 after this rank's program has ended.

        Wait for `seconds`, or, if None, until rank 0 has ended too.
        """
        if self._stop.is_set() or self._board.group.size == 1:
            return
        if self._rank == 0:
            self._board.post("left", {})
            return
        started = time.monotonic()

        def done() -> bool:
            nonlocal started
            note = self._participant.next_note()
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
        """Poll the board once. Return the time at which a request was first seen that this rank has not served yet."""
        if self._rank == 0:
            self._board.beat()  # for ranks that wait for a request or a verdict
            return None
        note = self._participant.next_note()
        if note is not None or self._mutex.locked() or (self._thread is not None and self._thread.is_alive()):
            self._board.beat()  # for rank 0, which waits for the shard of this rank
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
            # The program did not call `save_checkpoint`, so a thread writes the shard while the program continues.
            self._serve(owner, note, start=self._start_thread)
        finally:
            self._mutex.release()
        return None

    def _serve(self, owner: Savable, note: dict[str, Any], start: Callable[[Callable[[], None]], None]) -> None:
        """Write this rank's shard without a call of its program, unless the save was refused or already served."""
        if self._participant.take(note) and "refused" not in note:
            writer = RankShardWriter(self._board, self._staging, SaveRequest(**note))
            with writer.reporting():
                start(partial(self._join, owner, writer))

    def _join(self, owner: Savable, writer: RankShardWriter) -> None:
        """Write this rank's shard for a save that its program did not call. Errors are raised on rank 0 only."""
        try:
            with writer.reporting():
                if writer.request.background:
                    # Set before rank 0 sees the copy and lets the program continue to its next step.
                    self._copying = writer
                writer.prepare(owner, joined=True)
                writer.complete()
        except Exception:
            logger.exception("rank %d cannot join the save of %s", self._rank, writer.request.tag)


def _warn_of_copy(error: Exception) -> None:
    logger.warning("onefold.peer_copies: %s. The last complete copy is kept", error)


@contextmanager
def _failing_together(writer: RankShardWriter, conclude: Callable[[], None]) -> Iterator[None]:
    """Report an error of the block to all ranks, and conclude the save, which raises the errors of all ranks."""
    try:
        with writer.reporting():
            yield
    except Exception:
        conclude()
        raise
    except BaseException:  # a KeyboardInterrupt takes precedence over the errors of other ranks
        with suppress(SaveError, RankTimeout):
            conclude()
        raise


def _listen(reference: weakref.ref[SaveCoordinator], stop: threading.Event) -> None:
    """Run the listener's thread.

    An error other than a failure of the store ends the thread and its heartbeats, so that no rank waits forever.
    """
    since: float | None = None
    while not stop.wait(PERIOD):
        saver = reference()
        if saver is None:
            return
        with suppress(RuntimeError):  # the node of the store may have exited
            since = saver.listen(since)
        del saver


# -- rank 0 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartedSave:
    """A save that rank 0 has requested, with the lock of its data folder."""

    request: SaveRequest
    header: SaveHeader
    slots: Sequence[Slot]
    lock: ExitStack


class SavePublisher:
    """The role of rank 0: start each save with a request to all ranks, and conclude it with a verdict."""

    def __init__(self, board: Board, after_publish: AfterPublish, written_by: str) -> None:
        self._board, self._after_publish, self._written_by = board, after_publish, written_by
        self._num_ranks = board.group.size
        self._number = 0

    def start(
        self, owner: Savable, options: SaveOptions, make_header: Callable[[], SaveHeader], *, is_copy: bool = False
    ) -> StartedSave:
        """Create the data folder and post the request. On an error, post a refusal and raise.

        A full disk declines a peer copy, on all ranks.
        """
        self._number += 1
        steps, lock, header = owner.steps_done(), ExitStack(), None
        try:
            header = make_header()
            if steps is None:
                raise SaveError("the last step failed half-way, so nothing can be saved. Load the last checkpoint.")
            tree, tensors = plain_data.encode(header.state, "state")
            save_dir = absolute(place(options.save_dir))
            tag_folder = save_dir / folder.check_tag(options.tag)
            data = lock.enter_context(folder.new_data_folder(tag_folder, private=options.private))
            given = {**asdict(options), "save_dir": str(save_dir)}
            request = SaveRequest(**given, number=self._number, steps=steps, data=data.name, buffers=header.buffers)
            self._post(asdict(request))
        except BaseException as error:
            lock.close()
            refused = f"{type(error).__name__}: {error}"
            # Without a header, the error is one of the program.
            is_of_storage = header is not None and isinstance(error, OSError)
            declines = is_copy and is_of_storage
            with suppress(RuntimeError):  # the store may be unreachable
                note = {"number": self._number, "steps": steps, "tag": options.tag}
                self._post({**note, "refused": BUSY if declines else refused})
            if declines:
                raise CopyDeclined(f"the copy {options.tag} cannot begin: {error}") from error
            if is_of_storage:
                raise SaveError(f"cannot save to {options.save_dir}, tag {options.tag}: {error}") from error
            raise
        slots = [Slot.whole(f"state/{key}", tensor) for key, tensor in tensors.items()]
        return StartedSave(request, replace(header, state=tree), slots, lock)

    def decline(self, owner: Savable, tag: str) -> None:
        """Post to the other ranks that no peer copy begins now."""
        self._number += 1
        self._post({"number": self._number, "steps": owner.steps_done(), "tag": tag, "refused": BUSY})

    def _post(self, note: dict[str, Any]) -> None:
        """Post a note under its own number, so that slow ranks miss none, and the number of the newest note."""
        self._board.post(f"request/{note['number']}", note)
        self._board.post("requests", {"number": note["number"]})
        if note["number"] > REMEMBERED:
            self._board.forget(f"request/{note['number'] - REMEMBERED}")

    def await_phase(self, request: SaveRequest, phase: Phase) -> None:
        """Wait until every rank has reached a phase. Raise a SaveError with the reasons of ranks that failed before."""
        answers: dict[int, str] = {}

        def missing() -> list[int]:
            for rank in range(self._num_ranks):
                note = self._board.read(f"part/{rank}") if rank not in answers else None
                if note is not None and (note["number"], note["phase"]) >= (request.number, phase):
                    # A note of a later save implies that this save has ended.
                    # All ranks report a failure after this phase in the same step; see `conclude`.
                    has_failed = note["number"] == request.number and note.get("reached", phase) < phase
                    answers[rank] = note["error"] if has_failed else ""
            return [rank for rank in range(self._num_ranks) if rank not in answers]

        self._board.wait(lambda: not missing(), missing, f"save_checkpoint of {request.tag}")
        if problems := [f"rank {rank}: {error}" for rank, error in sorted(answers.items()) if error]:
            raise SaveError("; ".join(problems))

    def conclude(self, save: StartedSave) -> None:
        """Wait for the shards of all ranks and publish the checkpoint, or post the error to all ranks and raise it."""
        request = save.request
        with save.lock:
            try:
                self.await_phase(request, Phase.WRITTEN)
                self._publish(request, save.header)
            except BaseException as error:
                message = f"checkpoint {request.tag} was not saved to {request.save_dir}: {error}"
                with suppress(RuntimeError):
                    self._board.post("verdict", {"number": request.number, "error": message})
                # If the manifest is published, only the write of `latest` has failed, and the data is kept.
                if not folder.is_published(request.folder, as_latest=False):
                    with suppress(OSError):
                        remove_tree(request.folder)
                        request.folder.parent.rmdir()  # unless the tag has an earlier checkpoint
                if isinstance(error, Exception):
                    raise SaveError(message) from error
                raise
            self._board.post("verdict", {"number": request.number})
            if not request.is_copy:
                self._clean(request)

    def _publish(self, request: SaveRequest, header: SaveHeader) -> None:
        if isinstance(copy := request.folder.parent, Path) and request.is_copy:
            write_header(
                copy,
                global_steps=request.steps,
                parameters=header.parameters,
                state=header.state,
                aliases=header.aliases,
                left_out=header.left_out,
                writer=self._written_by,
            )
            return
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
        folder.publish(place(request.save_dir), manifest, save_latest=request.save_latest)

    def _clean(self, request: SaveRequest) -> None:
        """Remove temporary files and old checkpoints after publishing. Log a warning if this fails."""
        try:
            for rank in range(self._num_ranks):
                (request.folder / record_name(rank)).unlink(missing_ok=True)
            folder.clean(request.folder.parent)
            self._after_publish(request.folder.parent)
        except OSError as error:
            logger.warning("checkpoint %s is saved, but old files cannot be removed: %s", request.tag, error)


def _read_record(data: Place, rank: int) -> ShardRecord:
    try:
        record = ShardRecord.from_json(json.loads(read_small(data / record_name(rank), MAX_BYTES)))
        size = file_size(data.parent / record.file.name)
    except FileNotFoundError:
        raise SaveError(
            f"rank {rank} has written its file, but rank 0 does not find it in {data}. Save to a file system that all "
            "ranks share."
        ) from None
    if size != record.file.nbytes:
        raise SaveError(f"rank {rank} wrote {record.file.nbytes} bytes, but rank 0 finds {size} of them in {data}")
    return record
