"""Access to the optimizer states of shards, for checkpoints, reports and methods of the user's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onefold.offload.buffer import Buffer
from onefold.offload.shard_store import ShardStore
from onefold.optim.instance import InstanceRule
from onefold.optim.matrix_rules import AnyRule
from onefold.optim.pipeline import ElementwiseUpdate, Windows
from onefold.optim.rules import MASTER, Tile
from onefold.plan import Tier


@dataclass(frozen=True)
class HeldState:
    """An elementwise state of a shard, flat, whose first element belongs to element `start` of the shard."""

    name: str
    start: int
    buffer: Buffer


class RuleStates:
    """The states of optimizers with an update rule for each group. The shards store them."""

    def __init__(self, rules: Sequence[AnyRule], stores: Sequence[ShardStore]) -> None:
        self._elementwise = ElementwiseUpdate(rules)
        # The rule that steps the user's class a tile at a time.
        self._instance_rule = next((rule for rule in rules if isinstance(rule, InstanceRule)), None)
        self._stores = stores
        # Groups and names of late states that are allocated but not created yet. Checkpoints leave them out.
        self.not_begun: set[tuple[int, str]] = set()
        for store in stores:
            store.make_states()

    def call(self, method: str, windows: Windows, *, has_states: bool) -> None:
        """Call a method of the user's class that changes masters. `has_states`: a step has been applied."""
        assert self._instance_rule is not None, "only user-defined classes have such methods"
        for store in self._stores:
            for window in windows(store):
                for segment in store.segments(window.start, window.stop):
                    inside = slice(segment.start - window.start, segment.stop - window.start)
                    buffers = {**window.states, MASTER: window.master}
                    with self._elementwise.opened(
                        {name: buffer[inside] for name, buffer in buffers.items()}, None
                    ) as states:
                        tile = Tile(states.pop(MASTER), torch.empty(0), states, segment.group)
                        self._instance_rule.call(method, tile, has_states=has_states)

    def states_of(self, store: ShardStore, name: str) -> list[tuple[int, Buffer]]:
        """Return the tensors of one state, each with its offset in the shard."""
        return [(0, store.states[name])] if name in store.states else []

    def held_states(self, store: ShardStore) -> list[HeldState]:
        """Return all elementwise states of a shard."""
        return [HeldState(name, 0, state) for name, state in store.states.items()]

    def saved_states(self, store: ShardStore) -> list[HeldState]:
        """Return the elementwise states to save: all but the late states that are not created yet."""
        if not self.not_begun:
            return self.held_states(store)
        return [
            HeldState(name, segment.start, state[segment.start : segment.stop])
            for name, state in store.states.items()
            for segment in store.segments()
            if (segment.group, name) not in self.not_begun
        ]

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the states that are not elementwise, each with the range of the shard that it belongs to."""
        if self._instance_rule is None:
            return []
        return [(s.start, s.stop, self._instance_rule.latest(s.group)) for s in store.segments()]

    def make_states(
        self, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Load the states of a checkpoint that are not elementwise. Rules have allocated the others already."""
        if self._instance_rule is not None:
            for member in (member for store in self._stores for member in store.spec.layout.members):
                if member.name in loose:
                    self._instance_rule.take(member.group, dict(loose[member.name]))

    def remember_states(self) -> Callable[[], None]:
        """Return a function that undoes `make_states`."""
        return self._instance_rule.remember() if self._instance_rule is not None else lambda: None

    def state_bytes(self, tier: Tier) -> int:
        """Return the bytes of the states in a tier."""
        return sum(store.state_bytes() for store in self._stores if store.state_tier is tier)
