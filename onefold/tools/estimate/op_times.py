"""How long the ops of a dry run take on this machine: each distinct one is run here, on tensors of its shapes.

[Note: seconds of a pass]
A GPU computes what its host has launched, so a pass takes as long as the slower of them. The device's seconds are those
of its ops, one by one. The host's are the number of ops, each with its share of Python, autograd and the engine, as a
small model's real step takes it (`step_bench.py`). A CPU launches by computing. An op that cannot be run by itself
counts as long as its bytes take.
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

# Repetitions of one op, and seconds after which a slow one is not repeated.
_REPEATS, _PATIENCE = 12, 0.1
# Cycles for which a GPU is kept busy, so that ops queue behind each other and their launches do not count.
_SLEEP = 4_000_000


@dataclass
class OpTimer:
    """Runs ops on a device and remembers what they took. `bandwidth`: bytes/s, for what cannot be run."""

    device: torch.device
    bandwidth: float
    known: dict[OpCall, float] = field(default_factory=dict)

    def seconds_of(self, calls: Counter[OpCall]) -> float:
        """What the device takes for all of them."""
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
    """The median. What an op makes is kept until the end, as in a forward: the next one gets other memory."""
    made = [run()]
    began, taken = time.perf_counter(), list[float]()
    while len(taken) < _REPEATS and time.perf_counter() - began < _PATIENCE:
        before = time.perf_counter()
        made.append(run())
        taken.append(time.perf_counter() - before)
    return sorted(taken)[len(taken) // 2]
