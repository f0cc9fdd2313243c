"""The loss scale, which prevents fp16 gradients from underflowing: static, or adjusted during training.

The engine multiplies the loss by `value`, divides the reduced gradients by the same `value`, and calls `update` after
that. A scale that changed in between would leave the gradients wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onefold.plan.plan import Scaling


class LossScaleError(FloatingPointError):
    """An overflow with the loss scale at its minimum."""


class StaticLossScale:
    """A loss scale that never changes."""

    def __init__(self, value: float) -> None:
        self.value = float(value)

    def update(self, overflow: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["value"])


@dataclass(eq=False)
class DynamicLossScale:
    """A loss scale that is halved on overflow, and doubled after `window` steps without overflow.

    The scale is halved at the `hysteresis`-th overflow, so that single bad batches do not change it, and at every
    further overflow. The count is reset when the scale is doubled, or, with `consecutive_hysteresis`, at every step
    without overflow.
    """

    initial_scale_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        self.value = 2.0**self.initial_scale_power
        self.min_scale = float(self.min_scale)
        self.remaining_hysteresis = self.hysteresis
        self.iteration = 0
        self.last_overflow_iteration = -1

    def update(self, overflow: bool) -> None:
        """Update the scale after one optimizer step. `overflow`: the step was skipped, on all ranks."""
        if overflow:
            self._shrink()
            self.last_overflow_iteration = self.iteration
        else:
            self._grow()
        self.iteration += 1

    def _shrink(self) -> None:
        if self.hysteresis > 1 and self.remaining_hysteresis > 1:
            self.remaining_hysteresis -= 1
            return
        if self.value <= self.min_scale:
            raise LossScaleError(
                f"gradients overflowed at step {self.iteration} with the loss scale at its minimum, {self.value:g} "
                "(fp16.min_loss_scale). Training has most likely diverged. Lower the learning rate, clip gradients, "
                "check that the loss is finite, or train in bf16. A smaller fp16.min_loss_scale helps only if the "
                "loss itself is large."
            )
        self.value = max(self.value / 2, self.min_scale)

    def _grow(self) -> None:
        # Like DeepSpeed, count the good steps before this one, so that the scale doubles one step after a full window.
        good_steps = self.iteration - self.last_overflow_iteration - 1
        doubles = good_steps > 0 and good_steps % self.window == 0
        if self.consecutive_hysteresis or doubles:
            self.remaining_hysteresis = self.hysteresis
        if doubles:
            self.value *= 2

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "remaining_hysteresis": self.remaining_hysteresis,
            "iteration": self.iteration,
            "last_overflow_iteration": self.last_overflow_iteration,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["value"])
        self.remaining_hysteresis = int(state["remaining_hysteresis"])
        self.iteration = int(state["iteration"])
        self.last_overflow_iteration = int(state["last_overflow_iteration"])


LossScale = StaticLossScale | DynamicLossScale


def build_loss_scale(scaling: Scaling) -> LossScale:
    """Build the loss scale of a plan: 1 without fp16, a static one, or a dynamic one if `loss_scale` is 0."""
    fp16 = scaling.loss_scale
    if not fp16.enabled or fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale if fp16.enabled else 1.0)
    return DynamicLossScale(
        initial_scale_power=fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
    )
