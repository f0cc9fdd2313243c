"""The seam between units and the network: gather and reduce-scatter, each in two halves, start and finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from onefold.comm.connections import record_device_launch
from onefold.comm.hang_detector import start_communicating_thread
from onefold.comm.ledger import Ledger
from onefold.comm.mesh import Group
from onefold.recorder import carried, carried_span


@dataclass
class ErrorFeedback:
    """What quantized wires have lost of one flat gradient, by hop, and how often it was kept."""

    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Reduction:
    """The reduce-scatter of one flat gradient: the sum over ranks of this rank's slice of `source` goes to `target`,
    which may be that slice itself. With `add`, it is added to what `target` holds.
    """

    source: torch.Tensor
    target: torch.Tensor
    wire: torch.dtype
    add: bool
    error: ErrorFeedback | None = None
    """What was lost of this gradient before, for wires that add it to what they encode."""

    def store(self, total: torch.Tensor) -> None:
        """The sum is known."""
        if self.add:
            self.target.add_(total)
        elif total.data_ptr() != self.target.data_ptr():
            self.target.copy_(total)


class Source(Protocol):
    """A slice that rests outside the device."""

    def copy_to(self, target: torch.Tensor) -> None:
        """Fill the target, in the order of the caller's stream."""


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
    """A tensor for one peer, and room for one from it; an empty one does not travel."""

    peer: int
    outgoing: torch.Tensor
    incoming: torch.Tensor


class Pending:
    """A started collective. `finish` orders everything the caller does next behind it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def finish(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Collective(Protocol):
    """What a unit may ask of the network. One call may carry several flat parameters."""

    group: Group

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending: ...

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        """Fill each line in place: every rank contributes its own slice."""

    def reserve_tag(self) -> int:
        """A place in the order of exchanges for one that starts later: all ranks take theirs in one order."""

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        """Exchange with some peers, who do the same. `operation` is the ledger's name for it."""


class CollectiveWrapper:
    """A collective around another one: what it does not do itself, that one does."""

    def __init__(self, plain: Collective, group: Group, device: torch.device) -> None:
        self.group = group
        self._plain = plain
        self._lane = Lane(device)

    def reserve_tag(self) -> int:
        return self._plain.reserve_tag()

    def start_peer_exchange(self, exchanges: Sequence[PeerExchange], operation: str, tag: int | None = None) -> Pending:
        return self._plain.start_peer_exchange(exchanges, operation, tag)


class Lane:
    """Where collectives run beside the compute: a stream of their own on a GPU, nothing on a CPU.

    [Note: streams]
    Work enters the lane behind everything the compute stream has queued, and leaves it through an event that the
    compute stream waits for. Buffers that travel are held by Python references until `finish`, and are allocated and
    freed on one stream each, so no tensor ever needs `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: Future[None] | None = None

    @contextmanager
    def enter(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        span = carried_span()
        if span is not None:
            span.enter(self.stream)
        with torch.cuda.stream(self.stream):
            yield
        if span is not None:
            span.leave(self.stream)

    def pending(self, complete: Callable[[], None]) -> Pending:
        """On a GPU `complete` only queues work, so it runs now; on a CPU it waits, so it runs at the finish."""
        if self.device.type == "meta":
            complete()
            return Pending(lambda: None)
        if self.stream is None:
            return Pending(complete)
        with torch.cuda.stream(self.stream):
            complete()
        span = carried_span()
        if span is not None:
            span.leave(self.stream)
        event = torch.cuda.Event()
        event.record(self.stream)
        record_device_launch(event)
        return Pending(lambda: torch.cuda.current_stream(self.device).wait_event(event))

    def beside(self, complete: Callable[[], None]) -> Pending:
        """For what talks to other ranks on its way: on a CPU threads complete it, in the order of the starts. Ranks
        may be at other places of a pass by then, and none may have to come to its finish for another to get through.
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
                    job.pop()()  # what it holds goes before anybody hears that it is done
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        start_communicating_thread(carried(run), "onefold-wires")
        return Pending(done.result)


def broadcast_from(group: Group, rank: int, tensor: torch.Tensor, ledger: Ledger) -> None:
    """Take one rank's values, in place."""
    if group.size == 1 or group.is_imagined or tensor.numel() == 0:
        return
    staged = tensor.to(group.device).contiguous()
    wire = staged.view(torch.uint8) if staged.dtype in _AS_BYTES and staged.dim() else staged
    ledger.count("broadcast", group.axis, staged.nbytes if group.rank == rank else 0)
    with ledger.timed("broadcast", group.axis):
        dist.broadcast(wire, group.global_rank(rank), group=group.process_group)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)


# Types that some backend does not know; their bytes travel all the same.
_AS_BYTES = {torch.bool, torch.int16, torch.bfloat16, torch.float16} | {
    kind for name, kind in vars(torch).items() if name.startswith(("float8_", "float4_"))
}
