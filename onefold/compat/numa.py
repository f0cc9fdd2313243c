"""Cores of this node by memory node, and the `numactl` command that binds a rank to its share of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import pairwise


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each memory node by `numactl`; none if it is not installed."""
    try:
        lines = subprocess.check_output(["numactl", "--hardware"], text=True).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [[int(core) for core in line.split(":")[1].split()] for line in lines if " cpus:" in line]


def parse_range(rng: str) -> range:
    """Parse a number or a range, as in `3` or `2-6`."""
    first, dash, last = rng.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError(f"`{rng}`: a range must not end before its start")
    return found


def parse_range_list(range_str: str) -> list[int]:
    """Parse a list of ranges, as in `0,2-4,6`, into ascending numbers."""
    numbers = [number for part in range_str.split(",") for number in parse_range(part)]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise ValueError(f"`{range_str}`: ranges must ascend and not overlap")
    return numbers


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return the cores of a rank and the prefix of its command, as far as this container may bind cores."""
    if shutil.which("numactl") is None:
        raise ValueError("binding ranks to cores needs numactl, which is not installed")
    if "KMP_AFFINITY" in os.environ:
        raise ValueError("KMP_AFFINITY contradicts numactl. Unset it.")
    cores = parse_range_list(bind_core_list) if bind_core_list is not None else sorted(os.sched_getaffinity(0))
    share = len(cores) // num_local_procs
    assert share >= 1, f"{len(cores)} cores for {num_local_procs} ranks: each needs at least one"
    own = cores[share * local_rank : share * (local_rank + 1)]
    nodes = [node for node, inside in enumerate(get_numa_cores()) if set(own) & set(inside)]
    memory = ["-m", ",".join(map(str, nodes))] if nodes else []
    for options in ([*memory, "-C", _as_ranges(own)], ["-C", _as_ranges(own)]):
        tried = subprocess.run(["numactl", *options, "true"], capture_output=True, text=True)
        if tried.returncode == 0:
            return share, ["numactl", *options]
        if "not permitted" not in tried.stderr:
            raise RuntimeError(f"numactl {' '.join(options)}: {tried.stderr.strip()}")
    return share, []


def _as_ranges(cores: Sequence[int]) -> str:
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
