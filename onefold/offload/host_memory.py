"""The host tier: page-locked memory in one piece of exact size, and what is left of the machine's.

torch rounds page-locked allocations up to a power of two, and locks them page by page as it goes. Here the pages are
touched by all cores at once and then locked with one call: about twice as fast, and not a byte too many.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

# Bytes: O_DIRECT wants offset, length and memory on a multiple of the drive's block, which is never larger.
PAGE = 4096


class HostShortage(MemoryError):
    """The host has too little memory for what a plan puts there; the message has the arithmetic."""


class _Block(mmap.mmap):
    """Anonymous memory, whole pages, zero. Tensors hold it; with the last of them it is unlocked and given back."""

    locked: int | None = None

    def __del__(self) -> None:
        if self.locked is not None:
            torch.cuda.cudart().cudaHostUnregister(self.locked)


def page_aligned(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Bytes that start at a page, all zero; page-locked for the GPU where `pinned`."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Private, not shared: only that memory comes in huge pages, which a step over many gigabytes needs.
    block = _Block(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    if pinned:
        memory.zero_()  # touches every page, on all cores
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            raise HostShortage(f"locking {num_bytes / 1e9:.1f} GB of host memory failed: {error}. pin_memory: false")
        block.locked = memory.data_ptr()
    return memory


class Arena:
    """Host memory of exact size, handed out piece by piece and never taken back: whole pages from its start, each at a
    page, and from its end what is no whole number of pages, as bytes and scales of encoded states may be.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self._memory = page_aligned(num_bytes, pinned=pinned)
        self._used, self._left = 0, num_bytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = numel * dtype.itemsize
        assert self._used + size <= self._left, "the plan counts every byte that is taken"
        if size % PAGE:
            self._left -= size
            return self._memory[self._left : self._left + size].view(dtype)
        self._used += size
        return self._memory[self._used - size : self._used].view(dtype)


def available_bytes() -> int:
    """Host memory that this process could still have: the machine's, or what its control group leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if free is None:
        raise RuntimeError("/proc/meminfo has no MemAvailable")
    limit = _cgroup_left()
    return free if limit is None else min(free, limit)


def check_room(needed: int, what: str, num_ranks: int, ratio: float | None = None) -> None:
    """Raise before the first byte is taken where the ranks of this host want more than there is. `ratio`: the share of
    states that is offloaded, as the config says.
    """
    free = available_bytes()
    if needed * num_ranks > free:
        ranks = f" x {num_ranks} ranks on this host = {needed * num_ranks / 1e9:.2f} GB" if num_ranks > 1 else ""
        fits = f" of about {math.floor(100 * ratio * free / (needed * num_ranks)) / 100}" if ratio is not None else ""
        raise HostShortage(
            f"offloading needs {needed / 1e9:.2f} GB of host memory{ranks}, and {free / 1e9:.2f} GB are available: "
            f'{what}. Offload less (zero_optimization.offload_optimizer.ratio{fits}, or "auto"), use more ranks, or '
            "let states rest on a disk (offload_optimizer.device nvme)"
        )


def _cgroup_left() -> int | None:
    """What a container's memory limit leaves; cache counts as free, since it is given up first."""
    root = Path("/sys/fs/cgroup")
    for limit, used, stat in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes", root / "memory/memory.stat"),
    ):
        try:
            most, now = limit.read_text().strip(), int(used.read_text())
            cache = dict(line.split() for line in stat.read_text().splitlines()).get("inactive_file", "0")
        except (OSError, ValueError):
            continue
        if most == "max" or int(most) > 1 << 60:
            return None
        return int(most) - now + int(cache)
    return None
