"""The step of what rests below the device: on the host's thread, unit by unit, beside whatever the device does.

[Note: the host's step]
Each shard is one task. It waits for the shard's gradient, updates chunk by chunk, and sends each chunk up as soon as
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

from onefold.offload.bus import Arrival
from onefold.offload.grad_shard import HostGrad
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.param_shard import StepOutput
from onefold.offload.shard_store import ShardStore
from onefold.optim.rules import Rule
from onefold.optim.state_stream import StateStream
from onefold.optim.steppers import StateWindow, Step, Tiler
from onefold.plan import Tier

# Elements of a tile where many cores share it.
TILE = 1 << 22
# Elements that are updated before they are sent up: below this a copy costs more to start than to make.
CHUNK = 1 << 22


class HostStep:
    """Steps the shards whose master and states do not rest on the device."""

    def __init__(self, rule: Rule, memory: OffloadMemory, stores: Sequence[ShardStore], *, delays: bool) -> None:
        self._tiler = Tiler(rule, TILE if torch.get_num_threads() > 2 else None)
        self._memory = memory
        on_disk = [store for store in stores if store.state_tier is Tier.NVME]
        self._stream = StateStream(memory, on_disk) if on_disk else None
        self._failed: BaseException | None = None
        self._delays = delays
        self._late: list[tuple[ShardStore, Future[Arrival]]] = []
        # What the last step asked for, also once it has been waited for: other threads may ask at any time.
        self._asked: list[Future[Arrival]] = []

    @property
    def is_late(self) -> bool:
        return bool(self._late)

    def collect(self) -> None:
        """With a delay: what the last step made is used from now on."""
        arrivals = []
        for store, step in self._late:
            step.result()
            arrivals.append(store.push())
        for arrival in arrivals:
            arrival.wait()
        self._late.clear()

    def wait(self) -> None:
        """Until all is stepped that was asked for; raises if not all of it could be. Any thread may ask."""
        for step in list(self._asked):
            step.result()
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier step failed on the host ({type(self._failed).__name__}: {self._failed}), and some of its "
                "states are stepped and some are not: load a checkpoint into a new engine"
            ) from self._failed

    def start(self, stores: Sequence[ShardStore], step: Step) -> None:
        """Each store is told when it is stepped. They are stepped in this order."""
        self._check()
        if self._delays:
            for store in stores:
                _gradient_of(store).wait()
        asked = []
        last_use = self._memory.bus.now()
        if self._stream is not None:
            self._stream.plan(stores)
        for store in stores:
            gradient = _gradient_of(store).value
            assert gradient is not None
            stepped = self._memory.worker.submit(self._try, store, gradient, step, last_use)
            asked.append(stepped)
            if self._delays:
                self._late.append((store, stepped))
                _gradient_of(store).swap()
            else:
                store.start_step(stepped)
        self._asked = asked

    def _try(self, store: ShardStore, gradient: torch.Tensor, step: Step, last_use: torch.cuda.Event | None) -> Arrival:
        """After an error nothing more is stepped."""
        if self._failed is not None:
            raise self._failed.with_traceback(None)
        try:
            return self._step(store, gradient, step, last_use)
        except BaseException as error:
            self._failed = error
            raise

    @torch.no_grad()
    def _step(
        self, store: ShardStore, gradient: torch.Tensor, step: Step, last_use: torch.cuda.Event | None
    ) -> Arrival:
        if not self._delays:  # with a delay another gradient may be on its way by now
            _gradient_of(store).wait()
        store.wait_for_master()
        output = StepOutput() if self._delays else store.output(gradient, last_use)
        for window in self._windows(store):
            edges = [*range(window.start, window.stop, CHUNK), window.stop]
            for start, stop in pairwise(edges):
                self._tiler.step(store, window, start, stop, gradient, output.memory(start, stop), step)
                output.send(window.master[start - window.start : stop - window.start], start, stop)
            if self._stream is not None:
                output.leave()
        return store.finish_output(output)

    def rewrite(self, stores: Sequence[ShardStore]) -> Callable[[ShardStore], Iterator[StateWindow]]:
        """The windows of each shard, to be changed in this order by something else than a step."""
        self.wait()
        for store in stores:
            store.wait_for_master()
        if self._stream is not None:
            self._stream.plan(stores)
        return self._windows

    def _windows(self, store: ShardStore) -> Iterator[StateWindow]:
        if self._stream is not None and store.state_tier is Tier.NVME:
            yield from self._stream.windows(store)
        else:
            yield StateWindow.whole(store)


def _gradient_of(store: ShardStore) -> HostGrad:
    assert isinstance(store.grad, HostGrad)
    return store.grad
