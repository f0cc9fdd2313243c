"""Gradients that are not finite: what a config wants done about them, and where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from onefold.comm.agreement import as_float, as_integer
from onefold.config import Config, ConfigError
from onefold.optim.norm import square_of
from onefold.runtime import Schedule

_NAMED = 3


class NonFiniteError(FloatingPointError):
    """A step's gradients are not finite. No weight was changed on any rank; the gradients are dropped."""


def choose_policy(config: Config, *, scales_loss: bool) -> Literal["raise", "skip", "ignore"]:
    """fp16 and bf16 do as DeepSpeed does; otherwise such a step would make every weight NaN, and raises."""
    asked = config.onefold.nonfinite_gradients
    if scales_loss:
        if asked not in ("auto", "skip"):
            raise ConfigError(
                f"onefold.nonfinite_gradients is {asked!r} with fp16: the loss scale is found by gradients that "
                'overflow, and such steps are always skipped. Leave it out or write "skip"'
            )
        return "skip"
    if asked != "auto":
        return asked
    if config.bf16.enabled:
        return "skip" if config.bf16.check_grad_overflow else "ignore"
    return "raise"


def tell_nonfinite(schedule: Schedule, losses: Sequence[torch.Tensor]) -> str:
    """Which units' gradients are not finite, and whose loss; the same words on all ranks, which call this together.

    A reduced gradient no longer shows which rank made it so. The rank's own losses do.
    """
    units = schedule.trained
    bad = [any(not _is_finite(square_of(run)) for run in unit.trained if run.reduced is not None) for unit in units]
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
