"""The end of a job after a signal to any of its ranks: all ranks stop after the same step."""

from __future__ import annotations

import signal
import threading

from onefold.config.onefold_section import StopSection
from onefold.engine.checkpoint_saver import CheckpointSaver
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.stop_signals import LISTENER


class JobStop:
    """Requests to stop one job. Ranks exchange them with the norm of each step (`exchange_scalars`)."""

    def __init__(self, state: TrainState) -> None:
        self._section: StopSection = state.plan.loop.stop
        self._state = state
        self._listens = False
        self.requested: signal.Signals | None = None
        """The signal after which all ranks stop; None while no rank has received one. The same on all ranks."""
        if not self._section.handled or state.step is None:
            return
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            LISTENER.open((signal.Signals[name] for name in self._section.handled), self._section.seconds)
        else:
            logger.warning(
                "onefold.stop: rank %d handles no signals, because Python does so on the main thread only, and "
                "initialize was called on another one (as under Ray). Signals to ranks that handle them stop all ranks",
                state.group.rank,
            )

    @property
    def number(self) -> int:
        """The signal that this rank has received, or 0."""
        return LISTENER.number if self._listens else 0

    def after_step(self, saver: CheckpointSaver) -> None:
        """Record a stop on which the ranks have agreed in this step. If the config says where, save, and exit."""
        number = self._state.decision.stop_signal
        if not number:
            return
        self.requested = signal.Signals(number)
        if self._listens:
            LISTENER.request(number)
        if self._section.save_to is None:
            return
        if self._state.group.rank == 0:
            logger.warning(
                "stopped by %s after step %d, saving to %s",
                self.requested.name,
                self._state.global_steps,
                self._section.save_to,
            )
        saver.save(self._section.save_to, None, None, save_latest=True, exclude_frozen=False, background=False)
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Stop handling signals for this engine."""
        if self._listens:
            LISTENER.close()
        self._listens = False
