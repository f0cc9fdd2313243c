"""How much of what stage 3 gathers runs under compute, out of a trace: `python -m benchmarks.overlap`.

One CUDA device, world size 1: a gather is the cast of a unit's masters on a stream of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.model import GPT, PRESETS, make_batch
from benchmarks.systems import SYSTEMS, Workload

Span = tuple[float, float]


def record(system: str, preset: str, path: Path) -> None:
    """Three steps of a system, traced."""
    shape = PRESETS[preset]
    workload = Workload(preset, "bf16", 8, shape.max_sequence, 3, 3, "cuda")
    device = torch.device("cuda", 0)
    if not dist.is_initialized():
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1, device_id=device)

    def construct() -> GPT:
        with device:
            return GPT(shape)

    step = SYSTEMS[system](construct, workload)
    data = [make_batch(shape, workload.batch, workload.sequence, seed, device) for seed in range(6)]
    for tokens, targets in data[:3]:
        step(tokens, targets)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for tokens, targets in data[3:]:
            step(tokens, targets)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def streams(trace: dict[str, Any]) -> dict[int, list[Span]]:
    """When each stream was busy, in microseconds."""
    found: dict[int, list[Span]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    return {stream: sorted(spans) for stream, spans in found.items()}


def shared(one: list[Span], other: list[Span]) -> float:
    """Time in which both were busy."""
    total, place = 0.0, 0
    for start, stop in one:
        while place < len(other) and other[place][1] <= start:
            place += 1
        look = place
        while look < len(other) and other[look][0] < stop:
            total += min(stop, other[look][1]) - max(start, other[look][0])
            look += 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="1.3b")
    parser.add_argument("--systems", default="onefold-3,onefold-3-ahead")
    parser.add_argument("--keep", type=Path, help="a folder for the traces (chrome://tracing, Perfetto)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for system in arguments.systems.split(","):
            path = (arguments.keep or Path(folder)) / f"{system}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            record(system, arguments.preset, path)
            busy = streams(json.loads(path.read_text()))
            compute = max(busy, key=lambda stream: sum(stop - start for start, stop in busy[stream]))
            gathers = [span for stream, spans in busy.items() if stream != compute for span in spans]
            spent = sum(stop - start for start, stop in gathers)
            under = shared(sorted(gathers), busy[compute])
            print(
                f"{system}: {len(gathers)} operations on other streams, {spent / 3e3:.2f} ms a step, "
                f"{100 * under / max(spent, 1e-9):.0f}% of it under compute",
                flush=True,
            )


if __name__ == "__main__":
    main()
