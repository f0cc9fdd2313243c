"""Which collective comes next, the same on every rank.

[Note: one order for all ranks]
The first pass is negotiated: before a gather every rank says which unit it wants, the first in module order is
gathered by all, and who wanted another asks again; what all have finished is reduced. So ranks may diverge in any
manner and none waits in vain; what was granted is recorded, and the record becomes the program of all later passes.
Those are followed without a word: a rank that skips a unit joins its gathers and reductions when it gets past them,
reducing zeros; a gradient that still lands after that is late, and reduced once more at the step. Evaluation is always
negotiated.

[Note: divergence of ranks]
What no program foresees ends it. The rank that comes to it asks to be heard, joins what the others have launched so
that none of them waits for it, and meets them: those that hear it in this pass, or at whatever they negotiate next.
From there on the pass is negotiated, and the next one recorded anew. A model whose ranks diverge again and again is
negotiated for good. What cannot be negotiated either (one rank at its step while another begins a forward) is an error
on every rank.

Where no parameter is sharded there is nothing to gather in a pass. Then the first pass follows the reversed module
tree, and the program is the order in which rank 0's units were finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import count

import torch

from onefold.comm import Agreement, Disagreement, broadcast_from
from onefold.comm.ledger import Ledger
from onefold.comm.wait_notes import BEGIN, advice_on_divergence
from onefold.plan import Moment, Plan, Program, coalesce, compile_program
from onefold.plan.program import Event, Launch
from onefold.runtime.in_flight import InFlightCollectives
from onefold.runtime.unit import ParameterState, Unit

# A model whose ranks keep diverging from what was recorded is negotiated for good.
MAX_RETRACES = 4

# A row of a negotiation: request, value, then how many finished units and which, then four numbers of the request's.
_FINISHED_IN_ROW = 9
_OWN = 12
_orders = count(1)


class Request(IntEnum):
    """What a rank asks for. The first two are gathers of a unit; the others are asked for by all ranks or by none."""

    FORWARD = 0
    BACKWARD = 1
    BEGIN = 2
    END = 3
    DIVERGE = 4
    STEP = 5
    LEND = 6
    READ = 7
    LOAD = 8


_DESCRIPTIONS = {
    Request.BEGIN: BEGIN,
    Request.END: "the end of a backward",
    Request.DIVERGE: "a use of a module that earlier passes did not make:",
    Request.STEP: "the step",
    Request.LEND: "GatheredParameters, or another use of unsharded weights, of",
    Request.READ: "a read of unsharded values",
    Request.LOAD: "load_checkpoint",
}


class Order:
    """This rank's place in the order of collectives."""

    def __init__(
        self, units: Sequence[Unit], plan: Plan, in_flight: InFlightCollectives, agreement: Agreement, ledger: Ledger
    ) -> None:
        self.units = list(units)
        self.open = False
        # Whether the present backward ends in reductions.
        self.reduces = False
        self.agreement = agreement
        self._guard = agreement.guard
        self._guard.number_passes_from(next(_orders) * 1_000_000_000)  # passes of two engines are never the same
        self._plan = plan
        self._in_flight = in_flight
        self._ledger = ledger
        self._gathers = any(unit.sharded for unit in units)
        self._trained = [unit for unit in units if unit.trained]
        self._finished: dict[Unit, None] = {}
        self._reduced: set[Unit] = set()
        self._learning = True
        self._retraces = MAX_RETRACES
        self._whole_record = True
        self._events: list[Event] = []
        self._used: dict[Unit, None] = {}
        self._next_event = 0
        self._launched = 0
        self.program: Program | None = None
        self._programs: list[Program] = []
        if not self._gathers:
            self._follow([(Moment.REDUCE, unit.index) for unit in self._trained[::-1]])
        self.refresh_batches = self._batches(self._trained)

    @property
    def reduction_batches(self) -> list[list[Unit]]:
        """What is reduced together, where units are used in the order of the model."""
        return self._batches(self._trained[::-1], self._plan.reduce_bucket)

    # -- the pass -----------------------------------------------------------------------------------------------

    def begin(self, *, forward: bool) -> None:
        """A pass begins, with a forward or, where no forward of it was seen, with its backward."""
        if self._gathers:
            rows = self._negotiate(Request.BEGIN, int(forward), [self._launched if self.open else 0])
            if self.open and self.program is not None:
                self._catch_up(self.program, max(row[_OWN] for row in rows))  # ranks may have stopped at other places
                for unit in self.units:
                    unit.reshard_unused()
            forward = any(row[1] for row in rows)
        if self._programs:
            self.program = self._programs[0 if forward else 1]
        self.open = True
        self._next_event = self._launched = 0
        self._guard.begin_pass()
        self._finished.clear()
        self._reduced.clear()
        self._events.clear()
        self._whole_record = True

    def demand(self, moment: Moment, unit: Unit) -> None:
        """A sharded unit is used now: have its gather launched, and whatever the order puts before it."""
        if self._guard.divergence_requested:
            self._diverge(unit)
        if not self.open or self.program is None:
            if unit.parameter is ParameterState.SHARDED:
                self._negotiate(Request(moment), unit.index)
            return
        place = self.program.find((moment, unit.index), self._next_event)
        if place is not None:
            self._follow_to(self.program, place)
            unit.uses.event = place
        if unit.parameter is ParameterState.SHARDED:
            self._guard.request_divergence()
            self._diverge(unit)
            self._negotiate(Request(moment), unit.index)

    def lend(self, unit: Unit, *, is_cached: bool = False) -> None:
        """Unshard a unit that all ranks request together, outside any pass. `is_cached`: this rank has its values
        still; nothing is gathered if all ranks have them.
        """
        rows = self._negotiate(Request.LEND, unit.index, [int(is_cached)])
        if len({row[1] for row in rows}) > 1:
            raise Disagreement(self._differ(rows))
        if all(row[_OWN] for row in rows):
            unit.use_cached()
        else:
            unit.schedule.forget_cached()
            self._in_flight.start_unshard([unit], lossless=True)
            self._in_flight.finish_unshards()

    def note_use(self, unit: Unit) -> None:
        """For the order in which units are refreshed after a step: that of their first use."""
        if self._learning:
            self._used[unit] = None

    def keeps(self, unit: Unit) -> bool:
        """Whether the unit stays unsharded after the use it has just been demanded for."""
        event = unit.uses.event
        return self.open and self.program is not None and event is not None and self.program.kept[event]

    def finish(self, unit: Unit) -> None:
        """The unit's gradients have all landed on this rank."""
        if unit in self._finished:
            return
        self._finished[unit] = None
        if self.program is None:
            return
        if self._learning:
            self._events.append((Moment.REDUCE, unit.index))
        launches = self.program.launches
        while self.reduces and self._launched < len(launches):
            launch = launches[self._launched]
            if launch.gathers or not all(self.units[index] in self._finished for index in launch.units):
                return
            self._launch(launch)

    def end(self, *, aborted: bool = False) -> None:
        """The backward is over: what this rank has skipped is joined, what got no gradient is reduced with zeros."""
        if self._guard.divergence_requested:
            self._diverge()
        if self.program is not None:
            self._follow_to(self.program, len(self.program.events))
        elif self._gathers:
            self._negotiate(Request.END, 0)
        if self.reduces:
            self._reduce(self.reduction_batches)
            self._in_flight.finish_reductions()
            if self._learning and self._whole_record:
                self._learn(aborted)
        self._in_flight.finish_unshards()
        self.open = False

    # -- following ----------------------------------------------------------------------------------------------

    def _follow_to(self, program: Program, place: int) -> None:
        """Launch everything up to an event, and reshard what this rank has passed without using it."""
        for position in range(self._next_event, place):
            moment, index = program.events[position]
            if moment is not Moment.REDUCE:
                self._launch_until(program, program.launched_at[position])
                if not program.kept[position]:
                    self._in_flight.wait_for_unshard(self.units[index])
                    self.units[index].reshard_unused()
        at = program.launched_at[place] if place < len(program.events) else len(program.launches)
        self._launch_until(program, at)
        self._next_event = max(self._next_event, place + 1)

    def _launch_until(self, program: Program, number: int) -> None:
        while self._launched < number:
            self._launch(program.launches[self._launched])

    def _launch(self, launch: Launch) -> None:
        self._launched += 1
        self._guard.publish_launches(self._launched)
        if launch.gathers:
            self._in_flight.start_unshard([self.units[index] for index in launch.units], use_secondary=True)
            assert self.program is not None
            ahead = (other for other in self.program.launches[self._launched :] if other.gathers)
            self._in_flight.prefetch(self.units[index] for other in ahead for index in other.units)
        elif self.reduces:
            self._reduce([[self.units[index] for index in launch.units]])

    def _reduce(self, batches: list[list[Unit]]) -> None:
        for batch in batches:
            left = [unit for unit in batch if unit not in self._reduced]
            self._reduced.update(left)
            if left:
                self._in_flight.start_reduction(left)

    def _diverge(self, unit: Unit | None = None) -> None:
        """Leave the program for the rest of this pass, together with every rank that is still in it."""
        program = self.program
        if program is None:
            self._guard.answer_request()
            return
        rows = self._meet(Request.DIVERGE, unit.index if unit else 0, [], [self._launched])
        # A rank that has already finished the pass has launched everything.
        furthest = max(row[_OWN] if row[0] == Request.DIVERGE else len(program.launches) for row in rows)
        self._catch_up(program, furthest)
        self._drop_program()

    def _catch_up(self, program: Program, number: int) -> None:
        """Join what other ranks have launched, and keep none of it that this rank does not use."""
        if number > self._launched:
            self._launch_until(program, number)
            self._in_flight.finish_unshards()
            for unit in self.units:
                unit.reshard_unused()

    def _drop_program(self) -> None:
        self._guard.answer_request()
        if self.program is not None:
            self.program, self._programs, self._whole_record = None, [], False
            self._retraces -= 1
            self._learning = self._retraces > 0

    # -- negotiating --------------------------------------------------------------------------------------------

    def meet(self, request: Request, numbers: Sequence[int]) -> list[list[int]]:
        """A point that every rank comes to, and up to four numbers of each rank that all of them see there."""
        return [row[_OWN : _OWN + len(numbers)] for row in self._negotiate(request, 0, numbers)]

    def _negotiate(self, request: Request, value: int, own: Sequence[int] = ()) -> list[list[int]]:
        """Until this rank's request is granted: gather what other ranks request for, reduce what all have finished."""
        while True:
            waits = self.open and self.program is None and self.reduces
            done = [unit.index for unit in self._finished if unit not in self._reduced and not unit.shared]
            rows = self._meet(request, value, done[:_FINISHED_IN_ROW] if waits else [], own)
            if any(row[0] == Request.DIVERGE for row in rows):
                self._drop_program()
                continue
            reported = [row[3 : 3 + row[2]] for row in rows]
            finished = [index for index in reported[0] if all(index in others for others in reported[1:])]
            self._reduce(self._batches([self.units[index] for index in finished], self._plan.reduce_bucket))
            self._in_flight.finish_reductions()
            if self._learning and self.open:
                self._events += [(Moment.REDUCE, index) for index in finished]
            gathers = {(row[0], row[1]) for row in rows if row[0] in (Request.FORWARD, Request.BACKWARD)}
            if not gathers:
                if len({row[0] for row in rows}) == 1 or (request is Request.END and not self._whole_record):
                    return rows
                if any(row[0] == Request.END for row in rows) and not self._whole_record:
                    continue  # ranks that diverged end their pass now; the others were through with it before
                self._guard.fail(self._differ(rows))
            moment, index = min(gathers, key=_turn)
            unit = self.units[index]
            self._in_flight.start_unshard([unit])
            self._in_flight.finish_unshards()
            if self.open and self._learning:
                self._events.append((Moment(moment), index))
            if (request, value) == (moment, index):
                return rows
            unit.reshard_unused()

    def _meet(self, request: Request, value: int, finished: Sequence[int], own: Sequence[int]) -> list[list[int]]:
        row = [request, value, len(finished), *finished]
        row += [0] * (_OWN - len(row))
        return self.agreement.synchronize(self._say(row), [*row, *own], self._meanwhile())

    def _meanwhile(self) -> Callable[[], None] | None:
        """While a rank in the middle of a program waits for the others, these may wait for what it has not launched."""
        program = self.program
        if program is None or not self.open or not self._gathers:
            return None
        return lambda: self._catch_up(program, self._guard.furthest_progress())

    def _differ(self, rows: list[list[int]]) -> str:
        stands = "; ".join(f"rank {rank} is at {self._say(row)}" for rank, row in enumerate(rows))
        beginners = [rank for rank, row in enumerate(rows) if row[0] == Request.BEGIN]
        return f"the ranks have diverged: {stands}. {advice_on_divergence(beginners, map(self._say, rows))}"

    def _say(self, row: list[int]) -> str:
        request = Request(row[0])
        if request in (Request.FORWARD, Request.BACKWARD):
            return f"the {request.name.lower()} gather of {self.units[row[1]].name}"
        of_unit = f" {self.units[row[1]].name}" if request in (Request.DIVERGE, Request.LEND) else ""
        return _DESCRIPTIONS[request] + of_unit

    # -- learning -----------------------------------------------------------------------------------------------

    def _learn(self, aborted: bool) -> None:
        """Take rank 0's record of this pass as the program of the next ones, unless its pass failed."""
        used = [*self._used, *self._trained]
        record = [] if aborted else [number for event in self._events for number in event]
        firsts = [] if aborted else [unit.index for unit in dict.fromkeys(used) if unit.trained]
        group = self.agreement.group
        device = group.device
        with self._guard.waiting_for("the record of the first pass"):
            sizes = torch.tensor([len(record), len(firsts)], device=device)
            broadcast_from(group, 0, sizes, self._ledger)
            numbers = torch.zeros(int(sizes.sum()), dtype=torch.int64, device=device)
            if group.rank == 0:
                numbers.copy_(torch.tensor(record + firsts))
            broadcast_from(group, 0, numbers, self._ledger)
        if not numbers.numel():
            return
        flat = numbers.tolist()
        length = int(sizes[0])
        events: list[Event] = [(Moment(flat[i]), flat[i + 1]) for i in range(0, length, 2)]
        reduced = {unit for moment, unit in events if moment is Moment.REDUCE}
        events += [(Moment.REDUCE, unit.index) for unit in self._trained[::-1] if unit.index not in reduced]
        self._follow(events)
        self.refresh_batches = self._batches([self.units[index] for index in flat[length:]])
        self._learning = False
        self._used.clear()

    def _follow(self, events: list[Event]) -> None:
        """One program for whole passes, one for a backward whose forward is long over."""
        backward = next((place for place, (moment, _) in enumerate(events) if moment is not Moment.FORWARD), 0)
        self._programs = [
            compile_program(
                part,
                [unit.num_gathered for unit in self.units],
                [unit.num_elements for unit in self.units],
                self._plan.limits,
                self._plan.reduce_bucket,
                {unit.index for unit in self.units if unit.encloses},
            )
            for part in (events, events[backward:])
        ]
        self.program = self._programs[0]

    def close_last(self, unit: Unit) -> None:
        """A unit whose gradients came late: from now on its reduction is the last of the pass."""
        if self.program is not None and not self._learning:
            events = [event for event in self._programs[0].events if event != (Moment.REDUCE, unit.index)]
            self._follow([*events, (Moment.REDUCE, unit.index)])

    def _batches(self, units: Iterable[Unit], bucket: int | None = None) -> list[list[Unit]]:
        sizes = [unit.num_elements for unit in self.units]
        batches = coalesce([unit.index for unit in units], sizes, bucket or self._plan.gather_bucket)
        return [[self.units[index] for index in batch] for batch in batches]

    def forget_units(self) -> None:
        self._guard.close()
        for held in (self.units, self._trained, self._events, self._programs, self.refresh_batches):
            held.clear()
        for also in (self._finished, self._reduced, self._used):
            also.clear()
        self.program = None


def _turn(gather: tuple[int, int]) -> tuple[int, int]:
    """Forwards in the order of the module tree, then backwards in the reverse one."""
    request, index = gather
    return (request, index if request == Request.FORWARD else -index)
