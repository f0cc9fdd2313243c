"""Stream offloaded shards through the GPU: copy their state to it, step it there, and copy it back.

[Note: states streamed through the GPU]
A chunk of gradient, master and states is copied to the GPU, stepped by the kernels that step device-resident states,
and copied back. Several chunks are in flight: some are copied to the GPU while one is stepped and some are copied to
the host. The next shard starts while the last one is still being copied. A thread of its own launches the copies and
waits for them. A bus carries fp32 values about as fast as a host steps them, so host and GPU share the fp32 shards
([Note: host and device step together]). Encoded states take a host about forty passes over memory, and a fraction of
the bus: all of them are streamed. Results have the same bits as with states that are stored on the device.
Gradients and weights that are on the GPU already, such as those of an FSDP2 model, are used in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from onefold.offload.bus import Bus, CopyEvent
from onefold.offload.param_shard import LastUse, Publisher
from onefold.offload.state_codec import Dither
from onefold.optim.matrix_rules import AnyRule
from onefold.optim.pipeline import ElementwiseUpdate, StateWindow, StepValues
from onefold.plan.layout import Segment, round_up
from onefold.plan.state_formats import BLOCK

# Bytes of a chunk. Smaller ones take longer to launch; larger ones overlap less.
CHUNK_BYTES = 1 << 26
# The number of chunks in flight, each in separate device memory: after a backward, and during one, where each kernel of
# a chunk waits up to 3 ms for a kernel of the model. Each chunk has a stream, so that chunks wait at the same time.
IN_FLIGHT, IN_FLIGHT_IN_BACKWARD = 3, 12
# Alignment of the tensors of a chunk, in bytes.
_ALIGNMENT = 256


class Streamable(Protocol):
    """The interface of a shard that `GpuStream` needs, as `ShardStore` implements it."""

    def stepped_segments(self, first: int, last: int) -> list[Segment]: ...

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]: ...


@dataclass(frozen=True)
class StreamedShard:
    """A shard, its gradient, and how the result is published.

    A gradient that is on the GPU already is used in place, and so is a master.
    """

    store: Streamable
    gradient: torch.Tensor
    publisher: Publisher
    step: StepValues
    last_use: LastUse
    model_weight: torch.Tensor | None = None
    """The model weight on the GPU, if the update casts the new master into it instead of the publisher.

    In-place writes to it are copied into the master first.
    """
    is_cached: bool = False
    """The gradient is in the device cache."""
    target: StateWindow | None = None
    """The new values are copied here, instead of replacing the old ones ([Note: speculative steps])."""

    @property
    def has_gradient_on_device(self) -> bool:
        """Whether the gradient is on the device, and not copied there."""
        return self.is_cached or _is_on_gpu(self.gradient)


@dataclass(frozen=True)
class _ShardRange:
    """A range of a shard, treated as a shard: positions are relative to its start."""

    store: Streamable
    start: int
    compared_model_weight: torch.Tensor | None

    def stepped_segments(self, first: int, last: int) -> list[Segment]:
        found = self.store.stepped_segments(first + self.start, last + self.start)
        return [Segment(segment.group, segment.start - self.start, segment.stop - self.start) for segment in found]

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]:
        found = self.store.rounded_ranges(first + self.start, last + self.start, step)
        return [(low - self.start, high - self.start, dither) for low, high, dither in found]


class _ChunkSlot:
    """Device memory for one chunk, and the stream that its kernels run on."""

    def __init__(self, device: torch.device) -> None:
        # During a backward, the short kernels of a chunk take priority over the long ones of the model.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.num_bytes = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: dict[tuple[tuple[int, torch.dtype], ...], list[torch.Tensor]] = {}

    def free(self) -> None:
        """Free the memory."""
        self._views.clear()
        self._memory = self._memory.new_empty(0)
        self.num_bytes = 0

    def allocate(self, num_bytes: int) -> None:
        """Allocate the memory, once it is free."""
        with torch.cuda.stream(self.stream):
            self._memory = self._memory.new_empty(num_bytes)
        self.num_bytes = num_bytes

    def views_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views with the sizes and dtypes of `tensors`. Chunks of the same kind share them."""
        key = tuple((tensor.numel(), tensor.dtype) for tensor in tensors)
        found = self._views.get(key)
        if found is None:
            found, start = [], 0
            for tensor in tensors:
                found.append(self._memory[start : start + tensor.nbytes].view(tensor.dtype))
                start += round_up(tensor.nbytes, _ALIGNMENT)
            self._views[key] = found
        return found


@dataclass(frozen=True)
class _Chunk:
    """A chunk in flight: the event of its last copy to the host, and the functions to call after it."""

    arrival: CopyEvent
    publish: Callable[[], None] | None
    then: Callable[[], None] | None


