"""Activation offload: storage of the inputs of a checkpointed function between its forward and its recomputation.

[Note: offloaded inputs]
torch saves the inputs of a checkpoint with autograd, and a pack hook can replace them: here by a copy on the host or in
a slot of a buffer. Autograd holds the replacement exactly as long as it would have held the input. So whenever a graph
is freed (by a backward, an exception or `del loss`), its slots and host memory are freed too.

[Note: copies of offloaded inputs]
The copy to the host runs on a separate stream while the function computes, and the caller's stream waits for it at the
end of the function. In backward, a recomputation takes its inputs and starts the copies for the call before it, on the
stream of the other direction, which then run while the function is recomputed. The inputs of at most one call are on
the device ahead of their use. A copy that was started and not used is waited for before its memory is freed.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onefold.config import ConfigError
from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.host_memory import page_aligned

_ALIGNMENT = 512  # In bytes. torch's CUDA allocations have it, and kernels may depend on it.

_buffers: dict[tuple[Any, ...], tuple[Tensor, list[int]]] = {}  # The memory, and its free slots.
_blocks: list[Tensor] = []  # Free host memory for one input each.


def forget_buffers() -> None:
    """Drop all buffers. Slots and blocks in use remain valid."""
    _buffers.clear()
    _drop_blocks(len(_blocks))


class HostCopies:
    """Inputs on the host of the checkpoints of one model: their bytes, and the order of their calls."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0
        """Bytes on the host now, and the most so far."""
        self.down = self.up = 0
        """Bytes copied to the host and back."""
        self.num_calls = 0
        self._last: Callable[[], _OffloadedCall | None] = lambda: None

    def begin_call(self) -> _OffloadedCall:
        """Return a new call, which follows the last one that is still needed."""
        call = _OffloadedCall(self, self._last)
        self._last = weakref.ref(call)
        return call

    def add(self, num_bytes: int) -> None:
        """Count bytes that are stored on the host, or freed there if they are negative."""
        self.num_bytes += num_bytes
        self.down += max(0, num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class _OffloadedCall:
    """One call of a checkpointed function, with its inputs on the host. It lives as long as one of them."""

    def __init__(self, copies: HostCopies, previous: Callable[[], _OffloadedCall | None]) -> None:
        self.copies, self.previous = copies, previous
        self.inputs: list[weakref.ref[OffloadedInput]] = []

    def start_copies(self) -> None:
        """Start the copies of all inputs to the device."""
        for offloaded in (reference() for reference in self.inputs):
            if offloaded is not None:
                offloaded.start_copy()


@dataclass(eq=False)
class OffloadedInput:
    """An input of a checkpointed function, or its copy."""

    tensor: Tensor
    device: torch.device
    version: int | None = None
    """The version of an input that is not copied. torch does not check tensors that a pack hook returns."""
    arrived: CopyEvent = COMPLETE
    """The completion of the copy to the host."""
    call: _OffloadedCall | None = None
    """The call of an input that is copied to the host."""
    _coming: tuple[Tensor, CopyEvent] | None = None
    """The copy on the device, once it is started."""

    def back(self) -> Tensor:
        """Return the input on its device, and start the copies for the call before this one."""
        if self.version is not None:
            _check_unchanged(self.tensor, self.version)
        if self.call is None:
            return self.tensor
        self.start_copy()
        assert self._coming is not None
        (found, copied), self._coming = self._coming, None
        previous = self.call.previous()
        if previous is not None:
            previous.start_copies()
        copied.wait_on_stream()
        return found

    def start_copy(self) -> None:
        """Start the copy to the device, unless it is started."""
        if self._coming is not None or self.call is None:
            return
        self.call.copies.up += self.tensor.nbytes
        shape, strides, dtype = self.tensor.shape, self.tensor.stride(), self.tensor.dtype
        if self.device.type == "meta":
            self._coming = torch.empty(shape, dtype=dtype, device=self.device), COMPLETE
            return
        target = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        self.arrived.wait_on_stream()
        self._coming = target, _bus(self.device).up(self.tensor, target)

    def __del__(self) -> None:
        # The memory of both ends must not be used again before the copy is complete.
        if self._coming is not None and not sys.is_finalizing():
            self._coming[1].synchronize()


class Inputs:
    """Stores the floating-point inputs of one call: on the host or their device, in slots or in separate tensors."""

    def __init__(
        self, values: Sequence[Any], *, on_host: bool, num_slots: int | None, copies: HostCopies | None = None
    ) -> None:
        self._on_host, self._num_slots = on_host, num_slots
        # Parameters are not copied: they stay allocated anyway.
        self._parameters = {value.data_ptr() for value in values if isinstance(value, nn.Parameter)}
        self._num_moved = 0
        self._copying: list[tuple[OffloadedInput, Tensor, int]] = []
        self._started: dict[tuple[Any, ...], OffloadedInput] = {}
        self._copies = copies if copies is not None else HostCopies()
        self._copies.num_calls += 1
        self._call: _OffloadedCall | None = None

    def start(self, values: Sequence[Any]) -> None:
        """Start the copies of tensors that will be saved when the function has returned."""
        for value in values:
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self._started.setdefault(_place(value), self.pack(value))

    def pack(self, tensor: Tensor) -> OffloadedInput:
        """Replace a saved tensor by its copy. This is a pack hook of autograd."""
        tensor = tensor.detach()
        if self._started and (started := self._started.get(_place(tensor))) is not None:
            return started
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_floating_point()
        movable = plain and tensor.numel() > 0 and tensor.data_ptr() not in self._parameters
        crosses = self._on_host and (tensor.is_meta or _bus(tensor.device).crosses)
        if not movable or not (crosses or self._num_slots is not None):
            return OffloadedInput(tensor, tensor.device, version=tensor._version)
        if tensor.is_meta:
            # A dry run allocates no host memory, and counts all tensors on the meta device as device memory.
            place, give_back = torch.empty(1, dtype=tensor.dtype, device="cpu").expand(tensor.shape), None
        elif self._num_slots is not None:
            device = torch.device("cpu") if self._on_host else tensor.device
            place, give_back = _take_slot(tensor, device, self._num_moved, self._num_slots)
        else:
            place, give_back = _take_block(tensor)
        offloaded = OffloadedInput(place, tensor.device)
        self._num_moved += 1
        if give_back is not None:
            weakref.finalize(offloaded, give_back).atexit = False
        if not crosses:
            place.copy_(tensor)
            return offloaded
        self._call = offloaded.call = self._call or self._copies.begin_call()
        self._call.inputs.append(weakref.ref(offloaded))
        self._copies.add(place.nbytes)
        weakref.finalize(offloaded, self._copies.add, -place.nbytes).atexit = False
        if not tensor.is_meta:
            offloaded.arrived = _bus(tensor.device).down(tensor, place)
            self._copying.append((offloaded, tensor, tensor._version))
        return offloaded

    def wait_for_copies(self) -> None:
        """Make the compute stream wait for the copies, because the caller may free its inputs now.

        The copies overlapped the whole function. After this wait the memory can be reused at once, in stream order.
        `record_stream` would retain it for as long as the host is ahead of the device.
        """
        self._started.clear()
        for offloaded, tensor, version in self._copying:
            offloaded.arrived.wait_on_stream()
            _check_unchanged(tensor, version)  # An in-place write would have raced with the copy.
        self._copying.clear()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


_buses: dict[torch.device, Bus] = {}


def _bus(device: torch.device) -> Bus:
    """Return the bus that copies inputs on separate streams. `HostCopies` counts their bytes."""
    if device not in _buses:
        _buses[device] = Bus(device, lambda _way, _num_bytes: None)
    return _buses[device]


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"an input of a checkpointed function ({tensor.dtype}, shape {list(tensor.shape)}) was changed in place, "
            "so the function cannot be recomputed. Clone the input before the change."
        )


