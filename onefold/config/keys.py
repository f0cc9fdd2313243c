"""Keys of a config: how a section declares them, and how a value is read as the type that its key declares.

A section is a frozen dataclass with one field a key, the key's meaning and support status beside it.

[Note: support status]
Each known key has one support status, and none is silently ignored:
* honoured: something reads it;
* notice: accepted, with one line that says why there is nothing to do here;
* refused: accepted while loading (so that the plan can still be shown), but `check_built` raises with the reason.
Notices and refusals speak only when the value asks for something: by default, when it differs from the key's default.
"""

import collections.abc
import dataclasses
import functools
import math
import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Dtype = Literal["fp32", "bf16", "fp16"]
_METADATA = "onefold"


class ConfigError(ValueError, AssertionError):
    """A config that cannot be used: names the key, what was wrong, and what to write instead."""


# -- declaring keys --------------------------------------------------------------------------------------------------


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
    """An old spelling whose meaning, and hence support status, is that of another key."""
    from_stage: int = 0
    """Only this stage and those above it read it."""
    switch: str | None = None
    """The key of the same section that has to be on for this one to be read."""
    needs: str | None = None
    """The value that the switch has to have; None: any that is not off."""
    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf
    below: float = math.inf
    fraction: bool = False
    """A fraction is cut off: other tools compute this number of elements, as 0.9 of a square."""
    infinite: bool = False
    """Infinity is a value."""
    flag: bool = False
    """true and false are accepted as 1 and 0."""
    auto: bool = False
    """`auto` is a value of this key, read as None; elsewhere it means that the key was left out."""
    or_one: bool = False
    """A single value stands for a list of one."""
    or_false: bool = False
    """false is accepted and means that the key was left out."""


