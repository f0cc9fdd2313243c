"""The step of what rests below the device: on the host's thread, unit by unit, beside whatever the device does.

[Note: the host's step]
Each run is one task. It waits for the run's gradient, updates stretch by stretch, and sends each stretch up as soon as
it is updated; meanwhile later gradients come down and earlier parameters go up. The master goes up as it is and the
device casts it: two more bytes on a bus that has time, for a pass over memory of a host that has none. Where 16-bit
parameters rest below the device, the host casts them; on their way to a disk they are written over the gradient they
were made of, which is read by then. What rests on a disk passes through a few page-locked buffers: one is read ahead
while one is updated and one is written back.
All cores work on one tile together, which stays in their caches between the cast of its gradient and the update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import torch

from onefold.optim.pieces import Piece, Step, Tiler, Window
from onefold.optim.rules import Rule
from onefold.plan import Tier
from onefold.tier.bus import HERE, Arrival
from onefold.tier.lower import Buffers, DiskTensor, Flat, LowerTiers, Transfer

# Elements of a tile where many cores share it.
TILE = 1 << 22
# Elements that are updated before they are sent up: below this a copy costs more to start than to make.
STRETCH = 1 << 22


class HostStep:
    """Steps the pieces that do not rest on the device."""

    def __init__(self, rule: Rule, lower: LowerTiers, pieces: Sequence[Piece], *, delays: bool) -> None:
        self._tiler = Tiler(rule, TILE if torch.get_num_threads() > 2 else None)
        self._lower = lower
        on_disk = [piece for piece in pieces if piece.run.rest.states is Tier.NVME]
        self._stream = Stream(lower, on_disk) if on_disk else None
        self._failed: BaseException | None = None
        self._delays = delays
        self._late: list[tuple[Piece, Future[Arrival]]] = []
        # What the last step asked for, also once it has been waited for: other threads may ask at any time.
        self._asked: list[Future[Arrival]] = []

    @property
    def is_late(self) -> bool:
        return bool(self._late)

    def collect(self) -> None:
        """With a delay: what the last step made is used from now on."""
        arrivals = []
        for piece, update in self._late:
            update.result()
            arrivals.append(piece.tell())
        for arrival in arrivals:
            arrival.wait()
        self._late.clear()

    def wait(self) -> None:
        """Until all is stepped that was asked for; raises if not all of it could be. Any thread may ask."""
        for update in list(self._asked):
            update.result()
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                "an earlier step failed on the host, and some of its states are stepped and some are not: load a "
                "checkpoint into a new engine"
            ) from self._failed

    def start(self, pieces: Sequence[Piece], step: Step) -> None:
        """Each piece's run is told when it is done. Pieces are stepped in this order."""
        self._check()
        if self._delays:
            for piece in pieces:
                piece.run.wait_for_reduced()
        asked = []
        used = self._lower.bus.now()
        if self._stream is not None:
            self._stream.plan(pieces)
        for piece in pieces:
            assert piece.run.update is None
            assert piece.run.reduced is not None
            update = self._lower.worker.submit(self._try, piece, piece.run.reduced, step, used)
            asked.append(update)
            if self._delays:
                self._late.append((piece, update))
                piece.run.swap_shards()
            else:
                piece.run.update = update
        self._asked = asked

    def _try(self, piece: Piece, gradient: torch.Tensor, step: Step, used: torch.cuda.Event | None) -> Arrival:
        """After an error nothing more is stepped."""
        if self._failed is not None:
            raise self._failed.with_traceback(None)
        try:
            return self._step(piece, gradient, step, used)
        except BaseException as error:
            self._failed = error
            raise

    @torch.no_grad()
    def _step(self, piece: Piece, gradient: torch.Tensor, step: Step, used: torch.cuda.Event | None) -> Arrival:
        if not self._delays:  # with a delay another gradient may be on its way by now
            piece.run.wait_for_reduced()
        piece.sent.wait()  # a unit that nothing has used since may still be on its way up
        out = _Out(None if self._delays else piece.out, piece, gradient, self._lower, used)
        for window in self._windows(piece):
            edges = [*range(window.start, window.stop, STRETCH), window.stop]
            for start, stop in pairwise(edges):
                self._tiler.step(piece, window, start, stop, gradient, out.memory(start, stop), step)
                out.send(window, start, stop)
            if self._stream is not None:
                out.leave()
        if out.casts_on_device:
            assert isinstance(piece.master, torch.Tensor)
            piece.run.fresh = piece.master
        piece.sent = out.finish()
        return piece.sent

    def _windows(self, piece: Piece) -> Iterator[Window]:
        if self._stream is not None and piece.run.rest.states is Tier.NVME:
            yield from self._stream.windows(piece)
        else:
            yield Window.whole(piece)


