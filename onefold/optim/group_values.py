"""The values of parameter groups: how they are read at `initialize`, and how they are checked when a program writes to
them during the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from onefold.config import ConfigError
from onefold.config.keys import entries, read_value, spellings
from onefold.config.params import OPTIMIZERS, SGDParams
from onefold.config.read import meant_key
from onefold.optim.instance import is_torchs, plain_number
from onefold.optim.signature import check_arguments

Check = Callable[[Mapping[str, Any], str], object]
"""Raises where one of these values of a group, which stands at that path, is none that the optimizer takes."""


def read_group(kind: type, group: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the hyperparameters of a group, each in its type and under its own name; a tensor stays the one it is."""
    read = {}
    for name, value in group.items():
        entry = spellings(kind).get(name)
        if entry is None or (value is None and entry.optional):
            continue
        plain = read_value(f"{path}.{name}", _plain(value), entry)
        if entry.key.refused is not None and entry.is_requested(plain):
            raise ConfigError(f"{path}.{name} = {plain!r}: {entry.key.refused}")
        read[entry.name] = value if _has_tensor(value) else plain
    return read


def check_names(group: Mapping[str, Any], known: Sequence[str], path: str, optimizer: str) -> None:
    """Raise for a key that another optimizer reads and this one does not, and for one that is as good as a known one.
    Other keys are the program's own.
    """
    for name in group:
        if name in (*known, "params"):
            continue
        if (meant := meant_key(name, known, certain=True)) is not None:
            raise ConfigError(f"{path}.{name}: no optimizer reads it; did you mean {path}.{meant}?")
        if name in _hyperparameters():
            raise ConfigError(f"{path}.{name}: optimizer {optimizer} does not read it. Leave it out of the group")


@cache
def _hyperparameters() -> frozenset[str]:
    """Every key that one of onefold's optimizers reads."""
    found = [entry for kind in OPTIMIZERS.values() for entry in entries(kind).values()]
    read = [entry for entry in found if not (entry.key.notice or entry.key.refused)]
    return frozenset(name for entry in read for name in (entry.name, *entry.key.aliases))


def check_of_kind(kind: type) -> Check:
    """Return the check of groups whose keys are those of a section of the config."""
    return partial(read_group, kind)


def check_of_rate(values: Mapping[str, Any], path: str) -> None:
    """Return the check of groups of a user-defined class, of which only the learning rate is known."""
    read_group(SGDParams, {name: value for name, value in values.items() if name == "lr"}, path)


def check_of_class(instance: torch.optim.Optimizer | None) -> Check | None:
    """Return the check of groups that a class steps itself, from annotations of torch's classes; None for others."""
    return partial(check_arguments, type(instance)) if is_torchs(instance) else None


def _plain(value: Any) -> Any:
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else plain_number(value)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(inner, torch.Tensor) for inner in (value if isinstance(value, list | tuple) else [value]))


class WrittenValues:
    """Checks values that were written to groups since the last step, as `initialize` checks those that it is given.

    `flags` are the keys that say by which rule a group is stepped, which are fixed when shards are laid out.
    """

    def __init__(
        self, name: str, groups: Sequence[Mapping[str, Any]], checks: Sequence[Check | None], flags: Sequence[str]
    ) -> None:
        self._name, self._checks = name, checks
        self._first = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._fixed = [{flag: group.get(flag) for flag in flags} for group in groups]
        # A value that has been read once is not read again.
        self._last: Sequence[Mapping[str, Any]] = [dict(group) for group in self._first]

    def check(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Raise for what does not fit. Return the keys of each group that have other values than were accepted last."""
        changed = []
        for index, (group, last, check) in enumerate(zip(groups, self._last, self._checks, strict=True)):
            keys = [] if check is None or _equal(group, last) else _changed(group, last)
            if keys and check is not None:
                self._check_group(index, {key: group[key] for key in keys if key in group}, group, check)
            changed.append(keys)
        return changed

    def accept(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take these values, which have been checked, for those that the next check compares with."""
        self._last = groups

    def _check_group(self, index: int, written: dict[str, Any], group: Mapping[str, Any], check: Check) -> None:
        path, first = f"optimizer.param_groups[{index}]", self._first[index]
        for flag, value in self._fixed[index].items():
            if bool(group.get(flag)) != bool(value):
                raise ConfigError(
                    f"{path}.{flag} was {value!r} at initialize and is {group.get(flag)!r} now: shards are laid out by "
                    "it. Give the group that value before initialize"
                )
        check(written, path)
        if check is check_of_rate:  # only the rule knows what it reads
            return
        for key in first:
            if key not in group and key in _hyperparameters():
                raise ConfigError(f"{path}.{key} was removed from the group, and optimizer {self._name} reads it")
        check_names({key: None for key in written if key not in first}, list(first), path, self._name)


def _changed(group: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    both = {**last, **group}
    return [key for key in both if key not in group or key not in last or not _equal(group[key], last[key])]


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays of several elements
        return False
