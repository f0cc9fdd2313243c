"""The step of what rests below the device, taken by the device: masters and states pass through it.

[Note: states that pass through the device]
torch has one kernel that updates fp32 values on a host, as fast as its memory is. Values in fewer bytes need some
forty passes there, and a host is several times slower with them, while a bus carries them in a fraction of that time.
So they go up with their gradient, a chunk at a time, are stepped by the device's own kernel and come down again. A few
chunks are under way: one comes up while one is stepped and one goes down. The host's thread only starts the copies; as
when it steps by itself, a shard is stepped when its task ends. Bits are those of states that rest on the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import torch

from onefold.offload.bus import Arrival, Bus
from onefold.offload.encoded import EncodedFlat
from onefold.offload.param_shard import LastUse, StepOutput, tensors_of
from onefold.offload.shard_store import ShardStore
from onefold.offload.state_codec import Dither
from onefold.optim.rules import MASTER, Rule
from onefold.optim.steppers import InMemory, StateWindow, Step, Tiler, weights_of
from onefold.plan.layout import Segment, round_up

# Elements that go up, are stepped and come down together.
CHUNK = 1 << 22
# Chunks that are under way at a time, each in memory of its own on the device.
UNDER_WAY = 3
# Parts of a chunk begin at multiples of so many bytes.
_ALIGNMENT = 256


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

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._used = 0

    def reserve(self, num_bytes: int) -> None:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)

    def begin(self) -> None:
        """Another chunk comes; nothing of the last one is under way."""
        self._used = 0

    def room(self, like: torch.Tensor) -> torch.Tensor:
        found = self._memory[self._used : self._used + like.nbytes].view(like.dtype)
        self._used += round_up(like.nbytes, _ALIGNMENT)
        return found


@dataclass(frozen=True)
class _Chunk:
    """A range on its way: the last copy down of it, and whether what computes has its weights already."""

    start: int
    stop: int
    arrival: Arrival
    is_sent: bool


class DevicePass:
    """Steps windows of states in host memory on the device. The host's thread uses it, and nobody else."""

    def __init__(self, rule: Rule, bus: Bus) -> None:
        self._tiler, self._bus = Tiler(rule), bus
        self._stream = torch.cuda.Stream(bus.device)
        self._slots = [_Slot(bus.device) for _ in range(UNDER_WAY)]
        self._number = 0

    def step(
        self,
        store: ShardStore,
        window: StateWindow,
        gradient: torch.Tensor,
        output: StepOutput,
        step: Step,
        last_use: LastUse,
    ) -> None:
        """All of a window; returns when it is in host memory again. `gradient` lies along the shard."""
        under_way: deque[_Chunk] = deque()
        self._reserve(window, gradient)
        for start, stop in pairwise([*range(window.start, window.stop, CHUNK), window.stop]):
            if len(under_way) == UNDER_WAY:
                self._finish(window, output, under_way.popleft())
            slot = self._slots[self._number % UNDER_WAY]
            self._number += 1
            with torch.cuda.stream(self._stream):
                under_way.append(self._start(slot, store, window, (start, stop), gradient, output, step, last_use))
        while under_way:
            self._finish(window, output, under_way.popleft())

    def _reserve(self, window: StateWindow, gradient: torch.Tensor) -> None:
        """While nothing is under way: what the step's stream has freed may be in use there still, and copies up do not
        wait for that stream.
        """
        size = min(CHUNK, window.stop - window.start)
        parts = [part for flat in (window.master, *window.states.values()) for part in tensors_of(flat[:size])]
        with torch.cuda.stream(self._stream):
            for slot in self._slots:
                slot.reserve(sum(round_up(part.nbytes, _ALIGNMENT) for part in (gradient[:size], *parts)))

    def _start(
        self,
        slot: _Slot,
        store: ShardStore,
        window: StateWindow,
        place: tuple[int, int],
        gradient: torch.Tensor,
        output: StepOutput,
        step: Step,
        last_use: LastUse,
    ) -> _Chunk:
        start, stop = place
        inside = slice(start - window.start, stop - window.start)
        held: dict[str, InMemory] = {MASTER: window.master[inside]}
        held |= {name: state[inside] for name, state in window.states.items()}
        on_host = {
            name: [part for part in tensors_of(flat) if isinstance(part, torch.Tensor)] for name, flat in held.items()
        }
        slot.begin()
        arrival = self._bus.up(gradient[start:stop], scaled := slot.room(gradient[start:stop]), last_use)
        on_device: dict[str, list[torch.Tensor]] = {}
        for name, parts in on_host.items():
            on_device[name] = [slot.room(part) for part in parts]
            for part, there in zip(parts, on_device[name], strict=True):
                arrival = self._bus.up(part, there, last_use)
        arrival.order()
        values = {name: _as(flat, on_device[name]) for name, flat in held.items()}
        master = values.pop(MASTER)
        through = StateWindow(0, stop - start, master, values)
        self._tiler.step(_FromStart(store, start), through, 0, stop - start, scaled, None, step)
        is_sent = output.send_from_device(weights_of(master), start, stop)
        for name, parts in on_host.items():
            for part, there in zip(parts, on_device[name], strict=True):
                arrival = self._bus.down(there, part)
        return _Chunk(start, stop, arrival, is_sent)

    def _finish(self, window: StateWindow, output: StepOutput, chunk: _Chunk) -> None:
        """The chunk is in host memory again, and what rests below the device takes its weights from there."""
        chunk.arrival.wait()
        if not chunk.is_sent:
            weights = weights_of(window.master[chunk.start - window.start : chunk.stop - window.start])
            if (memory := output.memory(chunk.start, chunk.stop)) is not None:
                memory.copy_(weights)
            output.send(weights, chunk.start, chunk.stop)


def _as(flat: InMemory, parts: list[torch.Tensor]) -> InMemory:
    """The same values in other memory."""
    return EncodedFlat(flat.form, parts, flat.numel()) if isinstance(flat, EncodedFlat) else parts[0]
