"""ZeRO stage by stage: train one model in stages 0 to 3, and draw the memory and the traffic of each stage.

    onefold launch --nproc 2 zero_stages.py     # two ranks on CPUs; without --nproc one rank per GPU

docs/tutorials/zero-stages.md explains the results.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import onefold
from onefold.report.run_file import RunFile

STEPS, LENGTH, WIDTH, LAYERS = 4, 64, 192, 4


class SmallGPT(nn.Module):
    """A language model of bytes with about 2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


def config(stage: int, accumulation: int, folder: Path) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            # So that even this small model is stored in shards as large models are by default.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1_000_000,
            "stage3_max_reuse_distance": 0,
        },
        "onefold": {"report": str(folder)},
        "log_level": "warning",
    }


@dataclass
class Result:
    """Measurements of one run, on rank 0."""

    stage: int
    accumulation: int
    loss: float
    held: dict[str, int]
    """Bytes at the end of backward, by kind."""
    sent: dict[str, int]
    """Bytes that the rank sent in the last step, by operation."""


def train(stage: int, accumulation: int, out: Path) -> Result | None:
    """Train for a few steps. Return the measurements on rank 0."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # the source of a module of Python
    folder = out / f"stage-{stage}-accumulation-{accumulation}"
    engine, _, _, _ = onefold.initialize(model=SmallGPT(), config=config(stage, accumulation, folder))
    with engine:
        batches = torch.Generator().manual_seed(engine.global_rank)  # each rank has its own batches
        for _ in range(STEPS * accumulation):
            starts = torch.randint(len(text) - LENGTH - 1, (2,), generator=batches).tolist()
            rows = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(engine.device)
            logits = engine(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        is_first = engine.global_rank == 0
    if not is_first:
        return None
    step = RunFile.read(folder).steps[-1]
    assert step.loss is not None
    sent: dict[str, int] = {}
    for row in step.traffic:
        sent[row.operation] = sent.get(row.operation, 0) + row.bytes
    return Result(stage, accumulation, step.loss, step.memory.by_kind(), sent)


def print_table(results: list[Result]) -> None:
    kinds = list(results[0].held)
    print("accumulation  stage  " + "".join(f"{kind:>12}" for kind in kinds) + "       total        sent  last loss")
    for result in results:
        cells = [*result.held.values(), sum(result.held.values()), sum(result.sent.values())]
        megabytes = "".join(f"{size / 1e6:>12.2f}" for size in cells)
        print(f"{result.accumulation:>12}  {result.stage:>5}  {megabytes}  {result.loss:.9f}")
    print("in MB of rank 0: model states at the end of backward, and bytes that it sent in one step")


def draw(results: list[Result], part: str, label: str, path: Path) -> None:
    """Draw bars of the parts of `held` or `sent` by stage, for one micro-batch per step and for two."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    largest = max(size for result in results for size in getattr(result, part).values())
    for axes, accumulation in zip(panels, (1, 2), strict=True):
        rows = {f"stage {each.stage}": getattr(each, part) for each in results if each.accumulation == accumulation}
        names = dict.fromkeys(name for row in rows.values() for name, size in row.items() if size > largest / 100)
        below = dict.fromkeys(rows, 0.0)
        for name, color in zip(names, ("#2f6fc1", "#e08a2e", "#3a9a6a", "#8a62c9"), strict=False):
            heights = {stage: row.get(name, 0) / 1e6 for stage, row in rows.items()}
            axes.bar(list(rows), list(heights.values()), 0.6, list(below.values()), label=name, color=color)
            below = {stage: low + heights[stage] for stage, low in below.items()}
        for place, total in enumerate(below.values()):
            axes.text(place, total, f"{total:.1f}", ha="center", va="bottom", fontsize="small")
        axes.set_title(f"{accumulation} micro-batch{'es' * (accumulation > 1)} per step", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/zero-stages"))
    out = parser.parse_args().out
    found = [train(stage, accumulation, out) for accumulation in (1, 2) for stage in range(4)]
    results = [result for result in found if result is not None]
    if results:
        print_table(results)
        draw(results, "held", "MB per rank", out / "zero-stages-memory.png")
        draw(results, "sent", "MB sent per rank and step", out / "zero-stages-traffic.png")
        print(f"pictures: {out}/zero-stages-memory.png, {out}/zero-stages-traffic.png")


if __name__ == "__main__":
    main()
