"""The optimizer step over all shards of this rank: from reduced gradients to updated parameters.

`StepDecision.take` (`decision.py`) decides whether a step is applied. `ShardedStep.apply` updates every shard where it
is stored, and starts the all-gathers of parameters that stay unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch

from onefold.errors import ConfigError
from onefold.offload.buffer import Buffer
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.optim.chosen import ChosenOptimizer
from onefold.optim.early_step import ACCESS, EarlyStep
from onefold.optim.group_values import WrittenValues
from onefold.optim.instance import Attributes, InstanceRule, is_torchs, plain_number, step_hooks
from onefold.optim.instance_step import InstanceStep
from onefold.optim.matrix_rules import MatrixRule, names_of_states
from onefold.optim.matrix_steps import MatrixSteps
from onefold.optim.norm import GroupDigest, compare_written_groups, synchronize_call
from onefold.optim.offloaded_step import OffloadedStep
from onefold.optim.pipeline import ElementwiseStep, StepValues, whole_window
from onefold.optim.rule_states import RuleStates
from onefold.optim.rules import Hyper
from onefold.plan import Plan, Tier
from onefold.plan.buffers import master_dtype
from onefold.recorder import Track, recorded
from onefold.runtime import Schedule, Unit


class ShardedStep:
    """The optimizer of all shards of this rank: it steps them, and gives access to masters and states."""

    def __init__(self, chosen: ChosenOptimizer, plan: Plan, schedule: Schedule, memory: OffloadMemory | None) -> None:
        self.name = chosen.name
        self.groups = chosen.groups
        self.instance = chosen.instance
        # All optimizers that the user passed to `initialize`.
        self.instances = chosen.instances
        self.num_steps = 0
        self.overflow = False
        # True from the first change of a step until `finish`.
        self._changing = False
        # The name of the exception that interrupted a step, if it was none derived from Exception.
        self.interrupted = ""
        # Whether a user-defined step may have added keys to its groups.
        self.keeps_other_keys = chosen.runs_user_class
        # Called before a state tensor is exposed for writing.
        self.wait_until_states_copied: Callable[[], None] = lambda: None
        # True while a method of the user's class runs, which calls its own methods and not the engine's.
        self.in_user_code = False
        self._schedule, self._memory = schedule, memory
        self._rules = chosen.rules
        # The rule that steps the user's class a tile at a time.
        self._instance_rule = next((rule for rule in chosen.rules if isinstance(rule, InstanceRule)), None)
        self.stores = [param.store for param in schedule.trained_params()]
        for param in schedule.trained_params():
            param.store.make_master(param.full)
        sharded = plan.shards_states and schedule.num_shards > 1
        self.states: RuleStates | InstanceStep
        self._main_step: ElementwiseStep | InstanceStep | MatrixSteps
        if chosen.rules:
            self.states, self._main_step = RuleStates(chosen.rules, self.stores), ElementwiseStep(chosen.rules)
        else:
            assert chosen.instance is not None
            instance = InstanceStep(chosen.instance, self.stores, shaped=not (sharded or chosen.elementwise))
            self.states = self._main_step = instance
        # The attributes that steps have written to the user's instance.
        self.attributes = Attributes(chosen.instance)
        # A user-defined class may compute a value from the shards that it sees, which differ between ranks.
        user_defined = chosen.runs_user_class and not is_torchs(chosen.instance)
        self._compares_groups = user_defined and sharded
        self._group_digest = None if user_defined else GroupDigest(self.groups)
        flags = [rule.flag for rule in chosen.rules if isinstance(rule, MatrixRule)]
        self._written = WrittenValues(self.name, self.groups, chosen.checks_of_groups(), flags)
        self._formats, self._speculates = plan.formats, plan.speculates
        # Groups whose late states (SGD's momentum) have been created, now and before the last step.
        self._begun: frozenset[int] = frozenset()
        self._begun_before: frozenset[int] = frozenset()
        offloaded = [store for store in self.stores if store.is_offloaded]
        self._host: OffloadedStep | None = None
        if offloaded and chosen.rules:
            assert memory is not None
            self._host = OffloadedStep(chosen.rules, memory, offloaded, plan)
        self._early: EarlyStep | None = None
        if plan.steps_in_backward and offloaded:
            if self._host is None or self._instance_rule is not None:
                raise ConfigError(
                    f"onefold.step_in_backward: optimizer {self.name} steps all parameters at once, in its own code. "
                    "Set step_in_backward to false, or use AdamW, Adam, Lion or SGD"
                )
            self._early = EarlyStep.of(self._host, schedule, plan)
        self._set_begun(frozenset())
        self.matrices: MatrixSteps | None = None
        if chosen.has_matrices:
            self.matrices = self._main_step = MatrixSteps(
                chosen.rules, self.groups, self.stores, chosen.splits, schedule.in_flight, self._host
            )

    @property
    def changing(self) -> bool:
        """Whether a step is under way, so that masters and states are inconsistent."""
        return self._changing or (self._early is not None and self._early.has_changed_masters)

    # -- a step -------------------------------------------------------------------------------------------------

    def begin_last_backward(self, coefficient: float) -> None:
        """Begin the last backward before a step, during which shards may be stepped with gradients x `coefficient`."""
        if self._early is not None:
            if not self._speculates:  # `step` waits before second states become the first ones
                self.wait_until_states_copied()
            groups = self._groups_now()
            values = StepValues(self.num_steps + 1, coefficient, groups, begins=self._groups_that_begin(groups))
            if not (any(self._written.check(groups)) and self._lacks_states(groups)):
                self._early.begin(values)

    def abort_backward(self) -> None:
        """Give up after a backward that raised, if shards were stepped in it."""
        if self._early is not None:
            self._early.stop()
            if self._early.has_changed_masters:
                self.interrupted = "An error in a backward (with onefold.step_in_backward)"
            else:
                self._early.give_up("aborting a backward")

    def give_up_early(self, what: str = ACCESS) -> None:
        """Discard what was stepped in the last backward before `what`, or raise that `what` is not possible."""
        if self._early is not None:
            self._early.give_up(what)

    def can_be_decided_later(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step may be queued before the host knows whether it is applied.

        See [Note: deciding a step on the device].
        """
        if self._host is not None or not self._rules or not all(rule.can_skip for rule in self._rules):
            return False
        return not any(step_hooks(when, optimizer, self.instances) for when in ("pre", "post"))

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        coefficient: float | torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Step every shard with its gradient times `coefficient`, and start the all-gathers of updated parameters.

        Step hooks of `optimizer` and of the user's instances are called.
        """
        for hook, of in step_hooks("pre", optimizer, self.instances):  # hooks may change learning rates
            given: tuple[Any, dict[str, Any]] = (of,), {}
            result = hook(of, *given)
            if result is not None and result != given:
                raise RuntimeError(
                    "a step pre-hook of the optimizer returned arguments for step(), but engine.step() does not pass "
                    "them on. Return None from the hook."
                )
        groups = self._groups_now()
        if any(changed := self._written.check(groups)) and self._rules:
            self._make_required_states(groups, changed)
        self._written.accept(groups)
        self._changing = True
        try:
            with torch.no_grad(), self._user_code():
                self._apply(groups, coefficient, skip)
        except Exception:
            raise
        except BaseException as error:
            self.interrupted = type(error).__name__
            raise
        for stepped in (optimizer, *self.instances):
            stepped._opt_called = True  # type: ignore[attr-defined] # torch's schedulers warn unless they see this
        hooks = step_hooks("post", optimizer, self.instances)
        if hooks:
            self._schedule.wait_for_step()  # a hook may read any parameter
        for hook, of in hooks:
            hook(of, (of,), {})

    def undo_step(self) -> None:
        """Undo the bookkeeping of the last step, which the device skipped without changing masters or states."""
        self.num_steps -= 1
        self._set_begun(self._begun_before)
        self._changing = False

    def _apply(self, groups: Sequence[Hyper], coefficient: float | torch.Tensor, skip: torch.Tensor | None) -> None:
        schedule = self._schedule
        schedule.wait_for_step()  # all-gathers of the last step read the weights written here
        if self._host is not None:
            self._host.collect()
            written = ShardStore.written(self.stores)
            if self._early is not None:
                self._early.before_writes(written)
            for store in written:
                store.take_over_writes()
        begins, self._begun_before = self._groups_that_begin(groups), self._begun
        self._set_begun(self._begun | begins)
        step = StepValues(self.num_steps + 1, coefficient, groups, skip, begins)
        if self._early is not None:
            self._early.end(step)
        for store in self.stores:
            store.begin_step()
        if self._instance_rule is not None:
            self._instance_rule.begin(step.groups)
        if self._host is not None:
            self._host.start(schedule.stepped_on_host(), step)
        if self.matrices is not None:
            self.matrices.begin()
        for batch, gradients in schedule.gradients_to_step():
            for store, gradient in gradients.items():
                if self._is_stepped_by_main_thread(store):
                    with recorded(Track.STEP, "step", store.unit_name, numel=store.stop - store.start):
                        self._main_step.step(store, gradient, step)
            for done in self._main_step.end_batch(batch, step):
                schedule.gather_updated(done)
        for done in self._main_step.end_step(schedule.order.step_batches):
            schedule.gather_updated(done)
        if self._instance_rule is not None and self._instance_rule.writes:
            self.wait_for_host()  # a scheduler reads the groups next, which the class writes to
            self._instance_rule.finish(self.groups)
        self.num_steps += 1
        if self._compares_groups:
            compare_written_groups(schedule, self.name, self.groups)

    def _is_stepped_by_main_thread(self, store: ShardStore) -> bool:
        """Return whether the main thread steps a shard. It takes part in the step of offloaded matrices, too."""
        return self._host is None or not store.is_offloaded or store.spec.state_spec.as_matrices

    # -- late states: created during the run, when a hyperparameter requires them ---------------------------------

    def _make_required_states(self, groups: Sequence[Hyper], changed: Sequence[Sequence[str]]) -> None:
        """Allocate late states that changed hyperparameters require. Raise before any change if one is not late."""
        required, allocated = names_of_states(self._rules, groups), self._allocated_states()
        for index, (names, rule) in enumerate(zip(required, self._rules, strict=True)):
            missing = [name for name in names if changed[index] and name not in allocated.get(index, names)]
            if any(name not in rule.late_states for name in missing):
                raise RuntimeError(
                    f"optimizer.param_groups[{index}]: {', '.join(changed[index])} needs the state {missing[0]}, "
                    f"which {self.name} creates only at initialize. Set the value before initialize."
                )
        self._make_late_states(required)

    def _lacks_states(self, groups: Sequence[Hyper]) -> bool:
        """Return whether hyperparameters require states that are not allocated."""
        allocated = self._allocated_states()
        required = enumerate(names_of_states(self._rules, groups))
        return any(not {*names} <= allocated.get(index, {*names}) for index, names in required)

    def _allocated_states(self) -> dict[int, set[str]]:
        """Return the names of allocated states, by group. Groups without trained parameters are absent."""
        return {member.group: {*store.spec.states} for store in self.stores for member in store.spec.layout.members}

    def _make_late_states(self, required: Sequence[Collection[str]]) -> None:
        """Allocate the late states among `required`, the names by group, that are not allocated yet."""
        added = []
        for param in self._schedule.trained_params():
            store = param.store
            group = store.spec.layout.members[0].group
            names = [name for name in self._rules[group].late_states if name in required[group]]
            added += [(param, name) for name in names if name not in store.states]
        if not added:
            return
        if self._formats.states != "fp32":
            raise RuntimeError(
                f"onefold.state_dtype = {self._formats.states}: the state {added[0][1]} is new, but state "
                "formats are chosen at initialize. Use it from the start (SGD: momentum above 0), or use fp32 states."
            )
        self.wait_for_host()
        self.give_up_early("adding states")
        self.wait_until_states_copied()
        for tier in Tier:
            in_tier = [(param, name) for param, name in added if param.store.state_tier is tier]
            buffers: Iterator[Buffer | None] = repeat(None)
            if tier is not Tier.DEVICE and in_tier:
                assert self._memory is not None
                stores = [param.store for param, _ in in_tier]
                sizes = [(s.stop - s.start, master_dtype(s.spec.dtype)) for s in stores]
                buffers = map(Buffer.of, self._memory.more_states(tier, sizes))
            for (param, name), buffer in zip(in_tier, buffers, strict=False):
                param.store.add_state(name, buffer)
        if self._host is not None:
            self._host.make_nvme_windows()

    def _make_saved_late_states(self, names: Mapping[str, Collection[str]]) -> None:
        """Allocate the late states of a checkpoint, whose state names are given by parameter."""
        saved: list[set[str]] = [set() for _ in self._rules]
        for member in (member for store in self.stores for member in store.spec.layout.members):
            saved[member.group] |= {*names.get(member.name, ())} & {*self._rules[member.group].late_states}
        # Groups that share a rule have the same states, as `names_of_states` plans them.
        shared = [
            set().union(*(names for r, names in zip(self._rules, saved, strict=True) if r is rule))
            for rule in self._rules
        ]
        self._make_late_states(shared)
        self._set_begun(frozenset(index for index, names_of_group in enumerate(saved) if names_of_group))

    def _groups_that_begin(self, groups: Sequence[Hyper]) -> frozenset[int]:
        """Return the groups whose late states are created by the next step."""
        found = []
        for index, (rule, group) in enumerate(zip(self._rules, groups, strict=False)):
            if index not in self._begun and not isinstance(rule, MatrixRule) and rule.late_states:
                found += [index] if set(rule.late_states) & set(rule.state_names([group])) else []
        return frozenset(found)

    def _set_begun(self, groups: frozenset[int]) -> None:
        self._begun = groups
        late = [(index, name) for index, rule in enumerate(self._rules) for name in rule.late_states]
        self.states.not_begun = {(index, name) for index, name in late if index not in groups}

    def groups_to_compare(self) -> GroupDigest | None:
        """Return the digest of the groups, which must be the same on all ranks before a step.

        Return None for a user-defined class, whose groups are compared after its steps.
        """
        if self._group_digest is not None:
            self._group_digest.update(self.groups)
        return self._group_digest

    def _groups_now(self) -> list[dict[str, Any]]:
        """Return the hyperparameters as numbers: a scheduler may write to a tensor while the host still steps."""
        return [{key: plain_number(value) for key, value in group.items() if key != "params"} for group in self.groups]

    @contextmanager
    def _user_code(self) -> Iterator[None]:
        self.in_user_code = True
        try:
            with self.attributes.watched():
                yield
        finally:
            self.in_user_code = False

    def call(self, method: str) -> None:
        """Call a method of the user's class that changes parameters (`train`, `eval`) on the masters.

        All ranks must call this together.
        """
        schedule = self._schedule
        schedule.check_awake()
        self.wait_until_states_copied()
        synchronize_call(schedule, method)
        self.flush()
        schedule.wait_for_step()
        self.about_to_write()
        with torch.no_grad(), self._user_code():
            if self._instance_rule is not None:
                self._instance_rule.begin(self._groups_now(), method)
            self._changing = True
            self.sync_masters()
            offloaded = [store for store in self.stores if store.is_offloaded]
            with self._host.rewriting(offloaded) if self._host is not None else nullcontext(whole_window) as windows:
                self.states.call(method, windows, has_states=self.num_steps > 0)
            if self._instance_rule is not None:
                self._instance_rule.finish(self.groups)
            for copy_event in [store.sync_model_weight_from_master() for store in self.stores]:
                copy_event.synchronize()
            self._gather_all()
        self._changing = False

    def _gather_all(self) -> None:
        """All-gather the parameters after model weights were changed outside a step."""
        for param in self._schedule.trained_params():
            param.invalidate_secondary()
        self._schedule.gather_updated()
        self._schedule.wait_for_step()

    # -- master weights outside a step --------------------------------------------------------------------------

    def master_of(self, store: ShardStore) -> Buffer:
        """Return a master weight for reading between steps, with all in-place writes to the parameters in it."""
        # A background save may still read the file that a write would change.
        if store.master.is_on_disk:
            self.wait_until_states_copied()
        self.sync_masters([store])
        return store.master

    @torch.no_grad()
    def sync_masters(self, stores: Sequence[ShardStore] | None = None) -> None:
        """Wait for the offloaded step, then copy in-place writes to model weights into their master weights.

        Every reader of master weights outside a step calls this or `master_of`. Any thread may call it.
        """
        self.wait_for_host()
        if self._host is not None and self._host.has_delayed_step:
            self._host.refuse_writes_to_delayed()
            return
        chosen = self.stores if stores is None else stores
        if self._early is not None:
            self._early.before_writes(ShardStore.written(chosen))
        for store in chosen:
            store.take_over_writes()

    # -- the offloaded step -------------------------------------------------------------------------------------

    def expose(self, store: ShardStore) -> None:
        """Prepare for user code that holds the tensors of a master or of states, and may write to them at any time."""
        self.give_up_early()
        store.is_exposed = True

    def flush(self) -> None:
        """Start using the parameters that a delayed step has computed. All ranks call this together."""
        if self._host is not None and self._host.has_delayed_step:
            self._schedule.wait_for_step()
            self._host.collect()
            self._gather_all()

    def wait_for_host(self) -> None:
        """Wait until the offloaded step is complete. Any thread may call this."""
        if self._early is not None:
            self._early.before_access()
        if self._host is not None:
            self._host.wait()

    def about_to_write(self) -> None:
        """Wait for all readers of the master weights and sync them, before they are written outside a step."""
        self.give_up_early()
        self.wait_until_states_copied()
        self._schedule.context.forget_cached()
        self.sync_masters()
        for store in (store for store in self.stores if store.is_offloaded):
            store.wait_until_master_is_free()

    @torch.no_grad()
    def pull_masters(self, units: Sequence[Unit]) -> None:
        """Copy the model weights of these units into their masters, after they were written outside a step."""
        self.give_up_early()
        self.wait_for_host()
        for param in (param for unit in units for param in unit.trained_params):
            param.store.sync_master_from_model_weight()

    def resume(self, num_steps: int) -> None:
        """Continue after `num_steps` steps, as a checkpoint has them."""
        self.num_steps = num_steps

    def finish(self) -> None:
        """End a step: masters, states and the engine's counters are consistent again."""
        self._changing = False

    # -- states -------------------------------------------------------------------------------------------------

    def states_of(self, store: ShardStore, name: str) -> list[tuple[int, Buffer]]:
        """Return the tensors of one state, each with its offset in the shard. Empty before they are created."""
        self.wait_until_states_copied()
        self.wait_for_host()
        return self.states.states_of(store, name)

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the states that are not elementwise, each with the range of the shard that it belongs to."""
        of_matrices = self.matrices.loose_states(store) if self.matrices is not None else []
        return [*self.states.loose_states(store), *of_matrices]

    def make_states(
        self, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Allocate the elementwise states of a checkpoint, given by name and dtype, and load the others."""
        if self._rules:
            self._make_saved_late_states(names)
        self.states.make_states(names, loose)
        if self.matrices is not None:
            self.matrices.take_loose_states(loose)

    def misfits(self, loose: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Return a message for each parameter whose matrix states in a checkpoint do not fit (`MatrixSteps`)."""
        return self.matrices.misfits(loose) if self.matrices is not None else {}

    def remember_states(self) -> Callable[[], None]:
        """Return a function that undoes `make_states`."""
        of_states = self.states.remember_states()
        of_matrices = self.matrices.remember_kept() if self.matrices is not None else lambda: None
        begun, params = self._begun, self._schedule.trained_params()
        before = [(param.store, param.store.spec, dict(param.store.states), param.store.second) for param in params]

        def undo() -> None:
            of_states()
            of_matrices()
            self._set_begun(begun)
            for store, spec, states, second in before:
                store.spec, store.states, store.second = spec, states, second

        return undo

    def take_groups(self, values: Sequence[Mapping[str, Any]]) -> bool:
        """Load the hyperparameters of a checkpoint. Return False if they require other states than are allocated."""
        groups = [{**group, **new} for group, new in zip(self.groups, values, strict=True)]
        required, now = (names_of_states(self._rules, each) if self._rules else [] for each in (groups, self.groups))
        for rule, old_names, new_names in zip(self._rules, now, required, strict=True):
            if {*new_names} - {*rule.late_states} != {*old_names} - {*rule.late_states}:
                return False
        for group, new in zip(self.groups, values, strict=True):
            group.update(new)
        return True

    def master_bytes(self, tier: Tier) -> int:
        """Return the bytes of masters in a tier, without those that are the parameters themselves."""
        return sum(store.master_bytes(tier) for store in self.stores)
