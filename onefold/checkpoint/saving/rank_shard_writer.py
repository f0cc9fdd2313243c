"""The shard of one rank in a save: collect its slots, copy them to host memory in a background save, and write them.

[Note: participation in a save]
A save uses no collectives. The ranks exchange notes on the board:

    rank 0                                     on the board         any other rank
    SavePublisher.start                     -> request           -> SaveParticipant.find_request, or the listener
    RankShardWriter.prepare: collect slots,                         RankShardWriter.prepare
        copy weights                        -> WEIGHTS_COPIED <-
    RankShardWriter.complete: copy states,  -> STATES_COPIED  <-    RankShardWriter.complete
        write                               -> WRITTEN        <-
    SavePublisher.conclude: publish         -> verdict           -> SaveParticipant.await_verdict

A rank that calls `save_checkpoint` writes its shard in that call. If the program calls it on rank 0 only, the listener
thread of each other rank writes the shard. This is safe because the saved state changes only in a step, no step can
complete without rank 0, and the listener waits until its rank has completed the same step. The random states and the
data position are those after that step.

Only a background save copies the state. Weights and buffers, which the program may write to, are copied to host memory
before `save_checkpoint` returns. Optimizer states are copied during the next forward and backward, and rank 0 does not
start the next step before all ranks have copied theirs.

An exception in any phase and thread is posted as FAILED with its reason before it is raised. The verdict contains the
reasons of all ranks, and all ranks raise it. A rank without heartbeats counts as failed after 15 s.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.folder import LOCK
from onefold.checkpoint.format.peer_copy import make_room, node_folder
from onefold.checkpoint.format.shard_files import Slot, write_shard
from onefold.comm import Board, local_rank
from onefold.offload.buffer import Buffer
from onefold.plan.layout import round_up
from onefold.storage.place import Place, make_private_folder, place, replace_file

# A shared file system may show a new folder of another node with a delay.
_VISIBLE_SECONDS = 10.0
_ALIGNMENT = 64
# Number of elements per copy.
_COPIED = 1 << 24


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


class Phase(IntEnum):
    """Progress of one rank in a save. Phases are entered in increasing order and end with WRITTEN or FAILED."""

    COLLECTING = 0
    WEIGHTS_COPIED = 1
    """In a background save, the program may write to weights and buffers from this phase on."""
    STATES_COPIED = 2
    """In a background save, the next step may change optimizer states from this phase on."""
    WRITTEN = 3
    """The shard file is flushed to disk."""
    FAILED = 4


@dataclass(frozen=True)
class SaveOptions:
    """The arguments of `save_checkpoint`."""

    save_dir: str
    tag: str
    save_latest: bool
    exclude_frozen: bool
    background: bool
    private: bool
    """Whether only this user can read the files."""
    kept_copies: list[str] | None = field(default=None, kw_only=True)
    """For a peer copy, the copies that are not removed before it is written. None for a checkpoint."""

    @property
    def is_copy(self) -> bool:
        """Whether a peer copy is written ([Note: peer copies]), to the folder of each node."""
        return self.kept_copies is not None


@dataclass(frozen=True)
class SaveRequest(SaveOptions):
    """The request that rank 0 posts to all ranks."""

    number: int
    steps: int
    """The step after which the state is saved."""
    data: str
    """The name of the data folder."""
    buffers: dict[str, int]
    """The checksums of rank 0's buffers. Other ranks write only the buffers that differ."""

    @property
    def folder(self) -> Place:
        return (node_folder() if self.is_copy else place(self.save_dir)) / self.tag / self.data


@dataclass(frozen=True)
class SaveHeader:
    """The content of the manifest that rank 0 provides: everything except the shard files."""

    state: dict[str, Any]
    parameters: dict[str, int | None]
    aliases: dict[str, str]
    left_out: list[str]
    buffers: dict[str, int]


class Savable(Protocol):
    """The interface of the engine that saving uses."""

    def steps_done(self) -> int | None:
        """Return the number of completed steps, or None during a step."""

    def part_of(self, request: SaveRequest, *, joined: bool) -> tuple[list[Slot], dict[str, Any]]:
        """Return this rank's slots and its per-rank state. With `joined`, the program did not call for the save."""
        ...


