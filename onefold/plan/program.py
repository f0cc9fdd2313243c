"""From the order in which units are used to what is launched when, and what is kept. No tensors, no ranks.

[Note: the program of a pass]
A pass is one forward and its backward. Its events, in an order that every rank has agreed on, are the uses of units
and the ends of their backwards. The program says for each event which collectives have been launched by then: the
gathers of what is used, the gathers ahead of it, the reductions of what is finished. Launches form one line; a rank
may reach an event early or late or never, but it launches in that line's order, which is why no ranks can wait for
each other in a circle. Limits move launches along the line; they never change a bit of what is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class Moment(IntEnum):
    """What happens to a unit at an event."""

    FORWARD = 0
    BACKWARD = 1
    REDUCE = 2


Event = tuple[Moment, int]

# A third reduction in flight buys no overlap, only memory: each holds slots and what it receives, and its sum is
# cheapest while that is still in cache.
REDUCTIONS_IN_FLIGHT = 2
# Units smaller than this share a collective with the next one: below it latency costs more than bytes.
SMALL_MESSAGE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Elements: gathered ahead of use, whole at one time, between two uses of a unit that stays whole."""

    prefetch: int = 0
    live: int = 0
    reuse: int = 0


@dataclass(frozen=True)
class Launch:
    """One collective: the gather, or the reduction, of some units."""

    gathers: bool
    units: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """`launched_at[k]`: launches made by the time of event k. `kept[k]`: the unit stays whole after its use there."""

    events: tuple[Event, ...]
    launches: tuple[Launch, ...]
    launched_at: tuple[int, ...]
    kept: tuple[bool, ...]

    def find(self, event: Event, first: int) -> int | None:
        """The next place of an event, from `first` on."""
        places = self._places.get(event, [])
        index = bisect_left(places, first)
        return places[index] if index < len(places) else None

    @cached_property
    def _places(self) -> dict[Event, list[int]]:
        places: dict[Event, list[int]] = {}
        for position, event in enumerate(self.events):
            places.setdefault(event, []).append(position)
        return places


def compile_program(
    events: Sequence[Event],
    gathered: Sequence[int],
    reduced: Sequence[int],
    limits: Limits,
    reduce_bucket: int,
    enclosing: Container[int] = (),
) -> Program:
    """`gathered[u]`: elements of unit u that a use gathers, 0 where it rests whole. `reduced[u]`: those of its sum.

    Units that enclose others are in use around those others: they are never gathered ahead, and always counted.
    """
    around = sum(size for unit, size in enumerate(gathered) if unit in enclosing)
    kept, needed = _kept(events, gathered, limits, enclosing, around)
    last_of_batch = {
        batch[-1]: tuple(batch)
        for batch in coalesce([unit for moment, unit in events if moment is Moment.REDUCE], reduced, reduce_bucket)
    }
    gathers = [position for position in range(len(events)) if needed[position]]
    launches: list[Launch] = []
    launched_at: list[int] = []
    live: dict[int, int] = {}
    ahead: dict[int, int] = {}
    next_gather = 0
    for position, (moment, unit) in enumerate(events):
        if moment is Moment.REDUCE:
            if unit in last_of_batch:
                launches.append(Launch(gathers=False, units=last_of_batch[unit]))
        elif gathered[unit]:
            ahead.pop(unit, None)
            if unit not in enclosing:
                live[unit] = gathered[unit]
            batches: list[list[int]] = []
            while next_gather < len(gathers):
                place = gathers[next_gather]
                following = events[place][1]
                size = gathered[following]
                if place > position:
                    # Everything up to this use must come; further only what is not whole now and fits the limits.
                    whole = following in live or following in enclosing
                    full = sum(ahead.values()) >= limits.prefetch or around + sum(live.values()) + size > limits.live
                    if whole or full:
                        break
                    ahead[following] = live[following] = size
                if batches and sum(gathered[other] for other in batches[-1]) < SMALL_MESSAGE:
                    batches[-1].append(following)
                else:
                    batches.append([following])
                next_gather += 1
            launches += [Launch(gathers=True, units=tuple(batch)) for batch in batches]
        launched_at.append(len(launches))
        if moment is not Moment.REDUCE and not kept[position]:
            live.pop(unit, None)
    return Program(tuple(events), tuple(launches), tuple(launched_at), tuple(kept))


def _kept(
    events: Sequence[Event], gathered: Sequence[int], limits: Limits, enclosing: Container[int], around: int
) -> tuple[list[bool], list[bool]]:
    """Which uses leave their unit whole for the next one, and which uses need a gather."""
    traversed = [0]
    for moment, unit in events:
        passes_by = moment is not Moment.REDUCE and unit not in enclosing
        traversed.append(traversed[-1] + (gathered[unit] if passes_by else 0))
    next_use: dict[int, int] = {}
    following: list[int | None] = [None] * len(events)
    for position in range(len(events) - 1, -1, -1):
        moment, unit = events[position]
        if moment is not Moment.REDUCE:
            following[position] = next_use.get(unit)
            next_use[unit] = position
    kept = [False] * len(events)
    needed = [False] * len(events)
    whole: dict[int, int] = {}
    for position, (moment, unit) in enumerate(events):
        if moment is Moment.REDUCE or not gathered[unit]:
            continue
        needed[position] = unit not in whole
        whole[unit] = gathered[unit]
        again = following[position]
        if again is not None and traversed[again] - traversed[position + 1] < limits.reuse:
            # Room must be left for the largest of what is used in between.
            between = {other for moment, other in events[position + 1 : again] if moment is not Moment.REDUCE}
            largest = max((gathered[other] for other in between if other not in whole), default=0)
            others = sum(size for other, size in whole.items() if other not in enclosing)
            kept[position] = around + others + largest <= limits.live
        if not kept[position]:
            del whole[unit]
    return kept, needed


def coalesce(units: Iterable[int], sizes: Sequence[int], bucket: int) -> list[list[int]]:
    """Neighbours that are small share a batch, and so do the last two, beside which little is left to compute: up to
    the bucket size.
    """
    batches: list[list[int]] = []
    for unit in units:
        size = sum(sizes[other] for other in batches[-1]) if batches else 0
        if batches and size < SMALL_MESSAGE and size + sizes[unit] <= bucket:
            batches[-1].append(unit)
        else:
            batches.append([unit])
    tail = batches[-2:] if batches and sum(sizes[unit] for unit in batches[-1]) >= SMALL_MESSAGE else batches[-3:]
    if len(batches) > 2 and sum(sizes[unit] for batch in tail for unit in batch) <= bucket:
        batches[-len(tail) :] = [[unit for batch in tail for unit in batch]]
    return batches
