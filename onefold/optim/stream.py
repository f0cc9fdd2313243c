"""States on disk pass through memory in windows: one is read ahead, one is lent to be stepped, one is written back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onefold.optim.pieces import Piece, Window
from onefold.plan import Tier
from onefold.plan.layout import SHARD_ALIGNMENT
from onefold.tier.lower import LowerTiers
from onefold.tier.nvme import DiskTensor, Transfer
from onefold.tier.sources import Buffers


@dataclass(frozen=True)
class _Passing:
    """A window in a buffer, with the transfers that fill or empty it."""

    piece: Piece
    buffer: torch.Tensor
    window: Window
    transfers: list[Transfer]


class Stream:
    """Windows of pieces on disk, in the order of the step: read ahead, lent, written back."""

    def __init__(self, lower: LowerTiers, pieces: Sequence[Piece]) -> None:
        options = lower.disk_options
        per_element = max(sum(flat.itemsize for flat in _parts(piece).values()) for piece in pieces)
        longest = max(piece.stop - piece.start for piece in pieces)
        self._size = min(longest, max(options.buffer_size // SHARD_ALIGNMENT, 1) * SHARD_ALIGNMENT)
        self._buffers: Buffers = lower.buffers(options.num_buffers, self._size * per_element)
        self._ahead, self._behind = options.reads_ahead, options.writes_behind
        self._coming: deque[tuple[Piece, int, int]] = deque()
        self._reading: deque[_Passing] = deque()
        self._writing: deque[_Passing] = deque()

    def plan(self, pieces: Sequence[Piece]) -> None:
        """What the next step goes through."""
        for piece in pieces:
            if piece.run.rest.states is Tier.NVME:
                length = piece.stop - piece.start
                self._coming.extend((piece, low, min(low + self._size, length)) for low in range(0, length, self._size))

    def windows(self, piece: Piece) -> Iterator[Window]:
        """All windows of a piece. Each is written back when the next is asked for."""
        while self._next_is(piece):
            while not self._reading:
                if not self._read_next():
                    self._reclaim()
            passing = self._reading.popleft()
            while self._ahead and self._read_next():
                pass
            _wait(passing)
            yield passing.window
            parts = _parts(piece)
            stores = [
                flat[passing.window.start : passing.window.stop].start_store(memory)
                for flat, memory in zip(parts.values(), _tensors(passing.window), strict=True)
            ]
            self._writing.append(_Passing(piece, passing.buffer, passing.window, stores))
            if not self._behind:
                self._reclaim()
        # What is gathered from the master itself must be there; and nothing is under way when a step is over.
        is_last = not self._coming and not self._reading
        while self._writing and (piece.out is None or is_last):
            self._reclaim()

    def _next_is(self, piece: Piece) -> bool:
        if self._reading:
            return self._reading[0].piece is piece
        return bool(self._coming) and self._coming[0][0] is piece

    def _read_next(self) -> bool:
        """Start reading another window, if there is one and a buffer for it."""
        while self._writing and all(transfer.is_done for transfer in self._writing[0].transfers):
            self._reclaim()
        buffer = self._buffers.try_take() if self._coming else None
        if buffer is None:
            return False
        piece, start, stop = self._coming.popleft()
        window = _window(piece, start, stop, buffer)
        loads = [
            flat[start:stop].start_load(memory)
            for flat, memory in zip(_parts(piece).values(), _tensors(window), strict=True)
        ]
        self._reading.append(_Passing(piece, buffer, window, loads))
        return True

    def _reclaim(self) -> None:
        """The oldest write is over: its buffer is free."""
        passing = self._writing.popleft()
        _wait(passing)
        self._buffers.give_back(passing.buffer)


def _parts(piece: Piece) -> dict[str, DiskTensor]:
    parts = {"master": piece.master, **piece.states}
    return {name: flat for name, flat in parts.items() if isinstance(flat, DiskTensor)}


def _tensors(window: Window) -> list[torch.Tensor]:
    return [window.master, *window.states.values()]


def _window(piece: Piece, start: int, stop: int, buffer: torch.Tensor) -> Window:
    memory, used = {}, 0
    for name, flat in _parts(piece).items():
        size = (stop - start) * flat.itemsize
        memory[name] = buffer[used : used + size].view(flat.dtype)
        used += size
    return Window(start, stop, memory.pop("master"), memory)


def _wait(passing: _Passing) -> None:
    for transfer in passing.transfers:
        transfer.wait()
