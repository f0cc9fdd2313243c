"""Flat gradients: the gradients of a flat parameter, from autograd to the reduced gradient."""

from __future__ import annotations

import torch
from torch import nn

from onefold.comm import ErrorFeedback, Reduction
from onefold.offload.shard_store import ShardStore
from onefold.plan import Plan, Tier, Wire
from onefold.plan.buffers import reduces_in_place
from onefold.pool import Pool
from onefold.runtime.parameter_proxy import GradientPlaceholder, raw_grad, set_raw_grad


class FlatGrad:
    """The gradient of one flat parameter.

    [Note: where a gradient is]
    Autograd produces each gradient as a new tensor. `accumulate_into_slot` copies it into the flat gradient and clears
    `p.grad`, so that user code that changes `p.grad` (zero_grad, create_graph) cannot detach it. The flat gradient is a
    `slot`: a buffer of the pool that is taken at the first gradient. If the plan keeps unsharded gradients, the slot
    accumulates micro-steps until the boundary; otherwise every micro-step ends with a reduction. The reduction leaves
    this rank's part of the sum over ranks and micro-steps in `shard.value`. The step divides it.
    """

    def __init__(
        self, store: ShardStore, parameters: list[nn.Parameter], plan: Plan, own_range: tuple[int, int]
    ) -> None:
        spec = store.spec
        self.layout = spec.layout
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
        self._accumulates = plan.accumulates
        self._filled = bytearray(len(parameters))
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
        self.slot = pool.take(self.layout.total, self._slot_dtype, self.layout.shape_key)
        self._filled = bytearray(len(self._filled))

    def begin_accumulation(self, pool: Pool) -> None:
        """Widen buffers that were meant for one micro-step to the dtype in which micro-steps are accumulated."""
        if self._accumulates:
            return
        self._accumulates = True
        key = self.layout.shape_key
        if self.slot is not None and self.slot.dtype != self._slot_dtype:
            wide = pool.take(self.layout.total, self._slot_dtype, key).copy_(self.slot)
            pool.give_back(self.slot, key)
            self.slot = wide
        self.shard.widen(self._reduced_dtype, pool, key, in_place=self._in_place)

    def accumulate_into_slot(self, index: int) -> None:
        """Add the gradient that autograd has just produced to the slot, and clear it on the Parameter."""
        parameter, member = self._parameters[index], self.layout.members[index]
        gradient = raw_grad(parameter)
        if gradient is None:
            return  # a user hook has dropped it
        assert self.slot is not None
        with torch.no_grad():
            gradient = gradient.detach()
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            view = self.slot[member.start : member.stop].view(member.shape)
            if self._filled[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        self._filled[index] = 1
        self.dropped.discard(index)
        set_raw_grad(parameter, None)

    def unreduced(self, index: int) -> torch.Tensor | None:
        """Return this rank's accumulated gradient of one parameter before its reduction, or None."""
        if self.slot is None or self.shard.value is not None or not self._filled[index] or index in self.dropped:
            return None
        member = self.layout.members[index]
        return self.slot[member.start : member.stop].view(member.shape)

    # -- reduction ----------------------------------------------------------------------------------------------

    def prepare_reduce_scatter(self, prescale: float, pool: Pool) -> Reduction:
        """Return the reduce-scatter of the slot. Parameters without a gradient are reduced as zeros."""
        assert self.slot is not None
        for member, filled in zip(self.layout.members, self._filled, strict=True):
            if not filled:
                self.slot[member.start : member.stop].zero_()
        if self._plan.gradients.wire is not Wire.NATIVE:
            for start, stop in self.layout.gaps:  # a quantized block that overflowed is all NaN, including padding
                self.slot[start:stop].zero_()
        if prescale != 1.0:
            self.slot.mul_(prescale)
        target, add = self.shard.target(self.slot, pool)
        return Reduction(self.slot, target, self._plan.precision.of_wire(self._spec.dtype), add, error=self.error)

    def store_reduced(self, pool: Pool) -> None:
        """Hand the finished sum to the gradient shard, which returns the slot to the pool or keeps it."""
        assert self.slot is not None
        slot, self.slot = self.slot, None
        self.shard.accept(slot, pool, self.layout.shape_key)

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
        in_slot = self.slot is not None and bool(self._filled[index])
        if index in self.dropped or not (in_slot or self.shard.value is not None):
            return None
        member, parameter = self.layout.members[index], self._parameters[index]
        scaled = self._plan.precision.compute is torch.float16
        if self.layout.num_shards == 1 and self._plan.num_replicas == 1 and not scaled:
            self.shard.wait()
            flat = self.slot if self.slot is not None else self.shard.value
            assert flat is not None
            # Offloaded gradients are not exposed, whether or not the device caches them.
            if flat is self.slot or self.shard.tier is Tier.DEVICE or self._device.type == "cpu":
                self.shard.forget_square_sum()  # the view may be written to
                return flat[member.start : member.stop].view(member.shape)
        where = (
            "multiplied by the loss scale" if scaled and self.layout.num_shards == 1 else GradientPlaceholder.SHARDED
        )
        return GradientPlaceholder.of(parameter, member.name, member.shape, where)

    def drop_of_parameter(self, index: int) -> None:
        """Discard the accumulated gradient of one parameter, as `p.grad = None` requests."""
        if index in self.dropped or (self.slot is None and self.shard.value is None):
            return
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
        if self.slot is not None:
            slot, self.slot = self.slot, None
            pool.give_back(slot, self.layout.shape_key)
        self.shard.drop(pool, self.layout.shape_key)
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
