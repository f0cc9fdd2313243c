"""The check of the loss at each step: whether it is finite, and whether it is a spike.

[Note: loss spikes]
A loss is a spike if it exceeds the median of the last losses by `factor` standard deviations. These are estimated from
the median absolute deviation (MAD), because a few outliers change neither of the two medians. Losses are compared once
the window is full. Spikes are added to the window too: if the loss stays at a new level, the level is accepted after
half a window, and a run does not skip steps forever. A spread of less than 1% of the median counts as 1%, so that
losses that hardly change have no spikes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from onefold.log import logger
from onefold.plan import Guards
from onefold.recovery.refused_step import LossSpikeError, NonFiniteError, RefusedStepError

# The standard deviation of normal numbers in multiples of their median absolute deviation.
_DEVIATIONS = 1.4826
_LEAST_SPREAD = 0.01


@dataclass(frozen=True)
class Refusal:
    """Why a step is refused, and the error to raise. A step without an error is skipped."""

    problem: str
    error: RefusedStepError | None


class LossGuard:
    """The losses of the last steps, and the reaction to the next one."""

    def __init__(self, guards: Guards, *, logs: bool) -> None:
        self._guards, self._spike = guards, guards.loss_spike
        self._logs = logs
        self._recent: deque[float] = deque(maxlen=self._spike.window)
        self._has_warned = False

    def state_dict(self) -> list[float]:
        """Return the losses of the window, for a checkpoint."""
        return list(self._recent)

    def load_state_dict(self, losses: Sequence[float]) -> None:
        """Resume with the losses of a checkpoint."""
        self._recent = deque(losses, maxlen=self._spike.window)

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
        loss = sum(known) / len(known)
        problem = self._describe_spike(loss)
        self._recent.append(loss)
        if not problem:
            return None
        action = self._spike.action
        if action == "warn":
            if self._logs:
                logger.warning("%s", problem)
            return None
        if action == "skip":
            return Refusal(problem, None)
        advice = (
            "No weight was changed, and the gradients are dropped, so another batch may follow. Set "
            'onefold.loss_spike.action to "skip", "warn" or "rollback" for another reaction.'
        )
        return Refusal(problem, LossSpikeError(problem, advice, rolls_back=action == "rollback"))

    def describe_spike(self, losses: Sequence[float | None]) -> str:
        """Return why these losses of all ranks are a spike or not finite, or an empty string. Record nothing."""
        known = [loss for loss in losses if loss is not None]
        if len(known) < len(losses):
            return ""
        mean = sum(known) / len(known)
        return self._describe_spike(mean) if math.isfinite(mean) else f"the mean loss is {mean}"

    def _describe_spike(self, loss: float) -> str:
        """Return why a loss is a spike, or an empty string."""
        if self._spike.factor is None or len(self._recent) < self._spike.window:
            return ""
        middle = median(self._recent)
        spread = max(_DEVIATIONS * median(abs(each - middle) for each in self._recent), _LEAST_SPREAD * abs(middle))
        limit = middle + self._spike.factor * spread
        if loss <= limit:
            return ""
        return (
            f"the loss {loss:.6g} is a spike: it is above {limit:.6g}, which is the median {middle:.6g} of the last "
            f"{len(self._recent)} steps plus onefold.loss_spike.factor {self._spike.factor:g} x {spread:.3g}"
        )

    def _warn_once(self) -> None:
        if self._logs and not self._has_warned:
            logger.warning(
                "losses are not checked (onefold.loss_spike, onefold.nonfinite_gradients), because backward was called "
                "on the loss directly. Call engine.backward(loss)"
            )
        self._has_warned = True
