"""When units move. The only place that launches collectives and waits for them.

[Note: one order for all ranks]
Collectives are launched in one order on every rank, whatever order gradients land in: a unit that lands early waits
its turn, and a unit that gets no gradient on this rank is reduced with zeros when its turn comes. The first backward
uses the reversed module tree; then rank 0's own first step, broadcast once, is the order for good. The batches that
one collective carries are cut from that order by size alone, so they are the same everywhere too.

[Note: gradients that come late]
A gradient may land after its unit has been launched: a module run twice under reentrant checkpointing reports each
run by itself. Such gradients stay in the unit's line and travel with its next reduction; if the step comes first, the
scalars that ranks exchange at every step say so, and all ranks reduce those units once more (`reduce_late`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from onefold.comm import Collective, Ledger, Pending, broadcast_from_first, gather_scalars
from onefold.plan import Plan
from onefold.runtime.unit import GradientState, ParameterState, Run, Unit
from onefold.tier.device import Pool

# Units smaller than this share a collective with the next one: below it latency costs more than bytes.
SMALL_MESSAGE = 1 << 18

# A third reduction in flight buys no overlap, only memory: each holds slots and what it receives, and its sum is
# cheapest while that is still in cache.
REDUCTIONS_IN_FLIGHT = 2


@dataclass
class Flight:
    """A collective on its way, and the units it carries."""

    units: list[Unit]
    pending: Pending

    @property
    def num_elements(self) -> int:
        return sum(unit.num_elements for unit in self.units)


class Schedule:
    """Moves units at the moments of a step."""

    def __init__(
        self, units: Sequence[Unit], plan: Plan, collective: Collective, ledger: Ledger, pool: Pool, prescale: float
    ) -> None:
        self.units = list(units)
        self.trained = [unit for unit in units if unit.trained]
        self.in_backward = False
        self._plan = plan
        self._collective = collective
        self._ledger = ledger
        self._pool = pool
        self._prescale = prescale
        self._reducing: deque[Flight] = deque()
        self._gathering: deque[Flight] = deque()
        self._frozen = [
            (parameter, member.name)
            for run in (run for unit in units for run in unit.runs if not run.trainable)
            for parameter, member in zip(run.parameters, run.layout.members, strict=True)
            if not parameter.requires_grad
        ]
        self._backward_number = 0
        self._reduces = False
        self._waiting: dict[Unit, int] = {}
        self._ready: set[Unit] = set()
        self._cursor = 0
        # Until the order is agreed: units by first landing and by first use.
        self._landed: dict[Unit, None] = {}
        self._used: dict[Unit, None] = {}
        self._agreed = False
        self._follow(reduce=self.trained[::-1], gather=self.trained)

    # -- forward ------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        """The unit's module is about to run: its parameters must be whole."""
        if not self._agreed:
            self._used[unit] = None
        self.settle(unit)

    def settle(self, unit: Unit) -> None:
        """Finish the gather that carries this unit, and those launched before it."""
        while unit.parameter is ParameterState.GATHERING:
            self._finish_gather()

    def settle_all(self) -> None:
        while self._gathering:
            self._finish_gather()

    # -- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self, *, boundary: bool) -> None:
        """`boundary`: a step follows. Plans that keep whole gradients reduce only then."""
        self.in_backward = True
        self._backward_number += 1
        self._reduces = boundary or not self._plan.keeps_whole_gradient
        self._waiting = {unit: unit.num_parameters for unit in self.trained}
        self._ready.clear()
        self._cursor = 0
        if not boundary:
            for unit in self.trained:
                for run in unit.trained:
                    run.accumulate(self._pool)

    def land(self, unit: Unit, run: Run, index: int) -> None:
        """Autograd has produced one parameter's gradient."""
        while unit.gradient is GradientState.REDUCING:
            self._finish_reduction()
        unit.open(self._pool)
        run.land(index)
        if run.last_landing[index] == self._backward_number:
            return
        run.last_landing[index] = self._backward_number
        self._waiting[unit] -= 1
        if self._waiting[unit] == 0:
            if not self._agreed:
                self._landed[unit] = None
            if self._reduces and not unit.shared:
                self._ready.add(unit)
                self._advance()

    def end_backward(self) -> None:
        """Every gradient of this backward has landed. What got none is reduced with zeros."""
        if self._reduces:
            self._ready.update(self.trained)
            self._advance()
            while self._reducing:
                self._finish_reduction()
            if not self._agreed:
                self._agree()
        self.in_backward = False

    def abort_backward(self) -> None:
        """Backward raised. Let what is on the wire arrive, forget everything, and be ready for another try."""
        self.in_backward = False
        self.drop_gradients()

    def drop_gradients(self) -> None:
        while self._reducing:
            self._finish_reduction()
        for unit in self.trained:
            unit.drop_gradients(self._pool)

    def late_units(self) -> list[Unit]:
        """Units whose line still holds gradients at the step."""
        return [unit for unit in self.trained if unit.gradient is GradientState.OPEN]

    def reduce_late(self) -> None:
        """Reduce once more whatever units any rank has late gradients in. Every rank calls this together."""
        late = self.late_units()
        mine = torch.tensor([unit in late for unit in self.trained], dtype=torch.int32)
        everybody = gather_scalars(self._collective.group, mine, self._ledger).sum(0).tolist()
        for unit, count in zip(self.trained, everybody, strict=True):
            if count:
                # It came late once: from now on only the end of backward closes it.
                unit.shared = True
                self._start_reduction([unit])
        while self._reducing:
            self._finish_reduction()

    def _advance(self) -> None:
        while self._cursor < len(self._reduce_batches):
            batch = self._reduce_batches[self._cursor]
            if not self._ready.issuperset(batch):
                return
            self._cursor += 1
            self._start_reduction(batch)
            if not self._plan.overlap:
                self._finish_reduction()

    def _start_reduction(self, batch: list[Unit]) -> None:
        self._make_room(self._reducing, batch, self._plan.reduce_bucket, self._finish_reduction)
        for unit in batch:
            unit.open(self._pool)
        reductions = [reduction for unit in batch for reduction in unit.start_reducing(self._prescale)]
        self._reducing.append(Flight(batch, self._collective.start_reduce_scatter(reductions)))

    def _finish_reduction(self) -> None:
        flight = self._reducing.popleft()
        flight.pending.finish()
        for unit in flight.units:
            unit.finish_reducing(self._pool)

    # -- step ---------------------------------------------------------------------------------------------------

    def gradients_to_step(self) -> Iterator[tuple[list[Unit], dict[Run, torch.Tensor]]]:
        """Batches in the order of first use, each run with the gradient this rank steps with.

        Where every rank steps everything the reduced gradients are gathered, one batch ahead.
        """
        self.settle_all()  # a unit that no forward used may still be on its way, and is about to be written
        if self._plan.shards_states or self._collective.group.size == 1:
            for batch in self._gather_batches:
                yield batch, {run: _reduced(run) for unit in batch for run in unit.trained}
            return
        ahead = deque(self._start_gathering_gradients(batch) for batch in self._gather_batches[:1])
        for position, batch in enumerate(self._gather_batches):
            ahead.extend(
                self._start_gathering_gradients(following)
                for following in self._gather_batches[position + 1 : position + 2]
            )
            whole, pending = ahead.popleft()
            pending.finish()
            yield batch, whole
            for line in whole.values():
                self._pool.give_back(line)

    def _start_gathering_gradients(self, batch: list[Unit]) -> tuple[dict[Run, torch.Tensor], Pending]:
        whole = {}
        for run in (run for unit in batch for run in unit.trained):
            mine = _reduced(run)
            line = self._pool.take(run.layout.total, mine.dtype)
            start, stop = run.layout.shard_range(self._collective.group.rank)
            line[start:stop].copy_(mine)
            whole[run] = line
        return whole, self._collective.start_gather(list(whole.values()))

    def start_all_gathers(self) -> None:
        for batch in self._gather_batches:
            self.start_gather(batch)

    def start_gather(self, batch: list[Unit]) -> None:
        """The batch has been stepped: send each rank's slice to all others, in place."""
        if not self._plan.shards_states:
            return
        assert all(unit.parameter is ParameterState.FULL for unit in batch)
        self._make_room(self._gathering, batch, self._plan.gather_bucket, self._finish_gather)
        for unit in batch:
            unit.parameter = ParameterState.GATHERING
        lines = [run.full for unit in batch for run in unit.trained]
        self._gathering.append(Flight(batch, self._collective.start_gather(lines)))

    def end_step(self) -> None:
        if not self._plan.overlap:
            self.settle_all()

    def _finish_gather(self) -> None:
        flight = self._gathering.popleft()
        flight.pending.finish()
        for unit in flight.units:
            unit.parameter = ParameterState.FULL

    def _make_room(self, flights: deque[Flight], batch: list[Unit], limit: int, finish: Callable[[], None]) -> None:
        """Bucket sizes limit what is in flight; one batch always may be."""
        incoming = sum(unit.num_elements for unit in batch)
        while flights is self._reducing and len(flights) >= REDUCTIONS_IN_FLIGHT:
            finish()
        while flights and sum(flight.num_elements for flight in flights) + incoming > limit:
            finish()

    def check_in_place(self) -> None:
        """Someone may have cast, moved or unfrozen the bare model: what is stepped would not be what computes."""
        for parameter, name in self._frozen:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"parameter {name} was frozen at initialize and has a gradient now: it has no optimizer state. "
                    "Unfreeze it before initialize, or initialize again"
                )
        for run in (run for unit in self.trained for run in unit.trained):
            member, parameter = run.layout.members[0], run.parameters[0]
            if parameter.data_ptr() != run.full[member.start : member.stop].data_ptr() and parameter.numel():
                raise RuntimeError(
                    f"parameter {member.name} no longer lies where initialize put it: the model was cast, moved or "
                    "given new .data after initialize. Do that before, or write values in place"
                )

    def forget_units(self) -> None:
        self.units.clear()
        self.trained.clear()
        self._frozen.clear()
        self._waiting.clear()
        self._ready.clear()
        self._landed, self._used = {}, {}
        self._follow(reduce=[], gather=[])

    # -- order --------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Take rank 0's order of landing and of first use."""
        landed = _complete(self._landed, self.trained[::-1])
        used = _complete([unit for unit in self._used if unit.trained], self.trained)
        positions = {unit: position for position, unit in enumerate(self.trained)}
        device = self.trained[0].trained[0].device if self.trained else torch.device("cpu")
        order = torch.tensor([positions[unit] for unit in landed + used], dtype=torch.int64, device=device)
        broadcast_from_first(self._collective.group, order, self._ledger)
        units = [self.trained[position] for position in order.tolist()]
        half = len(self.trained)
        self._follow(reduce=units[:half], gather=units[half:])
        self._agreed = True
        self._landed, self._used = {}, {}

    def _follow(self, reduce: list[Unit], gather: list[Unit]) -> None:
        self._reduce_batches = coalesce(reduce, self._plan.reduce_bucket)
        self._gather_batches = coalesce(gather, self._plan.gather_bucket)


def coalesce(units: Iterable[Unit], bucket: int) -> list[list[Unit]]:
    """Neighbours that are small share a batch, up to the bucket size."""
    batches: list[list[Unit]] = []
    size = 0
    for unit in units:
        fits = batches and size < SMALL_MESSAGE and size + unit.num_elements <= bucket
        if fits:
            batches[-1].append(unit)
        else:
            batches.append([unit])
            size = 0
        size += unit.num_elements
    return batches


def _reduced(run: Run) -> torch.Tensor:
    assert run.reduced is not None, "a step comes after a backward"
    return run.reduced


def _complete(recorded: Iterable[Unit], fallback: list[Unit]) -> list[Unit]:
    return list(dict.fromkeys([*recorded, *fallback]))
