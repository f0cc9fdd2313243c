"""The schedules against their formulas (written out again here) and against values computed by hand."""

import inspect
import logging
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from models import config, more, start, weights_of
from torch import nn

from onefold.config import ConfigError, load_config
from onefold.config.keys import entries
from onefold.config.params import SCHEDULES
from onefold.optim import schedules
from onefold.optim.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    check_step_arguments,
    prepare_scheduler,
)
from onefold.plan.optimizer_spec import make_scheduler_spec


def build_scheduler(name: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    spec = make_scheduler_spec(load_config({"scheduler": {"type": name, "params": params}}))
    assert spec is not None
    return prepare_scheduler(spec)(optimizer)


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
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 10, 57])
@pytest.mark.parametrize("total", [1, 2, 5, 80])
def test_warmups_follow_their_formulas(kind: str, num_steps: int, total: int):
    steps = max(2, num_steps)

    def height(iteration: int) -> float:
        iteration = max(iteration, 0)
        return math.log(iteration + 1, steps) if kind == "log" else iteration / steps

    lines = {
        "WarmupLR": lambda i: 0.3 + 0.7 * (height(i) if i < steps else 1.0),
        "WarmupDecayLR": lambda i: (
            0.3 + 0.7 * (height(i) if i < steps else max(0, (total - i) / max(1, total - steps)))
        ),
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
@pytest.mark.parametrize(("warmup", "total"), [(0, 20), (0, 1), (1, 20), (5, 20), (20, 20), (30, 20)])
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
    assert "cycle_momentum has no effect" in caplog.text
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
    with pytest.raises(ConfigError, match=rf"scheduler\.type.*Did you mean {nearest}\?"):
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
            r"scheduler\.params\.warmup_steps: .*did you mean scheduler\.params\.warmup_num_steps",
        ),
        ("WarmupLR", {"num_warmup_steps": 5}, r"num_warmup_steps: .*did you mean scheduler\.params\.warmup_num_steps"),
        ("WarmupLR", {"learning_rate": 5}, r"learning_rate: .*did you mean scheduler\.params\.warmup_max_lr"),
        ("WarmupCosineLR", {"max_steps": 5}, r"max_steps: .*did you mean scheduler\.params\.total_num_steps"),
        ("WarmupLR", {"optimizer": 5}, r"scheduler\.params\.optimizer: there is no key"),
        ("CosineAnnealingLR", {"optimizer": 5, "T_max": 3}, r"scheduler\.params\.optimizer: .*has no parameter"),
        ("CosineAnnealingLR", {"t_max": 3}, r"scheduler\.params\.t_max: .*did you mean scheduler\.params\.T_max"),
        ("CosineAnnealingLR", {"T_max": 0}, r"scheduler\.params\.T_max = 0: expected at least 1"),
        ("CosineAnnealingLR", {"T_max": "soon"}, r"scheduler\.params\.T_max = 'soon': expected a whole number"),
        (
            "CosineAnnealingLR",
            {"T_max": 3, "eta_min": math.inf},
            r"scheduler\.params\.eta_min = inf: expected a finite",
        ),
        ("CosineAnnealingWarmRestarts", {"T_0": 0}, r"scheduler\.params\.T_0 = 0: Expected positive integer"),
        ("StepLR", {"step_size": 2.5}, r"scheduler\.params\.step_size = 2\.5: expected a whole number"),
        ("StepLR", {"step_size": 3, "gamma": -0.5}, r"scheduler\.params\.gamma = -0\.5: expected at least 0"),
        ("StepLR", {"step_size": 3, "last_epoch": 4}, r"scheduler\.params\.last_epoch = 4: .*initial_lr"),
        ("MultiStepLR", {"milestones": [1, "x"]}, r"scheduler\.params\.milestones\[1\] = 'x': expected a whole number"),
        ("MultiStepLR", {"milestones": 3}, r"scheduler\.params\.milestones = 3: expected a list of whole numbers"),
        ("LinearLR", {"start_factor": 5}, r"scheduler\.params\.start_factor = 5\.0: "),
        ("OneCycleLR", {"max_lr": 1, "total_steps": 9, "pct_start": 3}, r"scheduler\.params\.pct_start = 3\.0: "),
        ("OneCycleLR", {"max_lr": [1.0], "total_steps": 9}, r"scheduler\.params\.max_lr = \(1\.0,\): "),
        (
            "OneCycleLR",
            {"max_lr": 1, "total_steps": 9, "anneal_strategy": "no"},
            r"anneal_strategy = 'no': expected one",
        ),
        ("CyclicLR", {"base_lr": 0, "max_lr": 1, "cycle_momentum": "no"}, r"cycle_momentum = 'no': expected true or"),
        ("CyclicLR", {"base_lr": 0, "max_lr": 1, "scale_fn": "x"}, r"scale_fn = 'x': .*not JSON"),
        ("ReduceLROnPlateau", {"mode": "best"}, r"scheduler\.params\.mode = 'best': expected one of min, max"),
        ("ReduceLROnPlateau", {"factor": 2}, r"scheduler\.params\.factor = 2\.0: "),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps is missing"),
        ("OneCycle", {"cycle_min_lr": 0.1}, r"scheduler\.params\.cycle_max_lr is missing"),
        ("CosineAnnealingLR", {}, r"scheduler\.params\.T_max is missing"),
        ("OneCycleLR", {"max_lr": 0.1}, r"scheduler\.params of OneCycleLR: .*total_steps"),
        ("WarmupLR", {"warmup_num_steps": -1}, r"scheduler\.params\.warmup_num_steps = -1: expected at least 0"),
        ("WarmupLR", {"warmup_max_lr": ["auto", 0.1]}, r'scheduler\.params\.warmup_max_lr\[0\] is "auto" or null'),
        ("MultiStepLR", {"milestones": [2, None]}, r'scheduler\.params\.milestones\[1\] is "auto" or null'),
        ("WarmupLR", {"warmup_num_steps": 2.5}, r"scheduler\.params\.warmup_num_steps = 2\.5: expected a whole number"),
        (
            "WarmupLR",
            {"warmup_num_steps": True},
            r"scheduler\.params\.warmup_num_steps = True: expected a whole number",
        ),
        (
            "WarmupLR",
            {"warmup_type": "cubic"},
            r"scheduler\.params\.warmup_type = 'cubic': expected one of log, linear",
        ),
        ("WarmupLR", {"warmup_max_lr": "big"}, r"scheduler\.params\.warmup_max_lr = 'big': expected a number"),
        ("WarmupLR", {"warmup_max_lr": -1}, r"scheduler\.params\.warmup_max_lr = -1: expected at least 0"),
        ("WarmupLR", {"warmup_max_lr": math.nan}, r"scheduler\.params\.warmup_max_lr = nan: expected a number"),
        ("WarmupLR", {"warmup_min_lr": [0, True]}, r"scheduler\.params\.warmup_min_lr\[1\] = True: expected a number"),
        ("LRRangeTest", {"lr_range_test_staircase": "no"}, r"staircase = 'no': expected true or false"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_momentum": "no"}, "cycle_momentum = 'no': expected"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_max_mom": 1}, "cycle_max_mom = 1: .*below 1"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "decay_lr_rate": -1}, "decay_lr_rate = -1: expected at"),
        ("WarmupLR", {"warmup_max_lr": [1.0]}, r"scheduler\.params\.warmup_max_lr has 1 values for 2"),
        ("WarmupCosineLR", {"total_num_steps": 0}, r"scheduler\.params\.total_num_steps = 0: expected at least 1"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, r"scheduler\.params\.lr_range_test_step_size = 0: expected"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": -1}, "cycle_first_step_size"),
    ],
)
def test_wrong_parameters_name_the_key(name: str, params: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, params, make_optimizer())


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_the_table_of_a_schedule_is_its_signature(name: str):
    """Names and defaults stand twice: in the class, for those who call it, and in the table that reads a config."""
    signature = inspect.signature(getattr(schedules, name)).parameters
    held = {key: value.default for key, value in signature.items() if key != "optimizer"}
    required = {key for key, default in held.items() if default is inspect.Parameter.empty}
    table = {key: entry.default for key, entry in entries(SCHEDULES[name]).items()}
    assert table == {key: None if key in required else default for key, default in held.items()}


