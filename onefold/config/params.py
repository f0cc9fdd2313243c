"""The keys of `optimizer.params` and `scheduler.params` for the optimizers and schedules that onefold has itself.

Each is a section like the others: its values are read, its keys suggested and its support status told in the same way.
The defaults are those of the optimizer; a class of torch is read by its own signature instead (`optim.signature`).
"""
# ruff: noqa: RUF009 - key() returns dataclasses.field(), as that rule wants.

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onefold.config.keys import ConfigError, key, noticed, refused

_KERNEL = "one fused kernel over flat shards serves; the result is the same"
_BETA = {"minimum": 0, "below": 1}

Betas = tuple[float, float]
Coefficients = Literal["quintic", "polar_express"] | tuple[float, float, float]
PerGroup = float | tuple[float, ...]
"""One number for all parameter groups, or one a group."""


@dataclass(frozen=True)
class _Params:
    """What every optimizer has."""

    lr: float = key(1e-3, "Learning rate.", minimum=0)
    weight_decay: float = key(0.0, "Weight decay.", minimum=0)


@dataclass(frozen=True)
class _TorchSwitches:
    """What torch's classes ask about kernels; the update is the same without."""

    maximize: bool = key(False, "Climb instead of descend.")
    foreach: bool | None = noticed(None, "Which of torch's kernels.", _KERNEL)
    fused: bool | None = noticed(None, "Which of torch's kernels.", _KERNEL)
    capturable: bool = noticed(False, "Kernels for CUDA graphs.", _KERNEL)
    differentiable: bool = refused(
        False, "Backward through the step.", "the step works in place on flat shards; leave it out"
    )


@dataclass(frozen=True)
class AdamParams(_TorchSwitches, _Params):
    """Adam. As in DeepSpeed its weight decay is AdamW's unless `adam_w_mode` is false."""

    betas: Betas = key((0.9, 0.999), "Decay of the averages of the gradient and of its square.", **_BETA)
    eps: float = key(1e-8, "Added to the root in the denominator.", minimum=0)
    amsgrad: bool = key(False, "Divide by the largest average of squares so far.")
    decoupled_weight_decay: bool = key(True, "Decay apart from the gradient.", aliases=("adam_w_mode", "adamw_mode"))
    bias_correction: bool = refused(True, "Correct for the start at zero.", "only true is implemented; leave it out")
    torch_adam: bool = noticed(False, "torch's Adam instead of DeepSpeed's.", _KERNEL)
    fp32_optimizer_states: bool = noticed(True, "States in fp32.", "onefold.state_dtype says what states are held in")
    set_grad_none: bool = noticed(True, "Drop gradients instead of zeroing.", "the engine drops gradients")


@dataclass(frozen=True)
class AdamWParams(AdamParams):
    """AdamW. As in DeepSpeed there is no weight decay unless it is asked for."""

    decoupled_weight_decay: bool = noticed(
        True,
        "Decay weights apart from the gradient.",
        "AdamW always decays apart from the gradient, in DeepSpeed too; write Adam",
        aliases=("adam_w_mode", "adamw_mode"),
    )


@dataclass(frozen=True)
class SGDParams(_TorchSwitches, _Params):
    """Gradient descent, with torch's momentum."""

    momentum: float = key(0.0, "Decay of the velocity; 0: no velocity.", minimum=0, maximum=1)
    dampening: float = key(0.0, "Share of the gradient that does not enter the velocity.")
    nesterov: bool = key(False, "Look ahead along the velocity; needs `momentum`, and `dampening` 0.")


@dataclass(frozen=True)
class AdagradParams(_TorchSwitches, _Params):
    """Adagrad, with torch's decay of the rate."""

    lr: float = key(1e-2, "Learning rate.", minimum=0)
    lr_decay: float = key(0.0, "The rate is divided by 1 + this x steps.", minimum=0)
    initial_accumulator_value: float = key(0.0, "Where the sum of squares starts.", minimum=0)
    eps: float = key(1e-10, "Added to the root in the denominator.", minimum=0)


@dataclass(frozen=True)
class LionParams(_Params):
    """The sign of an interpolated momentum; weight decay is apart from the gradient."""

    lr: float = key(1e-4, "Learning rate.", minimum=0)
    betas: Betas = key((0.9, 0.99), "Weights of the momentum in the step, and in its own update.", **_BETA)


