"""Copies of reduced gradients to host memory, and their sums over micro-steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch

from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.plan.layout import SHARD_ALIGNMENT
from onefold.pool import Pool

# The number of device-to-host copies in flight before the compute stream waits for the oldest one.
COPIES_IN_FLIGHT = 3
# Elements of a sum that are added at once, and the number of such chunks in flight. Each has separate device memory.
CHUNK = 1 << 24
CHUNKS_IN_FLIGHT = 3


def block_squares(values: torch.Tensor) -> torch.Tensor:
    """Compute the squared norm of each aligned block in fp64, from its fp32 norm.

    torch's fp32 norm of a long vector has an error of 0.3% on a CPU.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms: torch.Tensor = torch.linalg.vector_norm(values.view(-1, SHARD_ALIGNMENT), dim=1, dtype=dtype)
    return norms.double().square()


def shard_squares(shard: torch.Tensor) -> torch.Tensor:
    """Compute the squared norms of all blocks of a gradient shard.

    They are computed in the chunks of `GradOffload`, so that the bits do not depend on where the gradient is stored.
    """
    return torch.cat([block_squares(chunk) for chunk in shard.split(CHUNK)])


def square_sum(shard: torch.Tensor) -> torch.Tensor:
    """Compute the sum of squares of a gradient shard, an fp64 scalar."""
    return shard_squares(shard).sum()


def _add_chunk(source: torch.Tensor, chunk: torch.Tensor, squares: torch.Tensor, *, add: bool) -> None:
    """Add a gradient to a chunk of its sum, or cast it into the chunk, and compute the squared norms of the result."""
    if add:
        chunk.add_(source)
    else:
        chunk.copy_(source)
    squares.copy_(block_squares(chunk))


class GradCopy(NamedTuple):
    """A copy of a reduced gradient to host memory that was started."""

    arrival: CopyEvent
    """Completes when the gradient is in host memory."""
    squares: torch.Tensor | None
    """Squared norms of the blocks of the gradient, or of the sum. None if the host has added."""
    squares_ready: CopyEvent
    """Completes when `squares` may be read."""


class GradOffload:
    """Copies of reduced gradients to host memory, in the order in which they are reduced.

    [Note: gradient offload]
    If optimizer states are offloaded, a gradient is copied to the host as soon as it is reduced. The device buffer is
    returned to its pool after the compute stream has waited for the copy, a few units later, when the copy is usually
    complete.

    Sums over the micro-steps of an accumulation window stay on the device as far as memory allows ([Note: the device
    cache]), and are copied once. The others are stored in host memory as well, but a GPU adds to them: a chunk of the
    sum is copied to the device, the gradient is added, and the chunk is copied back, while the next chunk is on its
    way. This takes the bandwidth of the bus in both directions. The host itself took 1.7 s per micro-step for 3.8B
    parameters (LOG, "Gradient accumulation with offload"). The GPU computes the norm of the sum at the same time.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._chunk_size = 0
        # Device memory for chunks, each with the event of its last copy to the host.
        self._chunks: deque[tuple[torch.Tensor, CopyEvent]] = deque()
        self._under_way: deque[tuple[CopyEvent, list[torch.Tensor], torch.Tensor, Pool, Hashable]] = deque()

    def expect(self, numel: int) -> None:
        """Register the size of a gradient, for the allocation of chunks."""
        self._chunk_size = max(self._chunk_size, min(numel, CHUNK))

    def copy(self, total: torch.Tensor, target: torch.Tensor) -> GradCopy:
        """Start to copy a gradient to `target` in host memory."""
        return GradCopy(self._bus.down(total, target), shard_squares(total), COMPLETE)

    @torch.no_grad()
    def start(
        self,
        total: torch.Tensor,
        target: torch.Tensor,
        slot: torch.Tensor,
        pool: Pool,
        key: Hashable,
        *,
        add: bool,
        after: CopyEvent = COMPLETE,
    ) -> GradCopy:
        """Start to copy a reduced gradient to `target` in host memory, or to add it. `slot` is freed afterwards.

        `after` is the last copy into `target`.
        """
        if not add and total.dtype == target.dtype:
            started = self.copy(total, target)
        elif self._bus.crosses:
            squares = torch.empty(total.numel() // SHARD_ALIGNMENT, dtype=torch.float64, device=total.device)
            arrival = self._add(total, target, squares, add=add, after=after)
            started = GradCopy(arrival, squares, squares_ready=arrival)
        else:
            narrow = total if add or total.itemsize < target.itemsize else total.to(target.dtype)
            started = GradCopy(self._bus.down(narrow, target, add=add), None, COMPLETE)
        temporary = [tensor for tensor in (total, started.squares) if tensor is not None]
        self._under_way.append((started.arrival, temporary, slot, pool, key))
        self.finish(COPIES_IN_FLIGHT if self._bus.crosses else 0)
        return started

    def _add(
        self, total: torch.Tensor, target: torch.Tensor, squares: torch.Tensor, *, add: bool, after: CopyEvent
    ) -> CopyEvent:
        """Add a gradient to its sum in host memory on the GPU, chunk by chunk. Without `add`, cast it."""
        bus, arrival = self._bus, COMPLETE
        reduced = CopyEvent(bus.now())
        for start in range(0, total.numel(), CHUNK):
            source, on_host = total[start : start + CHUNK], target[start : start + CHUNK]
            memory, last_use = self._chunk(target.dtype)
            chunk = memory[: source.numel()]
            fetched = bus.up_after(on_host, chunk, [last_use, after]) if add else last_use
            blocks = squares[start // SHARD_ALIGNMENT :][: source.numel() // SHARD_ALIGNMENT]
            compute = partial(_add_chunk, source, chunk, blocks, add=add)
            arrival = bus.compute_down(compute, chunk, on_host, [reduced, fetched])
            self._chunks.append((memory, arrival))
        return arrival

    def _chunk(self, dtype: torch.dtype) -> tuple[torch.Tensor, CopyEvent]:
        """Return device memory for a chunk, and the event of its last use."""
        if len(self._chunks) < CHUNKS_IN_FLIGHT:
            return torch.empty(self._chunk_size, dtype=dtype, device=self._bus.device), CopyEvent(self._bus.now())
        memory, last_use = self._chunks.popleft()
        if memory.dtype != dtype:  # of parameters in fp64, next to others
            last_use.wait_on_stream()
            memory, last_use = (
                torch.empty(self._chunk_size, dtype=dtype, device=self._bus.device),
                CopyEvent(self._bus.now()),
            )
        return memory, last_use

    def finish(self, num_left: int = 0) -> None:
        """Return the device buffers of all but the newest `num_left` copies, in the order of the compute stream."""
        while len(self._under_way) > num_left:
            arrival, temporary, slot, pool, key = self._under_way.popleft()
            arrival.wait_on_stream()
            pool.give_back(slot, key)
            if temporary[0] is not slot:
                pool.give_back(temporary[0])
