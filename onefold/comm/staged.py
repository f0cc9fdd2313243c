"""GPU tensors over a host backend: each exchange goes down to pinned memory, across gloo, and up again.

For machines where NCCL cannot serve (two ranks on one GPU, no NCCL build). One worker thread per process group runs the
host side in launch order, so starting never blocks; finishing waits for the worker.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from onefold.comm.collective import AllGatherOp, Lane, PeerExchange, Pending, Reduction
from onefold.comm.exchange import Exchange
from onefold.comm.ledger import Ledger
from onefold.comm.mesh import Group
from onefold.recorder import carried

_workers: weakref.WeakKeyDictionary[dist.ProcessGroup, ThreadPoolExecutor] = weakref.WeakKeyDictionary()


class StagedExchange:
    """The pairwise exchange, staged through the host."""

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        self.group = group
        self._host = Exchange(group, ledger, torch.device("cpu"))
        self._lane = Lane(device)
        if group.process_group not in _workers:
            _workers[group.process_group] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onefold-staged")
        self._worker = _workers[group.process_group]

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        shards = [torch.empty(r.source.numel() // self.group.size, dtype=r.target.dtype) for r in reductions]

        def across(lines: list[torch.Tensor]) -> Pending:
            jobs = zip(lines, shards, reductions, strict=True)
            return self._host.start_reduce_scatter(
                [Reduction(line, shard, reduction.wire, add=False) for line, shard, reduction in jobs]
            )

        def up() -> None:
            for reduction, shard in zip(reductions, shards, strict=True):
                reduction.store(shard.to(reduction.target.device) if reduction.add else shard)

        return self._start([reduction.source for reduction in reductions], across, up)

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        staged: list[torch.Tensor] = []
        with self._lane.enter():
            for op in ops:
                op.place_input(self.group.rank, self.group.size)

        def across(lines: list[torch.Tensor]) -> Pending:
            staged.extend(lines)
            pairs = zip(lines, ops, strict=True)
            return self._host.start_gather([AllGatherOp(line, span=op.span) for line, op in pairs])

        def up() -> None:
            for op, line in zip(ops, staged, strict=True):
                op.output.copy_(line)

        return self._start([op.output for op in ops], across, up)

    def reserve_tag(self) -> int:
        return 0  # the worker starts everything, in one order

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        inbox = [torch.empty(exchange.incoming.shape, dtype=exchange.incoming.dtype) for exchange in exchanges]

        def across(lines: list[torch.Tensor]) -> Pending:
            jobs = zip(exchanges, lines, inbox, strict=True)
            staged = [PeerExchange(exchange.peer, line, into) for exchange, line, into in jobs]
            return self._host.start_peer_exchange(staged, operation)

        def up() -> None:
            for exchange, received in zip(exchanges, inbox, strict=True):
                exchange.incoming.copy_(received)

        return self._start([exchange.outgoing for exchange in exchanges], across, up)

    def _start(
        self, lines: Sequence[torch.Tensor], across: Callable[[list[torch.Tensor]], Pending], up: Callable[[], None]
    ) -> Pending:
        """Copy lines to the host; its exchange follows on the worker, and `up` on the lane at the finish."""
        with self._lane.enter():
            pinned = [torch.empty(line.shape, dtype=line.dtype, pin_memory=True) for line in lines]
            for host, line in zip(pinned, lines, strict=True):
                host.copy_(line, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()

        def cross() -> None:
            arrived.synchronize()
            across(pinned).finish()

        crossed = self._worker.submit(carried(cross))

        def finish() -> None:
            crossed.result()
            with self._lane.enter():
                up()
            torch.cuda.current_stream(self._lane.device).wait_stream(self._lane.stream)  # type: ignore[arg-type]

        return Pending(finish)
