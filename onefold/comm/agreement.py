"""Ranks tell each other what they want next: small rows of integers, exchanged between CPUs."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from onefold.comm.ledger import Ledger
from onefold.comm.mesh import Group
from onefold.comm.watch import Guard
from onefold.recorder import Track, recorded

ROW = 16
# How long to sleep between two looks at a meeting, in seconds: a fifth of the wait so far, so that no wait lasts much
# longer than its meeting.
_SHORTEST, _LONGEST, _PART = 0.00002, 0.02, 0.2


class Agreement:
    """Meetings of the ranks of one group. Nobody leaves one before everybody has come."""

    def __init__(self, group: Group, ledger: Ledger) -> None:
        self.group = group
        self.guard = Guard() if group.is_fake else Guard(group.host_group, group.process_group)
        self._ledger = ledger

    def meet(self, what: str, row: Sequence[int], meanwhile: Callable[[], None] | None = None) -> list[list[int]]:
        """Every rank's row, in rank order. `what` names the meeting for the hang guard; `meanwhile` is called again and
        again while a wait lasts.
        """
        assert len(row) <= ROW
        mine = torch.tensor([*row, *[0] * (ROW - len(row))], dtype=torch.int64)
        rows: list[list[int]] = self.exchange(what, mine, meanwhile).tolist()
        return rows

    def exchange(self, what: str, mine: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """Every rank's small vector, on the host, as rows in rank order."""
        if self.group.size == 1:
            return mine.unsqueeze(0)
        if self.group.is_fake:
            self._ledger.count("meet", self.group.axis, mine.nbytes * (self.group.size - 1))
            return mine.repeat(self.group.size, 1)
        rows = [torch.empty_like(mine) for _ in range(self.group.size)]
        with (
            recorded(Track.MEETINGS, what, by_host=True),
            self._ledger.timed("meet", self.group.axis),
            self.guard.waiting(what),
        ):
            self._ledger.count("meet", self.group.axis, mine.nbytes * (self.group.size - 1))
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

    def tell(self, what: str, text: str, rank: int = 0) -> str:
        """One rank's text, on all of them."""
        data = bytearray(text.encode())
        length = self.meet(what, [len(data)])[rank][0]
        if self.group.size == 1 or self.group.is_fake or not length:
            return text if length else ""
        told = torch.frombuffer(data, dtype=torch.uint8) if self.group.rank == rank else None
        told = told if told is not None else torch.empty(length, dtype=torch.uint8)
        self._ledger.count("meet", self.group.axis, length * (self.group.size - 1) if self.group.rank == rank else 0)
        with self._ledger.timed("meet", self.group.axis), self.guard.waiting(what):
            dist.broadcast(told, self.group.global_rank(rank), group=self.group.host_group)
        return bytes(told.tolist()).decode()


def as_integer(number: float) -> int:
    """The bits of a float, to travel in a row."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def as_float(integer: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", integer))[0])
