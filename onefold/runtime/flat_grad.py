"""Flat gradients: the gradients of a flat parameter, from autograd to the reduced gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from onefold.comm import ErrorFeedback, Reduction
from onefold.graphs import Gradients
from onefold.offload.shard_store import ShardStore
from onefold.plan import Plan, Tier, Wire
from onefold.plan.buffers import adopts_gradient, reduces_in_place
from onefold.plan.layout import Layout
from onefold.pool import Pool
from onefold.runtime.parameter_proxy import GradientPlaceholder, raw_grad, set_raw_grad, take_raw_grad
from onefold.runtime.torch_internals import is_unshared

# Gradients wait for a common copy into their slots as long as they have fewer bytes together. On a GPU, launching a
# copy takes about as long as copying 8 MiB.
MAX_WAITING_BYTES = 8 << 20
# References to the memory of a gradient that nothing else uses: of the gradient, and of the object that counts them.
_OWN_REFERENCES = 2


class GradientBatch:
    """Gradients of all units that autograd has produced and that are not in their slots yet.

    [Note: gradients that wait]
    Small gradients are copied into their slots together, because on a GPU launching a copy takes longer than the copy.
    They wait until a slot is read, until they have `MAX_WAITING_BYTES` together, or until the backward ends. A
    gradient does not wait if its memory is used elsewhere, because later nodes of the backward and hooks of the user
    may write to it. Each parameter has at most one gradient in a batch, so that gradients are added in the order in
    which autograd has produced them.
    """

    def __init__(self) -> None:
        self._waiting: dict[FlatGrad, dict[int, torch.Tensor]] = {}
        self._num_bytes = 0
        # The number of the GPU, and the CUDA stream on which they were produced; -1 and 0 on other devices.
        self._gpu, self._stream = -1, 0

    def add(self, grad: FlatGrad, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to its place in the slot, now or in `copy`."""
        gpu, waiting = gradient.get_device(), self._waiting.get(grad)
        if gpu >= 0 and (gpu, _current_stream(gpu)) != (self._gpu, self._stream):
            self.copy()
            self._gpu, self._stream, waiting = gpu, _current_stream(gpu), None
        elif waiting is not None and index in waiting:
            self.copy()
            waiting = None
        if waiting is None:
            waiting = self._waiting[grad] = {}
        waiting[index] = gradient
        memory = gradient.untyped_storage()
        self._num_bytes += memory.nbytes()
        is_shared = torch._C._storage_Use_Count(memory._cdata) > _OWN_REFERENCES  # type: ignore[attr-defined]
        if is_shared or self._num_bytes > MAX_WAITING_BYTES:
            self.copy()

    def copy(self) -> None:
        """Copy the gradients that wait into their slots, or add them to what the slots have."""
        if not self._waiting:
            return
        if self._gpu < 0 or _current_stream(self._gpu) == self._stream:
            self._copy()
            return
        stream = torch.cuda.ExternalStream(self._stream, self._gpu)
        with torch.cuda.stream(stream):  # on which their memory may be reused as soon as they are freed
            self._copy()
        torch.cuda.current_stream(self._gpu).wait_stream(stream)

    @torch.no_grad()
    def _copy(self) -> None:
        waiting, self._waiting, self._num_bytes = self._waiting, {}, 0
        groups: dict[tuple[bool, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for grad, gradients in waiting.items():
            for index, is_filled, view in grad.fill(gradients):
                targets, sources = groups.setdefault((is_filled, view.dtype), ([], []))
                targets.append(view)
                sources.append(gradients[index])
        for (adds, _), (targets, sources) in groups.items():
            (torch._foreach_add_ if adds else torch._foreach_copy_)(targets, sources)

    def discard(self, grad: FlatGrad) -> None:
        """Discard the gradients of a flat parameter that wait."""
        self._waiting.pop(grad, None)


def _current_stream(gpu: int) -> int:
    """Return the handle of the current CUDA stream."""
    return int(torch._C._cuda_getCurrentRawStream(gpu))


def views_of_members(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the view of each member of a flat tensor."""
    offset = flat.storage_offset()
    return [flat.as_strided(shape, strides, offset + start) for shape, strides, start in layout.strided]


class FlatGrad:
    """The gradient of one flat parameter.

    [Note: where a gradient is]
    Autograd produces each gradient as a new tensor. `accumulate_into_slot` takes it from `p.grad`, so that user code
    that changes `p.grad` (zero_grad, create_graph) cannot detach it, and copies it into the flat gradient, together
    with others ([Note: gradients that wait]). The flat gradient is a `slot`: a buffer of the pool that is taken at the
    first gradient, or on a CPU the gradient of autograd itself if it has the same layout and nothing else refers to it.
    If the plan keeps unsharded gradients, the slot accumulates micro-steps until the boundary; otherwise every
    micro-step ends with a reduction. The reduction leaves this rank's part of the sum over ranks and micro-steps in
    `shard.value`. The step divides it.
    """

    def __init__(
        self, store: ShardStore, parameters: list[nn.Parameter], plan: Plan, own_range: tuple[int, int]
    ) -> None:
        spec = store.spec
        self.layout = spec.used_layout
        self.slot: torch.Tensor | None = None
        # Rounding errors of quantized reductions, if the config feeds them back.
        self.error = ErrorFeedback() if plan.feedback is not None else None
        # The number of the last backward that produced a gradient, for each parameter.
        self.last_backward = [0] * len(parameters)
        # Indices of parameters whose gradient the user has dropped.
        self.dropped: set[int] = set()
        # Dropped by a user hook inside a backward. A reduction may be in flight, so they are applied when it has ended.
        self.drops_at_end: set[int] = set()
        # Dropped after the reduction, in this accumulation window: each rank clears its slice.
        self.drops_of_sums: set[int] = set()
        self._spec, self._parameters, self._plan, self._device = spec, parameters, plan, store.device
        self._own_range = own_range
        self._adopts = store.device.type == "cpu" and adopts_gradient(plan, spec)
        self._accumulates = plan.accumulates
        # Whether the slot has a gradient of each parameter.
        self._filled = bytearray(len(parameters))
        # The gradient of a graph whose memory is the slot, or the reduced gradient.
        self._borrowed: Gradients | None = None
        # Gradients that are not in slots yet. The flat gradients of an engine share it.
        self.batch = GradientBatch()
        self.shard = store.make_grad(self._reduced_dtype, in_place=self._in_place)

    @property
    def _num_micro_steps(self) -> int:
        return 2 if self._accumulates else 1

    @property
    def _slot_dtype(self) -> torch.dtype:
        if not self._plan.keeps_unsharded_gradient:
            return self._spec.dtype
        return self._plan.precision.of_gradient(self._spec.dtype, self._num_micro_steps)

    @property
    def _reduced_dtype(self) -> torch.dtype:
        return self._plan.precision.of_reduced(self._spec.dtype, self._num_micro_steps, self.layout.num_shards)

    @property
    def _in_place(self) -> bool:
        """Whether the sum stays in the slot. Otherwise the slot is returned to the pool after the reduction."""
        return reduces_in_place(self._plan, self._spec, self._num_micro_steps)

    # -- accumulation -------------------------------------------------------------------------------------------

    def take_slot(self, pool: Pool) -> None:
        """Take a slot of the pool for the gradients of the next reduction."""
        if self.shard.value is not None:
            self.begin_accumulation(pool)
        self.dropped.clear()
        self._filled = bytearray(len(self._filled))
        if not self._adopts:  # otherwise the first gradient may be the slot
            self._require_slot(pool)

    def _require_slot(self, pool: Pool) -> torch.Tensor:
        if self.slot is None:
            self.slot = pool.take(self.layout.total, self._slot_dtype, self.layout.shape_key)
        return self.slot

    def begin_accumulation(self, pool: Pool) -> None:
        """Widen buffers that were meant for one micro-step to the dtype in which micro-steps are accumulated."""
        if self._accumulates:
            return
        self.batch.copy()
        self._accumulates = True
        key = self.layout.shape_key
        if self.slot is not None and self.slot.dtype != self._slot_dtype:
            wide = pool.take(self.layout.total, self._slot_dtype, key).copy_(self.slot)
            pool.give_back(self.slot, key)
            self.slot = wide
        self.shard.widen(self._reduced_dtype, pool, key, in_place=self._in_place)

    def accumulate_into_slot(self, index: int, pool: Pool) -> None:
        """Take the gradient that autograd has just produced from the Parameter, and add it to the slot."""
        parameter = self._parameters[index]
        if self.slot is None:
            if self._adopt(parameter, pool):
                self._filled[index] = 1
                self.dropped.discard(index)
                return
            self._require_slot(pool)
        gradient = take_raw_grad(parameter)
        if gradient is None:
            return  # a user hook has dropped it
        if self._spec.num_expert_parts > 1 and tuple(gradient.shape) != self.layout.members[index].shape:
            raise RuntimeError(
                f"{self.layout.members[index].name} was trained inside GatheredParameters, with the experts of all "
                "ranks. Train outside of it, or set onefold.expert_parallel_size to 1."
            )
        self.dropped.discard(index)
        self.batch.add(self, index, gradient if gradient.layout is torch.strided else gradient.to_dense())

    def borrow(self, gradients: Gradients, pool: Pool) -> None:
        """Use the memory of a graph as the slot, if it keeps its values until the next forward of the graph."""
        flat = gradients.flat
        if flat is None or not gradients.stays or self.slot is not None or flat.dtype != self._slot_dtype:
            return
        self.slot, self._borrowed = pool.adopt(flat), gradients

    def return_borrowed(self) -> None:
        """Copy a borrowed gradient to memory of its own, before a graph writes the borrowed memory."""
        flat, self._borrowed = self._borrowed.flat if self._borrowed is not None else None, None
        if flat is not None:
            self.slot = flat.clone() if self.slot is flat else self.slot
            self.shard.leave(flat)

    def accumulate_flat(self, gradients: Gradients, pool: Pool) -> None:
        """Add the gradients of several parameters to the slot, before a graph writes their memory again."""
        assert gradients.flat is not None
        slot, present = self._require_slot(pool), gradients.present
        if slot is gradients.flat:
            for index in present:
                self._filled[index] = 1
            return
        self.batch.copy()
        self.dropped.difference_update(present)
        num_filled = sum(self._filled[index] for index in present)
        if not any(self._filled):
            slot.copy_(gradients.flat)
        elif num_filled == len(present):
            slot.add_(gradients.flat)
        else:
            views = views_of_members(gradients.flat, self.layout)
            for index, is_filled, view in self.fill(present):
                (view.add_ if is_filled else view.copy_)(views[index])
        for index in present:
            self._filled[index] = 1

    def _adopt(self, parameter: nn.Parameter, pool: Pool) -> bool:
        """Make the gradient on a Parameter the slot, if nothing else refers to its memory."""
        gradient = raw_grad(parameter)
        if gradient is None or gradient.dtype != self._slot_dtype or gradient.numel() != self.layout.total:
            return False
        if not is_unshared(gradient):
            return False
        set_raw_grad(parameter, None)
        self.slot = pool.adopt(gradient.detach().view(-1))
        return True

    def fill(self, indices: Iterable[int]) -> list[tuple[int, bool, torch.Tensor]]:
        """Mark parameters as having a gradient in the slot. Return whether each had one, and its view of the slot."""
        assert self.slot is not None
        views, filled = views_of_members(self.slot, self.layout), self._filled
        found = [(index, bool(filled[index]), views[index]) for index in indices]
        for index in indices:
            filled[index] = 1
        return found

    def unreduced(self, index: int) -> torch.Tensor | None:
        """Return this rank's accumulated gradient of one parameter before its reduction, or None."""
        self.batch.copy()
        self.return_borrowed()
        if self.slot is None or self.shard.value is not None or not self._filled[index] or index in self.dropped:
            return None
        member = self.layout.members[index]
        return self.slot[member.start : member.stop].view(member.shape)

    # -- reduction ----------------------------------------------------------------------------------------------

    def prepare_reduce_scatter(self, prescale: float, pool: Pool) -> Reduction:
        """Return the reduce-scatter of the slot. Parameters without a gradient are reduced as zeros."""
        slot = self._require_slot(pool)
        self.batch.copy()
        for member, filled in zip(self.layout.members, self._filled, strict=True):
            if not filled:
                slot[member.start : member.stop].zero_()
        if self._plan.gradients.wire is not Wire.NATIVE:
            for start, stop in self.layout.gaps:  # a quantized block that overflowed is all NaN, including padding
                slot[start:stop].zero_()
        if prescale != 1.0:
            slot.mul_(prescale)
        target, add = self.shard.target(slot, pool)
        wire = self._plan.precision.of_wire(self._spec.dtype)
        return Reduction(slot, target, wire, add, error=self.error, span=self._spec.span)

    def store_reduced(self, pool: Pool) -> None:
        """Hand the finished sum to the gradient shard, which returns the slot to the pool or keeps it."""
        assert self.slot is not None
        slot, self.slot = self.slot, None
        self.shard.accept(slot, pool, self.layout.shape_key)
        if self._borrowed is not None and self._plan.scaling.prescale == 1.0:
            self.shard.accept_square_sum(slot, self._borrowed.square)

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's part of the reduced gradient, where the step reads it."""
        return self.shard.for_step()

    # -- p.grad, as the user sees it ----------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether there is a gradient of this accumulation window that the user has not dropped."""
        held = self.slot is not None or self.shard.value is not None
        return held and len(self.dropped) < len(self._parameters)

    def of_parameter(self, index: int) -> torch.Tensor | None:
        """Return the value of `p.grad`.

        This is the gradient itself if one rank has all of it, otherwise a placeholder whose errors name the functions
        that read it. fp16 gradients are multiplied by the loss scale until the step, so they have a placeholder too.
        """
        self.batch.copy()
        in_slot = self.slot is not None and bool(self._filled[index])
        if index in self.dropped or not (in_slot or self.shard.value is not None):
            return None
        whole, parameter = self._spec.layout, self._parameters[index]
        member = whole.members[index]
        scaled = self._plan.precision.compute is torch.float16
        self.return_borrowed()  # the program may keep the gradient
        if whole.num_shards == 1 and self._plan.num_replicas == 1 and not scaled:
            self.shard.wait()
            flat = self.slot if self.slot is not None else self.shard.value
            assert flat is not None
            # Offloaded gradients are not exposed, whether or not the device caches them.
            if flat is self.slot or self.shard.tier is Tier.DEVICE or self._device.type == "cpu":
                self.shard.forget_square_sum()  # the view may be written to
                return flat[member.start : member.stop].view(member.shape)
        where = "multiplied by the loss scale" if scaled and whole.num_shards == 1 else GradientPlaceholder.SHARDED
        return GradientPlaceholder.of(parameter, member.name, member.shape, where)

    def drop_of_parameter(self, index: int) -> None:
        """Discard the accumulated gradient of one parameter, as `p.grad = None` requests."""
        if index in self.dropped or (self.slot is None and self.shard.value is None):
            return
        self.batch.copy()
        member = self.layout.members[index]
        self._filled[index] = 0
        if self.shard.value is not None:
            self.shard.wait()
            start, stop = self._own_range
            low, high = max(start, member.start) - start, min(stop, member.stop) - start
            self.shard.value[low : max(low, high)].zero_()
            self.shard.forget_square_sum()
            self.drops_of_sums.add(index)
        self.dropped.add(index)

    def apply_drops(self) -> None:
        """Apply the gradient drops that user hooks requested during backward. No reduction is in flight."""
        for index in sorted(self.drops_at_end):
            self.drop_of_parameter(index)
        self.drops_at_end.clear()

    # -- the unsharded gradient ---------------------------------------------------------------------------------

    def drop(self, pool: Pool) -> None:
        """Discard everything that was accumulated."""
        self.batch.discard(self)
        if self.slot is not None:
            slot, self.slot = self.slot, None
            pool.give_back(slot, self.layout.shape_key)
        self.shard.drop(pool, self.layout.shape_key)
        self._borrowed = None
        for drops in (self.dropped, self.drops_at_end, self.drops_of_sums):
            drops.clear()

    def clear_autograd_gradients(self) -> None:
        """Clear gradients that are still on the Parameters, left by a user hook that raised."""
        for parameter in self._parameters:
            set_raw_grad(parameter, None)

    def reset_error_feedback(self) -> None:
        """Discard the error feedback, because other values are about to be loaded on every rank."""
        if self.error is not None:
            self.error = ErrorFeedback()

    def device_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that store gradients on the device, each once."""
        held = self.shard.tensors(Tier.DEVICE)
        slots = [self.slot] if self.slot is not None and all(self.slot is not tensor for tensor in held) else []
        return [*held, *slots, *(self.error.kept.values() if self.error is not None else ())]

    @property
    def open_bytes(self) -> int:
        """Bytes of an unsharded gradient that is not reduced yet."""
        held = self.shard.tensors(Tier.DEVICE)
        return self.slot.nbytes if self.slot is not None and all(self.slot is not tensor for tensor in held) else 0

    def num_bytes(self, tier: Tier) -> int:
        """Return the bytes of gradients stored in a tier."""
        if tier is Tier.DEVICE:
            return sum(tensor.nbytes for tensor in self.device_tensors())
        return sum(tensor.nbytes for tensor in self.shard.tensors(tier))
