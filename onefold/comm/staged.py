"""GPU tensors over a host backend: each exchange goes down to pinned memory, across gloo, and up again.

For machines where NCCL cannot serve (two ranks on one GPU, no NCCL build). One worker thread per process group runs the
host side in launch order, so starting never blocks; finishing waits for the worker.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from onefold.comm.collective import Gathering, Lane, PeerExchange, Pending, Reduction
from onefold.comm.exchange import Exchange
from onefold.comm.ledger import Ledger
from onefold.comm.mesh import Group

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
        down = self._down([reduction.source for reduction in reductions])
        shards = [
            torch.empty(line.numel() // self.group.size, dtype=r.target.dtype)
            for line, r in zip(down.lines, reductions, strict=True)
        ]

        def across() -> None:
            down.arrived.synchronize()
            self._host.start_reduce_scatter(
                [
                    Reduction(line, shard, reduction.wire, add=False)
                    for line, shard, reduction in zip(down.lines, shards, reductions, strict=True)
                ]
            ).finish()

        def up() -> None:
            for reduction, shard in zip(reductions, shards, strict=True):
                if reduction.add:
                    reduction.target.add_(shard.to(reduction.target.device))
                else:
                    reduction.target.copy_(shard)

        return self._pending(self._worker.submit(across), up)

    def start_gather(self, gatherings: Sequence[Gathering]) -> Pending:
        lines = [gathering.line for gathering in gatherings]
        with self._lane.enter():
            for gathering in gatherings:
                gathering.place_own(self.group.rank, self.group.size)
        down = self._down(lines)

        def across() -> None:
            down.arrived.synchronize()
            spans = [gathering.span for gathering in gatherings]
            pairs = zip(down.lines, spans, strict=True)
            self._host.start_gather([Gathering(line, span=span) for line, span in pairs]).finish()

        def up() -> None:
            for line, host in zip(lines, down.lines, strict=True):
                line.copy_(host)

        return self._pending(self._worker.submit(across), up)

    def reserve_tag(self) -> int:
        return 0  # the worker starts everything, in one order

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        down = self._down([exchange.outgoing for exchange in exchanges])
        inbox = [torch.empty(exchange.incoming.shape, dtype=exchange.incoming.dtype) for exchange in exchanges]

        def across() -> None:
            down.arrived.synchronize()
            pairs = zip(exchanges, down.lines, inbox, strict=True)
            self._host.start_peer_exchange(
                [PeerExchange(exchange.peer, out, into) for exchange, out, into in pairs], operation
            ).finish()

        def up() -> None:
            for exchange, host in zip(exchanges, inbox, strict=True):
                exchange.incoming.copy_(host)

        return self._pending(self._worker.submit(across), up)

    def _down(self, lines: Sequence[torch.Tensor]) -> _Down:
        with self._lane.enter():
            pinned = [torch.empty(line.shape, dtype=line.dtype, pin_memory=True) for line in lines]
            for host, line in zip(pinned, lines, strict=True):
                host.copy_(line, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return _Down(pinned, arrived)

    def _pending(self, crossed: Future[None], up: Callable[[], None]) -> Pending:
        def finish() -> None:
            crossed.result()
            with self._lane.enter():
                up()
            torch.cuda.current_stream(self._lane.device).wait_stream(self._lane.stream)  # type: ignore[arg-type]

        return Pending(finish)


class _Down:
    """Host copies on their way, and the event that says they have arrived."""

    def __init__(self, lines: list[torch.Tensor], arrived: torch.cuda.Event) -> None:
        self.lines = lines
        self.arrived = arrived
