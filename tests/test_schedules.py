"""The schedules against their formulas (written out again here) and against values computed by hand."""

import math

import pytest
import torch

from onefold.config.errors import ConfigError
from onefold.optim.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)


def make_optimizer(*rates: float, kind: type = torch.optim.AdamW, **options):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1, 0.2)]
    return kind(groups, **options)


def rates_of(optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def rates_over(schedule, optimizer, num_steps: int) -> list[list[float]]:
    """The groups' rates in force for each optimizer step: the first comes from construction, before any `step()`."""
    rates = [rates_of(optimizer)]
    for _ in range(num_steps - 1):
        schedule.step()
        rates.append(rates_of(optimizer))
    return rates


def first_group(rates: list[list[float]]) -> list[float]:
    return [step[0] for step in rates]


# Hand-computed values


def test_warmup_linear_by_hand():
    optimizer = make_optimizer(1.0)
    schedule = WarmupLR(optimizer, 0.2, 1.0, warmup_num_steps=4, warmup_type="linear")
    assert first_group(rates_over(schedule, optimizer, 7)) == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_warmup_log_by_hand():
    optimizer = make_optimizer(1.0)
    schedule = WarmupLR(optimizer, 0.1, 1.0, warmup_num_steps=4)
    # log 1, 2, 3, 4 over log 4 are 0, 0.5, 0.79248, 1.
    assert first_group(rates_over(schedule, optimizer, 6)) == pytest.approx([0.1, 0.1, 0.55, 0.813233, 1.0, 1.0])


def test_warmup_decay_by_hand():
    optimizer = make_optimizer(1.0)
    schedule = WarmupDecayLR(optimizer, 6, 0.0, 1.0, warmup_num_steps=2, warmup_type="linear")
    expected = [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]
    assert first_group(rates_over(schedule, optimizer, 9)) == pytest.approx(expected)


def test_warmup_cosine_by_hand():
    optimizer = make_optimizer(2.0)
    schedule = WarmupCosineLR(optimizer, 6, 0.5, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear")
    # Ratios: none for the first step, 0.5 and 0.75 in the warm-up, then 0.1 + 0.9 * (1 + cos(k pi / 4)) / 2.
    ratios = [0, 0.5, 0.75, 0.868198, 0.55, 0.231802, 0.1, 0.1]
    assert first_group(rates_over(schedule, optimizer, 8)) == pytest.approx([2 * ratio for ratio in ratios], rel=1e-5)


def test_range_test_by_hand():
    optimizer = make_optimizer(9.0)
    schedule = LRRangeTest(optimizer, 0.1, lr_range_test_step_size=2, lr_range_test_step_rate=3.0)
    assert first_group(rates_over(schedule, optimizer, 4)) == pytest.approx([0.1, 0.25, 0.4, 0.55])
    optimizer = make_optimizer(9.0)
    schedule = LRRangeTest(optimizer, 0.1, 2, 3.0, lr_range_test_staircase=True)
    assert first_group(rates_over(schedule, optimizer, 5)) == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.7])


def test_one_cycle_by_hand():
    optimizer = make_optimizer(9.0, betas=(0.95, 0.98))
    schedule = OneCycle(
        optimizer,
        1.0,
        2.0,
        0.5,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        decay_step_size=2,
        decay_mom_rate=0.1,
    )
    rates, betas = [], []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"])
        schedule.step()
    assert rates == pytest.approx([1, 1.5, 2, 1.75, 1.5, 1.25, 1, 1 / 1.25, 1 / 1.5])
    momenta = [0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9 * 1.05, 0.9 * 1.1]
    assert [beta[0] for beta in betas] == pytest.approx(momenta)
    assert {beta[1] for beta in betas} == {0.98}, "only the first beta is cycled"


def test_one_cycle_stairs_by_hand():
    optimizer = make_optimizer(9.0)
    schedule = OneCycle(
        optimizer, 1.0, 2.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_second_stair_count=1
    )
    assert first_group(rates_over(schedule, optimizer, 10)) == pytest.approx([1, 1, 1.5, 1.5, 2, 1, 1, 1, 1, 1])


