"""Clock offsets between ranks, and a gather of bytes on rank 0, to write one timeline file for all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from onefold.comm.agreement import Agreement
from onefold.comm.mesh import Group

_ROUNDS = 8
# Tags beyond those of exchanges in flight and of probes.
_TAG = (1 << 20) + 3
_DATA_TAG = (1 << 20) + 4


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
            return min((_measure_offset(group) for _ in range(_ROUNDS)), key=lambda offset: offset.error)
        for rank in range(1, group.size):
            for _ in range(_ROUNDS):
                _receive(group, rank, torch.zeros(1, dtype=torch.int64), _TAG)
                _send(group, rank, torch.tensor([time.perf_counter_ns()]), _TAG)
    return ClockOffset()


def _measure_offset(group: Group) -> ClockOffset:
    """Ask rank 0 for its time once."""
    theirs = torch.zeros(1, dtype=torch.int64)
    before = time.perf_counter_ns()
    _send(group, 0, theirs, _TAG)
    _receive(group, 0, theirs, _TAG)
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
