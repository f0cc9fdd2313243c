"""The user's optimizer instance: its step hooks, the attributes that its steps write, and its step tile by tile.

[Note: what a step writes]
The step of a torch optimizer may write to its `param_groups` (counters, learning rates) and to its attributes. If all
masters of a rank are in memory, the user's instance itself is stepped, with masters in the place of its parameters, and
everything that it writes persists. States on NVMe are stepped tile by tile, with a copy of the instance for each tile.
Each copy starts from the same groups and attributes, and must end with the same ones. They are written to the instance
once, after the last tile. If tiles differ, the optimizer is not elementwise, and the step raises.
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

from onefold.optim.rules import Hyper, StoredTile, Tile

# Methods that change parameters and states outside a step, in classes that have them (ScheduleFree).
METHODS = ("train", "eval")
# The attribute that marks the methods of an instance that are forwarded to the engine.
FORWARD_MARK = "_is_forwarded_to_engine"
# Methods of the user's instance that access gradients and states, which the engine stores.
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
# Held while torch's global step hooks are removed, because device and host may step tiles at the same time.
_hooks_lock = threading.RLock()


def is_torchs(instance: object) -> bool:
    """Return whether a class is torch's own. Their steps write to parameters and their states only."""
    return type(instance).__module__.startswith("torch.optim")


def plain_step(instance: torch.optim.Optimizer) -> None:
    """Call the step of an instance's class without step hooks, which the engine calls once a step."""
    step: Any = type(instance).step
    if is_torchs(instance):
        while getattr(step, "hooked", False):  # torch's wrapper that calls the hooks
            step = step.__wrapped__
        step(instance)
        return
    with _hooks_lock, _without_hooks(instance):  # a step may call that of its base class, which is wrapped as well
        step(instance)


def step_hooks(
    when: Literal["pre", "post"], outer: torch.optim.Optimizer, instances: Sequence[torch.optim.Optimizer]
) -> list[tuple[Callable[..., Any], torch.optim.Optimizer]]:
    """Return the step hooks in calling order, each with its optimizer. torch's global hooks are outermost."""
    optimizers = [*instances, outer]
    hooks = [(hook, of) for of in optimizers for hook in getattr(of, f"_optimizer_step_{when}_hooks").values()]
    global_hooks = [(hook, outer) for hook in getattr(torch_optimizer, f"_global_optimizer_{when}_hooks").values()]
    return global_hooks + hooks if when == "pre" else hooks + global_hooks


