"""`DeepSpeedZeroOffload*Config`: the sections of our schema as pydantic models."""

from __future__ import annotations

from enum import StrEnum

from onefold.compat.from_schema import model_of
from onefold.config.zero_optimization import OffloadOptimizer, OffloadParam
from onefold.engine.offloaded_states import OffloadStateTypeEnum


class OffloadDeviceEnum(StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


DeepSpeedZeroOffloadParamConfig = model_of("DeepSpeedZeroOffloadParamConfig", OffloadParam, device=OffloadDeviceEnum)


class DeepSpeedZeroOffloadOptimizerConfig(
    model_of("_OffloadOptimizer", OffloadOptimizer, device=OffloadDeviceEnum)  # type: ignore[misc]
):
    """Where optimizer states rest."""

    @property
    def pipeline(self) -> bool:
        return bool(self.pipeline_read or self.pipeline_write)


__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]  # fmt: skip
