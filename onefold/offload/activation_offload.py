"""Activation offload: storage of the inputs of a checkpointed function between its forward and its recomputation.

[Note: offloaded inputs]
torch saves the inputs of a checkpoint with autograd, and a pack hook can replace them: here by a copy on the host or in
a slot of a buffer. Autograd holds the replacement exactly as long as it would have held the input. So whenever a graph
is freed (by a backward, an exception or `del loss`), its slots and host memory are freed too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from onefold.config import ConfigError
from onefold.offload.bus import COMPLETE, Bus, CopyEvent
from onefold.offload.host_memory import page_aligned

_ALIGNMENT = 512  # In bytes. torch's CUDA allocations have it, and kernels may depend on it.

_buffers: dict[tuple[Any, ...], tuple[Tensor, list[int]]] = {}  # The memory, and its free slots.


def forget_buffers() -> None:
    """Drop all buffers. Slots in use remain valid."""
    _buffers.clear()


@dataclass(eq=False)
class OffloadedInput:
    """An input of a checkpointed function, or its copy."""

    tensor: Tensor
    device: torch.device
    version: int | None = None
    """The version of an input that is not copied. torch does not check tensors that a pack hook returns."""
    arrived: CopyEvent = COMPLETE
    """The completion of the copy to the host."""

    def back(self) -> Tensor:
        """Return the input on its device."""
        if self.version is not None:
            _check_unchanged(self.tensor, self.version)
        self.arrived.wait_on_stream()
        return self.tensor.to(self.device, non_blocking=True)


class Inputs:
    """Stores the floating-point inputs of one call: on the host or their device, in slots or in separate tensors."""

    def __init__(self, values: Sequence[Any], *, on_host: bool, num_slots: int | None) -> None:
        self._on_host, self._num_slots = on_host, num_slots
        # Parameters are not copied: they stay allocated anyway.
        self._parameters = {value.data_ptr() for value in values if isinstance(value, nn.Parameter)}
        self._num_moved = 0
        self._copying: list[tuple[OffloadedInput, Tensor, int]] = []

    def pack(self, tensor: Tensor) -> OffloadedInput:
        """Replace a saved tensor by its copy. This is a pack hook of autograd."""
        tensor = tensor.detach()
        device = torch.device("cpu") if self._on_host else tensor.device
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_floating_point()
        movable = plain and tensor.numel() > 0 and tensor.data_ptr() not in self._parameters
        if not movable or (device == tensor.device and self._num_slots is None):
            return OffloadedInput(tensor, tensor.device, version=tensor._version)
        crosses = tensor.is_cuda and device.type == "cpu"
        if self._num_slots is None:
            offloaded = OffloadedInput(torch.empty_like(tensor, device=device, pin_memory=crosses), tensor.device)
        else:
            slot, give_back = _take_slot(tensor, device, self._num_moved, self._num_slots)
            offloaded = OffloadedInput(slot, tensor.device)
            weakref.finalize(offloaded, give_back).atexit = False
        self._num_moved += 1
        if crosses:
            offloaded.arrived = _bus(tensor.device).down(tensor, offloaded.tensor)
            self._copying.append((offloaded, tensor, tensor._version))
        else:
            offloaded.tensor.copy_(tensor)
        return offloaded

    def wait_for_copies(self) -> None:
        """Make the compute stream wait for the copies, because the caller may free its inputs now.

        The copies overlapped the whole function. After this wait the memory can be reused at once, in stream order.
        `record_stream` would retain it for as long as the host is ahead of the device.
        """
        for offloaded, tensor, version in self._copying:
            offloaded.arrived.wait_on_stream()
            _check_unchanged(tensor, version)  # An in-place write would have raced with the copy.
        self._copying.clear()


@cache
def _bus(device: torch.device) -> Bus:
    """Return the bus that copies inputs on a separate stream. Its bytes are not counted."""
    return Bus(device, lambda _way, _num_bytes: None)


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"an input of a checkpointed function ({tensor.dtype}, shape {list(tensor.shape)}) was changed in place, "
            "so the function cannot be recomputed. Clone the input before the change."
        )


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
