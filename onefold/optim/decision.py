"""The decision about a step: whether it is applied, skipped or refused, and with which gradient coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onefold.comm.agreement import as_float, as_integer
from onefold.optim.loss_scale import build_loss_scale
from onefold.optim.norm import GroupDigest, HostCopy, StepNorm, StepScalars, exchange_scalars
from onefold.optim.step import ShardedStep
from onefold.plan import Plan
from onefold.recovery.loss_guard import LossGuard
from onefold.recovery.refused_step import NonFiniteError, SuspiciousStep
from onefold.recovery.replica_check import ReplicaCheck
from onefold.recovery.spike_guard import Refusal, SpikeGuard
from onefold.runtime import FlatParam, Schedule

# The number of units that a message lists by name.
_MAX_NAMES = 3


class StepDecision:
    """The decision about each step: gradient norm, overflow check, loss scale and clipping.

    [Note: deciding a step on the device]
    A step depends on the norm of gradients that the device may still be reducing: gradients are clipped by it, and the
    step is skipped if it is not finite. If the host waited for the norm before it queued the step, the device would be
    idle in between. Therefore the step is queued before the norm is known, if the kernels of the optimizer can be
    disabled by a flag in device memory. The clipping coefficient and this flag are computed on the device, in the same
    order and precision as on the host. The host then reads the norm from a copy that was queued before the step, and
    continues while the device still steps. With offloaded states, with step hooks of the user, and with other
    optimizers the host waits for the norm first.
    """

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self._scaling, self._nonfinite = plan.scaling, plan.guards.nonfinite
        self.scales_loss = plan.scaling.loss_scale.enabled
        self.loss_scale = build_loss_scale(plan.scaling)
        # A description of the gradients that were not finite in the last skipped step.
        self.problem = ""
        # The losses of the backward passes since the last step, as far as the engine received them.
        self.losses: list[torch.Tensor] = []
        self._copies: list[HostCopy] = []
        reads, is_first = plan.guards.reads_losses, schedule.in_flight.collective.group.rank == 0
        self.loss_guard = LossGuard(plan.guards, logs=is_first) if reads else None
        spike = plan.guards.grad_norm_spike
        self.norm_guard = SpikeGuard(spike, logs=is_first) if spike.factor is not None else None
        # The comparison of replicas, if the config requests it.
        self.replica_check: ReplicaCheck | None = None
        # Whether the engine re-executes suspicious steps, and whether it wants to re-execute the next one anyway.
        self.suspects = self.examines = False
        # Whether the last step was applied.
        self.applied = False
        # The signal after which all ranks stop, as of the last step, or 0.
        self.stop_signal = 0
        self._scalars: StepScalars | None = None
        self._unscaled = 1.0
        self._schedule = schedule

    @property
    def spike_guards(self) -> dict[str, SpikeGuard]:
        """The guards with values of the last steps, by their names in a checkpoint."""
        found = {
            "losses": self.loss_guard.spikes if self.loss_guard is not None else None,
            "grad_norms": self.norm_guard,
        }
        return {name: spikes for name, spikes in found.items() if spikes is not None}

    def add_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of a backward. Its copy to the host does not wait for the backward."""
        self.losses.append(loss)
        if self.loss_guard is not None:
            self._copies.append(HostCopy(loss.reshape(()).double()))

    def forget_losses(self) -> None:
        """Discard the losses of the backward passes since the last step."""
        self.losses.clear()
        self._copies.clear()

    def take(
        self,
        step: ShardedStep,
        optimizer: torch.optim.Optimizer,
        divisor: int,
        *,
        alarm: bool = False,
        stop_signal: int = 0,
        examined: bool = False,
    ) -> bool:
        """Step with the reduced gradients divided by `divisor`. Skip the step, or raise, if they are not finite.

        Return False without stepping on any rank if any rank passes `alarm`. If any rank passes `stop_signal`, it is
        set on all ranks. Raise `SuspiciousStep` for a step that should be re-executed, unless it was `examined`.
        """
        self._schedule.check_in_place()
        groups = step.groups_to_compare() if not self._schedule.alone else None
        waits = self.suspects or self.norm_guard is not None or not step.can_be_decided_later(optimizer)
        scalars = self._exchange(groups, alarm=alarm, waits=waits, stop_signal=stop_signal)
        if scalars.alarm:
            return False
        if scalars.late:
            self._schedule.reduce_late()
            scalars = self._exchange(groups, waits=waits, stop_signal=scalars.stop_signal)
        self._scalars, self._unscaled = scalars, self.unscale(divisor)
        if self.suspects and not examined and ((problem := self._suspicion(scalars)) or self.examines):
            raise SuspiciousStep(problem)
        self.stop_signal = scalars.stop_signal
        if self.replica_check is not None:
            self.replica_check.run()
        if (refusal := self._refusal(scalars)) is not None:
            step.give_up_early("a skipped step")
            step.overflow = self.applied = False
            self.problem = refusal.problem
            if refusal.error is not None:
                raise refusal.error
            return True
        checks = self._nonfinite != "ignore"
        # All ranks must decide the same way, because a queued step launches collectives.
        on_device = scalars.square.is_cuda and not scalars.waits
        if on_device:
            skip = scalars.square.isfinite().logical_not().float() if checks else None
            step.apply(optimizer, self._coefficient_on_device(scalars.square), skip)
        try:
            step.overflow = checks and scalars.overflow  # the host waits for the device here, once a step
        except BaseException:  # an interrupt does not change the decision of the device
            if on_device and checks and scalars.overflow:
                step.undo_step()
            raise
        self._schedule.guard.check()
        self.applied = not step.overflow
        if self.applied and not on_device:
            step.apply(optimizer, self._unscaled * self._clip_coefficient())
        elif step.overflow and on_device:
            step.undo_step()
        elif step.overflow:
            step.give_up_early("a skipped step")
        if step.overflow and not self.scales_loss:
            self.problem = _describe_nonfinite(self._schedule, self.losses)
            if self._nonfinite in ("raise", "rollback"):
                raise NonFiniteError(
                    self.problem,
                    "No weight was changed, and the gradients are dropped, so another batch may follow. Set "
                    'onefold.nonfinite_gradients to "skip" to skip such steps, or "ignore" to run them.',
                    rolls_back=self._nonfinite == "rollback",
                )
        return True

    def _refusal(self, scalars: StepScalars) -> Refusal | None:
        """Check loss and gradient norm, and record both. Gradients that are not finite are checked later."""
        loss = self.loss_guard.check(scalars.losses) if self.loss_guard is not None else None
        spikes = self.norm_guard if self.norm_guard is not None and not scalars.overflow else None
        norm = spikes.check(scalars.norm * self._unscaled) if spikes is not None else None
        raised = (each for each in (loss, norm) if each is not None and each.error is not None)
        return next(raised, loss or norm)

    def _suspicion(self, scalars: StepScalars) -> str:
        """Return why a step is suspicious, on all ranks, or an empty string. Overflows of fp16 are not."""
        if self.loss_guard is not None and (problem := self.loss_guard.describe_spike(scalars.losses)):
            return problem
        if self.norm_guard is not None and not scalars.overflow:
            problem = self.norm_guard.describe(scalars.norm * self._unscaled)
            if problem:
                return problem
        not_finite = self._nonfinite != "ignore" and not self.scales_loss and scalars.overflow
        return "a gradient is not finite" if not_finite else ""

    @property
    def norm(self) -> float | None:
        """The norm of the last averaged gradient before clipping. Reading it may synchronize with the device."""
        norm = self.norm_to_read()
        return norm.read() if norm is not None else None

    def norm_to_read(self) -> StepNorm | None:
        """Return the value of `norm` without synchronizing with the device."""
        return StepNorm(self._scalars, self._unscaled) if self._scalars is not None else None

    def forget_norm(self) -> None:
        """Discard the norm of the last step."""
        self._scalars = None

    def unscale(self, divisor: int) -> float:
        """Return the factor that averages the gradients and divides the loss scale out.

        The loss scale is updated after this call only, because the gradients were computed with the current one.
        """
        return self._scaling.postscale / (self.loss_scale.value * divisor)

    def _exchange(
        self, groups: GroupDigest | None, *, alarm: bool = False, waits: bool = False, stop_signal: int = 0
    ) -> StepScalars:
        params = [param for param in self._schedule.trained_params() if _is_reduced(param)]
        late = bool(self._schedule.late_units())
        if not params and not late and self._schedule.trained_units:
            raise RuntimeError("engine.step() without a backward since the last one. Call engine.backward first.")
        # After `engine.backward`, losses are divided by the accumulation count, so that their sum is the mean.
        loss = sum(copy.read() for copy in self._copies) if self._copies else None
        return exchange_scalars(
            params, self._schedule, groups, late=late, alarm=alarm, waits=waits, loss=loss, stop_signal=stop_signal
        )

    def _clip_coefficient(self) -> float:
        norm = self.norm if self._scaling.clipping > 0 else None
        if norm is None or not math.isfinite(norm):
            return 1.0
        return min(1.0, self._scaling.clipping / (norm + 1e-6))

    def _coefficient_on_device(self, square: torch.Tensor) -> float | torch.Tensor:
        """Compute the coefficient on the device, with the same bits as on the host."""
        if self._scaling.clipping <= 0:
            return self._unscaled
        # torch computes a number divided by a tensor as a product with the reciprocal, which has other bits.
        clip = square.new_full((), self._scaling.clipping).div_(square.sqrt().mul_(self._unscaled).add_(1e-6))
        return torch.where(square.isfinite(), clip.clamp(max=1.0), 1.0) * self._unscaled


