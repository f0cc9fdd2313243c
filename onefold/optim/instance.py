"""Any elementwise torch optimizer as a rule, so that it can be stepped tile by tile: what rests on a disk never is in
memory all at once.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from onefold.optim.rules import Hyper, Tile


def hollow(instance: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A copy of the user's instance with other parameters and no states."""
    inner = object.__new__(type(instance))
    inner.__dict__.update(instance.__dict__)
    inner.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the outer instance
    inner.param_groups = groups
    inner.state = defaultdict(dict)
    inner.defaults = copy.copy(instance.defaults)
    return inner


class InstanceRule:
    """Steps a copy of the instance whose only parameter is the tile.

    States that lie along the parameter are the tile's. The others (step counts) are the same for all tiles of a group:
    each tile starts from those that the last step left.
    """

    def __init__(self, instance: torch.optim.Optimizer) -> None:
        self._instance = instance
        self._turn = threading.Lock()
        self._number = 0
        self.loose: dict[int, dict[str, Any]] = {}
        self._next: dict[int, dict[str, Any]] = {}

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        """Found by a step on something small."""
        names: dict[str, None] = {}
        for group in groups:
            probe = torch.zeros(64)
            state = self._step(probe, torch.zeros(64), {}, group)
            names |= dict.fromkeys(name for name, value in state.items() if _lies_along(value, probe))
        return list(names)

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        with self._turn:  # device and host may step at once
            if step != self._number:
                self.loose |= self._next
                self._number = step
        # The first step makes the states, with whatever values they begin.
        known = {**copy.deepcopy(self.loose.get(tile.group, {})), **tile.states} if step > 1 else {}
        state = self._step(tile.parameter, tile.gradient, known, hyper)
        for name, memory in tile.states.items():
            if name in state and state[name] is not memory:
                memory.copy_(state[name])
        self._next[tile.group] = {k: v for k, v in state.items() if not _lies_along(v, tile.parameter)}

    def latest(self, group: int) -> dict[str, Any]:
        """States that do not lie along a parameter, after the last step."""
        return self._next.get(group, self.loose.get(group, {}))

    def take(self, group: int, values: dict[str, Any]) -> None:
        """Those of a checkpoint."""
        self._next[group], self._number = values, -1

    def remember(self) -> Callable[[], None]:
        """What undoes `take`."""
        before = dict(self.loose), dict(self._next), self._number

        def undo() -> None:
            self.loose, self._next, self._number = dict(before[0]), dict(before[1]), before[2]

        return undo

    @torch.enable_grad()  # as a user's own loop calls it
    def _step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], hyper: Hyper
    ) -> dict[str, Any]:
        target = nn.Parameter(parameter)
        target.grad = gradient
        inner = hollow(self._instance, [{**{k: v for k, v in hyper.items() if k != "params"}, "params": [target]}])
        if state:
            inner.state[target] = state
        inner.step()
        return dict(inner.state[target])


def _lies_along(value: Any, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape
