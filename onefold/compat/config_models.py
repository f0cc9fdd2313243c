"""DeepSpeed's config objects: pydantic models of the sections of our schema, under DeepSpeed's field names."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from functools import reduce
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator, model_validator

from onefold.config.keys import SectionKey, entries
from onefold.config.monitoring import Comet, FileMonitor, Wandb
from onefold.config.precision import Bf16, Fp16
from onefold.config.zero_optimization import LeafModule, OffloadOptimizer, OffloadParam, ZeroOptimization
from onefold.log import logger

FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"
ZERO_OPTIMIZATION = "zero_optimization"
_OLD_PREFIX = "stage3_"


# -- models ------------------------------------------------------------------------------------------------------------


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


# -- the section zero_optimization -------------------------------------------------------------------------------------


class OffloadDeviceEnum(StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


DeepSpeedZeroOffloadParamConfig = model_of("DeepSpeedZeroOffloadParamConfig", OffloadParam, device=OffloadDeviceEnum)


class DeepSpeedZeroOffloadOptimizerConfig(
    model_of("_OffloadOptimizer", OffloadOptimizer, device=OffloadDeviceEnum)  # type: ignore[misc]
):
    """The section `offload_optimizer`: the device of optimizer states."""

    @property
    def pipeline(self) -> bool:
        return bool(self.pipeline_read or self.pipeline_write)


class ZeroStageEnum(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _moved_to(new: str, kind: Any) -> Any:
    """Return the field of an old switch that a section replaces."""
    extra = {
        "deprecated": True,
        "new_param": new,
        "new_param_fn": lambda on: kind(device=OffloadDeviceEnum.cpu) if on else None,
    }
    return Field(None, json_schema_extra=extra)  # type: ignore[arg-type]


DeepSpeedZeroLeafModuleConfig = model_of("DeepSpeedZeroLeafModuleConfig", LeafModule)
DEFAULT_LEAF_MODULE_CLASSES: list[str] = []
"""Empty: models of experts train without leaf modules."""
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroConfig(
    model_of(  # type: ignore[misc]
        "_ZeroOptimization", ZeroOptimization, stage=ZeroStageEnum, leaf_module=DeepSpeedZeroLeafModuleConfig
    )
):
    """The section `zero_optimization`."""

    offload_param: DeepSpeedZeroOffloadParamConfig | None = None  # type: ignore[valid-type]
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None  # type: ignore[valid-type]
    cpu_offload: bool | None = _moved_to("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig)
    cpu_offload_param: bool | None = _moved_to("offload_param", DeepSpeedZeroOffloadParamConfig)
    cpu_offload_use_pin_memory: bool | None = Field(
        None,
        json_schema_extra={
            "deprecated": True, "new_param": "offload_param or offload_optimizer", "set_new_param": False
        },
    )  # fmt: skip

    @model_validator(mode="after")
    def _overlap_by_stage(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
        return self


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    found = param_dict.get(ZERO_OPTIMIZATION, {})
    return DeepSpeedZeroConfig(**({"stage": int(found)} if isinstance(found, bool) else found))


# -- the sections fp16 and bf16 ----------------------------------------------------------------------------------------


class DeepSpeedBF16Config(model_of("_Bf16", Bf16)):  # type: ignore[misc]
    """bf16 with fp32 masters."""


class DeepSpeedFP16Config(model_of("_Fp16", Fp16)):  # type: ignore[misc]
    """fp16 with fp32 masters and a loss scale."""

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _is_a_number(cls, value: Any, info: ValidationInfo) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"fp16.{info.field_name} must be a number and finite, not {value!r}")
        if info.field_name == "min_loss_scale" and number <= 0:
            raise ValueError(f"fp16.min_loss_scale must be greater than 0, not {value!r}")
        return number

    def initial_dynamic_scale(self) -> float:
        return float(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    return DeepSpeedFP16Config(**(param_dict.get(FP16) or {}))


# -- the sections of monitors ------------------------------------------------------------------------------------------


_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")
TensorBoardConfig = model_of("TensorBoardConfig", FileMonitor)
CSVConfig = model_of("CSVConfig", FileMonitor)
WandbConfig = model_of("WandbConfig", Wandb)
CometConfig = model_of("CometConfig", Comet)


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The sections of all monitors, for `MonitorMaster`."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)  # type: ignore[valid-type]
    comet: CometConfig = Field(default_factory=CometConfig)  # type: ignore[valid-type]
    wandb: WandbConfig = Field(default_factory=WandbConfig)  # type: ignore[valid-type]
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)  # type: ignore[valid-type]

    @property
    def enabled(self) -> bool:
        return any(getattr(self, name).enabled for name in _SECTIONS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitor section of a config that is given as a dict."""
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name) or {} for name in _SECTIONS})


# -- helpers of config objects -----------------------------------------------------------------------------------------


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
