"""The step of offloaded shards: which thread updates which shard, and who waits for it.

[Note: the offloaded step]
A shard whose master and states are in host memory or on NVMe is stepped by one of two threads, while the main thread
goes on to the next forward:

* The **host thread** updates shards on the CPU (`step_shard`), and all shards on NVMe.
* The **stream thread** streams shards through the GPU (`gpu_stream.py`), if the plan assigns shards to it
  ([Note: host and device step together]).

Each shard is one task. It waits for the shard's gradient to arrive from the device, updates the shard chunk by chunk,
and publishes each chunk as soon as it is updated; meanwhile gradients of later shards are copied to the host and
parameters of earlier ones to the device. The next all-gather of a shard waits for its task (`ShardStore.finish_step`).
With `delayed_host_step` the next step collects it instead (`collect`).

The host sends the fp32 master, and the device casts it: two more bytes on the bus cost less than another pass over host
memory, whose bandwidth bounds the host's step. All cores work on one tile together, which stays in their caches between
the cast of its gradient and the update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from onefold.offload.bus import CopyEvent
from onefold.offload.grad_shard import HostGrad
from onefold.offload.host_shard import ToCache, ToHostShard
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.param_shard import LastUse, Publisher
from onefold.offload.shard_store import ShardStore
from onefold.optim.gpu_stream import IN_FLIGHT, IN_FLIGHT_IN_BACKWARD, GpuStream, StreamedShard, publish_from_host
from onefold.optim.matrix_exchange import ExchangedMatrices
from onefold.optim.matrix_rules import WIRE, AnyRule, MatrixRule
from onefold.optim.matrix_steps import MatrixUpdate
from onefold.optim.nvme_windows import EVERYTHING, MASTERS_ONLY, STATES_ONLY, NvmeWindows
from onefold.optim.pipeline import (
    ElementwiseUpdate,
    StateWindow,
    StepValues,
    Windows,
    copied_window,
    step_shard,
    whole_window,
)
from onefold.plan import Plan, Tier
from onefold.plan.traffic import is_streamed
from onefold.recorder import Track, recorded

# Elements of a tile if many cores work on it together.
SHARED_TILE = 1 << 22
# Elements that are updated before they are published. Launching a smaller copy takes longer than the copy itself.
CHUNK = 1 << 22
# The number of shards whose backward may be queued on the GPU while shards are stepped.
RUN_AHEAD = 4

_Result = TypeVar("_Result")


class OffloadedStep:
    """Steps the shards whose master and states are not on the device. See [Note: the offloaded step]."""

    def __init__(
        self, rules: Sequence[AnyRule], memory: OffloadMemory, stores: Sequence[ShardStore], plan: Plan
    ) -> None:
        size = SHARED_TILE if torch.get_num_threads() > 2 else None
        self._elementwise = ElementwiseUpdate(rules, size)
        self._matrices = MatrixUpdate(rules, size) if any(isinstance(rule, MatrixRule) for rule in rules) else None
        # The updates of whole matrices that the host computed from gradients. They overwrite the gradients.
        self._prepared: dict[ShardStore, Future[torch.Tensor]] = {}
        self._memory, self._plan = memory, plan
        # One stream for the stream thread, and one for the host thread, which streams shards on NVMe.
        self._stream = self._stream_of_nvme = None
        # The ends of the backwards of the last shards on the GPU.
        self._queued: deque[torch.cuda.Event] = deque()
        if memory.bus.crosses:
            num_in_flight = IN_FLIGHT_IN_BACKWARD if plan.steps_in_backward else IN_FLIGHT
            self._stream, self._stream_of_nvme = (
                GpuStream(rules, memory.bus, num_in_flight),
                GpuStream(rules, memory.bus),
            )
        self._on_nvme = [store for store in stores if store.state_tier is Tier.NVME]
        self.make_nvme_windows()
        self._failed: BaseException | None = None
        self._delays = plan.delays_host
        self._delayed: list[tuple[ShardStore, Future[CopyEvent]]] = []
        # Shards that were stepped during the backward, and whose new weights are not published yet.
        self._early: dict[ShardStore, EarlyTask] = {}
        # Those of them that are streamed.
        self._early_streamed: list[_StreamTask] = []
        # The tasks of the last step, also after they were waited for: any thread may call `wait` at any time.
        self._tasks: list[Future[CopyEvent]] = []

    def make_nvme_windows(self) -> None:
        """Allocate the buffers for states on NVMe, large enough for the states that the shards have now."""
        self._nvme = NvmeWindows(self._memory, self._on_nvme) if self._on_nvme else None

    @property
    def has_delayed_step(self) -> bool:
        """Whether a delayed step has not been collected."""
        return bool(self._delayed)

    def collect(self) -> None:
        """Copy the parameters that a delayed step has computed into the model weights."""
        self.refuse_writes_to_delayed()
        arrivals = []
        for store, task in self._delayed:
            task.result()
            arrivals.append(store.sync_model_weight_from_master())
        for arrival in arrivals:
            arrival.synchronize()
        self._delayed.clear()

    def refuse_writes_to_delayed(self) -> None:
        """Raise if a parameter was written in place while a delayed step computes its next value."""
        written = ShardStore.written([store for store, _ in self._delayed])
        if written:
            names = ", ".join(sorted({store.unit_name for store in written}))
            raise RuntimeError(
                f"parameters of {names} were written in place after a step with onefold.delayed_host_step, but the "
                "result of that step is applied later and would replace them. Write inside zero.GatheredParameters, "
                "which waits for the step, or set delayed_host_step to false."
            )

    def wait(self) -> None:
        """Block until the last step is complete, and raise if any of it failed. Any thread may call this."""
        for task in list(self._tasks):
            task.result()
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier offloaded step failed ({type(self._failed).__name__}: {self._failed}), so states may be "
                "updated only in part. Load a checkpoint into a new engine."
            ) from self._failed

    # -- starting a step ----------------------------------------------------------------------------------------

    def start(self, stores: Sequence[ShardStore], step: StepValues) -> None:
        """Start the step for `stores`, in order.

        Shards assigned to the host run on its thread; shards assigned to the GPU are streamed through it at the same
        time.
        """
        self._check()
        if self._early_streamed:
            self._finish_early_streamed()
        gradients = {store: _gradient_of(store).for_step() for store in stores}
        if self._delays:
            for store in stores:
                _gradient_of(store).wait()
        tasks = []
        last_use = self._memory.bus.now()
        if self._nvme is not None:
            for store in stores:
                self._nvme.queue([store], STATES_ONLY if store.spec.state_spec.as_matrices else EVERYTHING)
        streamed: dict[ShardStore, _StreamTask] = {}
        try:
            for store, gradient in gradients.items():
                if store.spec.state_spec.as_matrices:
                    self._prepared[store] = self._submit("host prepares", store, self._prepare, store, gradient, step)
                    continue
                task: Future[CopyEvent]
                if store in self._early:
                    task = self._publish(store, self._early.pop(store), last_use)
                elif self._is_streamed(store) and store.state_tier is not Tier.NVME:
                    streamed[store] = _StreamTask(gradient, task := Future())
                else:
                    task = self._submit("host step", store, self._step, store, gradient, step, last_use)
                tasks.append(task)
                if self._delays:
                    self._delayed.append((store, task))
                    _gradient_of(store).swap()
                else:
                    store.start_step(task)
            self._tasks = tasks
            if streamed:
                self._memory.stream_worker.submit(self._stream_all, streamed, step, last_use)
        except BaseException as error:  # an interrupt: no one may wait for tasks that were never submitted
            self._failed = RuntimeError("the step was interrupted while it was launched")
            self._failed.__cause__ = error
            for each in streamed.values():
                each.fail(self._failed)
            raise

    def start_early(self, store: ShardStore, step: StepValues, before_change: Callable[[], None]) -> None:
        """Start to update a shard's master and states, or its second ones, during the backward.

        `start` publishes the new weights, unless `discard_early` is called. `before_change` is called before the
        gradient changes.
        """
        self._check()
        grad, last_use = _gradient_of(store), self._memory.bus.now()
        gradient = grad.for_step()
        second = store.second
        (window,) = whole_window(store)
        target = replace(window, master=second.master, states=second.states) if second is not None else None
        early = EarlyUpdate(Publisher(), window, target)
        task: Future[CopyEvent]
        if self._is_streamed(store):
            if store.param is not None:
                early = replace(early, publisher=store.param.early_publisher())
            self._early_streamed.append(streamed := _StreamTask(gradient, task := Future(), early))
            self._memory.stream_worker.submit(self._stream_all, {store: streamed}, step, last_use, is_early=True)
        else:
            task = self._submit("host step", store, self._step, store, gradient, step, last_use, early)
        self._early[store] = EarlyTask(task, early)
        grad.read_by(task, before_change)
        self._stay_close()

    def _stay_close(self) -> None:
        """Wait until the GPU has computed the gradients of all but the last few shards of a backward.

        [Note: launches beside a full queue]
        The driver accepts about a thousand launches ahead of the GPU. A thread that launches more waits in the driver,
        and keeps the threads that step shards from launching their copies and kernels.
        """
        event = self._memory.bus.now(blocking=True)
        if event is not None:
            self._queued.append(event)
            if len(self._queued) > RUN_AHEAD:
                self._queued.popleft().synchronize()

    def discard_early(self, stores: Sequence[ShardStore]) -> None:
        """Discard the updates of some shards during the backward, after the tasks that have begun are complete."""
        tasks = {store: self._early.pop(store) for store in stores}
        running = [task for task, _ in tasks.values() if not task.cancel()]
        if self._early_streamed:
            self._finish_early_streamed().result()
        wait(running)
        for store, (_, early) in tasks.items():
            early.publisher.discard()
            _gradient_of(store).read_by(None)

    def _finish_early_streamed(self) -> Future[None]:
        """Have the stream thread complete the chunks that are in flight."""
        started, self._early_streamed = self._early_streamed, []
        return self._memory.stream_worker.submit(self._stream_all, {}, None, None, started=started)

    def _publish(self, store: ShardStore, early: EarlyTask, last_use: LastUse) -> Future[CopyEvent]:
        """Publish a shard that was updated during the backward. Return the task that completes its step."""
        updated, received = early.task, early.update.publisher
        if early.update.target is not None:
            store.use_second()  # the task has its own references
        if isinstance(received, ToCache):

            def use_cache() -> CopyEvent:
                updated.result()
                store.wait_until_master_is_free()  # an evaluation after the backward may read the old weights
                return received.publish()

            return self._memory.stream_worker.submit(use_cache)
        publisher = store.publisher(_gradient_of(store).host_memory, last_use)
        if isinstance(publisher, ToHostShard) and publisher.casts_later:
            publisher.finish()  # the next all-gather casts the master
            return updated

        def publish() -> CopyEvent:
            updated.result()
            store.wait_until_master_is_free()
            for window in whole_window(store):
                for start, stop in window.chunks(CHUNK):
                    publish_from_host(window, publisher, start, stop)
            return store.set_master_free_event(publisher.finish())

        worker = self._memory.stream_worker if self._is_streamed(store) else self._memory.worker
        return worker.submit(publish)

    def _submit(
        self, what: str, store: ShardStore, work: Callable[..., _Result], *given: Any, **named: Any
    ) -> Future[_Result]:
        """Run a task on the host thread. After an error, all later tasks fail."""

        def attempt() -> _Result:
            if self._failed is not None:
                raise self._failed.with_traceback(None)
            try:
                with recorded(Track.STEP, what, store.unit_name, numel=store.stop - store.start, by_host=True):
                    return work(*given, **named)
            except BaseException as error:
                self._failed = error
                raise

        return self._memory.worker.submit(attempt)

    # -- on the host thread -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(
        self,
        store: ShardStore,
        gradient: torch.Tensor,
        step: StepValues,
        last_use: LastUse,
        early: EarlyUpdate | None = None,
    ) -> CopyEvent:
        publisher = self._publisher(store, last_use, early)
        if self._is_streamed(store):
            assert self._stream_of_nvme is not None
            shard = self._streamed_shard(store, gradient, publisher, step, last_use)
            for window in self._windows(store):
                self._stream_of_nvme.run(shard, window)
                publisher.release()
            return store.set_master_free_event(publisher.finish())
        update = partial(self._elementwise.update, store, gradient, step)
        windows = self._windows(store)
        if early is not None and early.target is not None:
            windows = copied_window(early.window, early.target, CHUNK)
        return store.set_master_free_event(step_shard(windows, update, publisher, CHUNK))

    def _publisher(self, store: ShardStore, last_use: LastUse, early: EarlyUpdate | None) -> Publisher:
        """Wait until the shard may be updated, and return its publisher, or that of a step under the backward.

        A delayed step publishes when it is collected.
        """
        if not self._delays:  # a delayed step has waited already, and the next gradient may be arriving now
            _gradient_of(store).wait()
        store.wait_until_master_is_free()
        if self._delays:
            return Publisher()
        return early.publisher if early is not None else store.publisher(_gradient_of(store).host_memory, last_use)

    def _windows(self, store: ShardStore) -> Iterator[StateWindow]:
        if self._nvme is not None and store.state_tier is Tier.NVME:
            return self._nvme.windows(store)
        return whole_window(store)

    @contextmanager
    def rewriting(self, stores: Sequence[ShardStore]) -> Iterator[Windows]:
        """Yield a function that returns the windows of each of these shards, in order, to be changed by the caller."""
        if self._nvme is not None:
            self._nvme.queue(stores, EVERYTHING)
        try:
            yield self._windows
        except BaseException:
            if self._nvme is not None:
                self._nvme.abandon()
            raise

    # -- on the stream thread -----------------------------------------------------------------------------------

    def _is_streamed(self, store: ShardStore) -> bool:
        return self._stream is not None and is_streamed(self._plan, store.spec)

    def _streamed_shard(
        self,
        store: ShardStore,
        gradient: torch.Tensor,
        publisher: Publisher,
        step: StepValues,
        last_use: LastUse,
        target: StateWindow | None = None,
    ) -> StreamedShard:
        is_cached = gradient is _gradient_of(store).cached
        return StreamedShard(store, gradient, publisher, step, last_use, is_cached=is_cached, target=target)

    @torch.no_grad()
    def _stream_all(
        self,
        tasks: Mapping[ShardStore, _StreamTask],
        step: StepValues | None,
        last_use: LastUse,
        *,
        is_early: bool = False,
        started: Sequence[_StreamTask] = (),
    ) -> None:
        """Stream shards. With `is_early`, the last chunks are left in flight until the next call.

        `started` are tasks of earlier calls, which fail together with these.
        """
        assert self._stream is not None
        try:
            for store, (gradient, task, early) in tasks.items():
                if self._failed is not None:
                    raise self._failed.with_traceback(None)
                if task.cancelled():
                    continue
                assert step is not None
                with recorded(Track.STEP, "device step", store.unit_name, numel=store.stop - store.start, by_host=True):
                    publisher = self._publisher(store, last_use, early)
                    target = early.target if early is not None else None
                    shard = self._streamed_shard(store, gradient, publisher, step, last_use, target)
                    for window in [early.window] if early is not None else whole_window(store):
                        self._stream.start(shard, window, partial(_complete, store, publisher, task))
            if not is_early:
                self._stream.finish()
        except BaseException as error:
            self._failed = self._failed or error
            self._stream.abandon()
            for each in (*tasks.values(), *started, *self._early_streamed):
                each.fail(self._failed)

    # -- whole matrices: two passes of the pipeline, with an exchange between ranks in between --------------------

    @torch.no_grad()
    def _prepare(self, store: ShardStore, gradient: torch.Tensor, step: StepValues) -> torch.Tensor:
        """Update the states with the gradient, and return the update of the matrices, in the gradient's memory."""
        assert self._matrices is not None
        _gradient_of(store).wait()
        update = gradient.view(WIRE)[: store.stop - store.start]
        step_shard(
            self._windows(store), partial(self._matrices.prepare, store, gradient, update, step), publisher=Publisher()
        )
        return update

    def prepared(self, store: ShardStore) -> torch.Tensor:
        """Return the update of a shard's matrices on the device, on the caller's stream."""
        on_host = self._prepared[store].result()
        update = torch.empty(on_host.shape, dtype=on_host.dtype, device=store.device)
        self._memory.bus.up(on_host, update).wait_on_stream()
        return update

    def start_master_update(self, part: ExchangedMatrices, step: StepValues) -> None:
        """Copy the exchanged update to the host, and start the update of the master with it."""
        store = part.store
        on_host = self._prepared.pop(store).result()
        arrival = self._memory.bus.down(part.update, on_host)
        last_use = self._memory.bus.now()
        task = self._submit("host step", store, self._update_masters, part, on_host, arrival, step, last_use)
        self._tasks.append(task)
        store.start_step(task)

    @torch.no_grad()
    def _update_masters(
        self, part: ExchangedMatrices, on_host: torch.Tensor, arrival: CopyEvent, step: StepValues, last_use: LastUse
    ) -> CopyEvent:
        assert self._matrices is not None
        arrival.synchronize()
        store = part.store
        store.wait_until_master_is_free()
        # Weights on their way to NVMe overwrite the update that they were computed from, which has the same size.
        publisher = store.publisher(on_host, last_use)
        if self._nvme is not None:
            self._nvme.queue([store], MASTERS_ONLY)
        update = partial(self._matrices.finish, replace(part, update=on_host), step)
        return store.set_master_free_event(step_shard(self._windows(store), update, publisher, CHUNK))


@dataclass(frozen=True)
class EarlyUpdate:
    """The update of a shard under the backward: from one window to another, or in place."""

    publisher: Publisher
    """Receives the new weights before `step` is called."""
    window: StateWindow
    """The master and states. `start` may exchange those of the shard before the task runs."""
    target: StateWindow | None


class EarlyTask(NamedTuple):
    """An update under the backward, and the task that computes it."""

    task: Future[CopyEvent]
    update: EarlyUpdate


class _StreamTask(NamedTuple):
    """A shard that the stream thread steps. `early`: under the backward."""

    gradient: torch.Tensor
    result: Future[CopyEvent]
    early: EarlyUpdate | None = None

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # it is complete
            self.result.set_exception(error)


def _complete(store: ShardStore, publisher: Publisher, task: Future[CopyEvent]) -> None:
    with suppress(InvalidStateError):  # an interrupt has failed it already
        task.set_result(store.set_master_free_event(publisher.finish()))


def _gradient_of(store: ShardStore) -> HostGrad:
    assert isinstance(store.grad, HostGrad)
    return store.grad
