"""Compute the order of collectives, and the units that stay unsharded, from the order of uses. No tensors, no ranks.

[Note: the program of a pass]
A pass is one forward and its backward. Its events are the uses of units and the ends of their backwards, in an order
that all ranks have agreed on. For each event the program defines the collectives that have been launched by then: the
all-gathers of the used units, the prefetches, and the reductions of finished units. All launches form one sequence. A
rank may reach an event early, late or never, but it launches in the order of that sequence, so ranks cannot deadlock.
Limits move launches within the sequence; they never change the computed values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class PassPhase(IntEnum):
    """The phase of a pass in which a unit is used or reduced."""

    FORWARD = 0
    BACKWARD = 1
    REDUCE = 2


Event = tuple[PassPhase, int]

# A third reduction in flight would add memory but no overlap. Each reduction holds slots and receive buffers, and its
# sum is fastest while those are still in the cache.
REDUCTIONS_IN_FLIGHT = 2
# Units smaller than this share a collective with the next one, because latency would dominate its time.
SMALL_MESSAGE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The limits of a program, in elements."""

    prefetch: int = 0
    """Elements that are gathered ahead of their use."""
    unsharded: int = 0
    """Elements that are unsharded at one time."""
    reuse: int = 0
    """Elements of other units that may be used between two uses of a unit that stays unsharded."""


@dataclass(frozen=True)
class Launch:
    """One collective: the all-gather or the reduction of some units."""

    gathers: bool
    units: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The collectives of a pass. See [Note: the program of a pass]."""

    events: tuple[Event, ...]
    launches: tuple[Launch, ...]
    launched_at: tuple[int, ...]
    """The number of launches that precede the use at each event."""
    keeps_unsharded: tuple[bool, ...]
    """Whether the unit stays unsharded after its use at each event."""
    positions: Mapping[Event, Sequence[int]]
    """The positions of each event in `events`."""


def compile_program(
    events: Sequence[Event],
    gathered: Sequence[int],
    reduced: Sequence[int],
    limits: Limits,
    reduce_bucket: int,
    enclosing: Container[int] = (),
) -> Program:
    """Compute the program of a pass.

    `gathered[u]` is the number of elements that a use of unit u gathers, 0 if it stays unsharded. `reduced[u]` is the
    number of elements that its reduction sums. Units in `enclosing` are in use while the units inside them are: they
    are never prefetched and always counted as unsharded.
    """
    enclosing_size = sum(size for unit, size in enumerate(gathered) if unit in enclosing)
    stays, needs_gather = _choose_reuse(events, gathered, limits, enclosing, enclosing_size)
    last_of_batch = {
        batch[-1]: tuple(batch)
        for batch in coalesce([unit for phase, unit in events if phase is PassPhase.REDUCE], reduced, reduce_bucket)
    }
    gathers = [position for position in range(len(events)) if needs_gather[position]]
    launches: list[Launch] = []
    launched_at: list[int] = []
    positions: dict[Event, list[int]] = {}
    # The sizes of unsharded units, and of those among them that are gathered ahead of their use.
    unsharded: dict[int, int] = {}
    ahead: dict[int, int] = {}
    next_gather = 0
    for position, (phase, unit) in enumerate(events):
        positions.setdefault((phase, unit), []).append(position)
        if phase is PassPhase.REDUCE:
            if unit in last_of_batch:
                launches.append(Launch(gathers=False, units=last_of_batch[unit]))
        elif gathered[unit]:
            ahead.pop(unit, None)
            if unit not in enclosing:
                unsharded[unit] = gathered[unit]
            batches: list[list[int]] = []
            while next_gather < len(gathers):
                later = gathers[next_gather]
                following = events[later][1]
                size = gathered[following]
                if later > position:
                    # All units up to this use must be gathered. Later ones only if they are sharded now and fit.
                    is_unsharded = following in unsharded or following in enclosing
                    total = enclosing_size + sum(unsharded.values()) + size
                    if is_unsharded or sum(ahead.values()) >= limits.prefetch or total > limits.unsharded:
                        break
                    ahead[following] = unsharded[following] = size
                if batches and sum(gathered[other] for other in batches[-1]) < SMALL_MESSAGE:
                    batches[-1].append(following)
                else:
                    batches.append([following])
                next_gather += 1
            launches += [Launch(gathers=True, units=tuple(batch)) for batch in batches]
        launched_at.append(len(launches))
        if phase is not PassPhase.REDUCE and not stays[position]:
            unsharded.pop(unit, None)
    return Program(tuple(events), tuple(launches), tuple(launched_at), tuple(stays), positions)


def _choose_reuse(
    events: Sequence[Event], gathered: Sequence[int], limits: Limits, enclosing: Container[int], enclosing_size: int
) -> tuple[list[bool], list[bool]]:
    """Choose the uses after which a unit stays unsharded for its next use. Return them, and the uses that gather."""
    traversed = [0]
    for phase, unit in events:
        counts = phase is not PassPhase.REDUCE and unit not in enclosing
        traversed.append(traversed[-1] + (gathered[unit] if counts else 0))
    next_use: dict[int, int] = {}
    following: list[int | None] = [None] * len(events)
    for position in range(len(events) - 1, -1, -1):
        phase, unit = events[position]
        if phase is not PassPhase.REDUCE:
            following[position] = next_use.get(unit)
            next_use[unit] = position
    stays = [False] * len(events)
    needs_gather = [False] * len(events)
    unsharded: dict[int, int] = {}
    for position, (phase, unit) in enumerate(events):
        if phase is PassPhase.REDUCE or not gathered[unit]:
            continue
        needs_gather[position] = unit not in unsharded
        unsharded[unit] = gathered[unit]
        again = following[position]
        if again is not None and traversed[again] - traversed[position + 1] < limits.reuse:
            # Leave room for the largest unit that is used in between.
            between = {other for phase, other in events[position + 1 : again] if phase is not PassPhase.REDUCE}
            largest = max((gathered[other] for other in between if other not in unsharded), default=0)
            others = sum(size for other, size in unsharded.items() if other not in enclosing)
            stays[position] = enclosing_size + others + largest <= limits.unsharded
        if not stays[position]:
            del unsharded[unit]
    return stays, needs_gather


def coalesce(units: Iterable[int], sizes: Sequence[int], bucket: int) -> list[list[int]]:
    """Group units into batches of at most the bucket size.

    Small neighbours share a batch. The last two batches are merged, because little computation is left to overlap them.
    """
    batches: list[list[int]] = []
    size = 0
    for unit in units:
        if batches and size < SMALL_MESSAGE and size + sizes[unit] <= bucket:
            batches[-1].append(unit)
            size += sizes[unit]
        else:
            batches.append([unit])
            size = sizes[unit]
    tail = batches[-2:] if batches and sum(sizes[unit] for unit in batches[-1]) >= SMALL_MESSAGE else batches[-3:]
    if len(batches) > 2 and sum(sizes[unit] for batch in tail for unit in batch) <= bucket:
        batches[-len(tail) :] = [[unit for batch in tail for unit in batch]]
    return batches
