"""Flat tensors in files on NVMe drives, read and written by threads with O_DIRECT.

[Note: requests]
A transfer is split into requests of `aio.block_size` bytes, at page boundaries of the file. Each thread performs one
request at a time with preadv or pwritev, which release the GIL. `aio.queue_depth` threads keep as many requests in
flight. A thread works on one transfer until none of its requests is left, so transfers finish in the order in which
they were started, and a request needs no future and no wake-up.

O_DIRECT copies between the drive and whole pages of memory. If file range and memory are page-aligned, a request uses
them directly. Otherwise it uses a bounce buffer of its thread. A page that belongs only partly to a slice is a separate
request: a store reads the page, changes its part and writes it back. A lock per drive serializes such requests, so two
slices that share a page can be stored at the same time. The last page of a reserved tensor is never shared.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from onefold.config import Aio
from onefold.offload.host_memory import PAGE, page_aligned
from onefold.offload.swap_folder import SwapFolder, check_space
from onefold.recorder import Recorder, Span, Track, carrying

# A request is split into several commands of the drive, so more threads would only wait for each other.
_MAX_THREADS = 64

Operation = Literal["read", "write"]


class SwapError(OSError):
    """A failed read or write of a swapped tensor. `errno` and `filename` have the cause and the file."""

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class _Memory:
    """A range of host memory, as a buffer for system calls and as an address."""

    buffer: memoryview
    address: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Memory:
        address = tensor.data_ptr()
        return _Memory(memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(address)), address)

    def part(self, begin: int, end: int) -> _Memory:
        return _Memory(self.buffer[begin:end], self.address + begin)

    def __len__(self) -> int:
        return len(self.buffer)


class _Drive:
    """The swap file on one of the paths."""

    def __init__(self, folder: SwapFolder) -> None:
        self.folder = folder
        self.num_bytes = 0
        self._shared_page = threading.Lock()

    @property
    def page(self) -> int:
        return PAGE if self.folder.direct else 1  # The page cache needs no alignment.

    def move(
        self, operation: Operation, memory: _Memory, offset: int, bounce: Callable[[], _Memory], tensor_end: int
    ) -> None:
        """Perform one request, through a bounce buffer unless file range and memory are page-aligned."""
        if (offset | len(memory) | memory.address) % self.page == 0:
            self._whole(operation, memory.buffer, offset)
            return
        last = offset + len(memory)
        begin, end = offset - offset % self.page, last + -last % self.page
        block = bounce()
        pages, inside = block.buffer[: end - begin], block.address + offset - begin
        if operation == "read":
            self._whole("read", pages, begin)
            ctypes.memmove(memory.address, inside, len(memory))
            return
        is_shared = begin < offset or (last < end and last != tensor_end)
        with self._shared_page if is_shared else nullcontext():
            if is_shared:
                self._whole("read", pages, begin)
            ctypes.memmove(inside, memory.address, len(memory))
            self._whole("write", pages, begin)

    def _whole(self, operation: Operation, buffer: memoryview, offset: int) -> None:
        """Perform one request of whole pages, and continue after partial transfers."""
        call = os.preadv if operation == "read" else os.pwritev
        done, size = 0, len(buffer)
        while done < size:
            try:
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


class Transfer:
    """A read or write in progress. The host tensor must not be used until `wait` has returned."""

    def __init__(self, request: Callable[[int, int], None], ranges: Iterator[tuple[int, int]]) -> None:
        self._request, self._ranges = request, ranges
        self._next, self._failed = threading.Lock(), False
        self._lanes: list[futures.Future[None]] = []

    def start(self, threads: futures.Executor, num_lanes: int) -> None:
        self._lanes = [threads.submit(self._run) for _ in range(num_lanes)]

    def finish_span(self, span: Span) -> None:
        """End the span with the last request."""
        for lane in self._lanes:
            lane.add_done_callback(lambda _: span.finish())

    @property
    def is_done(self) -> bool:
        return all(lane.done() for lane in self._lanes)

    def finish(self) -> None:
        """Block until the transfer no longer accesses the host tensor, even if it failed."""
        futures.wait(self._lanes)

    def wait(self) -> None:
        """Block until the transfer is done. Raise SwapError if a request failed."""
        self.finish()
        for lane in self._lanes:
            lane.result()

    def _run(self) -> None:
        while True:
            with self._next:
                found = None if self._failed else next(self._ranges, None)
            if found is None:
                return
            try:
                self._request(*found)
            except BaseException:
                self._failed = True  # Requests in flight are completed, and no more are started.
                raise


class DiskTensor:
    """A flat tensor on disk, or a slice of one. It is zero until it is first stored.

    Transfers of one range are not ordered: wait for the first one before starting the second.
    """

    is_cuda = False

    def __init__(
        self, swap: SwapFiles, drive: _Drive, dtype: torch.dtype, offset: int, numel: int, tensor_end: int
    ) -> None:
        self._swap, self._drive, self._offset, self._numel, self._tensor_end = swap, drive, offset, numel, tensor_end
        self.dtype = dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._numel * self.itemsize

    def numel(self) -> int:
        return self._numel

    def __getitem__(self, index: slice) -> DiskTensor:
        begin, end, step = index.indices(self._numel)
        if step != 1:
            raise ValueError(f"slices of a tensor on disk must be contiguous, not step {step}")
        offset = self._offset + begin * self.itemsize
        return DiskTensor(self._swap, self._drive, self.dtype, offset, max(0, end - begin), self._tensor_end)

    def split(self, num_elements: int) -> list[DiskTensor]:
        """Split the tensor like `torch.split`: the last slice may be shorter."""
        return [self[begin : begin + num_elements] for begin in range(0, self._numel, num_elements)]

    def start_load(self, target: torch.Tensor) -> Transfer:
        return self._swap._start("read", self, target)

    def start_store(self, source: torch.Tensor) -> Transfer:
        return self._swap._start("write", self, source)

    def load(self, out: torch.Tensor | None = None) -> torch.Tensor:
        target = page_aligned(self.nbytes).view(self.dtype) if out is None else out
        self.start_load(target).wait()
        return target

    def store(self, source: torch.Tensor) -> None:
        self.start_store(source).wait()


class SwapFiles:
    """The swap files of one rank on one or several drives.

    `count` is called with "read" or "write" and the number of bytes, on the thread that starts the transfer.
    """

    def __init__(self, paths: Sequence[str], *, aio: Aio, rank: int, count: Callable[[str, int], None]) -> None:
        assert paths, "a swap needs a path"
        self._drives = [_Drive(SwapFolder(os.path.abspath(path), rank)) for path in paths]
        self._count, self._overlaps = count, aio.overlap_events
        self._block = aio.block_size + -aio.block_size % PAGE
        # A thread blocks in its request, so there is one thread per request in flight: `queue_depth` for each thread
        # that DeepSpeed would use. Each drive has separate threads for reads and for writes.
        self._num_threads = min(aio.queue_depth * aio.intra_op_parallelism, _MAX_THREADS)
        self._num_lanes = 1 if aio.single_submit else self._num_threads
        self._threads: dict[tuple[_Drive, Operation], futures.ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._is_open = False
        self._of_thread = threading.local()
        self._num_reserved = 0
        # This also runs at interpreter exit, when the threads have ended. It references only the folders.
        self._remove = weakref.finalize(self, _remove_all, [drive.folder for drive in self._drives])

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, including padding."""
        return sum(drive.num_bytes for drive in self._drives)

    def reserve(self, numel: int, dtype: torch.dtype) -> DiskTensor:
        """Reserve space for a tensor, before `open`. Successive tensors are placed on successive drives."""
        assert not self._is_open, "reserve before open"
        drive = self._drives[self._num_reserved % len(self._drives)]
        self._num_reserved += 1
        offset, size = drive.num_bytes, numel * dtype.itemsize
        drive.num_bytes += size + -size % PAGE
        return DiskTensor(self, drive, dtype, offset, numel, offset + size)

    def open(self) -> None:
        """Create the files at their full size, on drives with reserved tensors."""
        assert not self._is_open, "already open"
        assert self._remove.alive, "closed for good"
        used = [(drive.folder, drive.num_bytes) for drive in self._drives if drive.num_bytes]
        for folder, _ in used:
            folder.prepare()
        check_space(used)
        try:
            for folder, num_bytes in used:
                folder.make(num_bytes)
        except BaseException:
            _remove_all([folder for folder, _ in used])
            raise
        self._is_open = True

    def close(self) -> None:
        """Wait for transfers in progress, then remove files and folders."""
        for threads in self._threads.values():
            threads.shutdown()
        self._threads.clear()
        self._is_open = False
        self._remove()

    def _start(self, operation: Operation, tensor: DiskTensor, host: torch.Tensor) -> Transfer:
        assert self._is_open, "the swap is not open"
        if host.is_cuda or not host.is_contiguous() or host.dtype != tensor.dtype or host.numel() != tensor.numel():
            raise ValueError(
                f"a swap {operation} of {tensor.numel()} {tensor.dtype} needs a contiguous host tensor of that size "
                f"and dtype, not {host.numel()} {host.dtype} on {host.device}"
            )
        begin, end = tensor._offset, tensor._offset + tensor.nbytes
        request = functools.partial(self._request, operation, tensor, host, _Memory.of(host))
        transfer = Transfer(request, _cut(begin, end, self._block, tensor._drive.page))
        with self._lock:  # host and device may step concurrently
            if (tensor._drive, operation) not in self._threads:
                threads = futures.ThreadPoolExecutor(self._num_threads, thread_name_prefix="onefold-swap")
                self._threads[tensor._drive, operation] = threads
        num_lanes = min(self._num_lanes, -(-tensor.nbytes // self._block))
        recorder, span = Recorder.active, None
        if recorder is not None:
            span = recorder.start(Track.DISK, operation, details={"elements": tensor.numel()}, by_host=True)
        transfer.start(self._threads[tensor._drive, operation], num_lanes)
        with carrying(span):
            self._count(operation, tensor.nbytes)
        if span is not None:
            transfer.finish_span(span)
        if not self._overlaps:
            transfer.finish()
        return transfer

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache on every drive."""
        return all(drive.folder.direct for drive in self._drives if drive.num_bytes)

    def _request(
        self, operation: Operation, tensor: DiskTensor, host: torch.Tensor, memory: _Memory, begin: int, end: int
    ) -> None:
        """Transfer one range of the file. `host` is an argument to keep the memory at the address in `memory` alive."""
        part = memory.part(begin - tensor._offset, end - tensor._offset)
        tensor._drive.move(operation, part, begin, self._bounce, tensor._tensor_end)

    def _bounce(self) -> _Memory:
        """Return the bounce buffer of this thread."""
        if not hasattr(self._of_thread, "block"):
            self._of_thread.tensor = page_aligned(self._block)
            self._of_thread.block = _Memory.of(self._of_thread.tensor)
        block: _Memory = self._of_thread.block
        return block


def _cut(begin: int, end: int, block: int, page: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most a block that end at page boundaries. Partial pages are separate ranges."""
    while begin < end:
        if begin % page or end - begin < page:
            stop = min(end, begin - begin % page + page)
        else:
            stop = min(begin + block, end - end % page)
        yield begin, stop
        begin = stop


def _remove_all(folders: Sequence[SwapFolder]) -> None:
    for folder in folders:
        folder.remove()
