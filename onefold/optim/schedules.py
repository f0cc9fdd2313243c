"""DeepSpeed's five learning-rate schedules, and torch's schedulers by name.

A schedule is a pure function from an iteration to one learning rate per optimizer group. The engine calls `step()`
after each applied optimizer step, so iteration -1 is the rate of the first step, and iteration 0 that of the second.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onefold.errors import ConfigError
from onefold.log import logger
from onefold.plan import SchedulerSpec, read_schedule_param

PerGroup = float | Sequence[float]


class LRSchedule:
    """The base class of the five schedules. Subclasses compute the learning rates in `_rates_at`."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration: int = read_schedule_param("last_batch_iteration", last_batch_iteration)
        self._last_lr: list[float] = []
        self._apply()

    def _rates_at(self, iteration: int) -> list[float]:
        raise NotImplementedError

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # capturable optimizers keep a reference to the tensor
            else:
                group["lr"] = rate
        self._last_lr = self.get_lr()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given one, and set the learning rates of the groups."""
        given = last_batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if given is None else given
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current iteration."""
        return self._rates_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were set last."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a saved iteration, and set the learning rates of the groups for the next step."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()


class LRRangeTest(LRSchedule):
    """A steadily increasing rate, to find the largest that trains: min_lr * (1 + step_rate * intervals)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size: int = read_schedule_param("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate: float = read_schedule_param("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase: bool = read_schedule_param("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def _rates_at(self, iteration: int) -> list[float]:
        intervals = (iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [min_lr * (1 + self.step_rate * intervals) for min_lr in self.min_lrs]


class OneCycle(LRSchedule):
    """One cycle from the minimum rate to the maximum and back, followed by decay.

    Momentum (the first beta) is cycled in the opposite direction.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.decay_lr_rate: float = read_schedule_param("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate: float = read_schedule_param("decay_mom_rate", decay_mom_rate)
        self.decay_step_size: int = read_schedule_param("decay_step_size", decay_step_size)
        self.first_step_size: int = read_schedule_param("cycle_first_step_size", cycle_first_step_size)
        self.second_step_size: int = self.first_step_size
        if cycle_second_step_size is not None:
            self.second_step_size = read_schedule_param("cycle_second_step_size", cycle_second_step_size)
        self.first_stair_count: int = read_schedule_param("cycle_first_stair_count", cycle_first_stair_count)
        self.second_stair_count: int = self.first_stair_count
        if cycle_second_stair_count is not None:
            self.second_stair_count = read_schedule_param("cycle_second_stair_count", cycle_second_stair_count)
        self.cycle_momentum: bool = read_schedule_param("cycle_momentum", cycle_momentum)
        if self.cycle_momentum and not all("betas" in group for group in optimizer.param_groups):
            kind = type(optimizer).__name__
            logger.warning("OneCycle: cycle_momentum has no effect, because %s has no betas", kind)
            self.cycle_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    @property
    def step_ratio(self) -> float:
        """The fraction of the cycle in which the rate increases."""
        return self.first_step_size / (self.first_step_size + self.second_step_size)

    def _height_at(self, position: int) -> float:
        """Return the height of the cycle at a position: 0 at its ends, 1 at its maximum."""
        if position <= self.first_step_size:
            climbed, size, stairs = position, self.first_step_size, self.first_stair_count
        else:
            climbed, size, stairs = (
                self.first_step_size + self.second_step_size - position,
                self.second_step_size,
                self.second_stair_count,
            )
        # Multiply before dividing: a quotient slightly less than a whole number would be floored to the stair before.
        return math.floor(climbed * stairs / size) / stairs if stairs > 0 else climbed / size

    def _decay_at(self, position: int) -> float:
        """Return the number of decay intervals since the end of the cycle, or 0 if there is no decay."""
        passed = position - self.first_step_size - self.second_step_size
        return passed / self.decay_step_size if self.decay_step_size > 0 else 0.0

    def _rates_at(self, iteration: int) -> list[float]:
        position = iteration + 1
        if position > self.first_step_size + self.second_step_size:
            factor = 1 + self.decay_lr_rate * self._decay_at(position)
            return [low / factor for low in self.min_lrs]
        height = self._height_at(position)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _momenta_at(self, iteration: int) -> list[float]:
        position = iteration + 1
        if position > self.first_step_size + self.second_step_size:
            factor = 1 + self.decay_mom_rate * self._decay_at(position)
            return [high * factor for high in self.max_moms]
        height = self._height_at(position)
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas of each group at the current iteration, or None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        momenta = zip(self._momenta_at(self.last_batch_iteration), self.optimizer.param_groups, strict=True)
        return [(momentum, *group["betas"][1:]) for momentum, group in momenta]

    def _apply(self) -> None:
        super()._apply()
        if self.cycle_momentum:
            # DeepSpeed documents the lower bound as the initial momentum. The cycle starts one iteration later.
            first = self.last_batch_iteration == -1
            momenta = self.min_moms if first else self._momenta_at(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, *group["betas"][1:])


class _Warmup:
    """The increase from 0 to 1 in the three warm-up schedules."""

    def __init__(self, num_steps: int, kind: str) -> None:
        # At least two, because the logarithmic warm-up divides by log(num_steps).
        self.num_steps: int = max(2, read_schedule_param("warmup_num_steps", num_steps))
        self.kind: str = read_schedule_param("warmup_type", kind)

    def height_at(self, iteration: int) -> float:
        """Return the height at an iteration: 0 up to iteration 0, and 1 in ('log') or after ('linear') the last one."""
        started = max(0, iteration)
        if self.kind == "log":
            return (1.0 / math.log(self.num_steps)) * math.log(started + 1)  # in DeepSpeed's order of rounding
        return started / self.num_steps


class WarmupLR(LRSchedule):
    """An increase from the minimum to the maximum rate, which then stays constant.

    Without `warmup_max_lr`, the maximum is the initial rate of each group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        if warmup_max_lr is None:
            self.max_lrs = _initial_rates(optimizer, last_batch_iteration)
        else:
            self.max_lrs = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def _height_at(self, iteration: int) -> float:
        return self.warmup.height_at(iteration) if iteration < self.warmup.num_steps else 1.0

    def _rates_at(self, iteration: int) -> list[float]:
        height = self._height_at(iteration)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """The warm-up of `WarmupLR`, followed by a linear decay to the minimum rate at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _height_at(self, iteration: int) -> float:
        if iteration < self.warmup.num_steps:
            return self.warmup.height_at(iteration)
        decay_steps = max(1, self.total_num_steps - self.warmup.num_steps)
        return max(0.0, (self.total_num_steps - iteration) / decay_steps)


class WarmupCosineLR(LRSchedule):
    """A warm-up from `warmup_min_ratio` to 1, and a cosine decay to `cos_min_ratio`, times each group's initial rate.

    As in DeepSpeed, the first step runs with rate 0, and the cosine is one iteration ahead: it ends at
    `total_num_steps` - 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_min_ratio: float = read_schedule_param("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio: float = read_schedule_param("cos_min_ratio", cos_min_ratio)
        self.initial_lrs = _initial_rates(optimizer, last_batch_iteration)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def warmup_num_steps(self) -> int:
        return self.warmup.num_steps

    @property
    def warmup_type(self) -> str:
        return self.warmup.kind

    def get_lr_ratio(self) -> float:
        """Return the factor of the groups' initial rates at the current iteration."""
        return self._ratio_at(self.last_batch_iteration)

    def _ratio_at(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.warmup.num_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmup.height_at(iteration)
        cosine_steps = self.total_num_steps - self.warmup.num_steps
        done = iteration - self.warmup.num_steps + 1
        height = (1 + math.cos(math.pi * done / cosine_steps)) / 2 if done < cosine_steps else 0.0
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * height)

    def _rates_at(self, iteration: int) -> list[float]:
        ratio = self._ratio_at(iteration)
        return [rate * ratio for rate in self.initial_lrs]


def _per_group(optimizer: torch.optim.Optimizer, name: str, value: Any) -> list[float]:
    num_groups = len(optimizer.param_groups)
    read: float | tuple[float, ...] = read_schedule_param(name, value)
    if not isinstance(read, tuple):
        return [read] * num_groups
    if len(read) != num_groups:
        raise ConfigError(
            f"scheduler.params.{name} has {len(read)} values for {num_groups} parameter groups. Give one number, or "
            "one per group."
        )
    return list(read)


def _initial_rates(optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> list[float]:
    """Return the initial rates of the groups, which torch's schedulers store in the groups as 'initial_lr'."""
    fresh = last_batch_iteration == -1
    return [float(group["lr"] if fresh else group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def _total_steps(total_num_steps: Any, warmup_num_steps: Any) -> int:
    total: int = read_schedule_param("total_num_steps", total_num_steps)
    warmup = max(2, read_schedule_param("warmup_num_steps", warmup_num_steps))
    if total < warmup:
        logger.warning("total_num_steps %d is less than warmup_num_steps %d", total, warmup)
    return total


_SCHEDULES: dict[str, type[LRSchedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES: list[str] = list(_SCHEDULES)

_CALLABLE = "it needs a Python function"
_NESTED = "it consists of other schedulers"
_REFUSED = {
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR"), _CALLABLE),
    **dict.fromkeys(("SequentialLR", "ChainedScheduler"), _NESTED),
}


def prepare_scheduler(spec: SchedulerSpec) -> Callable[[Any], Any]:
    """Return a function that builds the scheduler of the config for an optimizer: DeepSpeed's, or a class of torch.

    Raise at once if its type or its parameters are wrong, so that mistakes are reported before shards are made.
    """
    if spec.type in _REFUSED:
        raise ConfigError(
            f"scheduler.type: {spec.type} cannot be built from a config, because {_REFUSED[spec.type]}. Pass it, or a "
            "callable that makes it, as `lr_scheduler`."
        )
    base = torch.optim.lr_scheduler.LRScheduler
    known: dict[str, Any] = _SCHEDULES | {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and not name.startswith("_")
    }
    if spec.type not in known:
        raise spec.unknown_type(known)
    kind = known[spec.type]
    arguments = spec.read_arguments(kind)
    return lambda optimizer: spec.build(kind, lambda values: kind(optimizer, **values), arguments)


def check_step_arguments(scheduler: Any, lr_kwargs: Mapping[str, Any]) -> None:
    """Raise if `scheduler.step` does not accept the arguments, before the step changes anything."""
    if scheduler is None:
        return
    try:
        inspect.signature(scheduler.step).bind(**lr_kwargs)
    except TypeError as error:
        raise ValueError(
            f"engine.step(lr_kwargs={dict(lr_kwargs)}): {type(scheduler).__name__}.step() takes other arguments "
            f'({error}). Pass the arguments that it needs, such as engine.step(lr_kwargs={{"metrics": loss}}) for '
            "ReduceLROnPlateau, or leave the scheduler out of initialize and step it yourself."
        ) from error
