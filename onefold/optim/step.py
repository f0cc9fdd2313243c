"""One step, told in one place: from reduced gradients to new parameters.

`take` exchanges the norm, decides whether the step is taken, clips, steps every shard where it rests, and sends what
stays unsharded to all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch

from onefold.comm.agreement import as_float, as_integer
from onefold.offload.buffer import Buffer
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.optim.choose import Chosen
from onefold.optim.group_values import WrittenValues
from onefold.optim.instance import Attributes, InstanceRule, is_torchs, plain_number, step_hooks
from onefold.optim.loss_scale import build_loss_scale
from onefold.optim.matrix_rules import MatrixRule, names_of_states
from onefold.optim.matrix_steps import MatrixSteps
from onefold.optim.norm import (
    GroupDigest,
    StepNorm,
    StepScalars,
    compare_written_groups,
    exchange_scalars,
    meet_for_call,
)
from onefold.optim.offloaded_step import OffloadedStep
from onefold.optim.pipeline import whole_window
from onefold.optim.rules import Hyper
from onefold.optim.steppers import TiledStepper, WholeStepper
from onefold.optim.tiles import Step
from onefold.plan import Plan, Tier
from onefold.plan.memory import master_dtype
from onefold.recorder import Track, recorded
from onefold.runtime import FlatParam, Schedule, Unit

_NAMED = 3


class NonFiniteError(FloatingPointError):
    """A step's gradients are not finite. No weight was changed on any rank; the gradients are dropped."""


