"""One value of a file, checked against the type that its key declares."""

import collections.abc
import math
import re
import types
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, Union, get_args, get_origin

from onefold.config.errors import ConfigError
from onefold.config.keys import Entry, Key
from onefold.config.precision import Dtype

# No leading zeros: YAML 1.1, C and Python 2 read 010 as eight, people as ten.
_WHOLE = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_NUMBER = re.compile(rf"[+-]?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITE = {"inf", "+inf", "infinity", "+infinity", ".inf"}
_DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}
_LISTS = (tuple, list, collections.abc.Iterable, collections.abc.Sequence)
MAX_DIGITS = 300
"""Longer than any number that a key can have; Python itself refuses to read thousands of them."""


def is_absent(value: Any, auto: bool = False) -> bool:
    """`"auto"`, null and `"none"` mean that the key was not given; with `auto`, `"auto"` is a value like others."""
    return value is None or _is_word(value, "none") or (not auto and _is_word(value, "auto"))


def as_number(value: Any) -> Any:
    """A numeric string as its number (YAML 1.1 reads 5e8 as a string), anything else unchanged."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _INFINITE:
        return math.inf
    if len(text) > MAX_DIGITS or not _NUMBER.fullmatch(text):
        return value
    text = text.replace("_", "")
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)


def read_value(path: str, value: Any, entry: Entry) -> Any:
    """The value in the type of its key, or a ConfigError that names path, value and what was expected."""
    return read_as(path, value, entry.hint, entry.key)


def read_as(path: str, value: Any, hint: Any, key: Key) -> Any:
    """The value as an annotation wants it: a key's own, or one of a class of torch."""
    if key.auto and _is_word(value, "auto"):
        return None
    if get_origin(hint) in (Union, types.UnionType):
        return _read_either(path, value, hint, key)
    if hint is bool:
        return _boolean(path, value)
    if hint is int or hint is float:
        return _number(path, value, hint, key)
    if hint is str:
        if not isinstance(value, str):
            raise wrong(path, value, "a string")
        return value
    if hint == Dtype:
        return _dtype(path, value)
    if get_origin(hint) is Literal:
        return _choice(path, value, get_args(hint))
    assert is_readable(hint), f"no reader for {hint}"
    return _list(path, value, hint, key)


def is_readable(hint: Any) -> bool:
    """Whether a config can hold what an annotation asks for; it cannot hold functions and tensors."""
    if hint in (bool, int, float, str) or get_origin(hint) is Literal:
        return True
    if get_origin(hint) in (Union, types.UnionType):
        return any(is_readable(kind) for kind in get_args(hint))
    return get_origin(hint) in _LISTS and all(is_readable(kind) for kind in get_args(hint) if kind is not Ellipsis)


def free_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object whose keys somebody else knows: what is absent is dropped, numeric strings become numbers."""
    return {str(name): _free(inner) for name, inner in value.items() if not _is_absent_inside(inner)}


def wrong(path: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{path} = {shown(value)}: expected {expected}")


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS:
        return "(a number of many digits)"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def _is_word(value: Any, word: str) -> bool:
    return isinstance(value, str) and value.strip().lower() == word


def _is_absent_inside(value: Any) -> bool:
    return is_absent(value) or (isinstance(value, list | tuple) and any(is_absent(inner) for inner in value))


def _free(value: Any) -> Any:
    if isinstance(value, Mapping):
        return free_object(value)
    if isinstance(value, list | tuple):
        return [_free(inner) for inner in value]
    return as_number(value)


def _read_either(path: str, value: Any, hint: Any, key: Key) -> Any:
    """One of several types: a list where one is offered and the value is one, else the first that is none."""
    if value is None and types.NoneType in get_args(hint):
        return None
    kinds = [kind for kind in get_args(hint) if is_readable(kind)]
    fitting = [kind for kind in kinds if (get_origin(kind) in _LISTS) == isinstance(value, list | tuple)]
    if not fitting:
        raise wrong(path, value, " or ".join(_kind(kind) for kind in kinds))
    return read_as(path, value, fitting[0], key)


def _kind(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_kind(kind) for kind in get_args(hint) if is_readable(kind))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) not in _LISTS:
        return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[hint]
    inner = get_args(hint)
    name = _kind(inner[0]).partition(" or ")[0].removeprefix("a ")
    return f"a list of {len(inner)} {name}s" if _is_fixed(hint) else f"a list of {name}s"


def _is_fixed(hint: Any) -> bool:
    return get_origin(hint) is tuple and get_args(hint)[-1] is not Ellipsis


def _boolean(path: str, value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise wrong(path, value, "true or false")
    return value


def _number(path: str, value: Any, hint: type, key: Key) -> int | float | None:
    kind = ("auto, or " if key.auto else "") + _kind(hint)
    if isinstance(value, bool) and key.flag:
        return int(value)
    number = as_number(value)
    if isinstance(number, bool) or not isinstance(number, Real) or number != number:
        raise wrong(path, value, kind)
    number = number if isinstance(number, int | float) else float(number)  # numpy's numbers
    if abs(number) >= 10**MAX_DIGITS:
        if not key.infinite or number < 0:
            raise wrong(path, value, "a finite number")
        return None if hint is int else math.inf
    if hint is int and number != int(number):
        raise wrong(path, value, kind)
    number = int(number) if hint is int else float(number)
    if not _in_range(number, key):
        raise wrong(path, value, _range(kind, key))
    return number


def _in_range(number: float, key: Key) -> bool:
    return (
        (key.minimum is None or number >= key.minimum)
        and (key.above is None or number > key.above)
        and (key.maximum is None or number <= key.maximum)
        and (key.below is None or number < key.below)
    )


def _range(kind: str, key: Key) -> str:
    if key.above is not None:
        return f"a number above {key.above}"
    if key.below is not None:
        return f"{kind} of at least {key.minimum} and below {key.below}"
    return f"at least {key.minimum}" if key.maximum is None else f"{kind} from {key.minimum} to {key.maximum}"


def _dtype(path: str, value: Any) -> str:
    # A torch.dtype in a dict config prints as torch.float16, so its text is enough and torch is not needed here.
    text = str(value).strip().lower().removeprefix("torch.")
    for name, spelled in _DTYPES.items():
        if text in spelled:
            return name
    raise wrong(path, value, "fp32, bf16 or fp16")


def _choice(path: str, value: Any, choices: tuple[str, ...]) -> str:
    for choice in choices:
        if isinstance(value, str) and value.strip().lower() == choice.lower():
            return choice
    raise wrong(path, value, "one of " + ", ".join(choices))


def _list(path: str, value: Any, hint: Any, key: Key) -> tuple[Any, ...]:
    kinds = get_args(hint)
    if not isinstance(value, list | tuple):
        if not key.or_one:
            raise wrong(path, value, _kind(hint))
        value = (value,)
    if _is_fixed(hint) and len(value) != len(kinds):
        raise wrong(path, value, _kind(hint))
    each = kinds if _is_fixed(hint) else kinds[:1] * len(value)
    return tuple(
        read_as(f"{path}[{place}]" if len(value) > 1 else path, inner, kind, key)
        for place, (inner, kind) in enumerate(zip(value, each, strict=True))
    )
