"""Hyperparameters that users pass or change in Python: values of parameter groups, arguments of schedules.

They are read by the same declarations as the config, so that they have the same types, ranges and messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from onefold.config.keys import entries, read_value, spellings
from onefold.config.params import OPTIMIZERS, SCHEDULES, check_together
from onefold.config.suggestions import meant_key
from onefold.errors import ConfigError


class Hyperparameters:
    """The hyperparameters of one rule: the keys of `optimizer.params`, which are also the keys of its groups."""

    def __init__(self, rule: str) -> None:
        self._keys = spellings(OPTIMIZERS[rule])
        self.names = tuple(self._keys)
        """All spellings of all keys."""
        # No rule reads a key that only has a notice or a refusal.
        read = [entry for entry in entries(OPTIMIZERS[rule]).values() if not (entry.key.notice or entry.key.refused)]
        self.defaults: dict[str, Any] = {entry.name: entry.default for entry in read}
        self.read_names = {name for entry in read for name in (entry.name, *entry.key.aliases)}
        """All spellings of the keys that the rule reads."""

    def read(self, group: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the hyperparameters in a group, converted to their types, under their canonical names.

        Tensors are checked, but returned unchanged.
        """
        read = {}
        for name, value in group.items():
            entry = self._keys.get(name)
            if entry is None or (value is None and entry.optional):
                continue
            plain = read_value(f"{path}.{name}", _plain(value), entry)
            if entry.key.refused is not None and entry.is_requested(plain):
                raise ConfigError(f"{path}.{name} = {plain!r}: {entry.key.refused}")
            read[entry.name] = value if _has_tensor(value) else plain
        return read

    def complete(self, group: Mapping[str, Any], params: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return a group with all hyperparameters. Its values override `params`, the values of the config."""
        values = {**params, **group, **self.read(group, path)}
        check_together(values, path)
        return values


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "numel")  # this package does not import torch


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.item() if _is_tensor(value) and value.numel() == 1 else value


def _has_tensor(value: Any) -> bool:
    return any(map(_is_tensor, value if isinstance(value, list | tuple) else [value]))


HYPERPARAMETERS = {rule: Hyperparameters(rule) for rule in OPTIMIZERS}
READ_NAMES = frozenset(name for rule in HYPERPARAMETERS.values() for name in rule.read_names)


def check_names(group: Mapping[str, Any], known: Sequence[str], path: str, optimizer: str) -> None:
    """Raise for a key of a group that only other optimizers read, or that is a misspelling of a known one.

    Other keys are accepted, because user code may add its own.
    """
    for name in group:
        if name in (*known, "params"):
            continue
        if (meant := meant_key(name, known, certain=True)) is not None:
            raise ConfigError(f"{path}.{name}: no optimizer reads it. Did you mean {path}.{meant}?")
        if name in READ_NAMES:
            raise ConfigError(f"{path}.{name}: optimizer {optimizer} does not use it. Leave it out of the group.")


def read_schedule_param(name: str, value: Any) -> Any:
    """Convert a parameter of a schedule to its type and check its range. 1e3 is a valid integer."""
    # A parameter has the same type and range in every schedule that has it.
    entry = next(entries(kind)[name] for kind in SCHEDULES.values() if name in entries(kind))
    return read_value(f"scheduler.params.{name}", value, entry)
