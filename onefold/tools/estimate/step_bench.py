"""Measure the host's share of a step with real steps of small models, in separate processes.

With a GPU, the model is so small that the GPU waits for the host in every op. Its ops are those of a transformer, so
the time per op includes Python, modules, autograd and the hooks of the engine. On CPU ranks, a larger model shows how
much longer ops take while all ranks compute than alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from onefold.comm.nodes import Nodes
from onefold.config import load_config
from onefold.tools.estimate.dry_run import DryRun, dry_run
from onefold.tools.estimate.ops import OpTimer

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
    "log_level": "error",
}
_STEPS, _WARMUP, _TIMEOUT = 10, 3, 300


class StepBenchError(Exception):
    """A measuring process failed."""


@dataclass(frozen=True)
class HostSeconds:
    """Host seconds per op of a pass, per flat parameter of a step, and per flat parameter that a pass shards."""

    launch: float
    boundary: float
    sharding: float


@dataclass(frozen=True)
class BenchModel:
    """A small transformer, and the length of its input."""

    width: int
    blocks: int
    tokens: int
    stage: int = 2
    is_bf16: bool = torch.cuda.is_available()

    def build(self) -> nn.Module:
        """Return the model."""
        return nn.Sequential(*(_TransformerBlock(self.width) for _ in range(self.blocks)))

    def inputs(self, device: torch.device | str) -> torch.Tensor:
        """Return a batch of one sequence."""
        dtype = torch.bfloat16 if self.is_bf16 else torch.float32
        return torch.zeros(1, self.tokens, self.width, dtype=dtype, device=device)

    def config(self) -> dict[str, Any]:
        """Return the config of a run. Stage 3 keeps nothing unsharded."""
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        return {**CONFIG, "bf16": {"enabled": self.is_bf16}, "zero_optimization": zero}

    def dry_run(self) -> DryRun:
        """Run a step of the model dry, on one rank."""
        with torch.device("meta"):
            model = self.build()

        def loss_of(call: Any) -> Any:
            return call(self.inputs("meta")).float().sum()

        return dry_run(model, load_config(self.config()), Nodes.of_size(1, 1), loss_of)


SMALL, MIDDLE = BenchModel(width=64, blocks=12, tokens=8), BenchModel(width=512, blocks=4, tokens=256)


class _TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.attention_norm(x)).unflatten(-1, (3, 4, self.width // 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def measure_host() -> HostSeconds:
    """Measure the host seconds per op and per flat parameter."""
    found = SMALL.dry_run()
    assert found.trace is not None
    num_params = sum(len(unit) for unit in found.units)
    passes, step = _steps_of(SMALL, processes=1)
    # On one rank, a flat parameter is sharded in stage 3 if it is not its own master, as in bf16.
    both = (replace(SMALL, stage=stage, is_bf16=True) for stage in (2, 3))
    (whole, _), (sharded, _) = (_steps_of(model, processes=1, OMP_NUM_THREADS="1") for model in both)
    return HostSeconds(passes / found.trace.work.num_ops, step / num_params, max(0.0, sharded - whole) / num_params)


def measure_contention(ranks: int) -> float:
    """Measure the time of ops while `ranks` processes compute on this host, relative to their time alone."""
    threads, before = max(1, (os.cpu_count() or 1) // ranks), torch.get_num_threads()
    found = MIDDLE.dry_run()
    assert found.trace is not None
    torch.set_num_threads(threads)
    try:
        alone = OpTimer(torch.device("cpu"), bandwidth=1e9).seconds_of(found.trace.work.calls)
    finally:
        torch.set_num_threads(before)
    passes, _ = _steps_of(MIDDLE, processes=ranks, OMP_NUM_THREADS=str(threads))
    return max(1.0, passes / alone)


def _steps_of(model: BenchModel, processes: int, **environment: str) -> tuple[float, float]:
    """Return the seconds of passes and step of the slowest of several independent processes."""
    command = [sys.executable, "-m", "onefold.tools.estimate.step_bench", json.dumps(asdict(model))]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    started = [
        subprocess.Popen(
            command,
            env={**alone, **environment, "MASTER_PORT": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    try:
        output = [process.communicate(timeout=_TIMEOUT) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise StepBenchError(f"steps of a small model could not be measured: {output[0][1][-500:]}")
    passes, ends = zip(*(json.loads(out.splitlines()[-1]) for out, _ in output), strict=True)
    return max(passes), max(ends)


def _run(model: BenchModel) -> tuple[float, float]:
    """Return the median seconds of forward and backward, and of the optimizer step."""
    import onefold

    engine, *_ = onefold.initialize(model=model.build(), config=model.config())
    passes, ends = [], []
    for _ in range(_WARMUP + _STEPS):
        began = time.perf_counter()
        engine.backward(engine(model.inputs(engine.device)).float().sum())
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
    print(json.dumps(_run(BenchModel(**json.loads(sys.argv[1])))))
