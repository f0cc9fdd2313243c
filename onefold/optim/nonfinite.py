"""Gradients that are not finite: where they are, and whose loss they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onefold.comm.agreement import as_float, as_integer
from onefold.offload.grad_shard import GradShard
from onefold.runtime import Schedule, Unit

_NAMED = 3


class NonFiniteError(FloatingPointError):
    """A step's gradients are not finite. No weight was changed on any rank; the gradients are dropped."""


def tell_nonfinite(schedule: Schedule, losses: Sequence[torch.Tensor]) -> str:
    """Which units' gradients are not finite, and whose loss; the same words on all ranks, which call this together.

    A reduced gradient no longer shows which rank made it so. The rank's own losses do.
    """
    units = schedule.trained
    bad = [any(not _is_finite(grad.square_sum()) for grad in _reduced(unit)) for unit in units]
    values = [loss.item() for loss in losses]
    worst = next((value for value in values if not math.isfinite(value)), 0.0)
    mine = torch.tensor([*bad, bool(values), as_integer(worst)], dtype=torch.int64)
    rows = schedule.order.agreement.exchange("which gradients are not finite", mine).tolist()
    names = [unit.name for index, unit in enumerate(units) if any(row[index] for row in rows)]
    guilty = {rank: as_float(row[-1]) for rank, row in enumerate(rows) if not math.isfinite(as_float(row[-1]))}
    if guilty:
        ranks = ", ".join(f"{value} on rank {rank}" for rank, value in guilty.items())
        whose = f"the loss was {ranks}"
    elif all(row[-2] for row in rows):
        whose = "the loss was finite on every rank, so it happened in backward"
    else:
        whose = "no loss is known that was not finite, as backward was called on a loss directly"
    return f"the gradient of {_name(names, len(units))} is not finite; {whose}"


def _name(names: Sequence[str], num_units: int) -> str:
    if len(names) == num_units > 1:
        return f"every unit, {names[0]} first,"
    rest = len(names) - _NAMED
    return f"unit {', '.join(names[:_NAMED])}{f' and {rest} more' if rest > 0 else ''}"


def _is_finite(square: torch.Tensor) -> bool:
    return math.isfinite(square.item())


def _reduced(unit: Unit) -> list[GradShard]:
    return [param.grad.shard for param in unit.trained if param.grad.shard.value is not None]
