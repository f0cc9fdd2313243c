"""The gradient norm: partial sums of each rank's shards, added in rank order. One host sync a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from onefold.comm.agreement import as_float, as_integer
from onefold.runtime import Run, Schedule
from onefold.runtime.squares import square_sum


@dataclass(frozen=True)
class StepScalars:
    """What ranks tell each other before a step."""

    norm: float
    overflow: bool
    late: bool
    alarm: bool


def exchange_scalars(runs: Iterable[Run], schedule: Schedule, *, late: bool, alarm: bool = False) -> StepScalars:
    """Square sums of this rank's reduced gradients, whether any rank holds late ones, and whether any is alarmed."""
    squares = [_square(run).to(run.device) for run in runs if run.layout.total]
    mine = torch.stack(squares).sum().item() if squares else 0.0
    rows = schedule.meet_for_step([as_integer(mine), int(late), int(alarm)])
    square = 0.0
    for row in rows:
        square += as_float(row[0])
    finite = square == square and square != float("inf")
    return StepScalars(
        norm=square**0.5 if finite else float("inf"),
        overflow=not finite,
        late=any(row[1] for row in rows),
        alarm=any(row[2] for row in rows),
    )


def _square(run: Run) -> torch.Tensor:
    """Of a gradient that went down whole it was taken on the device; what the host added up it squares itself."""
    assert run.reduced is not None
    if run.square is not None:
        return run.square
    if run.rest.offloads_states:
        run.wait_for_reduced()
    return square_sum(run.reduced)
