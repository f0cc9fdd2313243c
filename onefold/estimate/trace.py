"""What a forward and a backward allocate and compute, op by op, on tensors without memory.

[Note: activations without a device]
Ops on the meta device compute shapes alone, but autograd saves and frees tensors as it would on a GPU. So the live
storages at each op are the activations, gradients and temporaries of a real pass. What kernels allocate inside does not
show; the one that matters is attention, which stands here as the flash kernel: it saves its inputs, its output and one
number a row, and its backward adds up dQ in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from onefold.estimate.caching_allocator import CachingAllocator
from onefold.estimate.work import OpCall, Work


class MemoryMoment(NamedTuple):
    """Bytes of one rank's device beside what rests there, when an op has run: as they were asked for."""

    live: int
    """Activations, temporaries and gradients of all kinds,"""
    gradients: int
    """of which so many are flat gradients, whole or reduced,"""
    logits: int
    """and so many have the vocabulary as their last dimension."""
    gathered: int
    """Parameters that are unsharded for a while."""
    unsplit: int
    """What the allocator hands out beyond that, as it is not worth splitting off."""

    @property
    def total(self) -> int:
        return self.live + self.gathered + self.unsplit


class FlatStorage(Protocol):
    """A flat parameter, of which this asks nothing but its memory."""

    full: torch.Tensor


@dataclass
class PassTrace:
    """The moments of a pass that are larger than all before them, and its work."""

    moments: list[MemoryMoment] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    reserve: int = 0
    """What the allocator holds of the device at the end, beyond what was allocated at the fullest moment."""

    def peak(self) -> int:
        return max((moment.total for moment in self.moments), default=0)


class AllocationMode(TorchDispatchMode):
    """Follows storages from the op that makes them to their end. Flat parameters are resized in place, so they are
    looked at after every op. `allocator` is kept from pass to pass, as what it has cached is.
    """

    def __init__(
        self,
        allocator: CachingAllocator,
        resting: Collection[FlatStorage],
        sharded: Sequence[FlatStorage],
        gradients: Callable[[], int],
        vocabulary: int | None,
    ) -> None:
        super().__init__()
        self.found = PassTrace()
        self._allocator, self._sharded, self._gradients, self._vocabulary = allocator, sharded, gradients, vocabulary
        self._resting = {param.full.untyped_storage()._cdata for param in resting}
        self._live: dict[int, tuple[int, bool]] = {}
        self._bytes = self._logits = self._gathered = 0
        self._sizes = [0] * len(sharded)
        self._most = (0, 0)
        self._allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True  # as with input that is not padded; a number that is asked for has no such answer, and raises
        out = func(*args, **(kwargs or {}))
        made = list(_tensors(out))
        for tensor in made:
            self._follow(tensor)
        self._count(func, args, kwargs or {}, made, out)
        self._look_at_parameters()
        self._sample()
        return out

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._resting:
            return
        size = storage.nbytes()
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        self._live[key] = (size, is_logits)
        self._bytes += size
        self._logits += size * is_logits
        self._allocator.allocate((id(self), key), size)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        size, is_logits = self._live.pop(key)
        self._bytes -= size
        self._logits -= size * is_logits
        self._allocator.free((id(self), key))

    def finish(self) -> PassTrace:
        self.found.reserve = self._allocator.reserved - self._allocated
        return self.found

    def _look_at_parameters(self) -> None:
        for place, param in enumerate(self._sharded):
            size = param.full.untyped_storage().nbytes()
            if size != self._sizes[place]:
                self._allocator.free((id(self), "full", place))
                self._allocator.allocate((id(self), "full", place), size)
                self._gathered += size - self._sizes[place]
                self._sizes[place] = size

    def _sample(self) -> None:
        unsplit = self._allocator.allocated - self._allocator.asked
        moment = MemoryMoment(self._bytes, self._gradients(), self._logits, self._gathered, unsplit)
        # The fullest so far, with gradients or, as they may rest elsewhere, without.
        measures, most = (moment.total, moment.total - moment.gradients), self._most
        if measures[0] > most[0] or measures[1] > most[1]:
            self.found.moments.append(moment)
            self._allocated = max(self._allocated, self._allocator.allocated)
            self._most = max(most[0], measures[0]), max(most[1], measures[1])

    def _count(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], out: Any) -> None:
        work, packet = self.found.work, func.overloadpacket
        if func.is_view or work.is_inside:
            return
        work.num_ops += 1
        work.calls[OpCall.of(func, args, kwargs)] += 1
        if packet in flop_registry:
            work.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            work.moved_bytes += sum(tensor.nbytes for tensor in (*_tensors(args), *_tensors(kwargs), *made))


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    """Dense tensors without memory among arguments or results."""
    if isinstance(found, torch.Tensor):
        if found.is_meta and found.layout is torch.strided:
            yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
