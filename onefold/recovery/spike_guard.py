"""The check of the loss or the gradient norm of each step against the values of the last steps.

[Note: spikes]
A value is a spike if it exceeds the median of the last values by `factor` standard deviations. These are estimated from
the median absolute deviation (MAD), because a few outliers change neither of the two medians. Values are compared once
the window is full. Spikes are added to the window too: if the loss stays at a new level, the level is accepted after
half a window, and a run does not skip steps forever. A spread of less than 1% of the median counts as 1%, so that
values that hardly change have no spikes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from onefold.config.onefold_section import GradNormSpikeSection, LossSpikeSection
from onefold.log import logger
from onefold.recovery.refused_step import GradNormSpikeError, LossSpikeError, RefusedStepError

# The standard deviation of normal numbers in multiples of their median absolute deviation.
_DEVIATIONS = 1.4826
_LEAST_SPREAD = 0.01


@dataclass(frozen=True)
class Refusal:
    """Why a step is refused, and the error to raise. A step without an error is skipped."""

    problem: str
    error: RefusedStepError | None


class SpikeGuard:
    """The losses or gradient norms of the last steps, and the reaction to the next one."""

    def __init__(self, section: LossSpikeSection | GradNormSpikeSection, *, logs: bool) -> None:
        self._section, self._logs = section, logs
        self._recent: deque[float] = deque(maxlen=section.window)
        is_loss = isinstance(section, LossSpikeSection)
        self._what, self._key = ("loss", "loss_spike") if is_loss else ("gradient norm", "grad_norm_spike")
        self._error = LossSpikeError if is_loss else GradNormSpikeError

    def state_dict(self) -> list[float]:
        """Return the values of the window, for a checkpoint."""
        return list(self._recent)

    def load_state_dict(self, values: Sequence[float]) -> None:
        """Resume with the values of a checkpoint."""
        self._recent = deque(values, maxlen=self._section.window)

    def check(self, value: float) -> Refusal | None:
        """Record a finite value. Return a refusal if it is a spike and the action is not to warn."""
        problem, action = self.describe(value), self._section.action
        self._recent.append(value)
        if not problem:
            return None
        if action == "warn":
            if self._logs:
                logger.warning("%s", problem)
            return None
        if action == "skip":
            return Refusal(problem, None)
        advice = (
            "No weight was changed, and the gradients are dropped, so another batch may follow. Set "
            f'onefold.{self._key}.action to "skip", "warn" or "rollback" for another reaction.'
        )
        return Refusal(problem, self._error(problem, advice, rolls_back=action == "rollback"))

    def describe(self, value: float) -> str:
        """Return why a value is a spike, or an empty string. Record nothing."""
        factor = self._section.factor
        if factor is None or len(self._recent) < self._section.window:
            return ""
        middle = median(self._recent)
        spread = max(_DEVIATIONS * median(abs(each - middle) for each in self._recent), _LEAST_SPREAD * abs(middle))
        limit = middle + factor * spread
        if value <= limit:
            return ""
        return (
            f"the {self._what} {value:.6g} is a spike: it is above {limit:.6g}, which is the median {middle:.6g} of "
            f"the last {len(self._recent)} steps plus onefold.{self._key}.factor {factor:g} x {spread:.3g}"
        )
