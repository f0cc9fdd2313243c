"""The four sections of monitors, as objects that others build and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from onefold.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from onefold.compat.from_schema import model_of
from onefold.config.schema import Comet, FileMonitor, Wandb

TensorBoardConfig = model_of("TensorBoardConfig", FileMonitor)
CSVConfig = model_of("CSVConfig", FileMonitor)
WandbConfig = model_of("WandbConfig", Wandb)
CometConfig = model_of("CometConfig", Comet)


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """What `MonitorMaster` is made from."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)

    @property
    def enabled(self) -> bool:
        return any(section.enabled for section in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Of a config as a dict."""
    names = ("tensorboard", "wandb", "csv_monitor", "comet")
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name) or {} for name in names})
