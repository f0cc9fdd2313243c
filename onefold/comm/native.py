"""Collectives of the backend itself: the default on NCCL. They add in the backend's own order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from onefold.comm.collective import CollectiveWrapper, Gathering, Pending, Reduction
from onefold.comm.exchange import Exchange
from onefold.comm.ledger import Ledger
from onefold.comm.mesh import Group

# Renamed in torch 2.13; the old name warns there, the new one does not exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native(CollectiveWrapper):
    """Reduce-scatter and gather as the backend offers them. What only some ranks do together goes peer by peer."""

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        super().__init__(Exchange(group, ledger, device), group, device)
        self._ledger = ledger

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        group, ledger = self.group, self._ledger
        jobs = []
        with self._lane.enter(), ledger.timed("reduce-scatter", group.axis):
            for reduction in reductions:
                source = reduction.source.to(reduction.wire)
                in_place = not reduction.add and reduction.target.dtype == source.dtype
                total = reduction.target if in_place else source.new_empty(source.numel() // group.size)
                work = _reduce_scatter(total, source, group=group.process_group, async_op=True)
                ledger.count("reduce-scatter", group.axis, total.nbytes * (group.size - 1))
                # The source stays referenced until the sum is stored: it may be a cast that nobody else holds.
                jobs.append((reduction, source, total, work))

        def complete() -> None:
            with ledger.timed("reduce-scatter", group.axis):
                for reduction, _, total, work in jobs:
                    work.wait()
                    reduction.store(total)

        return self._lane.pending(complete)

    def start_gather(self, gatherings: Sequence[Gathering]) -> Pending:
        group, ledger = self.group, self._ledger
        works = []
        spanned = [gathering for gathering in gatherings if gathering.span is not None]
        gatherings = [gathering for gathering in gatherings if gathering.span is None]
        beside = self._plain.start_gather(spanned) if spanned else Pending(lambda: None)
        with self._lane.enter(), ledger.timed("gather", group.axis):
            for gathering in gatherings:
                own = gathering.place_own(group.rank, group.size)
                works.append(_all_gather(gathering.line, own, group=group.process_group, async_op=True))
                ledger.count("gather", group.axis, own.nbytes * (group.size - 1))

        def complete() -> None:
            with ledger.timed("gather", group.axis):
                for work in works:
                    work.wait()
                beside.finish()

        return self._lane.pending(complete)
