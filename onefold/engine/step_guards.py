"""Rollbacks: load the last checkpoint after a step that was refused, and continue with the next batch."""

from __future__ import annotations

from collections.abc import Callable

from onefold.engine.checkpoint_loader import CheckpointLoader
from onefold.engine.checkpoint_saver import CheckpointSaver
from onefold.engine.peer_copies import PeerCopies
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.recovery.refused_step import RefusedStepError, ReplicaError
from onefold.recovery.rollback_limit import RollbackLimit
from onefold.storage.place import Place, place


class StepGuards:
    """Runs the steps of one engine, and rolls back after those that are refused for a rollback."""

    def __init__(self, state: TrainState, saver: CheckpointSaver, loader: CheckpointLoader, copies: PeerCopies) -> None:
        self._state, self._saver, self._loader, self._copies = state, saver, loader, copies
        self._limit = RollbackLimit(state.plan.guards.max_rollbacks)

    def run(self, step: Callable[[], None]) -> bool:
        """Run a step. Return False if it was refused and the last checkpoint was loaded instead."""
        refused = None
        try:
            step()
        except RefusedStepError as error:
            if isinstance(error, ReplicaError):  # copies may have been made after the values had changed
                self._copies.reject()
            if not error.rolls_back:
                raise
            refused = error
        if refused is not None:
            self._roll_back(refused)
        return refused is None

    def _roll_back(self, refused: RefusedStepError) -> None:
        """Load the last checkpoint. Raise if there is none, or if rollbacks bring no progress."""
        state = self._state
        reached, path = state.global_steps, self._last_checkpoint()
        if path is None:
            advice = (
                "There is no checkpoint to roll back to, because this engine has neither saved nor loaded one. No "
                "weight was changed, and the gradients are dropped. Call engine.save_checkpoint before the first step."
            )
            raise type(refused)(refused.problem, advice) from refused
        if not self._limit.allows(reached):
            advice = (
                f"onefold.max_rollbacks = {self._limit.maximum} rollbacks have not brought the run further. No weight "
                "was changed by this step, and the gradients are dropped. Check the data and the learning rate."
            )
            raise type(refused)(refused.problem, advice) from refused
        self._loader.load(
            str(path.parent), path.name, strict=True, optimizer_states=True, lr_scheduler_states=True,
            module_only=False, custom=None, keeps_position=True,
        )  # fmt: skip
        if state.group.rank == 0:
            logger.warning(
                "%s. Rolled back from step %d to step %d (%s), rollback %d of %d. The next batch follows",
                refused.problem, reached, state.global_steps, path, self._limit.count, self._limit.maximum,
            )  # fmt: skip

    def _last_checkpoint(self) -> Place | None:
        """Return the folder of the last checkpoint on this rank. A collective call.

        Rank 0 decides, because it may have saved alone. The folders of the ranks may have different paths.
        """
        mine = self._saver.last
        text = self._state.schedule.agreement.broadcast_text("a rollback", str(mine) if mine is not None else "")
        if mine is not None and text and mine.name == place(text).name:
            return mine
        return place(text) if text else None
