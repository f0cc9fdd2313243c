"""What was allocated on a GPU when most of it was: `python -m benchmarks.peak SNAPSHOT`.

A snapshot (`python -m benchmarks.gpu --snapshot FOLDER`) holds the events of one step and what was there at
its end: replayed, they tell what was there at each event, and the stacks who asked for it.
"""

from __future__ import annotations

import argparse
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import format_table

# Who is asked for: the innermost frame of these, whatever torch did for it.
_OURS = re.compile(r"(?:.*/)?((?:onefold|benchmarks|torch/distributed/fsdp)/(?!.*-packages/).*)")
NOBODY = "no such frame (autograd's own)"


@dataclass(frozen=True)
class Allocation:
    size: int
    where: str
    before: bool
    """It was there when the step began."""


def where(noted: dict[str, Any]) -> str:
    """The innermost frame of ours, as file:line and function; frames come innermost first."""
    for frame in noted.get("frames", []):
        found = _OURS.fullmatch(frame["filename"])
        if found:
            return f"{found.group(1)}:{frame['line']} {frame['name']}"
    return NOBODY


def at_peak(snapshot: dict[str, Any], device: int) -> list[Allocation]:
    """What was there when it was most."""
    events = [event for event in snapshot["device_traces"][device] if event["action"] in ("alloc", "free_requested")]
    live = _live_before(snapshot, device, events)
    total = most = sum(each.size for each in live.values())
    num_until_peak = 0
    for number, event in enumerate(events, start=1):
        total += event["size"] if event["action"] == "alloc" else -event["size"]
        if total > most:
            most, num_until_peak = total, number
    for event in events[:num_until_peak]:
        if event["action"] == "alloc":
            live[event["addr"]] = Allocation(event["size"], where(event), before=False)
        else:
            del live[event["addr"]]
    return list(live.values())


def _live_before(snapshot: dict[str, Any], device: int, events: list[dict[str, Any]]) -> dict[int, Allocation]:
    """What was there when the events begin: freed by them, or there at the end and never touched; by address."""
    live: dict[int, Allocation] = {}
    seen: set[int] = set()
    for event in events:
        if event["action"] == "free_requested" and event["addr"] not in seen:
            live[event["addr"]] = Allocation(event["size"], where(event), before=True)
        seen.add(event["addr"])
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == device else []:
            if block["state"] == "active_allocated" and block["address"] not in seen:
                live[block["address"]] = Allocation(block["requested_size"], where(block), before=True)
    return live


def describe_peak(snapshot: dict[str, Any], top: int) -> str:
    traces = snapshot["device_traces"]
    peak = at_peak(snapshot, max(range(len(traces)), key=lambda device: len(traces[device])))
    groups: dict[tuple[str, bool], list[int]] = {}
    for each in peak:
        groups.setdefault((each.where, each.before), []).append(each.size)
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))
    rows = [
        [spot, "before the step" if before else "in it", f"{sum(sizes) / 2**20:.1f}", str(len(sizes))]
        for (spot, before), sizes in largest[:top]
    ]
    rest = [size for _, sizes in largest[top:] for size in sizes]
    if rest:
        rows.append([f"{len(largest) - top} more", "", f"{sum(rest) / 2**20:.1f}", str(len(rest))])
    whole, before = sum(each.size for each in peak), sum(each.size for each in peak if each.before)
    header = f"{whole / 2**20:.1f} MiB at the peak, {before / 2**20:.1f} MiB of it from before the step"
    return f"{header}\n\n" + format_table(["allocated by", "when", "MiB", "blocks"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak", description=__doc__)
    parser.add_argument("snapshot", type=Path, nargs="+")
    parser.add_argument("--top", type=int, default=25)
    arguments = parser.parse_args()
    for path in arguments.snapshot:
        print(f"{path.name}: {describe_peak(pickle.loads(path.read_bytes()), arguments.top)}\n")


if __name__ == "__main__":
    main()
