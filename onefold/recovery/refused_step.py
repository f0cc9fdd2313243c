"""The errors of steps that are refused on all ranks before they change a weight."""

from __future__ import annotations


class RefusedStepError(RuntimeError):
    """A step that was refused. No weight is changed on any rank, and the gradients are dropped.

    `problem` describes what was found. `rolls_back`: the engine loads the last checkpoint instead of raising.
    """

    def __init__(self, problem: str, advice: str = "", *, rolls_back: bool = False) -> None:
        super().__init__(f"{problem}. {advice}" if advice else problem)
        self.problem, self.rolls_back = problem, rolls_back


class SuspiciousStep(Exception):
    """A step that should be re-executed before it is taken. `problem` is empty if nothing is wrong with it."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class NonFiniteError(RefusedStepError, FloatingPointError):
    """A loss or gradients that are not finite."""


class LossSpikeError(RefusedStepError):
    """A loss far above the losses of the last steps."""


class GradNormSpikeError(RefusedStepError):
    """A gradient norm far above those of the last steps."""


class ReplicaError(RefusedStepError):
    """Values that differ between ranks although all ranks must have the same."""
