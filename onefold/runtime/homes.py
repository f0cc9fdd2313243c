"""Where a parameter's values are while it is a placeholder: each has a home, which can make it whole.

Units of a live engine are lent by its schedule, so that all ranks agree on the gather. What no engine has taken yet
(`zero.Init`), or has any more, is gathered here, by all ranks together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import nn

from onefold.comm import Collective, Ledger, broadcast_from
from onefold.runtime.schedule import Schedule
from onefold.runtime.unit import Run, Unit

_ATTRIBUTE = "_onefold_home"
_numbers = count()


class Home:
    """Some runs that are whole or resting together. `number`: the same on every rank, and grows."""

    def __init__(self, runs: Sequence[Run], collective: Collective, ledger: Ledger) -> None:
        self.number = next(_numbers)
        self.lent = 0
        self.collective = collective
        self.ledger = ledger
        # A live engine holds the unit; this must not keep it alive.
        self._schedule: weakref.ref[Schedule] | None = None
        self._unit: weakref.ref[Unit] | None = None
        self._runs: list[Run] | None = list(runs)
        self._members = {
            id(parameter): (which, index)
            for which, run in enumerate(runs)
            for index, parameter in enumerate(run.parameters)
        }
        for parameter in (parameter for run in runs for parameter in run.parameters):
            parameter.__dict__[_ATTRIBUTE] = self

    @staticmethod
    def of_unit(unit: Unit, schedule: Schedule, ledger: Ledger) -> Home:
        home = Home(unit.runs, schedule.flights.collective, ledger)
        home._schedule, home._unit, home._runs = weakref.ref(schedule), weakref.ref(unit), None
        return home

    @property
    def unit(self) -> Unit | None:
        return self._unit() if self._unit is not None else None

    @property
    def runs(self) -> list[Run]:
        unit = self.unit
        runs = unit.runs if unit is not None else self._runs
        assert runs is not None
        return runs

    def run_of(self, parameter: torch.Tensor) -> tuple[Run, int]:
        """The run a parameter lies in, and its place there."""
        which, index = self._members[id(parameter)]
        return self.runs[which], index

    def stand_alone(self) -> None:
        """The engine lets go: from now on the runs are held here."""
        self._runs, self._schedule, self._unit = self.runs, None, None

    @property
    def is_whole(self) -> bool:
        return all(run.full.untyped_storage().size() for run in self.runs)

    def borrow(self) -> None:
        """Whole until given back. All ranks call this together."""
        self.lent += 1
        schedule, unit = self._schedule() if self._schedule else None, self.unit
        if schedule is not None and unit is not None:
            schedule.lend(unit)
        elif self.lent == 1:
            sharded = [run for run in self.runs if not run.rests_whole]
            with torch.no_grad():
                self.collective.start_gather([run.refill() for run in sharded]).finish()
                for run in sharded:
                    run.show()

    def give_back(self) -> None:
        self.lent -= 1
        schedule, unit = self._schedule() if self._schedule else None, self.unit
        if schedule is not None and unit is not None:
            schedule.take_back(unit)
        elif self.lent == 0:
            for run in self.runs:
                if not run.rests_whole:
                    run.hide()

    def take_values_of(self, rank: int) -> None:
        """One rank has written: its values become everybody's."""
        with torch.no_grad():
            for run in self.runs:
                broadcast_from(self.collective.group, rank, run.full, self.ledger)
                run.store()

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # a pickled parameter has left home


def home_of(parameter: object) -> Home | None:
    home = getattr(parameter, "__dict__", {}).get(_ATTRIBUTE)
    return home if isinstance(home, Home) and id(parameter) in home._members else None


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, also while it is a placeholder."""
    home = home_of(parameter)
    if home is None:
        return parameter.shape
    run, index = home.run_of(parameter)
    return torch.Size(run.layout.members[index].shape)


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[list[Home]]:
    """Whole inside. Homes are taken in one order on every rank, each once."""
    homes = sorted({home for p in parameters if (home := home_of(p)) is not None}, key=lambda home: home.number)
    borrowed: list[Home] = []
    try:
        for home in homes:
            home.borrow()
            borrowed.append(home)
        yield homes
    finally:
        for home in borrowed:
            home.give_back()