class RankShardWriter:
    """The shard of one rank in one save. Its phase is posted on the board, where other ranks wait for it.

    `prepare` runs in the thread that saves. `complete` runs in the same thread or, in a background save, in another
    thread during training.
    """

    def __init__(self, board: Board, staging: Staging, request: SaveRequest) -> None:
        self.request = request
        self.phase = Phase.COLLECTING
        self.states_copied = threading.Event()
        """Also set if the save has failed, so that threads that wait for the copy continue."""
        self._board, self._staging, self._rank = board, staging, board.group.rank
        self._slots: list[Slot] = []
        self._own: Any = None
        self._states: list[tuple[Slot, Slot]] = []

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Post an exception of the block to all ranks before it is raised."""
        try:
            yield
        except BaseException as error:
            if self.phase is not Phase.FAILED:
                with suppress(RuntimeError):  # the node of the store may have exited, so that no rank is waiting
                    self._enter(Phase.FAILED, error=f"{type(error).__name__}: {error}", reached=self.phase)
            raise

    def prepare(self, owner: Savable, extra: Sequence[Slot] = (), *, joined: bool) -> None:
        """Collect the slots of this rank. In a background save, copy the weights and buffers to host memory."""
        steps, request = owner.steps_done(), self.request
        if steps != request.steps:
            raise SaveError(f"this rank has done {steps} steps, but rank 0 saves the state after {request.steps}")
        slots, own = owner.part_of(request, joined=joined)
        self._own, tensors = plain_data.encode(own, f"rank {self._rank}")
        slots += [Slot.whole(f"rank/{self._rank}/{key}", tensor) for key, tensor in tensors.items()]
        if request.background:
            slots = self._copy_weights(slots)
            self._enter(Phase.WEIGHTS_COPIED)
        self._slots = [*slots, *extra]

    def _copy_weights(self, slots: Sequence[Slot]) -> list[Slot]:
        """Copy all slots except optimizer states to host memory, and return the slots to write.

        `complete` copies the states, which change only in steps. Slots on disk are not copied, but written first.
        """
        on_disk = [slot for slot in slots if slot.is_on_disk]
        in_memory = [slot for slot in slots if not slot.is_on_disk]
        copies = self._staging.places(in_memory)
        pairs = list(zip(in_memory, copies, strict=True))
        self._states = [pair for pair in pairs if pair[0].name.startswith("optimizer/")]
        copy_slots([pair for pair in pairs if not pair[0].name.startswith("optimizer/")])
        return [*on_disk, *copies]

    def complete(self) -> None:
        """Write the shard file and its record. In a background save, copy the optimizer states first."""
        copy_slots(self._states)
        if not any(slot.is_on_disk for slot in self._slots):
            self._let_states_change()
        folder = self.request.folder
        if isinstance(folder, Path) and self.request.kept_copies is not None:
            kept = {*self.request.kept_copies, self.request.tag}
            make_room(node_folder(), kept, self._rank, is_first_of_node=local_rank() == 0)
            make_private_folder(folder)
        else:
            _await_folder(folder)
        path = folder / f"rank-{self._rank:05}.safetensors"
        record = write_shard(path, self._slots, self._own, self._let_states_change)
        replace_file(folder / record_name(self._rank), json.dumps(record.as_json()).encode())
        self._enter(Phase.WRITTEN)

    def _let_states_change(self) -> None:
        if self.request.background and self.phase < Phase.STATES_COPIED:
            self._enter(Phase.STATES_COPIED)

    def _enter(self, phase: Phase, **more: str | int) -> None:
        assert self.phase < phase, (self.phase, phase)
        self.phase = phase
        try:
            self._board.post(f"part/{self._rank}", {"number": self.request.number, "phase": phase, **more})
        finally:
            if phase >= Phase.STATES_COPIED:
                self.states_copied.set()


def record_name(rank: int) -> str:
    """Return the name of the file that describes a rank's shard to rank 0 until the checkpoint is published."""
    return f"rank-{rank:05}.json"


def _await_folder(path: Place) -> None:
    started = time.monotonic()
    while not (path / LOCK).exists():
        if time.monotonic() - started > _VISIBLE_SECONDS:
            raise FileNotFoundError(
                f"{path} is missing, but rank 0 has created it. Save to a file system that all ranks share."
            )
        time.sleep(0.05)


class Staging:
    """Host memory for background saves, allocated by the first save and reused by later ones.

    Copies to newly allocated memory are several times slower, because its pages are not mapped yet.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def places(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the same slots in staging memory, without copying their values.

        Encoded values remain encoded in staging memory and are decoded when they are written to the file.
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
    """Copy source slots to target slots. Copies from a GPU run on a separate stream."""
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
