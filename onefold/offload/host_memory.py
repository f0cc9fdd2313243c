"""The host tier: page-locked memory in one allocation of exact size, and the memory that is available.

torch rounds page-locked allocations up to a power of two and locks them page by page. Here all cores touch the pages,
which are then locked by one call. This is about twice as fast and allocates no extra byte.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

# In bytes. O_DIRECT requires offset, length and address to be multiples of the drive's block, which is never larger.
PAGE = 4096


class HostShortage(MemoryError):
    """The host has too little memory for the model state that the plan offloads."""


class _Block(mmap.mmap):
    """Anonymous, zeroed memory of whole pages. It is unlocked and freed with the last tensor that uses it."""

    locked: int | None = None

    def __del__(self) -> None:
        if self.locked is not None:
            torch.cuda.cudart().cudaHostUnregister(self.locked)


def page_aligned(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Allocate zeroed bytes that start at a page boundary, page-locked if `pinned`."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Only private mappings get huge pages, which a step over many gigabytes needs.
    block = _Block(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    if pinned:
        memory.zero_()  # touches every page, on all cores
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            raise HostShortage(
                f"page-locking {num_bytes / 1e9:.1f} GB of host memory failed: {error}. Set pin_memory to false."
            )
        block.locked = memory.data_ptr()
    return memory


class Arena:
    """Host memory of exact size that is allocated piece by piece and never freed.

    Pieces of whole pages are taken from its start, so they are page-aligned. Others, such as the scales of quantized
    states, are taken from its end.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self._memory = page_aligned(num_bytes, pinned=pinned)
        self._used, self._left = 0, num_bytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor."""
        size = numel * dtype.itemsize
        assert self._used + size <= self._left, "the plan counts every byte that is taken"
        if size % PAGE:
            self._left -= size
            return self._memory[self._left : self._left + size].view(dtype)
        self._used += size
        return self._memory[self._used - size : self._used].view(dtype)


def available_bytes() -> int:
    """Return the available host memory, limited by the control group of this process."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if free is None:
        raise RuntimeError("/proc/meminfo has no MemAvailable")
    limit = _cgroup_left()
    return free if limit is None else min(free, limit)


def check_room(needed: int, what: str, num_ranks: int, ratio: float | None = None) -> None:
    """Raise if the ranks of this node need more host memory than is available.

    `ratio` is the fraction of states that the config offloads, if it is set.
    """
    free = available_bytes()
    if needed * num_ranks > free:
        ranks = f" x {num_ranks} ranks on this node = {needed * num_ranks / 1e9:.2f} GB" if num_ranks > 1 else ""
        fits = f" of about {math.floor(100 * ratio * free / (needed * num_ranks)) / 100}" if ratio is not None else ""
        raise HostShortage(
            f"offloading needs {needed / 1e9:.2f} GB of host memory{ranks}, but {free / 1e9:.2f} GB are available: "
            f'{what}. Offload less (zero_optimization.offload_optimizer.ratio{fits}, or "auto"), use more ranks, or '
            "store states on disk (offload_optimizer.device nvme)."
        )


def _cgroup_left() -> int | None:
    """Return the bytes left under the memory limit of a container, or None without a limit.

    Inactive page cache counts as free, because the kernel reclaims it first.
    """
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
