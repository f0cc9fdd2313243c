"""The plan in words and numbers, for people."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.plan import ModelBytes, Plan
from onefold.runtime import Unit


def describe(
    plan: Plan, units: Sequence[Unit], sizes: ModelBytes, *, world_size: int, optimizer: str, collective: str
) -> str:
    """What is replicated, what is sharded, and what one rank holds of each."""
    trained = sum(run.layout.numel for unit in units for run in unit.trained)
    frozen = sum(run.layout.numel for unit in units for run in unit.runs if not run.trainable)
    kinds = sorted({str(run.dtype).removeprefix("torch.") for unit in units for run in unit.runs})
    head = f"{trained:,} trained parameters" + (f" and {frozen:,} frozen" if frozen else "")
    lines = [
        f"{head} in {len(units)} units ({', '.join(kinds)}), {optimizer}, {world_size} rank{'s' * (world_size > 1)}, "
        f"{collective} collectives, overlap {'on' if plan.overlap else 'off'}",
        *plan.words(),
        "bytes per rank    "
        + ", ".join(
            f"{name} {megabytes(value)}"
            for name, value in (
                ("parameters", sizes.parameters),
                ("gradients", sizes.gradients),
                ("masters", sizes.masters),
                ("states", sizes.states),
                ("total", sizes.total),
            )
        ),
    ]
    if sizes.largest_slot and world_size > 1:
        lines.append(f"while in backward one more buffer per open unit, {megabytes(sizes.largest_slot)} at most each")
    return "\n".join(lines)


def megabytes(value: int) -> str:
    return f"{value / 1e6:,.1f} MB"
