"""Resume after a crash on another number of ranks: kill a rank, resume, and compare with a run that did not crash.

    onefold launch --nproc 2 resume.py --out runs/whole
    onefold launch --nproc 2 resume.py --out runs/crashed --crash-at 35     # fails: the last rank is killed
    onefold launch --nproc 2 resume.py --out runs/same --resume runs/crashed
    onefold launch --nproc 1 resume.py --out runs/other --resume runs/crashed --stage 3
    python resume.py --draw runs

docs/tutorials/resume.md explains the results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import onefold

STEPS, SAVE_EVERY = 60, 10


def make_data() -> torch.utils.data.Dataset:
    """Make 2048 points on two spirals, to be told apart."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.rand(2048, generator=generator) * 1.5
    label = torch.arange(2048) % 2
    angle = turns * 4 + label * torch.pi
    points = torch.stack([turns * angle.cos(), turns * angle.sin()], 1) + 0.05 * torch.randn(
        2048, 2, generator=generator
    )
    return torch.utils.data.TensorDataset(points, label)


def train(out: Path, resume: Path | None, stage: int, crash_at: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2))
    config = {
        "train_batch_size": 64,  # of all ranks together, so that it does not depend on their number
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": STEPS}},
        "zero_optimization": {"stage": stage},
        "log_level": "warning",
    }
    engine, _, loader, _ = onefold.initialize(model=model, training_data=make_data(), config=config)
    if resume is not None:
        engine.load_checkpoint(str(resume / "checkpoints"))
        if engine.global_rank == 0:
            print(f"resumed at step {engine.global_steps} in stage {stage} on {engine.world_size} rank(s)")
    out.mkdir(parents=True, exist_ok=True)
    with engine, (out / "losses.jsonl").open("w") as record:
        while engine.global_steps < STEPS:
            for x, y in loader:  # continues where the checkpoint was saved
                loss = nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
                engine.backward(loss)
                engine.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)  # of the batches of all ranks
                mean /= engine.world_size
                if engine.global_rank == 0:
                    record.write(json.dumps([engine.global_steps, mean.item()]) + "\n")
                    record.flush()
                if engine.global_steps % SAVE_EVERY == 0:
                    engine.save_checkpoint(str(out / "checkpoints"))
                if engine.global_steps == crash_at and engine.global_rank == engine.world_size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does if memory runs out
                if engine.global_steps == STEPS:
                    break
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {mean.item():.6f}")


def read(folder: Path) -> dict[int, float]:
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return {step: loss for step, loss in map(json.loads, lines)}


def draw(runs: Path) -> None:
    """Draw the losses of the four runs, and the differences of the resumed runs from the run without a crash."""
    from matplotlib.figure import Figure

    whole, crashed, same, other = (read(runs / name) for name in ("whole", "crashed", "same", "other"))
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    losses.plot(whole.keys(), whole.values(), color="#a9aeb6", linewidth=5, label="without a crash")
    losses.plot(crashed.keys(), crashed.values(), color="#cd4f62", label="until the crash")
    last = max(crashed)
    losses.plot([last], [crashed[last]], "x", color="#cd4f62", markersize=10, markeredgewidth=2)
    losses.plot(same.keys(), same.values(), color="#2f6fc1", label="resumed on the same ranks")
    losses.plot(other.keys(), other.values(), color="#e08a2e", linestyle="--", label="resumed on one rank, stage 3")
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    for run, color in ((same, "#2f6fc1"), (other, "#e08a2e")):
        differences.plot(run.keys(), [abs(loss - whole[step]) for step, loss in run.items()], color=color)
    differences.set_ylabel("difference of the loss\nfrom the run without a crash")
    differences.set_xlabel("step")
    for axes in (losses, differences):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(runs / "resume.png")
    for name, run in (("same", same), ("other", other)):
        largest = max(abs(loss - whole[step]) for step, loss in run.items())
        print(f"{name}: the largest difference of the loss is {largest:.1e}")
    print(f"picture: {runs}/resume.png")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/whole"))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--crash-at", type=int)
    parser.add_argument("--draw", type=Path, help="draw the runs in this folder")
    options = parser.parse_args()
    if options.draw is not None:
        draw(options.draw)
    else:
        train(options.out, options.resume, options.stage, options.crash_at)


if __name__ == "__main__":
    main()