class ShardedStep:
    """Steps all shards of this rank with one optimizer."""

    def __init__(self, chosen: Chosen, plan: Plan, schedule: Schedule, memory: OffloadMemory | None) -> None:
        self.name = chosen.name
        self.groups = chosen.groups
        self.instance = chosen.instance
        # All that the user has handed in.
        self.instances = chosen.instances
        self.num_steps = 0
        self.overflow = False
        # From the first change of a step until the engine has counted it: what is held is no step's state.
        self.changing = False
        # What has ended a step half-way, if that was not an error.
        self.interrupted = ""
        # Whether its steps may have added keys to its groups.
        self.keeps_other_keys = chosen.is_stepped
        # Called before states are handed out to be written.
        self.wait_until_states_copied: Callable[[], None] = lambda: None
        # The user's class runs, and its methods are its own.
        self.in_user_code = False
        self._schedule, self._memory = schedule, memory
        self._rules = chosen.rules
        # The user's class, stepped a tile at a time.
        self._rule = next((rule for rule in chosen.rules if isinstance(rule, InstanceRule)), None)
        self.stores = [param.store for param in schedule.trained_params()]
        for param in schedule.trained_params():
            param.store.make_master(param.full)
        sharded = plan.shards_states and schedule.num_shards > 1
        self.stepper: TiledStepper | WholeStepper
        if chosen.rules:
            self.stepper = TiledStepper(chosen.rules, self.stores)
        else:
            assert chosen.instance is not None
            self.stepper = WholeStepper(chosen.instance, self.stores, shaped=not (sharded or chosen.elementwise))
        # What steps have written to the user's instance.
        self.attributes = Attributes(chosen.instance)
        # A class of the user's own may make a number of what it sees of the model, which differs between ranks.
        own_class = chosen.is_stepped and not is_torchs(chosen.instance)
        self._compares = own_class and sharded
        self._spelled = None if own_class else GroupDigest(self.groups)
        flags = [rule.flag for rule in chosen.rules if isinstance(rule, MatrixRule)]
        self._written = WrittenValues(self.name, self.groups, chosen.checks_of_groups(), flags)
        self._formats = plan.formats
        # Groups whose states that may begin late (SGD's momentum) have begun, and as it was before the last step.
        self._begun: frozenset[int] = frozenset()
        self._begun_before: frozenset[int] = frozenset()
        on_host = [store for store in self.stores if store.is_offloaded]
        self._host: OffloadedStep | None = None
        if on_host and chosen.rules:
            assert memory is not None
            self._host = OffloadedStep(chosen.rules, memory, on_host, plan)
        self._set_begun(frozenset())
        self.matrices: MatrixSteps | None = None
        if chosen.has_matrices:
            self.matrices = MatrixSteps(
                chosen.rules, self.groups, self.stores, chosen.splits, schedule.in_flight, self._host
            )

    # -- a step -------------------------------------------------------------------------------------------------

    def can_be_decided_later(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step may be queued before the host knows that it is one: the device leaves it out by itself."""
        if self._host is not None or not self._rules or not all(rule.can_skip for rule in self._rules):
            return False
        return not any(step_hooks(when, optimizer, self.instances) for when in ("pre", "post"))

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        coefficient: float | torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Step every shard with its gradient times `coefficient`, and start refreshes. Hooks on `optimizer` run too."""
        for hook, of in step_hooks("pre", optimizer, self.instances):  # they may change rates
            given: tuple[Any, dict[str, Any]] = (of,), {}
            result = hook(of, *given)
            if result is not None and result != given:
                raise RuntimeError(
                    "a step pre hook of the optimizer returned other arguments for step(), and engine.step() passes "
                    "none on: let it return None"
                )
        groups = self._groups_now()
        if any(changed := self._written.check(groups)) and self._rules:
            self._make_wanted_states(groups, changed)
        self._written.accept(groups)
        self.changing = True
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

    def take_back(self) -> None:
        """The device has left the last step out: every master is what it was."""
        self.num_steps -= 1
        self._set_begun(self._begun_before)
        self.changing = False

    def _apply(self, groups: Sequence[Hyper], coefficient: float | torch.Tensor, skip: torch.Tensor | None) -> None:
        schedule = self._schedule
        schedule.wait_for_step()  # what the last step left on its way is about to be written
        if self._host is not None:
            self._host.collect()
            for store in ShardStore.written(self.stores):
                store.take_over_writes()
        step = Step(self.num_steps + 1, coefficient, groups, skip, self._begin_states(groups))
        for store in self.stores:
            store.begin_step()
        if self._rule is not None:
            self._rule.begin(step.groups)
        if self._host is not None:
            self._host.start(schedule.stepped_on_host(), step)
        if self.matrices is not None:
            self.matrices.begin()
        batches = self.matrices or self.stepper
        for batch, gradients in schedule.gradients_to_step():
            for store, gradient in gradients.items():
                stepper = self._stepper_of(store)
                if stepper is not None:
                    with recorded(Track.STEP, "step", store.unit, numel=store.stop - store.start):
                        stepper.step(store, gradient, step)
            for done in batches.end_batch(batch, step):
                schedule.gather_updated(done)
        for done in batches.end_step(schedule.order.step_batches):
            schedule.gather_updated(done)
        if self._rule is not None and self._rule.writes:
            self.wait_for_host()  # what it writes to its groups is what a scheduler reads next
            self._rule.finish(self.groups)
        self.num_steps += 1
        if self._compares:
            compare_written_groups(schedule, self.name, self.groups)

    def _stepper_of(self, store: ShardStore) -> MatrixSteps | TiledStepper | WholeStepper | None:
        """Return what steps a shard on the main thread, or None if the offloaded step does."""
        if self.matrices is not None and store in self.matrices.matrices:
            return self.matrices
        return None if store.is_offloaded and self._host is not None else self.stepper

    # -- states that begin during the run ------------------------------------------------------------------------------

    def _make_wanted_states(self, groups: Sequence[Hyper], changed: Sequence[Sequence[str]]) -> None:
        """Make room for states that values written to groups ask for, or raise before anything has changed."""
        wanted, held = names_of_states(self._rules, groups), self._names_held()
        for index, (names, rule) in enumerate(zip(wanted, self._rules, strict=True)):
            missing = [name for name in names if changed[index] and name not in held.get(index, names)]
            if any(name not in rule.late_states for name in missing):
                raise RuntimeError(
                    f"optimizer.param_groups[{index}]: {', '.join(changed[index])} as written now needs the state "
                    f"{missing[0]}, which {self.name} makes at initialize alone. Set it before initialize"
                )
        self._make_late_states(wanted)

    def _names_held(self) -> dict[int, set[str]]:
        """Return, by group, the states that there is room for. A group without trained parameters has none."""
        return {member.group: {*store.spec.states} for store in self.stores for member in store.spec.layout.members}

    def _make_late_states(self, wanted: Sequence[Collection[str]]) -> None:
        """Make room for the states of each group that were not planned for, as if they had been."""
        added = []
        for param in self._schedule.trained_params():
            store = param.store
            group = store.spec.layout.members[0].group
            names = [name for name in self._rules[group].late_states if name in wanted[group]]
            added += [(param, name) for name in names if name not in store.states]
        if not added:
            return
        if self._formats.states != "fp32":
            raise RuntimeError(
                f"onefold.state_dtype = {self._formats.states}: the state {added[0][1]} is needed from now on, and its "
                "format is decided at initialize. Have it from the start (SGD: a momentum above 0), or use fp32 states"
            )
        self.wait_for_host()
        self.wait_until_states_copied()
        for tier in Tier:
            some = [(param, name) for param, name in added if param.store.state_tier is tier]
            rooms: Iterator[Buffer | None] = repeat(None)
            if tier is not Tier.DEVICE and some:
                assert self._memory is not None
                stores = [param.store for param, _ in some]
                needs = [(s.stop - s.start, master_dtype(s.spec.dtype)) for s in stores]
                rooms = map(Buffer.of, self._memory.more_states(tier, needs))
            for (param, name), room in zip(some, rooms, strict=False):
                param.store.add_state(name, room)
                param.spec = param.store.spec
        if self._host is not None:
            self._host.make_nvme_windows()

    def _have_late_states(self, names: Mapping[str, Collection[str]]) -> None:
        """Make room for the late states that a checkpoint has, by parameter. A group has begun where it has some."""
        saved: list[set[str]] = [set() for _ in self._rules]
        for member in (member for store in self.stores for member in store.spec.layout.members):
            saved[member.group] |= {*names.get(member.name, ())} & {*self._rules[member.group].late_states}
        # Groups that share a rule have the same states, as `names_of_states` plans them.
        shared = [
            set().union(*(its for r, its in zip(self._rules, saved, strict=True) if r is rule)) for rule in self._rules
        ]
        self._make_late_states(shared)
        self._set_begun(frozenset(index for index, its in enumerate(saved) if its))

    def _begin_states(self, groups: Sequence[Hyper]) -> frozenset[int]:
        """Return the groups whose late states begin with this step."""
        found = []
        for index, (rule, group) in enumerate(zip(self._rules, groups, strict=False)):
            if index not in self._begun and not isinstance(rule, MatrixRule) and rule.late_states:
                found += [index] if set(rule.late_states) & set(rule.state_names([group])) else []
        self._begun_before = self._begun
        self._set_begun(self._begun | frozenset(found))
        return frozenset(found)

    def _set_begun(self, groups: frozenset[int]) -> None:
        self._begun = groups
        if isinstance(self.stepper, TiledStepper):
            late = enumerate(self._rules)
            self.stepper.not_begun = {(i, name) for i, rule in late for name in rule.late_states if i not in groups}

    def groups_to_compare(self) -> GroupDigest | None:
        """What all ranks must hold alike before a step; the user's own class is looked at after its steps instead."""
        if self._spelled is not None:
            self._spelled.update(self.groups)
        return self._spelled

    def _groups_now(self) -> list[dict[str, Any]]:
        """As numbers: a rate may be a tensor that a scheduler writes to while the host still steps."""
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
        """A method of the user's class that changes parameters (`train`, `eval`), over masters. All ranks call it."""
        schedule = self._schedule
        schedule.check_awake()
        self.wait_until_states_copied()
        meet_for_call(schedule, method)
        self.flush()
        schedule.wait_for_step()
        self.about_to_write()
        with torch.no_grad(), self._user_code():
            if self._rule is not None:
                self._rule.begin(self._groups_now(), method)
            self.changing = True
            self.sync_masters()
            on_host = [store for store in self.stores if store.is_offloaded]
            with self._host.rewriting(on_host) if self._host is not None else nullcontext(whole_window) as windows:
                self.stepper.call(method, windows, has_states=self.num_steps > 0)
            if self._rule is not None:
                self._rule.finish(self.groups)
            for arrival in [store.sync_model_weight_from_master() for store in self.stores]:
                arrival.synchronize()
            self._refresh_all()
        self.changing = False

    def _refresh_all(self) -> None:
        """Masters have new values outside a step, and shards have taken them over."""
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
        if self._host is not None and self._host.is_late:
            self._host.refuse_late_writes()
            return
        for store in self.stores if stores is None else stores:
            store.take_over_writes()

    # -- the host's step ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """With a delayed host step: have the last one's weights in use. All ranks call this together."""
        if self._host is not None and self._host.is_late:
            self._schedule.wait_for_step()
            self._host.collect()
            self._refresh_all()

    def wait_for_host(self) -> None:
        """Until what the host has been asked to step is stepped. Any thread may ask."""
        if self._host is not None:
            self._host.wait()

    def about_to_write(self) -> None:
        """Prepare for writes to master weights from outside a step: wait for all that reads them, and sync them."""
        self.wait_until_states_copied()
        self._schedule.forget_cached()
        self.sync_masters()
        for store in (store for store in self.stores if store.is_offloaded):
            store.wait_for_master()

    @torch.no_grad()
    def pull_masters(self, units: Sequence[Unit]) -> None:
        """Parameters of these units were written from outside: take them over."""
        self.wait_for_host()
        for param in (param for unit in units for param in unit.trained):
            param.store.sync_master_from_model_weight()

    def resume(self, num_steps: int) -> None:
        """Go on as an optimizer that has taken so many steps."""
        self.num_steps = num_steps

    def finish(self) -> None:
        """The engine has counted the step: what is held is a step's state again."""
        self.changing = False

    # -- states -------------------------------------------------------------------------------------------------

    def states_of(self, store: ShardStore, name: str) -> list[tuple[int, Buffer]]:
        """The tensors of one state, each with its place in the shard; none before the optimizer has made them."""
        self.wait_until_states_copied()
        self.wait_for_host()
        return self.stepper.states_of(store, name)

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        """States that do not lie along the shard, by range of it."""
        whole = self.matrices.loose_states(store) if self.matrices is not None else []
        return [*self.stepper.loose_states(store), *whole]

    def make_states(
        self, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Have a checkpoint's states: room for those along a parameter, values for others."""
        if self._rules:
            self._have_late_states(names)
        self.stepper.make_states(names, loose)
        if self.matrices is not None:
            self.matrices.take_loose_states(loose)

    def misfits(self, loose: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Return the parameters whose kept states of a checkpoint do not fit, in words (`MatrixSteps.misfits`)."""
        return self.matrices.misfits(loose) if self.matrices is not None else {}

    def remember_states(self) -> Callable[[], None]:
        """What undoes `make_states`."""
        of_stepper = self.stepper.remember_states()
        of_matrices = self.matrices.remember_kept() if self.matrices is not None else lambda: None
        begun, params = self._begun, self._schedule.trained_params()
        held = [(param, param.store.spec, dict(param.store.states)) for param in params]

        def undo() -> None:
            of_stepper()
            of_matrices()
            self._set_begun(begun)
            for param, spec, states in held:
                param.spec = param.store.spec = spec
                param.store.states = states

        return undo

    def take_groups(self, values: Sequence[Mapping[str, Any]]) -> bool:
        """Take a checkpoint's hyperparameters over, unless they would ask for other states than are kept."""
        groups = [{**group, **new} for group, new in zip(self.groups, values, strict=True)]
        wanted, now = (names_of_states(self._rules, each) if self._rules else [] for each in (groups, self.groups))
        for rule, here, there in zip(self._rules, now, wanted, strict=True):
            if {*there} - {*rule.late_states} != {*here} - {*rule.late_states}:
                return False
        for group, new in zip(self.groups, values, strict=True):
            group.update(new)
        return True

    def master_bytes(self, tier: Tier) -> int:
        """Masters that are not the parameters themselves."""
        return sum(store.master_bytes(tier) for store in self.stores)


class StepDecision:
    """Whether a step is taken (`applied`: the last one was), and with which factor: norm, loss scale, clipping.

    [Note: who decides a step]
    A step waits for the norm of gradients that the device may still reduce: it clips by it, and is left out where it is
    not finite. A host that waited, and then queued the step, would leave the device idle for all that time. So where
    the kernels of the optimizer can be told by the device to change nothing, the step is queued before the host knows:
    factor and verdict are computed on the device, in the same order and precision as the host would. The host reads
    the norm after that, from a copy that was queued before the step, and is back while the device still steps. Where
    the host steps, where hooks of the user's stand around a step, and for other optimizers, it waits first.
    """

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self._scaling = plan.scaling
        self.scales_loss = plan.scaling.loss_scale.enabled
        self.loss_scale = build_loss_scale(plan.scaling.loss_scale)
        # What is not finite in a step that was left out for it, in words.
        self.problem = ""
        # Of the backwards since the last step, where the engine was given them.
        self.losses: list[torch.Tensor] = []
        self.applied = False
        self._scalars: StepScalars | None = None
        self._unscaled = 1.0
        self._schedule = schedule

    def take(self, step: ShardedStep, optimizer: torch.optim.Optimizer, divisor: int, *, alarm: bool = False) -> bool:
        """Step with the gradients that were reduced, still to be divided by `divisor`; skip it, or raise, on overflow.

        Where any rank raises the alarm nothing is done, on all ranks alike, and this returns False.
        """
        self._schedule.check_in_place()
        groups = step.groups_to_compare() if not self._schedule.alone else None
        waits = not step.can_be_decided_later(optimizer)
        scalars = self._exchange(groups, alarm=alarm, waits=waits)
        if scalars.alarm:
            return False
        if scalars.late:
            self._schedule.reduce_late()
            scalars = self._exchange(groups, waits=waits)
        self._scalars, self._unscaled = scalars, self.unscale(divisor)
        checks = self._scaling.nonfinite != "ignore"
        # Alike on all ranks: a step that is queued launches collectives.
        decides_later = scalars.square.is_cuda and not scalars.waits
        if decides_later:
            skip = scalars.square.isfinite().logical_not().float() if checks else None
            step.apply(optimizer, self._coefficient_on_device(scalars.square), skip)
        try:
            step.overflow = checks and scalars.overflow  # the host waits here for the device, once a step
        except BaseException:  # an interrupt: the device has decided all the same
            if decides_later and checks and scalars.overflow:
                step.take_back()
            raise
        self._schedule.check()
        self.applied = not step.overflow
        if self.applied and not decides_later:
            step.apply(optimizer, self._unscaled * self._clip_coefficient())
        elif step.overflow and decides_later:
            step.take_back()
        if step.overflow and not self.scales_loss:
            self.problem = _tell_nonfinite(self._schedule, self.losses)
            if self._scaling.nonfinite == "raise":
                raise NonFiniteError(
                    f"{self.problem}. No weight was changed, and the gradients are dropped: training may go on with "
                    'another batch. onefold.nonfinite_gradients: "skip" leaves such steps out, "ignore" takes them'
                )
        return True

    @property
    def norm(self) -> float | None:
        """Of the last averaged gradient before clipping. Where no step depends on it the device is waited for here."""
        norm = self.norm_to_read()
        return norm.read() if norm is not None else None

    def norm_to_read(self) -> StepNorm | None:
        """The same for whoever does not want to wait now."""
        return StepNorm(self._scalars, self._unscaled) if self._scalars is not None else None

    def forget_norm(self) -> None:
        self._scalars = None

    def unscale(self, divisor: int) -> float:
        """By the scale the gradients were computed with: it is updated only after it has been divided out."""
        return self._scaling.postscale / (self.loss_scale.value * divisor)

    def _exchange(self, groups: GroupDigest | None, *, alarm: bool = False, waits: bool = False) -> StepScalars:
        params = [param for param in self._schedule.trained_params() if _is_reduced(param)]
        late = bool(self._schedule.late_units())
        if not params and not late and self._schedule.trained:
            raise RuntimeError("engine.step() without a backward since the last step: there is nothing to step with")
        return exchange_scalars(params, self._schedule, groups, late=late, alarm=alarm, waits=waits)

    def _clip_coefficient(self) -> float:
        norm = self.norm if self._scaling.clipping > 0 else None
        if norm is None or not math.isfinite(norm):
            return 1.0
        return min(1.0, self._scaling.clipping / (norm + 1e-6))

    def _coefficient_on_device(self, square: torch.Tensor) -> float | torch.Tensor:
        """As the host computes it, to the bit, without knowing the norm."""
        if self._scaling.clipping <= 0:
            return self._unscaled
        # A number divided by a tensor would be multiplied with the tensor's reciprocal.
        clip = square.new_full((), self._scaling.clipping).div_(square.sqrt().mul_(self._unscaled).add_(1e-6))
        return torch.where(square.isfinite(), clip.clamp(max=1.0), 1.0) * self._unscaled


def _tell_nonfinite(schedule: Schedule, losses: Sequence[torch.Tensor]) -> str:
    """Which units' gradients are not finite, and whose loss; the same words on all ranks, which call this together.

    A reduced gradient no longer shows which rank made it so. The rank's own losses do.
    """
    units = schedule.trained
    bad = [
        any(not math.isfinite(param.grad.shard.square_sum().item()) for param in unit.trained if _is_reduced(param))
        for unit in units
    ]
    values = [loss.item() for loss in losses]
    worst = next((value for value in values if not math.isfinite(value)), 0.0)
    mine = torch.tensor([*bad, bool(values), as_integer(worst)], dtype=torch.int64)
    rows = schedule.agreement.exchange("which gradients are not finite", mine).tolist()
    names = [unit.name for index, unit in enumerate(units) if any(row[index] for row in rows)]
    guilty = {rank: as_float(row[-1]) for rank, row in enumerate(rows) if not math.isfinite(as_float(row[-1]))}
    if guilty:
        whose = "the loss was " + ", ".join(f"{value} on rank {rank}" for rank, value in guilty.items())
    elif all(row[-2] for row in rows):
        whose = "the loss was finite on every rank, so it happened in backward"
    else:
        whose = "no loss is known that was not finite, as backward was called on a loss directly"
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    told = (
        f"every unit, {names[0]} first," if len(names) == len(units) > 1 else f"unit {', '.join(names[:_NAMED])}{rest}"
    )
    return f"the gradient of {told} is not finite; {whose}"


def _is_reduced(param: FlatParam) -> bool:
    return param.grad.shard.value is not None
