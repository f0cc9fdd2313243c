"""Collectives in flight: launched in order, limited in number and size, and finished in order.

This module handles tensors and names. `Unit` decides what is gathered and reduced, `Order` when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from onefold.comm import AllGatherOp, Collective, Guard, PeerExchange, Pending, Reduction
from onefold.offload.offload_memory import OffloadMemory
from onefold.plan import Plan, Tier, Wire
from onefold.plan.program import REDUCTIONS_IN_FLIGHT
from onefold.pool import Pool
from onefold.recorder import Recorder, Span, Track, carrying, recorded

Callback = Callable[[], None]
_GATHER, _REDUCE, _UPDATE = "gather of", "reduction of", "gather of updated parameters of"


@dataclass
class PendingCollective:
    """Collective in flight."""

    operation: str
    names: list[str]
    """Names of its units. The hang guard and the timeline report them after the operation."""
    pending: Pending
    num_elements: int
    span: Span | None
    """Span of the timeline, if one is recorded."""
    on_finish: Callback
    """Called when the collective has finished."""
    before_wait: Callback | None = None
    """Called before the collective is waited for. If it raises, the collective stays in flight."""


class InFlightCollectives:
    """Queues of all-gathers that unshard, reduce-scatters of gradients, and all-gathers of updated parameters."""

    def __init__(
        self, plan: Plan, collective: Collective, guard: Guard, pool: Pool, memory: OffloadMemory | None = None
    ) -> None:
        self.collective = collective
        self.pool = pool
        self.gathers: deque[PendingCollective] = deque()
        self.reductions: deque[PendingCollective] = deque()
        self.updates: deque[PendingCollective] = deque()
        self.num_reductions = 0
        self._plan = plan
        self._guard = guard
        self._memory = memory

    # -- all-gathers that unshard -------------------------------------------------------------------------------

    def enqueue_all_gather(
        self,
        names: list[str],
        prepare: Callable[[], list[AllGatherOp]],
        num_elements: int,
        wire: Wire,
        on_finish: Callback,
    ) -> None:
        """Launch an all-gather. `prepare` allocates and returns its tensors."""
        span = self._span(Track.GATHERS, "unshard", names, num_elements, self._plan.parameters.tier, wire)
        pending = self._launch(_GATHER, names, span, lambda: self.collective.start_gather(prepare()))
        self.gathers.append(PendingCollective(_GATHER, names, pending, num_elements, span, on_finish))

    def finish_gather(self) -> None:
        """Wait for the first all-gather in flight."""
        self._finish_first(self.gathers)

    def finish_gathers(self) -> None:
        """Wait for all all-gathers in flight."""
        while self.gathers:
            self._finish_first(self.gathers)

    # -- reduce-scatters of gradients ---------------------------------------------------------------------------

    def enqueue_reduce_scatter(
        self, names: list[str], prepare: Callable[[], list[Reduction]], num_elements: int, on_finish: Callback
    ) -> None:
        """Launch a reduce-scatter, after the limits on what is in flight allow it. `prepare` returns its tensors."""
        while len(self.reductions) >= REDUCTIONS_IN_FLIGHT:
            self.finish_reduction()
        _make_room(self.reductions, num_elements, self._plan.reduce_bucket, self.finish_reduction)
        reductions, gradients = prepare(), self._plan.gradients
        span = self._span(Track.REDUCTIONS, "reduce", names, num_elements, gradients.tier, gradients.wire)
        pending = self._launch(_REDUCE, names, span, partial(self.collective.start_reduce_scatter, reductions))
        self.num_reductions += 1
        self.reductions.append(PendingCollective(_REDUCE, names, pending, num_elements, span, on_finish))
        if not self._plan.overlap:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        """Wait for the first reduce-scatter in flight."""
        self._finish_first(self.reductions)

    def finish_reductions(self) -> None:
        """Wait for all reduce-scatters, and for the copies of offloaded gradients to the host."""
        while self.reductions:
            self.finish_reduction()
        if self._memory is not None:
            self._memory.gradients.finish()

    # -- all-gathers of updated parameters ----------------------------------------------------------------------

    def enqueue_update(
        self, names: list[str], prepare: Callable[[], list[AllGatherOp]], num_elements: int, on_finish: Callback
    ) -> None:
        """Launch the all-gather of updated parameters, after the limit on what is in flight allows it."""
        _make_room(self.updates, num_elements, self._plan.gather_bucket, self.finish_update)
        span = self._span(Track.GATHERS, "gather of updated parameters", names, num_elements, Tier.DEVICE, Wire.NATIVE)
        pending = self._launch(_UPDATE, names, span, partial(self.collective.start_gather, prepare()))
        self.updates.append(PendingCollective(_UPDATE, names, pending, num_elements, span, on_finish))

    def enqueue_local_update(
        self, names: list[str], wait_for_step: Callback, num_elements: int, on_finish: Callback
    ) -> None:
        """Queue an update of a single rank, which needs no collective: `wait_for_step` waits for the host."""
        span = self._span(Track.GATHERS, "gather of updated parameters", names, num_elements, Tier.DEVICE, Wire.NATIVE)
        nothing = Pending(lambda: None)
        self.updates.append(PendingCollective(_UPDATE, names, nothing, num_elements, span, on_finish, wait_for_step))

    def finish_update(self) -> None:
        """Wait for the first all-gather of updated parameters in flight."""
        self._finish_first(self.updates)

    def finish_updates(self) -> None:
        """Wait for all all-gathers of updated parameters."""
        while self.updates:
            self.finish_update()

    def abandon_updates(self) -> None:
        """Discard all-gathers of updated parameters without waiting, after a step that failed."""
        for update in self.updates:
            update.on_finish()
        self.updates.clear()

    # -- collectives that are finished where they are started ---------------------------------------------------

    def all_gather_loaded(self, name: str, gatherings: list[AllGatherOp]) -> None:
        """All-gather values of a unit that each rank has loaded a slice of."""
        with (
            self._guard.launching("gather of what was loaded, of", [name]),
            recorded(Track.GATHERS, "gather of what was loaded", name),
        ):
            self.collective.start_gather(gatherings).finish()

    def launch_gradient_gather(
        self, names: list[str], gatherings: list[AllGatherOp], num_elements: int
    ) -> PendingCollective:
        """Launch the all-gather of reduced gradients for ranks that step everything. `wait` finishes it."""
        span = self._span(Track.GATHERS, "gather of gradients", names, num_elements, Tier.DEVICE, Wire.NATIVE)
        operation = "gather of gradients of"
        pending = self._launch(operation, names, span, partial(self.collective.start_gather, gatherings))
        return PendingCollective(operation, names, pending, num_elements, span, lambda: None)

    def gather_numbers(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the ranks that hold one model state, in rank order, without blocking the host."""
        numbers = mine.new_empty(self.collective.group.num_shards * mine.numel())
        with self._guard.launching(what, ()), recorded(Track.GATHERS, what, numel=numbers.numel()):
            self.collective.start_gather([AllGatherOp(numbers, mine)]).finish()
        return numbers

    def start_exchange(self, what: str, units: list[str], exchanges: list[PeerExchange]) -> Callback:
        """Start a pairwise exchange of tensors during a step, and return a function that waits for it.

        All ranks call this in the same order.
        """
        if self.collective.group.size == 1:
            return lambda: None
        with self._guard.launching(what, units), recorded(Track.GATHERS, what, units[0]):
            pending = self.collective.start_peer_exchange(exchanges, "matrices")

        def wait() -> None:
            with self._guard.waiting_for(what, units), recorded(Track.COMPUTE, f"wait for {what}", units[0]):
                pending.finish()

        return wait

    # -- launch and wait ----------------------------------------------------------------------------------------

    def _launch(self, operation: str, names: list[str], span: Span | None, start: Callable[[], Pending]) -> Pending:
        """Start a collective, under a name that the hang guard and the timeline report. Raise if a rank has died."""
        with self._guard.launching(operation, names):
            if span is None:
                return start()
            with carrying(span):
                return start()

    def wait(self, collective: PendingCollective) -> None:
        """Wait for one collective, under a name that the hang guard and the timeline report."""
        span = collective.span
        with self._guard.waiting_for(collective.operation, collective.names):
            if Recorder.active is None:
                collective.pending.finish()
            else:
                name, unit = (f"wait for {span.name}", span.unit) if span is not None else ("wait", "")
                with recorded(Track.COMPUTE, name, unit), carrying(span):
                    collective.pending.finish()
        if span is not None:
            span.finish()

    def _finish_first(self, queue: deque[PendingCollective]) -> None:
        """Wait for the first collective of a queue, and remove it."""
        first = queue[0]
        if first.before_wait is not None:
            first.before_wait()
        queue.popleft()
        self.wait(first)
        first.on_finish()

    def _span(self, track: Track, name: str, names: list[str], numel: int, tier: Tier, wire: Wire) -> Span | None:
        recorder = Recorder.active
        if recorder is None:
            return None
        details = {"elements": numel, "tier": tier.value, "wire": wire.value}
        return recorder.start(track, name, ", ".join(names), details)


def _make_room(pending: deque[PendingCollective], incoming: int, limit: int, finish: Callback) -> None:
    """Finish collectives until another one fits within the limit. One is always allowed."""
    while pending and sum(collective.num_elements for collective in pending) + incoming > limit:
        finish()