@contextmanager
def _without_hooks(instance: torch.optim.Optimizer) -> Iterator[None]:
    global_hooks: list[dict[int, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,  # type: ignore[list-item]
        torch_optimizer._global_optimizer_post_hooks,  # type: ignore[list-item]
    ]
    saved = [dict(hooks) for hooks in global_hooks]
    of_instance = instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks
    instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for hooks in global_hooks:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, values in zip(global_hooks, saved, strict=True):
            hooks.update(values)
        instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks = of_instance


# -- values ---------------------------------------------------------------------------------------------------------


def is_plain(value: Any) -> bool:
    """Return whether a value is saved and compared across ranks: a number, text, or a container of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, dict) and not isinstance(value, defaultdict):  # the factory of a defaultdict is code
        return all(is_plain(key) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(is_plain(inner) for inner in value)
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def plain_number(value: Any) -> Any:
    """Return the number in a tensor of one element, and any other value unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _copied(value: Any) -> Any:
    """Copy tensors and plain data, so that in-place writes can be detected. Other objects are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if is_plain(value) else value


def _version(value: Any) -> Any:
    """Return an object that differs after the value was written to. Tensors are not copied."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return {key: _version(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_version(inner) for inner in value]
    return value if is_plain(value) else id(value)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, where NaN equals NaN."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        moved = other.to(one.device)
        return bool(((one == moved) | ((one != one) & (moved != moved))).all())
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
    """Return the values of `after` that differ from `before`. Removed keys have the value `_MISSING`."""
    changed = {key: value for key, value in after.items() if key not in before or not same(before[key], value)}
    return changed | dict.fromkeys(before.keys() - after.keys(), _MISSING)


class Attributes:
    """The attributes of an instance that its steps write. Those that are plain data are saved in checkpoints."""

    def __init__(self, instance: torch.optim.Optimizer | None) -> None:
        self._attributes = vars(instance) if instance is not None else {}
        self._is_torchs = is_torchs(instance)
        self._names: dict[str, None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the attributes that are written inside the block."""
        before = _version(self._all())
        yield
        self._names |= dict.fromkeys(_written(before, _version(self._all())))

    def values(self) -> tuple[dict[str, Any], list[str]]:
        """Return the attributes to save, and the names of those that are not plain data."""
        found = {name: value for name, value in self._all().items() if name in self._names}
        plain = {name: value for name, value in found.items() if is_plain(value)}
        return plain, [name for name in found if name not in plain]

    def take(self, values: Mapping[str, Any]) -> None:
        """Load the attributes of a checkpoint."""
        loaded = _not_torchs(values)
        self._names |= dict.fromkeys(loaded)
        self._attributes.update(loaded)

    def _all(self) -> dict[str, Any]:
        return {} if self._is_torchs else _not_torchs(self._attributes)


# -- tile by tile ---------------------------------------------------------------------------------------------------


def _copy_with_groups(instance: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Copy the user's instance with other groups and without states."""
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
    """The rule that steps a tile with a copy of the user's instance, whose only parameter is the tile.

    Elementwise states are those of the tile. The others (step counts) are shared by all tiles of a group: each tile
    starts from those that the last step left. See [Note: what a step writes].
    """

    def __init__(self, instance: torch.optim.Optimizer) -> None:
        self.can_skip = False
        self.late_states: tuple[str, ...] = ()
        self._instance = instance
        self._name = type(instance).__name__
        # Whether a step may write to the groups or to attributes of the instance.
        self.writes = not is_torchs(instance)
        self._lock = threading.Lock()
        self.loose: dict[int, dict[str, Any]] = {}
        self._next: dict[int, dict[str, Any]] = {}
        self._groups: Sequence[Hyper] = []
        # The values that a step of a small probe wrote to each group and to the instance. They are used by a rank that
        # has no tile of a group, so that its counters advance as on other ranks.
        self._probe_to_groups: list[dict[str, Any]] = []
        self._probe_to_instance: dict[str, Any] = {}
        # The values that tiles wrote to their group, to other groups, and to the instance.
        self._to_own_group: dict[int, dict[str, Any]] = {}
        self._to_other_groups: dict[int, dict[str, Any]] = {}
        self._to_instance: dict[str, Any] | None = None

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        """Return the names of all elementwise states, as a step of a small probe creates them."""
        names: dict[str, None] = {}
        for index in range(len(groups)):
            probe = torch.zeros(64)
            state = self._run(_probe, probe, torch.zeros(64), {}, index, groups)[0]
            names |= dict.fromkeys(name for name, value in state.items() if _is_elementwise(value, probe))
        return list(names)

    def begin(self, groups: Sequence[Hyper], method: str | None = None) -> None:
        """Begin a step, or a call of another method, over all tiles. All of them start from these groups.

        Errors of the class (for a step in the wrong mode) are raised here, before anything has changed.
        """
        self.loose |= self._next
        self._groups = groups
        self._to_own_group, self._to_other_groups, self._to_instance = {}, {}, None
        if self.writes:
            call = plain_step if method is None else methodcaller(method)
            _, self._probe_to_groups, self._probe_to_instance = self._run(
                call, torch.zeros(64), torch.zeros(64), {}, 0, groups
            )

    def apply_stored(self, tile: StoredTile, hyper: Hyper, step: int) -> bool:
        return False

    def apply_stored_together(self, tiles: Sequence[StoredTile], hyper: Hyper, step: int) -> bool:
        return False

    def apply_together(self, tiles: Sequence[Tile], hyper: Hyper, step: int) -> None:
        for tile in tiles:
            self.apply(tile, hyper, step)

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        self._call_on_tile(tile, plain_step, tile.gradient, has_states=step > 1)

    def call(self, method: str, tile: Tile, *, has_states: bool) -> None:
        """Call another method of the class that changes parameters."""
        self._call_on_tile(tile, methodcaller(method), None, has_states=has_states)

    def finish(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write the values that tiles wrote to the user's groups and instance, after the last tile."""
        if not self.writes:
            return
        for index, group in enumerate(groups):
            by_others = self._to_other_groups.get(index, self._probe_to_groups[index])
            _write(group, self._to_own_group.get(index, by_others))
        _write(vars(self._instance), self._probe_to_instance if self._to_instance is None else self._to_instance)

    def _call_on_tile(
        self, tile: Tile, call: Callable[[Any], None], gradient: torch.Tensor | None, *, has_states: bool
    ) -> None:
        # The first step creates the states.
        known = {**copy.deepcopy(self.loose.get(tile.group, {})), **tile.states} if has_states else {}
        state, to_groups, to_instance = self._run(call, tile.parameter, gradient, known, tile.group, self._groups)
        for name, value in state.items():
            if name in tile.states:
                if value is not tile.states[name]:
                    tile.states[name].copy_(value)
            elif _is_elementwise(value, tile.parameter):
                raise RuntimeError(
                    f"optimizer {self._name} created the state {name!r} after its first step, so there is no space "
                    "for it on disk. Create all states in the first step, or offload to cpu."
                )
        with self._lock:  # device and host may step tiles at the same time
            if has_states or state:
                self._next[tile.group] = {k: v for k, v in state.items() if not _is_elementwise(v, tile.parameter)}
            self._record(tile.group, to_groups, to_instance)

    def _record(self, tile_group: int, to_groups: Sequence[dict[str, Any]], to_instance: dict[str, Any]) -> None:
        """Record the values that a tile wrote, and raise if another tile wrote different ones."""
        for index, written in enumerate(to_groups):
            recorded = (self._to_own_group if index == tile_group else self._to_other_groups).setdefault(index, written)
            if index == tile_group:
                self._check(recorded, written, f"param_groups[{index}]")
        self._to_instance = to_instance if self._to_instance is None else self._to_instance
        self._check(self._to_instance, to_instance, "its attributes")

    def _check(self, recorded: Mapping[str, Any], written: Mapping[str, Any], where: str) -> None:
        for key in {**recorded, **written}:
            one, other = recorded.get(key, _MISSING), written.get(key, _MISSING)
            plain = all(value is _MISSING or is_plain(value) for value in (one, other))
            if plain and not same(one, other):
                raise RuntimeError(
                    f"optimizer {self._name} wrote different values of {key!r} to {where} for different elements. It "
                    "is not elementwise, but states on NVMe are updated in tiles. Offload to cpu."
                )

    def latest(self, group: int) -> dict[str, Any]:
        """Return the states of a group that are not elementwise, after the last step."""
        return self._next.get(group, self.loose.get(group, {}))

    def take(self, group: int, values: dict[str, Any]) -> None:
        """Load the states of a group that are not elementwise from a checkpoint."""
        self._next[group] = values

    def remember(self) -> Callable[[], None]:
        """Return a function that undoes `take`."""
        before = dict(self.loose), dict(self._next)

        def undo() -> None:
            self.loose, self._next = dict(before[0]), dict(before[1])

        return undo

    @torch.enable_grad()  # as in a training loop without an engine
    def _run(
        self,
        call: Callable[[Any], None],
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        state: dict[str, Any],
        index: int,
        groups: Sequence[Hyper],
    ) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
        """Call a copy of the instance in which group `index` has one parameter, and the other groups have none.

        Return the states of the parameter, and the values that were written to each group and to the copy.
        """
        inner_groups = [
            {**{key: _copied(value) for key, value in hyper.items() if key != "params"}, "params": []}
            for hyper in groups
        ]
        inner = _copy_with_groups(self._instance, inner_groups)
        target = nn.Parameter(parameter)
        target.grad = gradient
        inner_groups[index]["params"] = [target]
        if state:
            inner.state[target] = state
        if not self.writes:
            call(inner)
            return dict(inner.state[target]), [], {}
        before = [{key: _copied(value) for key, value in group.items() if key != "params"} for group in inner_groups]
        attributes = _not_torchs(vars(self._instance))
        call(inner)
        after = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
        to_groups = [_written(one, other) for one, other in zip(before, after, strict=True)]
        return dict(inner.state[target]), to_groups, _written(attributes, _not_torchs(vars(inner)))


def _probe(inner: Any) -> None:
    if callable(getattr(inner, "train", None)):  # some classes step only in training mode, which is not set yet
        inner.train()
    plain_step(inner)


def _write(target: dict[str, Any], written: Mapping[str, Any]) -> None:
    for key, value in written.items():
        current = target.get(key)
        if value is _MISSING:
            target.pop(key, None)
        elif isinstance(current, torch.Tensor) and current.numel() == 1 and isinstance(value, int | float):
            current.fill_(value)  # the step received a tensor of one element as a number
        else:
            target[key] = value


def _is_elementwise(value: Any, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape
