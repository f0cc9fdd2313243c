"""The plan in words and numbers, for people."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.config import Batch
from onefold.optim.sharded import ShardedOptimizer
from onefold.plan import ModelBytes, Plan, Precision, count_bytes
from onefold.runtime import Unit
from onefold.tier.device import Pool
from onefold.window import Window


def planned_bytes(
    units: Sequence[Unit], plan: Plan, precision: Precision, window: Window, optimizer: ShardedOptimizer | None
) -> ModelBytes:
    """Model-state bytes of one rank, by arithmetic."""
    return count_bytes(
        [run.shape for unit in units for run in unit.runs],
        plan,
        precision,
        world_size=window.batch.world,
        num_micro_steps=2 if window.accumulates else 1,
        num_states=optimizer.num_states if optimizer else 0,
    )


def held_bytes(units: Sequence[Unit], pool: Pool, optimizer: ShardedOptimizer | None) -> ModelBytes:
    """Model-state bytes of this rank, counted from its tensors."""
    runs = [run for unit in units for run in unit.runs]
    return ModelBytes(
        parameters=sum(run.parameter_bytes() for run in runs),
        gradients=sum(run.gradient_bytes() for run in runs),
        masters=optimizer.master_bytes() if optimizer else 0,
        states=optimizer.state_bytes() if optimizer else 0,
        largest_slot=pool.num_bytes,
    )


def describe(
    units: Sequence[Unit],
    plan: Plan,
    sizes: ModelBytes,
    batch: Batch,
    optimizer: ShardedOptimizer | None,
    collective: str,
) -> str:
    """What is replicated, what is sharded, and what one rank holds of each."""
    trained = sum(run.layout.numel for unit in units for run in unit.trained)
    frozen = sum(run.layout.numel for unit in units for run in unit.runs if not run.trainable)
    kinds = sorted({str(run.dtype).removeprefix("torch.") for unit in units for run in unit.runs})
    held = {
        "parameters": sizes.parameters,
        "gradients": sizes.gradients,
        "masters": sizes.masters,
        "states": sizes.states,
        "total": sizes.total,
    }
    lines = [
        f"{trained:,} trained parameters{f' and {frozen:,} frozen' if frozen else ''} in {len(units)} units "
        f"({', '.join(kinds)}), {optimizer.name if optimizer else 'no optimizer'}, {batch.world} "
        f"rank{'s' * (batch.world > 1)}, {collective} collectives, overlap {'on' if plan.overlap else 'off'}",
        *plan.words(),
        "bytes per rank    " + ", ".join(f"{name} {megabytes(value)}" for name, value in held.items()),
    ]
    if sizes.largest_slot:
        lines.append(f"while in backward one more buffer per open unit, {megabytes(sizes.largest_slot)} at most each")
    return "\n".join(lines)


def megabytes(value: int) -> str:
    return f"{value / 1e6:,.1f} MB"
