"""The number of rollbacks without progress."""

from __future__ import annotations


class RollbackLimit:
    """Counts the rollbacks since the run was last further than ever before.

    A run that fails at the same step again after each rollback makes no progress, wherever its checkpoint is.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._furthest = -1
        self.count = 0

    def allows(self, step: int) -> bool:
        """Count a rollback of a run that has completed `step` steps. Return whether there may be another one."""
        if step > self._furthest:
            self._furthest, self.count = step, 0
        self.count += 1
        return self.count <= self.maximum
