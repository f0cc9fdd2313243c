"""Measures what a step asks of the host of this machine: a small model's real step, in a process of its own.

The model is so small that the device waits for the host in every op. Its ops are those of a transformer, so the time of
one holds what Python, modules, autograd and the engine's hooks take for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from onefold.comm.nodes import Nodes
from onefold.config import load_config
from onefold.estimate.rehearsal import rehearse

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": torch.cuda.is_available()},
    "zero_optimization": {"stage": 2},
    "log_level": "error",
}
_BLOCKS, _WIDTH, _STEPS, _WARMUP = 12, 64, 10, 3
_TIMEOUT = 300


class StepBenchError(Exception):
    """The process that was to measure has failed."""


@dataclass(frozen=True)
class HostSeconds:
    """Of the host, for one op of a pass, and for one flat parameter of a step."""

    launch: float
    boundary: float


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.attention_norm(x)).unflatten(-1, (3, 4, _WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _model() -> nn.Module:
    return nn.Sequential(*(_Block() for _ in range(_BLOCKS)))


def _inputs(device: torch.device | str) -> torch.Tensor:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return torch.zeros(1, 8, _WIDTH, dtype=dtype, device=device)


def measure_host() -> HostSeconds:
    with torch.device("meta"):
        model = _model()
    found = rehearse(model, load_config(CONFIG), Nodes.of_size(1, 1), lambda call: call(_inputs("meta")).float().sum())
    assert found.trace is not None
    done = subprocess.run(
        [sys.executable, "-m", "onefold.estimate.step_bench"], capture_output=True, text=True, timeout=_TIMEOUT
    )
    if done.returncode:
        raise StepBenchError(f"a small model's step could not be measured: {done.stderr[-500:]}")
    passes, step = json.loads(done.stdout.splitlines()[-1])
    return HostSeconds(passes / found.trace.work.num_ops, step / sum(len(unit) for unit in found.units))


def _run() -> tuple[float, float]:
    """Medians of the passes of a step, and of its end."""
    import onefold

    engine, *_ = onefold.initialize(model=_model(), config=CONFIG)
    passes, ends = [], []
    for _ in range(_WARMUP + _STEPS):
        began = time.perf_counter()
        engine.backward(engine(_inputs(engine.device)).float().sum())
        _synchronize()
        middle = time.perf_counter()
        engine.step()
        _synchronize()
        passes.append(middle - began)
        ends.append(time.perf_counter() - middle)
    engine.destroy()
    return median(passes[_WARMUP:]), median(ends[_WARMUP:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(_run()))
