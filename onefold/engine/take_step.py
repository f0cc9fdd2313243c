"""The optimizer step of an engine: taken, skipped after an overflow, or refused."""

from __future__ import annotations

from functools import partial

from onefold.allocator import give_back_free_memory
from onefold.engine.checkpoint_saver import CheckpointSaver
from onefold.engine.step_replay import StepReplay
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.optim.sharded import ShardedOptimizer
from onefold.recovery.refused_step import RefusedStepError, SuspiciousStep
from onefold.runtime import Hooks

# The first pass records the order of collectives, and the second fills the pools. What else they allocated is freed.
_STEPS_TO_SETTLE = 2


class StepTaker:
    """Takes the optimizer steps of one engine at accumulation boundaries."""

    def __init__(self, state: TrainState, hooks: Hooks, saver: CheckpointSaver, replay: StepReplay) -> None:
        self._state, self._hooks, self._saver, self._replay = state, hooks, saver, replay
        self._num_steps = 0

    def take(self, optimizer: ShardedOptimizer, stop_signal: int) -> None:
        """Take the optimizer step, or skip it after an overflow. All ranks receive the stop signal of this one."""
        state, schedule, decision = self._state, self._state.schedule, self._state.decision
        self._hooks.check_model()
        if not state.window.managed and state.plan.keeps_unsharded_gradient:
            # The caller counts micro-steps, so the last backward is known only now: reduce its gradients.
            schedule.begin_backward(boundary=True)
            schedule.end_backward()
        before = decision.loss_scale.value
        self._saver.wait_until_copied()
        try:
            taken = self._decide(optimizer, stop_signal)
        except RefusedStepError:
            state.drop_gradients()
            state.window.restart()
            schedule.end_step()
            raise
        if not taken:
            self._saver.raise_failed()
        self._replay.clear()
        state.drop_gradients()
        schedule.end_step()
        self._num_steps += 1
        if self._num_steps == _STEPS_TO_SETTLE:
            give_back_free_memory()
        decision.loss_scale.update(overflow=optimizer.overflow)
        if not decision.applied:
            state.skipped_steps += 1
            if state.group.rank == 0 and optimizer.overflow and decision.scales_loss:
                logger.info("step skipped: overflow, loss scale %g -> %g", before, decision.loss_scale.value)
            elif state.group.rank == 0:
                logger.warning("step skipped: %s", decision.problem)

    def _decide(self, optimizer: ShardedOptimizer, stop_signal: int) -> bool:
        """Take the step, after it was re-executed if it is suspicious."""
        state = self._state
        take = partial(
            state.decision.take,
            optimizer.sharded,
            optimizer,
            state.window.divisor,
            alarm=self._saver.failed,
            stop_signal=stop_signal,
        )
        try:
            return take()
        except SuspiciousStep as found:
            problem = found.problem
        self._replay.examine(problem)
        return take(examined=True)