# The closed formulas, over many settings


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10, 57])
def test_warmups_follow_their_formulas(kind: str, num_steps: int):
    total = 80
    steps = max(2, num_steps)

    def height(iteration: int) -> float:
        iteration = max(iteration, 0)
        return math.log(iteration + 1, steps) if kind == "log" else iteration / steps

    lines = {
        "WarmupLR": lambda i: 0.3 + 0.7 * (height(i) if i < steps else 1.0),
        "WarmupDecayLR": lambda i: 0.3 + 0.7 * (height(i) if i < steps else max(0, (total - i) / (total - steps))),
    }
    for name, line in lines.items():
        params = {"warmup_min_lr": 0.3, "warmup_max_lr": 1.0, "warmup_num_steps": num_steps, "warmup_type": kind}
        if name == "WarmupDecayLR":
            params["total_num_steps"] = total
        optimizer = make_optimizer(9.0)
        schedule = build_scheduler(name, params, optimizer)
        expected = [line(iteration) for iteration in range(-1, 99)]
        assert first_group(rates_over(schedule, optimizer, 100)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(1, 20), (5, 20), (20, 20), (30, 20)])
def test_warmup_cosine_follows_its_formula(kind: str, warmup: int, total: int):
    steps, low, floor = max(2, warmup), 0.2, 0.05
    schedule = WarmupCosineLR(optimizer := make_optimizer(0.1, 0.2), total, low, warmup, floor, kind)
    for iteration, rates in enumerate(rates_over(schedule, optimizer, 45), start=-1):
        if iteration < 0:
            ratio = 0.0
        elif iteration < steps:
            rise = math.log(iteration + 1, steps) if kind == "log" else iteration / steps
            ratio = low + (1 - low) * rise
        else:
            progress = min(1.0, (iteration - steps + 1) / (total - steps)) if total > steps else 1.0
            ratio = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        assert rates == pytest.approx([0.1 * ratio, 0.2 * ratio], rel=1e-12)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (3, 7), (10, 2)])
def test_one_cycle_follows_its_formula(first: int, second: int):
    optimizer = make_optimizer(9.0)
    schedule = OneCycle(
        optimizer,
        0.1,
        1.0,
        decay_lr_rate=0.3,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        decay_step_size=4,
    )
    for position, rates in enumerate(rates_over(schedule, optimizer, 40)):
        if position <= first:
            expected = 0.1 + 0.9 * position / first
        elif position <= first + second:
            expected = 0.1 + 0.9 * (first + second - position) / second
        else:
            expected = 0.1 / (1 + 0.3 * (position - first - second) / 4)
        assert rates == pytest.approx([expected], rel=1e-12)


# Groups, state, optimizers


def test_warmup_without_max_rises_to_each_groups_own_rate():
    optimizer = make_optimizer(0.1, 0.2)
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    assert rates_over(schedule, optimizer, 4)[-1] == pytest.approx([0.1, 0.2])


def test_lists_give_one_value_a_group_and_must_fit():
    optimizer = make_optimizer(0.1, 0.2)
    schedule = WarmupLR(optimizer, [0.0, 1.0], [1.0, 3.0], 2, "linear")
    schedule.step(1)
    assert schedule.get_lr() == [0.5, 2.0]
    with pytest.raises(ValueError, match="warmup_max_lr has 3 values for 2 parameter groups"):
        WarmupLR(optimizer, warmup_max_lr=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="cycle_min_mom has 1 values for 2"):
        OneCycle(optimizer, 0.1, 1.0, cycle_min_mom=[0.8])


PARAMS = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
    "WarmupLR": {"warmup_num_steps": 10},
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 10},
}


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_a_restored_schedule_goes_on_where_it_was(name: str):
    reference = make_optimizer()
    schedule = build_scheduler(name, PARAMS[name], reference)
    for _ in range(7):
        schedule.step()
    state = schedule.state_dict()
    assert state == {"last_batch_iteration": 6}

    restored_optimizer = make_optimizer()
    restored = build_scheduler(name, PARAMS[name], restored_optimizer)
    restored.load_state_dict(state)
    for _ in range(10):
        assert rates_of(restored_optimizer) == rates_of(reference) == restored.get_last_lr() == restored.get_lr()
        assert restored_optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
        schedule.step()
        restored.step()


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_step_takes_an_iteration(name: str):
    stepped, jumped = make_optimizer(), make_optimizer()
    walking = build_scheduler(name, PARAMS[name], stepped)
    jumping = build_scheduler(name, PARAMS[name], jumped)
    for _ in range(9):
        walking.step()
    jumping.step(8)
    assert rates_of(stepped) == rates_of(jumped)
    assert walking.state_dict() == jumping.state_dict()


