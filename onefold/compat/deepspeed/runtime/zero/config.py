"""`DeepSpeedZeroConfig`: the section `zero_optimization` of our schema as a pydantic model."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from pydantic import Field, model_validator

from onefold.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from onefold.compat.from_schema import model_of
from onefold.config.zero_optimization import LeafModule, ZeroOptimization

ZERO_OPTIMIZATION = "zero_optimization"


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
    """What is sharded, where it rests, and how it travels."""

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
