"""Trace the allocations and ops of a forward and backward on meta tensors.

[Note: activations without a device]
Ops on the meta device compute shapes alone, but autograd saves and frees tensors as it would on a GPU. So the live
storages at each op are the activations, gradients and temporaries of a real pass. Allocations inside kernels are not
visible. Those of attention matter, so it is modelled as the flash kernel: it saves its inputs, its output and one
number per row, and its backward accumulates dQ in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from onefold.tools.estimate.caching_allocator import CachingAllocator
from onefold.tools.estimate.ops import OpCall, Work


class MemoryMoment(NamedTuple):
    """Requested bytes on one rank's device after an op, in addition to its stored model states."""

    live: int
    """Activations, temporaries and gradients."""
    gradients: int
    """The part of `live` that is flat gradients, unsharded or reduced."""
    logits: int
    """The part of `live` whose last dimension is the vocabulary."""
    gathered: int
    """Temporarily unsharded parameters."""
    unsplit: int
    """Bytes that the allocator hands out in addition, because it does not split small rests off."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.live + self.gathered + self.unsplit


class FlatStorage(Protocol):
    """A flat parameter, of which only the storages are used."""

    @property
    def unsharded_storages(self) -> list[torch.UntypedStorage]: ...


@dataclass
class PassTrace:
    """The successive peaks of a pass, and its work."""

    moments: list[MemoryMoment] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    def peak(self) -> int:
        """Return the bytes at the peak."""
        return max((moment.total for moment in self.moments), default=0)


class Tape:
    """The allocations of a dry run in order, to be replayed with other sizes.

    [Note: another batch without another dry run]
    Two dry runs that differ in the micro-batch alone allocate the same tensors in the same order, and the size of each
    is affine in the micro-batch. So the sizes of any other micro-batch follow from two of them, and its peak follows by
    replaying the events of one with these sizes. Where ops differ (a batch of one needs fewer copies), the tapes
    differ, and `sizes_at` returns None.
    """

    def __init__(self) -> None:
        self.ops: list[str] = []
        """The op that made each allocation."""
        self.sizes: list[int] = []
        self.events: list[tuple[Any, ...]] = []
        """Calls of `MemoryAccount`: the method and its arguments. `allocate` has the index of a size."""

    def sizes_at(self, batch: int, other: Tape, other_batch: int, wanted: int) -> list[int] | None:
        """Return the sizes at the batch `wanted`, from this tape (of `batch`) and `other` (of `other_batch`)."""
        if self.ops != other.ops:
            return None
        away, found = other_batch - batch, []
        for one, two in zip(self.sizes, other.sizes, strict=True):
            growth, rest = divmod((two - one) * (wanted - batch), away)
            if rest or one + growth < 0:
                return None
            found.append(one + growth)
        return found

    def replay(self, sizes: Sequence[int]) -> list[MemoryMoment]:
        """Return the successive peaks of the last step with these sizes."""
        account = MemoryAccount(CachingAllocator())
        for name, *arguments in self.events:
            if name == "allocate":
                account.allocate(arguments[0], sizes[arguments[0]], *arguments[1:])
            else:
                getattr(account, name)(*arguments)
        return account.moments


class MemoryAccount:
    """A count of the live bytes on a device by kind, with its successive peaks."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.begin_step()

    def begin_step(self) -> None:
        """Reset the counts. The allocator keeps its segments, as a real one does from step to step."""
        self.moments: list[MemoryMoment] = []
        self._live: dict[int, tuple[int, bool]] = {}
        self._full: dict[int, int] = {}
        self._bytes = self._logits = self._gathered = 0
        self._most = (0, 0)

    def allocate(self, serial: int, size: int, is_logits: bool, is_stored: bool) -> None:
        """Count an allocation; stored model states only occupy the allocator."""
        self._allocator.allocate(serial, size)
        if not is_stored:
            self._live[serial] = (size, is_logits)
            self._bytes += size
            self._logits += size * is_logits

    def free(self, serial: int) -> None:
        """Count the end of an allocation."""
        self._allocator.free(serial)
        if serial in self._live:  # false if it was allocated in an earlier step
            size, is_logits = self._live.pop(serial)
            self._bytes -= size
            self._logits -= size * is_logits

    def resize_parameter(self, place: int, size: int) -> None:
        """Count that a flat parameter was unsharded or resharded."""
        self._allocator.free(("full", place))
        self._allocator.allocate(("full", place), size)
        self._gathered += size - self._full.get(place, 0)
        self._full[place] = size

    def sample(self, gradients: int) -> None:
        """Keep the current bytes if they are a new peak."""
        unsplit = self._allocator.allocated - self._allocator.requested
        moment = MemoryMoment(self._bytes, gradients, self._logits, self._gathered, unsplit)
        # A peak with gradients, or without them, since they may be offloaded.
        total, most = self._bytes + self._gathered + unsplit, self._most
        if total > most[0] or total - gradients > most[1]:
            self.moments.append(moment)
            self._most = max(most[0], total), max(most[1], total - gradients)


