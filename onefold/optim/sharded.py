"""The optimizer the user holds: live parameter groups outside, pieces of flat masters inside."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch

from onefold.optim.choose import Chosen
from onefold.optim.host import HostStep
from onefold.optim.instance import FORWARD_MARK, FORWARDED, METHODS, Attributes, InstanceRule, is_torchs
from onefold.optim.loss_scale import LossScale
from onefold.optim.norm import meet_for_call
from onefold.optim.outside import (
    Spelled,
    digest,
    has_post_hooks,
    run_post_hooks,
    run_pre_hooks,
    spell_groups,
    tell_difference,
)
from onefold.optim.pieces import HeldState, Piece, Step, Stepper, TiledStepper, WholeStepper, Window
from onefold.optim.written import WriteCheck
from onefold.plan import Plan, Tier
from onefold.runtime import Run, Schedule, Unit
from onefold.runtime.fingerprint import fingerprint
from onefold.tier.lower import Flat, LowerTiers


class ShardedOptimizer(torch.optim.Optimizer):
    """What `initialize` returns. Schedulers read and write its `param_groups`; `engine.step()` steps it.

    It holds the user's own group dicts, so that a scheduler built on the user's instance keeps working. It does not
    call torch's constructor, which would import the whole compiler for a decorator. The user's own instance answers
    as this one does: its `step` raises, its `zero_grad` drops gradients. `state` is empty, as states lie along flat
    shards.
    """

    def __init__(
        self,
        chosen: Chosen,
        units: Sequence[Unit],
        plan: Plan,
        schedule: Schedule,
        rank: int,
        loss_scale: LossScale,
        drop_gradients: weakref.WeakMethod[Callable[[], None]],
        lower: LowerTiers | None = None,
    ) -> None:
        self.name = chosen.name
        self.optimizer = chosen.instance or self
        self.param_groups = chosen.groups
        first = {key: value for key, value in chosen.groups[0].items() if key != "params"}
        self.defaults: dict[str, Any] = chosen.instance.defaults if chosen.instance else first
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        # Tensors of state a parameter has; 0 where only the user's class knows.
        self.num_states = len(chosen.rule.state_names(chosen.groups)) if chosen.rule else 0
        self._rule = chosen.rule
        self.overflow = False
        self.num_steps = 0
        # From the first change of a step until the engine has counted it: what is held is no step's state.
        self.changing = False
        # Called before states are handed out to be written.
        self.let_change: Callable[[], None] = lambda: None
        self._loss_scale = loss_scale
        self._drop_gradients = drop_gradients
        self._schedule = schedule
        self._pieces: dict[Run, Piece] = {
            run: Piece.of(run, *(run.layout.shard_range(rank) if plan.shards_states else (0, run.layout.total)))
            for unit in units
            for run in unit.trained
        }
        pieces = list(self._pieces.values())
        for run, piece in self._pieces.items():
            piece.take_fingerprint()
            run.arrived = weakref.WeakMethod(piece.take_fingerprint)
        sharded = plan.shards_states and schedule.num_shards > 1
        self._stepper: Stepper
        if chosen.rule is not None:
            self._stepper = TiledStepper(chosen.rule, self.param_groups, pieces)
        else:
            assert chosen.instance is not None
            self._stepper = WholeStepper(chosen.instance, pieces, shaped=not (sharded or chosen.elementwise))
        self._instance = chosen.instance
        self._attributes = Attributes(chosen.instance) if chosen.instance is not None else None
        self._inside = False
        # A class of the user's own may make a number of what it sees of the model, which differs between ranks.
        own_class = chosen.instance is not None and not is_torchs(chosen.instance) and chosen.is_stepped
        self._compares = own_class and sharded
        self._spelled = None if own_class else Spelled(self.param_groups)
        if chosen.instance is not None:
            _forward(chosen.instance, weakref.ref(self))
        below = [piece for piece in pieces if piece.run.rest.offloads_states]
        self._host: HostStep | None = None
        if below and chosen.rule is not None:
            assert lower is not None
            self._host = HostStep(chosen.rule, lower, below, delays=plan.delays_host)

    # -- what the engine calls ----------------------------------------------------------------------------------

    def apply(self, coefficient: float) -> None:
        """Step every piece with its gradient times `coefficient`, and send stepped units on their way."""
        run_pre_hooks(self, self._instance)
        self.changing = True
        with torch.no_grad(), self._user_code():
            self._apply(coefficient)
        self._opt_called = True  # torch's schedulers warn unless they see this
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if has_post_hooks(self, self._instance):
            self._schedule.settle_all()  # a hook may read any parameter
            run_post_hooks(self, self._instance)

    def _apply(self, coefficient: float) -> None:
        self._schedule.settle_all()  # what the last step left on its way is about to be written
        if self._host is not None:
            self._host.collect()
            self._take_over_writes()
        step = Step(self.num_steps + 1, coefficient, self._groups_now())
        rule = self._rule if isinstance(self._rule, InstanceRule) else None
        if rule is not None:
            rule.begin(step.groups)
        if self._host is not None:
            self._host.start([self._pieces[run] for run in self._schedule.hosted_runs()], step)
        for batch, gradients in self._schedule.gradients_to_step():
            for run, gradient in gradients.items():
                if self._host is None or not run.rest.offloads_states:
                    self._stepper.step(self._pieces[run], gradient, step)
            if not self._stepper.whole:
                self._schedule.start_refresh(batch)
        if self._stepper.whole:
            self._stepper.finish()
            self._schedule.start_all_refreshes()
        if rule is not None and rule.writes:
            self.wait_for_host()  # what it writes to its groups is what a scheduler reads next
            rule.finish(self.param_groups)
        self.num_steps += 1
        self._compare_groups()

    def groups_to_compare(self) -> Spelled | None:
        """What all ranks must hold alike before a step; the user's own class is looked at after its steps instead."""
        if self._spelled is not None:
            self._spelled.update(self.param_groups)
        return self._spelled

    def _groups_now(self) -> list[dict[str, Any]]:
        return [{key: _now(value) for key, value in group.items() if key != "params"} for group in self.param_groups]

    @contextmanager
    def _user_code(self) -> Iterator[None]:
        """The user's class runs in here, and its methods are its own."""
        self._inside = True
        try:
            with self._attributes.watched() if self._attributes is not None else nullcontext():
                yield
        finally:
            self._inside = False

    def _compare_groups(self) -> None:
        """After a step of a class of the user's own over shards: groups must be the same on all ranks."""
        if not self._compares:
            return
        agreement, what = self._schedule.order.agreement, "what the optimizer wrote to its param_groups"
        mine = spell_groups(self.param_groups)
        if len({row[0] for row in agreement.meet(what, [digest(mine)])}) == 1:
            return
        one, other = tell_difference(agreement, what, mine)
        raise RuntimeError(
            f"optimizer {self.name}: {one.key} is {one.value} on rank {one.rank} and {other.value} on rank "
            f"{other.rank} after a step, and must be the same on all. Each rank steps a slice of the model, so an "
            "optimizer that makes one number of all parameters has to add it up over ranks itself (fsdp_in_use=True "
            "where it has such a mode); or use zero_optimization.stage 0"
        )

    def _call(self, method: str) -> None:
        """A method of the user's class that changes parameters (`train`, `eval`): over masters, then sent to all ranks.

        All ranks call this together.
        """
        if self._schedule.away:
            raise RuntimeError("the engine's states are off the device: call engine.reload_states() first")
        self.let_change()
        meet_for_call(self._schedule, method)
        self.flush()
        self._schedule.settle_all()
        self.wait_for_host()
        self.changing = True
        pieces = list(self._pieces.values())
        self._take_over_writes()
        writes = WriteCheck()
        for piece in pieces:
            used = piece.comparable
            if used is not None and isinstance(piece.master, torch.Tensor):
                writes.take_over(piece.master, used)
        below = [piece for piece in pieces if piece.run.rest.offloads_states]
        with torch.no_grad(), self._user_code():
            from_host = self._host.rewrite(below) if self._host is not None else None

            def windows(piece: Piece) -> Iterable[Window]:
                on_host = from_host is not None and piece.run.rest.offloads_states
                return from_host(piece) if on_host and from_host is not None else [Window.whole(piece)]

            self._stepper.call(method, windows, self._groups_now(), has_states=self.num_steps > 0)
            if isinstance(self._rule, InstanceRule):
                self._rule.finish(self.param_groups)
            for arrival in [piece.tell() for piece in pieces]:
                arrival.wait()
            for run in self._pieces:
                run.change()
            self._schedule.start_all_refreshes()
            self._schedule.settle_all()
        self.changing = False

    def _take_over_writes(self) -> None:
        """Where masters are on the host and parameters on a device: what was written since the last step goes down."""
        watched = [piece for piece in self._pieces.values() if piece.fingerprint is not None]
        if watched:
            before = torch.stack([piece.fingerprint for piece in watched if piece.fingerprint is not None])
            now = torch.stack([fingerprint(piece.computes) for piece in watched])
            for piece, is_changed in zip(watched, now.ne(before).tolist(), strict=True):
                if is_changed:
                    piece.learn()

    def flush(self) -> None:
        """With a delayed host step: have the last one's weights in use. All ranks call this together."""
        if self._host is not None and self._host.is_late:
            self._schedule.settle_all()
            self._host.collect()
            for run in self._pieces:
                run.change()
            self._schedule.start_all_refreshes()
            self._schedule.settle_all()

    def wait_for_host(self) -> None:
        """Until what the host has been asked to step is stepped. Any thread may ask."""
        if self._host is not None:
            self._host.wait()

    @torch.no_grad()
    def refresh_masters(self, units: Sequence[Unit]) -> None:
        """Parameters of these units were written from outside: take them over."""
        self.wait_for_host()
        for piece in (self._pieces[run] for unit in units for run in unit.trained):
            piece.learn()

    def piece_of(self, run: Run) -> Piece:
        """What this rank steps of a run."""
        return self._pieces[run]

    def states_of(self, piece: Piece, name: str) -> list[tuple[int, Flat]]:
        """The tensors of one state, each with its place in the piece; none before the optimizer has made them."""
        self.let_change()
        self.wait_for_host()
        return self._stepper.states_of(piece, name)

    def held_states(self, piece: Piece) -> list[HeldState]:
        """All states that lie along a piece."""
        return self._stepper.held_states(piece)

    def loose_states(self, piece: Piece) -> list[tuple[int, int, dict[str, Any]]]:
        """The other states, by stretch of the piece."""
        return self._stepper.loose_states(piece)

    def make_states(
        self, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Have the states that a checkpoint names, by parameter, before they are filled."""
        for piece in self._pieces.values():
            self._stepper.make_states(piece, names, loose)

    def remember_states(self) -> Callable[[], None]:
        """What puts states back that `make_states` has replaced."""
        return self._stepper.remember_states()

    @property
    def keeps_other_keys(self) -> bool:
        """Whether its steps may have added keys to its groups."""
        return self._rule is None or isinstance(self._rule, InstanceRule)

    def own_attributes(self) -> tuple[dict[str, Any], list[str]]:
        """What steps have written to the user's instance: values for a checkpoint, and names that it cannot hold."""
        return self._attributes.values() if self._attributes is not None else ({}, [])

    def take_attributes(self, values: Mapping[str, Any]) -> None:
        """Those of a checkpoint."""
        if self._attributes is not None:
            self._attributes.take(values)

    def take_groups(self, values: Sequence[Mapping[str, Any]]) -> bool:
        """Take a checkpoint's hyperparameters over, unless they would ask for other states than are kept."""
        groups = [{**group, **new} for group, new in zip(self.param_groups, values, strict=True)]
        if self._rule is not None and self._rule.state_names(groups) != self._rule.state_names(self.param_groups):
            return False
        for group, new in zip(self.param_groups, values, strict=True):
            group.update(new)
        return True

    def master_bytes(self, tier: Tier) -> int:
        """Masters that are not the parameters themselves."""
        lines = {run: run.rests_whole and piece.out is None for run, piece in self._pieces.items()}
        held = [piece for run, piece in self._pieces.items() if run.rest.states is tier and not lines[run]]
        return sum(piece.master.nbytes for piece in held)

    def state_bytes(self, tier: Tier) -> int:
        return self._stepper.state_bytes(tier)

    # -- what users and schedulers call -------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self._loss_scale.value

    cur_scale = loss_scale

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("engine.step() steps the optimizer: it also clips, checks for overflow and moves parameters")

    def zero_grad(self, set_to_none: bool = True) -> None:
        drop = self._drop_gradients()
        if drop is not None:
            drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError("parameter groups are fixed when initialize lays out the shards: pass all of them there")

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("optimizer states are sharded: engine.save_checkpoint saves them")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("optimizer states are sharded: engine.load_checkpoint loads them")

    def __getattr__(self, name: str) -> Any:
        """What the user's instance has and this has not."""
        instance = self.__dict__.get("_instance")
        if instance is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(instance, name)
        if name in METHODS and callable(value):
            return partial(self._call, name)
        if inspect.ismethod(value) and value.__self__ is instance:
            raise AttributeError(
                f"optimizer {self.name}: {name}() is not offered. It would see the model's parameters, and the "
                f"optimizer's are flat shards: only step, {' and '.join(METHODS)} run over those"
            )
        return value

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.name}, {len(self.param_groups)} groups, {len(self._pieces)} runs)"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ShardedOptimizer cannot be pickled: its shards belong to this rank and its engine")


