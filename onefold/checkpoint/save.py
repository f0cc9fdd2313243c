"""Saving: rank 0 gives an order, every rank writes its part, rank 0 publishes.

[Note: who joins a save]
Nothing here is a collective. Rank 0 posts an order on the board, each rank answers with a note when its part is
written, and rank 0 answers these with a verdict. A rank that calls `save_checkpoint` does its part there and then. For
one that does not, because its program saves on rank 0 alone, a thread that listens to the board does it: what is saved
changes only in a step, no step can pass without rank 0, and the thread waits until this rank stands after the same
step as rank 0. Random numbers and data position are then those after that step.

A background save is the same, but each rank answers first when it has copied its part to host memory. Weights and
buffers, which a program may write to, are copied before `save_checkpoint` returns; optimizer states beside the next
forward and backward. Rank 0 does not come to the next step before all ranks have copied.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from onefold.checkpoint import folder, tagged
from onefold.checkpoint.orders import (
    Head,
    Order,
    Retention,
    Savable,
    SaveError,
    as_order,
    publish,
    published,
    stands,
    tidy,
)
from onefold.checkpoint.part import Parts
from onefold.checkpoint.shards import Slot
from onefold.comm import Board, Disagreement, Guard, Silent
from onefold.log import logger

PERIOD = 0.25
# Before the listener does a rank's part, its own program gets this long to come to its own call.
COURTESY = 0.5
# How long a rank whose program is through with the engine waits for a last order, unless rank 0 is through as well.
LINGER = 3.0
# Orders that stay on the board and in memory for a rank that comes late to them.
_REMEMBERED = 64


class Saver:
    """One rank's side of all saves of an engine."""

    def __init__(self, owner: Savable, board: Board, guard: Guard, retention: Retention, writer: str) -> None:
        self._owner = weakref.ref(owner)
        self._board = board
        self._guard = guard
        self._rank = board.group.rank
        self._retention = retention
        self._writer = writer
        self._number = 0
        self._served = 0
        # Orders that the listener has dealt with, for calls of this rank's program that come after it.
        self._passed: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._parts = Parts(board)
        self._copying: Callable[[], None] = _nothing
        # One part at a time, whichever thread does it.
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._listener: threading.Thread | None = None
        if board.group.size > 1:
            self._listener = threading.Thread(target=_listen, args=(weakref.ref(self), self._stop), daemon=True)
            self._listener.start()
            weakref.finalize(self, self._stop.set)

    # -- what the engine calls ----------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str,
        tag: str,
        head: Callable[[], Head],
        *,
        save_latest: bool,
        exclude_frozen: bool,
        background: bool,
        validate_tag: Callable[[str], None],
    ) -> None:
        """`head` is called on rank 0 only."""
        owner = self._owner()
        assert owner is not None
        with self._mutex:
            self.finish()
            if self._rank == 0:
                self._lead(owner, save_dir, tag, head, save_latest, exclude_frozen, background)
            else:
                self._follow(owner, tag, validate_tag)
            if not background:
                self.finish()

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
        """Whether a save in the background has ended badly and nobody was told yet."""
        return self._error is not None

    def stop(self) -> None:
        """The engine goes: no more listening; what is under way is finished."""
        self._stop.set()
        # The last one to hold the engine may be one of these threads.
        for thread in (self._thread, self._listener):
            if thread is not None and thread is not threading.current_thread() and thread.is_alive():
                thread.join()
        if self._error is not None:
            logger.error("%s", self._error)

    def linger(self, owner: Savable, seconds: float | None) -> None:
        """The program is through with the engine, here: rank 0 may still save, and then needs this rank's part.

        For so many seconds, or until rank 0 is through as well, or gone.
        """
        if self._stop.is_set() or self._board.group.size == 1:
            return
        if self._rank == 0:
            self._board.post("left", {})
            return
        started = time.monotonic()

        def done() -> bool:
            nonlocal started
            note = self._new_order()
            if note is not None:
                with self._mutex:
                    if note["number"] > self._served:
                        self._served = note["number"]
                        if "refused" not in note:
                            self._join(owner, as_order(note), owner.steps_done())
                started = time.monotonic()
            over = seconds is not None and time.monotonic() - started > seconds
            return over or self._board.read("left") is not None or self._guard.verdict is not None

        with suppress(Silent):
            if seconds is not None:
                self._board.wait(done, lambda: [0], "the end of the program")
            else:
                with self._guard.waiting("the end of its program"):
                    self._board.wait(done, lambda: [0], "the end of the program")

    # -- rank 0 -------------------------------------------------------------------------------------------------

    def _lead(
        self,
        owner: Savable,
        save_dir: str,
        tag: str,
        make_head: Callable[[], Head],
        save_latest: bool,
        exclude_frozen: bool,
        background: bool,
    ) -> None:
        self._number += 1
        self._served = self._number
        steps = owner.steps_done()
        held = ExitStack()
        try:
            head = make_head()
            if steps is None:
                raise SaveError("the last step failed half-way, so there is no state to save: load the last checkpoint")
            tree, tensors = tagged.encode(head.state, "state")
            tag_folder = Path(os.path.abspath(save_dir), folder.check_tag(tag))
            into = held.enter_context(folder.new_data_folder(tag_folder))
            order = Order(
                number=self._number,
                steps=steps,
                save_dir=os.path.abspath(save_dir),
                tag=tag,
                data=into.name,
                save_latest=save_latest,
                background=background,
                exclude_frozen=exclude_frozen,
                buffers=head.buffers,
            )
            self._post(asdict(order))
        except Exception as error:
            held.close()
            refused = f"{type(error).__name__}: {error}"
            self._post({"number": self._number, "steps": steps, "tag": tag, "refused": refused})
            if isinstance(error, OSError):
                raise SaveError(f"cannot save to {save_dir}, tag {tag}: {error}") from error
            raise
        more = [Slot.whole(f"state/{key}", tensor) for key, tensor in tensors.items()]

        def finish() -> None:
            with held:
                self._publish(order, replace(head, state=tree))

        self._begin(owner, order, more, finish)

    def _post(self, note: dict[str, Any]) -> None:
        """One note an order, so that a rank misses none, and the number of the newest."""
        self._board.post(f"order/{note['number']}", note)
        self._board.post("orders", {"number": note["number"]})
        if note["number"] > _REMEMBERED:
            self._board.forget(f"order/{note['number'] - _REMEMBERED}")

    def _publish(self, order: Order, head: Head) -> None:
        """Once every rank has written: make it the tag's, or fail on every rank alike."""
        try:
            self._await_notes(order, ("written",))
            publish(order, head, self._board.group.size, self._writer)
        except Exception as error:
            message = f"checkpoint {order.tag} was not saved to {order.save_dir}: {error}"
            with suppress(RuntimeError):
                self._board.post("verdict", {"number": order.number, "error": message})
            if order.data not in published(order):  # else the manifest stood already, and `latest` failed
                with suppress(OSError):
                    shutil.rmtree(order.folder)
                    order.folder.parent.rmdir()  # unless the tag has an earlier checkpoint
            raise SaveError(message) from error
        self._board.post("verdict", {"number": order.number})
        tidy(order, self._board.group.size, self._retention)

    def _await_notes(self, order: Order, phases: tuple[str, ...]) -> None:
        answers: dict[int, str] = {}

        def missing() -> list[int]:
            for rank in range(self._board.group.size):
                note = self._board.read(f"note/{rank}") if rank not in answers else None
                if note is not None and note["number"] == order.number and note["phase"] in (*phases, "failed"):
                    answers[rank] = note.get("error", "")
            return [rank for rank in range(self._board.group.size) if rank not in answers]

        self._board.wait(lambda: not missing(), missing, f"save_checkpoint of {order.tag}")
        problems = [f"rank {rank}: {error}" for rank, error in sorted(answers.items()) if error]
        if problems:
            raise SaveError("; ".join(problems))

    # -- the others ---------------------------------------------------------------------------------------------

    def _follow(self, owner: Savable, tag: str, validate_tag: Callable[[str], None]) -> None:
        steps = owner.steps_done()
        passed = self._claim(steps, tag)
        if passed is not None:
            order = as_order(passed)
            validate_tag(order.tag)
            self._catch(lambda: self._await_verdict(order))
            return
        order = as_order(self._await_order())

        def check() -> None:
            validate_tag(order.tag)
            if steps != order.steps:
                raise SaveError(f"this rank stands after step {steps}, rank 0 saves what is after step {order.steps}")

        self._begin(owner, order, [], lambda: self._await_verdict(order), check)

    def _claim(self, steps: int | None, tag: str) -> dict[str, Any] | None:
        """The order, already dealt with, that a call of this rank's program stands for, and none before it."""
        same = [note for note in self._passed if note["steps"] == steps]
        found = next((note for note in same if note["tag"] == tag), same[0] if same else None)
        while found is not None and self._passed.popleft() is not found:
            pass
        return found

    def _await_order(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def ready() -> bool:
            if self._guard.verdict is not None:
                raise Disagreement(self._guard.verdict)
            note = self._new_order()
            found.extend([note] if note is not None else [])
            return bool(found)

        with self._guard.waiting("save_checkpoint, for rank 0"):
            self._board.wait(ready, lambda: [0], "save_checkpoint")
        self._served = found[0]["number"]
        return found[0]

    def _new_order(self) -> dict[str, Any] | None:
        newest = self._board.read("orders")
        if newest is None or newest["number"] <= self._served:
            return None
        return self._board.read(f"order/{max(self._served + 1, newest['number'] - _REMEMBERED + 1)}")

    def _await_verdict(self, order: Order) -> None:
        def verdict() -> dict[str, Any] | None:
            try:
                note = self._board.read("verdict")
            except RuntimeError:  # rank 0 held the board and has ended: what it left on disk speaks for it
                return {} if stands(order) else {"error": f"rank 0 has ended before {order.tag} was published"}
            if note is None or note["number"] < order.number:
                return None
            return note if note["number"] == order.number else {}  # rank 0 has told its own program long ago

        self._board.wait(lambda: verdict() is not None, lambda: [0], f"save_checkpoint of {order.tag}")
        found = verdict()
        assert found is not None
        if "error" in found:
            raise SaveError(found["error"])

    # -- a part -------------------------------------------------------------------------------------------------

    def _begin(
        self,
        owner: Savable,
        order: Order,
        more: list[Slot],
        then: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Do this rank's part, here or in the background; afterwards `then`."""
        try:
            check()
            slots, own = self._parts.collect(owner, order, joined=False)
            slots, copy_rest = self._copy(order, slots) if order.background else (slots, _nothing)
        except Exception as error:
            self._parts.fail(order, error)
            then()
            raise

        def work() -> None:
            try:
                copy_rest()
            except Exception as error:
                # Told before anything is waited for: other ranks, and this one's next step, wait for the copy.
                self._parts.fail(order, error)
                then()
                raise
            self._parts.write(order, slots + more, own)
            then()

        if order.background:
            self._thread = threading.Thread(target=self._catch, args=(work,), name="onefold-save")
            self._thread.start()
            if self._rank == 0:
                # From now on any rank's program may write to its weights.
                try:
                    self._await_notes(order, ("begun", "copied", "written"))
                except (SaveError, Silent):
                    self.finish()
                    raise
        else:
            self._catch(work)

    def _copy(self, order: Order, slots: list[Slot]) -> tuple[list[Slot], Callable[[], None]]:
        """Into other memory. What is returned second copies what only steps change; `let_change` waits for it."""
        places, copy_rest, copied = self._parts.copy(order, slots)

        def wait() -> None:
            copied.wait()
            if self._rank == 0:
                # No rank takes the next step before rank 0 is there.
                with suppress(SaveError, Silent):  # what failed is told by the thread that publishes
                    self._await_notes(order, ("copied", "written"))

        self._copying = wait
        return places, copy_rest

    def let_change(self) -> None:
        """Before optimizer states change: until the save in the background has copied them."""
        copying, self._copying = self._copying, _nothing
        copying()

    def _catch(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    # -- the listener -------------------------------------------------------------------------------------------

    def listen(self, since: float | None) -> float | None:
        """One look at the board. Returns when an order was first seen that this rank has not served yet."""
        note = self._new_order()
        busy = self._mutex.locked() or (self._thread is not None and self._thread.is_alive())
        if note is not None or busy or self._rank == 0:
            self._board.beat()  # for whoever waits for this rank's part, or for rank 0's order
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
            if note["number"] > self._served:
                self._served = note["number"]
                self._passed.append(note)
                if "refused" not in note:
                    # Its program does not save: this rank's part is done beside whatever it waits for.
                    self._thread = threading.Thread(
                        target=self._join, args=(owner, as_order(note), steps), name="onefold-save"
                    )
                    self._thread.start()
        finally:
            self._mutex.release()
        return None

    def _join(self, owner: Savable, order: Order, steps: int | None) -> None:
        try:
            if steps != order.steps:
                raise SaveError(f"this rank stands after step {steps}, rank 0 saves what is after step {order.steps}")
            slots, own = self._parts.collect(owner, order, joined=True)
            if order.background:
                slots, copy_rest = self._copy(order, slots)
                copy_rest()
        except Exception as error:
            self._parts.fail(order, error)
            logger.exception("rank %d could not join the save of %s", self._rank, order.tag)
            return
        self._parts.write(order, slots, own)


def _nothing() -> None:
    pass


def _listen(reference: weakref.ref[Saver], stop: threading.Event) -> None:
    since: float | None = None
    while not stop.wait(PERIOD):
        saver = reference()
        if saver is None:
            return
        with suppress(RuntimeError):  # the store's host may be gone already
            since = saver.listen(since)
        del saver
