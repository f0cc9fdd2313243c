"""Loss scales by DeepSpeed's names: `engine.optimizer.loss_scaler` is one."""

from __future__ import annotations

import math
from enum import StrEnum
from operator import attrgetter
from typing import Any

import torch

from onefold.optim.loss_scale import DynamicLossScale, LossScale, StaticLossScale

INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"


class LossScaleProfile(StrEnum):
    """DeepSpeed's two optimizers without ZeRO. Their loss scales are the same here."""

    FUSED = "fused"
    UNFUSED = "unfused"


class LossScalerBase:
    """One of onefold's loss scales, read and set by DeepSpeed's names."""

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale

    @property
    def dynamic(self) -> bool:
        return isinstance(self._scale, DynamicLossScale)

    dynamic_loss_scale = dynamic

    @property
    def cur_scale(self) -> float:
        return self._scale.value

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._scale.value = _positive("loss_scale", value)

    loss_scale = cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        self._scale.update(overflow)


class LossScaler(LossScalerBase):
    """A scale that never moves."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(StaticLossScale(_positive("fp16.loss_scale", scale)))


class DynamicLossScaler(LossScalerBase):
    """A scale that halves on overflow and doubles after a window without one."""

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        dtype: torch.dtype = torch.half,
    ) -> None:
        scale = DynamicLossScale(
            window=scale_window,
            hysteresis=delayed_shift,
            consecutive_hysteresis=consecutive_hysteresis,
            min_scale=min_scale,
        )
        scale.value = _positive(f"dynamic_loss_args['{INITIAL_LOSS_SCALE}']", init_scale)
        super().__init__(scale)

    scale_factor = 2.0
    cur_iter = property(attrgetter("_scale.iteration"))
    last_overflow_iter = property(attrgetter("_scale.last_overflow_iteration"))
    scale_window = property(attrgetter("_scale.window"))
    min_scale = min_loss_scale = property(attrgetter("_scale.min_scale"))
    delayed_shift = property(attrgetter("_scale.hysteresis"))
    cur_hysteresis = property(attrgetter("_scale.remaining_hysteresis"))
    consecutive_hysteresis = property(attrgetter("_scale.consecutive_hysteresis"))


def scaler_of(scale: LossScale) -> LossScalerBase:
    """Return a view of an engine's loss scale."""
    kind = DynamicLossScaler if isinstance(scale, DynamicLossScale) else LossScaler
    view = object.__new__(kind)
    LossScalerBase.__init__(view, scale)
    return view


def CreateLossScaler(
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScalerBase:
    if dtype is torch.half and dynamic_scaling:
        assert dynamic_loss_args is not None, "a dynamic loss scale needs dynamic_loss_args"
        return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
    return LossScaler(static_loss_scale if dtype is torch.half else 1.0)


def LossScaleConfig(
    low_precision_dtype: torch.dtype,
    dynamic_loss_scale: bool,
    static_loss_scale: float,
    dynamic_loss_args: dict[str, Any] | None,
    *,
    profile: LossScaleProfile = LossScaleProfile.FUSED,
) -> LossScalerBase:
    """Return the loss scale of DeepSpeed's optimizers without ZeRO."""
    return CreateLossScaler(low_precision_dtype, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)


def _positive(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    if value <= 0:
        raise ValueError(f"{name} must be greater than 0, not {value}")
    return float(value)
