"""The step of what rests below the device, taken by the device: masters and states pass through it.

[Note: states that pass through the device]
Masters and states go up with their gradient, a chunk at a time, are stepped by the device's own kernel and come down
again. A bus carries fp32 values about as fast as a host steps them, so each takes some ([Note: host and device step
together]). Values in fewer bytes need some forty passes of a host, and a fraction of the bus: they all pass. A few
chunks are under way: one comes up while one is stepped and one goes down, and the next shard begins while the last one
still goes down. A thread of its own starts the copies and hears of their ends. Bits are those of states that rest on
the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from onefold.offload.bus import Arrival, Bus
from onefold.offload.param_shard import LastUse, StepOutput
from onefold.offload.shard_store import ShardStore
from onefold.offload.state_codec import Dither
from onefold.optim.matrix_rules import AnyRule
from onefold.optim.steppers import StateWindow, Step, Tiler
from onefold.plan.forms import BLOCK
from onefold.plan.layout import Segment, round_up

# Bytes that go up, are stepped and come down together: fewer take longer to start, more leave less to do beside.
CHUNK_BYTES = 1 << 26
# Chunks that are under way at a time, each in memory of its own on the device.
UNDER_WAY = 3
# Parts of a chunk begin at multiples of so many bytes.
_ALIGNMENT = 256


@dataclass(frozen=True)
class PassingShard:
    """What is stepped, with what, and where its weights go. The gradient lies along the shard."""

    store: ShardStore
    gradient: torch.Tensor
    output: StepOutput
    step: Step
    last_use: LastUse


@dataclass(frozen=True)
class _FromStart:
    """A range of a shard as a shard by itself, counted from the start of the range."""

    store: ShardStore
    start: int
    comparable = None

    def stepped_segments(self, first: int, last: int) -> list[Segment]:
        found = self.store.stepped_segments(first + self.start, last + self.start)
        return [Segment(segment.group, segment.start - self.start, segment.stop - self.start) for segment in found]

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]:
        found = self.store.rounded_ranges(first + self.start, last + self.start, step)
        return [(low - self.start, high - self.start, dither) for low, high, dither in found]


class _Slot:
    """Memory on the device for one chunk."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._rooms: dict[tuple[tuple[int, torch.dtype], ...], list[torch.Tensor]] = {}

    def room(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For all of these at once; made once for many chunks of the same kind."""
        key = tuple((tensor.numel(), tensor.dtype) for tensor in tensors)
        found = self._rooms.get(key)
        if found is None:
            found, start = [], 0
            for tensor in tensors:
                found.append(self._memory[start : start + tensor.nbytes].view(tensor.dtype))
                start += round_up(tensor.nbytes, _ALIGNMENT)
            self._rooms[key] = found
        return found


@dataclass(frozen=True)
class _Chunk:
    """A range on its way: the last copy down of it, and what is done when it has arrived."""

    arrival: Arrival
    take_weights: Callable[[], None] | None
    then: Callable[[], None] | None


class DevicePass:
    """Steps windows of states in host memory on the device. One thread uses it, and nobody else."""

    def __init__(self, rules: Sequence[AnyRule], bus: Bus) -> None:
        self._tiler, self._bus = Tiler(rules), bus
        self._stream = torch.cuda.Stream(bus.device)
        self._slots = [_Slot(0, bus.device) for _ in range(UNDER_WAY)]
        self._under_way: deque[_Chunk] = deque()
        self._number = 0

    def start(self, shard: PassingShard, window: StateWindow, then: Callable[[], None] = lambda: None) -> None:
        """All of a window is on its way; `then` is called when it is in host memory again, by a later call of this or
        of `finish`.
        """
        if window.start == window.stop:
            self.finish()
            then()
            return
        size = self._reserve(window, shard.gradient)
        for start, stop in pairwise([*range(window.start, window.stop, size), window.stop]):
            if len(self._under_way) == UNDER_WAY:
                self._finish_oldest()
            slot = self._slots[self._number % UNDER_WAY]
            self._number += 1
            with torch.cuda.stream(self._stream):
                arrival, is_sent = self._start(slot, shard, window, start, stop)
            take = None if is_sent else partial(_take_weights, window, shard.output, start, stop)
            self._under_way.append(_Chunk(arrival, take, then if stop == window.stop else None))

    def take(self, shard: PassingShard, window: StateWindow) -> None:
        """All of a window, until it is in host memory again."""
        try:
            self.start(shard, window)
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> None:
        """All that was started is in host memory again."""
        while self._under_way:
            self._finish_oldest()

    def abandon(self) -> None:
        """After an error: what was started ends, and nothing follows from it."""
        while self._under_way:
            with suppress(Exception):  # the first error is the one that is told
                self._under_way.popleft().arrival.wait()
        with suppress(Exception):  # of a chunk that failed between its copies
            self._stream.synchronize()
            self._bus.drain()

    def _finish_oldest(self) -> None:
        chunk = self._under_way.popleft()
        chunk.arrival.wait()
        for call in (chunk.take_weights, chunk.then):
            if call is not None:
                call()

    def _reserve(self, window: StateWindow, gradient: torch.Tensor) -> int:
        """Elements of a chunk, for which there is room in every slot. Memory that is too small is replaced while
        nothing is under way: what the step's stream has freed may be in use there still, and copies up do not wait for
        that stream.
        """
        buffers = (window.master, *window.states.values())
        per_block = [gradient[:BLOCK].nbytes, *(part.nbytes for buffer in buffers for part in buffer[:BLOCK].parts)]
        size = min(CHUNK_BYTES // sum(per_block) * BLOCK, window.stop - window.start)
        num_bytes = sum(round_up(each * size // BLOCK, _ALIGNMENT) for each in per_block)
        if any(slot.num_bytes < num_bytes for slot in self._slots):
            self.finish()
            self._slots = [_Slot(0, self._bus.device) for _ in self._slots]
            with torch.cuda.stream(self._stream):
                self._slots = [_Slot(num_bytes, self._bus.device) for _ in self._slots]
            self._stream.synchronize()  # torch fills new memory where it is to be deterministic
        return size

    def _start(
        self, slot: _Slot, shard: PassingShard, window: StateWindow, start: int, stop: int
    ) -> tuple[Arrival, bool]:
        """The last copy down, and whether what computes has the weights of the range already."""
        inside = slice(start - window.start, stop - window.start)
        held = [window.master[inside], *(state[inside] for state in window.states.values())]
        on_host = [part for buffer in held for part in buffer.tensors]
        sources = [shard.gradient[start:stop], *on_host]
        gradient, *on_device = slot.room(sources)
        self._bus.up_together(list(zip(sources, [gradient, *on_device], strict=True)), shard.last_use).order()
        parts = iter(on_device)
        master, *states = [buffer.like(parts) for buffer in held]
        through = StateWindow(0, stop - start, master, dict(zip(window.states, states, strict=True)))
        self._tiler.step(_FromStart(shard.store, start), through, 0, stop - start, gradient, None, shard.step)
        is_sent = shard.output.send_from_device(master.weight, start, stop, spare=gradient)
        return self._bus.down_together(list(zip(on_device, on_host, strict=True))), is_sent


def _take_weights(window: StateWindow, output: StepOutput, start: int, stop: int) -> None:
    """The range is in host memory again, and what rests below the device takes its weights from there."""
    weights = window.master[start - window.start : stop - window.start].weight
    if (memory := output.memory(start, stop)) is not None:
        memory.copy_(weights)
    output.send(weights, start, stop)