@dataclass(frozen=True)
class MuonParams(_Params):
    """Orthogonalised momentum for hidden matrices, AdamW for embeddings, heads and vectors. DeepSpeed's defaults."""

    lr: float | None = key(  # type: ignore[assignment]
        None, "Learning rate of matrices and all others, where `muon_lr` or `adam_lr` does not give its own.", minimum=0
    )
    muon_lr: float | None = key(0.02, "Learning rate of matrices; left out: `lr`, if that is given.", minimum=0)
    adam_lr: float | None = key(3e-4, "Learning rate of all others; left out: `lr`, if that is given.", minimum=0)
    momentum: float = key(0.95, "Decay of the momentum.", **_BETA)
    nesterov: bool = key(True, "Look ahead along the momentum.")
    ns_steps: int = key(5, "Iterations that orthogonalise.", minimum=1, below=100)
    ns_coefficients: Coefficients = key(
        "quintic", "Of these iterations: the usual ones, those of Polar Express, or three numbers."
    )
    ns_method: Literal["standard", "gram"] = noticed(
        "standard", "How iterations are computed.", "all products are those of the standard way, which gram shortens"
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = key(
        None, "How the rate follows a matrix's shape, under torch's names; left out: original."
    )
    betas: Betas = key((0.9, 0.95), "AdamW's: decay of the averages of the gradient and of its square.", **_BETA)
    eps: float = key(1e-10, "AdamW's: added to the root in the denominator.", minimum=0)
    adamw_names: tuple[str, ...] = key((), "Patterns of names of parameters that AdamW is to step.")
    split_rows: tuple[str, ...] = key(
        (), "Parameters that are several matrices below each other: `*.qkv.weight=3`, `*.kv.weight=512,512`."
    )


@dataclass(frozen=True)
class ShampooParams(_Params):
    """The momentum of hidden matrices between the inverse roots of their covariances; others are stepped by AdamW."""

    adam_lr: float | None = key(None, "Learning rate of all but matrices; left out: `lr`.", minimum=0)
    momentum: float = key(0.9, "Decay of the momentum.", **_BETA)
    covariance_decay: float = key(0.95, "Decay of the covariances of rows and of columns.", **_BETA)
    covariance_eps: float = key(1e-6, "Share of the largest eigenvalue below which none counts.", minimum=0)
    root_every: int = key(10, "Steps after which roots are taken anew.", minimum=1)
    betas: Betas = key((0.9, 0.999), "AdamW's: decay of the averages of the gradient and of its square.", **_BETA)
    eps: float = key(1e-8, "AdamW's: added to the root in the denominator.", minimum=0)
    adamw_names: tuple[str, ...] = key((), "Patterns of names of parameters that AdamW is to step.")
    split_rows: tuple[str, ...] = key((), "Parameters that are several matrices below each other, as with Muon.")


OPTIMIZERS: dict[str, type] = {
    "adam": AdamParams,
    "adamw": AdamWParams,
    "sgd": SGDParams,
    "adagrad": AdagradParams,
    "lion": LionParams,
    "muon": MuonParams,
    "shampoo": ShampooParams,
}
"""By the name in lower case: DeepSpeed does not look at the case either."""


_8BIT = re.compile(r"(paged_?)?(?P<plain>adamw|adam|lion)_?(bnb_?|torch_?)?8bit", re.IGNORECASE)


def plain_name(name: str) -> str:
    """The optimizer that a `type` means, whatever its states are held in."""
    match = _8BIT.fullmatch(name)
    return (match["plain"] if match else name).lower()


def is_8bit(name: str) -> bool:
    """Whether a `type` is one of the names that bitsandbytes, torchao and transformers have for states of 8 bits."""
    return _8BIT.fullmatch(name) is not None


def is_paged(name: str) -> bool:
    return is_8bit(name) and name.lower().startswith("paged")


def check_together(values: Mapping[str, Any], path: str) -> None:
    """What several hyperparameters of one group say together; `values` has them all."""
    if (
        values.get("nesterov")
        and "dampening" in values
        and not (float(values["momentum"]) > 0 and float(values["dampening"]) == 0)
    ):
        raise ConfigError(
            f"{path}.nesterov = true needs {path}.momentum above 0 and {path}.dampening 0 (they are "
            f"{values['momentum']} and {values['dampening']}): there is no velocity to look along otherwise"
        )


@dataclass(frozen=True)
class _Schedule:
    """What every schedule has."""

    last_batch_iteration: int = key(-1, "The iteration to go on from; -1: a new schedule.", minimum=-1)


@dataclass(frozen=True)
class LRRangeTestParams(_Schedule):
    """Raises the rate steadily, to find the largest that still trains."""

    lr_range_test_min_lr: PerGroup = key(1e-3, "The rate to start from.", minimum=0)
    lr_range_test_step_size: int = key(2000, "Steps of one interval.", minimum=1)
    lr_range_test_step_rate: float = key(1.0, "The rate grows by this x the first one an interval.", minimum=0)
    lr_range_test_staircase: bool = key(False, "Grow once an interval instead of every step.")


@dataclass(frozen=True)
class OneCycleParams(_Schedule):
    """Up and down once while the first beta moves the other way; then both decay."""

    cycle_min_lr: PerGroup | None = key(None, "The rate at both ends of the cycle. Required.", minimum=0)
    cycle_max_lr: PerGroup | None = key(None, "The rate at its top. Required.", minimum=0)
    decay_lr_rate: float = key(0.0, "After the cycle the rate is divided by 1 + this x intervals.", minimum=0)
    cycle_first_step_size: int = key(2000, "Steps on the way up.", minimum=1)
    cycle_second_step_size: int | None = key(None, "Steps on the way down; as many as up when left out.", minimum=0)
    cycle_first_stair_count: int = key(0, "Stairs on the way up; 0: a slope.", minimum=0)
    cycle_second_stair_count: int | None = key(None, "Stairs on the way down; as up when left out.", minimum=0)
    decay_step_size: int = key(0, "Steps of one interval of decay; 0: no decay.", minimum=0)
    cycle_momentum: bool = key(True, "Move the first beta the other way.")
    cycle_min_mom: PerGroup = key(0.8, "The first beta at the top.", **_BETA)
    cycle_max_mom: PerGroup = key(0.9, "The first beta at both ends.", **_BETA)
    decay_mom_rate: float = key(0.0, "After the cycle the first beta grows by this x intervals.", minimum=0)


@dataclass(frozen=True)
class WarmupLRParams(_Schedule):
    """A rise, then one rate for good."""

    warmup_min_lr: PerGroup = key(0.0, "The rate to start from.", minimum=0)
    warmup_max_lr: PerGroup | None = key(None, "The rate to rise to; left out: each group's own.", minimum=0)
    warmup_num_steps: int = key(1000, "Steps of the rise; 0 and 1 count as 2.", minimum=0)
    warmup_type: Literal["log", "linear"] = key("log", "The shape of the rise.")


@dataclass(frozen=True)
class WarmupDecayLRParams(WarmupLRParams):
    """A rise, then a straight line back."""

    warmup_max_lr: PerGroup | None = key(0.001, "The rate to rise to.", minimum=0)
    total_num_steps: int | None = key(None, "The step at which the rate is back at its start. Required.", minimum=1)


@dataclass(frozen=True)
class WarmupCosineLRParams(_Schedule):
    """Shares of each group's own rate: a rise, then half a cosine."""

    total_num_steps: int | None = key(None, "The step at which the cosine ends. Required.", minimum=1)
    warmup_min_ratio: float = key(0.0, "Share of the rate to start from.", minimum=0)
    warmup_num_steps: int = key(1000, "Steps of the rise; 0 and 1 count as 2.", minimum=0)
    cos_min_ratio: float = key(1e-4, "Share of the rate to end at.", minimum=0)
    warmup_type: Literal["log", "linear"] = key("log", "The shape of the rise.")


SCHEDULES: dict[str, type] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}


def params_of(section: str, name: str) -> type | None:
    """The keys of `optimizer.params` or `scheduler.params` under a `type`; None where it is not onefold's own."""
    return OPTIMIZERS.get(plain_name(name)) if section == "optimizer" else SCHEDULES.get(name)
