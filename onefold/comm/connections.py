"""The connections between ranks: whether one is closed, and how to end every wait on them.

A thread that waits inside a backend cannot be interrupted from Python. Closing the connections that it waits on is the
one way to wake it: gloo closes the pairs of a group when a receive times out, NCCL communicators are aborted.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Tags beyond those of exchanges in flight.
_BREAK_TAG, _PROBE_TAG = (1 << 20) + 1, (1 << 20) + 2
# Gloo's errors are plain RuntimeErrors. Most of them name its source file.
_GLOO_MESSAGES = ("gloo/", "pair closure", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def is_backend_error(error: BaseException) -> bool:
    """Return whether the network or the store has failed, and not the work done over it."""
    is_gloos = type(error) is RuntimeError and any(words in str(error) for words in _GLOO_MESSAGES)
    return is_gloos or isinstance(error, dist.DistError)


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether a group's collectives run on gloo."""
    return "gloo" in str(dist.get_backend(group))


class Connections:
    """The groups of one process whose waits are ended when the job is stuck."""

    def __init__(self, world: dist.ProcessGroup, rank: int) -> None:
        self._rank = rank
        self.are_broken = threading.Event()
        self._host_groups: list[dist.ProcessGroup] = [world] if is_gloo(world) else []
        self._device_groups: list[dist.ProcessGroup] = []
        self._probes: list[Any] = []

    def add(self, group: dist.ProcessGroup) -> None:
        """Include a group: of the host if it runs on gloo, else of the device."""
        groups = self._host_groups if is_gloo(group) else self._device_groups
        if group not in groups:
            groups.append(group)

    @property
    def device_waits(self) -> bool:
        """Whether there are groups in which the device waits for other ranks, and not the host."""
        return bool(self._device_groups)

    @property
    def device_timeout(self) -> float:
        """Seconds that the device may wait in a collective."""
        backend = self._device_groups[0]._get_backend(torch.device("cuda"))
        return float(backend.options._timeout.total_seconds())

    def is_closed(self, rank: int) -> bool:
        """Return whether the connection to a rank is closed, by sending it a value that it never receives."""
        group = self._host_groups[-1] if self._host_groups else None
        if group is None or rank not in dist.get_process_group_ranks(group):
            return False
        try:
            # The tensor must outlive the connection, so it is kept.
            self._probes.append((probe := torch.zeros(1), dist.isend(probe, rank, group=group, tag=_PROBE_TAG)))
        except RuntimeError:
            return True
        return False

    def break_all(self, also: dist.ProcessGroup | None = None) -> None:
        """Let every wait in these groups raise, here and on other ranks, and abort what the device waits for."""
        for group in dict.fromkeys([*self._host_groups, *([also] if also is not None else [])]):
            # A receive that times out makes gloo close the pairs of its group, and every wait on them raises.
            with suppress(RuntimeError):
                others = [rank for rank in dist.get_process_group_ranks(group) if rank != self._rank]
                if others and is_gloo(group):
                    work = dist.irecv(torch.zeros(1), others[0], group=group, tag=_BREAK_TAG)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))
        for group in self._device_groups:
            # `destroy_process_group` would wait for the other ranks.
            with suppress(RuntimeError):
                group._get_backend(torch.device("cuda")).abort()
        self.are_broken.set()
