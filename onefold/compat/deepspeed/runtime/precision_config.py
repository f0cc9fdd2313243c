"""The sections `fp16` and `bf16` of our schema as pydantic models."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationInfo, field_validator

from onefold.compat.from_schema import model_of
from onefold.config.precision import Bf16, Fp16

FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"


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
