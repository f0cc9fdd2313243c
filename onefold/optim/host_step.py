"""The step of what rests below the device: unit by unit, by the host and by the device, beside the next forward.

[Note: the host's step]
Each shard that the host steps is one task on its thread. It waits for the shard's gradient, updates chunk by chunk,
and sends each chunk up as soon as it is updated; meanwhile later gradients come down and earlier parameters go up.
The master goes up as it is and the device casts it: two more bytes on the bus cost less than one more pass over memory
of the host, which is what bounds its step. 16-bit parameters that rest on a disk are cast by the host, over the
gradient they were made of, which is read by then. What rests on a disk passes through a few page-locked buffers: one is
read ahead while one is updated and one is written back.
All cores work on one tile together, which stays in their caches between the cast of its gradient and the update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from onefold.offload.buffer import Buffer
from onefold.offload.bus import Arrival
from onefold.offload.grad_shard import HostGrad
from onefold.offload.nvme import DiskTensor, Transfer
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.param_shard import LastUse, StepOutput
from onefold.offload.shard_store import ShardStore
from onefold.optim.device_pass import DevicePass, PassingShard
from onefold.optim.matrix_rules import WIRE, AnyRule, MatrixRule
from onefold.optim.matrix_steps import MatrixTiler, TravellingMatrices
from onefold.optim.rules import MASTER
from onefold.optim.steppers import StateWindow, Step, Tiler, Windows, whole_window
from onefold.plan import Plan, Tier
from onefold.plan.forms import BLOCK
from onefold.plan.layout import SHARD_ALIGNMENT
from onefold.plan.memory import passes_device
from onefold.recorder import Track, recorded, within

# Elements of a tile where many cores share it.
TILE = 1 << 22
# Elements that are updated before they are sent up: below this a copy costs more to start than to make.
CHUNK = 1 << 22


# Of a shard on disk: its states, and its master.
_Which = tuple[bool, bool]
STATES_ALONE, MASTER_ALONE, ALL = (True, False), (False, True), (True, True)
_Made = TypeVar("_Made")


class HostStep:
    """Steps the shards whose master and states do not rest on the device."""

    def __init__(
        self, rules: Sequence[AnyRule], memory: OffloadMemory, stores: Sequence[ShardStore], plan: Plan
    ) -> None:
        size = TILE if torch.get_num_threads() > 2 else None
        self._tiler = Tiler(rules, size)
        self._matrices = MatrixTiler(rules, size) if any(isinstance(rule, MatrixRule) for rule in rules) else None
        # What the host has made of gradients, for whole matrices, in the memory of these.
        self._prepared: dict[ShardStore, Future[torch.Tensor]] = {}
        self._memory, self._plan = memory, plan
        # Where the device steps what rests below it: beside the host's thread, and on it what comes from a disk.
        passes = [DevicePass(rules, memory.bus) if memory.bus.crosses else None for _ in range(2)]
        self._pass, self._pass_of_disk = passes
        self._on_disk = [store for store in stores if store.state_tier is Tier.NVME]
        self.make_stream()
        self._failed: BaseException | None = None
        self._delays = plan.delays_host
        self._late: list[tuple[ShardStore, Future[Arrival]]] = []
        # What the last step asked for, also once it has been waited for: other threads may ask at any time.
        self._asked: list[Future[Arrival]] = []

    def make_stream(self) -> None:
        """Make the buffers that states on disk pass through, as large as the states of the stores need now."""
        self._stream = StateStream(self._memory, self._on_disk) if self._on_disk else None

    @property
    def is_late(self) -> bool:
        return bool(self._late)

    def collect(self) -> None:
        """In delayed mode, start using the parameters computed by the previous step."""
        self.refuse_late_writes()
        arrivals = []
        for store, step in self._late:
            step.result()
            arrivals.append(store.push())
        for arrival in arrivals:
            arrival.wait()
        self._late.clear()

    def refuse_late_writes(self) -> None:
        """Raise if a parameter was written in place while a delayed step computes its next value."""
        written = ShardStore.written([store for store, _ in self._late])
        if written:
            names = ", ".join(sorted({store.unit for store in written}))
            raise RuntimeError(
                f"parameters of {names} were written in place after a step with onefold.delayed_host_step: the values "
                "of that step arrive at the next one and would replace them. Write inside zero.GatheredParameters, "
                "which collects the step first, or turn delayed_host_step off"
            )

    def wait(self) -> None:
        """Until all is stepped that was asked for; raises if not all of it could be. Any thread may ask."""
        for step in list(self._asked):
            step.result()
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier offloaded step failed ({type(self._failed).__name__}: {self._failed}), and some of its "
                "states are stepped and some are not: load a checkpoint into a new engine"
            ) from self._failed

    def start(self, stores: Sequence[ShardStore], step: Step) -> None:
        """Each store is told when it is stepped. They are stepped in this order: those that the host steps, and beside
        them those that pass through the device.
        """
        self._check()
        if self._delays:
            for store in stores:
                _gradient_of(store).wait()
        asked = []
        last_use = self._memory.bus.now()
        if self._stream is not None:
            for store in stores:
                self._stream.plan([store], STATES_ALONE if store.spec.kept.as_matrices else ALL)
        passing: dict[ShardStore, _Pass] = {}
        try:
            for store in stores:
                gradient = _gradient_of(store).value
                assert gradient is not None
                if store.spec.kept.as_matrices:
                    self._prepared[store] = self._submit("host prepares", store, self._prepare, store, gradient, step)
                    continue
                stepped: Future[Arrival]
                if self._passes(store) and store.state_tier is not Tier.NVME:
                    passing[store] = _Pass(gradient, stepped := Future())
                else:
                    stepped = self._submit("host step", store, self._step, store, gradient, step, last_use)
                asked.append(stepped)
                if self._delays:
                    self._late.append((store, stepped))
                    _gradient_of(store).swap()
                else:
                    store.start_step(stepped)
            self._asked = asked
            if passing:
                self._memory.pass_worker.submit(self._pass_all, passing, step, last_use)
        except BaseException as error:  # an interrupt: nobody may wait for what is not asked for
            self._failed = RuntimeError("the step was interrupted before all of it was asked for")
            self._failed.__cause__ = error
            for each in passing.values():
                each.fail(self._failed)
            raise

    def _submit(self, what: str, store: ShardStore, work: Callable[..., _Made], *given: Any) -> Future[_Made]:
        """On the host's thread. After an error nothing more is stepped."""

        def attempt() -> _Made:
            if self._failed is not None:
                raise self._failed.with_traceback(None)
            try:
                with recorded(Track.STEP, what, store.unit, numel=store.stop - store.start, by_host=True):
                    return work(*given)
            except BaseException as error:
                self._failed = error
                raise

        return self._memory.worker.submit(attempt)

    @torch.no_grad()
    def _step(self, store: ShardStore, gradient: torch.Tensor, step: Step, last_use: LastUse) -> Arrival:
        output = self._output(store, gradient, last_use)
        for window in self._windows(store):
            if self._passes(store):
                assert self._pass_of_disk is not None
                self._pass_of_disk.take(PassingShard(store, gradient, output, step, last_use), window)
            else:
                for start, stop in pairwise([*range(window.start, window.stop, CHUNK), window.stop]):
                    self._tiler.step(store, window, start, stop, gradient, output.memory(start, stop), step)
                    output.send(window.master[start - window.start : stop - window.start].weight, start, stop)
            if self._stream is not None:
                output.leave()
        return store.finish_output(output)

    def _output(self, store: ShardStore, gradient: torch.Tensor, last_use: LastUse) -> StepOutput:
        """The shard may be stepped: its gradient is there, and nothing reads the master."""
        if not self._delays:  # with a delay another gradient may be on its way by now
            _gradient_of(store).wait()
        store.wait_for_master()
        return StepOutput() if self._delays else store.output(gradient, last_use)

    # -- what passes through the device ----------------------------------------------------------------------------

    def _passes(self, store: ShardStore) -> bool:
        return self._pass is not None and passes_device(self._plan, store.spec)

    @torch.no_grad()
    def _pass_all(self, passing: Mapping[ShardStore, _Pass], step: Step, last_use: LastUse) -> None:
        assert self._pass is not None
        try:
            for store, (gradient, stepped) in passing.items():
                if self._failed is not None:
                    raise self._failed.with_traceback(None)
                with recorded(Track.STEP, "device step", store.unit, numel=store.stop - store.start, by_host=True):
                    output = self._output(store, gradient, last_use)
                    shard = PassingShard(store, gradient, output, step, last_use)
                    for window in whole_window(store):
                        self._pass.start(shard, window, partial(_tell_stepped, store, output, stepped))
            self._pass.finish()
        except BaseException as error:
            self._failed = self._failed or error
            self._pass.abandon()
            for each in passing.values():
                each.fail(self._failed)

    # -- whole matrices: two passes, and the device between them --------------------------------------------------

    @torch.no_grad()
    def _prepare(self, store: ShardStore, gradient: torch.Tensor, step: Step) -> torch.Tensor:
        """States with the gradient, in whose memory lies afterwards what matrices are made of."""
        assert self._matrices is not None
        _gradient_of(store).wait()
        update = gradient.view(WIRE)[: store.stop - store.start]
        for window in self._windows(store):
            self._matrices.prepare(store, window, gradient, update, step)
        return update

    def prepared(self, store: ShardStore) -> torch.Tensor:
        """The same on the device, as the caller's stream sees it."""
        here = self._prepared[store].result()
        update = torch.empty(here.shape, dtype=here.dtype, device=store.device)
        self._memory.bus.up(here, update).order()
        return update

    def start_finish(self, part: TravellingMatrices, step: Step) -> None:
        """The update is on the device: it comes down, and the host steps the master with it."""
        store = part.store
        here = self._prepared.pop(store).result()
        arrival = self._memory.bus.down(part.update, here)
        last_use = self._memory.bus.now()
        stepped = self._submit("host step", store, self._finish, part, here, arrival, step, last_use)
        self._asked.append(stepped)
        store.start_step(stepped)

    @torch.no_grad()
    def _finish(
        self,
        part: TravellingMatrices,
        here: torch.Tensor,
        arrival: Arrival,
        step: Step,
        last_use: LastUse,
    ) -> Arrival:
        assert self._matrices is not None
        arrival.wait()
        store, below = part.store, replace(part, update=here)
        store.wait_for_master()
        # Weights on their way to a disk are written over the update they were made of, which is as wide as they are.
        output = store.output(here, last_use)
        if self._stream is not None:
            self._stream.plan([store], MASTER_ALONE)
        for window in self._windows(store):
            for start, stop in pairwise([*range(window.start, window.stop, CHUNK), window.stop]):
                self._matrices.finish(below, window, start, stop, output.memory(start, stop), step)
                output.send(window.master[start - window.start : stop - window.start].weight, start, stop)
            if self._stream is not None:
                output.leave()
        return store.finish_output(output)

    @contextmanager
    def rewriting(self, stores: Sequence[ShardStore]) -> Iterator[Windows]:
        """The windows of shards that may be written, to be changed in this order by something else than a step."""
        if self._stream is not None:
            self._stream.plan(stores, ALL)
        try:
            yield self._windows
        except BaseException:
            if self._stream is not None:
                self._stream.forget()
            raise

    def _windows(self, store: ShardStore) -> Iterator[StateWindow]:
        if self._stream is not None and store.state_tier is Tier.NVME:
            return self._stream.windows(store)
        return whole_window(store)


