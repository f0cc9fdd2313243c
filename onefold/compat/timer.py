"""Timers that wait for the device, and samples a second, as DeepSpeed scripts use them by themselves.

The engine has its own (`wall_clock_breakdown`, `onefold.Profiling`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from onefold.compat.rank_logging import logger, print_dist


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`, `.stop()`, `.elapsed()` in milliseconds."""

    class Timer:
        def __init__(self, name: str) -> None:
            self.name_ = name
            self._started: float | None = None
            self._spans: list[float] = []

        @property
        def started_(self) -> bool:
            return self._started is not None

        def start(self) -> None:
            assert self._started is None, f"{self.name_} timer has already been started"
            self._started = _now()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            assert self._started is not None, f"{self.name_} timer is not started"
            if reset:
                self._spans.clear()
            self._spans.append(1000 * (_now() - self._started))
            self._started = None

        def reset(self) -> None:
            self._started = None
            self._spans.clear()

        def elapsed(self, reset: bool = True) -> float:
            running = self.started_
            if running:
                self.stop()
            total = sum(self._spans)
            if reset:
                self.reset()
            if running:
                self.start()
            return total

        def mean(self) -> float:
            return trim_mean(self._spans, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:
        known = (name for name in names if name in self.timers)
        times = [f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
        print_dist(" | ".join(["time (ms)", *times]), ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


class ThroughputTimer:
    """Samples a second: `start()` and `stop()` around each micro-step; the first steps are not counted."""

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or logger.info
        self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = self.start_time = 0.0
        self._check_steps()

    def _check_steps(self) -> None:
        steps = self.steps_per_output
        if steps is None:
            return
        if not isinstance(steps, int):
            raise ValueError(f"steps_per_output must be a positive integer or None, not {steps!r}")
        if steps <= 0:
            raise ValueError(f"steps_per_output must be greater than 0, a positive integer or None, not {steps}")

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if self.config.enabled:
            self.started = True
            self.start_time = self._time() if self.global_step_count >= self.start_step else 0.0

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time > 0:
            passed = self._time() - self.start_time
            self.total_elapsed_time += passed
            self.step_elapsed_time += passed
            if global_step:
                if report_speed and self._is_report_boundary():
                    self.logging(
                        f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/"
                        f"global_step={self.global_step_count}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                        f"CurrSamplesPerSec={self.batch_size / max(self.step_elapsed_time, 1e-6)}"
                    )
                self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        counted = self.global_step_count - self.start_step
        return self.batch_size * counted / self.total_elapsed_time if counted > 0 else float("-inf")

    def _is_report_boundary(self) -> bool:
        self._check_steps()
        return self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0

    def _time(self) -> float:
        return _now() if self.config.synchronized else time.perf_counter()


def trim_mean(data: list[float], trim_percent: float) -> float:
    """Return the mean without a share `trim_percent` of the smallest and of the largest values."""
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0.0
