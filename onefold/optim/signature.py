"""Parameters of a config for a class of torch, read by the signature of that class."""

from __future__ import annotations

import collections.abc
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from onefold.config import ConfigError
from onefold.config.keys import Key, fill_absent, is_readable, read_as, shown
from onefold.config.read import unknown_param

# What torch itself does not check, by the names that its classes share: what would divide by zero, or climb.
_RATES = ("lr", "weight_decay", "gamma", "eta_min", "min_lr", "base_lr", "max_lr", "factor", "power")
_RANGES = {
    **dict.fromkeys((*_RATES, "milestones", "patience", "cooldown"), Key("", minimum=0)),
    **dict.fromkeys(("T_max", "step_size", "step_size_up", "step_size_down", "total_iters"), Key("", minimum=1)),
    **dict.fromkeys(("div_factor", "final_div_factor"), Key("", above=0)),
    "last_epoch": Key("", minimum=-1),
}
# torch has no error of its own for a wrong argument.
_REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError)


def read_arguments(kind: type, params: Mapping[str, Any], path: str, first: str) -> dict[str, Any]:
    """The parameters in the types that the class annotates. `first` is the argument that the engine gives itself."""
    known = {name: held for name, held in inspect.signature(kind).parameters.items() if name != first}
    hints = _hints(kind)
    read = {}
    for name, value in params.items():
        if name not in known:
            raise unknown_param(path, name, kind.__name__, known)
        value = fill_absent(f"{path}.{name}", value, known[name].default)
        if name in hints and not is_readable(hints[name]):
            raise ConfigError(f"{path}.{name} = {shown(value)}: {kind.__name__} wants what a config cannot hold there")
        read[name] = (
            read_as(f"{path}.{name}", value, hints[name], _RANGES.get(name, Key(""))) if name in hints else value
        )
    missing = [n for n, held in known.items() if held.default is inspect.Parameter.empty and n not in read]
    if missing:
        raise ConfigError(f"{path}.{missing[0]} is missing: {kind.__name__} needs it; known: {', '.join(known)}")
    return read


def check_arguments(kind: type, values: Mapping[str, Any], path: str) -> None:
    """Raise where a value, of those that the class has an argument for, is not of the type that it annotates."""
    hints = _hints(kind)
    for name in values.keys() & hints.keys():
        if is_readable(hints[name]) and values[name] is not None:
            read_as(f"{path}.{name}", values[name], hints[name], _RANGES.get(name, Key("")))


def build(kind: Callable[..., Any], make: Callable[[dict[str, Any]], Any], read: dict[str, Any], path: str) -> Any:
    """What `make` gives; what the class refuses becomes an error that names the key, where one can be told."""
    try:
        return make(read)
    except ConfigError:
        raise
    except _REFUSALS as error:
        at_fault = [name for name in read if _fits_without(make, read, name)]
        at_fault += [name for name in read if re.search(rf"\b{name}\b", str(error))]
        where = f"{path}.{at_fault[0]} = {shown(read[at_fault[0]])}" if at_fault else f"{path} of {kind.__name__}"
        raise ConfigError(f"{where}: {error}") from error


def _fits_without(make: Callable[[dict[str, Any]], Any], read: dict[str, Any], name: str) -> bool:
    """Whether the class takes the other parameters: then it is this one that it does not take."""
    try:
        make({other: value for other, value in read.items() if other != name})
    except _REFUSALS:
        return False
    return True


def _hints(kind: type) -> dict[str, Any]:
    try:
        # torch imports names such as Iterable for type checkers alone.
        return get_type_hints(kind.__init__, localns=dict(vars(collections.abc)))  # type: ignore[misc]
    except NameError:
        return {}  # a release of torch that imports more: its own checks are left
