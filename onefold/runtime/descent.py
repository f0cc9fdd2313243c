"""Reduced gradients on their way to the host, which steps with them.

[Note: gradients that go down]
A unit's sum leaves the device as soon as it is reduced, on the bus, in the narrowest dtype that holds it. The first of
a window goes straight to where it waits for the step; the host adds the others to it, so that no accumulator fills the
device. The device's buffer is given back once the compute stream is ordered behind the copy: a few units later, when
that costs no waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from onefold.runtime.run import Run
from onefold.runtime.squares import square_sum
from onefold.tier.bus import Arrival
from onefold.tier.device import Pool
from onefold.tier.lower import LowerTiers
from onefold.tier.sources import Buffers

# Sums that may be on their way before the oldest holds the compute up.
DESCENTS_IN_FLIGHT = 3


class Descent:
    """Sends sums down, in the order in which they are reduced."""

    def __init__(self, lower: LowerTiers, pool: Pool, runs: Sequence[Run]) -> None:
        self._lower = lower
        self._pool = pool
        self._runs = runs
        self._landings: Buffers | None = None
        self._under_way: deque[tuple[Arrival, Run, torch.Tensor, torch.Tensor]] = deque()

    @torch.no_grad()
    def start(self, run: Run) -> None:
        """The run's sum of this micro-step is reduced, as the compute stream sees it."""
        total, slot, bus = run.passing, run.grad, self._lower.bus
        assert total is not None
        assert slot is not None
        target, add = run.land_on_host()
        run.square = None if add else square_sum(total)
        if not add and total.dtype == target.dtype:
            run.descending = arrival = bus.down(total, target)
        elif bus.crosses:
            landings = self._landings or self._make_landings()
            buffer = landings.take()
            landed = buffer[: total.nbytes].view(total.dtype)
            arrival = bus.down(total, landed)
            run.descending = self._lower.worker.submit(_take_over, arrival, landings, buffer, landed, target, add)
        else:
            run.descending = arrival = bus.down(total, target, add=add)
        run.passing = run.grad = None
        self._under_way.append((arrival, run, total, slot))
        while len(self._under_way) > (DESCENTS_IN_FLIGHT if bus.crosses else 0):
            self._give_back()

    def finish(self) -> None:
        """The device's buffers are free again, as the compute stream sees it."""
        while self._under_way:
            self._give_back()

    def _give_back(self) -> None:
        arrival, run, total, slot = self._under_way.popleft()
        arrival.order()
        self._pool.give_back(slot, run.layout.shape_key)
        if total is not slot:
            self._pool.give_back(total)

    def _make_landings(self) -> Buffers:
        self._landings = self._lower.buffers(2, max(run.passing_bytes for run in self._runs))
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
