"""The longest sequence that trains on one GPU, planned and run: `python -m benchmarks.longest --shape 1.3b`.

A decoder of Llama's shape recomputes its blocks. Each row adds to the one before: logits, loss and MLPs in tiles, then
the inputs of blocks in host memory. The plan finds the longest sequence that fits; it needs no GPU, but minutes. The
run takes it, or `--tokens`, and compares the peak that torch allocated with the plan. `--plan` only plans, for the
machine that `--gpu-memory` and `--host-memory` describe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[1]
HEADER = ["setting", "tokens", "planned GB", "peak GB", "peak / planned", "s/step", "tokens/s", "loss"]
# vocabulary, width, blocks, heads, key heads, width of the MLP
SHAPES = {
    "tiny": (512, 64, 2, 4, 2, 128),
    "1.3b": (32000, 2048, 24, 16, 16, 5504),
    "8b": (128256, 4096, 32, 32, 8, 14336),
}
SETTINGS = ("recompute", "tiles", "host")
_STEP = 1024


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.longest", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.3b")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="which rows, divided by commas")
    parser.add_argument("--tokens", type=int, help="length of the sequence (default: the longest by the plan)")
    parser.add_argument("--offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument("--int8", action="store_true", help="int8 optimizer states and 8-bit residuals of masters")
    parser.add_argument("--steps", type=int, default=2, help="steps; the last one is timed")
    parser.add_argument("--plan", action="store_true", help="plan only")
    parser.add_argument("--gpu-memory", type=float, default=150.0, help="GB that torch may allocate, for the plan")
    parser.add_argument("--host-memory", type=float, default=128.0, help="GB of the host, for the plan")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(setting: str, options: argparse.Namespace) -> dict[str, Any]:
    own: dict[str, Any] = {"state_dtype": "int8", "master_dtype": "bf16_int8"} if options.int8 else {}
    if setting != "recompute":
        own |= {"tiled_mlp": True, "tiled_mlp_modules": ["GatedMLP"]}
    offload = {"offload_optimizer": {"device": "cpu"}} if options.offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error", "onefold": own,
        "zero_optimization": {"stage": 2, "overlap_comm": True, **offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "activation_checkpointing": {"cpu_checkpointing": setting == "host"},
    }  # fmt: skip


def build(shape: str, *, tiled: bool) -> nn.Module:
    import onefold
    from benchmarks.shapes import Block, Decoder, GatedMLP

    class LongDecoder(Decoder):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return onefold.tiled_cross_entropy(self.norm(x), self.head, targets, None if tiled else 1)

    vocabulary, width, depth, heads, key_heads, ffn = SHAPES[shape]
    blocks = [Block(width, heads, key_heads, GatedMLP(width, ffn)) for _ in range(depth)]
    return LongDecoder(vocabulary, width, blocks)


def plan(setting: str, options: argparse.Namespace, tokens: int) -> Any:
    """Return the forecast for a sequence of some length."""
    from onefold.tools.estimate.dry_run import META
    from onefold.tools.estimate.forecast import forecast
    from onefold.tools.estimate.machines import Gpu, Machine
    from onefold.tools.estimate.models import ModelSource
    from onefold.tools.estimate.question import Question, Setting

    def on_meta() -> nn.Module:
        with META:
            return build(options.shape, tiled=setting != "recompute")

    def loss_of(batch: int, length: int) -> Any:
        some = torch.zeros(batch, length, dtype=torch.long, device=META)
        return lambda call: call(some, some)

    config = config_of(setting, options)
    gpu = Gpu(int(options.gpu_memory * 1e9), 1e15, 4e12, 1e11, 5e10)
    machine = Machine("GPU", gpu, host_memory=int(options.host_memory * 1e9))
    source = ModelSource("decoder", on_meta, loss_of, SHAPES[options.shape][0])
    question = Question(source, machine, config, 1, tokens)
    (found,) = forecast(question, [Setting(setting, config["zero_optimization"])], finds_batch=False)
    return found


def longest(setting: str, options: argparse.Namespace) -> int:
    """Return the longest sequence that fits by the plan, in steps of 1,024 tokens."""
    fits, too_long = 0, _STEP
    while plan(setting, options, too_long).fits:
        fits, too_long = too_long, 4 * too_long
    while too_long - fits > max(_STEP, fits // 64):
        middle = (fits + too_long) // 2 // _STEP * _STEP
        fits, too_long = (middle, too_long) if plan(setting, options, middle).fits else (fits, middle)
    return fits


def train(setting: str, options: argparse.Namespace) -> dict[str, Any]:
    import onefold
    from benchmarks.worker import peak_resident_mb

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    with device:
        model = build(options.shape, tiled=setting != "recompute")
    engine, *_ = onefold.initialize(model=model, config=config_of(setting, options))
    generator = torch.Generator().manual_seed(1)
    seconds = loss = 0.0
    for _ in range(options.steps):
        tokens = torch.randint(0, SHAPES[options.shape][0], (1, options.tokens), generator=generator).to(device)
        start = time.perf_counter()
        result = engine(tokens, tokens.roll(-1, 1))
        engine.backward(result)
        engine.step()
        engine.wait_for_step()
        loss = float(result.detach())
        seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_resident_mb() * 2**20
    return {"seconds": seconds, "peak": peak, "loss": loss}


def main() -> None:
    options = parse_arguments()
    if options.worker is not None:
        print("FIGURES " + json.dumps(train(options.worker, options)), flush=True)
        return
    print(" | ".join(HEADER), flush=True)
    for setting in options.settings.split(","):
        tokens = options.tokens or longest(setting, options)
        planned = plan(setting, options, tokens).device.allocated / 1e9
        cells = [setting, f"{tokens:,}", f"{planned:.1f}"]
        if not options.plan:
            cells += run(setting, tokens, planned)
        print(" | ".join(cells), flush=True)


def run(setting: str, tokens: int, planned: float) -> list[str]:
    """Run a setting in a process of its own, and return the rest of its row."""
    command = [sys.executable, "-m", "benchmarks.longest", *sys.argv[1:], "--tokens", str(tokens), "--worker", setting]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if not lines:
        return [f"failed: {' '.join(done.stderr.strip().splitlines()[-1:])}"]
    row = json.loads(lines[0].removeprefix("FIGURES "))
    peak, seconds = row["peak"] / 1e9, row["seconds"]
    return [f"{peak:.1f}", f"{peak / planned:.3f}", f"{seconds:.2f}", f"{tokens / seconds:,.0f}", f"{row['loss']:.4f}"]


if __name__ == "__main__":
    main()
