"""Small exchanges between the hosts of all ranks: rows of integers, vectors, texts, bytes for rank 0, and clocks."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from onefold.comm.collective import Ledger
from onefold.comm.guard import Guard
from onefold.comm.hang_detector import world_detector
from onefold.comm.mesh import Group
from onefold.recorder import Track, recorded

ROW = 17
# How long to sleep between two polls of an exchange, in seconds: a fifth of the wait so far, so that no wait lasts much
# longer than its exchange.
_SHORTEST, _LONGEST, _PART = 0.00002, 0.02, 0.2
_CLOCK_ROUNDS = 8
# Tags beyond those of exchanges in flight and of probes.
_CLOCK_TAG, _DATA_TAG = (1 << 20) + 3, (1 << 20) + 4


class Agreement:
    """Exchanges between the ranks of one group. None returns before all ranks have reached it."""

    def __init__(self, group: Group, ledger: Ledger) -> None:
        self.group = group
        groups = (group.host_group, group.process_group)
        self.guard = Guard() if group.is_fake else world_detector().make_guard(*groups)
        self._ledger = ledger

    def synchronize(
        self, what: str, row: Sequence[int], meanwhile: Callable[[], None] | None = None
    ) -> list[list[int]]:
        """Wait for all ranks, and return every rank's row in rank order.

        `what` names the exchange for the hang detector; `meanwhile` is called repeatedly while the wait lasts.
        """
        assert len(row) <= ROW
        mine = torch.tensor([*row, *[0] * (ROW - len(row))], dtype=torch.int64)
        rows: list[list[int]] = self.exchange(what, mine, meanwhile).tolist()
        return rows

    def exchange(self, what: str, mine: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """Return every rank's small host vector, as rows in rank order."""
        if self.group.size == 1:
            return mine.unsqueeze(0)
        if self.group.is_fake:
            self._ledger.count("synchronize", self.group.axis, mine.nbytes * (self.group.size - 1))
            return mine.repeat(self.group.size, 1)
        rows = [torch.empty_like(mine) for _ in range(self.group.size)]
        with (
            recorded(Track.SYNCHRONIZATION, what, by_host=True),
            self._ledger.timed("synchronize", self.group.axis),
            self.guard.waiting_for(what),
        ):
            self._ledger.count("synchronize", self.group.axis, mine.nbytes * (self.group.size - 1))
            work = dist.all_gather(rows, mine, group=self.group.host_group, async_op=True)
            assert work is not None
            start, pause = time.monotonic(), _SHORTEST
            while meanwhile is not None and not work.is_completed():
                if pause >= _LONGEST:
                    meanwhile()
                time.sleep(pause)
                pause = min(max(_SHORTEST, _PART * (time.monotonic() - start)), _LONGEST)
            work.wait()
        return torch.stack(rows)

    def broadcast_text(self, what: str, text: str, rank: int = 0) -> str:
        """Return one rank's text on all ranks."""
        data = bytearray(text.encode())
        length = self.synchronize(what, [len(data)])[rank][0]
        if self.group.size == 1 or self.group.is_fake or not length:
            return text if length else ""
        sent = torch.frombuffer(data, dtype=torch.uint8) if self.group.rank == rank else None
        sent = sent if sent is not None else torch.empty(length, dtype=torch.uint8)
        self._ledger.count(
            "synchronize", self.group.axis, length * (self.group.size - 1) if self.group.rank == rank else 0
        )
        with self._ledger.timed("synchronize", self.group.axis), self.guard.waiting_for(what):
            dist.broadcast(sent, self.group.global_rank(rank), group=self.group.host_group)
        return bytes(sent.tolist()).decode()


def as_integer(number: float) -> int:
    """Return the bits of a float as an integer, to send it in a row."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def as_float(integer: int) -> float:
    """Return the float that `as_integer` was given."""
    return float(struct.unpack("<d", struct.pack("<q", integer))[0])


# -- one timeline file for all ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockOffset:
    """The offset from this rank's `perf_counter_ns` to rank 0's, and its largest error in either direction."""

    nanoseconds: int = 0
    error: int = 0


def clock_offset(agreement: Agreement) -> ClockOffset:
    """Measure the offset of this rank's clock. All ranks call this together.

    Rank 0 sends each rank the time several times. The error of an answer is at most half its round-trip time, so the
    fastest one is used.
    """
    group = agreement.group
    agreement.synchronize("the clocks of a timeline", [])
    if group.size == 1:
        return ClockOffset()
    with agreement.guard.waiting_for("the clocks of a timeline"):
        if group.rank:
            return min((_measure_offset(group) for _ in range(_CLOCK_ROUNDS)), key=lambda offset: offset.error)
        for rank in range(1, group.size):
            for _ in range(_CLOCK_ROUNDS):
                _receive(group, rank, torch.zeros(1, dtype=torch.int64), _CLOCK_TAG)
                _send(group, rank, torch.tensor([time.perf_counter_ns()]), _CLOCK_TAG)
    return ClockOffset()


def _measure_offset(group: Group) -> ClockOffset:
    """Ask rank 0 for its time once."""
    theirs = torch.zeros(1, dtype=torch.int64)
    before = time.perf_counter_ns()
    _send(group, 0, theirs, _CLOCK_TAG)
    _receive(group, 0, theirs, _CLOCK_TAG)
    after = time.perf_counter_ns()
    return ClockOffset(int(theirs) - (before + after) // 2, (after - before + 1) // 2)


def bytes_for_first(agreement: Agreement, what: str, data: bytes) -> list[bytes]:
    """Return every rank's bytes in rank order on rank 0, an empty list elsewhere. All ranks call this together."""
    group = agreement.group
    lengths = [row[0] for row in agreement.synchronize(what, [len(data)])]
    if group.size == 1:
        return [data]
    with agreement.guard.waiting_for(what):
        if group.rank:
            _send(group, 0, torch.frombuffer(bytearray(data), dtype=torch.uint8), _DATA_TAG)
            return []
        found = [data]
        for rank in range(1, group.size):
            received = torch.empty(lengths[rank], dtype=torch.uint8)
            _receive(group, rank, received, _DATA_TAG)
            found.append(received.numpy().tobytes())
        return found


def _send(group: Group, rank: int, tensor: torch.Tensor, tag: int) -> None:
    dist.send(tensor, group.global_rank(rank), group=group.host_group, tag=tag)


def _receive(group: Group, rank: int, tensor: torch.Tensor, tag: int) -> None:
    dist.recv(tensor, group.global_rank(rank), group=group.host_group, tag=tag)
