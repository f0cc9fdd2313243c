"""The order of collectives, which is the same on every rank.

[Note: one order for all ranks]
The first pass is negotiated. Before an all-gather every rank sends the unit that it needs. All ranks gather the
first of these in module order, and a rank that needs another one requests it again. Units whose gradients are ready on
all ranks are reduced. Ranks may therefore diverge in any way without blocking each other. The granted collectives are
recorded, and the record becomes the program of later passes, which all ranks follow without communication. A rank that
skips a unit joins its all-gathers and its reduce-scatter, with zeros, when it gets past them. A gradient that arrives
after that is late and reduced once more at the step. Evaluation is always negotiated.

[Note: divergence of ranks]
A use that the program does not contain ends the program. The rank that finds it sets a mark that the others see when
they wait, launches what the others have launched so that none of them waits for it, and synchronizes with them: with
those that see the mark in this pass, and with the rest at their next negotiation. The rest of the pass is negotiated,
and the next pass is recorded again. A model whose ranks diverge repeatedly is negotiated permanently. A state that
cannot be negotiated (one rank is at its step while another begins a forward) raises an error on every rank.

Without sharded parameters there are no all-gathers in a pass. The first pass then reduces units in reversed module
order, and the program is the order in which the gradients of rank 0's units were ready.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import count

import torch

from onefold.comm import Agreement, Disagreement, Ledger, broadcast_from
from onefold.comm.wait_notes import BEGIN, advice_on_divergence
from onefold.plan import PassPhase, Plan, Program, Tier, coalesce, compile_program
from onefold.plan.program import Event, Launch
from onefold.runtime.in_flight import InFlightCollectives
from onefold.runtime.unit import Unit

# Number of times that a new program is recorded before a model is negotiated permanently.
MAX_RETRACES = 4

# Row of a negotiation: request, value, number of units with ready gradients, these units, four numbers of the request.
_READY_IN_ROW = 9
_OWN = 12
_orders = count(1)


class Request(IntEnum):
    """Request of a rank. The first two are all-gathers of one unit; the others are made by all ranks or by none."""

    FORWARD = 0
    BACKWARD = 1
    BEGIN = 2
    END = 3
    DIVERGE = 4
    STEP = 5
    GATHER = 6
    READ = 7
    LOAD = 8


_DESCRIPTIONS = {
    Request.BEGIN: BEGIN,
    Request.END: "the end of a backward",
    Request.DIVERGE: "a use of a module that earlier passes did not make:",
    Request.STEP: "the step",
    Request.GATHER: "GatheredParameters, or another use of unsharded weights, of",
    Request.READ: "a read of unsharded values",
    Request.LOAD: "load_checkpoint",
}


class Order:
    """This rank's position in the order of collectives."""

    def __init__(
        self, units: Sequence[Unit], plan: Plan, in_flight: InFlightCollectives, agreement: Agreement, ledger: Ledger
    ) -> None:
        self.units = list(units)
        # Whether a pass is under way.
        self.open = False
        # Whether gradients are reduced in the present backward.
        self.reduces = False
        self.agreement = agreement
        self._guard = agreement.guard
        # Passes of two engines never have the same number. Ranks agree on it when a pass begins.
        self._guard.number_passes_from(next(_orders) * 1_000_000_000)
        self._plan = plan
        self._in_flight = in_flight
        self._ledger = ledger
        self._has_sharded_units = any(unit.sharded_params for unit in units)
        # Whether shards are read from NVMe ahead of their all-gathers.
        self._reads_ahead = plan.parameters.tier is Tier.NVME
        self._trained = [unit for unit in units if unit.trained_params]
        # Units with all their gradients on this rank, and units whose reduction was launched, in this pass.
        self._ready: dict[Unit, None] = {}
        self._reduced: set[Unit] = set()
        # The record of this pass, and units in the order of their first use.
        self._recording = True
        self._records_left = MAX_RETRACES
        self._record_is_complete = True
        self._events: list[Event] = []
        self._used: dict[Unit, None] = {}
        # The program of this pass (None while it is negotiated), and this rank's position in its events and launches.
        self.program: Program | None = None
        self._next_event = 0
        self._launched = 0
        # The programs of complete passes, and of backwards without a forward.
        self._programs: list[Program] = []
        if not self._has_sharded_units:
            self._follow([(PassPhase.REDUCE, unit.index) for unit in self._trained[::-1]])
        # Units that are stepped, and gathered after the step, together: in the order of their first use.
        self.step_batches = self._batches(self._trained)

    @property
    def reduction_batches(self) -> list[list[Unit]]:
        """Units that are reduced together if they are used in the order of the model."""
        return self._batches(self._trained[::-1], self._plan.reduce_bucket)

    # -- the pass -----------------------------------------------------------------------------------------------

    def begin(self, *, forward: bool) -> None:
        """Begin a pass, with a forward or, if no forward of it was seen, with its backward."""
        if self._has_sharded_units:
            own = [self._launched if self.open else 0, self._guard.progress.pass_number]
            rows = self._negotiate(Request.BEGIN, int(forward), own)
            # Ranks may have built different numbers of engines before this one, and so count from different numbers.
            self._guard.number_passes_from(max(row[_OWN + 1] for row in rows))
            if self.open and self.program is not None:
                # Ranks may have stopped at different launches.
                self._catch_up(self.program, max(row[_OWN] for row in rows))
                for unit in self.units:
                    unit.reshard_unused()
            forward = any(row[1] for row in rows)
        if self._programs:
            self.program = self._programs[0 if forward else 1]
        self.open = True
        self._next_event = self._launched = 0
        self._guard.begin_pass()
        self._ready.clear()
        self._reduced.clear()
        self._events.clear()
        self._record_is_complete = True

    def record_use(self, unit: int) -> None:
        """Record the order in which units are first used, which is the order of steps."""
        if self._recording:
            self._used[self.units[unit]] = None

    def request_unshard(self, phase: PassPhase, unit: int) -> int | None:
        """Launch the all-gather of a unit that is used now, and whatever the order has before it.

        Return the event of the program that this use belongs to, or None without a program.
        """
        wanted = self.units[unit]
        if self._guard.divergence_requested:
            self._diverge(wanted)
        if not self.open or self.program is None:
            if wanted.needs_unshard:
                self._negotiate(Request(phase), unit)
            return None
        event = _find((phase, unit), self.program, self._next_event)
        if event is not None:
            self._follow_to(self.program, event)
        if wanted.needs_unshard:
            self._guard.request_divergence()
            self._diverge(wanted)
            self._negotiate(Request(phase), unit)
        return event

    def keeps(self, event: int | None) -> bool:
        """Return whether a unit stays unsharded after its use at an event."""
        return self.open and self.program is not None and event is not None and self.program.keeps_unsharded[event]

    def all_have_cached(self, unit: int, *, is_cached: bool) -> bool:
        """Return whether all ranks have the unit's values cached. All ranks request the same unit, outside any pass."""
        rows = self._negotiate(Request.GATHER, unit, [int(is_cached)])
        if len({row[1] for row in rows}) > 1:
            raise Disagreement(self._differ(rows))
        return all(row[_OWN] for row in rows)

    def request_reduce_scatter(self, unit: int) -> None:
        """Launch the reduce-scatter of a unit with all its gradients, once it is next in the program.

        Later units may be ready before earlier ones, so this launches as many as the order allows.
        """
        finished = self.units[unit]
        if finished in self._ready:
            return
        self._ready[finished] = None
        if self.program is None:
            return
        if self._recording:
            self._events.append((PassPhase.REDUCE, unit))
        launches = self.program.launches
        while self.reduces and self._launched < len(launches):
            launch = launches[self._launched]
            # The last unit is usually the last one to be ready.
            if launch.gathers or not all(self.units[index] in self._ready for index in reversed(launch.units)):
                return
            self._launch(launch)

    def end(self, *, aborted: bool = False) -> None:
        """End a backward: join collectives of units that this rank skipped, and reduce missing gradients as zeros."""
        if self._guard.divergence_requested:
            self._diverge()
        if self.program is not None:
            self._follow_to(self.program, len(self.program.events))
        elif self._has_sharded_units:
            self._negotiate(Request.END, 0)
        if self.reduces:
            if len(self._reduced) < len(self._trained):
                self._reduce(self.reduction_batches)
            self._in_flight.finish_reductions()
            if self._recording and self._record_is_complete:
                self._adopt_record(aborted)
        self._in_flight.finish_gathers()
        self.open = False

    # -- following ----------------------------------------------------------------------------------------------

    def _follow_to(self, program: Program, event: int) -> None:
        """Launch everything up to an event, and reshard units that this rank has skipped."""
        for position in range(self._next_event, event):
            phase, index = program.events[position]
            if phase is not PassPhase.REDUCE:
                self._launch_until(program, program.launched_at[position])
                if not program.keeps_unsharded[position]:
                    self.units[index].wait_for_unshard()
                    self.units[index].reshard_unused()
        at = program.launched_at[event] if event < len(program.events) else len(program.launches)
        self._launch_until(program, at)
        self._next_event = max(self._next_event, event + 1)

    def _launch_until(self, program: Program, number: int) -> None:
        while self._launched < number:
            self._launch(program.launches[self._launched])

    def _launch(self, launch: Launch) -> None:
        self._launched += 1
        self._guard.record_launches(self._launched)
        if launch.gathers:
            Unit.launch_all_gather([self.units[index] for index in launch.units], use_secondary=True)
            if self._reads_ahead:
                assert self.program is not None
                launches = self.program.launches
                ahead = (other for at in range(self._launched, len(launches)) if (other := launches[at]).gathers)
                Unit.prefetch(self.units[index] for other in ahead for index in other.units)
        elif self.reduces:
            self._reduce([[self.units[index] for index in launch.units]])

    def _reduce(self, batches: list[list[Unit]]) -> None:
        for batch in batches:
            left = [unit for unit in batch if unit not in self._reduced]
            self._reduced.update(left)
            if left:
                Unit.launch_reduce_scatter(left)

    def _diverge(self, unit: Unit | None = None) -> None:
        """Leave the program for the rest of this pass, together with every rank that still follows it."""
        program = self.program
        if program is None:
            self._guard.answer_request()
            return
        rows = self._exchange(Request.DIVERGE, unit.index if unit else 0, [], [self._launched])
        # A rank that has already finished the pass has launched everything.
        furthest = max(row[_OWN] if row[0] == Request.DIVERGE else len(program.launches) for row in rows)
        self._catch_up(program, furthest)
        self._drop_program()

    def _catch_up(self, program: Program, number: int) -> None:
        """Launch what other ranks have launched, and reshard what this rank does not use."""
        if number > self._launched:
            self._launch_until(program, number)
            self._in_flight.finish_gathers()
            for unit in self.units:
                unit.reshard_unused()

    def _drop_program(self) -> None:
        self._guard.answer_request()
        if self.program is not None:
            self.program, self._programs, self._record_is_complete = None, [], False
            self._records_left -= 1
            self._recording = self._records_left > 0

    # -- negotiating --------------------------------------------------------------------------------------------

    def synchronize(self, request: IntEnum, numbers: Sequence[int]) -> list[list[int]]:
        """Synchronize with all ranks, and return up to five numbers of each of them. `request` is a `Request`."""
        return [row[_OWN : _OWN + len(numbers)] for row in self._negotiate(Request(request), 0, numbers)]

    def _negotiate(self, request: Request, value: int, own: Sequence[int] = ()) -> list[list[int]]:
        """Gather what ranks request, and reduce units that are ready on all, until this rank's request is granted."""
        while True:
            waits = self.open and self.program is None and self.reduces
            done = [unit.index for unit in self._ready if unit not in self._reduced and not unit.reduces_at_end]
            rows = self._exchange(request, value, done[:_READY_IN_ROW] if waits else [], own)
            if any(row[0] == Request.DIVERGE for row in rows):
                self._drop_program()
                continue
            reported = [row[3 : 3 + row[2]] for row in rows]
            finished = [index for index in reported[0] if all(index in others for others in reported[1:])]
            self._reduce(self._batches([self.units[index] for index in finished], self._plan.reduce_bucket))
            self._in_flight.finish_reductions()
            if self._recording and self.open:
                self._events += [(PassPhase.REDUCE, index) for index in finished]
            gathers = {(row[0], row[1]) for row in rows if row[0] in (Request.FORWARD, Request.BACKWARD)}
            if not gathers:
                if len({row[0] for row in rows}) == 1 or (request is Request.END and not self._record_is_complete):
                    return rows
                if any(row[0] == Request.END for row in rows) and not self._record_is_complete:
                    continue  # ranks that diverged end their pass now; the others have ended it before
                self._guard.fail(self._differ(rows))
            phase, index = min(gathers, key=_turn)
            unit = self.units[index]
            Unit.launch_all_gather([unit])
            self._in_flight.finish_gathers()
            if self.open and self._recording:
                self._events.append((PassPhase(phase), index))
            if (request, value) == (phase, index):
                return rows
            unit.reshard_unused()

    def _exchange(self, request: Request, value: int, finished: Sequence[int], own: Sequence[int]) -> list[list[int]]:
        row = [request, value, len(finished), *finished]
        row += [0] * (_OWN - len(row))
        return self.agreement.synchronize(self._describe(row), [*row, *own], self._meanwhile())

    def _meanwhile(self) -> Callable[[], None] | None:
        """Return a function that launches what other ranks wait for, while this rank waits inside a program."""
        program = self.program
        if program is None or not self.open or not self._has_sharded_units:
            return None
        return lambda: self._catch_up(program, self._guard.furthest_progress())

    def _differ(self, rows: list[list[int]]) -> str:
        stands = "; ".join(f"rank {rank} is at {self._describe(row)}" for rank, row in enumerate(rows))
        beginners = [rank for rank, row in enumerate(rows) if row[0] == Request.BEGIN]
        return f"the ranks have diverged: {stands}. {advice_on_divergence(beginners, map(self._describe, rows))}"

    def _describe(self, row: list[int]) -> str:
        request = Request(row[0])
        if request in (Request.FORWARD, Request.BACKWARD):
            return f"the {request.name.lower()} gather of {self.units[row[1]].name}"
        of_unit = f" {self.units[row[1]].name}" if request in (Request.DIVERGE, Request.GATHER) else ""
        return _DESCRIPTIONS[request] + of_unit

    # -- recording ----------------------------------------------------------------------------------------------

    def _adopt_record(self, aborted: bool) -> None:
        """Make rank 0's record of this pass the program of the next ones, unless its pass failed."""
        used = [*self._used, *self._trained]
        record = [] if aborted else [number for event in self._events for number in event]
        firsts = [] if aborted else [unit.index for unit in dict.fromkeys(used) if unit.trained_params]
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
        events: list[Event] = [(PassPhase(flat[i]), flat[i + 1]) for i in range(0, length, 2)]
        reduced = {unit for phase, unit in events if phase is PassPhase.REDUCE}
        events += [(PassPhase.REDUCE, unit.index) for unit in self._trained[::-1] if unit.index not in reduced]
        self._follow(events)
        self.step_batches = self._batches([self.units[index] for index in flat[length:]])
        self._recording = False
        self._used.clear()

    def _follow(self, events: list[Event]) -> None:
        """Compile one program for complete passes, and one for a backward that begins without a forward."""
        backward = next((index for index, (phase, _) in enumerate(events) if phase is not PassPhase.FORWARD), 0)
        self._programs = [
            compile_program(
                part,
                [unit.num_sharded_elements for unit in self.units],
                [unit.num_trained_elements for unit in self.units],
                self._plan.limits,
                self._plan.reduce_bucket,
                {unit.index for unit in self.units if unit.encloses},
            )
            for part in (events, events[backward:])
        ]
        self.program = self._programs[0]

    def close_last(self, unit: Unit) -> None:
        """Make a unit's reduction the last of each pass, because its gradients were late."""
        if self.program is not None and not self._recording:
            events = [event for event in self._programs[0].events if event != (PassPhase.REDUCE, unit.index)]
            self._follow([*events, (PassPhase.REDUCE, unit.index)])

    def _batches(self, units: Iterable[Unit], bucket: int | None = None) -> list[list[Unit]]:
        sizes = [unit.num_trained_elements for unit in self.units]
        batches = coalesce([unit.index for unit in units], sizes, bucket or self._plan.gather_bucket)
        return [[self.units[index] for index in batch] for batch in batches]

    def forget_units(self) -> None:
        """Release the units when the engine is destroyed."""
        self._guard.close()
        for held in (self.units, self._trained, self._events, self._programs, self.step_batches):
            held.clear()
        for also in (self._ready, self._reduced, self._used):
            also.clear()
        self.program = None


def _find(event: Event, program: Program, first: int) -> int | None:
    """Return the next position of an event in a program, starting at `first`."""
    positions = program.positions.get(event, ())
    index = bisect_left(positions, first)
    return positions[index] if index < len(positions) else None


def _turn(gather: tuple[int, int]) -> tuple[int, int]:
    """Return the sort key of requests: forwards in module order, then backwards in reversed order."""
    request, index = gather
    return (request, index if request == Request.FORWARD else -index)
