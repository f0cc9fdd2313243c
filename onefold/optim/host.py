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

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise

import torch

from onefold.optim.pieces import Piece, Step, Tiler, Window
from onefold.optim.rules import Rule
from onefold.optim.stream import Stream
from onefold.plan import Tier
from onefold.plan.memory import master_dtype
from onefold.tier.bus import HERE, Arrival
from onefold.tier.lower import Flat, LowerTiers
from onefold.tier.nvme import DiskTensor, Transfer

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
                f"an earlier step failed on the host ({type(self._failed).__name__}: {self._failed}), and some of its "
                "states are stepped and some are not: load a checkpoint into a new engine"
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

    def rewrite(self, pieces: Sequence[Piece]) -> Callable[[Piece], Iterator[Window]]:
        """The windows of each piece, to be changed in this order by something else than a step."""
        self.wait()
        for piece in pieces:
            piece.sent.wait()
        if self._stream is not None:
            self._stream.plan(pieces)
        return self._windows

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
        self._gaps = [(low - piece.start, high - piece.start) for low, high in piece.run.layout.gaps]
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
        if target.dtype == master_dtype(target.dtype):
            return None  # the master goes to the disk as it is
        return self._gradient[start:stop].view(target.dtype)[: stop - start]

    def send(self, window: Window, start: int, stop: int) -> None:
        if self._target is None:
            return
        master = window.master[start - window.start : stop - window.start]
        if isinstance(self._target, DiskTensor):
            memory = self.memory(start, stop)
            if memory is not None:
                for low, high in self._gaps:  # what is left of a gradient there would be gathered as padding
                    memory[max(low - start, 0) : max(high - start, 0)].zero_()
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
