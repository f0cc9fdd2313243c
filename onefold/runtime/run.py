"""Runs: one flat line of parameters each, and the gradients that land beside it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import nn

from onefold.comm import Lost, Reduction
from onefold.plan import Plan, Precision, RunShape, Tier, Wire
from onefold.plan.memory import reduces_in_place
from onefold.runtime.held import HeldGradient, raw_grad, set_raw_grad
from onefold.runtime.line import Line
from onefold.tier.bus import HERE, Arrival
from onefold.tier.device import Pool
from onefold.tier.lower import LowerTiers
from onefold.tier.nvme import DiskTensor


class Run(Line):
    """One flat line of a unit: parameters of one dtype, all trainable or all frozen, all persistent or none.

    [Note: where a gradient is]
    Autograd hands each gradient over as a fresh tensor; `land` moves it into the run's line and clears `p.grad`, so
    nothing a user does to `p.grad` (zero_grad, create_graph) can detach the line. The line (`grad`) is a slot of the
    pool, taken at the first gradient. Where the plan keeps whole gradients it gathers micro-steps until the boundary;
    elsewhere every micro-step ends in a reduction. The reduction leaves this rank's sum in `reduced`: in its own slice
    of the slot where the dtypes allow and the slot is not wanted back, otherwise in a shard of its own. `reduced` is a
    sum over ranks and micro-steps; the step divides it. Where the host steps, `reduced` is on the host, and what each
    micro-step reduces on the device is only passing through (`Descent`).
    """

    def __init__(
        self,
        shape: RunShape,
        parameters: Sequence[nn.Parameter],
        *,
        plan: Plan,
        precision: Precision,
        rank: int,
        accumulates: bool,
        device: torch.device,
        lower: LowerTiers | None = None,
    ) -> None:
        super().__init__(shape, parameters, plan=plan, rank=rank, device=device, lower=lower)
        self.wire = precision.of_wire(self.dtype)
        self.grad: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        # Where the host steps: the gradient on its way down, and the square sum of one that needs no adding there.
        self.descending: Arrival | Future[None] = HERE
        self.square: torch.Tensor | None = None
        self.passing: torch.Tensor | None = None
        # What quantized wires have lost of the gradient, where they make up for it.
        self.lost = Lost() if self.plan.makes_up and self.trainable else None
        self.last_landing = [0] * len(self.parameters)
        # Trained parameters that the user has frozen since, and those whose gradient he has dropped.
        self.frozen: set[int] = set()
        self.dropped: set[int] = set()
        # Dropped by a hook of the user's inside a backward, whose reduction may be under way: they go when it is over.
        self.drops_at_end: set[int] = set()
        # Dropped after they were summed over the ranks, in this window: each rank clears its slice.
        self.drops_of_sums: set[int] = set()
        self._filled = bytearray(len(self.parameters))
        self._precision = precision
        self._accumulates = accumulates
        self._sum_slot: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None
        self._other_shard: torch.Tensor | None = None
        if self.trainable:
            self._allocate_shard()

    @property
    def _grad_dtype(self) -> torch.dtype:
        if not self.plan.keeps_whole_gradient:
            return self.dtype
        return self._precision.of_gradient(self.dtype, self._num_micro_steps)

    @property
    def _reduced_dtype(self) -> torch.dtype:
        return self._precision.of_reduced(self.dtype, self._num_micro_steps, self.layout.num_shards)

    @property
    def _num_micro_steps(self) -> int:
        return 2 if self._accumulates else 1

    @property
    def in_place(self) -> bool:
        """Whether the sum stays in the slot; otherwise the slot goes back as soon as it is reduced."""
        return reduces_in_place(self.plan, self.shape, self._precision, self.layout.num_shards, self._num_micro_steps)

    def _allocate_shard(self) -> None:
        if self.rest.offloads_states:
            assert self.lower is not None
            self._shard = self.lower.host(self.layout.shard_size, self._reduced_dtype)
            if self.plan.delays_host:
                self._other_shard = self.lower.host(self.layout.shard_size, self._reduced_dtype)
        elif not self.in_place:
            self._shard = torch.zeros(self.layout.shard_size, dtype=self._reduced_dtype, device=self.device)

    def accumulate(self, pool: Pool) -> None:
        """From now on several micro-steps add up: widen what was meant for one."""
        if self._accumulates:
            return
        self._accumulates = True
        if self.rest.offloads_states:
            self._widen_on_host()
        elif self.in_place:
            self._shard = None
        elif self._shard is None or self._shard.dtype != self._reduced_dtype:
            self._allocate_shard()
        if self.grad is not None and self.grad.dtype != self._grad_dtype:
            wide = pool.take(self.layout.total, self._grad_dtype, self.layout.shape_key).copy_(self.grad)
            pool.give_back(self.grad, self.layout.shape_key)
            self.grad = wide
        if self.reduced is not None and self.reduced.dtype != self._reduced_dtype:
            self.reduced = self.reduced.to(self._reduced_dtype)
            self._give_back_sum_slot(pool)

    def _widen_on_host(self) -> None:
        assert self.lower is not None
        assert self._shard is not None
        if self._shard.dtype != self._reduced_dtype:
            self.wait_for_reduced()
            self._shard = self.lower.more_host(self.layout.shard_size, self._reduced_dtype).copy_(self._shard)
            if self._other_shard is not None:
                self._other_shard = self.lower.more_host(self.layout.shard_size, self._reduced_dtype)
            self.reduced = self._shard if self.reduced is not None else None

    def open(self, pool: Pool) -> None:
        """Have a line to land gradients in."""
        if self.reduced is not None:
            self.accumulate(pool)
        self.dropped.clear()
        self.grad = pool.take(self.layout.total, self._grad_dtype, self.layout.shape_key)
        self._filled = bytearray(len(self.parameters))

    def land(self, index: int) -> None:
        """Move the gradient autograd has just produced into the line."""
        parameter, member = self.parameters[index], self.layout.members[index]
        gradient = raw_grad(parameter)
        if gradient is None:
            return  # a hook of the user's has dropped it
        assert self.grad is not None
        with torch.no_grad():
            gradient = gradient.detach()
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            view = self.grad[member.start : member.stop].view(member.shape)
            if self._filled[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        self._filled[index] = 1
        self.dropped.discard(index)
        set_raw_grad(parameter, None)

    # -- p.grad, as a user sees it ------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Whether some gradient of this window is held here that nobody has dropped."""
        return (self.grad is not None or self.reduced is not None) and len(self.dropped) < len(self.parameters)

    def gradient_of(self, index: int) -> torch.Tensor | None:
        """What `p.grad` is: the gradient itself where one rank has all of it, otherwise what says how to get it.

        In fp16 it carries the loss scale until the step: clipping it would clip to something else.
        """
        landed = self.grad is not None and bool(self._filled[index])
        if index in self.dropped or not (landed or self.reduced is not None):
            return None
        member, parameter = self.layout.members[index], self.parameters[index]
        scaled = self._precision.compute is torch.float16
        if self.layout.num_shards == 1 and self.plan.part_size is None and not scaled:
            self.wait_for_reduced()
            line = self.grad if self.grad is not None else self.reduced
            assert line is not None
            if line.device == self.device:
                self.square = None  # the view may be written to
                return line[member.start : member.stop].view(member.shape)
        where = "multiplied by the loss scale" if scaled and self.layout.num_shards == 1 else HeldGradient.SHARDED
        return HeldGradient.of(parameter, member.name, member.shape, where)

    def drop_gradient_of(self, index: int) -> None:
        """`p.grad = None`: what has been accumulated of one parameter counts no more."""
        if index in self.dropped or (self.grad is None and self.reduced is None):
            return
        member = self.layout.members[index]
        self._filled[index] = 0
        if self.reduced is not None:
            self.wait_for_reduced()
            start, stop = self.own_range
            low, high = max(start, member.start) - start, min(stop, member.stop) - start
            self.reduced[low : max(low, high)].zero_()
            self.square = None
            self.drops_of_sums.add(index)
        self.dropped.add(index)

    def end_backward(self) -> None:
        """Nothing is in flight: what hooks have dropped goes."""
        for index in sorted(self.drops_at_end):
            self.drop_gradient_of(index)
        self.drops_at_end.clear()

    def reduction(self, prescale: float, pool: Pool) -> Reduction:
        """What the collective has to do for this run; parameters without a gradient count as zero."""
        assert self.grad is not None
        for member, filled in zip(self.layout.members, self._filled, strict=True):
            if not filled:
                self.grad[member.start : member.stop].zero_()
        if self.plan.gradients.wire is not Wire.NATIVE:
            for start, stop in self.layout.gaps:  # a block that overflowed is all NaN, padding too
                self.grad[start:stop].zero_()
        if prescale != 1.0:
            self.grad.mul_(prescale)
        if self.rest.offloads_states:
            self.passing = self._passing(pool)
            return Reduction(self.grad, self.passing, self.wire, add=False, lost=self.lost)
        add = self.reduced is not None
        if self.reduced is None and self.in_place:
            start, stop = self.layout.shard_range(self._rank)
            self.reduced, self._sum_slot = self.grad[start:stop], self.grad
        elif self.reduced is None:
            self.reduced = self._shard
        assert self.reduced is not None
        return Reduction(self.grad, self.reduced, self.wire, add, lost=self.lost)

    def _passing(self, pool: Pool) -> torch.Tensor:
        """Where one micro-step's sum lies on the device until it is on the host."""
        assert self.grad is not None
        if self.layout.num_shards == 1:
            return self.grad
        return pool.take(self.layout.shard_size, self._reduced_dtype)

    @property
    def passing_bytes(self) -> int:
        """Of one micro-step's sum."""
        dtype = self.dtype if self.layout.num_shards == 1 else self._reduced_dtype
        return self.layout.shard_size * dtype.itemsize

    def land_on_host(self) -> tuple[torch.Tensor, bool]:
        """Where a micro-step's sum goes on the host, and whether it is added to what is there."""
        if self.update is not None:
            self.update.result()  # the step still reads the last one
        assert self._shard is not None
        add = self.reduced is not None
        if not add:
            self.wait_for_reduced()  # one that was dropped may still be on its way there
        self.reduced = self._shard
        return self._shard, add

    def swap_shards(self) -> None:
        """The host keeps this gradient for longer: the next one goes elsewhere."""
        self._shard, self._other_shard = self._other_shard, self._shard

    def wait_for_reduced(self) -> None:
        """Until the reduced gradient is whole on the host."""
        if isinstance(self.descending, Future):
            self.descending.result()
        else:
            self.descending.wait()

    def close(self, pool: Pool) -> None:
        """The line has been reduced: give the slot back, unless the sum lies in it."""
        if self.grad is not None and self.grad is not self._sum_slot:
            pool.give_back(self.grad, self.layout.shape_key)
        self.grad = None

    def drop_gradients(self, pool: Pool) -> None:
        """Forget everything that has been accumulated."""
        self.close(pool)
        self._give_back_sum_slot(pool)
        self.reduced = self.square = None
        for drops in (self.dropped, self.drops_at_end, self.drops_of_sums):
            drops.clear()

    def drop_landing(self) -> None:
        """A hook of the user's that runs before ours has raised: the gradient is still where autograd left it."""
        for parameter in self.parameters:
            set_raw_grad(parameter, None)

    def start_over(self) -> None:
        """Other values, of another run maybe, are about to come, on every rank."""
        self.change()
        if self.lost is not None:
            self.lost = Lost()

    def forget_gradients(self) -> None:
        """No more training: hold nothing but parameters, and none on a disk that is about to be cleaned."""
        self.freshen()
        if isinstance(self.shard, DiskTensor):
            self.shard = self.shard.load()
            self.rest = replace(self.rest, parameters=Tier.HOST)
        elif self.shard is not None and self.rest.parameters is Tier.HOST:
            self.shard = self.shard.clone()  # it would hold the memory of all that rested beside it
        self.grad = self.reduced = self._sum_slot = self._shard = self._other_shard = self.lost = None

    def _give_back_sum_slot(self, pool: Pool) -> None:
        if self._sum_slot is not None:
            pool.give_back(self._sum_slot, self.layout.shape_key)
            self._sum_slot = None

    def gradient_tensors(self) -> list[torch.Tensor]:
        """What holds gradients on the device now."""
        shard = None if self.rest.offloads_states else self._shard
        lost = self.lost.kept.values() if self.lost is not None else ()
        held = (shard, self._sum_slot if self._sum_slot is not None else self.grad, *lost)
        return [tensor for tensor in held if tensor is not None]

    def gradient_bytes(self, tier: Tier) -> int:
        """Bytes of gradient held now."""
        if tier is Tier.DEVICE:
            return sum(tensor.nbytes for tensor in self.gradient_tensors())
        on_host = self.rest.offloads_states and tier is Tier.HOST
        return sum(t.nbytes for t in (self._shard, self._other_shard) if on_host and t is not None)
