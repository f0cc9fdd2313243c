"""The NVMe tier beside dd, both with O_DIRECT, on one disk, taking turns: `python -m benchmarks.disk --path DIR`."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.table import describe_run, format_table
from onefold.config import Aio
from onefold.offload.host_memory import page_aligned
from onefold.offload.nvme import SwapFiles

HEADER = ["", "onefold GB/s", "dd GB/s", "onefold / dd"]
_NUM_TENSORS = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=__doc__)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    parser.add_argument("--size", type=float, default=1.0, help="GB that each pass moves")
    parser.add_argument("--rounds", type=int, default=5, help="passes each way of each; medians are compared")
    parser.add_argument("--report", type=Path, help="also write a dated report here")
    return parser.parse_args()


def rate(work: Callable[[], object], num_bytes: int) -> float:
    start = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - start) / 1e9


def dd(*arguments: str) -> Callable[[], object]:
    return lambda: subprocess.run(["dd", "bs=8M", *arguments], check=True, capture_output=True)


def measure(path: Path, size: float, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(ours, dd's) of each round, by way."""
    block = 8 << 20
    num_blocks = max(_NUM_TENSORS, round(size * 1e9 / block))
    num_bytes = num_blocks * block
    path.mkdir(parents=True, exist_ok=True)
    swap = SwapFiles([str(path)], aio=Aio(), rank=0, count=lambda _way, _num_bytes: None)
    lengths = [len(part) for part in torch.arange(num_blocks).tensor_split(_NUM_TENSORS)]
    tensors = [swap.reserve(length * block, torch.uint8) for length in lengths]
    memory = page_aligned(num_bytes).random_(0, 256).split([length * block for length in lengths])
    swap.open()
    found: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}

    def move(way: str) -> None:
        pairs = list(zip(tensors, memory, strict=True))
        for transfer in [t.start_store(m) if way == "write" else t.start_load(m) for t, m in pairs]:
            transfer.wait()

    with tempfile.NamedTemporaryFile(dir=path, prefix="onefold-dd-") as other:
        commands = {
            "write": dd("if=/dev/zero", f"of={other.name}", f"count={num_blocks}", "oflag=direct", "conv=notrunc"),
            "read": dd(f"if={other.name}", "of=/dev/null", "iflag=direct"),
        }
        try:
            for number in range(rounds + 1):
                for way, command in commands.items():
                    pair = rate(lambda way=way: move(way), num_bytes), rate(command, num_bytes)  # type: ignore[misc]
                    if number:  # the first makes dd's file and warms everything up
                        found[way].append(pair)
        finally:
            swap.close()
    return found


def main() -> None:
    arguments = parse_arguments()
    found = measure(arguments.path, arguments.size, arguments.rounds)
    rows = []
    for way, pairs in found.items():
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append([way, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"])
    table = format_table(HEADER, rows)
    print(table)
    if arguments.report:
        details = {"job": f"{arguments.size} GB a pass, median of {arguments.rounds}, taking turns; dd bs=8M, O_DIRECT"}
        header = describe_run("The NVMe tier beside dd", "benchmarks.disk", details)
        arguments.report.write_text(f"{header}\n{table}\n")


if __name__ == "__main__":
    main()
