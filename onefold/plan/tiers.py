"""Which flat parameter rests in which tier: the device is filled first, then the host, then the disks. No tensors.

Units are taken in their order, so what stays on the device is used first: its forward runs while the host still steps
the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.plan.memory import FlatParamSpec, Residency, count_bytes, master_dtype
from onefold.plan.table import Plan, Tier


@dataclass(frozen=True)
class TierBudget:
    """How much of each tier model state may take, in bytes, and how much a config asks to be kept from lower ones."""

    ratio: float | None = 1.0
    """The share of the states that is offloaded; None: as little as the device has room for."""
    device: int | None = None
    host: int | None = None
    states_on_host: int = 0
    """Elements whose states stay on the host where others go to disk; parameters alike."""
    parameters_on_host: int = 0

    @staticmethod
    def of(plan: Plan, *, free_device: int | None, free_host: int) -> TierBudget:
        """`free_device`: None where the device is the host itself, whose memory is then no reason to leave it."""
        offload = plan.offload
        device = free_device * 3 // 4 if free_device is not None else None
        return TierBudget(
            ratio=offload.optimizer.ratio,
            device=offload.device_bytes if offload.device_bytes is not None else device,
            host=offload.host_bytes if offload.host_bytes is not None else free_host * 9 // 10,
            states_on_host=offload.optimizer.max_in_cpu,
            parameters_on_host=offload.param.max_in_cpu,
        )


def assign_tiers(specs: Sequence[FlatParamSpec], plan: Plan, budget: TierBudget) -> list[FlatParamSpec]:
    """The same flat parameters, each with its residency."""
    wanted = plan.states.tier
    settled = list(specs)
    trained = [place for place, spec in enumerate(specs) if spec.trainable]
    if wanted is not Tier.DEVICE:
        on_host = trained if wanted is Tier.HOST or budget.ratio is None else []
        for place in trained:
            settled[place] = replace(specs[place], residency=Residency(Tier.HOST if place in on_host else Tier.NVME))
        settled = [_with_parameters(spec, plan) for spec in settled]
        for place in _kept_on_device(settled, trained, plan, budget):
            settled[place] = replace(specs[place], residency=Residency())
    left = [place for place in trained if settled[place].residency.offloads_states]
    if wanted is Tier.NVME and budget.ratio is None:
        _spill(settled, left, plan, budget)
    elif wanted is Tier.NVME:
        spare = budget.states_on_host
        for place in left:
            spare -= specs[place].layout.shard_size
            if spare >= 0:
                settled[place] = replace(settled[place], residency=Residency(Tier.HOST))
    return _settle_parameters(settled, plan, budget)


def _kept_on_device(settled: list[FlatParamSpec], trained: list[int], plan: Plan, budget: TierBudget) -> list[int]:
    """The first ones, as far as the ratio or the budget goes."""
    kept: list[int] = []
    if budget.ratio is None:
        if budget.device is None:
            return trained
        trial = list(settled)
        for place in trained:
            trial[place] = replace(trial[place], residency=Residency())
            bytes_ = count_bytes(trial, plan)
            if bytes_.total + 2 * bytes_.largest_slot > budget.device:
                break
            kept.append(place)
        return kept
    total = sum(settled[place].layout.numel for place in trained)
    used = 0
    for place in trained:
        used += settled[place].layout.numel
        if used > (1 - budget.ratio) * total:
            break
        kept.append(place)
    return kept


def _spill(settled: list[FlatParamSpec], left: list[int], plan: Plan, budget: TierBudget) -> None:
    """What the host has no room for goes to disk, the last first."""
    for place in reversed(left):
        if budget.host is None or count_bytes(settled, plan, Tier.HOST).total <= budget.host:
            return
        settled[place] = replace(settled[place], residency=Residency(Tier.NVME))


def _settle_parameters(settled: list[FlatParamSpec], plan: Plan, budget: TierBudget) -> list[FlatParamSpec]:
    """Where parameters rest, the first on the host as far as it was asked to keep them."""
    found, spare = [], budget.parameters_on_host
    for spec in settled:
        placed = _with_parameters(spec, plan)
        if placed.residency.parameters is Tier.NVME:
            spare -= placed.layout.shard_size
            if spare >= 0:
                placed = replace(placed, residency=replace(placed.residency, parameters=Tier.HOST))
        found.append(placed)
    return found


def _with_parameters(spec: FlatParamSpec, plan: Plan) -> FlatParamSpec:
    """What stays unsharded stays on the device, and so does what is cast from a master there: it is held once."""
    residency = spec.residency
    wanted = plan.parameters.tier
    stays = not plan.shards_parameters or spec.persistent or (spec.trainable and not residency.offloads_states)
    if (
        wanted is Tier.NVME
        and residency.states is Tier.HOST
        and spec.trainable
        and master_dtype(spec.dtype) == spec.dtype
    ):
        wanted = Tier.HOST  # the master there is what is gathered
    return replace(
        spec, residency=Residency(residency.states, Tier.DEVICE if stays else wanted, apart=plan.delays_host)
    )
