"""One rank's part of a save: its slots are collected, in a background save copied to host memory, and written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.files import replace_file
from onefold.checkpoint.format.shard_files import Slot, write_shard
from onefold.checkpoint.saving.request import Phase, Savable, SaveError, SaveRequest
from onefold.comm import Board

# A shared file system may show another node's new folder late.
_VISIBLE_SECONDS = 10.0
_ALIGNMENT = 64


class RankWriter:
    """One rank's part of one save. Its phase stands on the board, where the other ranks wait for it.

    `prepare` is called by the thread that saves, `complete` by the same one or, in a background save, beside training.
    """

    def __init__(self, board: Board, staging: Staging, request: SaveRequest) -> None:
        self.request = request
        self.phase = Phase.COLLECTING
        self.states_copied = threading.Event()
        """Set as well where the part has failed: whoever waits for the copy goes on."""
        self._board, self._staging, self._rank = board, staging, board.group.rank
        self._slots: list[Slot] = []
        self._own: Any = None
        self._states: list[tuple[Slot, Slot]] = []

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """The one error path of a part: whatever is raised inside is told to all ranks, then raised here."""
        try:
            yield
        except BaseException as error:
            if self.phase is not Phase.FAILED:
                with suppress(RuntimeError):  # the store's node may be gone, and with it whoever would hear of this
                    self._enter(Phase.FAILED, error=f"{type(error).__name__}: {error}")
            raise

    def prepare(self, owner: Savable, extra: Sequence[Slot] = (), *, joined: bool) -> None:
        """Collect what this rank writes; in a background save, copy what its program may write to from now on."""
        steps, request = owner.steps_done(), self.request
        if steps != request.steps:
            raise SaveError(f"this rank stands after step {steps}, rank 0 saves what is after step {request.steps}")
        slots, own = owner.part_of(request, joined=joined)
        self._own, tensors = plain_data.encode(own, f"rank {self._rank}")
        slots += [Slot.whole(f"rank/{self._rank}/{key}", tensor) for key, tensor in tensors.items()]
        if request.background:
            slots = self._copy_weights(slots)
            self._enter(Phase.WEIGHTS_COPIED)
        self._slots = [*slots, *extra]

    def _copy_weights(self, slots: Sequence[Slot]) -> list[Slot]:
        """Copy all but optimizer states to host memory, and return the slots to write.

        States, which only steps change, are copied by `complete`; what is on a disk is not copied, but written first.
        """
        on_disk = [slot for slot in slots if slot.is_on_disk]
        in_memory = [slot for slot in slots if not slot.is_on_disk]
        copies = self._staging.places(in_memory)
        pairs = list(zip(in_memory, copies, strict=True))
        self._states = [pair for pair in pairs if pair[0].name.startswith("optimizer/")]
        copy_slots([pair for pair in pairs if not pair[0].name.startswith("optimizer/")])
        return [*on_disk, *copies]

    def complete(self) -> None:
        """In a background save, copy the optimizer states; then write the shard file and what it holds."""
        copy_slots(self._states)
        if not any(slot.is_on_disk for slot in self._slots):
            self._let_states_change()
        folder = self.request.folder
        _await_folder(folder)
        path = folder / f"rank-{self._rank:05}.safetensors"
        record = write_shard(path, self._slots, self._own, self._let_states_change)
        replace_file(folder / record_name(self._rank), json.dumps(record.as_json()).encode())
        self._enter(Phase.WRITTEN)

    def _let_states_change(self) -> None:
        if self.request.background and self.phase < Phase.STATES_COPIED:
            self._enter(Phase.STATES_COPIED)

    def _enter(self, phase: Phase, **more: str) -> None:
        assert self.phase < phase, (self.phase, phase)
        self.phase = phase
        try:
            self._board.post(f"part/{self._rank}", {"number": self.request.number, "phase": phase, **more})
        finally:
            if phase >= Phase.STATES_COPIED:
                self.states_copied.set()


def record_name(rank: int) -> str:
    """The file in which a rank tells rank 0 what it has written, until the checkpoint is published."""
    return f"rank-{rank:05}.json"


def _await_folder(path: Path) -> None:
    started = time.monotonic()
    while not path.is_dir():
        if time.monotonic() - started > _VISIBLE_SECONDS:
            raise FileNotFoundError(
                f"{path} is not there, though rank 0 has made it: save to a file system that all ranks share"
            )
        time.sleep(0.05)


class Staging:
    """Host memory for background saves: one piece, made at the first one and used again by all later ones.

    Fresh memory is several times slower to copy to than memory that has been touched.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def places(self, slots: Sequence[Slot]) -> list[Slot]:
        """The same slots with memory of the staging area, which nobody else writes to."""
        sizes = [-(-slot.memory.nbytes // _ALIGNMENT) * _ALIGNMENT for slot in slots]
        if self._memory.numel() < sum(sizes):
            pinned = any(slot.memory.is_cuda for slot in slots)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        found, offset = [], 0
        for slot, size in zip(slots, sizes, strict=True):
            memory = self._memory[offset : offset + slot.memory.nbytes].view(slot.dtype)
            found.append(replace(slot, memory=memory))
            offset += size
        return found


def copy_slots(pairs: Sequence[tuple[Slot, Slot]]) -> None:
    """Copy from slots to their places; on a GPU beside whatever computes there."""
    devices = {slot.memory.device for slot, _ in pairs if isinstance(slot.memory, torch.Tensor) and slot.memory.is_cuda}
    streams = [torch.cuda.Stream(device) for device in devices]
    with ExitStack() as stack:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        for slot, place in pairs:
            assert isinstance(slot.memory, torch.Tensor)
            assert isinstance(place.memory, torch.Tensor)
            place.memory.copy_(slot.memory, non_blocking=True)
        for stream in streams:
            stream.synchronize()