class AllocationMode(TorchDispatchMode):
    """A dispatch mode that records every storage from the op that makes it until it is freed.

    Flat parameters are resized in place, so their sizes are compared after every op. `tape` spans all steps.
    """

    def __init__(
        self,
        account: MemoryAccount,
        tape: Tape,
        stored: Collection[FlatStorage],
        sharded: Sequence[FlatStorage],
        gradients: Callable[[], int],
        vocabulary: int | None,
    ) -> None:
        super().__init__()
        self.work = Work()
        self._account, self._tape, self._gradients, self._vocabulary = account, tape, gradients, vocabulary
        self._stored = {storage._cdata for param in stored for storage in param.unsharded_storages}
        self._sharded = [storage for param in sharded for storage in param.unsharded_storages]
        self._sizes = [0] * len(self._sharded)
        self._serials: dict[int, int] = {}
        self._record("begin_step")

    def _record(self, event: str, *arguments: Any) -> None:
        self._tape.events.append((event, *arguments))
        getattr(self._account, event)(*arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True  # as for unpadded input; reading any other value raises
        out = func(*args, **(kwargs or {}))
        made = list(_tensors(out))
        for tensor in made:
            self._follow(tensor, func)
        self._count(func, args, kwargs or {}, made, out)
        self._compare_parameter_sizes()
        self._record("sample", self._gradients())
        return out

    def _follow(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._serials or key in self._stored:
            return
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        self._serials[key] = record_allocation(self._tape, self._account, str(func), storage.nbytes(), is_logits)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._record("free", self._serials.pop(key))

    def _compare_parameter_sizes(self) -> None:
        for place, storage in enumerate(self._sharded):
            size = storage.nbytes()
            if size != self._sizes[place]:
                self._sizes[place] = size
                self._record("resize_parameter", place, size)

    def _count(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], out: Any) -> None:
        work, packet = self.work, func.overloadpacket
        if func.is_view or work.is_inside:
            return
        work.num_ops += 1
        work.calls[OpCall.of(func, args, kwargs)] += 1
        if packet in flop_registry:
            # GPUs multiply in FP8 twice as fast.
            share = 0.5 if packet is torch.ops.aten._scaled_mm else 1.0
            work.flops += share * flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            work.moved_bytes += sum(tensor.nbytes for tensor in (*_tensors(args), *_tensors(kwargs), *made))


def record_allocation(
    tape: Tape, account: MemoryAccount, op: str, size: int, is_logits: bool = False, *, is_stored: bool = False
) -> int:
    """Count an allocation, append it to the tape, and return its serial number."""
    serial = len(tape.sizes)
    tape.ops.append(op)
    tape.sizes.append(size)
    tape.events.append(("allocate", serial, is_logits, is_stored))
    account.allocate(serial, size, is_logits, is_stored)
    return serial


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    """Yield the dense meta tensors among arguments or results."""
    if isinstance(found, torch.Tensor):
        if found.is_meta and found.layout is torch.strided:
            yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