def _forward(instance: torch.optim.Optimizer, outer: weakref.ref[ShardedOptimizer]) -> None:
    """The user's instance has neither gradients nor states: what he asks of it goes to the one that has."""
    for name in FORWARDED:
        own = getattr(instance, name, None)
        if callable(own):
            vars(instance)[name] = _forwarding(name, own, weakref.ref(instance), outer)


def _forwarding(
    name: str, own: Any, instance: weakref.ref[torch.optim.Optimizer], outer: weakref.ref[ShardedOptimizer]
) -> Callable[..., Any]:
    """A method that holds neither of them."""

    def of(found: Any, *args: Any, **kwargs: Any) -> Any:
        owner = outer()
        if owner is None or owner._inside:
            return getattr(type(found), name)(found, *args, **kwargs)
        return getattr(owner, name)(*args, **kwargs)

    @wraps(getattr(own, "__func__", own))  # a scheduler's mark on `step` stays
    def forward(*args: Any, **kwargs: Any) -> Any:
        return of(instance(), *args, **kwargs)

    vars(forward).update({"__func__": of, FORWARD_MARK: True})  # a scheduler wraps what is below a bound method
    return forward


def _now(value: Any) -> Any:
    """A rate may be a tensor that a scheduler writes to while the host still steps."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
