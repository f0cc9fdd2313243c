"""Errors of damaged checkpoints, and checks of untrusted JSON field by field."""

from __future__ import annotations

import json
import math
import re
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or incompatible. The message names the file, the problem and the fix."""


class RemovedError(CheckpointError):
    """A checkpoint was removed or replaced by another process while it was read."""


# -- JSON fields -------------------------------------------------------------------------------------------------------

_HEXADECIMAL = re.compile("[0-9a-f]{16}")
_MOST = 2**63 - 1


def parse_json(text: bytes) -> Any:
    """Parse JSON strictly, without duplicate keys and NaN."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key is given twice: {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def check_text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{where} must be a string, not {spell(value)}")
    return value


def check_whole(value: Any, where: str, least: int = 0, most: int = _MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{where} must be a whole number from {least} to {most}, not {spell(value)}")
    return value


def check_finite(value: Any, where: str) -> float:
    require(type(value) in (int, float) and math.isfinite(value), value, "a finite number", where)
    return float(value)


def check_list(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{where} must be a list, not {spell(value)}")
    return value


def check_object(value: Any, where: str, *keys: str) -> dict[str, Any]:
    """Require an object that has at least these keys."""
    if type(value) is not dict:
        raise ValueError(f"{where} must be an object, not {spell(value)}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return value


def check_hexadecimal(value: Any, where: str) -> int:
    require(type(value) is str and _HEXADECIMAL.fullmatch(value), value, "16 hexadecimal digits", where)
    return int(value, 16)


def require(fits: object, value: Any, what: str, where: str) -> None:
    if not fits:
        raise ValueError(f"{where} must be {what}, not {spell(value)}")


def spell(value: Any) -> str:
    """Format a value for an error message, on one short line."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python formats
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 60 else f"{text[:57]}..."
