"""FP8: train in bf16 and in FP8 with both recipes, and compare losses and the bytes of all-gathers.

    onefold launch --nproc 2 fp8.py     # two ranks on CPUs, which emulate FP8; without --nproc one rank per GPU

docs/tutorials/fp8.md explains the results.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.report.run_file import RunFile

STEPS, LENGTH, WIDTH, LAYERS = 60, 32, 96, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "FP8, one scale per tensor": {"enabled": True, "recipe": "tensorwise"},
    "FP8, one scale per row": {"enabled": True, "recipe": "rowwise"},
}
COLORS = ("#2f6fc1", "#e08a2e", "#3a9a6a")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class SmallGPT(nn.Module):
    """A language model of bytes with about 280 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Result:
    """Measurements of one run on rank 0."""

    setting: str
    losses: list[float]
    gathered: int
    """Bytes that the rank sent in the all-gathers of the last step."""
    products: int
    """FP8 products in the whole run."""


def train(setting: str, folder: Path) -> Result | None:
    """Train in stage 3. Return the measurements on rank 0."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # the source of a module of Python
    fp8 = SETTINGS[setting]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "fp8": {**fp8, "emulate": not torch.cuda.is_available()} if fp8 else {},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": STEPS}},
        "zero_optimization": {
            "stage": 3,
            # So that even this small model is stored in shards and gathered block by block.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 50_000,
            "stage3_max_reuse_distance": 0,
        },
        "onefold": {"report": str(folder)},
        "log_level": "warning",
    }
    engine, _, _, _ = onefold.initialize(model=SmallGPT(), config=config)
    with engine:
        batches = torch.Generator().manual_seed(engine.global_rank)  # each rank has its own batches
        for _ in range(STEPS):
            starts = torch.randint(len(text) - LENGTH - 1, (4,), generator=batches).tolist()
            rows = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(engine.device)
            logits = engine(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        products = engine.state.fp8.num_products if fp8 else 0
        is_first = engine.global_rank == 0
    if not is_first:
        return None
    steps = RunFile.read(folder).steps
    return Result(setting, [step.loss for step in steps], steps[-1].bytes_of("gather"), products)


def mean_of_last(losses: list[float]) -> float:
    return sum(losses[-10:]) / 10


def print_table(results: list[Result]) -> None:
    print(f"{'setting':<28}{'products':>9}{'gathered':>10}{'first loss':>12}  last 10 losses")
    for each in results:
        losses = f"{each.losses[0]:>12.4f}{mean_of_last(each.losses):>16.4f}"
        print(f"{each.setting:<28}{each.products:>9}{each.gathered / 1e3:>10.1f}{losses}")
    print("FP8 products of rank 0 in the run; kB that it sent in all-gathers of the last step; losses of rank 0")


def draw(results: list[Result], path: Path) -> None:
    """Draw the losses, and the bytes of the all-gathers of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    places = figure.add_gridspec(2, 2, width_ratios=(3, 2))
    losses, gathered = figure.add_subplot(places[0, 0]), figure.add_subplot(places[:, 1])
    differences = figure.add_subplot(places[1, 0], sharex=losses)
    for each, color, width in zip(results, COLORS, (5, 3, 1), strict=True):
        losses.plot(range(1, STEPS + 1), each.losses, label=each.setting, color=color, linewidth=width)
        from_bf16 = [loss - other for loss, other in zip(each.losses, results[0].losses, strict=True)]
        differences.plot(range(1, STEPS + 1), from_bf16, color=color)
    losses.set_ylabel("loss of rank 0")
    losses.legend(frameon=False)
    differences.set_ylabel("difference from bf16")
    differences.set_xlabel("step")
    bars = gathered.bar(
        ["bf16", "FP8,\nper tensor", "FP8,\nper row"], [x.gathered / 1e3 for x in results], 0.6, color=COLORS
    )
    gathered.bar_label(bars, fmt="%.0f", fontsize="small")
    gathered.set_ylabel("kB sent in all-gathers per rank and step")
    for axes in (losses, differences, gathered):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/fp8"))
    out = parser.parse_args().out
    found = [train(setting, out / f"run-{number}") for number, setting in enumerate(SETTINGS)]
    results = [result for result in found if result is not None]
    if results:
        print_table(results)
        draw(results, out / "fp8.png")
        print(f"picture: {out}/fp8.png")


if __name__ == "__main__":
    main()
