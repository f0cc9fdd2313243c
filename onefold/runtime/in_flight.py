"""Collectives in flight: started in order, limited in number, finished in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from onefold.comm import Collective, Gathering, Guard, PeerExchange, Pending
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.plan import Plan, Tier, Wire
from onefold.plan.program import REDUCTIONS_IN_FLIGHT
from onefold.pool import Pool
from onefold.recorder import Recorder, Span, Track, carrying, recorded, within
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.unit import Unit


@dataclass
class PendingCollective:
    """A collective in flight, and the units it carries."""

    units: list[Unit]
    pending: Pending | None
    """None: it starts once the host has stepped its units."""
    num_elements: int
    span: Span | None
    """Of the timeline, while somebody records."""


class InFlightCollectives:
    """Starts and finishes the three collectives of units: unshards, reductions of gradients, refreshes after a step."""

    def __init__(
        self, plan: Plan, collective: Collective, guard: Guard, pool: Pool, memory: OffloadMemory | None = None
    ) -> None:
        self.collective = collective
        self.pool = pool
        self.reductions: deque[PendingCollective] = deque()
        self.gathers: deque[PendingCollective] = deque()
        self.refreshes: deque[PendingCollective] = deque()
        # A step follows what is reduced now.
        self.before_step = False
        self.num_reductions = 0
        self._plan = plan
        self._guard = guard
        self._memory = memory

    def _waiting(self, operation: str, units: Iterable[Unit]) -> AbstractContextManager[None]:
        return self._guard.waiting(operation, [unit.name for unit in units])

    def _launching(self, operation: str, units: Iterable[Unit]) -> AbstractContextManager[None]:
        return self._guard.launching(operation, [unit.name for unit in units])

    def _finish(self, operation: str, queue: deque[PendingCollective]) -> list[Unit]:
        """Wait for the first collective of a queue: the units it has carried."""
        first = queue.popleft()
        assert first.pending is not None
        self._wait(operation, first.units, first.pending, first.span)
        return first.units

    def _wait(self, operation: str, units: list[Unit], pending: Pending, span: Span | None) -> None:
        name, unit = (f"wait for {span.name}", span.unit) if span is not None else ("wait", "")
        with self._waiting(operation, units), recorded(Track.COMPUTE, name, unit), carrying(span):
            pending.finish()
        if span is not None:
            span.finish()

    def _span(self, track: Track, name: str, units: list[Unit], numel: int, tier: Tier, wire: Wire) -> Span | None:
        recorder = Recorder.active
        if recorder is None:
            return None
        details = {"elements": numel, "tier": tier.value, "wire": wire.value}
        return recorder.start(track, name, ", ".join(unit.name for unit in units), details)

    # -- gathers that unshard -----------------------------------------------------------------------------------

    def start_unshard(self, units: list[Unit], *, lossless: bool = False, use_secondary: bool = False) -> None:
        """Whatever the units' states here: another rank may need this rank's shards."""
        for unit in units:
            if self._plan.node_shard_size > 1:
                self.wait_for_unshard(unit)  # which may be filling the secondary shard
            for param in unit.sharded:
                param.store.finish_step()
        started: list[Unit] = []
        size = sum(unit.num_gathered for unit in units)
        wire = Wire.NATIVE if lossless else self._plan.parameters.wire
        span = self._span(Track.GATHERS, "unshard", units, size, self._plan.parameters.tier, wire)
        try:
            with self._launching("gather of", units), carrying(span):
                gatherings: list[Gathering] = []
                for unit in units:
                    started.append(unit)
                    gatherings += unit.start_unshard(lossless=lossless, use_secondary=use_secondary)
                pending = self.collective.start_gather(gatherings)
        except BaseException:
            for unit in started:
                unit.undo_unshard()
            raise
        self.gathers.append(PendingCollective(units, pending, size, span))

    def prefetch(self, units: Iterable[Unit]) -> None:
        """These are gathered next, in this order: read ahead what rests on disk, as far as there is room."""
        for unit in units:
            with within(unit.name):
                if not all(param.read_ahead() for param in unit.sharded):
                    return

    def _finish_unshard(self) -> None:
        for unit in self._finish("gather of", self.gathers):
            unit.finish_unshard()

    def wait_for_unshard(self, unit: Unit) -> None:
        while unit.num_gathers:
            self._finish_unshard()

    def finish_unshards(self) -> None:
        while self.gathers:
            self._finish_unshard()

    # -- reductions ---------------------------------------------------------------------------------------------

    def start_reduction(self, batch: list[Unit]) -> None:
        size = sum(unit.num_elements for unit in batch)
        while len(self.reductions) >= REDUCTIONS_IN_FLIGHT:
            self.finish_reduction()
        _make_room(self.reductions, size, self._plan.reduce_bucket, self.finish_reduction)
        for unit in batch:
            unit.open_gradients(self.pool)
        prescale = self._plan.scaling.prescale
        reductions = [reduction for unit in batch for reduction in unit.start_reduction(prescale, self.pool)]
        gradients = self._plan.gradients
        span = self._span(Track.REDUCTIONS, "reduce", batch, size, gradients.tier, gradients.wire)
        # To a rank that is gone even the launch may raise.
        with self._launching("reduction of", batch), carrying(span):
            pending = self.collective.start_reduce_scatter(reductions)
        self.num_reductions += 1
        self.reductions.append(PendingCollective(batch, pending, size, span))
        if not self._plan.overlap:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        for unit in self._finish("reduction of", self.reductions):
            with within(unit.name):
                unit.finish_reduction(self.pool)
            if self.before_step and self.collective.group.size > 1:
                for param in unit.trained:
                    param.grad.shard.start_square_sum()

    def finish_reductions(self) -> None:
        while self.reductions:
            self.finish_reduction()
        if self._memory is not None:
            self._memory.gradients.finish()

    # -- refreshes after a step ---------------------------------------------------------------------------------

    def start_refresh(self, batch: list[Unit]) -> None:
        """The batch has been stepped: send each rank's slice to all others, in place.

        Over several ranks this waits for the host to step the batch (it goes on with the next meanwhile): what one rank
        alone does after a step must not wait for others. By itself a rank waits where it needs a unit.
        """
        params = [param for unit in batch for param in unit.refreshed]
        travels = self._plan.shards_states and self.collective.group.size > 1
        waits = any(param.store.is_stepping for param in params)
        if not params or not (travels or waits):
            return
        assert not any(unit.is_refreshing for unit in batch)
        size = sum(param.layout.total for param in params)
        if travels:
            _make_room(self.refreshes, size, self._plan.gather_bucket, self._finish_refresh)
        for unit in batch:
            unit.begin_refresh()
        span = self._span(Track.GATHERS, "refresh", batch, size, Tier.DEVICE, Wire.NATIVE)
        pending = self._launch_refresh(batch, span) if travels else None
        self.refreshes.append(PendingCollective(batch, pending, size, span))

    def _launch_refresh(self, batch: list[Unit], span: Span | None) -> Pending:
        params = [param for unit in batch for param in unit.refreshed]
        for param in params:
            param.store.finish_step()
        if self.collective.group.size == 1:
            return Pending(lambda: None)
        with self._launching("refresh of", batch), carrying(span):
            return self.collective.start_gather([Gathering(param.full) for param in params])

    def _finish_refresh(self) -> None:
        refresh = self.refreshes[0]
        # May raise what the host has met, each time.
        pending = refresh.pending or self._launch_refresh(refresh.units, refresh.span)
        self.refreshes.popleft()
        self._wait("refresh of", refresh.units, pending, refresh.span)
        for unit in refresh.units:
            unit.end_refresh()

    def wait_for_refresh(self, unit: Unit) -> None:
        """Finish the refresh that carries this unit, and those launched before it."""
        while unit.is_refreshing:
            self._finish_refresh()

    def finish_refreshes(self) -> None:
        while self.refreshes:
            self._finish_refresh()

    def give_up_refreshes(self) -> None:
        """After a step that failed nothing of it is waited for."""
        for refresh in self.refreshes:
            for unit in refresh.units:
                unit.end_refresh()
        self.refreshes.clear()

    def refresh_now(self, unit: Unit, params: list[FlatParam]) -> None:
        """Each rank's slice of these was written: every rank gets all of them."""
        with (
            self._launching("gather of what was loaded, of", [unit]),
            recorded(Track.GATHERS, "gather of what was loaded", unit.name),
        ):
            self.collective.start_gather([Gathering(param.full) for param in params]).finish()

    def gather_scalar(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """The numbers of the ranks that hold the model state between them, in their order, on the device: the host
        waits for nothing.
        """
        numbers = mine.new_empty(self.collective.group.num_shards)
        with self._guard.launching(what, ()), recorded(Track.GATHERS, what, numel=numbers.numel()):
            self.collective.start_gather([Gathering(numbers, mine)]).finish()
        return numbers

    def start_exchange(self, what: str, units: list[str], exchanges: list[PeerExchange]) -> Callable[[], None]:
        """Tensors for some ranks, and room for some of theirs, while units are stepped: all ranks call this in one
        order. What is returned waits until they have arrived.
        """
        if self.collective.group.size == 1:
            return lambda: None
        with self._guard.launching(what, units), recorded(Track.GATHERS, what, units[0]):
            pending = self.collective.start_peer_exchange(exchanges, "matrices")

        def wait() -> None:
            with self._guard.waiting(what, units), recorded(Track.COMPUTE, f"wait for {what}", units[0]):
                pending.finish()

        return wait

    # -- gradients where every rank steps everything ------------------------------------------------------------

    def unsharded_gradients(
        self, batches: list[list[Unit]]
    ) -> Iterator[tuple[list[Unit], dict[ShardStore, torch.Tensor]]]:
        """The reduced gradients of each batch, gathered, one batch ahead."""
        ahead = deque(self._start_gathering_gradients(batch) for batch in batches[:1])
        for position, batch in enumerate(batches):
            ahead.extend(self._start_gathering_gradients(after) for after in batches[position + 1 : position + 2])
            gathered, pending, span = ahead.popleft()
            self._wait("gather of gradients of", batch, pending, span)
            yield batch, gathered
            for gradient in gathered.values():
                self.pool.give_back(gradient)

    def _start_gathering_gradients(
        self, batch: list[Unit]
    ) -> tuple[dict[ShardStore, torch.Tensor], Pending, Span | None]:
        gathered, gatherings = {}, []
        for param in (param for unit in batch for param in unit.trained):
            gathered[param.store] = self.pool.take(param.layout.total, param.grad.reduced.dtype)
            gatherings.append(Gathering(gathered[param.store], param.grad.reduced))
        size = sum(gradient.numel() for gradient in gathered.values())
        span = self._span(Track.GATHERS, "gather of gradients", batch, size, Tier.DEVICE, Wire.NATIVE)
        with self._launching("gather of gradients of", batch), carrying(span):
            return gathered, self.collective.start_gather(gatherings), span


def _make_room(pending: deque[PendingCollective], incoming: int, limit: int, finish: Callable[[], None]) -> None:
    """Bucket sizes limit what is in flight; one batch always may be."""
    while pending and sum(collective.num_elements for collective in pending) + incoming > limit:
        finish()
