"""The check of values that user code writes to parameter groups during the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from onefold.errors import ConfigError
from onefold.optim.instance import is_torchs
from onefold.plan import HYPERPARAMETERS, READ_NAMES, check_arguments, check_names

Check = Callable[[Mapping[str, Any], str], object]
"""Raises if the optimizer does not accept one of the values of a group. The path of the group is for messages."""


def check_of_rate(values: Mapping[str, Any], path: str) -> None:
    """Check the learning rate only, in a group of a user-defined class whose other keys are unknown."""
    HYPERPARAMETERS["sgd"].read({name: value for name, value in values.items() if name == "lr"}, path)


def check_of_class(instance: torch.optim.Optimizer | None) -> Check | None:
    """Return the check for groups of a torch class, by its type annotations, or None for other classes."""
    return partial(check_arguments, type(instance)) if is_torchs(instance) else None


class WrittenValues:
    """The check of values that user code wrote to groups since the last step, the same as at `initialize`.

    `flags` are the keys that select the rule of a group. They cannot change, because shards are laid out by them.
    """

    def __init__(
        self, name: str, groups: Sequence[Mapping[str, Any]], checks: Sequence[Check | None], flags: Sequence[str]
    ) -> None:
        self._name, self._checks = name, checks
        self._first = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._fixed = [{flag: group.get(flag) for flag in flags} for group in groups]
        # The accepted values. Only values that differ from them are checked.
        self._last: Sequence[Mapping[str, Any]] = [dict(group) for group in self._first]

    def check(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Raise if a value is invalid. Return the keys of each group whose values differ from the accepted ones."""
        changed = []
        for index, (group, last, check) in enumerate(zip(groups, self._last, self._checks, strict=True)):
            keys = [] if check is None or _equal(group, last) else _changed(group, last)
            if keys and check is not None:
                self._check_group(index, {key: group[key] for key in keys if key in group}, group, check)
            changed.append(keys)
        return changed

    def accept(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Store checked values, with which the next check compares."""
        self._last = groups

    def _check_group(self, index: int, written: dict[str, Any], group: Mapping[str, Any], check: Check) -> None:
        path, first = f"optimizer.param_groups[{index}]", self._first[index]
        for flag, value in self._fixed[index].items():
            if bool(group.get(flag)) != bool(value):
                raise ConfigError(
                    f"{path}.{flag} was {value!r} at initialize and is {group.get(flag)!r} now, but shards are laid "
                    "out by it. Set it before initialize."
                )
        check(written, path)
        if check is check_of_rate:  # the keys that a user-defined rule reads are unknown
            return
        for key in first:
            if key not in group and key in READ_NAMES:
                raise ConfigError(f"{path}.{key} was removed from the group, but optimizer {self._name} reads it.")
        check_names({key: None for key in written if key not in first}, list(first), path, self._name)


def _changed(group: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    both = {**last, **group}
    return [key for key in both if key not in group or key not in last or not _equal(group[key], last[key])]


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays of several elements
        return False
