"""Windows of masters and states on NVMe: one is read ahead while one is updated and one is written back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from onefold.offload.buffer import Buffer
from onefold.offload.nvme import DiskTensor, Transfer
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.optim.pipeline import StateWindow
from onefold.optim.rules import MASTER
from onefold.plan import Tier
from onefold.plan.layout import SHARD_ALIGNMENT
from onefold.plan.state_formats import BLOCK
from onefold.recorder import within


@dataclass(frozen=True)
class Fetched:
    """Which buffers of a shard a window contains."""

    states: bool
    master: bool


STATES_ONLY, MASTERS_ONLY, EVERYTHING = Fetched(True, False), Fetched(False, True), Fetched(True, True)


@dataclass(frozen=True)
class _InFlight:
    """A window in a page-locked buffer, with the transfers that fill or empty it."""

    store: ShardStore
    memory: torch.Tensor
    window: StateWindow
    transfers: list[Transfer]

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()


class NvmeWindows:
    """Fetches the state of shards on NVMe into page-locked buffers, window by window, and stores it again."""

    def __init__(self, memory: OffloadMemory, stores: Sequence[ShardStore]) -> None:
        options = memory.options.optimizer
        per_block = max(sum(buffer[:BLOCK].nbytes for buffer in _buffers_of(store).values()) for store in stores)
        longest = max(store.stop - store.start for store in stores)
        self._size = min(longest, max(options.buffer_size // SHARD_ALIGNMENT, 1) * SHARD_ALIGNMENT)
        self._buffers = memory.buffers(options.buffer_count, self._size // BLOCK * per_block)
        self._ahead, self._behind = options.pipeline_read is not False, options.pipeline_write is not False
        self._queued: deque[tuple[ShardStore, int, int, Fetched]] = deque()
        self._reading: deque[_InFlight] = deque()
        self._writing: deque[_InFlight] = deque()

    def queue(self, stores: Sequence[ShardStore], fetched: Fetched) -> None:
        """Append the windows of the shards on NVMe to those that `windows` will fetch, in this order."""
        for store in stores:
            if store.state_tier is Tier.NVME:
                length = store.stop - store.start
                starts = range(0, length, self._size)
                self._queued.extend((store, start, min(start + self._size, length), fetched) for start in starts)

    def windows(self, store: ShardStore) -> Iterator[StateWindow]:
        """Iterate over the queued windows of a shard. Each is written back when the next is requested."""
        while self._next_is(store):
            while not self._reading:
                if not self._read_next():
                    self._finish_write()
            current = self._reading.popleft()
            while self._ahead and self._read_next():
                pass
            current.wait()
            try:
                yield current.window
            except GeneratorExit:  # the update raised
                self._buffers.give_back(current.memory)
                raise
            stores = [part.start_store(memory) for part, memory in _files_and_memory(store, current.window)]
            self._writing.append(replace(current, transfers=stores))
            if not self._behind:
                self._finish_write()
        # An all-gather reads the master's file if the master is the parameter shard. After the last shard of a step no
        # write may be in flight.
        is_last = not self._queued and not self._reading
        while self._writing and (store.separate_model_weight is None or is_last):
            self._finish_write()

    def abandon(self) -> None:
        """Wait for all transfers after an error, and drop the windows that were queued."""
        self._queued.clear()
        for each in (*self._reading, *self._writing):
            for transfer in each.transfers:
                transfer.finish()
            self._buffers.give_back(each.memory)
        self._reading.clear()
        self._writing.clear()

    def _next_is(self, store: ShardStore) -> bool:
        if self._reading:
            return self._reading[0].store is store
        return bool(self._queued) and self._queued[0][0] is store

    def _read_next(self) -> bool:
        """Start to read the next queued window. Return False if there is none, or no free buffer."""
        while self._writing and all(transfer.is_done for transfer in self._writing[0].transfers):
            self._finish_write()
        memory = self._buffers.try_take() if self._queued else None
        if memory is None:
            return False
        store, start, stop, fetched = self._queued.popleft()
        window = _window_in(memory, store, start, stop, fetched)
        with within(store.unit_name):  # traces name the unit that is read, not the one that is updated at the moment
            loads = [part.start_load(place) for part, place in _files_and_memory(store, window)]
        self._reading.append(_InFlight(store, memory, window, loads))
        return True

    def _finish_write(self) -> None:
        """Wait for the oldest write, and free its buffer."""
        oldest = self._writing.popleft()
        oldest.wait()
        self._buffers.give_back(oldest.memory)


def _buffers_of(store: ShardStore) -> dict[str, Buffer]:
    return {MASTER: store.master, **store.states}


def _files_and_memory(store: ShardStore, window: StateWindow) -> list[tuple[DiskTensor, torch.Tensor]]:
    """Return the files of all parts that a window contains, each with its memory."""
    pairs: list[tuple[DiskTensor, torch.Tensor]] = []
    in_memory = {MASTER: window.master, **window.states}
    for name, buffer in _buffers_of(store).items():
        if name in in_memory and in_memory[name].numel():
            on_disk = [part for part in buffer[window.start : window.stop].parts if isinstance(part, DiskTensor)]
            pairs += zip(on_disk, in_memory[name].tensors, strict=True)
    return pairs


def _window_in(memory: torch.Tensor, store: ShardStore, start: int, stop: int, fetched: Fetched) -> StateWindow:
    """Lay out a window in a page-locked buffer. A master that is not fetched is empty."""
    found: dict[str, Buffer] = {}
    used = 0
    for name, buffer in _buffers_of(store).items():
        if not (fetched.master if name == MASTER else fetched.states):
            continue
        parts = []
        for part in buffer[start:stop].parts:
            parts.append(memory[used : used + part.nbytes].view(part.dtype))
            used += part.nbytes
        found[name] = Buffer(parts, stop - start, buffer.format)
    return StateWindow(start, stop, found.pop(MASTER, Buffer.of(memory[:0])), found, is_reused=True)
