"""The reduced gradient of a flat parameter, from its reduction to the step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future

import torch

from onefold.offload.bus import COMPLETE, CopyEvent
from onefold.offload.grad_offload import shard_squares, square_sum
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

    def prepare_step(self, *, with_norm: bool) -> None:
        """Start to copy the gradient to where the step reads it, after the last reduction before a step.

        `with_norm`: also start its sum of squares, so that it overlaps the next reduction.
        """

    def accept_square_sum(self, slot: torch.Tensor, square: torch.Tensor | None) -> None:
        """Take over the sum of squares of a flat gradient, if the reduced gradient is the same memory."""

    def leave(self, slot: torch.Tensor) -> None:
        """Copy the gradient to other memory if it is in that of a flat gradient, which is about to be written."""

    def forget_square_sum(self) -> None:
        """Discard the sum of squares, because the gradient is about to be written by the caller."""

    def for_step(self) -> torch.Tensor:
        """Return the gradient where the step reads it. Its copy may still be in flight (`wait`)."""
        self.prepare_step(with_norm=False)
        assert self.value is not None, "a step comes after a backward"
        return self.value

    def widen(self, dtype: torch.dtype, pool: Pool, key: Hashable, *, in_place: bool) -> None:
        """Change the dtype of the gradient, because several micro-steps will be accumulated."""

    def drop(self, pool: Pool, key: Hashable) -> None:
        """Discard the gradient."""

    def tensors(self, tier: Tier) -> list[torch.Tensor]:
        """Return the allocated tensors in a tier."""
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

    def prepare_step(self, *, with_norm: bool) -> None:
        if with_norm and self.value is not None and self.value.is_cuda:
            self._square = square_sum(self.value)

    def square_sum(self) -> torch.Tensor:
        return self._square if self._square is not None else super().square_sum()

    def accept_square_sum(self, slot: torch.Tensor, square: torch.Tensor | None) -> None:
        if slot is self._slot and slot.numel() == self._size:
            self._square = square

    def leave(self, slot: torch.Tensor) -> None:
        if slot is self._slot:
            self._slot = slot.clone()
            self.value = self._slot[self._rank * self._size : (self._rank + 1) * self._size]
            self._square = None  # it is in memory that is about to be written as well

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

    def tensors(self, tier: Tier) -> list[torch.Tensor]:
        held = self._slot if self._slot is not None else self.value
        return [held] if held is not None and tier is Tier.DEVICE else []


class HostGrad(GradShard):
    """The gradient of an offloaded shard, which the step reads from host memory.

    With `delays` there are two buffers, because a delayed step reads one while the next gradient is copied to the host.

    If the device cache stores the gradient (`cached`), reductions add to it on the device, and it is copied to the host
    once. If the GPU steps the shard (`steps_on_device`), it reads the gradient from the cache.
    """

    tier = Tier.HOST

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        memory: OffloadMemory,
        *,
        alone: bool,
        delays: bool,
        steps_on_device: bool = False,
    ) -> None:
        self._size, self._memory, self._alone, self._steps_on_device = size, memory, alone, steps_on_device
        self._own = memory.host(size, dtype)
        self._other = memory.host(size, dtype) if delays else None
        # The gradient in the device cache.
        self.cached: torch.Tensor | None = None
        self._arriving: CopyEvent = COMPLETE
        # Squared norms of the blocks of the gradient, computed on the device. They may be read after `_squares_ready`.
        self._squares: torch.Tensor | None = None
        self._squares_ready: CopyEvent = COMPLETE
        # The reduced gradient of one micro-step on the device, until it is copied to the host.
        self._passing: torch.Tensor | None = None
        self._reader: Future[CopyEvent] | None = None
        # Called before the gradient changes. A step under the backward, which reads it before `step`, sets it.
        self._before_change: Callable[[], None] = _nothing
        # Called before a gradient overwrites the buffer, in which a step may have left the new model weights.
        self.on_overwrite: Callable[[], None] = _nothing
        memory.gradients.expect(size)

    def set_cached(self, *, on: bool) -> None:
        """Start or stop accumulating the gradient on the device, between two accumulation windows."""
        assert self.value is None
        if on and self.cached is None:
            self.cached = torch.empty(self._size, dtype=self._own.dtype, device=self._memory.bus.device)
        elif not on and self.cached is not None:
            self._wait_for_reader()
            self._arriving.wait_on_stream()
            self.cached = None

    @property
    def is_on_device(self) -> bool:
        """Whether `value` is in the device cache."""
        return self.value is not None and self.value is self.cached

    @property
    def host_memory(self) -> torch.Tensor:
        """The buffer in host memory, which a step may overwrite after it has read the gradient."""
        return self._own

    def target(self, slot: torch.Tensor, pool: Pool) -> tuple[torch.Tensor, bool]:
        self._before_change()
        if self.cached is not None and (self.value is None or self.is_on_device):
            if self.value is None:
                self._wait_for_reader()
                self._arriving.wait_on_stream()
            add, self.value, self._squares = self.value is not None, self.cached, None
            return self.cached, add
        # A sum over ranks is rounded once, when it is added.
        dtype = torch.promote_types(self._own.dtype, torch.float32)
        self._passing = slot if self._alone else pool.take(self._size, dtype)
        return self._passing, False

    def accept(self, slot: torch.Tensor, pool: Pool, key: Hashable) -> None:
        """Start the device-to-host copy of a micro-step's reduced gradient, unless it is accumulated on the device."""
        if self._passing is None:
            pool.give_back(slot, key)
            return
        total, self._passing = self._passing, None
        self._wait_for_reader()
        add = self.value is not None
        if not add:
            self.wait()  # the copy of a dropped gradient may still be in flight
            self.on_overwrite()
        self.value = self._own
        copies = self._memory.gradients
        started = copies.start(total, self._own, slot, pool, key, add=add, after=self._arriving)
        self._arriving, self._squares, self._squares_ready = started

    def prepare_step(self, *, with_norm: bool) -> None:
        if not self.is_on_device:
            return
        assert self.cached is not None
        if not self._steps_on_device:
            self._wait_for_reader()
            self.on_overwrite()
            self.value = self._own
            self._arriving, self._squares, self._squares_ready = self._memory.gradients.copy(self.cached, self._own)
        elif with_norm and self._memory.bus.crosses:
            self._squares, self._squares_ready = shard_squares(self.cached), COMPLETE

    def _wait_for_reader(self) -> None:
        """Wait until the step has read the previous gradient."""
        if self._reader is not None:
            self._reader.result()

    def read_by(self, step: Future[CopyEvent] | None, before_change: Callable[[], None] | None = None) -> None:
        """Register the step that reads the gradient until it is done.

        `before_change` is called before the gradient changes, by a step under the backward that should be the last to
        read it.
        """
        self._reader, self._before_change = step, before_change or _nothing

    def wait(self) -> None:
        self._arriving.synchronize()

    def square_sum(self) -> torch.Tensor:
        if self._squares is None:
            return super().square_sum()
        self._squares_ready.wait_on_stream()
        return self._squares.sum()

    def forget_square_sum(self) -> None:
        self._before_change()
        self._squares = None

    def swap(self) -> None:
        """Use the other buffer for the next gradient, because the host still reads this one."""
        assert self._other is not None
        self._own, self._other = self._other, self._own

    def widen(self, dtype: torch.dtype, pool: Pool, key: Hashable, *, in_place: bool) -> None:
        if self._own.dtype == dtype:
            return
        self._before_change()
        self.wait()
        if self.cached is not None:
            self._wait_for_reader()
            narrow, self.cached = self.cached, self.cached.to(dtype)
            self.value = self.cached if self.value is narrow else self.value
        is_on_host = self.value is self._own
        self._own = self._memory.more_host(self._size, dtype).copy_(self._own)
        if self._other is not None:
            self._other = self._memory.more_host(self._size, dtype)
        self.value = self._own if is_on_host else self.value

    def drop(self, pool: Pool, key: Hashable) -> None:
        self.value = self._squares = None
        self._before_change = _nothing

    def tensors(self, tier: Tier) -> list[torch.Tensor]:
        held = {Tier.HOST: (self._own, self._other), Tier.DEVICE: (self.cached,)}
        return [tensor for tensor in held.get(tier, ()) if tensor is not None]


def _nothing() -> None:
    """Do nothing."""
