"""Shards over a part of the ranks, and every such part with all of them (MiCS), over any collective.

[Note: parts]
Neighbouring ranks make a part, and hold one model state between them. Gathers stay inside. A gradient is added inside
the part first, in rank order; then ranks with the same place in their parts add theirs in the order of the parts, each
of them a piece of it, and hand the pieces round: every part has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from onefold.comm.collective import Around, Gathering, Pending, Reduction, Swap


class Replicated(Around):
    """A collective whose slices lie over the ranks of a part."""

    def start_gather(self, gatherings: Sequence[Gathering]) -> Pending:
        return self._plain.start_gather([replace(each, span=each.span or self.group.num_shards) for each in gatherings])

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        with self._lane.enter():
            inside = [(*self._start_inside(reduction), self.take_turn(), self.take_turn()) for reduction in reductions]

        def complete() -> None:
            totals = []
            for pending, _, rows, turn, _ in inside:
                pending.finish()
                total = _sum(list(rows), rows.dtype)
                totals.append((total, *self._start_across(total, turn)))
            rounds = []
            for (total, pending, pieces), (*_, turn) in zip(totals, inside, strict=True):
                pending.finish()
                rounds.append(self._start_round(total, _sum(pieces, total.dtype), turn))
            for reduction, (total, *_), pending in zip(reductions, totals, rounds, strict=True):
                pending.finish()
                reduction.store(total)

        return self._lane.beside(complete)

    def _start_inside(self, reduction: Reduction) -> tuple[Pending, torch.Tensor, torch.Tensor]:
        """What is sent, and this rank's slice as it comes: a row for each rank of the part."""
        group = self.group
        source = reduction.source.to(reduction.wire).view(group.num_shards, -1)
        rows = torch.empty_like(source)
        rows[group.shard].copy_(source[group.shard])
        first = group.rank - group.shard
        others = [place for place in range(group.num_shards) if place != group.shard]
        swaps = [Swap(first + place, source[place], rows[place]) for place in others]
        return self._plain.start_swap(swaps, "reduce inside"), source, rows

    def _start_across(self, total: torch.Tensor, turn: int) -> tuple[Pending, list[torch.Tensor]]:
        """This part's piece of the sum, as each part has it."""
        outgoing = total.tensor_split(self.group.replicas)
        mine = self._part
        pieces = [outgoing[mine] if part == mine else torch.empty_like(outgoing[mine]) for part in range(len(outgoing))]
        return self._swap_with_parts(list(outgoing), pieces, turn), pieces

    def _start_round(self, total: torch.Tensor, piece: torch.Tensor, turn: int) -> Pending:
        """All pieces of the sum to all parts."""
        pieces = list(total.tensor_split(self.group.replicas))
        pieces[self._part].copy_(piece)
        return self._swap_with_parts([pieces[self._part]] * len(pieces), pieces, turn)

    def _swap_with_parts(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor], turn: int) -> Pending:
        group = self.group
        swaps = [
            Swap(part * group.num_shards + group.shard, outgoing[part], incoming[part])
            for part in range(group.replicas)
            if part != self._part
        ]
        return self._plain.start_swap(swaps, "reduce across", turn)

    @property
    def _part(self) -> int:
        return self.group.rank // self.group.num_shards


def _sum(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """In the order of the rows, in fp32 at least."""
    total = rows[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    return total
