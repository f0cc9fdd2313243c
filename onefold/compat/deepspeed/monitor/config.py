"""The four sections of monitors, as objects that others build and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from onefold.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from onefold.compat.from_schema import model_of
from onefold.config.monitoring import Comet, FileMonitor, Wandb

_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")
TensorBoardConfig = model_of("TensorBoardConfig", FileMonitor)
CSVConfig = model_of("CSVConfig", FileMonitor)
WandbConfig = model_of("WandbConfig", Wandb)
CometConfig = model_of("CometConfig", Comet)


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """What `MonitorMaster` is made from."""

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
