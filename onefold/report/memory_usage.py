"""Memory use of the device and of the process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from onefold.log import logger

GIB = 1 << 30


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the peak of the resident memory of this process."""
    return _status("VmHWM")


def peak_bytes(device: torch.device) -> int:
    """Return the peak of GPU memory, or of resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def used_bytes(device: torch.device) -> int:
    """Return the allocated GPU memory, or the resident memory on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log current and peak memory on the first rank. As in DeepSpeed, do nothing unless `force` is set."""
    if force:
        memory_status(message)


def memory_status(message: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log current and peak memory. `print_rank` -1 is the first rank. `reset_max` resets the peak."""
    has_device = torch.cuda.is_available()
    if not dist.is_initialized() or dist.get_rank() == max(print_rank, 0):
        line = f"host {resident_bytes() / GIB:.2f} GiB (peak {peak_resident_bytes() / GIB:.2f})"
        if has_device:
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            reserved = torch.cuda.memory_reserved()
            line = f"device {now / GIB:.2f} GiB (peak {peak / GIB:.2f}, reserved {reserved / GIB:.2f}), {line}"
        logger.info("%s | %s", message, line)
    if reset_max and has_device:
        torch.cuda.reset_peak_memory_stats()


def _status(field: str) -> int:
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))
    except OSError:
        import resource

        # Systems without /proc report only the peak, in KiB. (macOS reports bytes, but is not supported.)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
