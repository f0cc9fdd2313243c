"""DeepSpeed's learning-rate schedules."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from onefold.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES = [
    "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
]  # fmt: skip
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"
WARMUP_TYPE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "warmup_type", "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO, TOTAL_NUM_STEPS = "warmup_min_ratio", "cos_min_ratio", "total_num_steps"
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
CYCLE_FIRST_STEP_SIZE, CYCLE_SECOND_STEP_SIZE = "cycle_first_step_size", "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STAIR_COUNT = "cycle_first_stair_count", "cycle_second_stair_count"
DECAY_STEP_SIZE, CYCLE_MOMENTUM, LR_SCHEDULE = "decay_step_size", "cycle_momentum", "lr_schedule"

_NUMBERS = {
    LR_RANGE_TEST_MIN_LR: 0.001, LR_RANGE_TEST_STEP_RATE: 1.0, LR_RANGE_TEST_STEP_SIZE: 1000,
    CYCLE_FIRST_STEP_SIZE: 1000, DECAY_STEP_SIZE: 1000, CYCLE_MIN_LR: 0.01, CYCLE_MAX_LR: 0.1, DECAY_LR_RATE: 0.0,
    CYCLE_MIN_MOM: 0.8, CYCLE_MAX_MOM: 0.9, DECAY_MOM_RATE: 0.0, WARMUP_MIN_LR: 0.0, WARMUP_MAX_LR: 0.001,
    WARMUP_NUM_STEPS: 1000, WARMUP_MIN_RATIO: 0.01, COS_MIN_RATIO: 0.01,
}  # fmt: skip
_LEFT_OUT = (CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT)
_WARMUP = (WARMUP_NUM_STEPS, WARMUP_TYPE)
# The switches that each schedule reads.
_SWITCHES = {
    LR_RANGE_TEST: (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE),
    ONE_CYCLE: (*(name for name in _NUMBERS if name.startswith(("cycle_", "decay_"))), *_LEFT_OUT),
    WARMUP_LR: (WARMUP_MIN_LR, WARMUP_MAX_LR, *_WARMUP),
    WARMUP_DECAY_LR: (WARMUP_MIN_LR, WARMUP_MAX_LR, *_WARMUP),
    WARMUP_COSINE_LR: (WARMUP_MIN_RATIO, COS_MIN_RATIO, *_WARMUP),
}
# The parameter of a schedule that stands for its learning rate.
_RATES = {
    LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR, WARMUP_LR: WARMUP_MAX_LR,
    WARMUP_DECAY_LR: WARMUP_MAX_LR,
}  # fmt: skip

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the switches with which DeepSpeed scripts choose a schedule on the command line."""
    group = parser.add_argument_group("Convergence Tuning", "the learning-rate schedule and its parameters")
    group.add_argument("--lr_schedule", help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name, default in _NUMBERS.items():
        group.add_argument(f"--{name}", type=type(default), default=default)
    for name in _LEFT_OUT:
        group.add_argument(f"--{name}", type=int)
    group.add_argument(f"--{LR_RANGE_TEST_STAIRCASE}", type=_flag, nargs="?", const=True, default=False)
    group.add_argument(f"--{CYCLE_MOMENTUM}", action="store_true")
    group.add_argument(f"--{WARMUP_TYPE}", default=WARMUP_LOG_RATE)
    return parser


def _flag(text: str) -> bool:
    return text.lower() in ("true", "1", "yes")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the switches on this process's command line, and the other arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args(sys.argv[1:])


def _override(schedule: str, args: Any, params: dict[str, Any]) -> None:
    given = {name: getattr(args, name, None) for name in _SWITCHES[schedule]}
    params.update({name: value for name, value in given.items() if value is not None})


override_lr_range_test_params = partial(_override, LR_RANGE_TEST)
override_1cycle_params = partial(_override, ONE_CYCLE)
override_warmupLR_params = partial(_override, WARMUP_LR)


def override_params(args: Any, params: dict[str, Any]) -> None:
    for schedule in VALID_LR_SCHEDULES:
        _override(schedule, args, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the `scheduler` section of the switches, or None and the reason."""
    schedule = getattr(args, LR_SCHEDULE, None)
    if schedule is None:
        return None, f"--{LR_SCHEDULE} is not on the command line"
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is none of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(schedule, args, params)
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return the learning rate in a `scheduler` section, or None and the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"the scheduler section has no {key!r}"
    if config["type"] not in VALID_LR_SCHEDULES:
        return None, f"{config['type']} is none of {', '.join(VALID_LR_SCHEDULES)}"
    if config["type"] not in _RATES:
        return None, f"{config['type']} scales the optimizer's learning rate and defines none"
    return config["params"][_RATES[config["type"]]], ""
