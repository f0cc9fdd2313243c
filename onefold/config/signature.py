"""The parameters of torch's optimizers and schedulers, read and checked by the signature of the class."""

from __future__ import annotations

import collections.abc
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from onefold.config.keys import Key, fill_absent, is_readable, read_as
from onefold.config.suggestions import unknown_param
from onefold.errors import ConfigError, shown

# Ranges that torch's classes do not check, by argument name. Values outside divide by zero or ascend the gradient.
_RATES = ("lr", "weight_decay", "gamma", "eta_min", "min_lr", "base_lr", "max_lr", "factor", "power")
_RANGES = {
    **dict.fromkeys((*_RATES, "milestones", "patience", "cooldown"), Key("", minimum=0)),
    **dict.fromkeys(("T_max", "step_size", "step_size_up", "step_size_down", "total_iters"), Key("", minimum=1)),
    **dict.fromkeys(("div_factor", "final_div_factor"), Key("", above=0)),
    "last_epoch": Key("", minimum=-1),
}
# The exceptions that torch's constructors raise for invalid arguments.
_ARGUMENT_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError)


def read_arguments(kind: type, params: Mapping[str, Any], path: str, first: str) -> dict[str, Any]:
    """Return the parameters in the types that the class annotates. The engine itself passes the argument `first`."""
    known = {name: argument for name, argument in inspect.signature(kind).parameters.items() if name != first}
    hints = _hints(kind)
    read = {}
    for name, value in params.items():
        if name not in known:
            raise unknown_param(path, name, kind.__name__, known)
        value = fill_absent(f"{path}.{name}", value, known[name].default)
        if name in hints and not is_readable(hints[name]):
            raise ConfigError(
                f"{path}.{name} = {shown(value)}: {kind.__name__} needs a value that is not JSON. Leave it out."
            )
        read[name] = (
            read_as(f"{path}.{name}", value, hints[name], _RANGES.get(name, Key(""))) if name in hints else value
        )
    check_required(kind, read, path, first)
    return read


def check_required(kind: type, params: Mapping[str, Any], path: str, first: str) -> None:
    """Raise if `params` lacks an argument without a default."""
    known = {name: argument for name, argument in inspect.signature(kind).parameters.items() if name != first}
    for name, argument in known.items():
        if argument.default is inspect.Parameter.empty and name not in params:
            raise ConfigError(
                f"{path}.{name} is missing. {kind.__name__} needs it; its parameters are {', '.join(known)}."
            )


def check_arguments(kind: type, values: Mapping[str, Any], path: str) -> None:
    """Raise if a value does not have the type that the class annotates for the argument of that name."""
    hints = _hints(kind)
    for name in values.keys() & hints.keys():
        if is_readable(hints[name]) and values[name] is not None:
            read_as(f"{path}.{name}", values[name], hints[name], _RANGES.get(name, Key("")))


def build(kind: Callable[..., Any], make: Callable[[dict[str, Any]], Any], read: dict[str, Any], path: str) -> Any:
    """Return the result of `make`. Raise a ConfigError that names the key, if one can be found, if it fails."""
    try:
        return make(read)
    except ConfigError:
        raise
    except _ARGUMENT_ERRORS as error:
        invalid = [name for name in read if _succeeds_without(make, read, name)]
        invalid += [name for name in read if re.search(rf"\b{name}\b", str(error))]
        where = f"{path}.{invalid[0]} = {shown(read[invalid[0]])}" if invalid else f"{path} of {kind.__name__}"
        raise ConfigError(f"{where}: {error}") from error


def _succeeds_without(make: Callable[[dict[str, Any]], Any], read: dict[str, Any], name: str) -> bool:
    """Return whether the class accepts the other parameters, so that this one must be invalid."""
    try:
        make({other: value for other, value in read.items() if other != name})
    except _ARGUMENT_ERRORS:
        return False
    return True


def _hints(kind: type) -> dict[str, Any]:
    try:
        # torch imports names such as Iterable for type checkers only.
        return get_type_hints(kind.__init__, localns=dict(vars(collections.abc)))  # type: ignore[misc]
    except NameError:
        return {}  # a torch release with other such names; its constructors still check their arguments
