"""Time the ops of a dry run on this machine: each distinct op is run on tensors of its shapes.

[Note: seconds of a pass]
The host launches ops and the GPU runs them, so a pass takes as long as the slower of the two. The GPU's seconds are the
sum over its ops. The host's are the number of ops times the seconds per op of a small model's real step, with Python,
autograd and the engine included (`step_bench.py`). On CPU ranks there are no launches. The time of an op that cannot be
run alone is estimated from its bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from onefold.tools.estimate.on_cuda import attend, attend_backward
from onefold.tools.estimate.work import OpCall

# Repetitions of one op, and seconds after which a slow op is not repeated.
_REPEATS, _PATIENCE = 12, 0.1
# Cycles for which the GPU is kept busy, so that ops queue up and the time of launches is hidden.
_SLEEP = 4_000_000


@dataclass
class OpTimer:
    """A cache of measured times of ops. `bandwidth` (bytes/s) is used for ops that cannot be run."""

    device: torch.device
    bandwidth: float
    known: dict[OpCall, float] = field(default_factory=dict)

    def seconds_of(self, calls: Counter[OpCall]) -> float:
        """Return the device seconds of all calls."""
        with torch.no_grad():
            return sum(number * self._time(call) for call, number in calls.items())

    def _time(self, call: OpCall) -> float:
        if call not in self.known:
            self.known[call] = self._run(call)
            if call.func is attend_backward:
                self.known[call] -= self._time(OpCall(attend, call.arguments))
        return self.known[call]

    def _run(self, call: OpCall) -> float:
        try:
            run = call.bind(self.device)
            return _device_seconds(run) if self.device.type == "cuda" else _host_seconds(run)
        except (RuntimeError, TypeError, NotImplementedError):
            return call.num_bytes / self.bandwidth


def _device_seconds(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SLEEP)
    begin.record()
    for _ in range(_REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _REPEATS


def _host_seconds(run: Callable[[], Any]) -> float:
    """Return the median. Results are kept until the end, as in a forward, so that every call allocates new memory."""
    made = [run()]
    began, taken = time.perf_counter(), list[float]()
    while len(taken) < _REPEATS and time.perf_counter() - began < _PATIENCE:
        before = time.perf_counter()
        made.append(run())
        taken.append(time.perf_counter() - before)
    return sorted(taken)[len(taken) // 2]