class _Pass(NamedTuple):
    """A shard that is to pass through the device."""

    gradient: torch.Tensor
    stepped: Future[Arrival]

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # it is told already
            self.stepped.set_exception(error)


def _tell_stepped(store: ShardStore, output: StepOutput, stepped: Future[Arrival]) -> None:
    with suppress(InvalidStateError):  # an interrupt has told that it failed
        stepped.set_result(store.finish_output(output))


def _gradient_of(store: ShardStore) -> HostGrad:
    assert isinstance(store.grad, HostGrad)
    return store.grad


# -- states on disk ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Passing:
    """A window in a buffer, with the transfers that fill or empty it."""

    store: ShardStore
    buffer: torch.Tensor
    window: StateWindow
    transfers: list[Transfer]


class StateStream:
    """Windows of states on disk, in the order of the step: one is read ahead, one is stepped, one is written back."""

    def __init__(self, memory: OffloadMemory, stores: Sequence[ShardStore]) -> None:
        options = memory.options.optimizer
        per_block = max(sum(buffer[:BLOCK].nbytes for buffer in _held(store).values()) for store in stores)
        longest = max(store.stop - store.start for store in stores)
        self._size = min(longest, max(options.buffer_size // SHARD_ALIGNMENT, 1) * SHARD_ALIGNMENT)
        self._buffers = memory.buffers(options.buffer_count, self._size // BLOCK * per_block)
        self._ahead, self._behind = options.pipeline_read is not False, options.pipeline_write is not False
        self._coming: deque[tuple[ShardStore, int, int, _Which]] = deque()
        self._reading: deque[_Passing] = deque()
        self._writing: deque[_Passing] = deque()

    def plan(self, stores: Sequence[ShardStore], which: _Which) -> None:
        """What the next step goes through, masters, states, or both."""
        for store in stores:
            if store.state_tier is Tier.NVME:
                length = store.stop - store.start
                lows = range(0, length, self._size)
                self._coming.extend((store, low, min(low + self._size, length), which) for low in lows)

    def windows(self, store: ShardStore) -> Iterator[StateWindow]:
        """All windows of a shard. Each is written back when the next is asked for."""
        while self._next_is(store):
            while not self._reading:
                if not self._read_next():
                    self._reclaim()
            passing = self._reading.popleft()
            while self._ahead and self._read_next():
                pass
            _wait(passing)
            try:
                yield passing.window
            except GeneratorExit:  # an error of whoever asked for it
                self._buffers.give_back(passing.buffer)
                raise
            stores = [part.start_store(memory) for part, memory in _on_disk_and_here(store, passing.window)]
            self._writing.append(replace(passing, transfers=stores))
            if not self._behind:
                self._reclaim()
        # What is gathered from the master itself must be there; and nothing is under way when a step is over.
        is_last = not self._coming and not self._reading
        while self._writing and (store.param_copy is None or is_last):
            self._reclaim()

    def forget(self) -> None:
        """After an error: what is under way ends, and what was planned is not read."""
        self._coming.clear()
        for passing in (*self._reading, *self._writing):
            for transfer in passing.transfers:
                transfer.finish()
            self._buffers.give_back(passing.buffer)
        self._reading.clear()
        self._writing.clear()

    def _next_is(self, store: ShardStore) -> bool:
        if self._reading:
            return self._reading[0].store is store
        return bool(self._coming) and self._coming[0][0] is store

    def _read_next(self) -> bool:
        """Start reading another window, if there is one and a buffer for it."""
        while self._writing and all(transfer.is_done for transfer in self._writing[0].transfers):
            self._reclaim()
        buffer = self._buffers.try_take() if self._coming else None
        if buffer is None:
            return False
        store, start, stop, which = self._coming.popleft()
        window = _window(store, start, stop, buffer, which)
        with within(store.unit):  # another one than is stepped at the moment
            loads = [part.start_load(memory) for part, memory in _on_disk_and_here(store, window)]
        self._reading.append(_Passing(store, buffer, window, loads))
        return True

    def _reclaim(self) -> None:
        """The oldest write is over: its buffer is free."""
        passing = self._writing.popleft()
        _wait(passing)
        self._buffers.give_back(passing.buffer)


def _held(store: ShardStore) -> dict[str, Buffer]:
    return {MASTER: store.master, **store.states}


def _on_disk_and_here(store: ShardStore, window: StateWindow) -> list[tuple[DiskTensor, torch.Tensor]]:
    pairs: list[tuple[Any, Any]] = []
    here = {MASTER: window.master, **window.states}
    for name, buffer in _held(store).items():
        if name in here and here[name].numel():
            pairs += zip(buffer[window.start : window.stop].parts, here[name].parts, strict=True)
    return pairs


def _window(store: ShardStore, start: int, stop: int, buffer: torch.Tensor, which: _Which) -> StateWindow:
    """In the buffer, what is asked for; a master that is not is empty."""
    found: dict[str, Buffer] = {}
    used = 0
    for name, on_disk in _held(store).items():
        if not which[name == MASTER]:
            continue
        memory = []
        for part in on_disk[start:stop].parts:
            memory.append(buffer[used : used + part.nbytes].view(part.dtype))
            used += part.nbytes
        found[name] = Buffer(memory, stop - start, on_disk.format)
    return StateWindow(start, stop, found.pop(MASTER, Buffer.of(buffer[:0])), found)


def _wait(passing: _Passing) -> None:
    for transfer in passing.transfers:
        transfer.wait()
