"""What each rank publishes about its progress, and the rules that find stalled ranks from it. No threads, no store.

[Note: which ranks are stalled]
A rank is stalled if it has made no progress for the bound of the config, and does not wait for other ranks: it is in
the program, in a data loader, or waits for a disk. It finds that itself. A rank that waits for others is never stalled,
unless all ranks wait. A rank whose heartbeat does not arrive is stopped, holds Python's lock in C code, or is cut off;
the others find that. All texts are made here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


class StalledError(RuntimeError):
    """A rank has made no progress for `onefold.stall.seconds`. The process ends with `EXIT_STALLED` after it."""


@dataclass(frozen=True)
class RankBeat:
    """The heartbeat of one rank."""

    rank: int
    number: int = 0
    """The number of heartbeats so far."""
    time: float = 0.0
    """The time of the heartbeat, in seconds since the epoch."""
    step: int = 0
    """The last optimizer step."""
    doing: str = ""
    seconds: float = 0.0
    """The time since the last progress."""
    waits: bool = False
    """Whether the rank waits for others."""
    ended: bool = False
    """Whether the rank has closed its engines, or its process has ended in an orderly way."""
    host: str = ""
    pid: int = 0

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str | bytes) -> RankBeat:
        return RankBeat(**json.loads(text))

    @property
    def sentence(self) -> str:
        """The state of the rank, as a part of a sentence."""
        if self.ended:
            return f"rank {self.rank} has ended after step {self.step}"
        others = "for other ranks " if self.waits else ""
        return f"rank {self.rank} has waited {others}{self.seconds:.0f} s in {self.doing}, after step {self.step}"


def describe_stall(beat: RankBeat, bound: float) -> str:
    """Return the message about a rank that is stalled."""
    return f"{beat.sentence}. {_remedy(bound)}"


def describe_silence(rank: int, beat: RankBeat | None, silent: float, bound: float) -> str:
    """Return the message about a rank without heartbeats."""
    last = f" It was last in {beat.doing}, after step {beat.step}." if beat is not None else ""
    where = f" (node {beat.host}, pid {beat.pid})" if beat is not None else ""
    return (
        f"rank {rank}{where} has sent no heartbeat for {silent:.0f} s: its process is stopped, holds Python's lock in "
        f"C code, or cannot be reached.{last} {_remedy(bound)}"
    )


def describe_silent_store(is_of_rank_0: bool, silent: float, bound: float) -> str:
    """Return the message about a store that does not answer."""
    server = "rank 0, which serves the store of the process group," if is_of_rank_0 else "the launcher's store"
    return (
        f"{server} has not answered for {silent:.0f} s: its process is stopped or cannot be reached. {_remedy(bound)}"
    )


def describe_common_wait(beats: Mapping[int, RankBeat], bound: float) -> str:
    """Return the message about ranks that all wait for each other."""
    waits = "; ".join(beats[rank].sentence for rank in sorted(beats) if not beats[rank].ended)
    return f"all ranks wait for each other, so the network or a device is stuck: {waits}. {_remedy(bound)}"


def _remedy(bound: float) -> str:
    return f"The bound is {bound:g} s (onefold.stall). All ranks end, so that a launcher can restart them."


def all_wait(beats: Mapping[int, RankBeat], size: int, bound: float) -> bool:
    """Return whether all ranks that have not ended have waited for others for longer than the bound."""
    running = [beat for beat in beats.values() if not beat.ended]
    return len(beats) == size and bool(running) and all(beat.waits and beat.seconds > bound for beat in running)


def beats_file(beats: Mapping[int, RankBeat], size: int, now: float) -> str:
    """Return the content of `heartbeats.json`. A rank without a heartbeat is listed with its number alone."""
    rows: list[dict[str, Any]] = [asdict(beats[rank]) if rank in beats else {"rank": rank} for rank in range(size)]
    return json.dumps({"time": now, "ranks": rows}, indent=1) + "\n"


class SilentRanks:
    """Measures for how long the heartbeats of other ranks have not changed, by this rank's clock."""

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        # The number of the last heartbeat, and when it was first read. A rank may be stopped before its first one.
        self._last = dict.fromkeys(ranks, (-1, now))

    def update(self, beats: Mapping[int, RankBeat], now: float) -> None:
        """Record which heartbeats have changed."""
        for rank, beat in beats.items():
            if rank in self._last and self._last[rank][0] != beat.number:
                self._last[rank] = beat.number, now

    def restart(self, now: float) -> None:
        """Measure anew from now on, because this process was paused."""
        self._last = {rank: (number, now) for rank, (number, _) in self._last.items()}

    def longest(self, beats: Mapping[int, RankBeat], now: float) -> tuple[int, float]:
        """Return the rank that has been silent for the longest time among those that have not ended, and the time."""
        ended = {rank for rank, beat in beats.items() if beat.ended}
        silent = [(now - since, rank) for rank, (_, since) in self._last.items() if rank not in ended]
        seconds, rank = max(silent, default=(0.0, -1))
        return rank, seconds
