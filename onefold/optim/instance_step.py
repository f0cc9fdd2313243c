"""The step of a torch optimizer that onefold has no update rule for: the user's instance steps all shards at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onefold.offload.buffer import Buffer
from onefold.offload.shard_store import ShardStore
from onefold.optim.instance import plain_step
from onefold.optim.pipeline import StepValues, Windows
from onefold.optim.rule_states import HeldState
from onefold.plan import Tier
from onefold.recorder import Track, recorded
from onefold.runtime import Unit


class InstanceStep:
    """The step of the user's instance over all shards at once, and the states that it creates.

    Masters replace the parameters of the instance during its step, so that everything the step writes to the groups and
    to the instance persists ([Note: what a step writes]). Elementwise optimizers receive flat ranges, the same in every
    plan. Others run only if every rank steps all parameters, and receive views in the shapes of the parameters. No
    parameter is final before all shards have been stepped.
    """

    def __init__(self, instance: torch.optim.Optimizer, stores: Sequence[ShardStore], *, shaped: bool) -> None:
        self._instance = instance
        # Late states belong to update rules.
        self.not_begun: set[tuple[int, str]] = set()
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
    def _with_masters(self) -> Iterator[None]:
        """Replace the parameters and states of the user's instance by masters and their states."""
        instance, groups = self._instance, self._instance.param_groups
        parameters, state = [group["params"] for group in groups], instance.state
        for group, targets in zip(groups, self._by_group, strict=True):
            group["params"] = list(targets)
        instance.state = self._state
        try:
            yield
        finally:
            self._state, instance.state = instance.state, state
            for group, original in zip(groups, parameters, strict=True):
                group["params"] = original
        if instance.param_groups is not groups or len(groups) != len(parameters):
            raise RuntimeError(
                f"optimizer {type(instance).__name__} replaced its param_groups in its step. Parameter groups cannot "
                "change after initialize."
            )

    def step(self, store: ShardStore, gradient: torch.Tensor, step: StepValues) -> None:
        assert store.grad is not None
        store.grad.wait()
        store.take_over_writes()
        scaled = gradient.to(store.master.dtype).mul(step.coefficient)
        for target, start, stop in self._targets[id(store)]:
            target.grad = scaled[start:stop].view(target.shape)

    @contextmanager
    def _without_frozen(self) -> Iterator[None]:
        """Restore frozen parameters and their states after the block."""
        before = []
        for target, inside in self._frozen_ranges():
            states = {
                n: v.view(-1)[inside].clone() for n, v in self._state[target].items() if _is_elementwise(v, target)
            }
            before.append((target, inside, target.detach().view(-1)[inside].clone(), states))
        yield
        for target, inside, master, states in before:
            target.detach().view(-1)[inside] = master
            for name, value in self._state[target].items():
                if _is_elementwise(value, target):
                    value.view(-1)[inside] = states.get(name, 0)

    def _frozen_ranges(self) -> Iterator[tuple[nn.Parameter, slice]]:
        for store in self._stores:
            for member in (store.spec.layout.members[index] for index in store.frozen):
                for target, start, stop in self._targets[id(store)]:
                    low, high = max(member.start - store.start, start), min(member.stop - store.start, stop)
                    if low < high:
                        yield target, slice(low - start, high - start)

    def end_batch(self, batch: list[Unit], step: StepValues) -> Iterator[list[Unit]]:
        yield from ()

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        with recorded(Track.STEP, "step of all", numel=sum(store.stop - store.start for store in self._stores)):
            with self._with_masters(), self._without_frozen():
                plain_step(self._instance)
            for store in self._stores:
                for target, _, _ in self._targets[id(store)]:
                    target.grad = None
                store.sync_model_weight_from_master().synchronize()
        yield from batches

    def call(self, method: str, windows: Windows, *, has_states: bool) -> None:
        with self._with_masters():
            getattr(type(self._instance), method)(self._instance)

    def states_of(self, store: ShardStore, name: str) -> list[tuple[int, Buffer]]:
        found = [(start, self._state[target].get(name)) for target, start, _ in self._targets[id(store)]]
        return [(start, Buffer.of(state)) for start, state in found if isinstance(state, torch.Tensor)]

    def held_states(self, store: ShardStore) -> list[HeldState]:
        return [
            HeldState(name, start, Buffer.of(value.view(-1)))
            for target, start, _ in self._targets[id(store)]
            for name, value in self._state[target].items()
            if _is_elementwise(value, target)
        ]

    def saved_states(self, store: ShardStore) -> list[HeldState]:
        return self.held_states(store)

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        return [
            (start, stop, {k: v for k, v in self._state[target].items() if not _is_elementwise(v, target)})
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
    # torch's optimizers store step counts in host memory, independent of the device of the parameter.
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_elementwise(value: Any, target: nn.Parameter) -> bool:
    return _is_array(value) and value.shape == target.shape and value.is_contiguous()


def _targets_of(store: ShardStore, shaped: bool) -> list[tuple[int, int, int, tuple[int, ...]]]:
    if not shaped:
        return [(s.group, s.start, s.stop, (s.stop - s.start,)) for s in store.segments()]
    assert (store.start, store.stop) == (0, store.spec.layout.total)
    return [(m.group, m.start, m.stop, m.shape) for m in store.spec.layout.members]
