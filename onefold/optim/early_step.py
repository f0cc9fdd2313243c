"""The step of offloaded shards under the backward.

[Note: the step under the backward]
With `onefold.step_in_backward` an offloaded shard is stepped as soon as its gradient is reduced, while the backward of
earlier units still runs. The update needs the bus and the host, which are idle then. The model computes with the old
weights, which are separate tensors, until `step` is called. `step` then publishes the new weights, and steps the shards
that were not stepped early. The hyperparameters are those at the beginning of the backward, and gradients are assumed
to be finite and not to be clipped.

* **Speculative** (`SpeculativeStep`), if gradients may be clipped or a step may be skipped: the new masters and states
  are written to second tensors ([Note: speculative steps]). If `step` has other values, or anything that the update
  reads has changed since, its result is discarded, and `step` steps the shard as usual.
* **Final** (`FinalStep`), if the config excludes both: masters and states change during the backward, and there are no
  second tensors. A program that changes hyperparameters, gradients or parameters between `backward` and `step`, or does
  not call `step`, gets an error that names what it did.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial

from onefold.offload.host_shard import HostShard
from onefold.offload.shard_store import ShardStore
from onefold.optim.offloaded_step import OffloadedStep
from onefold.optim.pipeline import StepValues
from onefold.plan import Plan
from onefold.plan.traffic import is_stepped_early
from onefold.runtime import Schedule

ACCESS = "access to master weights, optimizer states or gradients"
_TOO_LATE = (
    "onefold.step_in_backward has already stepped some shards with the old values. Set it to false, and load a "
    "checkpoint into a new engine."
)


class EarlyStep:
    """Steps shards whose gradients are complete during the backward. See [Note: the step under the backward]."""

    def __init__(self, host: OffloadedStep, schedule: Schedule, plan: Plan) -> None:
        self._host, self._context, self._plan = host, schedule.context, plan
        self._stores: list[ShardStore] = []
        # The values that the backward assumes. None if nothing may be stepped now.
        self._values: StepValues | None = None

    @staticmethod
    def of(host: OffloadedStep, schedule: Schedule, plan: Plan) -> EarlyStep:
        """Return a speculative step if the plan requires one, otherwise a final one."""
        return (SpeculativeStep if plan.speculates else FinalStep)(host, schedule, plan)

    def begin(self, values: StepValues) -> None:
        """Step each shard when its gradient is reduced, until `stop`."""
        self._values = values
        self._context.on_reduced = self._start

    def stop(self) -> None:
        """Step no further shards in this backward."""
        self._context.on_reduced = lambda store: None

    def _start(self, store: ShardStore) -> None:
        is_stale = isinstance(store.param, HostShard) and store.param.is_stale
        # The program may write to tensors of an exposed store until `step` is called. A step that compares the model
        # weight with the master would miss writes after this.
        can_change = store.is_exposed or store.compared_model_weight is not None
        if is_stale or can_change or not is_stepped_early(self._plan, store.spec):
            return
        assert self._values is not None
        store.begin_step()
        self._host.start_early(store, self._values, partial(self._before_gradient_changes, store))
        self._stores.append(store)

    @property
    def has_changed_masters(self) -> bool:
        """Whether masters and states of some shards have changed before `step` is called."""
        raise NotImplementedError

    def end(self, values: StepValues) -> None:
        """End the backward with the values of the step."""
        raise NotImplementedError

    def before_access(self, what: str = ACCESS) -> None:
        """Prepare for a reader of masters, states or gradients."""

    def give_up(self, what: str) -> None:
        """End the backward before `what`, which changes something that was read, or instead of `step`."""
        raise NotImplementedError

    def before_writes(self, written: Collection[ShardStore]) -> None:
        """Prepare for new values of masters, whose model weights the program has written."""
        raise NotImplementedError

    def _before_gradient_changes(self, store: ShardStore) -> None:
        raise NotImplementedError


class SpeculativeStep(EarlyStep):
    """Discards what it has stepped with wrong values."""

    has_changed_masters = False

    def __init__(self, host: OffloadedStep, schedule: Schedule, plan: Plan) -> None:
        super().__init__(host, schedule, plan)
        # Whether the values of the last step were those that its backward assumed. If not, the next ones probably
        # differ as well, and that backward steps nothing.
        self._was_right = True
        # The numbers of shards since the engine was built.
        self.num_used = self.num_discarded = 0
        # Threads that copy states for a checkpoint may find parameters that were written.
        self._lock = threading.RLock()

    def begin(self, values: StepValues) -> None:
        super().begin(values)
        if not self._was_right:
            self.stop()

    def _start(self, store: ShardStore) -> None:
        with self._lock:
            super()._start(store)

    def end(self, values: StepValues) -> None:
        self.stop()
        early, self._values = self._values, None
        if early is None:
            return
        self._was_right = (early.groups, early.coefficient) == (values.groups, values.coefficient)
        with self._lock:
            frozen = [store for store in self._stores if store.frozen != store.frozen_in_step]
            self._discard(frozen if self._was_right else list(self._stores))
            self.num_used += len(self._stores)
            self._stores.clear()

    def give_up(self, what: str) -> None:
        self.stop()
        self._values = None
        self._discard(list(self._stores))

    def before_writes(self, written: Collection[ShardStore]) -> None:
        self._discard(written)

    def _before_gradient_changes(self, store: ShardStore) -> None:
        self._discard([store])

    def _discard(self, stores: Collection[ShardStore]) -> None:
        with self._lock:
            chosen = [store for store in self._stores if store in stores]
            if chosen:
                self._stores = [store for store in self._stores if store not in chosen]
                self.num_discarded += len(chosen)
                self._host.discard_early(chosen)


class FinalStep(EarlyStep):
    """Raises if the program changes anything that was read."""

    @property
    def has_changed_masters(self) -> bool:
        return bool(self._stores)

    def end(self, values: StepValues) -> None:
        self.stop()
        early, stores = self._values, self._stores
        self._values, self._stores = None, []
        if early is None or not stores:
            return
        if (early.groups, early.coefficient) != (values.groups, values.coefficient):
            raise RuntimeError(f"the optimizer's param_groups changed between backward and step. {_TOO_LATE}")
        if any(store.frozen != store.frozen_in_step for store in stores):
            raise RuntimeError(f"parameters were frozen between backward and step. {_TOO_LATE}")

    def before_access(self, what: str = ACCESS) -> None:
        if self._stores:
            raise RuntimeError(
                f"{what} between backward and step is not possible, because onefold.step_in_backward has begun the "
                "step. Call engine.step() first, or set step_in_backward to false."
            )

    def give_up(self, what: str) -> None:
        self.before_access(what)
        self.stop()
        self._values = None

    def before_writes(self, written: Collection[ShardStore]) -> None:
        if names := sorted({store.unit_name for store in written if store in self._stores}):
            raise RuntimeError(f"parameters of {', '.join(names)} were written between backward and step. {_TOO_LATE}")

    def _before_gradient_changes(self, store: ShardStore) -> None:
        raise RuntimeError(
            f"a gradient of {store.unit_name} is added to or changed after onefold.step_in_backward has stepped its "
            "shard. This happens if a module runs twice under reentrant checkpointing, or if the program changes "
            "gradients between backward and step. Set step_in_backward to false."
        )
