"""Properties of the loss scales, over many random histories of overflows."""

import random
from typing import Any

import pytest

from onefold.config.precision import Fp16
from onefold.optim.loss_scale import DynamicLossScale, LossScaleError, StaticLossScale, build_loss_scale
from onefold.plan.plan import Scaling


def values_after(scale: DynamicLossScale, history: str) -> list[float]:
    """The scale after each step of a history: 'x' is an overflow, '.' a good step."""
    values = []
    for step in history:
        scale.update(overflow=step == "x")
        values.append(scale.value)
    return values


def test_the_defaults_are_deepspeeds():
    scale = DynamicLossScale()
    assert (scale.value, scale.window, scale.hysteresis, scale.min_scale) == (65536.0, 1000, 2, 1.0)
    assert not scale.consecutive_hysteresis


def test_every_overflow_halves_without_hysteresis():
    assert values_after(DynamicLossScale(4, hysteresis=1), "xxx") == [8, 4, 2]


def test_hysteresis_forgives_the_first_overflows_and_stays_spent():
    assert values_after(DynamicLossScale(4, hysteresis=3), "xx.x.x") == [16, 16, 16, 8, 8, 4]


def test_consecutive_hysteresis_comes_back_with_each_good_step():
    assert values_after(DynamicLossScale(4, hysteresis=2, consecutive_hysteresis=True), "x.x.xx") == [16] * 5 + [8]


def test_a_window_of_good_steps_doubles():
    # The doubling falls on the good step that follows a full window.
    assert values_after(DynamicLossScale(4, window=3), ".......") == [16, 16, 16, 32, 32, 32, 64]


def test_an_overflow_starts_the_window_again():
    assert values_after(DynamicLossScale(4, window=3, hysteresis=1), "..x....") == [16, 16, 8, 8, 8, 8, 16]


def test_doubling_gives_the_hysteresis_back():
    assert values_after(DynamicLossScale(4, window=2, hysteresis=2), "x...xx") == [16, 16, 16, 32, 32, 16]


def test_the_scale_stops_at_the_minimum_and_then_says_what_to_do():
    scale = DynamicLossScale(2, hysteresis=1, min_scale=3.0)
    scale.update(overflow=True)
    assert scale.value == 3.0
    with pytest.raises(FloatingPointError, match=r"fp16\.min_loss_scale.*Lower the learning rate"):
        scale.update(overflow=True)
    assert scale.value == 3.0


def test_hysteresis_is_spent_before_the_minimum_raises():
    scale = DynamicLossScale(0, hysteresis=2)
    scale.update(overflow=True)
    with pytest.raises(LossScaleError):
        scale.update(overflow=True)


def random_case(seed: int) -> tuple[dict, list[bool]]:
    choice = random.Random(seed)
    settings = {
        "initial_scale_power": choice.randint(8, 20),
        "window": choice.randint(1, 8),
        "hysteresis": choice.randint(1, 4),
        "consecutive_hysteresis": choice.random() < 0.5,
    }
    rate = choice.choice([0.02, 0.1, 0.3])
    return settings, [choice.random() < rate for _ in range(100)]


@pytest.mark.parametrize("seed", range(50))
def test_random_histories(seed: int):
    """Moves only by factors of two, in the right direction; never below the minimum; alike on all ranks; resumable."""
    settings, history = random_case(seed)
    scale, twin = DynamicLossScale(**settings), DynamicLossScale(**settings)
    resume_at = random.Random(seed).randrange(len(history))
    last_overflow = -1
    for iteration, overflow in enumerate(history):
        before = scale.value
        try:
            scale.update(overflow)
        except LossScaleError:
            assert overflow
            assert before == scale.min_scale
            return
        twin.update(overflow)
        if overflow:
            assert scale.value in (before, before / 2)
            last_overflow = iteration
        else:
            good_steps = iteration - last_overflow - 1
            due = good_steps > 0 and good_steps % settings["window"] == 0
            assert scale.value == (before * 2 if due else before)
        assert scale.value >= scale.min_scale
        assert 1 <= scale.remaining_hysteresis <= settings["hysteresis"]
        assert twin.state_dict() == scale.state_dict()
        if iteration == resume_at:
            state = twin.state_dict()
            twin = DynamicLossScale(**settings)
            twin.load_state_dict(state)


def test_a_static_scale_never_moves():
    scale = StaticLossScale(128)
    for overflow in (True, False, True):
        scale.update(overflow)
    assert scale.value == 128.0
    other = StaticLossScale(1)
    other.load_state_dict(scale.state_dict())
    assert other.value == 128.0


def of_section(**keys: Any) -> DynamicLossScale | StaticLossScale:
    return build_loss_scale(Scaling(loss_scale=Fp16(**{"enabled": True, **keys})))


def test_building_from_the_section():
    disabled = of_section(enabled=False, loss_scale=128)
    assert isinstance(disabled, StaticLossScale)
    assert disabled.value == 1.0
    static = of_section(loss_scale=128)
    assert isinstance(static, StaticLossScale)
    assert static.value == 128.0
    dynamic = of_section(initial_scale_power=4, loss_scale_window=7, hysteresis=3, min_loss_scale=0.5)
    assert isinstance(dynamic, DynamicLossScale)
    assert (dynamic.value, dynamic.window, dynamic.hysteresis, dynamic.min_scale) == (16.0, 7, 3, 0.5)