def test_a_config_is_read_by_the_same_table():
    given = {"type": "WarmupLR", "params": {"warmup_num_steps": "1e2", "warmup_min_lr": ["0", 1]}}
    section = load_config({"scheduler": given}).scheduler
    assert section is not None
    assert section.params == {"warmup_num_steps": 100, "warmup_min_lr": (0.0, 1.0)}
    with pytest.raises(ConfigError, match=r"scheduler\.params\.warmup_min_lr = -1: expected at least 0"):
        load_config({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": -1}}})


def test_torchs_numbers_may_be_strings():
    optimizer = make_optimizer(0.1)
    schedule = build_scheduler("StepLR", {"step_size": "1", "gamma": "5e-1"}, optimizer)
    optimizer.step()
    schedule.step()
    assert rates_of(optimizer) == [0.05]


def test_what_a_scheduler_does_not_take_is_told_before_it_is_called():
    plateau = build_scheduler("ReduceLROnPlateau", {"patience": "3"}, make_optimizer(0.1))
    check_step_arguments(plateau, {"metrics": 1.0})
    check_step_arguments(None, {"metrics": 1.0})
    check_step_arguments(build_scheduler("WarmupLR", {}, make_optimizer()), {})
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau\.step\(\).*'metrics'.*engine\.step\(lr_kwargs="):
        check_step_arguments(plateau, {})
    with pytest.raises(ValueError, match=r"WarmupLR\.step\(\).*'metrics'"):
        check_step_arguments(build_scheduler("WarmupLR", {}, make_optimizer()), {"metrics": 1.0})


def test_auto_and_null_mean_absent_and_whole_floats_are_counts():
    optimizer = make_optimizer(0.1)
    schedule = build_scheduler(
        "WarmupLR", {"warmup_max_lr": None, "warmup_type": "auto", "warmup_num_steps": 4e0}, optimizer
    )
    schedule.step(1)
    assert rates_of(optimizer) == pytest.approx([0.05])


def test_an_absent_element_of_a_list_is_the_default_of_its_key():
    optimizer = make_optimizer(0.1, 0.2)
    params = {"warmup_min_lr": ["auto", 0.05], "warmup_num_steps": 4}
    assert build_scheduler("WarmupLR", params, optimizer).min_lrs == [0.0, 0.05]
    params = {"warmup_max_lr": [None, 0.05], "total_num_steps": 4}
    assert build_scheduler("WarmupDecayLR", params, optimizer).max_lrs == [0.001, 0.05]
    section = load_config({"scheduler": {"type": "WarmupDecayLR", "params": params}}).scheduler
    assert section is not None
    assert section.params["warmup_max_lr"] == (0.001, 0.05)


# In an engine


def plateau(stage: int, kind: str) -> None:
    """Without its metric a step is refused before it has changed anything, and can then be taken as if never tried."""
    params = {"factor": 0.5, "patience": 0}
    more: dict[str, Any] = {"scheduler": {"type": "ReduceLROnPlateau", "params": params}} if kind == "config" else {}
    given: dict[str, Any] = {}
    model = nn.Linear(4, 2)
    if kind == "instance":
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=1.0)
        given["lr_scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(given["optimizer"], **params)
    elif kind == "callable":
        given["lr_scheduler"] = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, **params)
    optimizer = {} if "optimizer" in given else {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine = start(model, {**config(stage, gradient_clipping=0), **more, **optimizer}, **given)
    rates = []
    for step in range(4):
        engine.backward(engine(torch.ones(2, 4)).sum())
        before = weights_of(engine.module)
        with pytest.raises(ValueError, match=r"ReduceLROnPlateau.*'metrics'.*engine\.step\(lr_kwargs="):
            engine.step()
        assert engine.global_steps == engine.state.window.micro_steps == step
        assert all(torch.equal(value, before[name]) for name, value in weights_of(engine.module).items())
        rate = engine.get_lr()[0]
        engine.step(lr_kwargs={"metrics": 1.0})
        assert engine.global_steps == engine.state.window.micro_steps == step + 1
        # The gradient of a bias is the batch's two rows.
        assert torch.allclose(before["bias"] - weights_of(engine.module)["bias"], torch.full((2,), 2 * rate))
        rates.append(rate)
    assert rates == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(("stage", "kind"), [(2, "config"), (3, "instance"), more(1, "callable")])
def test_a_scheduler_without_its_metric_changes_nothing(on_ranks, stage, kind):
    on_ranks(2, plateau, stage, kind)


def at_its_end() -> tuple[int, int, int | None]:
    """torch's OneCycleLR raises in the step after its last one."""
    section = {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 2, "cycle_momentum": False}}
    engine = start(nn.Linear(4, 2), config(2, scheduler=section))
    for step in range(3):
        before = weights_of(engine.module)
        engine.backward(engine(torch.ones(2, 4)).sum())
        with pytest.raises(ValueError, match="Tried to step 3 times") if step == 2 else nullcontext():
            engine.step()
        assert not torch.equal(before["weight"], weights_of(engine.module)["weight"])
    return engine.global_steps, engine.state.window.micro_steps, engine._saver.steps_done()


def test_a_step_is_counted_though_its_scheduler_raises(on_ranks):
    assert on_ranks(2, at_its_end) == [(3, 3, 3)] * 2


def told_by(given: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    try:
        start(nn.Linear(4, 2), {**config(1), "log_level": "info", **settings}, **given)
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if line.startswith(("config: optimizer", "config: scheduler"))]


def test_a_section_that_nothing_reads_is_told(on_ranks):
    scheduler = {"type": "WarmupLR", "params": {}}
    sgd = partial(torch.optim.SGD, lr=0.1)
    step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    lines, others = on_ranks(2, told_by, {"optimizer": sgd, "lr_scheduler": step_lr}, {"scheduler": scheduler})
    assert [line for line in lines if "an optimizer was passed to initialize" in line], lines
    assert [line for line in lines if "an lr_scheduler was passed to initialize" in line], lines
    assert others == [], "one rank speaks"
    lines, _ = on_ranks(2, told_by, {}, {"scheduler": scheduler, "optimizer": None})
    assert [line for line in lines if "scheduler: the section is ignored, because there is no optimizer" in line], lines
    assert on_ranks(2, told_by, {}, {"scheduler": scheduler}) == [[], []]


def refused_early() -> bool:
    model = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=r"scheduler\.params\.T_max is missing"):
        start(model, config(3, scheduler={"type": "CosineAnnealingLR", "params": {}}))
    return model.weight.shape == (2, 4)


def test_a_wrong_schedule_is_refused_before_shards_are_made(on_ranks):
    assert on_ranks(2, refused_early) == [True, True]