class _Out:
    """Where a piece's updated parameters go."""

    def __init__(
        self,
        target: Flat | None,
        piece: Piece,
        gradient: torch.Tensor,
        lower: LowerTiers,
        used: torch.cuda.Event | None,
    ) -> None:
        self._target, self._bus, self._used = target, lower.bus, used
        self._arrival: Arrival = HERE
        self._stores: list[Transfer] = []
        self._goes_up = piece.run.rest.parameters is Tier.DEVICE
        self._gradient = gradient
        # A shard beside its master on the host takes the device's cast of it when it is next gathered.
        on_host = isinstance(target, torch.Tensor) and not target.is_cuda and isinstance(piece.master, torch.Tensor)
        self.casts_on_device = on_host and self._bus.crosses

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """What tiles are cast into: the target where the host can write to it, the gradient on the way to a disk."""
        target = self._target
        if target is None or target.is_cuda or self.casts_on_device:
            return None
        if isinstance(target, torch.Tensor):
            return target[start:stop]
        if target.dtype == torch.promote_types(target.dtype, torch.float32):
            return None  # the master goes to the disk as it is
        return self._gradient[start:stop].view(target.dtype)[: stop - start]

    def send(self, window: Window, start: int, stop: int) -> None:
        if self._target is None:
            return
        master = window.master[start - window.start : stop - window.start]
        if isinstance(self._target, DiskTensor):
            memory = self.memory(start, stop)
            self._stores.append(self._target[start:stop].start_store(master if memory is None else memory))
        elif self._target.is_cuda:
            self._arrival = self._bus.up(master, self._target[start:stop], self._used)
        elif self._goes_up:
            self._bus.count("up", master.nbytes)

    def leave(self) -> None:
        """The window's memory may be about to be used for another."""
        self._arrival.wait()
        self._wait_for_stores()

    def finish(self) -> Arrival:
        self._wait_for_stores()
        return self._arrival

    def _wait_for_stores(self) -> None:
        for store in self._stores:
            store.wait()
        self._stores.clear()


@dataclass(frozen=True)
class _Passing:
    """A window in a buffer, with the transfers that fill or empty it."""

    piece: Piece
    buffer: torch.Tensor
    window: Window
    transfers: list[Transfer]


class Stream:
    """Windows of pieces on disk, in the order of the step: read ahead, lent, written back."""

    def __init__(self, lower: LowerTiers, pieces: Sequence[Piece]) -> None:
        options = lower.disk_options
        per_element = max(sum(flat.itemsize for flat in _parts(piece).values()) for piece in pieces)
        longest = max(piece.stop - piece.start for piece in pieces)
        self._size = min(longest, max(options.buffer_size // 2048, 1) * 2048)
        self._buffers: Buffers = lower.buffers(options.num_buffers, self._size * per_element)
        self._ahead, self._behind = options.reads_ahead, options.writes_behind
        self._coming: deque[tuple[Piece, int, int]] = deque()
        self._reading: deque[_Passing] = deque()
        self._writing: deque[_Passing] = deque()

    def plan(self, pieces: Sequence[Piece]) -> None:
        """What the next step goes through."""
        for piece in pieces:
            if piece.run.rest.states is Tier.NVME:
                length = piece.stop - piece.start
                self._coming.extend((piece, low, min(low + self._size, length)) for low in range(0, length, self._size))

    def windows(self, piece: Piece) -> Iterator[Window]:
        """All windows of a piece. Each is written back when the next is asked for."""
        while self._next_is(piece):
            while not self._reading:
                if not self._read_next():
                    self._reclaim()
            passing = self._reading.popleft()
            while self._ahead and self._read_next():
                pass
            _wait(passing)
            yield passing.window
            parts = _parts(piece)
            stores = [
                flat[passing.window.start : passing.window.stop].start_store(memory)
                for flat, memory in zip(parts.values(), _tensors(passing.window), strict=True)
            ]
            self._writing.append(_Passing(piece, passing.buffer, passing.window, stores))
            if not self._behind:
                self._reclaim()
        # What is gathered from the master itself must be there; and nothing is under way when a step is over.
        is_last = not self._coming and not self._reading
        while self._writing and (piece.out is None or is_last):
            self._reclaim()

    def _next_is(self, piece: Piece) -> bool:
        if self._reading:
            return self._reading[0].piece is piece
        return bool(self._coming) and self._coming[0][0] is piece

    def _read_next(self) -> bool:
        """Start reading another window, if there is one and a buffer for it."""
        while self._writing and all(transfer.is_done for transfer in self._writing[0].transfers):
            self._reclaim()
        buffer = self._buffers.try_take() if self._coming else None
        if buffer is None:
            return False
        piece, start, stop = self._coming.popleft()
        window = _window(piece, start, stop, buffer)
        loads = [
            flat[start:stop].start_load(memory)
            for flat, memory in zip(_parts(piece).values(), _tensors(window), strict=True)
        ]
        self._reading.append(_Passing(piece, buffer, window, loads))
        return True

    def _reclaim(self) -> None:
        """The oldest write is over: its buffer is free."""
        passing = self._writing.popleft()
        _wait(passing)
        self._buffers.give_back(passing.buffer)


def _parts(piece: Piece) -> dict[str, DiskTensor]:
    parts = {"master": piece.master, **piece.states}
    return {name: flat for name, flat in parts.items() if isinstance(flat, DiskTensor)}


def _tensors(window: Window) -> list[torch.Tensor]:
    return [window.master, *window.states.values()]


def _window(piece: Piece, start: int, stop: int, buffer: torch.Tensor) -> Window:
    memory, used = {}, 0
    for name, flat in _parts(piece).items():
        size = (stop - start) * flat.itemsize
        memory[name] = buffer[used : used + size].view(flat.dtype)
        used += size
    return Window(start, stop, memory.pop("master"), memory)


def _wait(passing: _Passing) -> None:
    for transfer in passing.transfers:
        transfer.wait()