def _describe_nonfinite(schedule: Schedule, losses: Sequence[torch.Tensor]) -> str:
    """Return which units' gradients and which ranks' losses are not finite. A collective call with a common result.

    A reduced gradient does not show which rank caused the problem, but the losses of the ranks do.
    """
    units = schedule.trained_units
    bad = [
        any(
            not math.isfinite(param.grad.shard.square_sum().item())
            for param in unit.trained_params
            if _is_reduced(param)
        )
        for unit in units
    ]
    values = [loss.item() for loss in losses]
    worst = next((value for value in values if not math.isfinite(value)), 0.0)
    mine = torch.tensor([*bad, bool(values), as_integer(worst)], dtype=torch.int64)
    rows = schedule.agreement.exchange("which gradients are not finite", mine).tolist()
    names = [unit.name for index, unit in enumerate(units) if any(row[index] for row in rows)]
    bad_losses = {rank: as_float(row[-1]) for rank, row in enumerate(rows) if not math.isfinite(as_float(row[-1]))}
    if bad_losses:
        cause = "the loss was " + ", ".join(f"{value} on rank {rank}" for rank, value in bad_losses.items())
    elif all(row[-2] for row in rows):
        cause = "the loss was finite on every rank, so backward caused it"
    else:
        cause = "the loss is unknown, because backward was called on the loss directly"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    which = (
        f"every unit (the first is {names[0]})"
        if len(names) == len(units) > 1
        else f"unit {', '.join(names[:_MAX_NAMES])}{more}"
    )
    return f"the gradient of {which} is not finite; {cause}"


def _is_reduced(param: FlatParam) -> bool:
    return param.grad.shard.value is not None
