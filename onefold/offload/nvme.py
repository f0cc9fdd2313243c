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

With several folders, requests also end where another folder begins ([Note: stripes]). Each drive has its own threads,
so that a transfer uses all drives at the same time.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import torch

from onefold.config import Aio
from onefold.offload.drive import MEASURED_BYTES, Drive, HostRange, Operation, measure_rates
from onefold.offload.host_memory import PAGE, page_aligned
from onefold.offload.stripes import Stripes
from onefold.offload.swap_folder import SwapFolder, check_space
from onefold.recorder import Recorder, Span, Track, carrying

# A request is split into several commands of the drive, so more threads would only wait for each other.
_MAX_THREADS = 64


class Transfer:
    """A read or write in progress. The host tensor must not be used until `wait` has returned."""

    def __init__(self, request: Callable[[int, int], None]) -> None:
        self._request = request
        self._next, self._failed = threading.Lock(), False
        self._lanes: list[futures.Future[None]] = []

    def start(self, threads: futures.Executor, num_lanes: int, ranges: Iterator[tuple[int, int]]) -> None:
        """Start the requests of one drive."""
        self._lanes += [threads.submit(self._run, ranges) for _ in range(num_lanes)]

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

    def _run(self, ranges: Iterator[tuple[int, int]]) -> None:
        while True:
            with self._next:
                found = None if self._failed else next(ranges, None)
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

    def __init__(self, swap: SwapFiles, dtype: torch.dtype, address: int, numel: int, tensor_end: int) -> None:
        self._swap, self._address, self._numel, self._tensor_end = swap, address, numel, tensor_end
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
        address = self._address + begin * self.itemsize
        return DiskTensor(self._swap, self.dtype, address, max(0, end - begin), self._tensor_end)

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
    """The swap files of one rank in one or several folders.

    `count` is called with "read" or "write" and the number of bytes, on the thread that starts the transfer. `rates`
    has the bytes per second of file systems by `st_dev`. Those that are needed and missing are measured and added.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        aio: Aio,
        rank: int,
        count: Callable[[str, int], None],
        rates: dict[int, float] | None = None,
    ) -> None:
        assert paths, "a swap needs a path"
        self._drives = [Drive(SwapFolder(os.path.abspath(path), rank)) for path in paths]
        self._count, self._overlaps = count, aio.overlap_events
        self._rates = {} if rates is None else rates
        self._block = aio.block_size + -aio.block_size % PAGE
        # A thread blocks in its request, so there is one thread per request in flight: `queue_depth` for each thread
        # that DeepSpeed would use. Each drive has separate threads for reads and for writes.
        self._num_threads = min(aio.queue_depth * aio.intra_op_parallelism, _MAX_THREADS)
        self._num_lanes = 1 if aio.single_submit else self._num_threads
        self._threads: dict[tuple[Drive, Operation], futures.ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._is_open = False
        self._of_thread = threading.local()
        self._stripes = Stripes(self._block)
        # Bytes on disk, including padding.
        self.num_bytes = 0
        # This also runs at interpreter exit, when the threads have ended. It references only the folders.
        self._remove = weakref.finalize(self, _remove_all, [drive.folder for drive in self._drives])

    @property
    def num_bytes_in_folders(self) -> dict[str, int]:
        """The bytes in each folder, once the files are open."""
        return {drive.folder.path: drive.num_bytes for drive in self._drives}

    def reserve(self, numel: int, dtype: torch.dtype) -> DiskTensor:
        """Reserve space for a tensor, before `open`."""
        assert not self._is_open, "reserve before open"
        address, size = self.num_bytes, numel * dtype.itemsize
        self.num_bytes += size + -size % PAGE
        return DiskTensor(self, dtype, address, numel, address + size)

    def open(self) -> None:
        """Divide the bytes among the folders, and create the files at their full size."""
        assert not self._is_open, "already open"
        assert self._remove.alive, "closed for good"
        folders = [drive.folder for drive in self._drives]
        for folder in folders:
            folder.prepare()
        try:
            self._stripes = Stripes.in_proportion(self._rates_of_folders(), self._block)
            divided = self._stripes.num_bytes(self.num_bytes)
            for index, drive in enumerate(self._drives):
                drive.num_bytes = divided[index]
            used = [(drive.folder, drive.num_bytes) for drive in self._drives if drive.num_bytes]
            check_space(used)
            for folder, num_bytes in used:
                folder.make(num_bytes)
                folder.warn_if_cached()
        except BaseException:
            _remove_all(folders)
            raise
        self._is_open = True

    def _rates_of_folders(self) -> list[float]:
        """Return the rate of each folder. Folders on one file system share its rate, and need no measurement."""
        devices = [os.stat(drive.folder.path).st_dev for drive in self._drives]
        if len(set(devices)) == 1:
            return [1.0] * len(devices)
        missing = {
            device: drive
            for device, drive in zip(devices, self._drives, strict=True)
            if device not in self._rates and self.num_bytes
        }
        if missing:
            region = min(self.num_bytes, MEASURED_BYTES) // self._block * self._block or self._block
            for drive in missing.values():
                drive.folder.make(region)
            found = measure_rates([*missing.values()], region, self._block, self._num_threads)
            self._rates.update(zip(missing, found, strict=True))
            _remove_all([drive.folder for drive in missing.values()])
        return [self._rates.get(device, 1.0) / devices.count(device) for device in devices]

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
        begin, end = tensor._address, tensor._address + tensor.nbytes
        transfer = Transfer(functools.partial(self._request, operation, tensor, host, HostRange.of(host)))
        num_lanes = min(self._num_lanes, -(-tensor.nbytes // self._block))
        recorder, span = Recorder.active, None
        if recorder is not None:
            span = recorder.start(Track.DISK, operation, details={"elements": tensor.numel()}, by_host=True)
        for index in self._stripes.folders_of(begin, end):
            transfer.start(self._threads_of(index, operation), num_lanes, self._ranges(begin, end, index))
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

    def _threads_of(self, index: int, operation: Operation) -> futures.Executor:
        key = self._drives[index], operation
        with self._lock:  # host and device may step concurrently
            if key not in self._threads:
                self._threads[key] = futures.ThreadPoolExecutor(self._num_threads, thread_name_prefix="onefold-swap")
            return self._threads[key]

    def _ranges(self, begin: int, end: int, index: int) -> Iterator[tuple[int, int]]:
        """Yield the requests of a transfer that belong to one drive."""
        page = max(drive.page for drive in self._drives)
        for found in _cut(begin, end, self._block, page, self._stripes):
            if self._stripes.locate(found[0])[0] == index:
                yield found

    def _request(
        self, operation: Operation, tensor: DiskTensor, host: torch.Tensor, memory: HostRange, begin: int, end: int
    ) -> None:
        """Transfer one range of addresses. `host` is an argument to keep the memory of `memory` alive."""
        index, offset = self._stripes.locate(begin)
        part = memory.part(begin - tensor._address, end - tensor._address)
        self._drives[index].move(operation, part, offset, self._bounce, ends_tensor=end == tensor._tensor_end)

    def _bounce(self) -> HostRange:
        """Return the bounce buffer of this thread."""
        if not hasattr(self._of_thread, "block"):
            self._of_thread.tensor = page_aligned(self._block)
            self._of_thread.block = HostRange.of(self._of_thread.tensor)
        block: HostRange = self._of_thread.block
        return block


def _cut(begin: int, end: int, block: int, page: int, stripes: Stripes) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most a block in one folder. They end at page boundaries; partial pages are separate ranges."""
    while begin < end:
        if begin % page or end - begin < page:
            stop = min(end, begin - begin % page + page)
        else:
            stop = min(begin + block, end - end % page, stripes.end_of_run(begin))
        yield begin, stop
        begin = stop


def _remove_all(folders: Sequence[SwapFolder]) -> None:
    for folder in folders:
        folder.remove()
