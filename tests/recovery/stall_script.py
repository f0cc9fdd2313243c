"""Training jobs in which one rank is stuck at a chosen moment.

`python stall_script.py OPTIONS` runs one rank under a launcher, with its options as JSON. With a list of options it
forks two ranks for each job, all at the same time, starts them again, and prints the exit codes of both starts as JSON.

Each rank appends its losses to a file, and saves after every step. In its first start, rank `stuck_rank` stops to make
progress in step 3, at the `place`. Restarted ranks load the last checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
import onefold.engine

torch.set_num_threads(1)
STEPS, STUCK_STEP = 5, 3
# The end of all ranks, and of those that are left after the first one has failed.
TIMEOUT, LAUNCHER_SECONDS = 90.0, 20.0


def open_fifo(folder: Path) -> None:
    """Block in the kernel, without Python's lock: nothing ever writes to the FIFO."""
    path = folder / f"fifo.{os.getpid()}"
    os.mkfifo(path)
    os.open(path, os.O_RDONLY)


def pause(seconds: float) -> None:
    """Stop this process until a child continues it."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


class Samples(torch.utils.data.IterableDataset):
    def __init__(self, rank: int, first: int, stuck: Any) -> None:
        self.rank, self.first, self.stuck = rank, first, stuck

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self.first, STEPS + 1):
            if step == STUCK_STEP:
                self.stuck("loader")
            yield torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + self.rank))


class Layer(nn.Module):
    def __init__(self, stuck: Any) -> None:
        super().__init__()
        self.inner, self.stuck = nn.Linear(16, 16), stuck

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stuck("forward")
        return torch.relu(self.inner(x))


def main(options: dict[str, Any]) -> None:
    folder, rank = Path(options["folder"]), int(os.environ.get("RANK", "0"))
    is_first = os.environ.get("ONEFOLD_RESTARTS", "0") == "0"
    place = options.get("place") if rank == options.get("stuck_rank", 1) and is_first else None

    steps = [0]

    def stuck(here: str) -> None:
        if here != place or (here != "loader" and steps[0] != STUCK_STEP - 1):
            return
        (folder / f"stuck.{rank}").write_text(str(os.getpid()))
        if options.get("how") == "with Python's lock":
            ctypes.PyDLL(None).sleep(600)
        open_fifo(folder)

    write, read = os.pwrite, os.preadv

    def blocking_write(*arguments: Any) -> int:
        stuck("write")
        return write(*arguments)

    def blocking_read(*arguments: Any) -> int:
        stuck("read")
        return read(*arguments)

    os.pwrite, os.preadv = blocking_write, blocking_read  # type: ignore[assignment]
    swap = {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}} if options.get("swaps") else {}
    torch.manual_seed(1)
    model = nn.Sequential(Layer(stuck), nn.Linear(16, 16), nn.Linear(16, 16))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": options.get("stage", 3), **swap},
        "onefold": {
            "stall": {"seconds": options.get("seconds", 4), "folder": str(folder / "run")},
            **options.get("own", {}),
        },
    }
    engine = onefold.initialize(model=model, config=config)[0]
    engine.load_checkpoint(str(folder / "saved"))
    loader = torch.utils.data.DataLoader(Samples(rank, engine.global_steps + 1, stuck), batch_size=None)
    for batch in loader:
        stuck("program")
        if place == "stopped" and engine.global_steps == STUCK_STEP - 1:
            (folder / f"stuck.{rank}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if place == "paused" and engine.global_steps == STUCK_STEP - 1:
            pause(options["paused_seconds"])
        loss = engine(batch).pow(2).mean()
        engine.backward(loss)
        engine.step()
        steps[0] = engine.global_steps
        with (folder / f"losses.{rank}").open("a") as file:
            file.write(f"{engine.global_steps} {loss.item()!r}\n")
        engine.save_checkpoint(str(folder / "saved"), background=options.get("background"))
        time.sleep(options.get("pause", 0))


def fork_ranks(jobs: list[dict[str, Any]], start: int) -> list[list[int]]:
    """Fork two ranks for each job, and return their exit codes. Ranks that hang are killed."""
    started: dict[int, tuple[int, int]] = {}
    for number, job in enumerate(jobs):
        if start > 0 and "place" not in job:
            continue  # it is complete
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.environ.update(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port), ONEFOLD_RESTARTS=str(start),
                )  # fmt: skip
                stderr = os.open(Path(job["folder"], f"stderr.{start}.{rank}"), os.O_WRONLY | os.O_CREAT)
                os.dup2(stderr, 2)
                main(job)
                sys.exit()
            started[pid] = number, rank
    codes, deadlines = [[0, 0] for _ in jobs], [time.monotonic() + TIMEOUT for _ in jobs]
    while started:
        for pid, (number, rank) in list(started.items()):
            if time.monotonic() > deadlines[number]:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[number][rank] = os.waitstatus_to_exitcode(status)
                del started[pid]
                if codes[number][rank] != 0:  # as a launcher does, for a rank that is stopped
                    deadlines[number] = min(deadlines[number], time.monotonic() + LAUNCHER_SECONDS)
        time.sleep(0.05)
    return codes


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if isinstance(given, dict):
        main(given)
    else:
        print(json.dumps([fork_ranks(given, start) for start in range(2)]))
