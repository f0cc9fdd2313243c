"""The user's own optimizer instance: hooks around its steps, what they write, and how it is stepped tile by tile.

[Note: what a step writes]
A torch optimizer may keep what it likes in its `param_groups` (counters, learning rates) and on itself. Where all of a
rank's masters are in memory the user's own instance is stepped, with masters in the place of its parameters, so all of
that simply stays. What rests on a disk is stepped a tile at a time, by a copy of the instance for each tile. Each copy
starts from the same groups and attributes and has to end with the same ones; they are written to the instance once,
after the last tile. Where tiles differ the optimizer looks across elements, and the step raises.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from onefold.optim.rules import EncodedTile, Hyper, Tile

# Methods that change parameters and states outside a step, where a class has them (ScheduleFree).
METHODS = ("train", "eval")
# Of a method that an engine has put on an instance.
FORWARD_MARK = "_goes_to_the_engine"
# Methods of the user's instance that speak of gradients and states which are kept elsewhere.
FORWARDED = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict", *METHODS)
_TORCHS = {
    "param_groups",
    "state",
    "defaults",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    "_opt_called",
    *FORWARDED,
}
_MISSING = object()
# Device and host may step tiles at once, and hooks for all optimizers are torch's.
_quiet = threading.RLock()


def is_torchs(instance: object) -> bool:
    """Of torch itself: such a class writes to parameters and their states, and to nothing else."""
    return type(instance).__module__.startswith("torch.optim")


def plain_step(instance: torch.optim.Optimizer) -> None:
    """The class's own step. Hooks around it are the outer optimizer's, which calls them once a step."""
    step: Any = type(instance).step
    if is_torchs(instance):
        while getattr(step, "hooked", False):  # torch's wrapper, which calls hooks
            step = step.__wrapped__
        step(instance)
        return
    with _quiet, _without_hooks(instance):  # a step may call that of its base class, which has a wrapper of its own
        step(instance)


def step_hooks(
    when: Literal["pre", "post"], outer: torch.optim.Optimizer, instances: Sequence[torch.optim.Optimizer]
) -> list[tuple[Callable[..., Any], torch.optim.Optimizer]]:
    """Hooks, each with the optimizer to call it with. Torch's for all optimizers stand outermost."""
    each = [*instances, outer]
    own = [(hook, of) for of in each for hook in getattr(of, f"_optimizer_step_{when}_hooks").values()]
    shared = [(hook, outer) for hook in getattr(torch_optimizer, f"_global_optimizer_{when}_hooks").values()]
    return shared + own if when == "pre" else own + shared


