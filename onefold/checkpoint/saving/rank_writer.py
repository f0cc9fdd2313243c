"""One rank's part of a save: its slots are collected, in a background save copied to host memory, and written.

[Note: who joins a save]
Nothing here is a collective: ranks leave notes on the board.

    rank 0                                   on the board         any other rank
    Leader.open: header, data folder      -> request           -> Follower.find_request, or the listener
    RankWriter.prepare: collect,                                  RankWriter.prepare
        copy weights                      -> WEIGHTS_COPIED <-
    RankWriter.complete: copy states,     -> STATES_COPIED  <-    RankWriter.complete
        write                             -> WRITTEN        <-
    Leader.conclude: publish the manifest -> verdict           -> Follower.await_verdict

A rank that calls `save_checkpoint` does its part there and then. For one that does not, because its program saves on
rank 0 alone, the listener, a thread, does it: what is saved changes only in a step, no step can pass without rank 0,
and the thread waits until this rank stands after the same step. Random numbers and data position are those after it.

Only a background save copies. Weights and buffers, which a program may write to, are copied to host memory before
`save_checkpoint` returns; optimizer states beside the next forward and backward, and rank 0 does not come to the next
step before all ranks have copied theirs.

Whatever is raised in a phase, in any thread, is posted as FAILED with its reason before it is raised. The verdict then
has the reasons of all ranks, and all raise it. A rank that beats no more is given up after 15 s.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.files import replace_file
from onefold.checkpoint.format.shard_files import Slot, write_shard
from onefold.comm import Board
from onefold.offload.buffer import Buffer
from onefold.plan.layout import round_up

# A shared file system may show another node's new folder late.
_VISIBLE_SECONDS = 10.0
_ALIGNMENT = 64
# Elements that are copied at once.
_COPIED = 1 << 24


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are as they were."""


class Phase(IntEnum):
    """How far one rank's part of a save is. A part goes upwards only, and ends with one of the last two."""

    COLLECTING = 0
    WEIGHTS_COPIED = 1
    """In a background save: the program may write to weights and buffers."""
    STATES_COPIED = 2
    """In a background save: the next step may change optimizer states."""
    WRITTEN = 3
    """The shard file is flushed."""
    FAILED = 4


@dataclass(frozen=True)
class SaveOptions:
    """What a program asks for by `save_checkpoint`."""

    save_dir: str
    tag: str
    save_latest: bool
    exclude_frozen: bool
    background: bool


@dataclass(frozen=True)
class SaveRequest(SaveOptions):
    """What rank 0 tells all ranks of a save."""

    number: int
    steps: int
    """The state after this step is saved."""
    data: str
    """The name of the data folder."""
    buffers: dict[str, int]
    """The checksums of rank 0's buffers: other ranks write those of theirs that differ."""

    @property
    def folder(self) -> Path:
        return Path(self.save_dir, self.tag, self.data)


@dataclass(frozen=True)
class SaveHeader:
    """What rank 0 alone puts into the manifest: everything that is not a shard file."""

    state: dict[str, Any]
    parameters: dict[str, int | None]
    aliases: dict[str, str]
    left_out: list[str]
    buffers: dict[str, int]


class Savable(Protocol):
    """The engine, as far as saving knows it."""

    def steps_done(self) -> int | None:
        """The number of steps behind what is held now; None in the middle of one."""

    def part_of(self, request: SaveRequest, *, joined: bool) -> tuple[list[Slot], dict[str, Any]]:
        """This rank's slots, and its own state. `joined`: not from a call of its program."""
        ...


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
        """Return the same slots in the memory of the staging area, which only the save writes to.

        Encoded values stay encoded there, and are decoded as they are written to the file.
        """
        parts = [slot.buffer.tensors for slot in slots]
        size = sum(round_up(part.nbytes, _ALIGNMENT) for some in parts for part in some)
        if self._memory.numel() < size:
            pinned = any(part.is_cuda for some in parts for part in some)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        found, offset = [], 0
        for slot, some in zip(slots, parts, strict=True):
            taken = []
            for part in some:
                taken.append(self._memory[offset : offset + part.nbytes].view(part.dtype))
                offset += round_up(part.nbytes, _ALIGNMENT)
            found.append(replace(slot, buffer=slot.buffer.like(iter(taken))))
        return found


def copy_slots(pairs: Sequence[tuple[Slot, Slot]]) -> None:
    """Copy from slots to their places; on a GPU beside whatever computes there."""
    devices = {slot.buffer.device for slot, _ in pairs if slot.buffer.is_cuda}
    streams = [torch.cuda.Stream(device) for device in devices]
    with ExitStack() as stack:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        for slot, place in (pair for pair in pairs if pair[0].buffer.numel()):
            for part, memory in zip(slot.buffer.parts, place.buffer.tensors, strict=True):
                for source, target in zip(part.split(_COPIED), memory.split(_COPIED), strict=True):
                    target.copy_(Buffer.of(source).fetch(), non_blocking=True)
        for stream in streams:
            stream.synchronize()
