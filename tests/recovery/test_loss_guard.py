"""The check of losses, and the limit of rollbacks: rules without ranks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.config import ConfigError, load_config
from onefold.config.onefold_section import GradNormSpikeSection, LossSpikeSection
from onefold.plan import Guards, make_plan
from onefold.recovery.loss_guard import LossGuard
from onefold.recovery.refused_step import LossSpikeError, NonFiniteError, RefusedStepError
from onefold.recovery.rollback_limit import RollbackLimit


def guard(action: str = "raise", factor: float | None = 5, window: int = 8, **more: Any) -> LossGuard:
    spike = LossSpikeSection(factor=factor, window=window, action=action)  # type: ignore[arg-type]
    return LossGuard(Guards(loss_spike=spike, **more), logs=False)


def noise(num: int, level: float = 3.0) -> list[float]:
    generator = random.Random(0)
    return [level + generator.uniform(-0.1, 0.1) for _ in range(num)]


def test_a_spike_is_refused_once_the_window_is_full():
    found = guard()
    for loss in noise(7):
        assert found.check([loss]) is None
    assert found.check([30.0]) is None  # the window has 7 losses
    refusal = found.check([30.0])
    assert refusal is not None
    assert isinstance(refusal.error, LossSpikeError)
    assert "the loss 30 is a spike: it is above" in str(refusal.error)
    assert "median" in refusal.problem
    assert not refusal.error.rolls_back


def test_the_mean_over_the_ranks_is_compared():
    found = guard()
    for loss in noise(8):
        found.check([loss + 1, loss - 1])
    assert found.check([4.0, 2.0]) is None
    assert found.check([3.0, 9.0]) is not None


@pytest.mark.parametrize(
    ("action", "error", "rolls_back"),
    [("skip", None, False), ("raise", LossSpikeError, False), ("rollback", LossSpikeError, True)],
)
def test_the_actions(action, error, rolls_back):
    found = guard(action)
    for loss in noise(8):
        found.check([loss])
    refusal = found.check([50.0])
    assert refusal is not None
    assert (type(refusal.error) if refusal.error else None) is error
    assert refusal.error is None or refusal.error.rolls_back is rolls_back


def test_a_warning_refuses_nothing():
    found = guard("warn")
    assert [found.check([loss]) for loss in [*noise(8), 99.0]] == [None] * 9


def test_a_new_level_is_accepted_after_half_a_window():
    found = guard("skip", window=16)
    for loss in noise(16):
        found.check([loss])
    refused = [found.check([loss]) is not None for loss in noise(16, level=6.0)]
    assert refused[0]
    assert refused == sorted(refused, reverse=True)
    assert 8 <= sum(refused) <= 10


def test_losses_that_hardly_change_have_no_spikes():
    found = guard(factor=3)
    for _ in range(8):
        found.check([2.0])
    assert found.check([2.05]) is None
    assert found.check([2.07]) is not None


def test_losses_that_are_not_finite():
    """Check that only a rollback reacts to the loss itself. Otherwise the gradients decide."""
    assert guard().check([1.0, math.nan]) is None
    refusal = guard(factor=None, nonfinite="rollback").check([1.0, math.nan, math.inf])
    assert refusal is not None
    assert isinstance(refusal.error, NonFiniteError)
    assert isinstance(refusal.error, FloatingPointError)
    assert refusal.error.rolls_back
    assert refusal.problem == "the loss was nan on rank 1, inf on rank 2"


def test_an_unknown_loss_is_not_compared():
    found = guard()
    for loss in noise(8):
        found.check([loss])
    assert found.check([99.0, None]) is None
    assert len(found.spikes.state_dict()) == 8


def test_the_window_of_a_checkpoint_is_restored():
    one, other = guard(), guard()
    for loss in noise(8):
        one.check([loss])
    other.spikes.load_state_dict(one.spikes.state_dict())
    assert (one.check([40.0]) is None, other.check([40.0]) is None) == (False, False)


@given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=30), st.floats(0.1, 20))
def test_a_loss_up_to_the_median_is_never_a_spike(losses: list[float], factor: float) -> None:
    found = guard("skip", factor, window=4)
    for loss in losses:
        found.check([loss])
    middle = sorted(losses[-4:])[1]
    assert found.check([middle]) is None


def test_the_limit_counts_rollbacks_without_progress():
    limit = RollbackLimit(2)
    assert [limit.allows(step) for step in (10, 4, 10)] == [True, True, False]
    limit = RollbackLimit(2)
    assert [limit.allows(step) for step in (10, 4, 11, 11, 3, 12)] == [True, True, True, True, False, True]
    assert not RollbackLimit(0).allows(5)


def test_the_keys_reach_the_plan():
    own = {"nonfinite_gradients": "rollback", "max_rollbacks": 5, "replica_check_every": 7}
    plan = make_plan(load_config({"onefold": {**own, "loss_spike": {"factor": 6, "window": 20, "action": "skip"}}}), 2)
    assert plan.guards == Guards("rollback", LossSpikeSection(6, 20, "skip"), 5, 7)
    plan = make_plan(load_config({"onefold": {"grad_norm_spike": {"factor": 6, "action": "raise"}}}), 2)
    assert plan.guards == Guards(grad_norm_spike=GradNormSpikeSection(6, 64, "raise"))
    assert make_plan(load_config({}), 2).guards == Guards()


def test_keys_that_have_no_effect_or_are_wrong():
    notices = load_config({"onefold": {"max_rollbacks": 5}}).notices
    assert any(line.startswith("onefold.max_rollbacks: it has no effect unless") for line in notices)
    spike = {"factor": 5, "action": "rollback"}
    for section in ({"nonfinite_gradients": "rollback"}, {"loss_spike": spike}, {"grad_norm_spike": spike}):
        assert load_config({"onefold": {"max_rollbacks": 5, **section}}).notices == ()
    with pytest.raises(ConfigError, match=r"loss_spike\.window = 1: expected at least 2"):
        load_config({"onefold": {"loss_spike": {"factor": 5, "window": 1}}})
    assert issubclass(LossSpikeError, RefusedStepError)
    with pytest.raises(ConfigError, match=r"nonfinite_gradients is 'rollback' with fp16"):
        make_plan(load_config({"fp16": {"enabled": True}, "onefold": {"nonfinite_gradients": "rollback"}}), 1)


def test_speculation_covers_steps_that_may_be_refused():
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0}
    for guard, speculates in (
        ({}, False),
        ({"loss_spike": {"factor": 5}}, False),
        ({"loss_spike": {"factor": 5, "action": "skip"}}, True),
        ({"grad_norm_spike": {"factor": 5, "action": "skip"}}, True),
        ({"replica_check_every": 5}, True),
    ):
        own = {"step_in_backward": True, "nonfinite_gradients": "ignore", **guard}
        assert make_plan(load_config({**config, "onefold": own}), 2).speculates == speculates
