"""The swap file on one drive: single requests with O_DIRECT, and the rate of the drive.

[Note: rates of drives]
If the folders of `nvme_path` are on several file systems, `measure_rates` measures them when the files are created. It
uses the swap files, which are created anew afterwards. All drives are measured at the same time, because they share
buses and cores in a step too. Each first writes at most 64 MiB, so that reads find data, then writes and then reads
these for a quarter of a second, at most 1 GiB each. A step reads as many bytes as it writes, so the rate of a drive is
that of both. Folders on one file system share its rate in equal parts.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from onefold.disk_waits import waiting_for_disk
from onefold.log import logger
from onefold.offload.host_memory import PAGE, page_aligned
from onefold.offload.swap_folder import SwapFolder, unusable

Operation = Literal["read", "write"]

# Limits of the measurement of a drive: bytes of its file, seconds and bytes in each direction.
MEASURED_BYTES = 64 << 20
_MEASURED_SECONDS, _MAX_MEASURED_BYTES = 0.25, 1 << 30


class SwapError(OSError):
    """A failed read or write of a swapped tensor. `errno` and `filename` have the cause and the file."""

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class HostRange:
    """A range of host memory, as a buffer for system calls and as an address."""

    buffer: memoryview
    address: int

    @staticmethod
    def of(tensor: torch.Tensor) -> HostRange:
        address = tensor.data_ptr()
        return HostRange(memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(address)), address)

    def part(self, begin: int, end: int) -> HostRange:
        return HostRange(self.buffer[begin:end], self.address + begin)

    def __len__(self) -> int:
        return len(self.buffer)


class Drive:
    """The swap file on one of the paths."""

    def __init__(self, folder: SwapFolder) -> None:
        self.folder = folder
        self.num_bytes = 0
        self._shared_page = threading.Lock()

    @property
    def page(self) -> int:
        return PAGE if self.folder.direct else 1  # The page cache needs no alignment.

    def move(
        self,
        operation: Operation,
        memory: HostRange,
        offset: int,
        bounce: Callable[[], HostRange],
        *,
        ends_tensor: bool = False,
    ) -> None:
        """Perform one request, through a bounce buffer unless file range and memory are page-aligned.

        `ends_tensor`: the rest of the last page is padding, which may be overwritten.
        """
        if (offset | len(memory) | memory.address) % self.page == 0:
            self.whole(operation, memory.buffer, offset)
            return
        last = offset + len(memory)
        begin, end = offset - offset % self.page, last + -last % self.page
        block = bounce()
        pages, inside = block.buffer[: end - begin], block.address + offset - begin
        if operation == "read":
            self.whole("read", pages, begin)
            ctypes.memmove(memory.address, inside, len(memory))
            return
        is_shared = begin < offset or (last < end and not ends_tensor)
        with self._shared_page if is_shared else nullcontext():
            if is_shared:
                self.whole("read", pages, begin)
            ctypes.memmove(inside, memory.address, len(memory))
            self.whole("write", pages, begin)

    def whole(self, operation: Operation, buffer: memoryview, offset: int) -> None:
        """Perform one request of whole pages, and continue after partial transfers."""
        call = os.preadv if operation == "read" else os.pwritev
        done, size = 0, len(buffer)
        while done < size:
            try:
                with waiting_for_disk(f"the swap {operation} of", self.folder.data_path):
                    moved = call(self.folder.data_fd, [buffer[done:] if done else buffer], offset + done)
            except OSError as error:
                raise self._error(operation, error.errno or errno.EIO, error.strerror, offset, size) from error
            moved -= moved % self.page  # O_DIRECT can only continue at a page boundary.
            if not moved:
                raise self._error(operation, errno.EIO, "the file was truncated", offset, size)
            done += moved

    def _error(self, operation: Operation, number: int, reason: str | None, offset: int, size: int) -> SwapError:
        path = self.folder.data_path
        message = (
            f"swap {operation} of {size} bytes at byte {offset} of {path} failed: {reason}. The states of this job on "
            "disk are incomplete. Resume from the last checkpoint."
        )
        return SwapError(number, message, path)


def measure_rates(drives: Sequence[Drive], num_bytes: int, block: int, num_threads: int) -> list[float]:
    """Measure the bytes per second of each drive, all at once, in the first `num_bytes` of the files.

    See [Note: rates of drives].
    """
    # Drives may compress zeros. The program's random numbers do not change.
    noise, scratch = page_aligned(block).random_(0, 256, generator=torch.Generator()), page_aligned(block)
    with ThreadPoolExecutor(num_threads * len(drives), thread_name_prefix="onefold-swap") as threads:

        def measure(operation: Operation, max_bytes: int, seconds: float) -> list[float]:
            start = time.perf_counter()
            # The bytes that are read are not used, so all requests may share the memory.
            buffer = HostRange.of(noise if operation == "write" else scratch).buffer

            def lane(drive: Drive, addresses: Iterator[int]) -> tuple[int, float]:
                """Perform requests until a limit is reached. Return the bytes, and the time of the last one."""
                done, end = 0, start
                while (address := next(addresses)) < max_bytes and (not done or end - start < seconds):
                    try:
                        drive.whole(operation, buffer, address % num_bytes)
                    except SwapError as error:
                        cause = OSError(error.errno, os.strerror(error.errno or errno.EIO), error.filename)
                        raise unusable(drive.folder.path, cause) from error
                    done, end = done + block, time.perf_counter()
                return done, end

            lanes = []
            for drive in drives:
                addresses = itertools.count(0, block)
                lanes.append([threads.submit(lane, drive, addresses) for _ in range(num_threads)])
            found = [[each.result() for each in of_drive] for of_drive in lanes]
            return [sum(size for size, _ in each) / (max(end for _, end in each) - start) for each in found]

        measure("write", num_bytes, math.inf)
        written = measure("write", _MAX_MEASURED_BYTES, _MEASURED_SECONDS)
        read = measure("read", _MAX_MEASURED_BYTES, _MEASURED_SECONDS)
    for drive, write, load in zip(drives, written, read, strict=True):
        logger.info("nvme_path %s: reads %.2f GB/s, writes %.2f GB/s", drive.folder.path, load / 1e9, write / 1e9)
    return [2 / (1 / write + 1 / load) for write, load in zip(written, read, strict=True)]
