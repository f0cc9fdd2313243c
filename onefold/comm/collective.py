"""The interface between units and the network: all-gather and reduce-scatter, each with a start and a finish.

The stream on which collectives run and the ledger that counts their calls and bytes are here too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist

from onefold.comm.guard import record_device_launch
from onefold.comm.hang_detector import start_communicating_thread
from onefold.comm.mesh import Group
from onefold.recorder import Recorder, carried, current_span


@dataclass
class ErrorFeedback:
    """The quantization errors of one flat gradient by hop, and how often each was stored."""

    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Reduction:
    """The reduce-scatter of one flat gradient.

    The sum over ranks of this rank's slice of `source` is stored in `target`, which may be that slice itself, or with
    `add` is added to it. `wire` is the dtype of the transport.
    """

    source: torch.Tensor
    target: torch.Tensor
    wire: torch.dtype
    add: bool
    error: ErrorFeedback | None = None
    """The quantization errors of earlier reductions, which quantized transport adds to the gradient."""
    span: int | None = None
    """The number of neighbouring ranks that sum, each its slice; None for all ranks."""

    def store(self, total: torch.Tensor) -> None:
        """Store the sum in `target`, or add it."""
        if self.add:
            self.target.add_(total)
        elif total.data_ptr() != self.target.data_ptr():
            self.target.copy_(total)


class Source(Protocol):
    """A slice that is stored outside the device."""

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the slice into `target`, on the caller's stream."""


@dataclass(frozen=True)
class AllGatherOp:
    """The all-gather of one flat parameter into `output`, in which each rank's slice has its place."""

    output: torch.Tensor
    input: torch.Tensor | Source | None = None
    """This rank's slice, in any dtype and tier; None if it is in `output` already."""
    lossy: bool = False
    """Whether the values may be quantized for transport. The setting is the same on all ranks."""
    span: int | None = None
    """The number of neighbouring ranks that gather, each with one slice; None for all ranks."""

    def place_input(self, rank: int, size: int) -> torch.Tensor:
        """Copy `input` to its place in `output`, and return that slice."""
        size = self.span or size
        length = self.output.numel() // size
        slice_ = self.output.narrow(0, rank % size * length, length)
        if isinstance(self.input, torch.Tensor):
            slice_.copy_(self.input)
        elif self.input is not None:
            self.input.copy_to(slice_)
        return slice_


@dataclass(frozen=True)
class PeerExchange:
    """A tensor to send to one peer, and a buffer to receive one from it. Empty tensors are not sent."""

    peer: int
    outgoing: torch.Tensor
    incoming: torch.Tensor


