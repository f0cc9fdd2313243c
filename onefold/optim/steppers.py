"""How one optimizer is applied to shards: tile by tile by a rule, or once a step by the user's own instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.offload.buffer import Buffer
from onefold.offload.publish import InPlace, Publisher
from onefold.offload.shard_store import ShardStore
from onefold.optim.instance import InstanceRule, plain_step
from onefold.optim.matrix_rules import AnyRule
from onefold.optim.pipeline import Windows, step_shard, whole_window
from onefold.optim.rules import MASTER, Tile
from onefold.optim.tiles import Step, Tiler
from onefold.plan import Tier
from onefold.recorder import Track, recorded
from onefold.runtime import Unit


@dataclass(frozen=True)
class HeldState:
    """A state tensor that lies along a shard, from `start` on, flat."""

    name: str
    start: int
    buffer: Buffer


class TiledStepper:
    """A known rule for each group: each shard is final once it has been stepped."""

    def __init__(self, rules: Sequence[AnyRule], stores: Sequence[ShardStore]) -> None:
        self._tiler = Tiler(rules)
        # The user's class, stepped a tile at a time.
        self._rule = next((rule for rule in rules if isinstance(rule, InstanceRule)), None)
        self._stores = stores
        # Groups, and names of their states, that have room and no values yet: torch would not have them.
        self.not_begun: set[tuple[int, str]] = set()
        for store in stores:
            store.make_states()

    def step(self, store: ShardStore, gradient: torch.Tensor, step: Step) -> None:
        """Step one shard."""
        publisher = InPlace(store.model_weight) if store.model_weight is not None else Publisher()
        step_shard(whole_window(store), partial(self._tiler.step, store, gradient, step), publisher)

    def end_batch(self, batch: list[Unit], step: Step) -> Iterator[list[Unit]]:
        """Yield the batches whose parameters are final, after all shards of a batch were passed to `step`."""
        yield batch

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        """Yield the batches that `end_batch` has not yielded, after the last batch."""
        yield from ()

    def call(self, method: str, windows: Windows, *, has_states: bool) -> None:
        """A method of the user's class that changes masters. `has_states`: a step has been taken."""
        assert self._rule is not None, "a rule has no methods of a user's"
        for store in self._stores:
            for window in windows(store):
                for segment in store.segments(window.start, window.stop):
                    inside = slice(segment.start - window.start, segment.stop - window.start)
                    held = {**window.states, MASTER: window.master}
                    with self._tiler.opened({name: buffer[inside] for name, buffer in held.items()}, None) as states:
                        tile = Tile(states.pop(MASTER), torch.empty(0), states, segment.group)
                        self._rule.call(method, tile, has_states=has_states)

    def states_of(self, store: ShardStore, name: str) -> list[tuple[int, Buffer]]:
        """The tensors of one state, each with its place in the shard."""
        return [(0, store.states[name])] if name in store.states else []

    def held_states(self, store: ShardStore) -> list[HeldState]:
        return [HeldState(name, 0, state) for name, state in store.states.items()]

    def saved_states(self, store: ShardStore) -> list[HeldState]:
        """Return the states that a checkpoint has: those that are held, without groups in which they have not begun."""
        if not self.not_begun:
            return self.held_states(store)
        return [
            HeldState(name, segment.start, state[segment.start : segment.stop])
            for name, state in store.states.items()
            for segment in store.segments()
            if (segment.group, name) not in self.not_begun
        ]

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        """States that do not lie along the shard, by range of it."""
        if self._rule is None:
            return []
        return [(s.start, s.stop, self._rule.latest(s.group)) for s in store.segments()]

    def make_states(
        self, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Have a checkpoint's states: room for those along a parameter, which a rule has already, values for others."""
        if self._rule is not None:
            for member in (member for store in self._stores for member in store.spec.layout.members):
                if member.name in loose:
                    self._rule.take(member.group, dict(loose[member.name]))

    def remember_states(self) -> Callable[[], None]:
        """What undoes `make_states`."""
        return self._rule.remember() if self._rule is not None else lambda: None

    def state_bytes(self, tier: Tier) -> int:
        return sum(store.state_bytes() for store in self._stores if store.state_tier is tier)


class WholeStepper:
    """Any other torch optimizer: the user's own instance, stepped once a step, with masters in the place of its
    parameters, so that what it writes to its groups and to itself stays ([Note: what a step writes]).

    Elementwise optimizers get flat ranges, the same in every plan. Others, which only run where every rank steps
    everything, get views in the parameters' own shapes. It must see every shard before any parameter is final.
    """

    def __init__(self, instance: torch.optim.Optimizer, stores: Sequence[ShardStore], *, shaped: bool) -> None:
        self._instance = instance
        self._targets: dict[int, list[tuple[nn.Parameter, int, int]]] = {}
        self._by_group: list[list[nn.Parameter]] = [[] for _ in instance.param_groups]
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for store in stores:
            targets = []
            for group, start, stop, shape in _targets_of(store, shaped):
                target = nn.Parameter(store.master.tensor[start:stop].view(shape))
                self._by_group[group].append(target)
                targets.append((target, start, stop))
            self._targets[id(store)] = targets
        self._stores = list(stores)

    @contextmanager
    def _over_masters(self) -> Iterator[None]:
        """The user's instance has masters for parameters, and their states."""
        instance, groups = self._instance, self._instance.param_groups
        parameters, state = [group["params"] for group in groups], instance.state
        for group, targets in zip(groups, self._by_group, strict=True):
            group["params"] = list(targets)
        instance.state = self._state
        try:
            yield
        finally:
            self._state, instance.state = instance.state, state
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = own
        if instance.param_groups is not groups or len(groups) != len(parameters):
            raise RuntimeError(
                f"optimizer {type(instance).__name__} made other param_groups in its step: parameter groups are fixed "
                "when initialize lays out the shards"
            )

    def step(self, store: ShardStore, gradient: torch.Tensor, step: Step) -> None:
        assert store.grad is not None
        store.grad.wait()
        store.take_over_writes()
        scaled = gradient.to(store.master.dtype).mul(step.coefficient)
        for target, start, stop in self._targets[id(store)]:
            target.grad = scaled[start:stop].view(target.shape)

    @contextmanager
    def _without_frozen(self) -> Iterator[None]:
        """What the user has frozen, and its states, are afterwards what they were before."""
        before = []
        for target, inside in self._frozen_ranges():
            along = {n: v.view(-1)[inside].clone() for n, v in self._state[target].items() if _lies_along(v, target)}
            before.append((target, inside, target.detach().view(-1)[inside].clone(), along))
        yield
        for target, inside, master, along in before:
            target.detach().view(-1)[inside] = master
            for name, value in self._state[target].items():
                if _lies_along(value, target):
                    value.view(-1)[inside] = along.get(name, 0)

    def _frozen_ranges(self) -> Iterator[tuple[nn.Parameter, slice]]:
        for store in self._stores:
            for member in (store.spec.layout.members[index] for index in store.frozen):
                for target, start, stop in self._targets[id(store)]:
                    low, high = max(member.start - store.start, start), min(member.stop - store.start, stop)
                    if low < high:
                        yield target, slice(low - start, high - start)

    def end_batch(self, batch: list[Unit], step: Step) -> Iterator[list[Unit]]:
        yield from ()

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        with recorded(Track.STEP, "step of all", numel=sum(store.stop - store.start for store in self._stores)):
            with self._over_masters(), self._without_frozen():
                plain_step(self._instance)
            for store in self._stores:
                for target, _, _ in self._targets[id(store)]:
                    target.grad = None
                store.sync_model_weight_from_master().synchronize()
        yield from batches

    def call(self, method: str, windows: Windows, *, has_states: bool) -> None:
        with self._over_masters():
            getattr(type(self._instance), method)(self._instance)

    def states_of(self, store: ShardStore, name: str) -> list[tuple[int, Buffer]]:
        found = [(start, self._state[target].get(name)) for target, start, _ in self._targets[id(store)]]
        return [(start, Buffer.of(state)) for start, state in found if isinstance(state, torch.Tensor)]

    def held_states(self, store: ShardStore) -> list[HeldState]:
        return [
            HeldState(name, start, Buffer.of(value.view(-1)))
            for target, start, _ in self._targets[id(store)]
            for name, value in self._state[target].items()
            if _lies_along(value, target)
        ]

    def saved_states(self, store: ShardStore) -> list[HeldState]:
        return self.held_states(store)

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        return [
            (start, stop, {k: v for k, v in self._state[target].items() if not _lies_along(v, target)})
            for target, start, stop in self._targets[id(store)]
        ]

    def make_states(
        self, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        for store in self._stores:
            for target, start, stop in self._targets[id(store)]:
                state: dict[str, Any] = {}
                for member in store.spec.layout.members:
                    if member.start >= store.start + stop or store.start + start >= member.stop:
                        continue
                    for key, value in loose.get(member.name, {}).items():
                        state[key] = value.to(target.device) if _is_array(value) else value
                    for key, dtype in names.get(member.name, {}).items():
                        state[key] = torch.zeros_like(target, dtype=dtype, requires_grad=False)
                self._state[target] = state

    def remember_states(self) -> Callable[[], None]:
        before = dict(self._state)

        def undo() -> None:
            self._state.clear()
            self._state.update(before)

        return undo

    def state_bytes(self, tier: Tier) -> int:
        targets = [t for store in self._stores if store.state_tier is tier for t, _, _ in self._targets[id(store)]]
        values = [value for target in targets for value in self._state[target].values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _is_array(value: Any) -> bool:
    # torch's optimizers keep step counts in host memory, wherever the parameter is.
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _lies_along(value: Any, target: nn.Parameter) -> bool:
    return _is_array(value) and value.shape == target.shape and value.is_contiguous()


def _targets_of(store: ShardStore, shaped: bool) -> list[tuple[int, int, int, tuple[int, ...]]]:
    if not shaped:
        return [(s.group, s.start, s.stop, (s.stop - s.start,)) for s in store.segments()]
    assert (store.start, store.stop) == (0, store.spec.layout.total)
    return [(m.group, m.start, m.stop, m.shape) for m in store.spec.layout.members]
