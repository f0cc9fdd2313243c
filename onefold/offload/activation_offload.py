"""Activation offload: where the inputs of a checkpointed function are between its forward and its recomputation.

[Note: offloaded inputs]
torch keeps the inputs of a checkpoint with autograd, where a pack hook may put something else in their place: here, a
copy on the host or in a slot of one buffer. Autograd holds it exactly as long as it would have held the input, so
whatever ends a graph (a backward, an exception, `del loss`) also gives slot and host memory back; nobody counts.
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

_ALIGNMENT = 512  # Bytes: kernels may choose by it, and torch's own CUDA allocations have it.

_buffers: dict[tuple[Any, ...], tuple[Tensor, list[int]]] = {}  # One memory of memory, and its free slots.


def forget_buffers() -> None:
    """Slots that are still out stay their holders'."""
    _buffers.clear()


@dataclass(eq=False)
class OffloadedInput:
    """An input of a checkpointed function, as itself or as its copy, and the way back."""

    tensor: Tensor
    device: torch.device
    version: int | None = None
    """Of an input that rests as itself: with a hook in between, torch no longer looks for changes in place."""
    arrived: CopyEvent = COMPLETE

    def back(self) -> Tensor:
        if self.version is not None:
            _check_unchanged(self.tensor, self.version)
        self.arrived.wait_on_stream()
        return self.tensor.to(self.device, non_blocking=True)


class Inputs:
    """Keeps the floating inputs of one call: on the host or where they are, in slots or each by itself."""

    def __init__(self, values: Sequence[Any], *, on_host: bool, num_slots: int | None) -> None:
        self._on_host, self._num_slots = on_host, num_slots
        # A parameter lives anyway: a copy of it would cost memory instead of saving it.
        self._parameters = {value.data_ptr() for value in values if isinstance(value, nn.Parameter)}
        self._num_moved = 0
        self._copying: list[tuple[OffloadedInput, Tensor, int]] = []

    def pack(self, tensor: Tensor) -> OffloadedInput:
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
        """The caller may free its inputs from here on, so the compute stream waits for the copies beside it.

        They had the whole function to run beside. Waiting lets the memory be reused at once, in the order of the
        stream; `record_stream` would hold it for as long as the host is ahead of the device.
        """
        for offloaded, tensor, version in self._copying:
            offloaded.arrived.wait_on_stream()
            _check_unchanged(tensor, version)  # A change in place would have raced with the copy.
        self._copying.clear()


@cache
def _bus(device: torch.device) -> Bus:
    """Inputs leave beside what computes, as gradients do."""
    return Bus(device, lambda _way, _num_bytes: None)


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"an input of a checkpointed function ({tensor.dtype}, shape {list(tensor.shape)}) was changed in place, "
            "so nothing can be computed from it again; clone it before the change"
        )


def _take_slot(tensor: Tensor, device: torch.device, place: int, num_slots: int) -> tuple[Tensor, Callable[[], None]]:
    """A slot for the input at this place of its call: calls with two inputs of one shape have two buffers."""
    strides = torch.empty_like(tensor, device="meta").stride()  # Dense: the gaps of a view are closed.
    pitch = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT // tensor.itemsize
    key = (place, tensor.shape, strides, tensor.dtype, tensor.device, device, num_slots)
    if key not in _buffers:
        # Another shape than before, such as a longer sequence: buffers that nobody uses any more make room.
        for other in [other for other, (_, free) in _buffers.items() if len(free) == other[-1]]:
            del _buffers[other]
        if device.type == "cpu":
            memory = page_aligned(num_slots * pitch * tensor.itemsize, pinned=tensor.is_cuda).view(tensor.dtype)
        else:
            memory = torch.empty(num_slots * pitch, dtype=tensor.dtype, device=device)
        _buffers[key] = memory, list(reversed(range(num_slots)))
    memory, free = _buffers[key]
    if not free:
        gc.collect()  # A graph that an exception ended may still hang in a cycle.
    if not free:
        raise ConfigError(
            f"activation_checkpointing.number_checkpoints = {num_slots}: so many inputs of shape {list(tensor.shape)} "
            "already wait for their backward; raise it to the number of checkpointed calls in one forward"
        )
    index = free.pop()
    return memory.as_strided(tensor.shape, strides, index * pitch), lambda: free.append(index)
