"""Values that come from a file, checked one by one: what is refused is named by the way to it. No tensors."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_HEXADECIMAL = re.compile("[0-9a-f]{16}")
_MOST = 2**63 - 1


def parse(text: bytes) -> Any:
    """JSON as its standard has it: no key twice in an object, no NaN."""
    return json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refuse)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key is given twice: {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{where} must be a string, not {spell(value)}")
    return value


def whole(value: Any, where: str, least: int = 0, most: int = _MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{where} must be a whole number from {least} to {most}, not {spell(value)}")
    return value


def finite(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, not {spell(value)}")
    return float(value)


def items(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{where} must be a list, not {spell(value)}")
    return value


def entries(value: Any, where: str, *keys: str) -> dict[str, Any]:
    """An object that has these keys, whatever else it has."""
    if type(value) is not dict:
        raise ValueError(f"{where} must be an object, not {spell(value)}")
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return value


def hexadecimal(value: Any, where: str) -> int:
    if type(value) is not str or not _HEXADECIMAL.fullmatch(value):
        raise ValueError(f"{where} must be 16 hexadecimal digits, not {spell(value)}")
    return int(value, 16)


def spell(value: Any) -> str:
    """On one line, and short."""
    try:
        told = repr(value)
    except ValueError:  # a number of more digits than Python writes
        told = f"a number of {value.bit_length()} bits"
    return told if len(told) <= 60 else f"{told[:57]}..."
