"""Memory in use: of the device where there is one, of the process everywhere."""

from __future__ import annotations

import torch
import torch.distributed as dist

from onefold.log import logger

GIB = 1 << 30


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most resident memory this process has had."""
    return _status("VmHWM")


def peak_bytes(device: torch.device) -> int:
    """The peak of what the ranks compete for: GPU memory on a GPU, resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def used_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log memory now and at its peak, on the first rank. As in DeepSpeed, silent unless `force`."""
    if force:
        memory_status(message)


def memory_status(message: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log memory now and at its peak; `print_rank` -1 means the first rank. `reset_max` starts the peak anew."""
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

        # Systems without /proc report the peak alone, in KiB (macOS in bytes, which is no platform of ours).
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
