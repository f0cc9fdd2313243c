"""The check of the loss at each step: whether it is finite, and whether it is a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onefold.log import logger
from onefold.plan import Guards
from onefold.recovery.refused_step import NonFiniteError
from onefold.recovery.spike_guard import Refusal, SpikeGuard


class LossGuard:
    """The check of the losses of all ranks, and the reaction to them."""

    def __init__(self, guards: Guards, *, logs: bool) -> None:
        self._guards, self._logs = guards, logs
        self.spikes = SpikeGuard(guards.loss_spike, logs=logs)
        self._has_warned = False

    def check(self, losses: Sequence[float | None]) -> Refusal | None:
        """Check the loss of each rank before a step. None for a rank means that its loss is unknown."""
        known = [loss for loss in losses if loss is not None]
        if len(known) < len(losses):
            self._warn_once()
            return None
        bad = {rank: loss for rank, loss in enumerate(known) if not math.isfinite(loss)}
        if bad:
            if self._guards.nonfinite != "rollback":
                return None  # the check of the gradients reacts
            problem = "the loss was " + ", ".join(f"{loss} on rank {rank}" for rank, loss in bad.items())
            return Refusal(problem, NonFiniteError(problem, rolls_back=True))
        return self.spikes.check(sum(known) / len(known))

    def describe_spike(self, losses: Sequence[float | None]) -> str:
        """Return why these losses of all ranks are a spike or not finite, or an empty string. Record nothing."""
        known = [loss for loss in losses if loss is not None]
        if len(known) < len(losses):
            return ""
        mean = sum(known) / len(known)
        return self.spikes.describe(mean) if math.isfinite(mean) else f"the mean loss is {mean}"

    def _warn_once(self) -> None:
        if self._logs and not self._has_warned:
            logger.warning(
                "losses are not checked (onefold.loss_spike, onefold.nonfinite_gradients), because backward was called "
                "on the loss directly. Call engine.backward(loss)"
            )
        self._has_warned = True
