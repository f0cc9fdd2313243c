"""Collectives by pairwise exchange. The default on gloo, whose rings are slower, and wherever stages must agree.

Every rank sends each peer that peer's slice and adds what it receives in rank order, in fp32: one order of addition at
any stage, which is what makes stages bit-equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist

from onefold.comm.collective import Gathering, Lane, PeerExchange, Pending, Reduction
from onefold.comm.ledger import Ledger
from onefold.comm.mesh import Group
from onefold.pool import Pool

# The ledger's group for what leaves a node, where ranks are on several.
ACROSS = "across"

_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]] = weakref.WeakKeyDictionary()


class Exchange:
    """Reduce-scatter and gather out of sends and receives."""

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        self.group = group
        self._ledger = ledger
        self._lane = Lane(device)
        self._pool = Pool(device)
        # Exchanges in flight between two ranks are told apart by tag, over all engines of a group; all ranks start
        # them in one order.
        self._tags = _tags.setdefault(group.process_group, count())

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        group, ledger = self.group, self._ledger
        if group.size == 1:
            for reduction in reductions:
                reduction.store(reduction.source)
            return Pending(lambda: None)

        operations: list[dist.P2POp] = []
        sent: dict[str, int] = {}
        jobs: list[tuple[Reduction, torch.Tensor, torch.Tensor]] = []
        with self._lane.enter(), ledger.timed("reduce-scatter", group.axis):
            for reduction in reductions:
                source, tag = self._on_wire(reduction), self._tag()
                size = source.numel() // group.size
                inbox = self._pool.take(size * (group.size - 1), reduction.wire)
                for row, peer in enumerate(group.peers):
                    operations += self._send_and_receive(
                        source.narrow(0, peer * size, size), inbox.narrow(0, row * size, size), peer, tag
                    )
                self._note(sent, group.peers, size * reduction.wire.itemsize)
                jobs.append((reduction, source, inbox))
            works = _launch(operations)
        self._count("reduce-scatter", sent)

        def complete() -> None:
            with ledger.timed("reduce-scatter", group.axis):
                for work in works:
                    work.wait()
                for reduction, source, inbox in jobs:
                    self._add_in_rank_order(reduction, source, inbox)

        return self._lane.pending(complete)

    def start_gather(self, gatherings: Sequence[Gathering]) -> Pending:
        group, ledger = self.group, self._ledger
        operations: list[dist.P2POp] = []
        sent: dict[str, int] = {}
        with self._lane.enter(), ledger.timed("gather", group.axis):
            for gathering in gatherings:
                line, own = gathering.line, gathering.place_own(group.rank, group.size)
                size, tag = own.numel(), self._tag()
                span = gathering.span or group.size
                for peer in group.peers_within(span):
                    operations += self._send_and_receive(own, line.narrow(0, peer % span * size, size), peer, tag)
                self._note(sent, group.peers_within(span), own.nbytes)
            works = _launch(operations)
        self._count("gather", sent)

        def complete() -> None:
            with ledger.timed("gather", group.axis):
                for work in works:
                    work.wait()

        return self._lane.pending(complete)

    def reserve_tag(self) -> int:
        return self._tag()

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        operations: list[dist.P2POp] = []
        sent: dict[str, int] = {}
        with self._lane.enter(), self._ledger.timed(operation, self.group.axis):
            tag = self._tag() if tag is None else tag
            for each in exchanges:
                operations += self._send_and_receive(each.outgoing, each.incoming, each.peer, tag)
                self._note(sent, [each.peer], each.outgoing.nbytes)
            works = _launch(operations)
        self._count(operation, sent)

        def complete() -> None:
            with self._ledger.timed(operation, self.group.axis):
                for work in works:
                    work.wait()

        return self._lane.pending(complete)

    def _note(self, sent: dict[str, int], peers: Sequence[int], num_bytes: int) -> None:
        """Bytes for each of some peers, by whether they are on this node."""
        group = self.group
        for peer in peers:
            axis = group.axis if group.is_near(peer) or group.node_size == group.size else ACROSS
            sent[axis] = sent.get(axis, 0) + num_bytes

    def _count(self, operation: str, sent: dict[str, int]) -> None:
        for axis, num_bytes in (sent or {self.group.axis: 0}).items():
            self._ledger.count(operation, axis, num_bytes)

    def _send_and_receive(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, tag: int
    ) -> list[dist.P2POp]:
        there, process_group = self.group.global_rank(peer), self.group.process_group
        return [
            dist.P2POp(dist.irecv, incoming, there, process_group, tag),
            dist.P2POp(dist.isend, outgoing, there, process_group, tag),
        ]

    def _tag(self) -> int:
        return next(self._tags) % (1 << 20)

    def _on_wire(self, reduction: Reduction) -> torch.Tensor:
        if reduction.source.dtype == reduction.wire:
            return reduction.source
        return self._pool.take(reduction.source.numel(), reduction.wire).copy_(reduction.source)

    def _add_in_rank_order(self, reduction: Reduction, source: torch.Tensor, inbox: torch.Tensor) -> None:
        group = self.group
        size = source.numel() // group.size
        pieces = {peer: inbox.narrow(0, row * size, size) for row, peer in enumerate(group.peers)}
        pieces[group.rank] = source.narrow(0, group.rank * size, size)
        ordered = [pieces[rank] for rank in range(group.size)]
        if reduction.wire.itemsize >= 4:
            # Sums run in a buffer that was received: the source may be the target, or still belong to the unit.
            spare = ordered[1] if group.rank == 0 else ordered[0]
            total = ordered[0]
            for piece in ordered[1:-1]:
                total = torch.add(total, piece, out=spare)
            if reduction.add or reduction.target.dtype != reduction.wire:
                reduction.store(torch.add(total, ordered[-1], out=spare))
            else:
                torch.add(total, ordered[-1], out=reduction.target)
        else:
            total = self._pool.take(size, torch.float32).copy_(ordered[0])
            for piece in ordered[1:]:
                total.add_(piece)
            reduction.store(total)
            self._pool.give_back(total)
        self._pool.give_back(inbox)
        if source is not reduction.source:
            self._pool.give_back(source)


def _launch(operations: list[dist.P2POp]) -> list[dist.Work]:
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works
