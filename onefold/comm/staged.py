"""Exchanges of GPU tensors over gloo: copied to pinned host memory, sent, and copied back.

For nodes on which NCCL does not work (two ranks on one GPU, no NCCL build). One worker thread per process group runs
the host side in launch order, so that starting never blocks. Finishing waits for the worker.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from onefold.comm.collective import AllGatherOp, CommStream, Ledger, PeerExchange, Pending, Reduction
from onefold.comm.exchange import Exchange
from onefold.comm.mesh import Group
from onefold.recorder import carried

_workers: weakref.WeakKeyDictionary[dist.ProcessGroup, ThreadPoolExecutor] = weakref.WeakKeyDictionary()


class StagedExchange:
    """The pairwise exchange, staged through host memory."""

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        self.group = group
        self._host = Exchange(group, ledger, torch.device("cpu"))
        self._comm_stream = CommStream(device)
        if group.process_group not in _workers:
            _workers[group.process_group] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onefold-staged")
        self._worker = _workers[group.process_group]

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        shards = [torch.empty(r.target.shape, dtype=r.target.dtype) for r in reductions]

        def send(sources: list[torch.Tensor]) -> Pending:
            jobs = zip(sources, shards, reductions, strict=True)
            return self._host.start_reduce_scatter(
                [
                    Reduction(source, shard, reduction.wire, add=False, span=reduction.span)
                    for source, shard, reduction in jobs
                ]
            )

        def copy_back() -> None:
            for reduction, shard in zip(reductions, shards, strict=True):
                reduction.store(shard.to(reduction.target.device) if reduction.add else shard)

        return self._start([reduction.source for reduction in reductions], send, copy_back)

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        staged: list[torch.Tensor] = []
        with self._comm_stream.enter():
            for op in ops:
                op.place_input(self.group.rank, self.group.size)

        def send(outputs: list[torch.Tensor]) -> Pending:
            staged.extend(outputs)
            pairs = zip(outputs, ops, strict=True)
            return self._host.start_gather([AllGatherOp(output, span=op.span) for output, op in pairs])

        def copy_back() -> None:
            for op, output in zip(ops, staged, strict=True):
                op.output.copy_(output)

        return self._start([op.output for op in ops], send, copy_back)

    def reserve_tag(self) -> int:
        return 0  # the worker starts all exchanges in one order

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        inbox = [torch.empty(exchange.incoming.shape, dtype=exchange.incoming.dtype) for exchange in exchanges]

        def send(outgoing: list[torch.Tensor]) -> Pending:
            jobs = zip(exchanges, outgoing, inbox, strict=True)
            staged = [PeerExchange(exchange.peer, tensor, into) for exchange, tensor, into in jobs]
            return self._host.start_peer_exchange(staged, operation)

        def copy_back() -> None:
            for exchange, received in zip(exchanges, inbox, strict=True):
                exchange.incoming.copy_(received)

        return self._start([exchange.outgoing for exchange in exchanges], send, copy_back)

    def _start(
        self,
        tensors: Sequence[torch.Tensor],
        send: Callable[[list[torch.Tensor]], Pending],
        copy_back: Callable[[], None],
    ) -> Pending:
        """Copy tensors to the host, and `send` them on the worker. `copy_back` runs at finish."""
        with self._comm_stream.enter():
            pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(pinned, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()

        def exchange() -> None:
            copied.synchronize()
            send(pinned).finish()

        exchanged = self._worker.submit(carried(exchange))

        def finish() -> None:
            exchanged.result()
            with self._comm_stream.enter():
                copy_back()
            torch.cuda.current_stream(self._comm_stream.device).wait_stream(self._comm_stream.stream)  # type: ignore[arg-type]

        return Pending(finish)
