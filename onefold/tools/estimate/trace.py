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

from onefold.tools.estimate.caching_allocator import CachingAllocator
from onefold.tools.estimate.work import OpCall, Work


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

    def peak(self) -> int:
        return max((moment.total for moment in self.moments), default=0)


class Tape:
    """The allocations of a dry run in their order, so that they can be repeated with other sizes.

    [Note: another batch without another dry run]
    Two dry runs that differ in the micro-batch alone allocate the same tensors in the same order, and the size of each
    is affine in the micro-batch. So the sizes of any other micro-batch follow from two of them, and its peak follows by
    repeating the events of one with these sizes. Where ops differ (a batch of one
    needs fewer copies), the tapes differ in length or ops, and `sizes_at` returns None.
    """

    def __init__(self) -> None:
        self.ops: list[str] = []
        """What made each allocation."""
        self.sizes: list[int] = []
        self.events: list[tuple[Any, ...]] = []
        """The name of a method of `MemoryAccount` with its arguments; `allocate` is given the place of a size."""

    def sizes_at(self, batch: int, other: Tape, other_batch: int, wanted: int) -> list[int] | None:
        """Return the sizes at the batch that is `wanted`, where this tape is of `batch` and `other` of another."""
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
        """Return the moments of the last step with these sizes."""
        account = MemoryAccount(CachingAllocator())
        for name, *arguments in self.events:
            if name == "allocate":
                account.allocate(arguments[0], sizes[arguments[0]], *arguments[1:])
            else:
                getattr(account, name)(*arguments)
        return account.moments


class MemoryAccount:
    """Count what is live on a device by kind, and keep the samples that are larger than all before them."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what was counted. The allocator keeps what it has, as a real one does from step to step."""
        self.moments: list[MemoryMoment] = []
        self._live: dict[int, tuple[int, bool]] = {}
        self._full: dict[int, int] = {}
        self._bytes = self._logits = self._gathered = 0
        self._most = (0, 0)

    def allocate(self, serial: int, size: int, is_logits: bool, is_resting: bool) -> None:
        self._allocator.allocate(serial, size)
        if not is_resting:
            self._live[serial] = (size, is_logits)
            self._bytes += size
            self._logits += size * is_logits

    def free(self, serial: int) -> None:
        self._allocator.free(serial)
        if serial in self._live:  # not where it was allocated in an earlier step
            size, is_logits = self._live.pop(serial)
            self._bytes -= size
            self._logits -= size * is_logits

    def resize_parameter(self, place: int, size: int) -> None:
        self._allocator.free(("full", place))
        self._allocator.allocate(("full", place), size)
        self._gathered += size - self._full.get(place, 0)
        self._full[place] = size

    def sample(self, gradients: int) -> None:
        unsplit = self._allocator.allocated - self._allocator.asked
        moment = MemoryMoment(self._bytes, gradients, self._logits, self._gathered, unsplit)
        # The fullest so far, with gradients or, as they may rest elsewhere, without.
        total, most = self._bytes + self._gathered + unsplit, self._most
        if total > most[0] or total - gradients > most[1]:
            self.moments.append(moment)
            self._most = max(most[0], total), max(most[1], total - gradients)


class AllocationMode(TorchDispatchMode):
    """Follows storages from the op that makes them to their end. Flat parameters are resized in place, so they are
    looked at after every op. `tape` goes on from step to step.
    """

    def __init__(
        self,
        account: MemoryAccount,
        tape: Tape,
        resting: Collection[FlatStorage],
        sharded: Sequence[FlatStorage],
        gradients: Callable[[], int],
        vocabulary: int | None,
    ) -> None:
        super().__init__()
        self.work = Work()
        self._account, self._tape, self._gradients, self._vocabulary = account, tape, gradients, vocabulary
        self._resting = {param.full.untyped_storage()._cdata for param in resting}
        self._sharded = [param.full.untyped_storage() for param in sharded]
        self._sizes = [0] * len(sharded)
        self._serials: dict[int, int] = {}
        self._note("begin_step")

    def _note(self, event: str, *arguments: Any) -> None:
        self._tape.events.append((event, *arguments))
        getattr(self._account, event)(*arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True  # as with input that is not padded; a number that is asked for has no such answer, and raises
        out = func(*args, **(kwargs or {}))
        made = list(_tensors(out))
        for tensor in made:
            self._follow(tensor, func)
        self._count(func, args, kwargs or {}, made, out)
        self._look_at_parameters()
        self._note("sample", self._gradients())
        return out

    def _follow(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._serials or key in self._resting:
            return
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        self._serials[key] = record_allocation(self._tape, self._account, str(func), storage.nbytes(), is_logits)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._note("free", self._serials.pop(key))

    def _look_at_parameters(self) -> None:
        for place, storage in enumerate(self._sharded):
            size = storage.nbytes()
            if size != self._sizes[place]:
                self._sizes[place] = size
                self._note("resize_parameter", place, size)

    def _count(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], out: Any) -> None:
        work, packet = self.work, func.overloadpacket
        if func.is_view or work.is_inside:
            return
        work.num_ops += 1
        work.calls[OpCall.of(func, args, kwargs)] += 1
        if packet in flop_registry:
            work.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            work.moved_bytes += sum(tensor.nbytes for tensor in (*_tensors(args), *_tensors(kwargs), *made))


def record_allocation(
    tape: Tape, account: MemoryAccount, op: str, size: int, is_logits: bool = False, *, is_resting: bool = False
) -> int:
    """Count an allocation now, and note it for later; return its serial number."""
    serial = len(tape.sizes)
    tape.ops.append(op)
    tape.sizes.append(size)
    tape.events.append(("allocate", serial, is_logits, is_resting))
    account.allocate(serial, size, is_logits, is_resting)
    return serial


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
