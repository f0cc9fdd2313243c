"""Collectives by pairwise exchange: the default on gloo, whose ring algorithms are slower.

Every rank sends each peer its slice, and adds what it receives in the order of the tree, in fp32. The order of addition
is the same in every stage ([Note: one order of addition] in tree.py), so stages are bit-equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

import torch
import torch.distributed as dist

from onefold.comm.collective import AllGatherOp, CommStream, Ledger, PeerExchange, Pending, Reduction
from onefold.comm.mesh import Group
from onefold.comm.tree import add_tree
from onefold.pool import Pool

_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]] = weakref.WeakKeyDictionary()


class Exchange:
    """Reduce-scatter and all-gather made of sends and receives."""

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        self.group = group
        self._ledger = ledger
        self._comm_stream = CommStream(device)
        self._pool = Pool(device)
        # Tags distinguish the exchanges in flight between two ranks, over all engines of a group. All ranks start
        # exchanges in the same order.
        self._tags = count() if group.is_fake else _tags.setdefault(group.process_group, count())

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        sent = [reduction for reduction in reductions if self._span(reduction) > 1]
        for reduction in reductions:
            if self._span(reduction) == 1:
                reduction.store(reduction.source)
        if not sent:
            return Pending(lambda: None)
        jobs: list[tuple[Reduction, torch.Tensor, torch.Tensor]] = []

        def exchanges() -> Iterator[tuple[PeerExchange, int]]:
            for reduction in sent:
                source, tag, span = self._on_wire(reduction), self.reserve_tag(), self._span(reduction)
                size = source.numel() // span
                if self._receives_in_target(reduction):
                    inbox = reduction.target.view(reduction.wire)[-size:] if size else source[:0]
                else:
                    inbox = self._pool.take(size * (span - 1), reduction.wire)
                for row, peer in enumerate(self.group.peers_within(span)):
                    outgoing, incoming = source.narrow(0, peer % span * size, size), inbox.narrow(0, row * size, size)
                    yield PeerExchange(peer, outgoing, incoming), tag
                jobs.append((reduction, source, inbox))

        def add() -> None:
            for reduction, source, inbox in jobs:
                self._add(reduction, source, inbox)

        return self._start("reduce-scatter", exchanges(), add)

    def _span(self, operation: Reduction | AllGatherOp) -> int:
        """Return the number of ranks that take part in an operation."""
        return operation.span or self.group.size

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        def exchanges() -> Iterator[tuple[PeerExchange, int]]:
            for op in ops:
                own, tag = op.place_input(self.group.rank, self.group.size), self.reserve_tag()
                span, size = self._span(op), own.numel()
                for peer in self.group.peers_within(span):
                    yield PeerExchange(peer, own, op.output.narrow(0, peer % span * size, size)), tag

        return self._start("gather", exchanges())

    def reserve_tag(self) -> int:
        return next(self._tags) % (1 << 20)

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        tag = self.reserve_tag() if tag is None else tag
        return self._start(operation, [(each, tag) for each in exchanges])

    def _start(
        self, operation: str, exchanges: Iterable[tuple[PeerExchange, int]], then: Callable[[], None] = lambda: None
    ) -> Pending:
        """Prepare and launch exchanges with their tags on the communication stream. `then` runs after all of them."""
        group, ledger = self.group, self._ledger
        with self._comm_stream.enter(), ledger.timed(operation, group.axis):
            launched = list(exchanges)
            works = self._launch(launched)
        sent: dict[int, int] = {}
        for each, _ in launched:
            if each.outgoing.numel():
                sent[each.peer] = sent.get(each.peer, 0) + each.outgoing.nbytes
        count_sent(ledger, operation, group, sent)

        def complete() -> None:
            with ledger.timed(operation, group.axis):
                for work in works:
                    work.wait()
                then()

        return self._comm_stream.pending(complete)

    def _launch(self, exchanges: Iterable[tuple[PeerExchange, int]]) -> list[dist.Work]:
        operations: list[dist.P2POp] = []
        group, global_ranks = self.group.process_group, self.group.global_ranks
        for each, tag in exchanges:
            peer = global_ranks[each.peer]
            if each.incoming.numel():
                operations.append(dist.P2POp(dist.irecv, each.incoming, peer, group, tag))
            if each.outgoing.numel():
                operations.append(dist.P2POp(dist.isend, each.outgoing, peer, group, tag))
        return dist.batch_isend_irecv(operations) if operations else []

    def _on_wire(self, reduction: Reduction) -> torch.Tensor:
        """Return the gradient in the dtype of the transport."""
        if reduction.source.dtype == reduction.wire:
            return reduction.source
        return self._pool.take(reduction.source.numel(), reduction.wire).copy_(reduction.source)

    def _add(self, reduction: Reduction, source: torch.Tensor, inbox: torch.Tensor) -> None:
        span = self._span(reduction)
        size, place = source.numel() // span, self.group.rank % span
        pieces = {
            peer % span: inbox.narrow(0, row * size, size) for row, peer in enumerate(self.group.peers_within(span))
        }
        pieces[place] = source.narrow(0, place * size, size)
        add_tree([pieces[rank] for rank in range(span)], reduction.target, add=reduction.add)
        if not self._receives_in_target(reduction):
            self._pool.give_back(inbox)
        if source is not reduction.source:
            self._pool.give_back(source)

    def _receives_in_target(self, reduction: Reduction) -> bool:
        """Return whether one of two CPU ranks receives the slice of the other in the target, which has no value yet.

        It is received at the end of the target, so that sums of a wider dtype overwrite only what has been added. More
        ranks would need buffers of two sizes if micro-steps are accumulated. The plan counts the buffers
        (`receives_in_target`).
        """
        target, wire = reduction.target, reduction.wire
        if self._span(reduction) != 2 or target.device.type != "cpu" or reduction.add:
            return False
        is_apart = target.untyped_storage()._cdata != reduction.source.untyped_storage()._cdata
        return is_apart and (target.dtype == wire or target.itemsize > wire.itemsize)


def count_sent(ledger: Ledger, operation: str, group: Group, sent: Mapping[int, int]) -> None:
    """Count one call that sends `sent[peer]` bytes to each peer."""
    by_axis: dict[str, int] = {}
    for peer, num_bytes in sent.items():
        axis = group.axes[peer]
        by_axis[axis] = by_axis.get(axis, 0) + num_bytes
    for axis, num_bytes in (by_axis or {group.axis: 0}).items():
        ledger.count(operation, axis, num_bytes)
