"""When units move: what happens at the moments of a step. `order` knows which collective is next, `flights` flies it.

[Note: gradients that come late]
A gradient may land after its unit has been launched: a module run twice under reentrant checkpointing reports each
run by itself, and a rank that was held to have skipped a unit may come to it after all. Such gradients stay in the
unit's line and travel with its next reduction; if the step comes first, the scalars that ranks exchange at every step
say so, and all ranks reduce those units once more (`reduce_late`).

[Note: when a unit may be let go]
After its forward, unless the program keeps it. In backward, when nothing will read it any more: when the producer of
an input of every call that had begun is about to run (autograd runs later nodes first, so all of the call's nodes
have), or, for a call without inputs that need gradients, when all its gradients have landed. Whatever is still whole
when backward ends is let go then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import torch

from onefold.comm import Agreement, Collective, Ledger
from onefold.plan import Moment, Plan
from onefold.runtime.descent import Descent
from onefold.runtime.flights import Flights
from onefold.runtime.held import at_rest, raw_grad
from onefold.runtime.order import Order, Wish
from onefold.runtime.trees import unrecorded
from onefold.runtime.unit import GradientState, ParameterState, Run, Unit
from onefold.tier.device import Pool
from onefold.tier.lower import LowerTiers


class Schedule:
    """Moves units at the moments of a step."""

    def __init__(
        self,
        units: Sequence[Unit],
        plan: Plan,
        collective: Collective,
        ledger: Ledger,
        pool: Pool,
        prescale: float,
        lower: LowerTiers | None = None,
    ) -> None:
        self.units = list(units)
        self.trained = [unit for unit in units if unit.trained]
        self.sharded = [unit for unit in units if unit.sharded]
        self.in_backward = False
        agreement = Agreement(collective.group, ledger)
        offloaded = [run for unit in units for run in unit.trained if run.rest.offloads_states]
        descent = Descent(lower, pool, offloaded) if lower is not None and offloaded else None
        self.flights = Flights(plan, collective, agreement.guard, pool, prescale, descent)
        self.order = Order(units, plan, self.flights, agreement, ledger, self.let_go)
        self._plan = plan
        self._pool = pool
        self._lower = lower
        self._frozen = [
            (parameter, member.name)
            for run in (run for unit in units for run in unit.runs if not run.trainable)
            for parameter, member in zip(run.parameters, run.layout.members, strict=True)
            if not parameter.requires_grad
        ]
        # The engine has given the device's memory up for a while.
        self.away = False
        self._depth = 0
        # Numbers the calls of units that have a backward.
        self.calls = count(1)
        self._backward_number = 0
        self._waiting: dict[Unit, int] = {}

    # -- use ----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The outermost module is called, and its outputs will have gradients."""
        self._check_present()
        if self.sharded:
            self._begin_pass(forward=True)

    def _begin_pass(self, *, forward: bool) -> None:
        started = self.order.open
        self.order.begin(forward=forward)
        if not started:  # otherwise an earlier forward of this pass still waits for its backward
            for unit in self.sharded:
                unit.uses.forget_pass()
                unit.uses.calls = 0 if forward else unit.uses.calls
                self.let_go(unit)

    def before_whole_forward(self, unit: Unit) -> None:
        """The module of a unit that rests whole is about to run."""
        self.order.note_use(unit)
        self.flights.settle(unit)

    def before_forward(self, unit: Unit, *, again: bool = False) -> None:
        """The unit's module is about to run. `again`: recomputed inside a backward."""
        self._check_present()
        unit.uses.forwards += 1
        self._depth += 1
        if unit.uses.forwards == 1 or unit.parameter is not ParameterState.FULL:
            self._use(unit, Moment.BACKWARD if again else Moment.FORWARD)

    def after_forward(self, unit: Unit, *, again: bool = False) -> None:
        unit.uses.forwards -= 1
        self._depth -= 1
        if not again and not self.order.keeps(unit):
            self.let_go(unit)
        self._rest_after_evaluation()

    @property
    def in_pass(self) -> bool:
        """Inside a forward, or between a forward and its backward: all ranks are there, so a unit can be unsharded."""
        return self._depth > 0 or self.order.open

    def before_root_forward(self) -> None:
        self._depth += 1

    def after_root_forward(self) -> None:
        self._depth -= 1
        self._rest_after_evaluation()

    def _rest_after_evaluation(self) -> None:
        if self._depth == 0 and not self.order.open:
            self.rest()

    def before_backward(self, unit: Unit, call: int) -> None:
        """A gradient has reached an output of one call of the unit's module. Negative: its end cannot be seen."""
        if not unit.uses.backwards:
            self._use(unit, Moment.BACKWARD)
        unit.uses.backwards.add(call)

    def after_backward(self, unit: Unit, calls: Iterable[int]) -> None:
        """Nothing of these calls is left to run backward."""
        ended = unit.uses.backwards.intersection(calls)
        unit.uses.backwards -= ended
        unit.uses.ended += len(ended)
        if ended and not unit.uses.backwards:
            if self.in_backward and unit.trained and unit.uses.ended >= unit.uses.calls and not unit.shared:
                self.order.finish(unit)
            if not self.order.keeps(unit):
                self.let_go(unit)

    def read(self, unit: Unit, *, backward: bool = False, within: bool = False) -> None:
        """A parameter is read outside its module's forward: it stays whole until the pass, or the evaluation, ends."""
        self.flights.settle(unit)
        within = within or backward or self.in_pass
        if unit.sharded and within and not unit.uses.any:
            self._use(unit, Moment.BACKWARD if backward else Moment.FORWARD)
            unit.uses.held = True

    def lend(self, unit: Unit) -> None:
        """Whole until `take_back`, whatever happens in between."""
        self._check_present()
        if self.order.open:
            self._use(unit, Moment.FORWARD)
        elif unit.sharded:
            with unrecorded():
                self.flights.settle(unit)
                self.order.lend(unit)
        else:
            self.flights.settle(unit)
        unit.uses.lent += 1

    def _check_present(self) -> None:
        if self.away:
            raise RuntimeError("parameters are off the device: call engine.reload_states() first")

    def take_back(self, unit: Unit) -> None:
        unit.uses.lent -= 1
        if self.order.open and torch.is_grad_enabled():
            unit.uses.held = True  # what was computed from it may have a backward that nobody sees begin
        self.let_go(unit, lent=True)

    def _use(self, unit: Unit, moment: Moment) -> None:
        self.flights.settle(unit)
        self.order.note_use(unit)
        if not unit.sharded:
            return
        begins = not self.order.open and (torch.is_grad_enabled() or moment is Moment.BACKWARD)
        # Buffers made while evaluating must not be inference tensors: training uses them again.
        with unrecorded():
            if begins:
                self._begin_pass(forward=moment is Moment.FORWARD)
            self.order.demand(moment, unit)
            self.flights.finish_gathers_until(unit)

    def let_go(self, unit: Unit, *, lent: bool = False) -> None:
        """Back to rest, unless somebody on this rank still uses it. `lent`: the borrower answers for what he wrote."""
        if unit.sharded and unit.parameter is ParameterState.FULL and not unit.uses.any:
            self.flights.finish_gathers_until(unit)
            written = [] if lent else unit.written_members()
            unit.release(drop=not (self.order.open or self.in_backward))
            if written:
                raise at_rest(written, "a write in place inside a forward or backward")

    def rest(self) -> None:
        """Everything that nobody has borrowed goes back to rest."""
        for unit in self.sharded:
            unit.uses.forget_pass()
            self.let_go(unit)

    # -- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self, *, boundary: bool) -> None:
        """`boundary`: a step follows. Plans that keep whole gradients reduce only then."""
        self.in_backward = True
        self._backward_number += 1
        if not self.sharded or not self.order.open:
            self.order.begin(forward=False)
        self.order.reduces = boundary or not self._plan.keeps_whole_gradient
        self._waiting = {unit: unit.num_parameters for unit in self.trained}
        if not boundary:
            for unit in self.trained:
                for run in unit.trained:
                    run.accumulate(self._pool)

    def land(self, unit: Unit, run: Run, index: int) -> None:
        """Autograd has produced one parameter's gradient."""
        while unit.gradient is GradientState.REDUCING:
            self.flights.finish_reduction()
        unit.open(self._pool)
        run.land(index)
        if run.last_landing[index] == self._backward_number:
            return
        run.last_landing[index] = self._backward_number
        self._waiting[unit] -= 1
        if self._waiting[unit] == 0:
            if not unit.shared:
                self.order.finish(unit)
            if not unit.encloses and all(run.trainable for run in unit.sharded):
                self.after_backward(unit, [call for call in unit.uses.backwards if call < 0])

    def end_backward(self, *, aborted: bool = False) -> None:
        """Every gradient of this backward has landed. What got none is reduced with zeros."""
        if self.order.open:
            self.order.end(aborted=aborted)
        for run in (run for unit in self.trained for run in unit.trained if run.drops_at_end):
            run.end_backward()
        if self._lower is not None:
            self._lower.forget_fetched()
        self.rest()
        self.in_backward = False

    def abort_backward(self) -> None:
        """Backward raised. Join what the other ranks still do, forget everything, and be ready for another try."""
        self.end_backward(aborted=True)
        self.drop_gradients()
        for run in (run for unit in self.trained for run in unit.trained):
            run.drop_landing()

    def drop_gradients(self) -> None:
        self.flights.finish_reductions()
        for unit in self.trained:
            unit.drop_gradients(self._pool)

    def late_units(self) -> list[Unit]:
        """Units whose line still holds gradients at the step."""
        return [unit for unit in self.trained if unit.gradient is GradientState.OPEN]

    def reduce_late(self) -> None:
        """Reduce once more whatever units any rank has late gradients in. Every rank calls this together."""
        late = self.late_units()
        mine = torch.tensor([unit in late for unit in self.trained], dtype=torch.int32)
        everybody = self.order.agreement.exchange("the late gradients", mine).sum(0).tolist()
        for unit, late_on in zip(self.trained, everybody, strict=True):
            if late_on:
                # It came late once: from now on only the end of backward closes it.
                unit.shared = True
                self.order.close_last(unit)
                self.flights.start_reduction([unit])
        self.flights.finish_reductions()

    # -- step ---------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        return self.flights.collective.group.size == 1

    @property
    def num_shards(self) -> int:
        """The first ranks, that hold every byte of model state once between them."""
        return self.flights.collective.group.num_shards

    def meet_for_step(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, once every rank is at its step."""
        self._rest_all("a step")
        for run in (run for unit in self.trained for run in unit.trained):
            run.change()
        return self.order.meet(Wish.STEP, numbers)

    def meet_for_load(self, number: int = 0) -> list[int]:
        """Every rank's number, once nothing is in flight anywhere and nobody uses what is about to be written."""
        self._rest_all("load_checkpoint")
        self.settle_all()
        for run in (run for unit in self.units for run in unit.runs):
            run.start_over()
        return [row[0] for row in self.order.meet(Wish.LOAD, [number])]

    def _rest_all(self, what: str) -> None:
        lent = [unit.name for unit in self.sharded if unit.uses.lent]
        if lent:
            raise RuntimeError(f"{what} inside GatheredParameters of {', '.join(lent)}: leave the context first")
        if self._lower is not None:
            self._lower.forget_fetched()  # shards are about to change
        self.rest()

    def spread(self) -> None:
        """This rank's slices of what rests whole were written: every rank gets all of them."""
        for unit in self.units:
            runs = [run for run in unit.runs if run.rests_whole and (self._plan.shards_states or not run.trainable)]
            if runs and not self.alone:
                self.flights.gather_now(unit, runs)

    def gradients_to_step(self) -> Iterator[tuple[list[Unit], dict[Run, torch.Tensor]]]:
        """Batches in the order of first use, each run with the gradient this rank steps with."""
        batches = self.order.refresh_batches
        if self._plan.shards_states or self.alone:
            for batch in batches:
                yield batch, {run: _reduced(run) for unit in batch for run in unit.trained}
        else:
            yield from self.flights.whole_gradients(batches)

    def hosted_runs(self) -> list[Run]:
        """What the host steps, in the order of first use; what other ranks wait for comes before what is gathered."""
        runs = [run for batch in self.order.refresh_batches for unit in batch for run in unit.trained]
        return sorted((run for run in runs if run.rest.offloads_states), key=lambda run: not run.rests_whole)

    def start_refresh(self, batch: list[Unit]) -> None:
        self.flights.start_refresh(batch)

    def start_all_refreshes(self) -> None:
        for batch in self.order.refresh_batches:
            self.flights.start_refresh(batch)

    def settle(self, unit: Unit) -> None:
        self.flights.settle(unit)

    def settle_all(self) -> None:
        """Whatever a step left in flight has arrived."""
        self.flights.settle_all()
        for unit in self.sharded:
            for run in unit.sharded:
                run.finish_update()

    def give_up(self) -> None:
        """Nothing that is still to come from a step is waited for any more."""
        self.flights.refreshing.clear()
        for unit in self.units:
            unit.refreshing = False
            for run in unit.runs:
                run.update = None

    def end_step(self) -> None:
        if not self._plan.overlap:
            self.settle_all()

    def check_in_place(self) -> None:
        """Someone may have cast, moved or unfrozen the bare model: what is stepped would not be what computes."""
        for parameter, name in self._frozen:
            if raw_grad(parameter) is not None:
                raise RuntimeError(
                    f"parameter {name} was frozen at initialize and has a gradient now: it has no optimizer state. "
                    "Unfreeze it before initialize, or initialize again"
                )
        for unit in self.trained:
            for run in unit.trained:
                member, parameter = run.layout.members[0], run.parameters[0]
                resting = not run.rests_whole and unit.parameter is ParameterState.RESTING
                there = 0 if resting else run.full[member.start : member.stop].data_ptr()
                if parameter.numel() and parameter.data_ptr() != there:
                    raise RuntimeError(
                        f"parameter {member.name} no longer lies where initialize put it: the model was cast, moved "
                        "or given new .data after initialize. Do that before, or write values in place"
                    )

    def frozen_names(self) -> list[str]:
        """Trained parameters that the user has frozen since `initialize`."""
        runs = [run for unit in self.trained for run in unit.trained if run.frozen]
        return sorted(run.layout.members[index].name for run in runs for index in run.frozen)

    def written_names(self) -> list[str]:
        """Unsharded parameters that the user has written to in place since the last step, as version counters show."""
        return sorted(name for run in self._whole_runs() for name in run.written_members())

    def note_values(self) -> None:
        """Writes up to now have been seen."""
        for run in self._whole_runs():
            run.note_values()

    def _whole_runs(self) -> Iterator[Run]:
        return (run for unit in self.units for run in unit.runs if run.rests_whole)

    def dropped_names(self) -> list[str]:
        """Parameters whose gradient the user has dropped after it was summed over the ranks."""
        runs = [run for unit in self.trained for run in unit.trained if run.drops_of_sums]
        return sorted(run.layout.members[index].name for run in runs for index in run.drops_of_sums)

    def forget_units(self) -> None:
        for held in (self.units, self.trained, self.sharded, self._frozen):
            held.clear()
        self._waiting.clear()
        self.order.forget_units()


def _reduced(run: Run) -> torch.Tensor:
    assert run.reduced is not None, "a step comes after a backward"
    return run.reduced
