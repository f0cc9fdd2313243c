"""The plan in words and numbers, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onefold.config import Batch
from onefold.optim.step import ShardedStep
from onefold.plan import Crossing, ModelBytes, Plan, Residency, Tier, count_bytes
from onefold.runtime import Schedule, Unit


def planned_bytes(units: Sequence[Unit], plan: Plan, tier: Tier, *, on_device: bool = False) -> ModelBytes:
    """Model-state bytes of one rank in one tier, by arithmetic. `on_device`: as if nothing were offloaded."""
    specs = [param.spec for unit in units for param in unit.params]
    if on_device:
        specs = [replace(spec, residency=Residency()) for spec in specs]
    return count_bytes(specs, plan, tier)


def held_bytes(schedule: Schedule, step: ShardedStep | None, tier: Tier) -> ModelBytes:
    """Model-state bytes of this rank in one tier, counted from its tensors."""
    params = [param for unit in schedule.units for param in unit.params]
    return ModelBytes(
        parameters=sum(param.param_bytes(tier) for param in params),
        gradients=sum(param.grad.num_bytes(tier) for param in schedule.trained_params()),
        masters=step.master_bytes(tier) if step is not None else 0,
        states=step.state_bytes(tier) if step is not None else 0,
        largest_slot=schedule.in_flight.pool.num_bytes if tier is Tier.DEVICE else 0,
    )


def describe(
    units: Sequence[Unit],
    plan: Plan,
    sizes: Mapping[Tier, ModelBytes],
    crossing: Crossing,
    batch: Batch,
    optimizer: str | None,
    collective: str,
) -> str:
    """What is replicated, what is sharded, and what one rank holds of each."""
    trained = sum(param.layout.numel for unit in units for param in unit.trained)
    frozen = sum(param.layout.numel for unit in units for param in unit.params if not param.trainable)
    kinds = sorted({str(param.dtype).removeprefix("torch.") for unit in units for param in unit.params})
    lines = [
        f"{trained:,} trained parameters{f' and {frozen:,} frozen' if frozen else ''} in {len(units)} units "
        f"({', '.join(kinds)}), {optimizer or 'no optimizer'}, {batch.world} "
        f"rank{'s' * (batch.world > 1)}, {collective} collectives, overlap {'on' if plan.overlap else 'off'}",
        *plan.words(),
    ]
    used = [tier for tier in Tier if sizes[tier].total or tier is Tier.DEVICE]
    for tier in used:
        where = "" if used == [Tier.DEVICE] else f" ({tier.value})"
        lines.append(f"bytes per rank{where:<10}" + _by_kind(sizes[tier]))
    slot = sizes[Tier.DEVICE].largest_slot
    if slot:
        lines.append(f"while in backward one more buffer per open unit, {megabytes(slot)} at most each")
    if crossing.any:
        ways = {"down": crossing.down, "up": crossing.up, "read": crossing.read, "written": crossing.written}
        lines.append("bytes per step    " + ", ".join(f"{way} {megabytes(value)}" for way, value in ways.items()))
    return "\n".join(lines)


def _by_kind(sizes: ModelBytes) -> str:
    kinds = ("parameters", "gradients", "masters", "states", "total")
    return ", ".join(f"{kind} {megabytes(getattr(sizes, kind))}" for kind in kinds)


def megabytes(value: int) -> str:
    return f"{value / 1e6:,.1f} MB"
