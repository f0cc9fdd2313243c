"""The reduced gradient of a flat parameter, from its reduction to the step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future

import torch

from onefold.offload.bus import COMPLETE, CopyEvent
from onefold.offload.grad_offload import square_sum
from onefold.offload.offload_memory import OffloadMemory
from onefold.plan import Tier
from onefold.pool import Pool


class GradShard:
    """This rank's slice of a gradient, summed over the ranks and micro-steps of an accumulation window."""

    tier: Tier
    value: torch.Tensor | None = None
    """The gradient. None if nothing has been reduced since the last step."""

    def target(self, slot: torch.Tensor, pool: Pool) -> tuple[torch.Tensor, bool]:
        """Return the output tensor of the reduction of a flat gradient, and whether the reduction adds to it."""
        raise NotImplementedError

    def accept(self, slot: torch.Tensor, pool: Pool, key: Hashable) -> None:
        """Finish a reduction, and return the slot of the flat gradient to the pool as soon as it is unused."""

    def wait(self) -> None:
        """Block the host until `value` is complete."""

    def square_sum(self) -> torch.Tensor:
        """Compute the sum of squares, an fp64 scalar."""
        assert self.value is not None
        self.wait()
        return square_sum(self.value)

    def start_square_sum(self) -> None:
        """Start the sum of squares after the last reduction before a step, so that it overlaps the next reduction."""

    def forget_square_sum(self) -> None:
        """Discard the sum of squares, because the gradient is about to be written by the caller."""

    def widen(self, dtype: torch.dtype, pool: Pool, key: Hashable, *, in_place: bool) -> None:
        """Change the dtype of the gradient, because several micro-steps will be accumulated."""

    def drop(self, pool: Pool, key: Hashable) -> None:
        """Discard the gradient."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the allocated tensors, all in the tier of this shard."""
        raise NotImplementedError


class DeviceGrad(GradShard):
    """A gradient shard on the device.

    With `in_place` the sum is stored in this rank's slice of the slot, and needs no extra memory.
    """

    tier = Tier.DEVICE

    def __init__(self, size: int, dtype: torch.dtype, rank: int, *, in_place: bool) -> None:
        self._size, self._rank, self._dtype, self._in_place = size, rank, dtype, in_place
        # The slot that contains the value, if it is reduced in place.
        self._slot: torch.Tensor | None = None
        self._square: torch.Tensor | None = None

    def target(self, slot: torch.Tensor, pool: Pool) -> tuple[torch.Tensor, bool]:
        add, self._square = self.value is not None, None
        if self.value is None and self._in_place:
            self.value, self._slot = slot[self._rank * self._size : (self._rank + 1) * self._size], slot
        elif self.value is None:
            self.value = pool.take(self._size, self._dtype)
        assert self.value is not None
        return self.value, add

    def accept(self, slot: torch.Tensor, pool: Pool, key: Hashable) -> None:
        if slot is not self._slot:
            pool.give_back(slot, key)

    def start_square_sum(self) -> None:
        if self.value is not None and self.value.is_cuda:
            self._square = square_sum(self.value)

    def square_sum(self) -> torch.Tensor:
        return self._square if self._square is not None else super().square_sum()

    def forget_square_sum(self) -> None:
        self._square = None

    def widen(self, dtype: torch.dtype, pool: Pool, key: Hashable, *, in_place: bool) -> None:
        self._dtype, self._in_place = dtype, in_place
        if self.value is not None and self.value.dtype != dtype:
            wide = pool.take(self._size, dtype).copy_(self.value)
            self.drop(pool, key)
            self.value = wide

    def drop(self, pool: Pool, key: Hashable) -> None:
        if self._slot is not None:
            pool.give_back(self._slot, key)
        elif self.value is not None:
            pool.give_back(self.value)
        self._slot = self.value = self._square = None

    def tensors(self) -> list[torch.Tensor]:
        held = self._slot if self._slot is not None else self.value
        return [held] if held is not None else []


class HostGrad(GradShard):
    """A gradient shard in host memory.

    With `delays` there are two buffers, because a delayed step reads one while the next gradient is copied to the host.
    """

    tier = Tier.HOST

    def __init__(self, size: int, dtype: torch.dtype, memory: OffloadMemory, *, alone: bool, delays: bool) -> None:
        self._size, self._memory, self._alone = size, memory, alone
        self._own = memory.host(size, dtype)
        self._other = memory.host(size, dtype) if delays else None
        self._arriving: CopyEvent = COMPLETE
        # Squared norms of the blocks of the gradient, computed on the device. They may be read after `_squares_ready`.
        self._squares: torch.Tensor | None = None
        self._squares_ready: CopyEvent = COMPLETE
        # The reduced gradient of one micro-step on the device, until it is copied to the host.
        self._passing: torch.Tensor | None = None
        self._reader: Future[CopyEvent] | None = None
        # Called before a gradient overwrites the buffer, in which a step may have left the new model weights.
        self.on_overwrite: Callable[[], None] = lambda: None
        memory.gradients.expect(size)

    def target(self, slot: torch.Tensor, pool: Pool) -> tuple[torch.Tensor, bool]:
        self._passing = slot if self._alone else pool.take(self._size, self._own.dtype)
        return self._passing, False

    def accept(self, slot: torch.Tensor, pool: Pool, key: Hashable) -> None:
        """Start the device-to-host copy of this micro-step's reduced gradient."""
        assert self._passing is not None
        total, self._passing = self._passing, None
        if self._reader is not None:
            self._reader.result()  # the step may still be reading the previous gradient
        add = self.value is not None
        if not add:
            self.wait()  # the copy of a dropped gradient may still be in flight
            self.on_overwrite()
        self.value = self._own
        copies = self._memory.gradients
        started = copies.start(total, self._own, slot, pool, key, add=add, after=self._arriving)
        self._arriving, self._squares, self._squares_ready = started

    def read_by(self, step: Future[CopyEvent] | None) -> None:
        """Register the step on the host that reads the gradient until it is done."""
        self._reader = step

    def wait(self) -> None:
        self._arriving.synchronize()

    def square_sum(self) -> torch.Tensor:
        if self._squares is None:
            return super().square_sum()
        self._squares_ready.wait_on_stream()
        return self._squares.sum()

    def forget_square_sum(self) -> None:
        self._squares = None

    def swap(self) -> None:
        """Use the other buffer for the next gradient, because the host still reads this one."""
        assert self._other is not None
        self._own, self._other = self._other, self._own

    def widen(self, dtype: torch.dtype, pool: Pool, key: Hashable, *, in_place: bool) -> None:
        if self._own.dtype == dtype:
            return
        self.wait()
        self._own = self._memory.more_host(self._size, dtype).copy_(self._own)
        if self._other is not None:
            self._other = self._memory.more_host(self._size, dtype)
        self.value = self._own if self.value is not None else None

    def drop(self, pool: Pool, key: Hashable) -> None:
        self.value = self._squares = None

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self._own, self._other) if tensor is not None]
