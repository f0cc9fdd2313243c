"""The program of a pass, by arithmetic alone: what is gathered when, what is kept, what is reduced together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from onefold.plan import PassPhase, compile_program
from onefold.plan.program import SMALL_MESSAGE, Event, Limits, Program, coalesce
from onefold.runtime.order import _find

F, B, R = PassPhase.FORWARD, PassPhase.BACKWARD, PassPhase.REDUCE
PLENTY = 1 << 40


@dataclass
class Pass:
    """Events of one pass and the sizes of its units; unit 0 may enclose the others."""

    events: list[Event]
    gathered: list[int]
    reduced: list[int]
    limits: Limits
    bucket: int
    enclosing: set[int]

    def compile(self) -> Program:
        return compile_program(self.events, self.gathered, self.reduced, self.limits, self.bucket, self.enclosing)


def straight(sizes: list[int], limits: Limits, bucket: int = PLENTY) -> Pass:
    """Every unit once forward, once backward, then reduced."""
    order = range(len(sizes))
    events = [(F, unit) for unit in order] + [event for unit in reversed(order) for event in ((B, unit), (R, unit))]
    return Pass(events, sizes, sizes, limits, bucket, set())


def random_passes(num: int = 300) -> Iterator[Pass]:
    """Units of many sizes, used again, left out, frozen, whole at rest, in and out of order."""
    for seed in range(num):
        generator = random.Random(seed)
        num_units = generator.randint(1, 8)
        gathered = [generator.choice([0, 1, 7, 100, 1000, 4096, SMALL_MESSAGE]) for _ in range(num_units)]
        reduced = [generator.choice([0, size, size + 64]) for size in gathered]
        encloses = generator.random() < 0.5
        inner = range(1, num_units) if encloses else range(num_units)
        uses = [generator.choice(inner) for _ in range(generator.randint(0, 14))] if inner else []
        backwards = uses[::-1]
        if generator.random() < 0.3:
            generator.shuffle(backwards)
        backwards = [unit for unit in backwards if generator.random() < 0.9]
        last = {unit: place for place, unit in enumerate(backwards)}
        events: list[Event] = [(F, 0)] if encloses else []
        events += [(F, unit) for unit in uses]
        events += [(B, 0)] if encloses else []
        for place, unit in enumerate(backwards):
            events.append((B, unit))
            if last[unit] == place and reduced[unit]:
                events.append((R, unit))
        events += [(R, unit) for unit in range(num_units) if reduced[unit] and unit not in last]
        limits = Limits(*(generator.choice([0, 1, 500, 5000, PLENTY]) for _ in range(3)))
        bucket = generator.choice([1, 200, 5000, PLENTY])
        yield Pass(events, gathered, reduced, limits, bucket, {0} if encloses else set())


def uses_of(one: Pass) -> Iterator[tuple[int, int]]:
    """(place, unit) of every use that needs a whole unit."""
    for place, (phase, unit) in enumerate(one.events):
        if phase is not R and one.gathered[unit]:
            yield place, unit


def launches_at(program: Program, place: int) -> range:
    """Numbers of the launches that event `place` makes."""
    return range(program.launched_at[place - 1] if place else 0, program.launched_at[place])


def gathers_between(program: Program, unit: int, first: int, last: int) -> list[int]:
    found = range(first, last)
    return [number for number in found if program.launches[number].gathers and unit in program.launches[number].units]


def whole_at(one: Pass, program: Program) -> Iterator[tuple[int, set[int], set[int]]]:
    """At each use: (place, units whole or on their way, those among them that are ahead of their use).

    A unit that encloses others is in use around them from its first gather on.
    """
    whole: set[int] = set()
    ahead: set[int] = set()
    for place, (phase, unit) in enumerate(one.events):
        for number in launches_at(program, place):
            if program.launches[number].gathers:
                whole |= set(program.launches[number].units)
                ahead |= set(program.launches[number].units)
        if phase is R or not one.gathered[unit]:
            continue
        ahead.discard(unit)
        yield place, set(whole), set(ahead)
        if not program.keeps_unsharded[place] and unit not in one.enclosing:
            whole.discard(unit)


# -- launches ----------------------------------------------------------------------------------------------------------


def test_launches_form_one_line():
    for one in random_passes():
        program = one.compile()
        assert program.events == tuple(one.events)
        assert len(program.launched_at) == len(program.keeps_unsharded) == len(one.events)
        assert all(before <= after for before, after in pairwise(program.launched_at))
        # No launch is left for after the last event.
        assert (program.launched_at[-1] if one.events else 0) == len(program.launches)


def test_every_use_finds_its_unit_whole():
    for one in random_passes():
        program = one.compile()
        for place, whole, _ in whole_at(one, program):
            assert one.events[place][1] in whole


def test_every_use_is_gathered_once_unless_the_one_before_kept_it():
    for one in random_passes():
        program = one.compile()
        last: dict[int, int] = {}
        for place, unit in uses_of(one):
            before = last.get(unit)
            first = 0 if before is None else program.launched_at[before]
            found = gathers_between(program, unit, first, program.launched_at[place])
            expected = 0 if before is not None and program.keeps_unsharded[before] else 1
            assert len(found) == expected, (one, place)
            last[unit] = place
        total = sum(len(launch.units) for launch in program.launches if launch.gathers)
        kept = sum(program.keeps_unsharded[place] for place, _ in uses_of(one))
        assert total == len(list(uses_of(one))) - kept


def test_a_unit_is_never_gathered_while_it_is_still_whole():
    for one in random_passes():
        program = one.compile()
        whole: set[int] = set()
        for place, (phase, unit) in enumerate(one.events):
            for number in launches_at(program, place):
                launch = program.launches[number]
                if launch.gathers and not one.enclosing & set(launch.units):
                    assert not whole & set(launch.units), (one, place)
                    whole |= set(launch.units)
            if phase is not R and not program.keeps_unsharded[place]:
                whole.discard(unit)


def test_gathers_come_in_the_order_of_use():
    for one in random_passes():
        program = one.compile()
        needed = []
        kept: set[int] = set()
        for place, unit in uses_of(one):
            if unit not in kept:
                needed.append(unit)
            kept = kept | {unit} if program.keeps_unsharded[place] else kept - {unit}
        assert [unit for launch in program.launches if launch.gathers for unit in launch.units] == needed


def test_gathers_of_small_units_that_are_launched_together_share_a_collective():
    shared = 0
    for one in random_passes():
        program = one.compile()
        for place in range(len(one.events)):
            found = [program.launches[number] for number in launches_at(program, place)]
            sizes = [[one.gathered[unit] for unit in launch.units] for launch in found if launch.gathers]
            assert all(sum(batch) >= SMALL_MESSAGE for batch in sizes[:-1])
            assert all(sum(batch[:-1]) < SMALL_MESSAGE for batch in sizes)
            shared += sum(len(batch) > 1 for batch in sizes)
    assert shared > 50


def test_units_that_rest_whole_are_never_gathered():
    for one in random_passes():
        program = one.compile()
        assert all(one.gathered[unit] for launch in program.launches if launch.gathers for unit in launch.units)


def test_units_that_enclose_others_are_never_gathered_ahead():
    seen = 0
    for one in random_passes():
        program = one.compile()
        for place in range(len(one.events)):
            for number in launches_at(program, place):
                launch = program.launches[number]
                if launch.gathers and launch.units[0] in one.enclosing:
                    seen += 1
                    assert one.events[place][1] == launch.units[0], (one, place)
    assert seen > 50


def test_the_same_events_give_the_same_program_whatever_the_order_of_calls():
    for one in random_passes(20):
        assert one.compile() == one.compile()


def test_an_empty_pass_launches_nothing():
    program = compile_program([], [4, 4], [4, 4], Limits(PLENTY, PLENTY, PLENTY), PLENTY)
    assert program == Program((), (), (), (), {})


# -- limits ------------------------------------------------------------------------------------------------------------


def test_with_all_limits_zero_each_use_gathers_and_nothing_is_kept():
    for one in random_passes():
        one.limits = Limits(0, 0, 0)
        program = one.compile()
        assert not any(program.keeps_unsharded)
        for place, unit in uses_of(one):
            found = [program.launches[number] for number in launches_at(program, place)]
            assert [launch.units for launch in found if launch.gathers] == [(unit,)], (one, place)


def test_without_prefetch_nothing_is_gathered_ahead():
    for one in random_passes():
        one.limits = Limits(0, one.limits.unsharded, one.limits.reuse)
        program = one.compile()
        assert all(not ahead for _, _, ahead in whole_at(one, program))


def test_prefetch_gathers_the_next_unit_ahead_of_its_use():
    program = straight([100] * 4, Limits(prefetch=1, unsharded=PLENTY)).compile()
    aheads = [ahead for _, _, ahead in whole_at(straight([100] * 4, Limits()), program)]
    # The last forward gathers nothing: what backward needs first is whole at that phase.
    assert aheads == [{1}, {2}, {3}, set(), {2}, {1}, {0}, set()]


def test_prefetch_limits_what_is_ahead_of_its_use():
    one = straight([100] * 12, Limits(prefetch=200, unsharded=PLENTY))
    assert max(100 * len(ahead) for _, _, ahead in whole_at(one, one.compile())) == 200


def test_prefetch_overshoots_by_less_than_one_unit():
    for one in random_passes():
        program = one.compile()
        for place, _, ahead in whole_at(one, program):
            sizes = [one.gathered[unit] for unit in ahead]
            assert not sizes or sum(sizes) - max(sizes) < one.limits.prefetch, (one, place)


def test_prefetch_stays_within_the_live_limit():
    for one in random_passes():
        one.limits = Limits(one.limits.prefetch, one.limits.unsharded, 0)
        program = one.compile()
        for place, whole, ahead in whole_at(one, program):
            if ahead:
                assert sum(one.gathered[unit] for unit in whole) <= one.limits.unsharded, (one, place)


def test_what_is_kept_stays_within_the_live_limit():
    for one in random_passes():
        one.limits = Limits(0, one.limits.unsharded, one.limits.reuse)
        program = one.compile()
        kept: set[int] = set()
        for place, unit in uses_of(one):
            kept = kept | {unit} if program.keeps_unsharded[place] else kept - {unit}
            assert sum(one.gathered[unit] for unit in kept) <= one.limits.unsharded, (one, place)


def test_the_live_limit_is_passed_only_by_what_one_use_needs():
    for one in random_passes():
        program = one.compile()
        for place, whole, _ in whole_at(one, program):
            needed = {one.events[place][1]} | (one.enclosing & whole)
            live = sum(one.gathered[unit] for unit in whole)
            assert live <= max(one.limits.unsharded, sum(one.gathered[unit] for unit in needed)), (one, place)


def next_use(one: Pass, place: int) -> int | None:
    unit = one.events[place][1]
    return next((other for other, used in uses_of(one) if other > place and used == unit), None)


def distance(one: Pass, place: int, again: int) -> int:
    """Elements that are used in between; a unit that encloses others is in use around them anyway."""
    between = (unit for other, unit in uses_of(one) if place < other < again)
    return sum(one.gathered[unit] for unit in between if unit not in one.enclosing)


def test_nothing_is_kept_beyond_the_reuse_distance_nor_without_a_next_use():
    for one in random_passes():
        program = one.compile()
        for place, _ in uses_of(one):
            if program.keeps_unsharded[place]:
                again = next_use(one, place)
                assert again is not None
                assert distance(one, place, again) <= one.limits.reuse


def test_whatever_is_used_again_within_the_reuse_distance_is_kept_if_it_fits():
    kept = 0
    for one in random_passes():
        one.limits = Limits(one.limits.prefetch, PLENTY, one.limits.reuse)
        program = one.compile()
        for place, _ in uses_of(one):
            again = next_use(one, place)
            if again is not None and distance(one, place, again) < one.limits.reuse:
                assert program.keeps_unsharded[place], (one, place)
                kept += 1
    assert kept > 100


def test_only_the_turn_of_the_pass_is_near():
    """Forward 0 1 2 3, backward 3 2 1 0: between the two uses of unit k lie the two uses of every later one."""
    one = straight([100] * 4, Limits(unsharded=PLENTY, reuse=201))
    assert [unit for place, unit in uses_of(one) if one.compile().keeps_unsharded[place]] == [2, 3]


def test_limits_never_change_what_is_reduced():
    for one in random_passes():
        free = Pass(one.events, one.gathered, one.reduced, Limits(PLENTY, PLENTY, PLENTY), one.bucket, one.enclosing)
        none = Pass(one.events, one.gathered, one.reduced, Limits(), one.bucket, one.enclosing)
        reductions = [[launch for launch in p.compile().launches if not launch.gathers] for p in (one, free, none)]
        assert reductions[0] == reductions[1] == reductions[2]


# -- reductions --------------------------------------------------------------------------------------------------------


def test_every_unit_is_reduced_once_in_the_order_of_events():
    for one in random_passes():
        program = one.compile()
        reduced = [unit for launch in program.launches if not launch.gathers for unit in launch.units]
        assert reduced == [unit for phase, unit in one.events if phase is R]


def test_a_reduction_starts_when_the_last_unit_of_its_batch_is_finished():
    for one in random_passes():
        program = one.compile()
        for place, event in enumerate(one.events):
            found = [program.launches[number] for number in launches_at(program, place)]
            for launch in found:
                assert launch.gathers or event == (R, launch.units[-1])


def test_small_reductions_share_a_batch_up_to_the_bucket():
    for one in random_passes():
        batches = [launch.units for launch in one.compile().launches if not launch.gathers]
        sizes = [[one.reduced[unit] for unit in batch] for batch in batches]
        for batch in sizes:
            assert len(batch) == 1 or sum(batch) <= one.bucket
        for batch in sizes[:-1]:
            # Only what is still small takes another one in, until the last ones, which share whatever their size.
            assert len(batch) == 1 or sum(batch[:-1]) < SMALL_MESSAGE
        for batch, following in pairwise(sizes[:-1]):
            assert sum(batch) >= SMALL_MESSAGE or sum(batch) + following[0] > one.bucket


@pytest.mark.parametrize(
    ("sizes", "bucket", "expected"),
    [
        ([10, 10, 10], PLENTY, [[0, 1, 2]]),
        ([10, 10, 10], 20, [[0, 1], [2]]),
        ([10, 10, 10], 1, [[0], [1], [2]]),
        ([SMALL_MESSAGE, 10, 10], PLENTY, [[0], [1, 2]]),
        ([10, SMALL_MESSAGE, 10], PLENTY, [[0, 1], [2]]),
        ([SMALL_MESSAGE] * 4, PLENTY, [[0], [1], [2, 3]]),
        ([SMALL_MESSAGE] * 4, SMALL_MESSAGE, [[0], [1], [2], [3]]),
        ([SMALL_MESSAGE] * 3 + [10], PLENTY, [[0], [1, 2, 3]]),
        ([0, 0, 0], 1, [[0, 1, 2]]),
        ([], 1, []),
    ],
)
def test_coalesce_by_hand(sizes, bucket, expected):
    assert coalesce(range(len(sizes)), sizes, bucket) == expected


# -- finding one's place -----------------------------------------------------------------------------------------------


def test_find_gives_the_next_place_of_an_event():
    for one in random_passes(60):
        program = one.compile()
        for event in {*one.events, (F, 99)}:
            for first in range(len(one.events) + 1):
                places = [place for place in range(first, len(one.events)) if one.events[place] == event]
                assert _find(event, program, first) == (places[0] if places else None)
