"""One rank's part of a save: collected, copied where training goes on meanwhile, written, and told on the board."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from onefold.checkpoint import folder, staging, tagged
from onefold.checkpoint.orders import Order, Savable, await_folder, record_name
from onefold.checkpoint.shards import Slot, write_shard
from onefold.comm import Board
from onefold.offload.nvme import DiskTensor


class Parts:
    """This rank's parts of all saves."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._rank = board.group.rank
        self._staging = staging.Staging()
        self._free_disk: Callable[[], None] = _nothing

    def collect(self, owner: Savable, order: Order, *, joined: bool) -> tuple[list[Slot], Any]:
        """What this rank writes, and its own state as a tree."""
        slots, own = owner.part_of(order, joined=joined)
        tree, tensors = tagged.encode(own, f"rank {self._rank}")
        return slots + [Slot.whole(f"rank/{self._rank}/{key}", tensor) for key, tensor in tensors.items()], tree

    def copy(self, order: Order, slots: list[Slot]) -> tuple[list[Slot], Callable[[], None], threading.Event]:
        """Copy what anybody may write to now. The rest, which only steps change, is copied by the function that is
        returned; the event says that it is. What rests on a disk is not copied: it is written first.
        """
        in_memory = [slot for slot in slots if not isinstance(slot.memory, DiskTensor)]
        on_disk = [slot for slot in slots if isinstance(slot.memory, DiskTensor)]
        places = self._staging.places(in_memory)
        pairs = list(zip(in_memory, places, strict=True))
        states = [pair for pair in pairs if pair[0].name.startswith("optimizer/")]
        staging.copy([pair for pair in pairs if not pair[0].name.startswith("optimizer/")])
        self.note(order, "begun")
        copied = threading.Event()

        def told() -> None:
            self._free_disk = _nothing
            try:
                self.note(order, "copied")
            finally:
                copied.set()

        def copy_rest() -> None:
            try:
                staging.copy(states)
            except BaseException:
                copied.set()
                raise
            if on_disk:
                self._free_disk = told
            else:
                told()

        return [*on_disk, *places], copy_rest, copied

    def write(self, order: Order, slots: list[Slot], own: Any) -> None:
        try:
            await_folder(order.folder)
            path = order.folder / f"rank-{self._rank:05}.safetensors"
            record = write_shard(path, slots, own, lambda: self._free_disk())
            folder.replace_file(order.folder / record_name(self._rank), json.dumps(record.as_json()).encode())
        except Exception as error:
            self._free_disk()
            self.fail(order, error)
            return
        self.note(order, "written")

    def note(self, order: Order, phase: str, **more: str) -> None:
        self._board.post(f"note/{self._rank}", {"number": order.number, "phase": phase, **more})

    def fail(self, order: Order, error: Exception) -> None:
        self.note(order, "failed", error=f"{type(error).__name__}: {error}")


def _nothing() -> None:
    pass
