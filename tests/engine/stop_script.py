"""A training job that is signalled at a chosen moment: `python stop_script.py OPTIONS`, with the options as JSON.

Each rank appends its losses to a file. `pause` is the moment, in step 3, at which ranks wait for the file `go` after
they have written their process id: in the forward, in the backward, between two micro-steps, or while rank 0 publishes
a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.format import folder as checkpoint_folder

torch.set_num_threads(1)
STEPS, PAUSED_STEP = 6, 3


def main(options: dict[str, Any]) -> None:
    folder, rank = Path(options["folder"]), int(os.environ.get("RANK", "0"))
    pauses = options.get("pause") if rank in options.get("pausing_ranks", (0, 1)) else None

    def pause() -> None:
        part = folder / f"pid.{rank}.part"
        part.write_text(str(os.getpid()))
        part.rename(folder / f"pid.{rank}")
        while not (folder / "go").exists():
            time.sleep(0.01)

    if pauses == "save":
        publish = checkpoint_folder.publish

        def wait_and_publish(*arguments: Any, **options: Any) -> Any:
            if engine.global_steps == PAUSED_STEP:
                pause()
            return publish(*arguments, **options)

        checkpoint_folder.publish = wait_and_publish

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": options.get("stage", 2)},
        "gradient_accumulation_steps": options.get("accumulation", 1),
        "onefold": {"stop": options.get("stop", {})},
        **options.get("config", {}),
    }
    engine = onefold.initialize(model=model, config=config)[0]
    engine.load_checkpoint(str(folder / ("saved" if (folder / "saved").exists() else "own")))
    loader = None
    if options.get("workers"):
        rows = torch.zeros(1000, 1)
        loader = iter(torch.utils.data.DataLoader(rows, num_workers=1, persistent_workers=True))
    for step in range(engine.global_steps + 1, STEPS + 1):
        paused = pauses if step == PAUSED_STEP else None
        for micro_step in range(engine.batch.accumulation):
            if loader is not None:
                next(loader)
            torch.manual_seed(1000 * step + 10 * micro_step + rank)
            if paused == "forward":
                pause()
            output = engine(torch.randn(4, 16))
            if paused == "backward":
                output.register_hook(lambda grad: pause())
            loss = output.float().pow(2).mean()
            engine.backward(loss)
            with (folder / f"losses.{rank}").open("a") as file:
                file.write(f"{loss.item()!r}\n")
            engine.step()
            if paused == "accumulation" and micro_step == 0:
                pause()
        if engine.stop_requested:
            engine.save_checkpoint(str(folder / "own"), client_state={"steps": step})
            sys.exit(128 + engine.stop_requested)
        if options.get("save_every_step"):
            engine.save_checkpoint(str(folder / "own"))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("thread"):
        thread = threading.Thread(target=main, args=(given,))
        thread.start()
        thread.join()
    else:
        main(given)