@contextmanager
def _without_hooks(instance: torch.optim.Optimizer) -> Iterator[None]:
    shared: list[dict[int, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,  # type: ignore[list-item]
        torch_optimizer._global_optimizer_post_hooks,  # type: ignore[list-item]
    ]
    kept = [dict(hooks) for hooks in shared]
    own = instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks
    instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for hooks in shared:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, values in zip(shared, kept, strict=True):
            hooks.update(values)
        instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks = own


# -- values ---------------------------------------------------------------------------------------------------------


def is_plain(value: Any) -> bool:
    """Whether a checkpoint holds it and every rank has the same: numbers, text, and containers of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, dict) and not isinstance(value, defaultdict):  # whose factory is code
        return all(is_plain(key) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(is_plain(inner) for inner in value)
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def plain_number(value: Any) -> Any:
    """A tensor of one element as the number that it holds; anything else as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _copied(value: Any) -> Any:
    """So that what is written in place is seen. Objects of other kinds are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if is_plain(value) else value


def _mark(value: Any) -> Any:
    """Differs once the value has been written to, without a copy of any tensor."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return {key: _mark(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_mark(inner) for inner in value]
    return value if is_plain(value) else id(value)


def same(one: Any, other: Any) -> bool:
    """Equal, where NaN equals NaN."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        there = other.to(one.device)
        return bool(((one == there) | ((one != one) & (there != there))).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or bool(one != one and other != other)


def _not_torchs(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _TORCHS}


def _written(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What has another value now; `_MISSING` what is gone."""
    changed = {key: value for key, value in after.items() if key not in before or not same(before[key], value)}
    return changed | dict.fromkeys(before.keys() - after.keys(), _MISSING)


class Attributes:
    """Which attributes of an instance its steps write: a checkpoint holds those, where they are plain data."""

    def __init__(self, instance: torch.optim.Optimizer | None) -> None:
        self._held = vars(instance) if instance is not None else {}
        self._is_torchs = is_torchs(instance)
        self._known: dict[str, None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = _mark(self._all())
        yield
        self._known |= dict.fromkeys(_written(before, _mark(self._all())))

    def values(self) -> tuple[dict[str, Any], list[str]]:
        """Those to save, and the names of those that a checkpoint does not hold."""
        found = {name: value for name, value in self._all().items() if name in self._known}
        plain = {name: value for name, value in found.items() if is_plain(value)}
        return plain, [name for name in found if name not in plain]

    def take(self, values: Mapping[str, Any]) -> None:
        """Those of a checkpoint."""
        taken = _not_torchs(values)
        self._known |= dict.fromkeys(taken)
        self._held.update(taken)

    def _all(self) -> dict[str, Any]:
        return {} if self._is_torchs else _not_torchs(self._held)


# -- tile by tile ---------------------------------------------------------------------------------------------------


def _hollow(instance: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A copy of the user's instance with other parameters and no states."""
    inner = object.__new__(type(instance))
    vars(inner).update({name: value for name, value in vars(instance).items() if name not in FORWARDED})
    if not is_torchs(instance):
        vars(inner).update({name: _copied(value) for name, value in _not_torchs(vars(instance)).items()})
    inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    inner.param_groups = groups
    inner.state = defaultdict(dict)
    inner.defaults = copy.copy(instance.defaults)
    return inner


class InstanceRule:
    """Steps a copy of the instance whose only parameter is the tile.

    States that lie along the parameter are the tile's. The others (step counts) are the same for all tiles of a group:
    each tile starts from those that the last step left. See [Note: what a step writes].
    """

    def __init__(self, instance: torch.optim.Optimizer) -> None:
        self.can_skip = False
        self.late_states: tuple[str, ...] = ()
        self._instance = instance
        self._name = type(instance).__name__
        # Whether it may write to its groups or to itself.
        self.writes = not is_torchs(instance)
        self._turn = threading.Lock()
        self.loose: dict[int, dict[str, Any]] = {}
        self._next: dict[int, dict[str, Any]] = {}
        self._groups: Sequence[Hyper] = []
        # What tiles have written: by group, to groups they are not of, and to the instance. A rank may have no tile of
        # a group, or none at all, and counts as the others do: by a step on something small.
        self._to_each: list[dict[str, Any]] = []
        self._to_itself: dict[str, Any] = {}
        self._to_own: dict[int, dict[str, Any]] = {}
        self._to_others: dict[int, dict[str, Any]] = {}
        self._to_instance: dict[str, Any] | None = None

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        """Found by a step on something small."""
        names: dict[str, None] = {}
        for index in range(len(groups)):
            probe = torch.zeros(64)
            state = self._run(_probe, probe, torch.zeros(64), {}, index, groups)[0]
            names |= dict.fromkeys(name for name, value in state.items() if _lies_along(value, probe))
        return list(names)

    def begin(self, groups: Sequence[Hyper], method: str | None = None) -> None:
        """A step, or a call of another method, over all tiles; all of them start from these groups.

        What the class itself refuses (a step in the wrong mode) raises here, before anything has changed.
        """
        self.loose |= self._next
        self._groups = groups
        self._to_own, self._to_others, self._to_instance = {}, {}, None
        if self.writes:
            call = plain_step if method is None else methodcaller(method)
            _, self._to_each, self._to_itself = self._run(call, torch.zeros(64), torch.zeros(64), {}, 0, groups)

    def apply_encoded(self, tile: EncodedTile, hyper: Hyper, step: int) -> bool:
        return False

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        self._over(tile, plain_step, tile.gradient, has_states=step > 1)

    def call(self, method: str, tile: Tile, *, has_states: bool) -> None:
        """Another method of the class, one that changes parameters."""
        self._over(tile, methodcaller(method), None, has_states=has_states)

    def finish(self, groups: Sequence[dict[str, Any]]) -> None:
        """After the last tile: the user's groups and instance get what tiles have written."""
        if not self.writes:
            return
        for index, group in enumerate(groups):
            _put(group, self._to_own.get(index, self._to_others.get(index, self._to_each[index])))
        _put(vars(self._instance), self._to_itself if self._to_instance is None else self._to_instance)

    def _over(
        self, tile: Tile, call: Callable[[Any], None], gradient: torch.Tensor | None, *, has_states: bool
    ) -> None:
        # The first step makes the states, with whatever values they begin.
        known = {**copy.deepcopy(self.loose.get(tile.group, {})), **tile.states} if has_states else {}
        state, to_groups, to_instance = self._run(call, tile.parameter, gradient, known, tile.group, self._groups)
        for name, value in state.items():
            if name in tile.states:
                if value is not tile.states[name]:
                    tile.states[name].copy_(value)
            elif _lies_along(value, tile.parameter):
                raise RuntimeError(
                    f"optimizer {self._name} made a state {name!r} that its first step did not make: there is no room "
                    "for it on disk. Make all states in the first step, or offload to cpu"
                )
        with self._turn:  # device and host may step at once
            if has_states or state:
                self._next[tile.group] = {k: v for k, v in state.items() if not _lies_along(v, tile.parameter)}
            self._note(tile.group, to_groups, to_instance)

    def _note(self, own: int, to_groups: Sequence[dict[str, Any]], to_instance: dict[str, Any]) -> None:
        for index, written in enumerate(to_groups):
            noted = (self._to_own if index == own else self._to_others).setdefault(index, written)
            if index == own:
                self._check(noted, written, f"param_groups[{index}]")
        self._to_instance = to_instance if self._to_instance is None else self._to_instance
        self._check(self._to_instance, to_instance, "its attributes")

    def _check(self, noted: Mapping[str, Any], written: Mapping[str, Any], where: str) -> None:
        for key in {**noted, **written}:
            one, other = noted.get(key, _MISSING), written.get(key, _MISSING)
            plain = all(value is _MISSING or is_plain(value) for value in (one, other))
            if plain and not same(one, other):
                raise RuntimeError(
                    f"optimizer {self._name} wrote {key!r} to {where} differently for different elements: it looks "
                    "across elements, and what rests on a disk is stepped a tile at a time. Offload to cpu"
                )

    def latest(self, group: int) -> dict[str, Any]:
        """States that do not lie along a parameter, after the last step."""
        return self._next.get(group, self.loose.get(group, {}))

    def take(self, group: int, values: dict[str, Any]) -> None:
        """Those of a checkpoint."""
        self._next[group] = values

    def remember(self) -> Callable[[], None]:
        """What undoes `take`."""
        before = dict(self.loose), dict(self._next)

        def undo() -> None:
            self.loose, self._next = dict(before[0]), dict(before[1])

        return undo

    @torch.enable_grad()  # as a user's own loop calls it
    def _run(
        self,
        call: Callable[[Any], None],
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        state: dict[str, Any],
        index: int,
        groups: Sequence[Hyper],
    ) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
        """All groups, one of them with a parameter: its states, and what was written to each group and to the copy."""
        inner_groups = [
            {**{key: _copied(value) for key, value in hyper.items() if key != "params"}, "params": []}
            for hyper in groups
        ]
        inner = _hollow(self._instance, inner_groups)
        target = nn.Parameter(parameter)
        target.grad = gradient
        inner_groups[index]["params"] = [target]
        if state:
            inner.state[target] = state
        if not self.writes:
            call(inner)
            return dict(inner.state[target]), [], {}
        before = [{key: _copied(value) for key, value in group.items() if key != "params"} for group in inner_groups]
        itself = _not_torchs(vars(self._instance))
        call(inner)
        after = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
        to_groups = [_written(one, other) for one, other in zip(before, after, strict=True)]
        return dict(inner.state[target]), to_groups, _written(itself, _not_torchs(vars(inner)))


def _probe(inner: Any) -> None:
    if callable(getattr(inner, "train", None)):  # some step only in the mode that a loop sets later
        inner.train()
    plain_step(inner)


def _put(live: dict[str, Any], written: Mapping[str, Any]) -> None:
    for key, value in written.items():
        there = live.get(key)
        if value is _MISSING:
            live.pop(key, None)
        elif isinstance(there, torch.Tensor) and there.numel() == 1 and isinstance(value, int | float):
            there.fill_(value)  # a rate that is a tensor went into the step as the number it was
        else:
            live[key] = value


def _lies_along(value: Any, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape
