"""One rank of one run: `python -m benchmarks.worker SYSTEM WORKLOAD RESULT STARTED`, started by `benchmarks.launch`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.calls import Calls, count_calls
from benchmarks.model import GPT, PRESETS, make_batch
from benchmarks.systems import SYSTEMS, Workload

# Names a file for what rank 0 allocates and frees on its GPU in one step, for `benchmarks.peak`.
SNAPSHOT = "ONEFOLD_BENCH_SNAPSHOT"
SNAPSHOT_STEP = 2
IFNAME = "NCCL_SOCKET_IFNAME"


def resident_mb() -> float:
    """Of this process, now."""
    return _status_mb("VmRSS")


def peak_resident_mb() -> float:
    """The high-water mark of this process's resident memory."""
    return _status_mb("VmHWM")


def _status_mb(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def start_group(system: str, device: torch.device) -> None:
    if system == "torch":
        return  # the one system without ranks
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def parse_sent_bytes(text: str, interface: str = "lo") -> int:
    """What an interface has sent, out of /proc/net/dev: the ninth number of its line."""
    found = re.search(rf"^\s*{interface}:(.*)$", text, re.MULTILINE)
    assert found is not None
    return int(found.group(1).split()[8])


def loopback_bytes() -> int | None:
    """What ranks have sent each other so far, all of them having come to rest here; None where it goes another way."""
    nccl = torch.cuda.is_initialized()
    if not dist.is_initialized() or dist.get_world_size() == 1 or (nccl and os.environ.get(IFNAME) != "lo"):
        return None
    if nccl:
        torch.cuda.synchronize()
    dist.barrier()
    num_bytes = parse_sent_bytes(Path("/proc/net/dev").read_text())
    dist.barrier()
    return num_bytes


@contextmanager
def recorded_memory(path: str | None) -> Iterator[None]:
    """Writes what was allocated and freed meanwhile, with the stacks of whoever allocated it."""
    if path is None:
        yield
        return
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
    yield
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(None)


def run(system: str, workload: Workload, started: float, result: Path) -> None:
    rank = int(os.environ["RANK"])
    cuda = workload.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    start_group(system, device)

    shape, loss = PRESETS[workload.preset], None
    if workload.batch_chunks:
        from onefold import tiled_cross_entropy as loss
    torch.manual_seed(workload.seed)

    # Modules are built in fp32, and cast when all are built. Values of the largest models only fit in bf16.
    fits = not cuda or 4 * shape.num_parameters < 0.85 * torch.cuda.get_device_properties(device).total_memory

    def construct() -> GPT:
        torch.set_default_dtype(torch.float32 if fits else torch.bfloat16)
        try:
            with device:
                return GPT(shape, recompute=workload.recompute, loss=loss)
        finally:
            torch.set_default_dtype(torch.float32)

    snapshot = os.environ.get(SNAPSHOT) if cuda and rank == 0 else None
    if snapshot is not None:  # it then also says who allocated what was there before that step
        torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")
    step = SYSTEMS[system](construct, workload)

    def train(index: int) -> torch.Tensor:
        for micro_step in range(workload.micro_steps):
            data_seed = workload.seed + 1000 * (index * workload.micro_steps + micro_step) + rank
            loss = step(*make_batch(shape, workload.batch, workload.sequence, data_seed, device))
        return loss

    num_all_steps = workload.num_warmup_steps + workload.num_steps
    marks: list[float] | list[torch.cuda.Event] = []
    losses: list[torch.Tensor] = []
    startup_seconds = startup_gpu_mb = 0.0
    sent_before = None
    for index in range(num_all_steps):
        if index == workload.num_warmup_steps - 1:
            # One step before the timed ones: ranks that rest here are under way again when time starts.
            sent_before = loopback_bytes()
        with recorded_memory(snapshot if index == SNAPSHOT_STEP else None):
            losses.append(train(index))
        if index == 0:
            if cuda:
                torch.cuda.synchronize()
                startup_gpu_mb = torch.cuda.max_memory_allocated() / 2**20
                torch.cuda.reset_peak_memory_stats()
            startup_seconds = time.time() - started
        if index >= workload.num_warmup_steps - 1:
            marks.append(_mark(cuda))
    if cuda:
        torch.cuda.synchronize()
    sent_after = loopback_bytes()
    sent_mb = None
    if sent_before is not None and sent_after is not None:
        sent_mb = (sent_after - sent_before) / 1e6 / (workload.num_steps + 1) / dist.get_world_size()
    measured = {
        "num_parameters": shape.num_parameters,
        "num_active_parameters": shape.num_active_parameters,
        "step_seconds": [_between(marks[i], marks[i + 1]) for i in range(workload.num_steps)],
        "startup_seconds": startup_seconds,
        "resident_mb": peak_resident_mb(),
        "rest_mb": resident_mb(),
        "gpu_mb": torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0,
        "startup_gpu_mb": startup_gpu_mb,
        "sent_mb": sent_mb,
        "losses": [float(loss) for loss in losses],
    }
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    calls = Calls() if alone else count_calls(lambda: train(num_all_steps), device)
    # Before the engine is closed, which needs host memory for the parameters that it leaves with the model.
    result.write_text(json.dumps(measured | dataclasses.asdict(calls)))


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
    run(system, Workload(**json.loads(workload)), float(started), Path(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
