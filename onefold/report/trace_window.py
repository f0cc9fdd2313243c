"""Trace the steps that `onefold.trace` selects, without changes to the program."""

from __future__ import annotations

from pathlib import Path

import torch

from onefold.config.onefold_section import TraceSection
from onefold.log import logger
from onefold.report.timeline import Profiling

# The number of allocations whose stacks a memory snapshot contains.
_MAX_ENTRIES = 200_000


class TraceWindow:
    """The traced steps of one engine. Steps are counted from 1."""

    def __init__(self, options: TraceSection, device: torch.device, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._profiling: Profiling | None = None
        self._torch_profiler: torch.profiler.profile | None = None
        self._is_over = options.steps is None
        self._snapshots = options.memory_snapshot and device.type == "cuda"
        if options.memory_snapshot and not self._snapshots and rank == 0:
            logger.warning("onefold.trace.memory_snapshot: no snapshot is taken, because there is no CUDA device")
        self._keeps_history = self._snapshots
        if self._snapshots:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_ENTRIES)

    @staticmethod
    def of(options: TraceSection, device: torch.device, rank: int) -> TraceWindow | None:
        """Return the trace window of the config, or None if it is not enabled."""
        asked = options.steps is not None or options.memory_snapshot
        return TraceWindow(options, device, rank) if asked else None

    def before_phase(self, num_steps: int) -> None:
        """Start tracing at the first phase of the window. `num_steps` steps have been taken."""
        if self._is_over or self._profiling is not None or self._options.steps is None:
            return
        first, last = self._options.steps
        if num_steps < first - 1:
            return
        if num_steps >= last or Profiling.active is not None:
            self._is_over = True
            already = f"{num_steps} steps are already done"
            why = already if num_steps >= last else "onefold.Profiling is active"
            if self._rank == 0:
                logger.warning("onefold.trace: steps %d to %d are not traced: %s", first, last, why)
            return
        self._profiling = Profiling(trace=self._options.path)
        self._profiling.__enter__()
        if self._options.torch_profiler:
            self._torch_profiler = torch.profiler.profile()  # the CPU, and CUDA where there is one
            self._torch_profiler.start()

    def after_step(self, num_steps: int) -> None:
        """Finish the trace after the last step of the window. All ranks write the file together."""
        if self._profiling is None or self._options.steps is None or num_steps < self._options.steps[1]:
            return
        self._stop_torch_profiler()
        profiling, self._profiling, self._is_over = self._profiling, None, True
        try:
            profiling.__exit__(None)
        except OSError as error:  # do not stop the training because of the trace
            logger.error("onefold.trace.path: the timeline cannot be written: %s", error)
        if self._snapshots:
            self._dump("memory")
        self._stop_history()
        if profiling.path is not None:
            logger.info("the timeline of steps %d to %d is in %s", *self._options.steps, profiling.path)

    def give_up(self) -> None:
        """Finish the trace when the engine is closed before the last step of the window.

        Each rank writes a separate file, because other ranks may have failed.
        """
        if self._profiling is not None:
            self._stop_torch_profiler()
            profiling, self._profiling, self._is_over = self._profiling, None, True
            profiling.__exit__(RuntimeError)
        self._stop_history()

    def out_of_memory(self) -> str | None:
        """Write a memory snapshot if snapshots are enabled, and return its path."""
        return str(self._dump("out-of-memory")) if self._snapshots else None

    def _stop_history(self) -> None:
        if self._keeps_history:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._keeps_history = False

    def _stop_torch_profiler(self) -> None:
        profiler, self._torch_profiler = self._torch_profiler, None
        if profiler is not None:
            profiler.stop()
            profiler.export_chrome_trace(str(self._beside("torch", ".json")))

    def _dump(self, what: str) -> Path:
        path = self._beside(what, ".pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        return path

    def _beside(self, what: str, suffix: str) -> Path:
        """Return the path of a file of this rank in the folder of the timeline."""
        path = Path(self._options.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f"{path.stem}.{what}.rank{self._rank}{suffix}")