def _take_block(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Take host memory for one input. Memory of inputs that are freed is used again, because locking pages is slow."""
    fitting = [block for block in _blocks if block.nbytes >= tensor.nbytes]
    if fitting:
        block = min(fitting, key=Tensor.numel)
        del _blocks[next(place for place, each in enumerate(_blocks) if each is block)]
    else:
        _drop_blocks(1)  # for longer sequences, blocks grow one by one
        block = page_aligned(tensor.nbytes, pinned=tensor.is_cuda)
    strides = torch.empty_like(tensor, device="meta").stride()
    place = block[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)
    return place, lambda: _blocks.append(block)


def _drop_blocks(number: int) -> None:
    """Free some blocks, after the copies that may still read them."""
    if _blocks and number:
        for bus in _buses.values():
            bus.drain()
        del _blocks[:number]


def _take_slot(tensor: Tensor, device: torch.device, place: int, num_slots: int) -> tuple[Tensor, Callable[[], None]]:
    """Take a slot for the input at position `place` of a call. Inputs at different positions use different buffers."""
    strides = torch.empty_like(tensor, device="meta").stride()  # The copy is dense, without the gaps of a view.
    pitch = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT // tensor.itemsize
    key = (place, tensor.shape, strides, tensor.dtype, tensor.device, device, num_slots)
    if key not in _buffers:
        # For a new shape, such as a longer sequence, free the buffers without a slot in use.
        for other in [other for other, (_, free) in _buffers.items() if len(free) == other[-1]]:
            del _buffers[other]
        if device.type == "cpu":
            memory = page_aligned(num_slots * pitch * tensor.itemsize, pinned=tensor.is_cuda).view(tensor.dtype)
        else:
            memory = torch.empty(num_slots * pitch, dtype=tensor.dtype, device=device)
        _buffers[key] = memory, list(reversed(range(num_slots)))
    memory, free = _buffers[key]
    if not free:
        gc.collect()  # A reference cycle may hold the graph of a failed forward.
    if not free:
        raise ConfigError(
            f"activation_checkpointing.number_checkpoints = {num_slots}: all slots for inputs of shape "
            f"{list(tensor.shape)} are in use. Set it to the number of checkpointed calls per forward."
        )
    index = free.pop()
    return memory.as_strided(tensor.shape, strides, index * pitch), lambda: free.append(index)
