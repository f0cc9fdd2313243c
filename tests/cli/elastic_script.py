"""A training job whose nodes come and go: `python elastic_script.py OPTIONS`, with the options as JSON.

Rank 0 appends `start step world norm` of each step to the file `steps`. The samples of a step do not depend on the
number of ranks. Without `steps`, the first start does not end, and the next one ends after five steps. `pause` is
`[start, step]`: in this step the ranks write the file `paused.RANK` and wait for `go`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.format.peer_copy import FOLDER_VARIABLE

torch.set_num_threads(1)
BATCH = 12


def main(options: dict[str, Any]) -> None:
    folder, start = Path(options["folder"]), int(os.environ["ONEFOLD_RESTARTS"])
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    config = {
        "elasticity": {
            "enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [2, 4, 6], "max_gpus": 4,
            "version": 0.1,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": options.get("stage", 2)},
        "onefold": options.get("onefold", {}),
    }  # fmt: skip
    engine = onefold.initialize(model=model, config=config)[0]
    saved = folder / "saved"
    if saved.exists() or "peer_copies" in options.get("onefold", {}):
        engine.load_checkpoint(str(saved))
    (folder / f"rank.{start}.{engine.global_rank}").write_text(f"{os.getpid()} {os.environ.get(FOLDER_VARIABLE)}")
    last = options["steps"] or (engine.global_steps + 5 if start else 10_000)
    for step in range(engine.global_steps + 1, last + 1):
        time.sleep(options.get("seconds", 0.0))
        samples = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        mine = samples.chunk(engine.world_size)[engine.global_rank].split(engine.batch.micro)
        for micro_batch in mine:
            engine.backward(engine(micro_batch).pow(2).mean())
            if [start, step] == options.get("pause"):
                (folder / f"paused.{engine.global_rank}").touch()
                while not (folder / "go").exists():
                    time.sleep(0.01)
            try:
                engine.step()
            except SystemExit:
                record(engine, folder, start)
                raise
        record(engine, folder, start)
        if step % options.get("save_every", 1) == 0:
            engine.save_checkpoint(str(saved))


def record(engine: Any, folder: Path, start: int) -> None:
    """Append a line about the step that the engine has completed."""
    if engine.global_rank == 0:
        with (folder / "steps").open("a") as file:
            norm = engine.get_global_grad_norm()
            file.write(f"{start} {engine.global_steps} {engine.world_size} {norm!r}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
