"""The step of offloaded shards under the backward.

[Note: the step under the backward]
With `onefold.step_in_backward` an offloaded shard is stepped as soon as its gradient is reduced, while the backward of
earlier units still runs. The update needs the bus and the host, which are idle then. Masters and states change during
the backward, and weights when `step` is called: until then the model computes with the old ones, which are separate
tensors. `step` then publishes the new weights, and steps the shards that were not stepped early.

The hyperparameters are those at the beginning of the backward. Nothing is undone, so the result must not depend on
anything that is known only later: the config allows it without gradient clipping, loss scaling and a check for
nonfinite gradients. A program that changes hyperparameters, gradients or parameters between `backward` and `step`, or
does not call `step`, gets an error that names what it did.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.offload.host_shard import HostShard
from onefold.offload.shard_store import ShardStore
from onefold.optim.offloaded_step import OffloadedStep
from onefold.optim.pipeline import StepValues
from onefold.plan import Tier
from onefold.runtime import Schedule

_TOO_LATE = (
    "onefold.step_in_backward has already stepped some shards with the old values. Set it to false, and load a "
    "checkpoint into a new engine."
)


class EarlyStep:
    """Steps shards whose gradients are complete during the backward. See [Note: the step under the backward]."""

    def __init__(self, host: OffloadedStep, schedule: Schedule) -> None:
        self._host, self._context = host, schedule.context
        self._stores: list[ShardStore] = []
        self.values: StepValues | None = None
        """The values of the step that has begun. None outside of the last backward and its step."""

    def begin(self, values: StepValues) -> None:
        """Step shards from now on, when their gradients are reduced."""
        self._stores = []
        self.values = values
        self._context.on_reduced = self._start

    def _start(self, store: ShardStore) -> None:
        if store.state_tier is not Tier.HOST or store.spec.state_spec.as_matrices:
            return
        is_stale = isinstance(store.param, HostShard) and store.param.is_stale
        # Without a separate model weight, the rest of the backward would compute with the new values. A step that
        # compares it with the master would miss writes after this.
        if store.separate_model_weight is None or store.compared_model_weight is not None or is_stale:
            return
        assert self.values is not None
        store.begin_step()
        self._host.start_early(store, self.values)
        self._stores.append(store)

    def stop(self) -> None:
        """Step no further shards in this backward."""
        self._context.on_reduced = lambda store: None

    @property
    def has_begun(self) -> bool:
        """Whether masters and states of some shards have changed, and their step is not complete."""
        return bool(self._stores)

    def end(self, values: StepValues) -> None:
        """End the backward with the values of the step. Raise if shards were stepped with other ones."""
        self.stop()
        early, stores = self.values, self._stores
        self.values, self._stores = None, []
        if early is None or not stores:
            return
        if early.groups != values.groups or early.coefficient != values.coefficient:
            raise RuntimeError(f"the optimizer's param_groups changed between backward and step. {_TOO_LATE}")
        if any(store.frozen != store.frozen_in_step for store in stores):
            raise RuntimeError(f"parameters were frozen between backward and step. {_TOO_LATE}")

    def refuse_writes(self, written: Sequence[ShardStore]) -> None:
        """Raise if the program has written to parameters whose master is already stepped."""
        names = sorted({store.unit_name for store in written if store in self._stores})
        if names:
            raise RuntimeError(f"parameters of {', '.join(names)} were written between backward and step. {_TOO_LATE}")

    def refuse(self, what: str) -> None:
        """Raise if the step has begun, because `what` is not possible before it is complete."""
        if self.has_begun:
            raise RuntimeError(
                f"{what} between backward and step is not possible, because onefold.step_in_backward has begun the "
                "step. Call engine.step() first, or set step_in_backward to false."
            )
