"""One value of a file, checked against the type that its key declares."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from onefold.config.errors import ConfigError
from onefold.config.keys import Entry
from onefold.config.precision import Dtype

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?")
_INFINITE = {"inf", "+inf", "infinity", "+infinity", ".inf"}
_DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}


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
    if not _NUMBER.fullmatch(text):
        return value
    text = text.replace("_", "")
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


def read_value(path: str, value: Any, entry: Entry) -> Any:
    """The value in the type of its key, or a ConfigError that names path, value and what was expected."""
    hint = entry.hint
    if entry.key.auto and _is_word(value, "auto"):
        return None
    if hint is bool:
        return _boolean(path, value)
    if hint is int or hint is float:
        return _number(path, value, entry)
    if hint is str:
        if not isinstance(value, str):
            raise _wrong(path, value, "a string")
        return value
    if hint == Dtype:
        return _dtype(path, value)
    if get_origin(hint) is Literal:
        return _choice(path, value, get_args(hint))
    assert get_origin(hint) is tuple, f"no reader for {hint}"
    return _list(path, value, get_args(hint)[0], entry.key.or_one)


def free_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object whose keys somebody else knows: what is absent is dropped, numeric strings become numbers."""
    return {str(name): _free(inner) for name, inner in value.items() if not _is_absent_inside(inner)}


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


def _wrong(path: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{path} = {value!r}: expected {expected}")


def _boolean(path: str, value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise _wrong(path, value, "true or false")
    return value


def _number(path: str, value: Any, entry: Entry) -> int | float | None:
    key = entry.key
    kind = ("auto, or " if key.auto else "") + ("a whole number" if entry.hint is int else "a number")
    if isinstance(value, bool) and key.flag:
        return int(value)
    number = as_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number):
        raise _wrong(path, value, kind)
    if math.isinf(number):
        if not key.infinite or number < 0:
            raise _wrong(path, value, "a finite number")
        return None if entry.hint is int else number
    if entry.hint is int and number != int(number):
        raise _wrong(path, value, kind)
    number = int(number) if entry.hint is int else float(number)
    if key.minimum is not None and number < key.minimum:
        limits = f"{kind} from {key.minimum} to {key.maximum}" if key.maximum is not None else f"at least {key.minimum}"
        raise _wrong(path, value, limits)
    if key.maximum is not None and number > key.maximum:
        raise _wrong(path, value, f"{kind} from {key.minimum} to {key.maximum}")
    if key.above is not None and number <= key.above:
        raise _wrong(path, value, f"a number above {key.above}")
    return number


def _dtype(path: str, value: Any) -> str:
    # A torch.dtype in a dict config prints as torch.float16, so its text is enough and torch is not needed here.
    text = str(value).strip().lower().removeprefix("torch.")
    for name, spelled in _DTYPES.items():
        if text in spelled:
            return name
    raise _wrong(path, value, "fp32, bf16 or fp16")


def _choice(path: str, value: Any, choices: tuple[str, ...]) -> str:
    for choice in choices:
        if isinstance(value, str) and value.strip().lower() == choice.lower():
            return choice
    raise _wrong(path, value, "one of " + ", ".join(choices))


def _list(path: str, value: Any, kind: type, or_one: bool) -> tuple[Any, ...]:
    name = "string" if kind is str else "whole number"
    expected = f"a {name} or a list of {name}s" if or_one else f"a list of {name}s"
    if isinstance(value, list | tuple):
        listed = value
    elif or_one:
        listed = (value,)
    else:
        raise _wrong(path, value, expected)
    found = tuple(listed if kind is str else map(as_number, listed))
    if any(not isinstance(inner, kind) or isinstance(inner, bool) for inner in found):
        raise _wrong(path, value, expected)
    return found
