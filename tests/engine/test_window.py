"""The accumulation window by itself: boundaries, what gradients are still to be divided by, where counting starts."""

from __future__ import annotations

import pytest

from onefold.config import Batch
from onefold.window import AccumulationWindow


def window(accumulation: int, **more) -> AccumulationWindow:
    return AccumulationWindow(Batch(2 * accumulation, 2, accumulation, 1), **{"managed": True, **more})


def boundaries(found: AccumulationWindow, num: int) -> list[bool]:
    seen = []
    for _ in range(num):
        seen.append(found.at_boundary)
        found.micro_steps += 1
    return seen


def test_every_so_many_micro_steps_are_a_boundary():
    assert boundaries(window(3), 7) == [False, False, True, False, False, True, False]
    assert boundaries(window(1), 2) == [True, True]


@pytest.mark.parametrize("micro_steps", [4, 5, 6])
def test_a_resumed_window_begins_where_the_saved_one_ended(micro_steps):
    """Also where the saved run accumulated another number: its count of micro-steps is no multiple of this one's."""
    found = window(3)
    found.divide_by(1)
    found.resume(micro_steps)
    assert not found.is_open
    assert boundaries(found, 6) == [False, False, True, False, False, True]
    assert found.micro_steps == micro_steps + 6


def test_a_new_count_begins_with_the_next_micro_step():
    found = window(2)
    assert boundaries(found, 4) == [False, True, False, True]
    found.set_accumulation(3)
    assert boundaries(found, 3) == [False, False, True]
    assert (found.batch.train, found.batch.accumulation) == (6, 3)
    found.divide_by(1)
    found.set_accumulation(3)  # the same: nothing changes
    with pytest.raises(RuntimeError, match="cannot change inside a window"):
        found.set_accumulation(2)


def test_a_window_whose_gradients_are_lost_starts_over():
    found = window(3)
    assert not found.restart()  # nothing had been accumulated
    assert boundaries(found, 2) == [False, False]
    assert found.restart()
    assert boundaries(found, 3) == [False, False, True]


def test_one_window_is_divided_in_one_way():
    found = window(2)
    assert (found.divisor, found.is_open) == (1, False)
    found.divide_by(2)
    found.divide_by(2)
    assert (found.divisor, found.is_open) == (2, True)
    with pytest.raises(RuntimeError, match="in one accumulation window"):
        found.divide_by(1)
    found.close()
    found.divide_by(1)
    assert found.divisor == 1


def test_the_last_backward_is_known_only_where_the_window_is_counted_or_told():
    found = window(1)
    assert found.backward_is_last
    with found.no_sync():
        assert found.at_boundary
        assert not found.backward_is_last
        with pytest.raises(RuntimeError, match="already active"), found.no_sync():
            pass
    assert found.backward_is_last
    found.explicit = False
    assert not found.at_boundary
    unmanaged = window(1, managed=False)
    assert unmanaged.at_boundary
    assert not unmanaged.backward_is_last


def test_sizes_that_do_not_fit_are_refused():
    found = window(2)
    with pytest.raises(ValueError, match="not a multiple of micro-batch 2 x ranks 1 = 2"):
        found.set_train(5)
    with pytest.raises(ValueError, match="at least 1"):
        found.set_micro(0)
    with pytest.raises(ValueError, match="at least 1"):
        found.set_accumulation(0)
    found.set_train(6)
    found.set_micro(4)
    assert found.batch == Batch(12, 4, 3, 1)
