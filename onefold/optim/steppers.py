"""How one optimizer is applied to shards: tile by tile by a rule, or once a step by the user's own instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from onefold.offload.buffer import Buffer
from onefold.offload.shard_store import ShardStore
from onefold.offload.state_codec import Dither, host_tile
from onefold.offload.write_check import WriteCheck
from onefold.optim.instance import InstanceRule, plain_step
from onefold.optim.matrix_rules import AnyRule, MatrixRule
from onefold.optim.rules import MASTER, EncodedTile, Hyper, Tile
from onefold.plan import KeptStates, Tier
from onefold.plan.layout import Segment
from onefold.recorder import Track, recorded
from onefold.runtime import Unit

# Elements stepped at once. On a CPU a tile and its casts stay in cache; on a GPU a tile fills the machine.
TILE = {"cpu": 1 << 20, "cuda": 1 << 24}


@dataclass(frozen=True)
class StateWindow:
    """A range of a shard with its master and states in memory."""

    start: int
    stop: int
    master: Buffer
    states: Mapping[str, Buffer]


Windows = Callable[[ShardStore], Iterator[StateWindow]]


def whole_window(store: ShardStore) -> Iterator[StateWindow]:
    """The only window of a shard that is in memory."""
    yield StateWindow(0, store.stop - store.start, store.master, store.states)


@dataclass(frozen=True)
class Step:
    """What every tile of a step shares. `groups` are the hyperparameters as they were when the step was called."""

    number: int
    coefficient: float | torch.Tensor
    groups: Sequence[Hyper]
    skip: torch.Tensor | None = None
    """On the device: 1 where this is no step after all."""
    begins: frozenset[int] = frozenset()
    """Groups whose late states begin with this step."""


def num_tiles(kept: KeptStates) -> int:
    """fp32 tiles that a GPU has in memory while it steps: the scaled gradient and what is decoded. Adam's kernel for
    values in other forms needs none.
    """
    if {"exp_avg", "exp_avg_sq"} == set(kept.names) and kept.forms and all(kept.forms):
        return 0
    return 1 + sum(form is not None for form in (kept.master, *kept.forms))


class Steppable(Protocol):
    """What a tiler asks of what it steps: as a `ShardStore` answers."""

    @property
    def comparable(self) -> torch.Tensor | None: ...

    def stepped_segments(self, first: int, last: int) -> list[Segment]: ...

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]: ...


class Tiler:
    """The rule of each group, tile by tile: cast and scale the gradient, update, cast out, all while in cache. What is
    held in another form is decoded before and encoded after. One thread at a time.
    """

    def __init__(self, rules: Sequence[AnyRule], size: int | None = None) -> None:
        self._rules = rules
        self._size = size
        # On a host: for the gradient, and for each of what is decoded.
        self._scratch: dict[str, torch.Tensor] = {}
        self.writes = WriteCheck()

    def size(self, window: StateWindow) -> int:
        """Elements of a tile."""
        device = window.master.device.type
        encoded = any(buffer.is_encoded for buffer in (window.master, *window.states.values()))
        if device == "cpu" and encoded:
            return host_tile()
        return self._size or TILE[device]

    def step(
        self,
        shard: Steppable,
        window: StateWindow,
        start: int,
        stop: int,
        gradient: torch.Tensor,
        out: torch.Tensor | None,
        step: Step,
    ) -> None:
        """[start, stop) of a window. `gradient` lies along the shard, `out` along the range; they may share memory."""
        size, used = self.size(window), shard.comparable
        for segment in shard.stepped_segments(start, stop):
            rule, hyper = self._rules[segment.group], step.groups[segment.group]
            assert not isinstance(rule, MatrixRule), "matrices have flat parameters of their own"
            for first, last, dither in shard.rounded_ranges(segment.start, segment.stop, step.number):
                for low in range(first, last, size):
                    high = min(low + size, last)
                    inside = slice(low - window.start, high - window.start)
                    held = {name: state[inside] for name, state in window.states.items()}
                    held[MASTER] = window.master[inside]
                    at = dither.after(low - first) if dither is not None else None
                    weights = out[low - start : high - start] if out is not None else None
                    encoded = EncodedTile(
                        held, gradient[low:high], step.coefficient, step.skip, at, weights, used is not None
                    )
                    if rule.apply_encoded(encoded, hyper, step.number):
                        continue
                    with self.opened(held, at) as states:
                        master = states.pop(MASTER)
                        if used is not None:
                            self.writes.take_over(master, used[low:high])
                        scaled = self.scaled(gradient[low:high], step.coefficient, master.dtype, size)
                        tile = Tile(master, scaled, states, segment.group, step.skip, segment.group in step.begins)
                        rule.apply(tile, hyper, step.number)
                    if weights is not None:
                        weights.copy_(held[MASTER].weight)

    @contextmanager
    def opened(self, held: Mapping[str, Buffer], dither: Dither | None) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the values of buffers, to be changed in place. Encoded ones are decoded, and encoded afterwards."""
        values = {name: self._values(name, buffer) for name, buffer in held.items()}
        yield dict(values)
        for name, buffer in held.items():
            if buffer.is_encoded:
                buffer.store(values[name], replace(dither, state=name) if dither is not None else None)

    def _values(self, name: str, buffer: Buffer) -> torch.Tensor:
        if buffer.is_encoded and not buffer.is_cuda:
            return buffer.fetch(self._memory(name, buffer.numel(), buffer.dtype))
        return buffer.fetch()

    def _memory(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """On the host; the next tile has the same."""
        found = self._scratch.get(name)
        if found is None or found.dtype != dtype or found.numel() < size:
            found = self._scratch[name] = torch.empty(size, dtype=dtype)
        return found

    def scaled(
        self, gradient: torch.Tensor, coefficient: float | torch.Tensor, dtype: torch.dtype, size: int
    ) -> torch.Tensor:
        """A tile of a gradient, as rules take it; the next one may have the same memory."""
        if isinstance(coefficient, torch.Tensor):
            return gradient.to(dtype, copy=True).mul_(coefficient)
        if coefficient == 1.0 and gradient.dtype == dtype:
            return gradient
        if gradient.is_cuda:  # torch's allocator has it again at once, and activations between two steps
            scaled = gradient.to(dtype, copy=True)
            return scaled if coefficient == 1.0 else scaled.mul_(coefficient)
        # torch's product of two dtypes on a CPU makes a copy first, in fresh memory.
        scaled = self._memory("gradient", size, dtype)[: gradient.numel()].copy_(gradient)
        return scaled if coefficient == 1.0 else scaled.mul_(coefficient)


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
        for window in whole_window(store):
            self._tiler.step(store, window, window.start, window.stop, gradient, store.computes, step)

    def end_batch(self, batch: list[Unit]) -> Iterator[list[Unit]]:
        """All shards of a batch have been given to `step`: batches whose parameters are final."""
        yield batch

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        """The same after the last of all batches."""
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
        store.sync_master_from_model_weight()
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

    def end_batch(self, batch: list[Unit]) -> Iterator[list[Unit]]:
        yield from ()

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        with recorded(Track.STEP, "step of all", numel=sum(store.stop - store.start for store in self._stores)):
            with self._over_masters(), self._without_frozen():
                plain_step(self._instance)
            for store in self._stores:
                for target, _, _ in self._targets[id(store)]:
                    target.grad = None
                store.push().wait()
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
