"""Saving: rank 0 requests a save, every rank writes its shard file, rank 0 publishes the checkpoint. Here: its words.

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

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from onefold.checkpoint.format.shard_files import Slot


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


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay: the newest, and those of every so many steps."""

    keep_last: int | None = None
    keep_every: int | None = None


class Savable(Protocol):
    """The engine, as far as saving knows it."""

    def steps_done(self) -> int | None:
        """The number of steps behind what is held now; None in the middle of one."""

    def part_of(self, request: SaveRequest, *, joined: bool) -> tuple[list[Slot], dict[str, Any]]:
        """This rank's slots, and its own state. `joined`: not from a call of its program."""
        ...