class Pending:
    """A collective that was started. `finish` orders everything that the caller does next after it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def finish(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Collective(Protocol):
    """The operations of a collective. One call may carry several flat parameters."""

    group: Group

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        """Start to sum gradients over ranks, each rank its slice."""

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        """Start to fill each output in place with the slices of all ranks."""

    def reserve_tag(self) -> int:
        """Return a tag for an exchange that starts later. All ranks reserve tags in the same order."""

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        """Start to exchange tensors with some peers, which do the same. `operation` is the name in the ledger."""


class CollectiveWrapper:
    """A collective around another one, which performs the operations that the wrapper does not override."""

    def __init__(self, plain: Collective, group: Group, device: torch.device) -> None:
        self.group = group
        self._plain = plain
        self._comm_stream = CommStream(device)

    def reserve_tag(self) -> int:
        return self._plain.reserve_tag()

    def _start_spanned(self, reductions: Sequence[Reduction]) -> tuple[list[Reduction], Pending]:
        """Start the reductions of only some ranks. Return those of all ranks, which are not started."""
        spanned = [reduction for reduction in reductions if reduction.span is not None]
        over_all = [reduction for reduction in reductions if reduction.span is None]
        return over_all, self._plain.start_reduce_scatter(spanned) if spanned else Pending(lambda: None)

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        return self._plain.start_peer_exchange(exchanges, operation, tag)


class CommStream:
    """The CUDA stream on which collectives overlap with compute. On a CPU there is none.

    [Note: streams]
    Work on this stream starts after everything that the compute stream has queued, and ends in an event that the
    compute stream waits for. Python references keep the buffers of a collective until `finish`, and each buffer is
    allocated and freed on one stream, so no tensor needs `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._last: Future[None] | None = None

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Run the context on this stream, after the work queued on the compute stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        span = current_span.get()
        if span is not None:
            span.enter(self.stream)
        with torch.cuda.stream(self.stream):
            yield
        if span is not None:
            span.leave(self.stream)

    def pending(self, complete: Callable[[], None]) -> Pending:
        """Return a `Pending` for `complete`. On a GPU it only queues work and runs now; on a CPU it runs at finish."""
        if self.device.type == "meta":
            complete()
            return Pending(lambda: None)
        if self.stream is None:
            return Pending(complete)
        with torch.cuda.stream(self.stream):
            complete()
        span = current_span.get()
        if span is not None:
            span.leave(self.stream)
        event = torch.cuda.Event()
        event.record(self.stream)
        record_device_launch(event)
        return Pending(lambda: torch.cuda.current_stream(self.device).wait_event(event))

    def complete_in_background(self, complete: Callable[[], None]) -> Pending:
        """Like `pending`, for a `complete` that exchanges data with other ranks. On a CPU a thread runs it.

        Threads run in the order of the starts. Without them a rank could not proceed until another rank, which may be
        at a different place of the pass, reached its finish.
        """
        if self.device.type != "cpu":
            return self.pending(complete)
        before, done, job = self._last, Future[None](), [complete]
        self._last = done

        def run() -> None:
            try:
                if before is not None:
                    before.exception()
                with torch.no_grad():
                    job.pop()()  # so that its buffers are freed before the result is set
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        start_communicating_thread(carried(run), "onefold-wires")
        return Pending(done.result)


# -- traffic -----------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One row of the ledger: calls, bytes sent by this rank, and seconds its host spent launching and waiting."""

    operation: str
    group: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """The traffic of one engine. It is cheap enough to be always on."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}
        self._lock = threading.Lock()

    def count(self, operation: str, group: str, num_bytes: int) -> None:
        """Count one call that sends `num_bytes`."""
        with self._lock:  # the thread of the offloaded step counts too
            row = self._row(operation, group)
            row.calls += 1
            row.bytes += num_bytes
        recorder = Recorder.active
        if recorder is not None:
            recorder.count(operation, num_bytes)

    @contextmanager
    def timed(self, operation: str, group: str) -> Iterator[None]:
        """Add the time spent in the context to the seconds of an operation."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:  # background threads of collectives are timed too
                self._row(operation, group).seconds += spent

    def rows(self) -> list[Row]:
        """Return a copy of the rows, sorted by group and operation."""
        with self._lock:
            rows = [replace(row) for row in self._rows.values()]
        return sorted(rows, key=lambda row: (row.group, row.operation))

    def bytes(self, operation: str) -> int:
        """Return the bytes sent by an operation over all groups."""
        return sum(row.bytes for row in self.rows() if row.operation == operation)

    def calls(self, operation: str) -> int:
        """Return the number of calls of an operation over all groups."""
        return sum(row.calls for row in self.rows() if row.operation == operation)

    def copy(self) -> Ledger:
        """Return a copy of the current counts."""
        other = Ledger()
        other._rows = {(row.operation, row.group): row for row in self.rows()}
        return other

    def since(self, earlier: Ledger) -> Ledger:
        """Return what was counted since an earlier copy."""
        later = self.copy()
        for before in earlier.rows():
            row = later._row(before.operation, before.group)
            row.calls -= before.calls
            row.bytes -= before.bytes
            row.seconds -= before.seconds
        return later

    def clear(self) -> None:
        """Remove all rows."""
        with self._lock:
            self._rows.clear()

    def table(self) -> str:
        """Return the rows as a text table."""
        lines = [f"{'operation':<16}{'group':<8}{'calls':>8}{'MB sent':>12}{'host s':>10}"]
        lines += [
            f"{row.operation:<16}{row.group:<8}{row.calls:>8}{row.bytes / 1e6:>12.2f}{row.seconds:>10.3f}"
            for row in self.rows()
        ]
        return "\n".join(lines)

    def _row(self, operation: str, group: str) -> Row:
        return self._rows.setdefault((operation, group), Row(operation, group))


# -- broadcast ---------------------------------------------------------------------------------------------------------


def broadcast_from(group: Group, rank: int, tensor: torch.Tensor, ledger: Ledger) -> None:
    """Overwrite a tensor with the values of one rank."""
    if group.size == 1 or group.is_fake or tensor.numel() == 0:
        return
    staged = tensor.to(group.device).contiguous()
    wire = staged.view(torch.uint8) if staged.dtype in _AS_BYTES and staged.dim() else staged
    ledger.count("broadcast", group.axis, staged.nbytes if group.rank == rank else 0)
    with ledger.timed("broadcast", group.axis):
        dist.broadcast(wire, group.global_rank(rank), group=group.process_group)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)


# Dtypes that some backend does not support. Their bytes are sent instead.
_AS_BYTES = {torch.bool, torch.int16, torch.bfloat16, torch.float16} | {
    kind for name, kind in vars(torch).items() if name.startswith(("float8_", "float4_"))
}