class GpuStream:
    """Steps windows of states in host memory on the GPU. Only one thread uses it."""

    def __init__(self, rules: Sequence[AnyRule], bus: Bus, num_in_flight: int = IN_FLIGHT) -> None:
        self._elementwise = ElementwiseUpdate(rules)
        # On the streams of `bus`, chunks would wait behind gradients that the GPU has yet to compute.
        self._bus = bus.sibling()
        self._slots = [_ChunkSlot(bus.device) for _ in range(num_in_flight)]
        self._in_flight: deque[_Chunk] = deque()
        self._number = 0

    def start(self, shard: StreamedShard, window: StateWindow, then: Callable[[], None] = lambda: None) -> None:
        """Launch all chunks of a window.

        A later call of this or of `finish` calls `then` once the window is in host memory again.
        """
        if window.start == window.stop:
            self.finish()
            then()
            return
        for start, stop in window.chunks(self._reserve(window, shard)):
            if len(self._in_flight) == len(self._slots):
                self._finish_oldest()
            slot = self._slots[self._number % len(self._slots)]
            self._number += 1
            with torch.cuda.stream(slot.stream):
                arrival, is_published = self._launch(slot, shard, window, start, stop)
            publish = None if is_published else partial(publish_from_host, window, shard.publisher, start, stop)
            self._in_flight.append(_Chunk(arrival, publish, then if stop == window.stop else None))

    def run(self, shard: StreamedShard, window: StateWindow) -> None:
        """Step a window, and wait until it is in host memory again."""
        try:
            self.start(shard, window)
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> None:
        """Wait until all chunks are in host memory again."""
        while self._in_flight:
            self._finish_oldest()

    def abandon(self) -> None:
        """Wait for all copies after an error, without publishing anything."""
        while self._in_flight:
            with suppress(Exception):  # the first error is the one that is reported
                self._in_flight.popleft().arrival.synchronize()
        with suppress(Exception):  # of a chunk that failed between its copies
            for slot in self._slots:
                slot.stream.synchronize()
            self._bus.drain()

    def _finish_oldest(self) -> None:
        chunk = self._in_flight.popleft()
        chunk.arrival.synchronize()
        for call in (chunk.publish, chunk.then):
            if call is not None:
                call()

    def _reserve(self, window: StateWindow, shard: StreamedShard) -> int:
        """Allocate device memory for the chunks of a window, and return the elements of a chunk.

        Memory that is too small is replaced while nothing is in flight: the allocator may hand out what a slot's stream
        has freed while it is still in use there, and the bus's copies do not wait for that stream.
        """
        per_block = sum(part.nbytes for part in _copied_parts(window, shard, BLOCK))
        size = min(CHUNK_BYTES // per_block * BLOCK, window.stop - window.start)
        num_bytes = sum(round_up(part.nbytes, _ALIGNMENT) for part in _copied_parts(window, shard, size))
        if any(slot.num_bytes < num_bytes for slot in self._slots):
            self.finish()
            for slot in self._slots:
                slot.free()
            for slot in self._slots:
                slot.allocate(num_bytes)
                slot.stream.synchronize()  # in deterministic mode torch fills new memory
        return size

    def _launch(
        self, slot: _ChunkSlot, shard: StreamedShard, window: StateWindow, start: int, stop: int
    ) -> tuple[CopyEvent, bool]:
        """Launch one chunk. Return the event of its copy to the host, and whether it is published."""
        inside = slice(start - window.start, stop - window.start)
        buffers = [window.master[inside], *(state[inside] for state in window.states.values())]
        parts = window.parts_in(start, stop)
        gradient = shard.gradient[start:stop]
        sources = [part for part in parts if not _is_on_gpu(part)]
        sources += [] if shard.has_gradient_on_device else [gradient]
        copies = dict(zip(map(id, sources), slot.views_like(sources), strict=True))
        pairs = [(source, copies[id(source)]) for source in sources]
        self._bus.up_together(pairs, shard.last_use).wait_on_stream()
        gradient, *on_device = (copies.get(id(tensor), tensor) for tensor in (gradient, *parts))
        remaining = iter(on_device)
        master, *states = [buffer.like(remaining) for buffer in buffers]
        chunk = StateWindow(0, stop - start, master, dict(zip(window.states, states, strict=True)))
        weight = shard.model_weight[start:stop] if shard.model_weight is not None else None
        store = _ShardRange(shard.store, start, weight)
        self._elementwise.update(store, gradient, shard.step, chunk, 0, stop - start, weight)
        is_published = shard.publisher.send_from_device(master.weight, start, stop, gradient, self._bus)
        targets = shard.target.parts_in(start, stop) if shard.target is not None else parts
        copied_back = [(copy, part) for copy, part in zip(on_device, targets, strict=True) if copy is not part]
        return self._bus.down_together(copied_back), is_published


def _copied_parts(window: StateWindow, shard: StreamedShard, size: int) -> list[torch.Tensor]:
    """Return what is copied to the GPU for the first `size` elements of a window."""
    buffers = (window.master, *window.states.values())
    parts = [part for buffer in buffers for part in buffer[:size].tensors if not _is_on_gpu(part)]
    return parts if shard.has_gradient_on_device else [*parts, shard.gradient[:size]]


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def publish_from_host(window: StateWindow, publisher: Publisher, start: int, stop: int) -> None:
    """Publish a chunk that is in host memory again."""
    weight = window.master_in(start, stop).weight
    if (memory := publisher.memory(start, stop)) is not None:
        memory.copy_(weight)
    publisher.send(weight, start, stop)
