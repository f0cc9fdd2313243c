"""A dict or a file to a `Config`: keys by name, alias or dotted path, values by type, then checks and fates."""

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from onefold.config.accelerate import is_accelerate, translate
from onefold.config.checks import check, settle_old_spellings
from onefold.config.errors import ConfigError
from onefold.config.fates import Found, find_notices, find_refusals
from onefold.config.keys import Entry, Key, entries, spellings
from onefold.config.params import check_together, params_of
from onefold.config.schema import FREE_KEYS, Config
from onefold.config.suggest import unknown_key
from onefold.config.text import check_depth, read_source
from onefold.config.values import free_object, is_absent, read_as, read_value, wrong


@dataclasses.dataclass(frozen=True)
class _Item:
    """One key of one object, as it was spelled; `name` may be a dotted path to a key further down."""

    name: str
    value: Any
    path: str


def load_config(source: Mapping[str, Any] | str | os.PathLike[str] | Config) -> Config:
    """Reads a config: a dict, a JSON or YAML file, or a `Config` (returned as it is).

    What is not offered yet does not fail here: it is listed in `refusals`, and `check_built` raises.
    """
    if isinstance(source, Config):
        return source
    folder = None
    if isinstance(source, Mapping):
        check_depth(source, "this config")
        document = {str(name): copy.deepcopy(value) for name, value in source.items()}
    elif isinstance(source, str | os.PathLike):
        document = read_source(source)
        folder = os.path.dirname(os.path.expanduser(os.fspath(source)))
    else:
        raise ConfigError(f"a config is a dict or the path of a file, not {type(source).__name__}")
    notices: list[str] = []
    refusals: list[str] = []
    if is_accelerate(document):
        translated = translate(document, folder)
        document, notices, refusals = translated.document, [*translated.notices], [*translated.refusals]

    found = Found()
    config: Config = _read_section(Config, [_Item(name, value, name) for name, value in document.items()], "", found)
    config = settle_old_spellings(config, found)
    check(config)
    config = _read_params(config, found)
    return dataclasses.replace(
        config,
        notices=(*notices, *find_notices(config, found)),
        refusals=(*refusals, *find_refusals(found)),
        raw=document,
    )


def check_built(config: Config) -> None:
    """Raises one ConfigError that lists everything the config asks for and onefold does not offer."""
    if config.refusals:
        lines = "".join(f"\n  - {line}" for line in config.refusals)
        raise ConfigError(f"this config asks for what onefold does not offer:{lines}")


def read_params(kind: type, params: Mapping[str, Any], path: str, found: Found | None = None) -> dict[str, Any]:
    """The given parameters of one of onefold's own optimizers or schedules, each in its type and under its own name."""
    found = Found() if found is None else found
    _read_section(kind, [_Item(str(name), value, f"{path}.{name}") for name, value in params.items()], path, found)
    return {name: found.given[f"{path}.{name}"] for name in entries(kind) if f"{path}.{name}" in found.given}


def _read_params(config: Config, found: Found) -> Config:
    for name in ("optimizer", "scheduler"):
        section = getattr(config, name)
        kind = params_of(name, section.type) if section is not None else None
        if kind is not None:
            path = f"{name}.params"
            read = read_params(kind, section.params, path, found)
            check_together({key: entry.default for key, entry in entries(kind).items()} | read, path)
            found.params[path] = kind
            config = dataclasses.replace(config, **{name: dataclasses.replace(section, params=read)})
    return config


def _read_section(kind: type, items: Sequence[_Item], path: str, found: Found) -> Any:
    known = spellings(kind)
    given: dict[str, list[_Item]] = {}
    for item in items:
        # A dotted path to a known key is that key: its head names the section, the rest is a key of that section.
        head, _, rest = item.name.partition(".")
        entry = known.get(head)
        if entry is None or (rest and entry.section is None and not entry.is_free):
            raise unknown_key(Config, kind, path, item.name, item.path)
        given.setdefault(entry.name, []).append(_Item(rest, item.value, item.path))
    values = {
        name: _read_key(entries(kind)[name], named, f"{path}.{name}" if path else name, found)
        for name, named in given.items()
        if entries(kind)[name].section is not None or _present(entries(kind)[name], named)
    }
    found.mentioned.update(f"{path}.{name}" if path else name for name in given)
    return kind(**values)


def _read_key(entry: Entry, items: Sequence[_Item], path: str, found: Found) -> Any:
    if entry.section is not None:
        inner = _open(items)
        if inner is None:
            return entry.default
        value = _read_section(entry.section, inner, path, found)
        if entry.optional:
            found.given[path] = value
        return value
    if entry.is_free:
        value = _read_free(_open(items) or (), path)
        _check_free(entry, value, path)
    else:
        present = _present(entry, items)
        value = _read_scalar(entry, present)
        found.spelled[path] = present[0].path
        if entry.key.flag and any(isinstance(item.value, bool) for item in present):
            found.old_spellings.append(f"{path} = {str(bool(value)).lower()}: the old spelling of {value}")
    found.given[path] = value
    return value


def _present(entry: Entry, items: Sequence[_Item]) -> list[_Item]:
    return [item for item in items if not is_absent(item.value, entry.key.auto)]


def _open(items: Sequence[_Item]) -> list[_Item] | None:
    """The keys inside an object that may be given whole, by dotted paths, or both; None when it is absent."""
    inner: list[_Item] = []
    present = False
    for item in items:
        if item.name:
            inner.append(item)
            present = True
        elif isinstance(item.value, Mapping):
            inner += [_Item(str(name), value, f"{item.path}.{name}") for name, value in item.value.items()]
            present = True
        elif not is_absent(item.value):
            raise wrong(item.path, item.value, 'an object, such as {"...": ...}')
    return inner if present else None


def _read_free(items: Sequence[_Item], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for item in items:
        for name, value in free_object({item.name: item.value}).items():
            if name in found and found[name] != value:
                raise _disagree(path, [spelled[name], item.path], [found[name], value])
            found[name], spelled[name] = value, item.path
    return found


def _check_free(entry: Entry, value: dict[str, Any], path: str) -> None:
    """What is read of an object whose keys are free: switches and sizes, and the values where all have one type."""
    inner = get_args(entry.hint)[1]
    for name, held in value.items():
        full = f"{path}.{name}"
        if inner is not Any:
            read_as(full, held, inner, Key(""))
        elif name in FREE_KEYS:
            value[name] = read_as(full, held, *FREE_KEYS[name])
        elif isinstance(held, dict):
            _check_free(entry, held, full)


def _read_scalar(entry: Entry, items: Sequence[_Item]) -> Any:
    values = [read_value(item.path, item.value, entry) for item in items]
    paths = [item.path for item in items]
    names = {path.rpartition(".")[2] for path in paths}
    if any(value != values[0] for value in values) or (entry.key.one_spelling and len(names) > 1):
        raise _disagree(entry.name, paths, [item.value for item in items])
    return values[0]


def _disagree(name: str, paths: Sequence[str], values: Sequence[Any]) -> ConfigError:
    shown = ", ".join(f"{path} = {value!r}" for path, value in zip(paths, values, strict=True))
    return ConfigError(f"{shown}: these are one key, {name}; keep one of them")
