"""Files and strings to plain dicts: JSON with comments, YAML, and DeepSpeed's base64 form."""

import base64
import binascii
import json
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from onefold.config.errors import ConfigError

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*[\s\S]*?\*/")
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_LONG_NUMBER = re.compile(rf"{_STRING}|\d+(?:_\d+)+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def read_source(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The dict in a JSON or YAML file, or in a base64 string as DeepSpeed's launcher hands it over."""
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
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
    try:
        parsed = json.loads(plain, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise _at(name, text, error.lineno, error.colno, error.msg) from error
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
    return _top(parsed, name)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object before its keys are checked."""


class _Loader(yaml.SafeLoader):
    """Plain YAML, but a key that is given twice is an error and not the last one."""

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
        raise ConfigError(f"{name}: a config is an object of keys and values, this is {parsed!r}")
    return {str(key): value for key, value in parsed.items()}


def _at(name: str, text: str, line: int, column: int, problem: str) -> ConfigError:
    lines = text.splitlines()
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    return ConfigError(f"{name}, line {line}, column {column}: {problem}\n    {shown}\n    {' ' * (column - 1)}^")


def _decode(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
