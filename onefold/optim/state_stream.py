"""States on disk pass through memory in windows: one is read ahead, one is lent to be stepped, one is written back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onefold.offload.nvme import DiskTensor, Transfer
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.param_shard import Buffers
from onefold.offload.shard_store import ShardStore
from onefold.optim.steppers import StateWindow
from onefold.plan import Tier
from onefold.plan.layout import SHARD_ALIGNMENT


@dataclass(frozen=True)
class _Passing:
    """A window in a buffer, with the transfers that fill or empty it."""

    store: ShardStore
    buffer: torch.Tensor
    window: StateWindow
    transfers: list[Transfer]


class StateStream:
    """Windows of shards on disk, in the order of the step: read ahead, lent, written back."""

    def __init__(self, memory: OffloadMemory, stores: Sequence[ShardStore]) -> None:
        options = memory.disk_options
        per_element = max(sum(flat.itemsize for flat in _parts(store).values()) for store in stores)
        longest = max(store.stop - store.start for store in stores)
        self._size = min(longest, max(options.buffer_size // SHARD_ALIGNMENT, 1) * SHARD_ALIGNMENT)
        self._buffers: Buffers = memory.buffers(options.num_buffers, self._size * per_element)
        self._ahead, self._behind = options.reads_ahead, options.writes_behind
        self._coming: deque[tuple[ShardStore, int, int]] = deque()
        self._reading: deque[_Passing] = deque()
        self._writing: deque[_Passing] = deque()

    def plan(self, stores: Sequence[ShardStore]) -> None:
        """What the next step goes through."""
        for store in stores:
            if store.state_tier is Tier.NVME:
                length = store.stop - store.start
                self._coming.extend((store, low, min(low + self._size, length)) for low in range(0, length, self._size))

    def windows(self, store: ShardStore) -> Iterator[StateWindow]:
        """All windows of a shard. Each is written back when the next is asked for."""
        while self._next_is(store):
            while not self._reading:
                if not self._read_next():
                    self._reclaim()
            passing = self._reading.popleft()
            while self._ahead and self._read_next():
                pass
            _wait(passing)
            yield passing.window
            parts = _parts(store)
            stores = [
                flat[passing.window.start : passing.window.stop].start_store(memory)
                for flat, memory in zip(parts.values(), _tensors(passing.window), strict=True)
            ]
            self._writing.append(_Passing(store, passing.buffer, passing.window, stores))
            if not self._behind:
                self._reclaim()
        # What is gathered from the master itself must be there; and nothing is under way when a step is over.
        is_last = not self._coming and not self._reading
        while self._writing and (store.param_copy is None or is_last):
            self._reclaim()

    def _next_is(self, store: ShardStore) -> bool:
        if self._reading:
            return self._reading[0].store is store
        return bool(self._coming) and self._coming[0][0] is store

    def _read_next(self) -> bool:
        """Start reading another window, if there is one and a buffer for it."""
        while self._writing and all(transfer.is_done for transfer in self._writing[0].transfers):
            self._reclaim()
        buffer = self._buffers.try_take() if self._coming else None
        if buffer is None:
            return False
        store, start, stop = self._coming.popleft()
        window = _window(store, start, stop, buffer)
        loads = [
            flat[start:stop].start_load(memory)
            for flat, memory in zip(_parts(store).values(), _tensors(window), strict=True)
        ]
        self._reading.append(_Passing(store, buffer, window, loads))
        return True

    def _reclaim(self) -> None:
        """The oldest write is over: its buffer is free."""
        passing = self._writing.popleft()
        _wait(passing)
        self._buffers.give_back(passing.buffer)


def _parts(store: ShardStore) -> dict[str, DiskTensor]:
    parts = {"master": store.master, **store.states}
    return {name: flat for name, flat in parts.items() if isinstance(flat, DiskTensor)}


def _tensors(window: StateWindow) -> list[torch.Tensor]:
    return [window.master, *window.states.values()]


def _window(store: ShardStore, start: int, stop: int, buffer: torch.Tensor) -> StateWindow:
    found, used = {}, 0
    for name, flat in _parts(store).items():
        size = (stop - start) * flat.itemsize
        found[name] = buffer[used : used + size].view(flat.dtype)
        used += size
    return StateWindow(start, stop, found.pop("master"), found)


def _wait(passing: _Passing) -> None:
    for transfer in passing.transfers:
        transfer.wait()
