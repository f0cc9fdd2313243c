"""Offload step by step: store states and parameters in host memory and on a disk, and draw bytes and time.

    onefold launch --nproc 2 offload.py     # two ranks on CPUs; without --nproc one rank per GPU

docs/tutorials/offload.md explains the results.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.report.run_file import RunFile

STEPS, LENGTH, WIDTH, LAYERS = 5, 32, 512, 4
BUS_AND_DISK = {"down": "device to host", "up": "host to device", "read": "disk read", "write": "disk write"}
COLORS = ("#2f6fc1", "#e08a2e", "#3a9a6a", "#8a62c9")
ROWS = ("phases", "compute", "gathers", "reductions", "bus down", "step", "bus up", "disk")  # from top to bottom


def settings(disk: Path) -> dict[str, dict[str, Any]]:
    """Return the keys in `zero_optimization` of each setting, by name."""
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(disk)}
    return {
        "no offload": {},
        "ratio 0.5": {"offload_optimizer": {**cpu, "ratio": 0.5}},
        "all states": {"offload_optimizer": cpu},
        "both in memory": {"offload_optimizer": cpu, "offload_param": cpu},
        "both on disk": {"offload_optimizer": nvme, "offload_param": nvme},
    }


class SmallGPT(nn.Module):
    """A language model of bytes with about 13 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


@dataclass
class Result:
    """Measurements of one run, on rank 0."""

    setting: str
    loss: float
    held: dict[str, int]
    """Bytes of model states at the end of backward, by tier."""
    copied: dict[str, float]
    """Bytes that the rank copied between the tiers per step, by direction."""


def train(setting: str, zero: dict[str, Any], folder: Path) -> Result | None:
    """Train for a few steps, and trace the last two. Return the measurements on rank 0."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # the source of a module of Python
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            # So that even this small model is gathered block by block, as large models are by default.
            "stage3_max_live_parameters": 5_000_000,
            "stage3_max_reuse_distance": 0,
            **zero,
        },
        "onefold": {
            "report": str(folder),
            "trace": {"steps": [STEPS - 1, STEPS], "path": str(folder / "trace.json")},
        },
        "log_level": "warning",
    }
    engine, _, _, _ = onefold.initialize(model=SmallGPT(), config=config)
    before = engine.ledger.copy()  # without the bytes of the first copy of the model
    with engine:
        batches = torch.Generator().manual_seed(engine.global_rank)  # each rank has its own batches
        for _ in range(STEPS):
            starts = torch.randint(len(text) - LENGTH - 1, (2,), generator=batches).tolist()
            rows = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(engine.device)
            logits = engine(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        is_first = engine.global_rank == 0
    if not is_first:
        return None
    traffic = engine.ledger.since(before)
    step = RunFile.read(folder).steps[-1]
    assert step.loss is not None
    copied = {name: traffic.bytes(operation) / STEPS for operation, name in BUS_AND_DISK.items()}
    return Result(setting, step.loss, step.memory.by_tier(), copied)


def print_table(results: list[Result]) -> None:
    heads = [*results[0].held, "to host", "to device", "read", "written"]
    print(f"{'setting':<16}" + "".join(f"{head:>11}" for head in heads) + "  last loss")
    for result in results:
        cells = [*result.held.values(), *result.copied.values()]
        print(f"{result.setting:<16}" + "".join(f"{size / 1e6:>11.2f}" for size in cells) + f"  {result.loss:.9f}")
    print("in MB of rank 0: model states by tier at the end of backward; bytes copied, read and written per step")


def draw_bars(axes: Any, rows: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw one horizontal bar for each row, divided into its parts."""
    left = dict.fromkeys(rows, 0.0)
    for part, color in zip(next(iter(rows.values())), COLORS, strict=False):
        widths = {name: row[part] / 1e6 for name, row in rows.items()}
        axes.barh(list(rows), list(widths.values()), 0.6, list(left.values()), label=part, color=color)
        left = {name: start + widths[name] for name, start in left.items()}
    for place, total in enumerate(left.values()):
        axes.text(total + 2, place, f"{total:.0f}", va="center", fontsize="small")
    axes.set_xlabel(label)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize="small")


def draw_memory_and_copies(results: list[Result], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    memory, copies = figure.subplots(1, 2, sharey=True)
    draw_bars(memory, {each.setting: each.held for each in results}, "MB of model states per rank")
    draw_bars(copies, {each.setting: each.copied for each in results}, "MB copied per rank and step")
    memory.invert_yaxis()  # the copies share this axis
    figure.savefig(path)


def draw_timelines(traces: dict[str, Path], path: Path) -> None:
    """Draw what rank 0 did in the traced steps: one panel per setting, one row per kind of work."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3 * len(traces)), dpi=150, layout="constrained")
    for axes, (setting, trace) in zip(figure.subplots(len(traces), 1), traces.items(), strict=True):
        events = [each for each in json.loads(trace.read_text())["traceEvents"] if each["pid"] == 0]
        names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
        for event in (each for each in events if each["ph"] == "X"):
            row = names[event["tid"]].rstrip(" 0123456789")  # spans that overlap are in rows such as "disk 2"
            if row not in ROWS:
                continue
            waits = event["name"].startswith("wait")
            color = COLORS[("forward", "backward", "step").index(event["name"])] if row == "phases" else COLORS[0]
            span = (event["ts"] / 1e3, max(event["dur"] / 1e3, 1.0))
            top = ROWS.index(row) - 0.35
            axes.broken_barh([span], (top, 0.7), color="#d5d8dd" if waits else color, alpha=1 if waits else 0.7)
            if row == "phases" and event["name"] != "step":
                axes.text(sum(span) - span[1] / 2, top + 0.37, event["name"], ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(ROWS)), ROWS, fontsize="small")
        axes.set_ylim(len(ROWS) - 0.5, -0.5)
        axes.set_title(setting, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("milliseconds")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/offload"))
    out = parser.parse_args().out
    folders = {setting: out / setting.replace(" ", "-") for setting in settings(out)}
    found = [train(setting, zero, folders[setting]) for setting, zero in settings(out / "disk").items()]
    results = [result for result in found if result is not None]
    if results:
        print_table(results)
        draw_memory_and_copies(results, out / "offload-memory.png")
        traced = ("no offload", "all states", "both on disk")
        draw_timelines({name: folders[name] / "trace.json" for name in traced}, out / "offload-timeline.png")
        print(f"pictures: {out}/offload-memory.png, {out}/offload-timeline.png")


if __name__ == "__main__":
    main()
