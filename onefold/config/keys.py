"""Declaration of config keys, and conversion of their values.

A section is a frozen dataclass with one field per key. The field's metadata holds the key's meaning and support status.

[Note: support status]
Each known key has one support status, and no key is silently ignored:
* honoured: the key has an effect;
* notice: the key is accepted, and one line gives the reason why it has no effect;
* refused: the key is accepted while loading, so that the plan can be shown, but `check_built` raises with the reason.
A notice or refusal is issued only if the value requests a feature: by default, if it differs from the key's default.
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

from onefold.errors import MAX_DIGITS, ConfigError, shown
from onefold.redaction import HIDDEN, is_secret_name

Dtype = Literal["fp32", "bf16", "fp16"]
_METADATA = "onefold"


# -- declaring keys --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Key:
    """The declaration of one key, except for its type and default, which belong to the dataclass field."""

    doc: str
    aliases: tuple[str, ...] = ()
    """Other names of the key."""
    one_spelling: bool = False
    """Two names of the key in one file are an error even if their values agree."""
    notice: str | None = None
    refused: str | None = None
    requested_if: Callable[[Any], bool] | None = None
    """Whether a value requests the noticed or refused feature. None compares the value with the default."""
    requested_text: str = ""
    """The condition `requested_if` in words, for the docs."""
    same_as: str | None = None
    """The key that replaces this old one and determines its support status."""
    from_stage: int = 0
    """The lowest stage in which the key has an effect."""
    switch: str | None = None
    """The key of the same section that enables this one."""
    needs: str | None = None
    """The value of the switch that enables this key. None means any value other than off."""
    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf
    below: float = math.inf
    fraction: bool = False
    """A fractional value is truncated, because other tools compute this number of elements (0.9 of a square)."""
    infinite: bool = False
    """Infinity is a valid value."""
    flag: bool = False
    """true and false are accepted as 1 and 0."""
    auto: bool = False
    """`auto` is a valid value, read as None. For other keys it means that the key is absent."""
    true_is_auto: bool = False
    """true is accepted as `auto`, and false as 0."""
    or_one: bool = False
    """A single value is accepted as a list of one element."""
    or_false: bool = False
    """false is accepted and means that the key is absent."""
    secret: bool = False
    """The value is not in the text of the section."""


def key(default: Any, doc: str, **options: Any) -> Any:
    """Declare a key as a dataclass field. The return type is Any so that any annotation fits."""
    metadata = {_METADATA: Key(doc, **options)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata, repr=not options.get("secret"))


def noticed(default: Any, doc: str, reason: str, **options: Any) -> Any:
    """Declare a key without effect. A value that requests the feature causes a notice with the reason."""
    return key(default, doc, notice=reason, **options)


def refused(default: Any, doc: str, reason: str, **options: Any) -> Any:
    """Declare a key that onefold does not support. A value that requests the feature is refused with the reason."""
    return key(default, doc, refused=reason, **options)


def section(kind: type, doc: str = "", **options: Any) -> Any:
    """Declare a nested section. An absent section is created with its defaults."""
    return dataclasses.field(default_factory=kind, metadata={_METADATA: Key(doc or str(kind.__doc__), **options)})


@dataclasses.dataclass(frozen=True)
class SectionKey:
    """One key of a section, with its name, type, default and declaration."""

    name: str
    hint: Any
    """The annotation without `| None`."""
    optional: bool
    default: Any
    key: Key

    @property
    def section(self) -> type | None:
        """The class of the section if this key is a section, otherwise None."""
        return self.hint if dataclasses.is_dataclass(self.hint) and isinstance(self.hint, type) else None

    @property
    def is_free(self) -> bool:
        """Whether the value is an object with arbitrary keys (optimizer parameters, features outside the scope)."""
        return get_origin(self.hint) is dict

    def is_requested(self, value: Any) -> bool:
        """Return whether `value` requests the noticed or refused feature."""
        return self.key.requested_if(value) if self.key.requested_if is not None else bool(value != self.default)


@functools.cache
def entries(kind: type) -> Mapping[str, SectionKey]:
    """Return the keys of a section by name, in the order of their declaration."""
    hints = get_type_hints(kind)
    defaults = kind()
    found = {}
    for field in dataclasses.fields(kind):
        if _METADATA not in field.metadata:
            continue  # fields that `load_config` sets: notices, refusals, raw
        hint = hints[field.name]
        optional = _is_union(hint) and types.NoneType in get_args(hint)
        if optional:
            hint = functools.reduce(operator.or_, (kind for kind in get_args(hint) if kind is not types.NoneType))
        default = getattr(defaults, field.name)
        found[field.name] = SectionKey(field.name, hint, optional, default, field.metadata[_METADATA])
    return types.MappingProxyType(found)


@functools.cache
def spellings(kind: type) -> Mapping[str, SectionKey]:
    """Return the keys of a section by all of their names."""
    found = {name: entry for entry in entries(kind).values() for name in (entry.name, *entry.key.aliases)}
    return types.MappingProxyType(found)


def walk(kind: type, path: str = "") -> Iterator[tuple[str, SectionKey]]:
    """Iterate over all keys below a section with their full paths, sections before their keys."""
    for entry in entries(kind).values():
        full = join(path, entry.name)
        yield full, entry
        if entry.section is not None:
            yield from walk(entry.section, full)


def join(path: str, name: str) -> str:
    """Return the full path of a key of the section at `path`. The top level has the path ""."""
    return f"{path}.{name}" if path else name


# -- reading values --------------------------------------------------------------------------------------------------

# Leading zeros are ambiguous: YAML 1.1, C and Python 2 read 010 as eight.
_WHOLE = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_NUMBER = re.compile(rf"[+-]?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITE = {"inf", "+inf", "infinity", "+infinity", ".inf"}
_DTYPES = {"fp32": ("fp32", "float32", "float"), "bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half")}
_LISTS = (tuple, list, collections.abc.Iterable, collections.abc.Sequence)


def is_comment(name: object) -> bool:
    """Return whether a key is a comment: its name begins with `_` or `//`."""
    return isinstance(name, str) and name.startswith(("_", "//"))


def without_comments(value: Any) -> Any:
    """Return a copy of a config, or of a part of one, without the keys that are comments."""
    if isinstance(value, Mapping):
        return {name: without_comments(inner) for name, inner in value.items() if not is_comment(name)}
    return type(value)(map(without_comments, value)) if type(value) in (list, tuple) else value


def is_absent(value: Any, auto: bool = False) -> bool:
    """Return whether a value means that its key is absent: null, `"none"` and, unless `auto` is set, `"auto"`."""
    return value is None or _is_word(value, "none") or (not auto and _is_word(value, "auto"))


def as_number(value: Any) -> Any:
    """Convert a numeric string to a number, because YAML 1.1 reads 5e8 as a string. Return other values unchanged."""
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
    """Convert a value to the type of its key. Raise a ConfigError with path, value and expected type if it fails."""
    return read_as(path, value, entry.hint, entry.key)


def read_as(path: str, value: Any, hint: Any, key: Key) -> Any:
    """Convert a value to an annotated type, that of a key or of an argument of a torch class."""
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
    """Return whether a config can hold values of an annotated type. It cannot hold functions and tensors."""
    if hint in (bool, int, float, str) or get_origin(hint) is Literal:
        return True
    if _is_union(hint):
        return any(is_readable(kind) for kind in get_args(hint))
    return get_origin(hint) in _LISTS and all(is_readable(kind) for kind in get_args(hint) if kind is not Ellipsis)


def free_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """Read an object with arbitrary keys: drop absent keys and convert numeric strings to numbers.

    Absent elements of lists become None, which `fill_absent` replaces.
    """
    return {str(name): _free(inner) for name, inner in value.items() if not _is_all_absent(inner)}


def fill_absent(path: str, value: Any, default: Any) -> Any:
    """Replace the absent elements of a list by those of the key's default.

    A default that is a number applies to every element. Raise if the default has no such element.
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
                f'{where} is "auto" or null, but the default of {path} has no such element. Write a value, or '
                "leave the whole key out."
            )
        filled.append(own if inner is None else fill_absent(where, inner, own))
    return filled


def wrong(path: str, value: Any, expected: str) -> ConfigError:
    """Make the error for a value that its key does not accept."""
    return ConfigError(f"{path} = {HIDDEN if is_secret_name(path) else shown(value)}: expected {expected}")


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
    """Convert a value to one of several types: a list type for lists, otherwise the first type that is not a list."""
    if value is None and types.NoneType in get_args(hint):
        return None
    kinds = [kind for kind in get_args(hint) if is_readable(kind)]
    fitting = [kind for kind in kinds if (get_origin(kind) in _LISTS) == isinstance(value, list | tuple)]
    if not fitting:
        raise wrong(path, value, _kind(hint))
    return read_as(path, value, fitting[0], key)


def _kind(hint: Any) -> str:
    """Describe a type in words."""
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
    if isinstance(value, bool) and key.true_is_auto:
        return None if value else 0
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
    # str() of a torch.dtype is "torch.float16", so that this module need not import torch.
    text = str(value).strip().lower().removeprefix("torch.")
    for name, spelled in _DTYPES.items():
        if text in spelled:
            return name
    raise wrong(path, value, "fp32, bf16 or fp16")


def _choice(path: str, value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, bool) and "on" in choices:  # YAML reads on and off as true and false
        return "on" if value else "off"
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
