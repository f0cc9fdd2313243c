"""pydantic models of sections of our config schema, under the field names that DeepSpeed's config objects have."""

from __future__ import annotations

import math
from typing import Any, Literal, get_origin

from pydantic import BaseModel, Field, create_model, model_validator

from onefold.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from onefold.config.keys import SectionKey, entries

_OLD_PREFIX = "stage3_"


def model_of(name: str, section: type, **kinds: Any) -> Any:
    """Return a model with one field for each key of a section. `kinds` replaces types of fields."""
    fields: dict[str, Any] = {}
    old_names: dict[str, str] = {}
    for entry in entries(section).values():
        # DeepSpeed's attribute has no `stage3_`; the key in a file has.
        field_name = entry.name.removeprefix(_OLD_PREFIX)
        alias = entry.name if field_name != entry.name else None
        old_names |= {old: field_name for old in entry.key.aliases if old != field_name}
        kind = kinds.get(entry.name, _kind(entry))
        fields[field_name] = (
            kind,
            Field(_default(entry, kind), alias=alias, description=entry.key.doc, **_bounds(entry)),
        )

    def rename(given: Any) -> Any:
        return {old_names.get(key, key): value for key, value in given.items()} if isinstance(given, dict) else given

    validators: Any = {"_by_old_names": model_validator(mode="before")(rename)}
    return create_model(name, __base__=DeepSpeedConfigModel, __validators__=validators, **fields)


def _kind(entry: SectionKey) -> Any:
    if entry.key.or_one:
        return Any  # one path, or several
    if entry.section is not None:
        return Any if entry.optional else dict[str, Any] | None
    kind = entry.hint if get_origin(entry.hint) is not tuple else list[str]
    return kind | None if entry.optional and get_origin(kind) is not Literal else kind


def _default(entry: SectionKey, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind()
    if entry.section is not None or entry.key.or_one:
        return None
    return list(entry.default) if isinstance(entry.default, tuple) else entry.default


def _bounds(entry: SectionKey) -> dict[str, Any]:
    given = {"ge": entry.key.minimum, "gt": entry.key.above, "le": entry.key.maximum, "lt": entry.key.below}
    return {name: bound for name, bound in given.items() if math.isfinite(bound) and entry.hint in (int, float)}
