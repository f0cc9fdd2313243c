"""Where a parameter's values are while it is a placeholder: each has a home, which can make it whole.

Units of a live engine are lent by its schedule, so that all ranks agree on the gather. What no engine has taken yet
(`zero.Init`), or has any more, is gathered here, by all ranks together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from onefold.comm import Agreement, Collective, Ledger, broadcast_from
from onefold.runtime.held import HOLDER, hold, let_go, raw_grad, set_data, set_raw_grad
from onefold.runtime.operations import operate
from onefold.runtime.order import Wish
from onefold.runtime.schedule import Schedule
from onefold.runtime.trees import inside_backward
from onefold.runtime.unit import ParameterState, Run, Unit

_next_number = 0

# Told of parameters that get a home and that leave it for good.
came: list[Callable[[nn.Parameter, Home], None]] = []
left: list[Callable[[nn.Parameter], None]] = []


class Owner(Protocol):
    """The engine, as far as homes know it."""

    def about_to_write(self) -> None:
        """Parameters are about to be written from outside."""

    def parameters_loaded(self, units: list[Unit]) -> None:
        """Parameters of these units were written from outside."""

    def gradient_dropped(self) -> None:
        """Somebody has set a parameter's `grad` to None."""


class Home:
    """Some runs that are whole or resting together. `number`: that of its first parameter, the same on every rank."""

    def __init__(self, runs: Sequence[Run], collective: Collective, ledger: Ledger) -> None:
        global _next_number
        self.number = _next_number
        _next_number += sum(len(run.parameters) for run in runs)
        self.lent = 0
        self.collective = collective
        self.ledger = ledger
        # A live engine holds the unit; this must not keep it alive.
        self._schedule: weakref.ref[Schedule] | None = None
        self._unit: weakref.ref[Unit] | None = None
        self._owner: weakref.ref[Owner] | None = None
        self._runs: list[Run] | None = list(runs)
        self._members = {
            id(parameter): (which, index)
            for which, run in enumerate(runs)
            for index, parameter in enumerate(run.parameters)
        }
        for parameter in (parameter for run in runs for parameter in run.parameters):
            parameter.__dict__[HOLDER] = self
        for run in runs:
            for parameter in run.parameters:
                hold(parameter, resting=not run.rests_whole and run.is_resting)
        self._tell()

    @staticmethod
    def of_unit(unit: Unit, schedule: Schedule, ledger: Ledger, owner: Owner) -> Home:
        home = Home(unit.runs, schedule.flights.collective, ledger)
        home._schedule, home._unit, home._runs = weakref.ref(schedule), weakref.ref(unit), None
        home._owner = weakref.ref(owner)
        return home

    def _tell(self) -> None:
        here = [parameter for run in self.runs for parameter in run.parameters if home_of(parameter) is self]
        for tell in came:
            for parameter in here:
                tell(parameter, self)

    @property
    def owner(self) -> Owner | None:
        return self._owner() if self._owner is not None else None

    @property
    def unit(self) -> Unit | None:
        return self._unit() if self._unit is not None else None

    @property
    def _lender(self) -> tuple[Schedule | None, Unit | None]:
        """The schedule of a live engine and the unit it lends, or neither."""
        return self._schedule() if self._schedule is not None else None, self.unit

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

    def place_of(self, parameter: torch.Tensor) -> int:
        """Its place among all parameters here."""
        return list(self._members).index(id(parameter))

    def stand_alone(self) -> None:
        """The engine lets go: from now on runs that rest as shards are held here; other parameters need no home."""
        runs, self._schedule, self._unit, self._owner = self.runs, None, None, None
        for run in runs:
            run.forget_gradients()
            run.drop_second()
        if all(run.rests_whole for run in runs):
            leave_home(parameter for run in runs for parameter in run.parameters)
        else:
            self._runs = runs
            self._tell()  # shards that lay in the engine's memory lie elsewhere now

    @property
    def is_whole(self) -> bool:
        return all(run.full.untyped_storage().size() for run in self.runs)

    @property
    def in_flight(self) -> bool:
        unit = self.unit
        return unit is not None and unit.parameter is ParameterState.GATHERING

    def borrow(self) -> None:
        """Whole until given back. All ranks call this together."""
        schedule, unit = self._lender
        with torch._C.DisableTorchFunction():
            if schedule is not None and unit is not None:
                schedule.lend(unit)
            elif self.lent == 0:
                sharded = [run for run in self.runs if not run.rests_whole]
                with torch.inference_mode(mode=False), torch.no_grad():
                    self.collective.start_gather([run.refill(exact=True) for run in sharded]).finish()
                    for run in sharded:
                        run.show()
        self.lent += 1

    def give_back(self) -> None:
        self.lent -= 1
        schedule, unit = self._lender
        with torch._C.DisableTorchFunction():
            if schedule is not None and unit is not None:
                schedule.take_back(unit)
            elif self.lent == 0:
                for run in self.runs:
                    if not run.rests_whole:
                        run.hide(drop=True)

    # -- what a held parameter asks -----------------------------------------------------------------------------

    def name_of(self, parameter: nn.Parameter) -> str:
        run, index = self.run_of(parameter)
        return run.layout.members[index].name

    @property
    def in_pass(self) -> bool:
        schedule, unit = self._lender
        return schedule is not None and unit is not None and schedule.in_pass

    def lender(self) -> tuple[Schedule, Unit]:
        schedule, unit = self._lender
        assert schedule is not None
        assert unit is not None
        return schedule, unit

    def operate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], resting: list[nn.Parameter]
    ) -> Any:
        """One torch function on parameters at rest, inside a pass."""
        homes = [home for parameter in resting if (home := home_of(parameter)) is not None]
        return operate(homes, func, args, kwargs, resting)

    def set_data(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """`parameter.data = value` while it is unsharded: its values are written to where they lie."""
        unit = self.unit
        lent = unit is not None and unit.uses.lent > 0
        if self.owner is None or (lent and value.shape != parameter.shape):
            set_data(parameter, value)  # `GatheredParameters` and `Init` see to it, on all ranks together
            return
        same = (value.shape, value.dtype, value.device) == (parameter.shape, parameter.dtype, parameter.device)
        if not same:
            raise RuntimeError(
                f"parameter {self.name_of(parameter)} ({parameter.dtype}, {tuple(parameter.shape)} on "
                f"{parameter.device}) was given data of {value.dtype}, {tuple(value.shape)} on {value.device}: the "
                "engine's model cannot be cast, moved or resized. Do it before initialize; dtypes and devices come "
                "from the config"
            )
        with torch.no_grad():
            parameter.copy_(value)

    def data_read(self, parameter: nn.Parameter) -> None:
        """From now on writes are looked for by value: resharding would lose them."""
        run, index = self.run_of(parameter)
        if self.in_pass and not run.rests_whole:
            run.look_for_writes(index)

    def set_requires_grad(self, parameter: nn.Parameter, value: bool) -> None:
        """A trained parameter that is frozen is left out of the step until it is unfrozen."""
        run, index = self.run_of(parameter)
        if run.trainable:
            (run.frozen.discard if value else run.frozen.add)(index)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What stands for a gradient that was moved into the flat buffer."""
        run, index = self.run_of(parameter)
        return run.gradient_of(index) if run.trainable else None

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        run, index = self.run_of(parameter)
        schedule, _ = self._lender
        # Autograd has just left it there: a hook of the user's runs before ours, which will take what it leaves.
        landing = inside_backward() and raw_grad(parameter) is not None
        if value is not None and run.trainable and self.owner is not None and not landing:
            raise RuntimeError(
                f"the gradient of {self.name_of(parameter)} is reduced and held by the engine: set it between "
                "backward and step with onefold.utils.safe_set_full_grad(parameter, value)"
            )
        set_raw_grad(parameter, value)
        if (
            value is None
            and run.trainable
            and schedule is not None
            and inside_backward()
            and (landing or schedule.in_backward)
        ):
            run.drops_at_end.add(index)
        elif value is None and run.trainable:
            run.drop_gradient_of(index)
            owner = self.owner
            if owner is not None:
                owner.gradient_dropped()

    def moved(self) -> bool:
        """Whether some parameter was given a tensor of its own while it was whole (`.data = ...`)."""
        with torch._C.DisableTorchFunction():
            return any(not run.is_home(index) for run in self.runs for index in range(len(run.parameters)))

    def reshaped(self) -> list[str]:
        """Parameters that were given data of another shape."""
        with torch._C.DisableTorchFunction():
            return [name for run in self.runs for name in run.strangers()]

    def cast(self, of: Callable[[torch.dtype], torch.dtype]) -> None:
        """Another dtype for everything here, before any engine has it."""
        for run in self.runs:
            if of(run.dtype) != run.dtype:
                run.cast(of(run.dtype))
        self._tell()

    def leave_whole(self) -> None:
        """Do not give back: the next forward or step of the engine puts the unit to rest, and without an engine the
        parameters are plain from now on.
        """
        schedule, unit = self._lender
        if schedule is not None and unit is not None:
            self.lent -= 1
            unit.uses.held = True
            schedule.take_back(unit)
        else:
            leave_home(parameter for run in self.runs for parameter in run.parameters)

    def read(self) -> None:
        """A module that does not own these parameters is about to use them."""
        schedule, unit = self._lender
        if schedule is not None and unit is not None:
            schedule.read(unit, within=True)

    def meet(self, wish: Wish, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers."""
        schedule, _ = self._lender
        if schedule is not None:
            return schedule.order.meet(wish, numbers)
        return Agreement(self.collective.group, self.ledger).meet("GatheredParameters", numbers)

    def take_values_of(self, rank: int) -> None:
        """One rank has written: its values become everybody's.

        A parameter that was given data of another shape leaves for good, and is laid out anew by `initialize`.
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for run in self.runs:
                leave_home(run.let_leave(name) for name in run.strangers())
                run.take_parameters()
                broadcast_from(self.collective.group, rank, run.full, self.ledger)
                run.store()
        if self.owner is None:
            self._tell()  # of shards that were made just now
        self.tell_written()

    def tell_written(self) -> None:
        """Parameters have new values, on every rank: whoever keeps masters of them must know."""
        for run in self.runs:
            run.change()
        owner, unit = self.owner, self.unit
        if owner is not None and unit is not None:
            owner.parameters_loaded([unit])

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # a pickled parameter has left home


def home_of(parameter: object) -> Home | None:
    home = getattr(parameter, "__dict__", {}).get(HOLDER)
    return home if isinstance(home, Home) and id(parameter) in home._members else None


def about_to_write(parameter: object) -> None:
    """Somebody outside is about to write a parameter: the engine that trains it, if any, finishes what it does."""
    home = home_of(parameter)
    owner = home.owner if home is not None else None
    if owner is not None:
        owner.about_to_write()


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, also while it is a placeholder."""
    home = home_of(parameter)
    if home is None:
        return parameter.shape
    run, index = home.run_of(parameter)
    return torch.Size(run.layout.members[index].shape)


def leave_home(parameters: Iterable[nn.Parameter]) -> None:
    """These parameters lie elsewhere now; a home that all have left is freed."""
    for parameter in parameters:
        let_go(parameter)
        if parameter.__dict__.pop(HOLDER, None) is not None:
            for tell in left:
                tell(parameter)


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
