"""Conversion of a dict or a file to a checked `Config`. Keys may be given by name, alias or dotted path."""

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from onefold.config.checks import GivenKeys, check, find_notices, find_refusals, settle_old_spellings
from onefold.config.config_files import Translation, check_depth, is_accelerate, read_source, translate_accelerate
from onefold.config.keys import (
    Key,
    SectionKey,
    as_number,
    entries,
    fill_absent,
    free_object,
    is_absent,
    join,
    read_as,
    read_value,
    spellings,
    without_comments,
    wrong,
)
from onefold.config.params import check_together, params_of
from onefold.config.schema import FREE_KEYS, Config
from onefold.config.suggestions import resembles_known, unknown_key
from onefold.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class _Item:
    """One key of an object as the file gives it. `name` may be a dotted path to a nested key."""

    name: str
    value: Any
    path: str
    dotted: bool = False
    """The key was given by a dotted path, in addition to its section or instead of it."""


ConfigSource = Mapping[str, Any] | str | os.PathLike[str] | Config


def load_config(source: ConfigSource, *, lists_unknown: bool = False) -> Config:
    """Read a config from a dict or a JSON or YAML file. A `Config` is returned unchanged.

    Features that onefold does not support do not raise here: they are listed in `refusals`, for which `check_built`
    raises. With `lists_unknown`, top-level keys that resemble no known key are listed in `unknown` instead of raising.
    """
    if isinstance(source, Config):
        return source
    folder = None
    if isinstance(source, Mapping):
        check_depth(source, "this config")
        document = {str(name): copy.deepcopy(value) for name, value in without_comments(source).items()}
    elif isinstance(source, str | os.PathLike):
        document = read_source(source)
        folder = os.path.dirname(os.path.expanduser(os.fspath(source)))
    else:
        raise ConfigError(f"a config must be a dict or the path of a file, not {type(source).__name__}")
    translated = translate_accelerate(document, folder) if is_accelerate(document) else Translation(document)
    given = GivenKeys()
    given_keys = translated.document.items() if lists_unknown else ()
    unknown = tuple(name for name, value in given_keys if not resembles_known(name, value))
    items = [_Item(name, value, name) for name, value in translated.document.items() if name not in unknown]
    config = settle_old_spellings(_read_section(Config, items, "", given), given)
    check(config)
    config = _read_params(config, given)
    notices = (*translated.notices, *find_notices(config, given))
    refusals = (*translated.refusals, *find_refusals(given))
    return dataclasses.replace(config, notices=notices, refusals=refusals, unknown=unknown, raw=translated.document)


def check_built(config: Config) -> None:
    """Raise one ConfigError that lists all requested features that onefold does not support."""
    if config.refusals:
        lines = "".join(f"\n  - {line}" for line in config.refusals)
        raise ConfigError(f"this config requests features that onefold does not support:{lines}")


def read_params(kind: type, params: Mapping[str, Any], path: str, given: GivenKeys | None = None) -> dict[str, Any]:
    """Convert the given parameters of one of onefold's optimizers or schedules, and return them by canonical name."""
    given = GivenKeys() if given is None else given
    _read_section(kind, [_Item(str(name), value, f"{path}.{name}") for name, value in params.items()], path, given)
    return {name: given.values[f"{path}.{name}"] for name in entries(kind) if f"{path}.{name}" in given.values}


def _read_params(config: Config, given: GivenKeys) -> Config:
    for name in ("optimizer", "scheduler"):
        section = getattr(config, name)
        kind = params_of(name, section.type) if section is not None else None
        if kind is not None:
            path = f"{name}.params"
            read = read_params(kind, section.params, path, given)
            check_together({key: entry.default for key, entry in entries(kind).items()} | read, path)
            given.params[path] = kind
            config = dataclasses.replace(config, **{name: dataclasses.replace(section, params=read)})
    return config


