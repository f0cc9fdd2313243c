"""Replica groups (MiCS): each group of neighbouring ranks shards a whole model state, over any collective.

[Note: replica groups]
All-gathers stay inside a replica group. A gradient is summed inside each group first. Ranks with the same place in
their groups then sum over the groups: each sums one fraction, and sends it to the others, so every group has the same
bits. Groups of 2, 4, 8, ... ranks are branches of one tree ([Note: one order of addition] in tree.py), so the bits
equal those of shards over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from onefold.comm.collective import AllGatherOp, CollectiveWrapper, PeerExchange, Pending, Reduction
from onefold.comm.tree import add_tree, sum_dtype


class Replicated(CollectiveWrapper):
    """A collective whose shards are distributed over the ranks of a replica group."""

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        return self._plain.start_gather([replace(each, span=each.span or self.group.num_shards) for each in ops])

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        with self._comm_stream.enter():
            inside = [
                (*self._start_inside(reduction), self.reserve_tag(), self.reserve_tag()) for reduction in reductions
            ]

        def complete() -> None:
            totals = []
            for pending, _, rows, tag, _ in inside:
                pending.finish()
                total = _sum(list(rows))
                totals.append((total, *self._start_across(total, tag)))
            rounds = []
            for (total, pending, fractions), (*_, tag) in zip(totals, inside, strict=True):
                pending.finish()
                rounds.append(self._start_round(total, _sum(fractions), tag))
            for reduction, (total, *_), pending in zip(reductions, totals, rounds, strict=True):
                pending.finish()
                reduction.store(total)

        return self._comm_stream.complete_in_background(complete)

    def _start_inside(self, reduction: Reduction) -> tuple[Pending, torch.Tensor, torch.Tensor]:
        """Start the sum inside the group. Return what is sent, and the buffer with one row per rank of the group."""
        group = self.group
        source = reduction.source.to(reduction.wire).view(group.num_shards, -1)
        rows = torch.empty_like(source)
        rows[group.shard].copy_(source[group.shard])
        first = group.rank - group.shard
        others = [place for place in range(group.num_shards) if place != group.shard]
        exchanges = [PeerExchange(first + place, source[place], rows[place]) for place in others]
        return self._plain.start_peer_exchange(exchanges, "reduce inside"), source, rows

    def _start_across(self, total: torch.Tensor, tag: int) -> tuple[Pending, list[torch.Tensor]]:
        """Start to exchange fractions of the sum. Return this group's fraction from every group."""
        outgoing = total.tensor_split(self.group.replicas)
        mine = self._replica
        fractions = [torch.empty_like(outgoing[mine]) for _ in outgoing]
        fractions[mine] = outgoing[mine]
        return self._exchange_with_replicas(list(outgoing), fractions, tag), fractions

    def _start_round(self, total: torch.Tensor, fraction: torch.Tensor, tag: int) -> Pending:
        """Start to send the summed fraction to all groups, and to receive theirs."""
        fractions = list(total.tensor_split(self.group.replicas))
        fractions[self._replica].copy_(fraction)
        return self._exchange_with_replicas([fractions[self._replica]] * len(fractions), fractions, tag)

    def _exchange_with_replicas(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor], tag: int) -> Pending:
        group = self.group
        exchanges = [
            PeerExchange(replica * group.num_shards + group.shard, outgoing[replica], incoming[replica])
            for replica in range(group.replicas)
            if replica != self._replica
        ]
        return self._plain.start_peer_exchange(exchanges, "reduce across", tag)

    @property
    def _replica(self) -> int:
        return self.group.rank // self.group.num_shards


def _sum(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].new_empty(rows[0].shape, dtype=sum_dtype(rows[0].dtype))
    add_tree(rows, total)
    return total
