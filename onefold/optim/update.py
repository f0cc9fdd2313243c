"""From reduced gradients to new parameters: norm, overflow, loss scale, clipping, step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from onefold.config import Config
from onefold.optim.loss_scale import build_loss_scale
from onefold.optim.nonfinite import NonFiniteError, choose_policy, tell_nonfinite
from onefold.optim.norm import StepScalars, exchange_scalars
from onefold.optim.outside import Spelled
from onefold.optim.sharded import ShardedOptimizer
from onefold.runtime import Schedule


class Update:
    """Takes steps. `applied`: whether the last gradient was used."""

    def __init__(self, config: Config, schedule: Schedule, postscale: float) -> None:
        autocast = config.torch_autocast
        self.scales_loss = config.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")
        self.loss_scale = build_loss_scale(replace(config.fp16, enabled=self.scales_loss))
        # What is not finite in a step that was left out for it, in words.
        self.problem = ""
        # Of the backwards since the last step, where the engine was given them.
        self.losses: list[torch.Tensor] = []
        self._nonfinite = choose_policy(config, scales_loss=self.scales_loss)
        self._scalars: StepScalars | None = None
        self._unscaled = 1.0
        self.applied = False
        self._clipping = config.gradient_clipping
        self._schedule = schedule
        self._postscale = postscale

    def take(self, optimizer: ShardedOptimizer, owed: int, *, alarm: bool = False) -> bool:
        """Step with the gradients that were reduced, still to be divided by `owed`; skip it, or raise, on overflow.

        Where any rank raises the alarm nothing is done, on all ranks alike, and this returns False.
        """
        self._schedule.check_in_place()
        groups = optimizer.groups_to_compare() if not self._schedule.alone else None
        scalars = self._exchange(groups, alarm=alarm)
        if scalars.alarm:
            return False
        if scalars.late:
            self._schedule.reduce_late()
            scalars = self._exchange(groups)
        self._scalars, self._unscaled = scalars, self.unscale(owed)
        # Over several ranks, with clipping and on a CPU the norm is known by now. One GPU without clipping is waited
        # for here, once a step, and is then idle for as long as the step's first kernels take to launch: a check that
        # came later would find weights that are NaN already.
        optimizer.overflow = self._nonfinite != "ignore" and scalars.overflow
        self.applied = not optimizer.overflow
        if self.applied:
            optimizer.apply(self._unscaled * self._clip_coefficient())
        elif not self.scales_loss:
            self.problem = tell_nonfinite(self._schedule, self.losses)
            if self._nonfinite == "raise":
                raise NonFiniteError(
                    f"{self.problem}. No weight was changed, and the gradients are dropped: training may go on with "
                    'another batch. onefold.nonfinite_gradients: "skip" leaves such steps out, "ignore" takes them'
                )
        return True

    @property
    def norm(self) -> float | None:
        """Of the last averaged gradient before clipping. Where no step depends on it the device is waited for here."""
        return self._scalars.norm * self._unscaled if self._scalars is not None else None

    def forget_norm(self) -> None:
        self._scalars = None

    def unscale(self, owed: int) -> float:
        """By the scale the gradients were computed with: it is updated only after it has been divided out."""
        return self._postscale / (self.loss_scale.value * owed)

    def _exchange(self, groups: Spelled | None, *, alarm: bool = False) -> StepScalars:
        runs = [run for unit in self._schedule.trained for run in unit.trained if run.reduced is not None]
        late = bool(self._schedule.late_units())
        if not runs and not late and self._schedule.trained:
            raise RuntimeError("engine.step() without a backward since the last step: there is nothing to step with")
        return exchange_scalars(runs, self._schedule, groups, late=late, alarm=alarm)

    def _clip_coefficient(self) -> float:
        norm = self.norm if self._clipping > 0 else None
        if norm is None or not math.isfinite(norm):
            return 1.0
        return min(1.0, self._clipping / (norm + 1e-6))