def key(default: Any, doc: str, **rest: Any) -> Any:
    """A field of a section. Returns Any so that the field keeps its own annotation, as `dataclasses.field` does."""
    metadata = {_METADATA: Key(doc, **rest)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def noticed(default: Any, doc: str, reason: str, **rest: Any) -> Any:
    """A key that has nothing to do here: a value that asks for something gets one line with the reason."""
    return key(default, doc, notice=reason, **rest)


def refused(default: Any, doc: str, reason: str, **rest: Any) -> Any:
    """A key that onefold does not offer: a value that asks for it is an error with the reason."""
    return key(default, doc, refused=reason, **rest)


def section(kind: type, doc: str = "", **rest: Any) -> Any:
    """A field that is a section of its own, present with its defaults when the file does not have it."""
    return dataclasses.field(default_factory=kind, metadata={_METADATA: Key(doc or str(kind.__doc__), **rest)})


@dataclasses.dataclass(frozen=True)
class SectionKey:
    """One key of a section: its name, type and default with its declaration."""

    name: str
    hint: Any
    """The annotation, without its `| None`."""
    optional: bool
    default: Any
    key: Key

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


@functools.cache
def entries(kind: type) -> Mapping[str, SectionKey]:
    """The keys of a section by name, in the order of the file that declares them."""
    hints = get_type_hints(kind)
    defaults = kind()
    found = {}
    for field in dataclasses.fields(kind):
        if _METADATA not in field.metadata:
            continue  # What the reader itself adds: notices, refusals, raw.
        hint = hints[field.name]
        optional = _is_union(hint) and types.NoneType in get_args(hint)
        if optional:
            hint = functools.reduce(operator.or_, (kind for kind in get_args(hint) if kind is not types.NoneType))
        default = getattr(defaults, field.name)
        found[field.name] = SectionKey(field.name, hint, optional, default, field.metadata[_METADATA])
    return types.MappingProxyType(found)


@functools.cache
def spellings(kind: type) -> Mapping[str, SectionKey]:
    """Every spelling that a section knows."""
    found = {name: entry for entry in entries(kind).values() for name in (entry.name, *entry.key.aliases)}
    return types.MappingProxyType(found)


def walk(kind: type, path: str = "") -> Iterator[tuple[str, SectionKey]]:
    """Every key below a section with its full path, sections before their keys."""
    for entry in entries(kind).values():
        full = join(path, entry.name)
        yield full, entry
        if entry.section is not None:
            yield from walk(entry.section, full)


def join(path: str, name: str) -> str:
    """The full path of a key of the section at `path`; the top level has the path ""."""
    return f"{path}.{name}" if path else name


# -- reading values --------------------------------------------------------------------------------------------------

# No leading zeros: YAML 1.1, C and Python 2 read 010 as eight, people as ten.
_WHOLE = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_NUMBER = re.compile(rf"[+-]?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITE = {"inf", "+inf", "infinity", "+infinity", ".inf"}
_DTYPES = {"fp32": ("fp32", "float32", "float"), "bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half")}
_LISTS = (tuple, list, collections.abc.Iterable, collections.abc.Sequence)
MAX_DIGITS = 300
"""Longer than any number that a key can have; Python itself refuses to read thousands of them."""


def is_comment(name: object) -> bool:
    """Whether a key is a comment, at any level of a config: its name begins with `_` or `//`."""
    return isinstance(name, str) and name.startswith(("_", "//"))


def without_comments(value: Any) -> Any:
    """Return a copy of a config, or of a part of one, without the keys that are comments."""
    if isinstance(value, Mapping):
        return {name: without_comments(inner) for name, inner in value.items() if not is_comment(name)}
    return type(value)(map(without_comments, value)) if type(value) in (list, tuple) else value


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


def read_value(path: str, value: Any, entry: SectionKey) -> Any:
    """The value in the type of its key, or a ConfigError that names path, value and what was expected."""
    return read_as(path, value, entry.hint, entry.key)


def read_as(path: str, value: Any, hint: Any, key: Key) -> Any:
    """The value as an annotation wants it: a key's own, or one of a class of torch."""
    if key.auto and _is_word(value, "auto"):
        return None
    if _is_union(hint):
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
    if _is_union(hint):
        return any(is_readable(kind) for kind in get_args(hint))
    return get_origin(hint) in _LISTS and all(is_readable(kind) for kind in get_args(hint) if kind is not Ellipsis)


def free_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object whose keys somebody else knows: what is absent is dropped, numeric strings become numbers. An absent
    element of a list becomes None, for `fill_absent`.
    """
    return {str(name): _free(inner) for name, inner in value.items() if not _is_all_absent(inner)}


def fill_absent(path: str, value: Any, default: Any) -> Any:
    """Replace the absent elements of a list by those of the key's default; one number is the default of each element.
    Raise where the default has no such element.
    """
    if not isinstance(value, list | tuple):
        return value
    filled = []
    for place, inner in enumerate(value):
        where, own = f"{path}[{place}]", default if isinstance(default, int | float) else None
        if isinstance(default, list | tuple) and len(default) == len(value):
            own = default[place]
        if inner is None and own is None:
            raise ConfigError(
                f'{where} is "auto" or null, and the default of {path} has no such element. Write a value there, or '
                "leave the whole key out"
            )
        filled.append(own if inner is None else fill_absent(where, inner, own))
    return filled


def wrong(path: str, value: Any, expected: str) -> ConfigError:
    """The error for a value that its key does not take."""
    return ConfigError(f"{path} = {shown(value)}: expected {expected}")


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS:
        return "(a number of many digits)"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _is_word(value: Any, word: str) -> bool:
    return isinstance(value, str) and value.strip().lower() == word


def _is_all_absent(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return all(_is_all_absent(inner) for inner in value) if is_list else is_absent(value)


def _free(value: Any) -> Any:
    if is_absent(value):
        return None
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
        raise wrong(path, value, _kind(hint))
    return read_as(path, value, fitting[0], key)


def _kind(hint: Any) -> str:
    """A type in words."""
    if _is_union(hint):
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
    if not (isinstance(value, bool) or _is_word(value, "true") or _is_word(value, "false")):
        raise wrong(path, value, "true or false")
    return value is True or _is_word(value, "true")


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
    if hint is int and number != int(number) and not key.fraction:
        raise wrong(path, value, kind)
    number = int(number) if hint is int else float(number)
    if not (key.minimum <= number <= key.maximum and key.above < number < key.below):
        raise wrong(path, value, _range(kind, key))
    return number


def _range(kind: str, key: Key) -> str:
    if key.above > -math.inf:
        return f"a number above {key.above}"
    if key.below < math.inf:
        return f"{kind} of at least {key.minimum} and below {key.below}"
    return f"at least {key.minimum}" if key.maximum == math.inf else f"{kind} from {key.minimum} to {key.maximum}"


def _dtype(path: str, value: Any) -> str:
    # A torch.dtype in a dict config prints as torch.float16, so its text is enough and torch is not needed here.
    text = str(value).strip().lower().removeprefix("torch.")
    for name, spelled in _DTYPES.items():
        if text in spelled:
            return name
    raise wrong(path, value, "fp32, bf16 or fp16")


def _choice(path: str, value: Any, choices: tuple[str, ...]) -> str:
    for choice in choices:
        if _is_word(value, choice.lower()):
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
