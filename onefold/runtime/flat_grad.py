"""Flat gradients: the gradients of a flat parameter on their way from autograd to the reduced gradient."""

from __future__ import annotations

import torch
from torch import nn

from onefold.comm import ErrorFeedback, Reduction
from onefold.offload.shard_store import ShardStore
from onefold.plan import Plan, Tier, Wire
from onefold.plan.memory import reduces_in_place
from onefold.pool import Pool
from onefold.runtime.held import HeldGradient, raw_grad, set_raw_grad


class FlatGrad:
    """The gradient of one flat parameter.

    [Note: where a gradient is]
    Autograd hands each gradient over as a fresh tensor; `land` moves it into the flat gradient and clears `p.grad`, so
    nothing a user does to `p.grad` (zero_grad, create_graph) can detach it. The flat gradient is a `slot` of the pool,
    taken at the first gradient. Where the plan keeps unsharded gradients it collects micro-steps until the boundary;
    elsewhere every micro-step ends in a reduction. The reduction leaves this rank's sum in `shard.value`. That is a sum
    over ranks and micro-steps; the step divides it.
    """

    def __init__(
        self, store: ShardStore, parameters: list[nn.Parameter], plan: Plan, own_range: tuple[int, int]
    ) -> None:
        spec = store.spec
        self.layout = spec.layout
        self.slot: torch.Tensor | None = None
        # What quantized wires have lost of the gradient, where it is fed back.
        self.error = ErrorFeedback() if plan.feedback is not None else None
        self.last_landing = [0] * len(parameters)
        # Places of parameters whose gradient the user has dropped.
        self.dropped: set[int] = set()
        # Dropped by a hook of the user's inside a backward, whose reduction may be under way: they go when it is over.
        self.drops_at_end: set[int] = set()
        # Dropped after they were summed over the ranks, in this window: each rank clears its slice.
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
        if not self._plan.keeps_whole_gradient:
            return self._spec.dtype
        return self._plan.precision.of_gradient(self._spec.dtype, self._num_micro_steps)

    @property
    def _reduced_dtype(self) -> torch.dtype:
        return self._plan.precision.of_reduced(self._spec.dtype, self._num_micro_steps, self.layout.num_shards)

    @property
    def _in_place(self) -> bool:
        """Whether the sum stays in the slot; otherwise the slot goes back as soon as it is reduced."""
        return reduces_in_place(self._plan, self._spec, self._num_micro_steps)

    # -- landing ------------------------------------------------------------------------------------------------

    def open(self, pool: Pool) -> None:
        """Have a slot for gradients to land in."""
        if self.shard.value is not None:
            self.accumulate(pool)
        self.dropped.clear()
        self.slot = pool.take(self.layout.total, self._slot_dtype, self.layout.shape_key)
        self._filled = bytearray(len(self._filled))

    def accumulate(self, pool: Pool) -> None:
        """From now on several micro-steps add up: widen what was meant for one."""
        if self._accumulates:
            return
        self._accumulates = True
        key = self.layout.shape_key
        if self.slot is not None and self.slot.dtype != self._slot_dtype:
            wide = pool.take(self.layout.total, self._slot_dtype, key).copy_(self.slot)
            pool.give_back(self.slot, key)
            self.slot = wide
        self.shard.widen(self._reduced_dtype, pool, key, in_place=self._in_place)

    def land(self, index: int) -> None:
        """Move the gradient autograd has just produced into the slot."""
        parameter, member = self._parameters[index], self.layout.members[index]
        gradient = raw_grad(parameter)
        if gradient is None:
            return  # a hook of the user's has dropped it
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
        """What this rank has accumulated of one gradient and not reduced yet, in its parameter's shape."""
        if self.slot is None or self.shard.value is not None or not self._filled[index] or index in self.dropped:
            return None
        member = self.layout.members[index]
        return self.slot[member.start : member.stop].view(member.shape)

    # -- reduction ----------------------------------------------------------------------------------------------

    def start_reduction(self, prescale: float, pool: Pool) -> Reduction:
        """What the collective has to do; parameters without a gradient count as zero."""
        assert self.slot is not None
        for member, filled in zip(self.layout.members, self._filled, strict=True):
            if not filled:
                self.slot[member.start : member.stop].zero_()
        if self._plan.gradients.wire is not Wire.NATIVE:
            for start, stop in self.layout.gaps:  # a block that overflowed is all NaN, padding too
                self.slot[start:stop].zero_()
        if prescale != 1.0:
            self.slot.mul_(prescale)
        target, add = self.shard.target(self.slot, pool)
        return Reduction(self.slot, target, self._plan.precision.of_wire(self._spec.dtype), add, error=self.error)

    def finish_reduction(self, pool: Pool) -> None:
        assert self.slot is not None
        slot, self.slot = self.slot, None
        self.shard.finish(slot, pool, self.layout.shape_key)

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's sum."""
        assert self.shard.value is not None, "a step comes after a backward"
        return self.shard.value

    # -- p.grad, as a user sees it ------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether some gradient of this window is held here that nobody has dropped."""
        held = self.slot is not None or self.shard.value is not None
        return held and len(self.dropped) < len(self._parameters)

    def of_parameter(self, index: int) -> torch.Tensor | None:
        """What `p.grad` is: the gradient itself where one rank has all of it, otherwise what says how to get it. In
        fp16 it carries the loss scale until the step: clipping it would clip to something else.
        """
        landed = self.slot is not None and bool(self._filled[index])
        if index in self.dropped or not (landed or self.shard.value is not None):
            return None
        member, parameter = self.layout.members[index], self._parameters[index]
        scaled = self._plan.precision.compute is torch.float16
        if self.layout.num_shards == 1 and self._plan.num_replicas == 1 and not scaled:
            self.shard.wait()
            flat = self.slot if self.slot is not None else self.shard.value
            assert flat is not None
            if flat.device == self._device:
                self.shard.forget_square_sum()  # the view may be written to
                return flat[member.start : member.stop].view(member.shape)
        where = "multiplied by the loss scale" if scaled and self.layout.num_shards == 1 else HeldGradient.SHARDED
        return HeldGradient.of(parameter, member.name, member.shape, where)

    def drop_of_parameter(self, index: int) -> None:
        """`p.grad = None`: what has been accumulated of one parameter counts no more."""
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

    def end_backward(self) -> None:
        """Nothing is in flight: what hooks have dropped goes."""
        for index in sorted(self.drops_at_end):
            self.drop_of_parameter(index)
        self.drops_at_end.clear()

    # -- dropping all of it -------------------------------------------------------------------------------------

    def drop(self, pool: Pool) -> None:
        """Forget everything that has been accumulated."""
        if self.slot is not None:
            slot, self.slot = self.slot, None
            pool.give_back(slot, self.layout.shape_key)
        self.shard.drop(pool, self.layout.shape_key)
        for drops in (self.dropped, self.drops_at_end, self.drops_of_sums):
            drops.clear()

    def drop_landing(self) -> None:
        """A hook of the user's that runs before ours has raised: the gradient is still where autograd left it."""
        for parameter in self._parameters:
            set_raw_grad(parameter, None)

    def forget_error(self) -> None:
        """Other values, of another run maybe, are about to come, on every rank."""
        if self.error is not None:
            self.error = ErrorFeedback()

    def device_tensors(self) -> list[torch.Tensor]:
        """What holds gradients on the device now, each once."""
        held = self.shard.tensors() if self.shard.tier is Tier.DEVICE else []
        slots = [self.slot] if self.slot is not None and all(self.slot is not tensor for tensor in held) else []
        return [*held, *slots, *(self.error.kept.values() if self.error is not None else ())]

    @property
    def open_bytes(self) -> int:
        """Of a whole gradient that is not reduced yet."""
        held = self.shard.tensors()
        return self.slot.nbytes if self.slot is not None and all(self.slot is not tensor for tensor in held) else 0

    def num_bytes(self, tier: Tier) -> int:
        """Bytes of gradient held now."""
        if tier is Tier.DEVICE:
            return sum(tensor.nbytes for tensor in self.device_tensors())
        return sum(tensor.nbytes for tensor in self.shard.tensors()) if self.shard.tier is tier else 0
