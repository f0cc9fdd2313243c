"""Time, memory and traffic of divided sequences: `python -m benchmarks.long_sequences --ranks 2 --sizes 1,2`.

Each row is a run in which every group of `sequence_parallel_size` ranks computes one sequence per step. On CPUs the
memory is that of a rank's process beyond what it held before the first step, on GPUs the peak that torch allocated.
The memory of a process includes what the C library keeps in its heap. MALLOC_MMAP_THRESHOLD_=65536 in the environment
makes glibc return freed tensors at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEADER = ["size", "sequences a step", "s a sequence", "min", "peak MiB of a rank", "attention sent MB", "loss"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_sequences", description=__doc__)
    parser.add_argument("--preset", default="25m", help="shape of the GPT (benchmarks/model.py)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="1,2", help="values of sequence_parallel_size, divided by commas")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one for warming up")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of blocks for backward")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def train(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """Run one rank, and return its figures."""
    import torch
    from torch import nn

    import onefold
    from benchmarks.model import GPT, PRESETS, make_batch
    from benchmarks.worker import peak_resident_mb

    class LongGPT(GPT):
        """The GPT with the positions of this rank's tokens."""

        def forward(self, tokens: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.tokens(tokens) + self.positions(positions)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            return onefold.tiled_cross_entropy(self.norm(x), self.head, targets)

    torch.manual_seed(0)
    shape = replace(PRESETS[options.preset], max_sequence=options.tokens)
    model: nn.Module = LongGPT(shape, recompute=options.recompute)
    config = {
        "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": size, "log_level": "error",
        "bf16": {"enabled": options.dtype == "bf16"}, "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }  # fmt: skip
    engine, *_ = onefold.initialize(model=model, config=config)
    on_gpu = engine.device.type == "cuda"
    replica = engine.state.group.rank // size
    seconds, before = [], peak_resident_mb()
    for step in range(options.steps + 1):
        tokens, targets = make_batch(shape, 1, options.tokens, 100 * step + replica, engine.device)
        positions = torch.arange(options.tokens, device=engine.device).unsqueeze(0)
        parts = engine.sequence_parallel.split((tokens, positions, targets))
        sent, start = engine.ledger.bytes("attention"), time.perf_counter()
        loss = engine.sequence_parallel.mean_loss(engine(*parts), parts[2])
        engine.backward(loss)
        engine.step()
        engine.wait_for_step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        sent = engine.ledger.bytes("attention") - sent
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else peak_resident_mb() - before
    sequences = engine.batch.train
    return {
        "size": size,
        "sequences": sequences,
        "seconds": [each / sequences for each in seconds[1:]],
        "peak": peak,
        "sent": sent / 1e6,
        "loss": float(loss.detach()),
    }


def share_gpus() -> None:
    """Let ranks beyond the number of GPUs share them ([Note: NCCL ranks on one GPU] in `launch.py`)."""
    import torch

    num_gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if 0 < num_gpus < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        own = {"NCCL_HOSTID": f"host{local_rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ.update(own, LOCAL_RANK=str(local_rank % num_gpus))


def main() -> None:
    options = parse_arguments()
    if options.worker is not None:
        share_gpus()
        found = train(options, options.worker)
        if os.environ.get("RANK", "0") == "0":
            print("FIGURES " + json.dumps(found), flush=True)
        return
    print(" | ".join(HEADER), flush=True)
    for size in map(int, options.sizes.split(",")):
        own = [argument for argument in sys.argv[1:] if not argument.startswith("--worker")]
        command = ["-m", "onefold.tools.cli.main", "launch", "--nproc", str(options.ranks), str(Path(__file__))]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, *command, *own, "--worker", str(size)], env=environment, capture_output=True, text=True
        )
        lines = [line for line in done.stdout.splitlines() if "FIGURES " in line]
        if not lines:
            print(f"{size} | failed: {done.stderr.strip().splitlines()[-8:]}")
            continue
        row = json.loads(lines[0].split("FIGURES ", 1)[1])
        times = row["seconds"]
        cells = [row["size"], row["sequences"], f"{statistics.median(times):.2f}", f"{min(times):.2f}"]
        print(
            " | ".join(map(str, [*cells, f"{row['peak']:.0f}", f"{row['sent']:.1f}", f"{row['loss']:.4f}"])), flush=True
        )


if __name__ == "__main__":
    main()
