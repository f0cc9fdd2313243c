"""DeepSpeed's learning-rate schedules."""

from __future__ import annotations

import argparse

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
DECAY_STEP_SIZE = "decay_step_size"

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The switches with which DeepSpeed scripts choose a schedule on the command line."""
    group = parser.add_argument_group("Convergence Tuning", "the learning-rate schedule and its parameters")
    group.add_argument("--lr_schedule", help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    numbers = {
        LR_RANGE_TEST_MIN_LR: 0.001, LR_RANGE_TEST_STEP_RATE: 1.0, LR_RANGE_TEST_STEP_SIZE: 1000,
        CYCLE_FIRST_STEP_SIZE: 1000, CYCLE_FIRST_STAIR_COUNT: -1, CYCLE_SECOND_STEP_SIZE: -1,
        CYCLE_SECOND_STAIR_COUNT: -1, DECAY_STEP_SIZE: 1000, CYCLE_MIN_LR: 0.01, CYCLE_MAX_LR: 0.1,
        DECAY_LR_RATE: 0.0, CYCLE_MIN_MOM: 0.8, CYCLE_MAX_MOM: 0.9, DECAY_MOM_RATE: 0.0, WARMUP_MIN_LR: 0.0,
        WARMUP_MAX_LR: 0.001, WARMUP_NUM_STEPS: 1000,
    }  # fmt: skip
    for name, default in numbers.items():
        group.add_argument(f"--{name}", type=type(default), default=default)
    group.add_argument(f"--{LR_RANGE_TEST_STAIRCASE}", type=bool, default=False)
    group.add_argument("--cycle_momentum", action="store_true")
    group.add_argument(f"--{WARMUP_TYPE}", default=WARMUP_LOG_RATE)
    return parser
