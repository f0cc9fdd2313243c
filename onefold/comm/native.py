"""The backend's collectives, one coalesced call for several flat parameters. The default on NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from onefold.comm.collective import AllGatherOp, CollectiveWrapper, Ledger, Pending, Reduction
from onefold.comm.exchange import Exchange, count_sent
from onefold.comm.mesh import ACROSS, Group
from onefold.comm.tree import GradChunk, add_tree, split_into_rounds


class Native(CollectiveWrapper):
    """The backend's reduce-scatter and all-gather. It adds in its own order, in the dtype of the transport.

    Operations of only some ranks are sent peer by peer.
    """

    peer_by_peer = Exchange

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        super().__init__(self.peer_by_peer(group, ledger, device), group, device)
        self._ledger = ledger

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        group, ledger = self.group, self._ledger
        reductions, others = self._start_spanned(reductions)
        with self._comm_stream.enter(), ledger.timed("reduce-scatter", group.axis):
            # Casts have no other reference, so sources are kept until the sums are stored.
            sources = [reduction.source.to(reduction.wire) for reduction in reductions]
            totals = [_total(*pair, group.size) for pair in zip(reductions, sources, strict=True)]
            works = self._launch("reduce_scatter", totals, sources) if reductions else []
            ledger.count("reduce-scatter", group.axis, sum(total.nbytes for total in totals) * (group.size - 1))

        def complete() -> None:
            with ledger.timed("reduce-scatter", group.axis):
                for work in works:
                    work.wait()
                for reduction, _, total in zip(reductions, sources, totals, strict=True):
                    reduction.store(total)
            others.finish()

        return self._comm_stream.pending(complete)

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        group, ledger = self.group, self._ledger
        spanned = [op for op in ops if op.span is not None]
        over_all = [op for op in ops if op.span is None]
        others = self._plain.start_gather(spanned) if spanned else Pending(lambda: None)
        with self._comm_stream.enter(), ledger.timed("gather", group.axis):
            lines = [op.output for op in over_all]
            own = [op.place_input(group.rank, group.size) for op in over_all]
            if len({line.dtype for line in lines}) > 1:  # gloo sends all of them in the dtype of the first
                lines, own = ([each.view(torch.uint8) for each in some] for some in (lines, own))
            works = self._launch("all_gather", lines, own) if over_all else []
            if over_all:
                self._count_gathered(sum(slice_.nbytes for slice_ in own) * (group.size - 1))

        def complete() -> None:
            with ledger.timed("gather", group.axis):
                for work in works:
                    work.wait()
                others.finish()

        return self._comm_stream.pending(complete)

    def _count_gathered(self, num_bytes: int) -> None:
        """Count the bytes of a ring all-gather: each rank sends `num_bytes` to the next rank.

        One rank of each node sends to another node. Every rank counts an equal share of that.
        """
        nodes = self.group.nodes
        across = num_bytes // nodes.common_size if len(nodes.sizes) > 1 else 0
        self._ledger.count("gather", self.group.axis, num_bytes - across)
        if across:
            self._ledger.count("gather", ACROSS, across)

    def _launch(self, kind: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[dist.Work]:
        """Launch one coalesced call, and return the work to wait for."""
        names, make_options = _COALESCED[kind]
        launch = next(found for name in names if (found := getattr(self.group.process_group, name, None)))
        options = make_options()
        options.asyncOp = self._comm_stream.stream is None  # on a device it runs on the current stream
        work = launch(outputs, inputs, options)
        return [work] if work is not None else []


# Renamed in torch 2.13.
_COALESCED: dict[str, tuple[tuple[str, str], Callable[[], Any]]] = {
    "all_gather": (("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), AllgatherOptions),
    "reduce_scatter": (("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), ReduceScatterOptions),
}


def _total(reduction: Reduction, source: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return the buffer for a sum: the target itself if the backend can write to it."""
    in_place = not reduction.add and reduction.target.dtype == source.dtype
    return reduction.target if in_place else source.new_empty(source.numel() // num_ranks)


class AllToAll(Native):
    """The backend's all-gather, and a reduce-scatter made of one grouped all-to-all.

    Each rank adds the gradients that it receives in the order of the tree, in fp32 ([Note: one order of addition] in
    tree.py). It sends as many bytes as a reduce-scatter.
    """

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        group, ledger = self.group, self._ledger
        reductions, others = self._start_spanned(reductions)
        with self._comm_stream.enter():
            rounds = list(split_into_rounds(reductions, [each.source.to(each.wire) for each in reductions], group.size))

        def complete() -> None:
            with ledger.timed("reduce-scatter", group.axis):
                for chunks in rounds:
                    pieces = self._exchange(chunks)
                    for chunk, ordered in zip(chunks, pieces, strict=True):
                        add_tree(ordered, chunk.target, add=chunk.add)
            others.finish()

        return self._comm_stream.pending(complete)

    def _exchange(self, chunks: Sequence[GradChunk]) -> list[list[torch.Tensor]]:
        """Return every rank's piece of this rank's row, in rank order."""
        group, pieces = self.group, []
        for chunk in chunks:
            nothing = chunk.rows.new_empty(0)  # a rank does not send to itself
            pieces.append(
                [nothing if rank == group.rank else torch.empty_like(chunk.rows[0]) for rank in range(group.size)]
            )
        outgoing = [[nothing if rank == group.rank else row for rank, row in enumerate(p.rows)] for p in chunks]
        self._swap(pieces, outgoing)
        for chunk, incoming in zip(chunks, pieces, strict=True):
            incoming[group.rank] = chunk.rows[group.rank]
        sent = sum(chunk.rows[0].nbytes for chunk in chunks)
        count_sent(self._ledger, "reduce-scatter", group, dict.fromkeys(group.peers, sent))
        return pieces

    def _swap(self, incoming: list[list[torch.Tensor]], outgoing: list[list[torch.Tensor]]) -> None:
        """Run all-to-alls as one group of calls."""
        group = self.group.process_group
        with dist.distributed_c10d._coalescing_manager(group, self._comm_stream.device):
            for received, sent in zip(incoming, outgoing, strict=True):
                dist.all_to_all(received, sent, group=group)
