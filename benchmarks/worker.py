"""One rank of one run: `python -m benchmarks.worker SYSTEM WORKLOAD RESULT STARTED`, started by `benchmarks.launch`."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.model import GPT, PRESETS, make_batch
from benchmarks.systems import SYSTEMS, Workload


def peak_resident_mb() -> float:
    """The high-water mark of this process's resident memory."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def start_group(system: str, device: torch.device) -> None:
    if system == "torch":
        return  # the one system without ranks
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def run(system: str, workload: Workload, started: float) -> dict[str, object]:
    rank = int(os.environ["RANK"])
    cuda = workload.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    start_group(system, device)

    shape = PRESETS[workload.preset]
    torch.manual_seed(workload.seed)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in GPT(shape).parameters())

    def construct() -> GPT:
        with device:
            return GPT(shape, recompute=workload.recompute)

    step = SYSTEMS[system](construct, workload)

    num_all_steps = workload.num_warmup_steps + workload.num_steps
    marks: list[float] | list[torch.cuda.Event] = []
    losses: list[torch.Tensor] = []
    startup_seconds = 0.0
    for index in range(num_all_steps):
        data_seed = workload.seed + 1000 * index + rank
        tokens, targets = make_batch(shape, workload.batch, workload.sequence, data_seed, device)
        losses.append(step(tokens, targets))
        if index == 0:
            if cuda:
                torch.cuda.synchronize()
            startup_seconds = time.time() - started
        if index >= workload.num_warmup_steps - 1:
            marks.append(_mark(cuda))
    if cuda:
        torch.cuda.synchronize()
    return {
        "num_parameters": num_parameters,
        "step_seconds": [_between(marks[i], marks[i + 1]) for i in range(workload.num_steps)],
        "startup_seconds": startup_seconds,
        "resident_mb": peak_resident_mb(),
        "gpu_mb": torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0,
        "losses": [float(loss) for loss in losses],
    }


def _mark(cuda: bool) -> float | torch.cuda.Event:
    """A point in time between two steps. Events measure the device without making the host wait for it."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    if isinstance(first, float):
        return second - first
    return first.elapsed_time(second) / 1000


def main() -> None:
    system, workload, result, started = sys.argv[1:]
    measured = run(system, Workload(**json.loads(workload)), float(started))
    Path(result).write_text(json.dumps(measured))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
