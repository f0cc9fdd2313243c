"""How a section declares its keys: one dataclass field a key, with its meaning and its fate beside it.

[Note: fates]
Each known key has one fate, and none is silently ignored:
* honoured: something reads it;
* notice: accepted, with one line that says why there is nothing to do here;
* refused: accepted while loading (so that the plan can still be shown), but `check_built` raises with the reason.
Notices and refusals speak only when the value asks for something: by default, when it differs from the key's default.
"""

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

_METADATA = "onefold"


@dataclasses.dataclass(frozen=True)
class Key:
    """What is known about one key, apart from its type and default (those are the dataclass field's)."""

    doc: str
    aliases: tuple[str, ...] = ()
    """Other spellings of the same key."""
    one_spelling: bool = False
    """Two spellings in one file are an error even when they agree."""
    notice: str | None = None
    refused: str | None = None
    asks: Callable[[Any], bool] | None = None
    """Whether a value asks for what the notice or the refusal is about; None: when it differs from the default."""
    asks_text: str = ""
    """`asks` in words, for the docs."""
    same_as: str | None = None
    """An old spelling whose meaning, and hence fate, is that of another key."""
    from_stage: int = 0
    """Only this stage and those above it read it."""
    switch: str | None = None
    """The key of the same section that has to be on for this one to be read."""
    needs: str | None = None
    """The value that the switch has to have; None: any that is not off."""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    infinite: bool = False
    """Infinity is a value."""
    flag: bool = False
    """true and false are accepted as 1 and 0."""
    auto: bool = False
    """`auto` is a value of this key, read as None; elsewhere it means that the key was left out."""
    or_one: bool = False
    """A single value stands for a list of one."""


def key(default: Any, doc: str, **rest: Any) -> Any:
    """A field of a section. Returns Any so that the field keeps its own annotation, as `dataclasses.field` does."""
    metadata = {_METADATA: Key(doc, **rest)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type, doc: str, **rest: Any) -> Any:
    """A field that is a section of its own, present with its defaults when the file does not have it."""
    return dataclasses.field(default_factory=kind, metadata={_METADATA: Key(doc, **rest)})


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key of a section, as the reader, the fates and the docs see it."""

    name: str
    hint: Any
    """The annotation, without its `| None`."""
    optional: bool
    default: Any
    key: Key

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.key.aliases)

    @property
    def section(self) -> type | None:
        """The section's class, if this key is a section."""
        return self.hint if dataclasses.is_dataclass(self.hint) and isinstance(self.hint, type) else None

    @property
    def is_free(self) -> bool:
        """An object whose keys somebody else knows (optimizer parameters, features outside the scope)."""
        return get_origin(self.hint) is dict

    def asks(self, value: Any) -> bool:
        return self.key.asks(value) if self.key.asks is not None else bool(value != self.default)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
        return functools.reduce(operator.or_, kinds), types.NoneType in get_args(hint)
    return hint, False


@functools.cache
def entries(kind: type) -> Mapping[str, Entry]:
    """The keys of a section by name, in the order of the file that declares them."""
    hints = get_type_hints(kind)
    defaults = kind()
    found = {}
    for field in dataclasses.fields(kind):
        if _METADATA not in field.metadata:
            continue  # What the reader itself adds: notices, refusals, raw.
        hint, optional = _without_none(hints[field.name])
        default = getattr(defaults, field.name)
        found[field.name] = Entry(field.name, hint, optional, default, field.metadata[_METADATA])
    return types.MappingProxyType(found)


@functools.cache
def spellings(kind: type) -> Mapping[str, Entry]:
    """Every spelling that a section knows."""
    return types.MappingProxyType({name: entry for entry in entries(kind).values() for name in entry.spellings})


def walk(kind: type, path: str = "") -> Iterator[tuple[str, Entry]]:
    """Every key below a section with its full path, sections before their keys."""
    for entry in entries(kind).values():
        full = f"{path}.{entry.name}" if path else entry.name
        yield full, entry
        if entry.section is not None:
            yield from walk(entry.section, full)
