"""Collectives on their way: started in order, limited in number, finished in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from onefold.comm import Collective, Gathering, Guard, Pending
from onefold.plan import Plan
from onefold.runtime.descent import Descent
from onefold.runtime.unit import Run, Unit
from onefold.tier.device import Pool

# A third reduction in flight buys no overlap, only memory: each holds slots and what it receives, and its sum is
# cheapest while that is still in cache.
REDUCTIONS_IN_FLIGHT = 2


@dataclass
class Flight:
    """A collective on its way, and the units it carries."""

    units: list[Unit]
    pending: Pending | None
    """None: it starts once the host has stepped its units."""
    num_elements: int


class Flights:
    """Starts and finishes the three moves of units: reductions, gathers, and refreshes after a step."""

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        guard: Guard,
        pool: Pool,
        prescale: float,
        descent: Descent | None = None,
    ) -> None:
        self.collective = collective
        self.pool = pool
        self.descent = descent
        self.reducing: deque[Flight] = deque()
        self.gathering: deque[Flight] = deque()
        self.refreshing: deque[Flight] = deque()
        self._plan = plan
        self._guard = guard
        self._prescale = prescale

    @contextmanager
    def _waiting(self, operation: str, units: Iterable[Unit]) -> Iterator[None]:
        with self._guard.waiting(operation, [unit.name for unit in units]):
            yield

    # -- reductions ---------------------------------------------------------------------------------------------

    def start_reduction(self, batch: list[Unit]) -> None:
        size = sum(unit.num_elements for unit in batch)
        while len(self.reducing) >= REDUCTIONS_IN_FLIGHT:
            self.finish_reduction()
        _make_room(self.reducing, size, self._plan.reduce_bucket, self.finish_reduction)
        for unit in batch:
            unit.open(self.pool)
        reductions = [reduction for unit in batch for reduction in unit.start_reducing(self._prescale, self.pool)]
        with self._waiting("reduction of", batch):  # to a rank that is gone even the launch may raise
            pending = self.collective.start_reduce_scatter(reductions)
        self.reducing.append(Flight(batch, pending, size))
        if not self._plan.overlap:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        flight = self.reducing.popleft()
        assert flight.pending is not None
        with self._waiting("reduction of", flight.units):
            flight.pending.finish()
        for unit in flight.units:
            for run in unit.trained:
                if run.rest.offloads_states:
                    assert self.descent is not None
                    self.descent.start(run)
            unit.finish_reducing(self.pool)

    def finish_reductions(self) -> None:
        while self.reducing:
            self.finish_reduction()
        if self.descent is not None:
            self.descent.finish()

    # -- gathers of sharded parameters --------------------------------------------------------------------------

    def start_gather(self, unit: Unit, *, exact: bool = False, near: bool = False) -> None:
        """Whatever the unit's state here: another rank may need this rank's slice."""
        if self._plan.node_shard_size > 1:
            self.finish_gathers_until(unit)  # which may be filling the second shard
        for run in unit.sharded:
            run.finish_update()
        try:
            with self._waiting("gather of", [unit]):
                pending = self.collective.start_gather(unit.start_gather(exact=exact, near=near))
        except BaseException:
            unit.undo_gather()
            raise
        self.gathering.append(Flight([unit], pending, unit.num_gathered))

    def fetch(self, units: Iterable[Unit]) -> None:
        """These are gathered next, in this order: read ahead what rests on disk, as far as there is room."""
        for run in (run for unit in units for run in unit.sharded):
            if not run.fetch():
                return

    def finish_gather(self) -> None:
        flight = self.gathering.popleft()
        assert flight.pending is not None
        with self._waiting("gather of", flight.units):
            flight.pending.finish()
        for unit in flight.units:
            unit.finish_gather()

    def finish_gathers_until(self, unit: Unit) -> None:
        while unit.flying:
            self.finish_gather()

    def finish_gathers(self) -> None:
        while self.gathering:
            self.finish_gather()

    # -- refreshes of what rests whole --------------------------------------------------------------------------

    def start_refresh(self, batch: list[Unit]) -> None:
        """The batch has been stepped: send each rank's slice to all others, in place.

        Over several ranks this waits for the host to step the batch (it goes on with the next meanwhile): what one rank
        alone does after a step must not wait for others. By itself a rank waits where it needs a unit.
        """
        runs = [run for unit in batch for run in unit.trained if run.rests_whole]
        travels = self._plan.shards_states and self.collective.group.size > 1
        waits = any(run.update is not None for run in runs)
        if not runs or not (travels or waits):
            return
        assert not any(unit.refreshing for unit in batch)
        size = sum(run.layout.total for run in runs)
        if travels:
            _make_room(self.refreshing, size, self._plan.gather_bucket, self.finish_refresh)
        for unit in batch:
            unit.refreshing = True
        self.refreshing.append(Flight(batch, self._launch_refresh(batch) if travels else None, size))

    def _launch_refresh(self, batch: list[Unit]) -> Pending:
        runs = [run for unit in batch for run in unit.trained if run.rests_whole]
        for run in runs:
            run.finish_update()
        if self.collective.group.size == 1:
            return Pending(lambda: None)
        with self._waiting("refresh of", batch):
            return self.collective.start_gather([Gathering(run.full) for run in runs])

    def finish_refresh(self) -> None:
        flight = self.refreshing[0]
        pending = flight.pending or self._launch_refresh(flight.units)  # may raise what the host has met, each time
        self.refreshing.popleft()
        with self._waiting("refresh of", flight.units):
            pending.finish()
        for unit in flight.units:
            unit.refreshing = False

    def settle(self, unit: Unit) -> None:
        """Finish the refresh that carries this unit, and those launched before it."""
        while unit.refreshing:
            self.finish_refresh()

    def settle_all(self) -> None:
        while self.refreshing:
            self.finish_refresh()

    def gather_now(self, unit: Unit, runs: list[Run]) -> None:
        """Fill lines that rest whole from every rank's slice."""
        with self._waiting("gather of what was loaded, of", [unit]):
            self.collective.start_gather([Gathering(run.full) for run in runs]).finish()

    # -- gradients where every rank steps everything ------------------------------------------------------------

    def whole_gradients(self, batches: list[list[Unit]]) -> Iterator[tuple[list[Unit], dict[Run, torch.Tensor]]]:
        """The reduced gradients of each batch, gathered, one batch ahead."""
        ahead = deque(self._start_gathering_gradients(batch) for batch in batches[:1])
        for position, batch in enumerate(batches):
            ahead.extend(
                self._start_gathering_gradients(following) for following in batches[position + 1 : position + 2]
            )
            whole, pending = ahead.popleft()
            with self._waiting("gather of gradients of", batch):
                pending.finish()
            yield batch, whole
            for line in whole.values():
                self.pool.give_back(line)

    def _start_gathering_gradients(self, batch: list[Unit]) -> tuple[dict[Run, torch.Tensor], Pending]:
        whole, gatherings = {}, []
        for run in (run for unit in batch for run in unit.trained):
            assert run.reduced is not None
            whole[run] = self.pool.take(run.layout.total, run.reduced.dtype)
            gatherings.append(Gathering(whole[run], run.reduced))
        with self._waiting("gather of gradients of", batch):
            return whole, self.collective.start_gather(gatherings)


def _make_room(flights: deque[Flight], incoming: int, limit: int, finish: Callable[[], None]) -> None:
    """Bucket sizes limit what is in flight; one batch always may be."""
    while flights and sum(flight.num_elements for flight in flights) + incoming > limit:
        finish()
