"""Reading the report of a run: train with a slow data loader and a spoiled batch, to find both in the report.

    onefold launch --nproc 2 report.py --out runs/report
    onefold report runs/report --png

docs/tutorials/report.md explains the results.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import onefold

STEPS, SLOW, SPOILED = 150, range(60, 90), 110


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/report")
    out = parser.parse_args().out
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), *(Block(256) for _ in range(3)), nn.Linear(256, 8))
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 15, "total_num_steps": STEPS}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 200_000, "stage3_max_reuse_distance": 0},
        "onefold": {"report": out},
        "log_level": "warning",
    }
    engine, _, _, _ = onefold.initialize(model=model, config=config)
    engine.note_run(steps=STEPS)  # `onefold watch` shows the rest of the time
    task = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    batches = torch.Generator().manual_seed(engine.global_rank)
    with engine:
        for step in range(STEPS):
            x = torch.randn(64, 64, generator=batches)
            y = torch.tanh(x @ task / 4)
            if step in SLOW:
                time.sleep(0.1)  # a data loader that is too slow
            if step == SPOILED:
                y = y.flip(0)  # a batch whose targets belong to other inputs
            loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


if __name__ == "__main__":
    main()
