"""Loss scales by DeepSpeed's names: `engine.optimizer.loss_scaler` is one."""

from __future__ import annotations

from onefold.optim.loss_scale import LossScale

DynamicLossScaler = LossScaler = LossScalerBase = LossScale

__all__ = ["DynamicLossScaler", "LossScaler", "LossScalerBase"]
