"""Gradient offload: reduced gradients on their way to host memory.

[Note: gradient offload]
Where the host steps, a reduced gradient leaves the device as soon as it is reduced, in the narrowest dtype that holds
it. The first one of an accumulation window is copied straight to where it waits for the step; the host adds the others
to it, so that no accumulator fills the device. The device's buffer is given back once the compute stream is ordered
behind the copy: a few units later, when that costs no waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from onefold.offload.bus import Arrival, Bus
from onefold.offload.param_shard import Buffers
from onefold.pool import Pool

# Copies down that may be under way before the oldest holds the compute up.
COPIES_IN_FLIGHT = 3


class GradOffload:
    """Copies of reduced gradients to host memory, in the order in which they are reduced."""

    def __init__(self, bus: Bus, worker: ThreadPoolExecutor, *, pinned: bool) -> None:
        self._bus, self._worker, self._pinned = bus, worker, pinned
        self._largest = 0
        self._landings: Buffers | None = None
        self._under_way: deque[tuple[Arrival, torch.Tensor, torch.Tensor, Pool, Hashable]] = deque()

    def expect(self, num_bytes: int) -> None:
        """A gradient of this size will come."""
        self._largest = max(self._largest, num_bytes)

    @torch.no_grad()
    def start(
        self, total: torch.Tensor, target: torch.Tensor, slot: torch.Tensor, pool: Pool, key: Hashable, *, add: bool
    ) -> Arrival | Future[None]:
        """What to wait for until `target` has it."""
        bus = self._bus
        arriving: Arrival | Future[None]
        if not add and total.dtype == target.dtype:
            arriving = arrival = bus.down(total, target)
        elif bus.crosses:
            landings = self._landings or self._make_landings()
            buffer = landings.take()
            landed = buffer[: total.nbytes].view(total.dtype)
            arrival = bus.down(total, landed)
            arriving = self._worker.submit(_take_over, arrival, landings, buffer, landed, target, add)
        else:
            arriving = arrival = bus.down(total, target, add=add)
        self._under_way.append((arrival, total, slot, pool, key))
        while len(self._under_way) > (COPIES_IN_FLIGHT if bus.crosses else 0):
            self._give_back()
        return arriving

    def finish(self) -> None:
        """The device's buffers are free again, as the compute stream sees it."""
        while self._under_way:
            self._give_back()

    def _give_back(self) -> None:
        arrival, total, slot, pool, key = self._under_way.popleft()
        arrival.order()
        pool.give_back(slot, key)
        if total is not slot:
            pool.give_back(total)

    def _make_landings(self) -> Buffers:
        self._landings = self._worker.submit(Buffers, 2, self._largest, pinned=self._pinned).result()
        return self._landings


def _take_over(
    arrival: Arrival,
    landings: Buffers,
    buffer: torch.Tensor,
    landed: torch.Tensor,
    target: torch.Tensor,
    add: bool,
) -> None:
    """On the host's thread: what has come down joins what waits there."""
    try:
        arrival.wait()
        if add:
            target.add_(landed)
        else:
            target.copy_(landed)
    finally:  # a unit that comes later waits for it
        landings.give_back(buffer)
