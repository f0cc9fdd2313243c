"""Collectives of the backend, one call for all that travels together: the default on NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from onefold.comm.collective import AllGatherOp, CollectiveWrapper, Pending, Reduction
from onefold.comm.exchange import ACROSS, Exchange, count_sent
from onefold.comm.ledger import Ledger
from onefold.comm.mesh import Group
from onefold.comm.reduce_chunks import GradPart, rounds_of
from onefold.comm.tree import add_tree


class Native(CollectiveWrapper):
    """Reduce-scatter and gather as the backend offers them: it adds in its own order, in the wire's dtype. What only
    some ranks do together goes peer by peer.
    """

    peer_by_peer = Exchange

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        super().__init__(self.peer_by_peer(group, ledger, device), group, device)
        self._ledger = ledger

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        group, ledger = self.group, self._ledger
        with self._lane.enter(), ledger.timed("reduce-scatter", group.axis):
            # Sources stay referenced until the sums are stored: they may be casts that nobody else holds.
            sources = [reduction.source.to(reduction.wire) for reduction in reductions]
            totals = [_total(*pair, group.size) for pair in zip(reductions, sources, strict=True)]
            works = self._launch("reduce_scatter", totals, sources)
            ledger.count("reduce-scatter", group.axis, sum(total.nbytes for total in totals) * (group.size - 1))

        def complete() -> None:
            with ledger.timed("reduce-scatter", group.axis):
                for work in works:
                    work.wait()
                for reduction, _, total in zip(reductions, sources, totals, strict=True):
                    reduction.store(total)

        return self._lane.pending(complete)

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        group, ledger = self.group, self._ledger
        spanned = [op for op in ops if op.span is not None]
        whole = [op for op in ops if op.span is None]
        beside = self._plain.start_gather(spanned) if spanned else Pending(lambda: None)
        with self._lane.enter(), ledger.timed("gather", group.axis):
            lines = [op.output for op in whole]
            own = [op.place_input(group.rank, group.size) for op in whole]
            works = self._launch("all_gather", lines, own) if whole else []
            if whole:
                self._count_gathered(sum(slice_.nbytes for slice_ in own) * (group.size - 1))

        def complete() -> None:
            with ledger.timed("gather", group.axis):
                for work in works:
                    work.wait()
                beside.finish()

        return self._lane.pending(complete)

    def _count_gathered(self, num_bytes: int) -> None:
        """Each rank hands so much on to the next; one rank of each node hands it to another node, a share of it each
        where all count alike.
        """
        nodes = self.group.nodes
        across = num_bytes // nodes.common_size if len(nodes.sizes) > 1 else 0
        self._ledger.count("gather", self.group.axis, num_bytes - across)
        if across:
            self._ledger.count("gather", ACROSS, across)

    def _launch(self, kind: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[dist.Work]:
        """One call, whatever number of tensors it carries: what is to be waited for."""
        names, make_options = _COALESCED[kind]
        launch = next(found for name in names if (found := getattr(self.group.process_group, name, None)))
        options = make_options()
        options.asyncOp = self._lane.stream is None  # on a device it runs on the lane itself
        work = launch(outputs, inputs, options)
        return [work] if work is not None else []


# Renamed in torch 2.13.
_COALESCED: dict[str, tuple[tuple[str, str], Callable[[], Any]]] = {
    "all_gather": (("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), AllgatherOptions),
    "reduce_scatter": (("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), ReduceScatterOptions),
}


def _total(reduction: Reduction, source: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Where the backend leaves a sum."""
    in_place = not reduction.add and reduction.target.dtype == source.dtype
    return reduction.target if in_place else source.new_empty(source.numel() // num_ranks)


class AllToAll(Native):
    """The backend's gathers; gradients in one grouped all-to-all, added by this rank in the order of the tree, in fp32
    ([Note: one order of addition] in tree.py). As many bytes travel as in a reduce-scatter.
    """

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        group, ledger = self.group, self._ledger
        with self._lane.enter():
            rounds = list(rounds_of(reductions, [each.source.to(each.wire) for each in reductions], group.size))

        def complete() -> None:
            with ledger.timed("reduce-scatter", group.axis):
                for parts in rounds:
                    pieces = self._exchange(parts)
                    for part, ordered in zip(parts, pieces, strict=True):
                        add_tree(ordered, part.target, add=part.add)

        return self._lane.pending(complete)

    def _exchange(self, parts: Sequence[GradPart]) -> list[list[torch.Tensor]]:
        """Every rank's pieces of this rank's row, in the order of ranks."""
        group, pieces = self.group, []
        for part in parts:
            nothing = part.rows.new_empty(0)  # a rank has its own
            pieces.append(
                [nothing if rank == group.rank else torch.empty_like(part.rows[0]) for rank in range(group.size)]
            )
        outgoing = [[nothing if rank == group.rank else row for rank, row in enumerate(p.rows)] for p in parts]
        self._swap(pieces, outgoing)
        for part, incoming in zip(parts, pieces, strict=True):
            incoming[group.rank] = part.rows[group.rank]
        sent = sum(part.rows[0].nbytes for part in parts)
        count_sent(self._ledger, "reduce-scatter", group, dict.fromkeys(group.peers, sent))
        return pieces

    def _swap(self, incoming: list[list[torch.Tensor]], outgoing: list[list[torch.Tensor]]) -> None:
        """All of it in one group of calls."""
        group = self.group.process_group
        with dist.distributed_c10d._coalescing_manager(group, self._lane.device):
            for come, go in zip(incoming, outgoing, strict=True):
                dist.all_to_all(come, go, group=group)
