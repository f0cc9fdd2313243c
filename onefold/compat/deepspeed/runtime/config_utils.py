"""The base of DeepSpeed's config objects: a pydantic model that leaves out what is `"auto"` and forwards old fields."""

from __future__ import annotations

import json
from collections import Counter
from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict

from onefold.log import logger


class DeepSpeedConfigModel(BaseModel):
    """A section of a config.

    A field with `json_schema_extra={"deprecated": True, "new_param": "a.b", "new_param_fn": convert}` hands its value
    on to the field that has replaced it (unless `set_new_param` is False) and is then gone.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{name: value for name, value in data.items() if strict or value != "auto"})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._hand_on(name, extra)

    def _hand_on(self, name: str, extra: dict[str, Any]) -> None:
        new = extra.get("new_param", "")
        more = f" {extra['deprecated_msg']}" if extra.get("deprecated_msg") else ""
        logger.warning("config: %s is deprecated%s.%s", name, f", use {new} instead" if new else "", more)
        if not new or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda given: given)(getattr(self, name))
        *sections, last = new.split(".")
        target = reduce(getattr, sections, self)
        assert last not in target.model_fields_set, f"config: {name} and {new}, which replaces it, are both given"
        delattr(self, name)
        setattr(target, last, value)


class DeepSpeedConfigObject:
    """A section that is not a pydantic model; prints as JSON."""

    def repr(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4, default=str)


class pp_int(int):
    """An integer that prints with commas, or as a text of its own."""

    _text: str | None

    def __new__(cls, val: Any, custom_print_str: str | None = None) -> pp_int:
        made = super().__new__(cls, val)
        made._text = custom_print_str
        return made

    def __repr__(self) -> str:
        return self._text or f"{int(self):,}"


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    field = config.model_fields.get(field_name)
    assert field is not None, f"{config.__name__} has no field {field_name!r}"
    assert not field.is_required(), f"{field_name!r} of {config.__name__} is required and has no default"
    return field.get_default()


def get_scalar_param(param_dict: dict[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Raise if a key occurs twice. Pass this as `object_pairs_hook` to `json.load`."""
    repeated = [key for key, times in Counter(pair[0] for pair in ordered_pairs).items() if times > 1]
    if repeated:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {repeated}")
    return dict(ordered_pairs)


class ScientificNotationEncoder(json.JSONEncoder):
    """Prints large numbers as 5.000000e+08."""

    def iterencode(self, o: Any, _one_shot: bool = False) -> Any:
        return iter([json.dumps(_spelled(o), indent=self.indent).replace('"\x00', "").replace('\x00"', "")])


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(inner) for inner in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= 1e3:
        return value
    return f"\x00{value:e}\x00"
