"""Units: runs that are gathered, released, reduced and stepped together, and who needs them now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import torch
from torch import nn

from onefold.comm import Gathering, Reduction
from onefold.runtime.run import Run
from onefold.tier.device import Pool

__all__ = ["GradientState", "ParameterState", "Run", "Unit", "Uses"]


class GradientState(Enum):
    """EMPTY -> OPEN (gradients land) -> REDUCING (on the wire) -> EMPTY, the sum left in each run's `reduced`."""

    EMPTY = "empty"
    OPEN = "open"
    REDUCING = "reducing"


class ParameterState(Enum):
    """RESTING -> GATHERING -> FULL -> RESTING. A unit whose runs all rest whole is always FULL."""

    RESTING = "resting"
    GATHERING = "gathering"
    FULL = "full"


class Unit:
    """The parameters that are gathered, released, reduced and stepped together."""

    def __init__(self, name: str, module: nn.Module, runs: Sequence[Run], *, index: int, shared: bool) -> None:
        self.name = name or "(root)"
        self.module = module
        self.runs = list(runs)
        self.trained = [run for run in runs if run.trainable]
        self.sharded = [run for run in runs if not run.rests_whole]
        self.index = index
        # Its module contains modules of other units.
        self.encloses = False
        # Some gradient may arrive twice in one backward, so only the end of backward closes this unit.
        self.shared = shared
        self.gradient = GradientState.EMPTY
        self.parameter = ParameterState.FULL
        # Stepped, and the other ranks' slices of what rests whole are on their way.
        self.refreshing = False
        # Gathers on their way. A unit that is whole may be gathered again, since another rank needs this one's part.
        self.flying = 0
        self.uses = Uses()
        self.num_elements = sum(run.layout.total for run in self.trained)
        self.num_gathered = sum(run.layout.total for run in self.sharded)
        self.num_parameters = sum(len(run.parameters) for run in self.trained)

    # -- parameters ---------------------------------------------------------------------------------------------

    def start_gather(self, *, exact: bool = False, near: bool = False) -> list[Gathering]:
        self.flying += 1
        if self.parameter is ParameterState.RESTING:
            self.parameter = ParameterState.GATHERING
        return [run.refill(exact=exact, near=near) for run in self.sharded]

    def undo_gather(self) -> None:
        """It could not be started."""
        for run in self.sharded:
            run.change()
        self.flying -= 1
        if self.parameter is ParameterState.GATHERING and not self.flying:
            self.parameter = ParameterState.RESTING
            for run in self.sharded:
                run.hide()

    def finish_gather(self) -> None:
        self.flying -= 1
        # A unit that was whole when another rank asked for it stays as it is.
        if self.parameter is ParameterState.GATHERING:
            for run in self.sharded:
                run.show()
            self.parameter = ParameterState.FULL
        for run in self.sharded:
            run.keep_second()

    def release(self, *, drop: bool = False) -> None:
        """Back to rest. `drop`: no graph will look for the next values in the memory of these."""
        assert self.parameter is ParameterState.FULL, (self.name, self.parameter)
        assert not self.flying, self.name
        if self.sharded:
            for run in self.sharded:
                run.hide(drop=drop)
            self.parameter = ParameterState.RESTING

    def is_seen_by(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors is a view of these parameters."""
        found = list(tensors)
        return any(run.is_seen_by(found) for run in self.sharded)

    def hand_out(self) -> None:
        """Somebody got a view of these parameters, and may keep it."""
        for run in self.sharded:
            run.hand_out()

    def written_members(self) -> list[str]:
        """Parameters that were written in place while they were unsharded: resharding would lose it."""
        return [name for run in self.sharded for name in run.written_members()]

    def store(self) -> None:
        """The whole values were written from outside: shards take them over."""
        assert self.parameter is ParameterState.FULL, (self.name, self.parameter)
        for run in self.sharded:
            run.store()

    # -- gradients ----------------------------------------------------------------------------------------------

    def open(self, pool: Pool) -> None:
        if self.gradient is GradientState.EMPTY:
            for run in self.trained:
                run.open(pool)
            self.gradient = GradientState.OPEN
        assert self.gradient is GradientState.OPEN, (self.name, self.gradient)

    def start_reducing(self, prescale: float, pool: Pool) -> list[Reduction]:
        assert self.gradient is GradientState.OPEN, (self.name, self.gradient)
        self.gradient = GradientState.REDUCING
        return [run.reduction(prescale, pool) for run in self.trained]

    def finish_reducing(self, pool: Pool) -> None:
        assert self.gradient is GradientState.REDUCING, (self.name, self.gradient)
        for run in self.trained:
            run.close(pool)
        self.gradient = GradientState.EMPTY

    def drop_gradients(self, pool: Pool) -> None:
        assert self.gradient is not GradientState.REDUCING, self.name
        for run in self.trained:
            run.drop_gradients(pool)
        self.gradient = GradientState.EMPTY


class Uses:
    """Who needs a unit whole right now, on this rank.

    `forwards`: calls of its module under way. `backwards`: calls whose backward has begun and not ended; `calls` and
    `ended` count those of the pass that will have a backward, and those whose backward is over.
    `held`: somebody outside reads it; it stays until the pass ends. `lent`: open `GatheredParameters`.
    """

    def __init__(self) -> None:
        self.forwards = 0
        # The forwards under way: the number of the call, 0 without a backward, and the producers of its inputs.
        self.stack: list[tuple[int, list[object]]] = []
        self.backwards: set[int] = set()
        self.calls = 0
        self.ended = 0
        self.held = False
        self.lent = 0
        # The event of the program that this use belongs to, where one is followed.
        self.event: int | None = None

    @property
    def any(self) -> bool:
        return bool(self.forwards or self.backwards or self.held or self.lent)

    def forget_pass(self) -> None:
        self.backwards.clear()
        self.ended = 0
        self.held = False
        self.event = None
