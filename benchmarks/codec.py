"""The codec of quantized wires beside a copy of the same memory: `python -m benchmarks.codec`, on a CUDA device.

Times are medians of CUDA events around ten calls in a row, on buffers larger than any cache. A share of 1 reads and
writes its bytes as fast as `copy_` reads and writes its own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.table import describe_run, format_table
from onefold.comm.codec import Codec

IN_A_ROW = 10
HEADER = ["what", "ms", "GB moved", "GB/s", "share of a copy"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__)
    parser.add_argument("--values", type=int, default=1 << 28, help="bf16 values that are coded (default: 268M)")
    parser.add_argument("--peers", type=int, default=4, help="rows that are added in a reduction")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--report", type=Path, help="also write a dated report here")
    arguments = parser.parse_args()
    if arguments.values % (arguments.peers * 2048):
        parser.error("--values must be a multiple of 2,048 times --peers")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here")
    return arguments


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call among several in a row, so that the device never waits for its next launch."""
    for _ in range(IN_A_ROW):
        call()
    times = []
    for _ in range(repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(IN_A_ROW):
            call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1000 / IN_A_ROW)
    return statistics.median(times)


def measure(num: int, peers: int, repeats: int) -> list[tuple[str, float, int]]:
    """What was done, its seconds, and the bytes it reads and writes."""
    found = []
    values = torch.randn(1, num, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(values)
    found.append(("copy of bf16", seconds(lambda: other.copy_(values), repeats), 2 * values.nbytes))
    for codec in (Codec(8), Codec(4)):
        name, data = f"int{codec.bits}", codec.encode(values)
        moved = values.nbytes + data.nbytes
        found.append((f"bf16 to {name}", seconds(lambda c=codec, d=data: c.encode(values, d), repeats), moved))
        found.append((f"{name} to bf16", seconds(lambda c=codec, d=data: c.decode(d, other), repeats), moved))
        by_peer = values.view(-1, peers, num // peers // 4).transpose(0, 1)
        rows = codec.encode(by_peer)
        spent = seconds(lambda c=codec, b=by_peer, r=rows: c.encode(b, r), repeats)
        found.append((f"bf16 to {name}, rows in pieces", spent, moved))
        total = num // peers * 4
        spent = seconds(lambda c=codec, r=rows: c.add(r), repeats)
        found.append((f"{peers} rows of {name} added, to fp32", spent, rows.nbytes + total))
        out = codec.recode(rows, Codec(4), 2)
        spent = seconds(lambda c=codec, r=rows: c.recode(r, Codec(4), 2), repeats)
        found.append((f"{peers} rows of {name} added, to int4", spent, rows.nbytes + out.nbytes))
    return found


def main() -> None:
    arguments = parse_arguments()
    found = measure(arguments.values, arguments.peers, arguments.repeats)
    rates = [moved / spent for _, spent, moved in found]
    rows = [
        [what, f"{spent * 1000:.3f}", f"{moved / 1e9:.2f}", f"{rate / 1e9:.0f}", f"{rate / rates[0]:.2f}"]
        for (what, spent, moved), rate in zip(found, rates, strict=True)
    ]
    table = format_table(HEADER, rows)
    print(table)
    if arguments.report is not None:
        details = {"job": f"{arguments.values:,} values, medians of {arguments.repeats}"}
        header = describe_run("The codec of quantized wires beside a copy", "benchmarks.codec", details)
        arguments.report.write_text(f"{header}\n{table}\n")


if __name__ == "__main__":
    main()
