"""The optimizer the user holds: live parameter groups outside, pieces of flat masters inside."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onefold.optim.choose import Chosen
from onefold.optim.host import HostStep
from onefold.optim.loss_scale import LossScale
from onefold.optim.pieces import HeldState, Piece, Step, Stepper, TiledStepper, WholeStepper
from onefold.optim.written import fingerprint
from onefold.plan import Plan, Tier
from onefold.runtime import Run, Schedule, Unit
from onefold.tier.lower import Flat, LowerTiers


class ShardedOptimizer(torch.optim.Optimizer):
    """What `initialize` returns. Schedulers read and write its `param_groups`; `engine.step()` steps it.

    It holds the user's own group dicts, so that a scheduler built on the user's instance keeps working. It does not
    call torch's constructor, which would import the whole compiler for a decorator.
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
        self._stepper: Stepper
        if chosen.rule is not None:
            self._stepper = TiledStepper(chosen.rule, self.param_groups, pieces)
        else:
            assert chosen.instance is not None
            self._stepper = WholeStepper(chosen.instance, pieces, shaped=not (plan.shards_states or chosen.elementwise))
        below = [piece for piece in pieces if piece.run.rest.offloads_states]
        self._host: HostStep | None = None
        if below and chosen.rule is not None:
            assert lower is not None
            self._host = HostStep(chosen.rule, lower, below, delays=plan.delays_host)

    # -- what the engine calls ----------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, coefficient: float) -> None:
        """Step every piece with its gradient times `coefficient`, and send stepped units on their way."""
        self.changing = True
        self.num_steps += 1
        self._schedule.settle_all()  # what the last step left on its way is about to be written
        if self._host is not None:
            self._host.collect()
            self._take_over_writes()
        groups = [{key: _now(value) for key, value in group.items() if key != "params"} for group in self.param_groups]
        step = Step(self.num_steps, coefficient, groups)
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
        self._opt_called = True  # torch's schedulers warn unless they see this
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

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

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.name}, {len(self.param_groups)} groups, {len(self._pieces)} runs)"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ShardedOptimizer cannot be pickled: its shards belong to this rank and its engine")


def _now(value: Any) -> Any:
    """A rate may be a tensor that a scheduler writes to while the host still steps."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
