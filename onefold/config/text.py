"""Files and strings to plain dicts: JSON with comments, YAML, and DeepSpeed's base64 form."""

import base64
import binascii
import json
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from onefold.config.errors import ConfigError
from onefold.config.values import MAX_DIGITS, as_number, shown

_MAX_DEPTH = 50
_MAX_VALUES = 1_000_000
_WIDTH = 120
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*[\s\S]*?\*/")
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_LONG_NUMBER = re.compile(rf"{_STRING}|\d+(?:_\d+)+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def read_source(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The dict in a JSON or YAML file, or in a base64 string as DeepSpeed's launcher hands it over."""
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file ({error})") from error
    except OSError as error:
        decoded = _decode(source) if isinstance(source, str) else None
        if decoded is not None:
            return parse_json(decoded, "base64 config")
        if isinstance(source, str) and source.lstrip().startswith("{"):
            raise ConfigError("the config is JSON text; pass its path, or json.loads of it") from error
        raise ConfigError(f"{path}: cannot read the config ({error.strerror or error})") from error
    if path.suffix.lower() in (".yaml", ".yml"):
        return parse_yaml(text, str(path))
    return parse_json(text, str(path))


def parse_json(text: str, name: str) -> dict[str, Any]:
    """JSON with `//`, `/* */` and `#` comments, trailing commas and numbers such as 500_000_000."""
    # Each replacement keeps the length of the text, so that line and column of an error stay true.
    plain = _COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0]), text)
    plain = _TRAILING_COMMA.sub(lambda match: " " if match[0] == "," else match[0], plain)
    plain = _LONG_NUMBER.sub(
        lambda match: match[0] if match[0][0] == '"' else match[0].replace("_", "").ljust(len(match[0])), plain
    )

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            before = plain[: plain.index(digits)]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            raise _at(name, text, line, column, f"a number of {len(digits)} digits")
        return int(digits)

    try:
        parsed = json.loads(plain, object_pairs_hook=_Pairs, parse_int=whole)
    except json.JSONDecodeError as error:
        raise _at(name, text, error.lineno, error.colno, error.msg) from error
    except RecursionError as error:
        raise _too_deep(name) from error
    check_depth(parsed, name)
    return _top(_without_duplicates(parsed, "", name), name)


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """One YAML document, without duplicate keys."""
    try:
        parsed = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is None:
            raise ConfigError(f"{name}: {error}") from error
        raise _at(name, text, mark.line + 1, mark.column + 1, error.problem or "not YAML") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {error}") from error
    except RecursionError as error:
        raise _too_deep(name) from error
    check_depth(parsed, name)
    return _top(parsed, name)


def check_depth(document: Any, name: str) -> None:
    """Refuses what is nested deeper than any config is; a YAML alias inside itself has no end at all."""
    level = [document]
    for _ in range(_MAX_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
        if len(level) > _MAX_VALUES:
            break
    raise _too_deep(name)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, _Pairs):
        return [inner for _, inner in value]
    return value if isinstance(value, list | tuple) else ()


def _too_deep(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: nested more than {_MAX_DEPTH} levels deep, or with more than {_MAX_VALUES} values on one level; "
        "no config is"
    )


class _Pairs(list[tuple[str, Any]]):
    """A JSON object before its keys are checked."""


class _Loader(yaml.SafeLoader):
    """Plain YAML, but a key that is given twice is an error and not the last one.

    Numbers are decimal, as in YAML 1.2: version 1.1 reads 010 as eight and 1:30 as ninety. Those, and dates, stay
    strings, and the key's own type says what they are worth.
    """

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        text = self.construct_scalar(node)
        if len(text) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(problem=f"a number of {len(text)} characters", problem_mark=node.start_mark)
        return as_number(text)

    def construct_text(self, node: yaml.ScalarNode) -> Any:
        return self.construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            if name.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name.value!r} is given twice", problem_mark=name.start_mark
                )
            seen.add(name.value)
        return super().construct_mapping(node, deep)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_text)


def _without_duplicates(value: Any, path: str, name: str) -> Any:
    if isinstance(value, _Pairs):
        found: dict[str, Any] = {}
        for key, inner in value:
            full = f"{path}.{key}" if path else key
            if key in found:
                raise ConfigError(f"{name}: the key {full} is given twice; keep one of them")
            found[key] = _without_duplicates(inner, full, name)
        return found
    if isinstance(value, list):
        return [_without_duplicates(inner, path, name) for inner in value]
    return value


def _top(parsed: Any, name: str) -> dict[str, Any]:
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{name}: a config is an object of keys and values, this is {shown(parsed)}")
    return {str(key): value for key, value in parsed.items()}


def _at(name: str, text: str, line: int, column: int, problem: str) -> ConfigError:
    lines = text.splitlines()
    there = lines[line - 1] if 0 < line <= len(lines) else ""
    start = max(0, column - 1 - _WIDTH // 2)
    there = there[start : start + _WIDTH]
    return ConfigError(
        f"{name}, line {line}, column {column}: {problem}\n    {there}\n    {' ' * (column - 1 - start)}^"
    )


def _decode(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