def _read_section(kind: type, items: Sequence[_Item], path: str, given: GivenKeys) -> Any:
    known = spellings(kind)
    by_name: dict[str, list[_Item]] = {}
    for item in items:
        # In a dotted path, the head names a section and the rest names a key of that section.
        head, _, rest = item.name.partition(".")
        entry = known.get(head)
        if entry is None or (rest and entry.section is None and not entry.is_free):
            raise unknown_key(kind, path, item.name, item.path, item.value)
        by_name.setdefault(entry.name, []).append(_Item(rest, item.value, item.path, item.dotted or bool(rest)))
    given.mentioned.update(join(path, name) for name in by_name)
    read = [name for name in by_name if known[name].section is not None or _present(known[name], by_name[name])]
    return kind(**{name: _read_key(known[name], by_name[name], join(path, name), given) for name in read})


def _read_key(entry: SectionKey, items: Sequence[_Item], path: str, given: GivenKeys) -> Any:
    if entry.section is not None:
        inner = _open(items)
        if inner is None:
            return entry.default
        value = _read_section(entry.section, inner, path, given)
        if entry.optional:
            given.values[path] = value
        return value
    if entry.is_free:
        value = _read_free(_open(items) or (), path)
        _check_free(entry, value, path)
    else:
        present = _present(entry, items)
        written = [item for item in present if not item.dotted]
        value = _read_scalar(entry, written or present)
        for item in (item for item in present if written and item.dotted):
            if read_value(item.path, item.value, entry) != value:  # TRL adds such keys; DeepSpeed never reads them
                given.old_spellings.append(f'"{item.path}" = {item.value!r}: the section has {value!r}, which is used')
        if entry.key.fraction and as_number(present[0].value) != value:
            given.old_spellings.append(f"{path} = {present[0].value!r}: read as {value} elements")
        given.names_in_file[path] = present[0].path
        if entry.key.flag and any(isinstance(item.value, bool) for item in present):
            given.old_spellings.append(f"{path} = {str(bool(value)).lower()}: an old spelling of {value}")
    given.values[path] = value
    return value


def _present(entry: SectionKey, items: Sequence[_Item]) -> list[_Item]:
    return [
        item
        for item in items
        if not is_absent(item.value, entry.key.auto) and not (entry.key.or_false and item.value is False)
    ]


def _open(items: Sequence[_Item]) -> list[_Item] | None:
    """Collect the keys inside an object that is given whole, by dotted paths, or both. Return None if it is absent."""
    inner: list[_Item] = []
    for item in items:
        if item.name:
            inner.append(item)
        elif isinstance(item.value, Mapping):
            inner += [_Item(str(name), value, f"{item.path}.{name}") for name, value in item.value.items()]
        elif not is_absent(item.value):
            raise wrong(item.path, item.value, 'an object, such as {"...": ...}')
    return inner if any(item.name or isinstance(item.value, Mapping) for item in items) else None


def _read_free(items: Sequence[_Item], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for item in items:
        for name, value in free_object({item.name: item.value}).items():
            if name in found and found[name] != value:
                raise _disagree(path, [spelled[name], item.path], [found[name], value])
            found[name], spelled[name] = value, item.path
    return found


def _check_free(entry: SectionKey, value: dict[str, Any], path: str) -> None:
    """Check the values in an object with arbitrary keys: all of them if they have one type, otherwise `FREE_KEYS`."""
    inner = get_args(entry.hint)[1]
    for name, held in value.items():
        full = f"{path}.{name}"
        if inner is not Any:
            read_as(full, held, inner, Key(""))
        elif name in FREE_KEYS:
            value[name] = read_as(full, held, *FREE_KEYS[name])
        elif isinstance(held, dict):
            _check_free(entry, held, full)


def _read_scalar(entry: SectionKey, items: Sequence[_Item]) -> Any:
    values = [read_value(item.path, fill_absent(item.path, item.value, entry.default), entry) for item in items]
    paths = [item.path for item in items]
    names = {path.rpartition(".")[2] for path in paths}
    if any(value != values[0] for value in values) or (entry.key.one_spelling and len(names) > 1):
        raise _disagree(entry.name, paths, [item.value for item in items])
    return values[0]


def _disagree(name: str, paths: Sequence[str], values: Sequence[Any]) -> ConfigError:
    shown = ", ".join(f"{path} = {value!r}" for path, value in zip(paths, values, strict=True))
    return ConfigError(f"{shown}: these are spellings of one key, {name}. Keep one of them.")
