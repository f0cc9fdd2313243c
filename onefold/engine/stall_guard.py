"""The part of an engine that reports its progress to the stall watch of the process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from onefold.engine.train_state import TrainState
from onefold.recovery.rank_beats import RankBeat
from onefold.recovery.stall_watch import StallBounds, StallWatch, close_watch, open_watch
from onefold.report.metrics_server import MetricsServer
from onefold.report.monitors import MonitorMaster

_FIRST_STEP_FACTOR = 10


class StallGuard:
    """Reports the phases and steps of one engine, if the config has a bound for stalls."""

    def __init__(self, state: TrainState, monitor: MonitorMaster) -> None:
        self._state, self._server = state, monitor.metrics_server
        self._watch: StallWatch | None = None
        loop = state.plan.loop
        if loop.stall.seconds is None or state.group.is_fake:
            return
        first = loop.stall.first_step_seconds or _FIRST_STEP_FACTOR * loop.stall.seconds
        bounds = StallBounds(loop.stall.seconds, first, Path(loop.stall_folder).absolute())
        self._watch = open_watch(id(self), bounds, _Publisher(self._server))

    def phase(self, name: str, inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return a context around a phase of the engine, in the context `inner`."""
        return self._watch.phase(name, inner) if self._watch is not None else inner

    def record_step(self) -> None:
        """Record that a step is complete."""
        if self._watch is not None:
            self._watch.record_step(self._state.global_steps)

    def close(self) -> None:
        """Stop watching for this engine."""
        if self._watch is not None:
            close_watch(id(self))
        self._watch = None


class _Publisher:
    """Publishes the heartbeats of all ranks as metrics, on the rank that has a server."""

    def __init__(self, server: MetricsServer | None) -> None:
        self._server = server

    def __call__(self, beats: Mapping[int, RankBeat]) -> None:
        if self._server is not None:
            self._server.write_ranks(
                {
                    rank: {
                        "heartbeat_timestamp_seconds": beat.time,
                        "last_step": beat.step,
                        "seconds_without_progress": beat.seconds,
                    }
                    for rank, beat in beats.items()
                }
            )