def test_a_tensor_rate_stays_the_same_tensor():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate, foreach=False, capturable=True)
    held = optimizer.param_groups[0]["lr"]
    schedule = WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    schedule.step(1)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.05)


def test_one_cycle_says_when_there_is_no_momentum_to_cycle(caplog: pytest.LogCaptureFixture):
    optimizer = make_optimizer(0.1, kind=torch.optim.SGD, momentum=0.5)
    schedule = OneCycle(optimizer, 0.01, 0.1)
    schedule.step()
    assert "cycle_momentum has nothing to do" in caplog.text
    assert schedule.get_mom() is None
    assert optimizer.param_groups[0]["momentum"] == 0.5


# Building by name


def test_the_names_are_deepspeeds():
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def test_a_torch_scheduler_by_name():
    optimizer, reference = make_optimizer(0.1), make_optimizer(0.1)
    schedule = build_scheduler("CosineAnnealingLR", {"T_max": 10}, optimizer)
    expected = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 10)
    for _ in range(10):
        for either in (optimizer, reference):
            either.step()
        schedule.step()
        expected.step()
        assert rates_of(optimizer) == rates_of(reference)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LambdaLR", "Python function"),
        ("MultiplicativeLR", "Python function"),
        ("SequentialLR", "other schedulers"),
        ("ChainedScheduler", "other schedulers"),
        ("ReduceLROnPlateau", "metric"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_the_reason(name: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        build_scheduler(name, {}, make_optimizer())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("WarmupLr", "WarmupLR"), ("WarmupCosinLR", "WarmupCosineLR"), ("CosineAnealingLR", "CosineAnnealingLR")],
)
def test_an_unknown_name_gives_the_nearest(name: str, nearest: str):
    with pytest.raises(ConfigError, match=rf"scheduler\.type.*did you mean '{nearest}'"):
        build_scheduler(name, {}, make_optimizer())


@pytest.mark.parametrize("name", ["LRScheduler", "Optimizer", "math", "zzz"])
def test_a_name_that_is_no_schedule_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"scheduler\.type"):
        build_scheduler(name, {}, make_optimizer())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "WarmupLR",
            {"warmup_steps": 5},
            r"scheduler\.params\.warmup_steps .*did you mean 'warmup_num_steps'.*known: ",
        ),
        ("WarmupLR", {"optimizer": 5}, r"scheduler\.params\.optimizer "),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps is missing"),
        ("OneCycle", {"cycle_min_lr": 0.1}, r"scheduler\.params\.cycle_max_lr is missing"),
        ("CosineAnnealingLR", {}, r"scheduler\.params\.T_max is missing"),
        ("OneCycleLR", {"max_lr": 0.1}, r"scheduler\.params of OneCycleLR: .*total_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, r"scheduler\.params\.warmup_num_steps must be a whole number above 0"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, r"scheduler\.params\.warmup_num_steps must be"),
        ("WarmupLR", {"warmup_num_steps": True}, r"scheduler\.params\.warmup_num_steps must be"),
        ("WarmupLR", {"warmup_type": "cubic"}, r"scheduler\.params\.warmup_type is 'cubic'; known: 'log', 'linear'"),
        ("WarmupLR", {"warmup_max_lr": "big"}, r"scheduler\.params\.warmup_max_lr must be a number"),
        ("WarmupLR", {"warmup_max_lr": [1.0]}, r"scheduler\.params\.warmup_max_lr has 1 values for 2"),
        ("WarmupCosineLR", {"total_num_steps": 0}, r"scheduler\.params\.total_num_steps must be"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, r"scheduler\.params\.lr_range_test_step_size must be"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": -1}, "cycle_first_step_size"),
    ],
)
def test_wrong_parameters_name_the_key(name: str, params: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, params, make_optimizer())


def test_auto_and_null_mean_absent_and_whole_floats_are_counts():
    optimizer = make_optimizer(0.1)
    schedule = build_scheduler(
        "WarmupLR", {"warmup_max_lr": None, "warmup_type": "auto", "warmup_num_steps": 4e0}, optimizer
    )
    schedule.step(1)
    assert rates_of(optimizer) == pytest.approx([0.05])
