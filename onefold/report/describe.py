"""The plan of an engine in words, with the bytes that one rank holds of each model state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onefold.config import Batch
from onefold.log import format_bytes
from onefold.optim.sharded import ShardedOptimizer
from onefold.plan import Counting, Crossing, ModelBytes, Plan, Rest, Tier, count_bytes
from onefold.runtime import Unit
from onefold.tier.device import Pool
from onefold.window import Window


def planned_bytes(
    units: Sequence[Unit], counting: Counting, window: Window, tier: Tier, plan: Plan | None = None
) -> ModelBytes:
    """Model-state bytes of one rank in one tier, by arithmetic; under another plan, everything on the device."""
    counting = replace(counting, num_micro_steps=2 if window.accumulates else 1, plan=plan or counting.plan)
    shapes = [run.shape for unit in units for run in unit.runs]
    if plan is not None:
        shapes = [replace(shape, rest=Rest()) for shape in shapes]
    return count_bytes(shapes, counting, tier)


def held_bytes(units: Sequence[Unit], pool: Pool, optimizer: ShardedOptimizer | None, tier: Tier) -> ModelBytes:
    """Model-state bytes of this rank in one tier, counted from its tensors."""
    runs = [run for unit in units for run in unit.runs]
    return ModelBytes(
        parameters=sum(run.parameter_bytes(tier) for run in runs),
        gradients=sum(run.gradient_bytes(tier) for run in runs),
        masters=optimizer.master_bytes(tier) if optimizer else 0,
        states=optimizer.state_bytes(tier) if optimizer else 0,
        largest_slot=pool.num_bytes if tier is Tier.DEVICE else 0,
    )


def describe(
    units: Sequence[Unit],
    plan: Plan,
    sizes: Mapping[Tier, ModelBytes],
    crossing: Crossing,
    batch: Batch,
    optimizer: ShardedOptimizer | None,
    collective: str,
) -> str:
    """What is replicated, what is sharded, and what one rank holds of each."""
    runs = [run for unit in units for run in unit.runs]
    trained = sum(run.layout.numel for unit in units for run in unit.trained)
    frozen = sum(run.layout.numel for run in runs if not run.trainable)
    kinds = sorted({str(run.dtype).removeprefix("torch.") for run in runs})
    lines = [
        f"{trained:,} trained parameters{f' and {frozen:,} frozen' if frozen else ''} in {len(units)} units "
        f"({', '.join(kinds)}), {optimizer.name if optimizer else 'no optimizer'}, {batch.world} "
        f"rank{'s' * (batch.world > 1)}, {collective} collectives, overlap {'on' if plan.overlap else 'off'}",
        *plan.words(),
    ]
    used = [tier for tier in Tier if sizes[tier].total or tier is Tier.DEVICE]
    for tier in used:
        where = "" if used == [Tier.DEVICE] else f" ({tier.value})"
        kinds_of_state = ("parameters", "gradients", "masters", "states", "total")
        lines.append(f"bytes per rank{where:<10}" + _spell(sizes[tier], kinds_of_state))
    slot = sizes[Tier.DEVICE].largest_slot
    if slot:
        lines.append(f"while in backward one more buffer per open unit, {format_bytes(slot)} at most each")
    if crossing.any:
        lines.append("bytes per step    " + _spell(crossing, ("down", "up", "read", "written")))
    return "\n".join(lines)


def _spell(sizes: ModelBytes | Crossing, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {format_bytes(getattr(sizes, name))}" for name in names)
