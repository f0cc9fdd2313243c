"""The keys of `optimizer.params` and `scheduler.params` for onefold's optimizers and schedules.

They are declared and checked like other sections. The defaults are those of the optimizer. The parameters of torch
classes are checked against their signatures instead (`signature.py`).
"""
# ruff: noqa: RUF009 - key() returns dataclasses.field(), as that rule requires.

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onefold.config.keys import key, noticed, refused
from onefold.errors import ConfigError

_KERNEL = "onefold uses one fused kernel over flat shards, with the same result"
_BETA = {"minimum": 0, "below": 1}

Betas = tuple[float, float]
Coefficients = Literal["quintic", "polar_express"] | tuple[float, float, float]
PerGroup = float | tuple[float, ...]
"""One number for all parameter groups, or one number per group."""


@dataclass(frozen=True)
class _Params:
    """Parameters of every optimizer."""

    lr: float = key(1e-3, "Learning rate.", minimum=0)
    weight_decay: float = key(0.0, "Weight decay.", minimum=0)


@dataclass(frozen=True)
class _TorchSwitches:
    """Parameters of torch's classes that select a kernel."""

    maximize: bool = key(False, "Maximize the objective instead of minimizing it.")
    foreach: bool | None = noticed(None, "Use torch's foreach kernels.", _KERNEL)
    fused: bool | None = noticed(None, "Use torch's fused kernels.", _KERNEL)
    capturable: bool = noticed(False, "Use kernels that CUDA graphs can capture.", _KERNEL)
    differentiable: bool = refused(
        False, "Support backward through the step.", "the step works in place on flat shards; leave it out"
    )


@dataclass(frozen=True)
class AdamParams(_TorchSwitches, _Params):
    """Adam. As in DeepSpeed, weight decay is decoupled (AdamW) unless `adam_w_mode` is false."""

    betas: Betas = key((0.9, 0.999), "Decay rates of the averages of the gradient and of its square.", **_BETA)
    eps: float = key(1e-8, "Term added to the denominator for numerical stability.", minimum=0)
    amsgrad: bool = key(False, "Divide by the maximum of the average of squares (AMSGrad).")
    decoupled_weight_decay: bool = key(
        True, "Apply weight decay to the weights instead of the gradient.", aliases=("adam_w_mode", "adamw_mode")
    )
    bias_correction: bool = refused(True, "Correct the bias of the averages.", "only true is implemented; leave it out")
    torch_adam: bool = noticed(False, "Use torch's Adam instead of DeepSpeed's.", _KERNEL)
    fp32_optimizer_states: bool = noticed(
        True, "Keep optimizer states in fp32.", "onefold.state_dtype is the data type of the states"
    )
    set_grad_none: bool = noticed(True, "Free gradients instead of zeroing them.", "the engine always frees gradients")


@dataclass(frozen=True)
class AdamWParams(AdamParams):
    """AdamW. As in DeepSpeed, the default weight decay is 0."""

    decoupled_weight_decay: bool = noticed(
        True,
        "Apply weight decay to the weights instead of the gradient.",
        "AdamW always uses decoupled weight decay, as in DeepSpeed; write Adam",
        aliases=("adam_w_mode", "adamw_mode"),
    )


@dataclass(frozen=True)
class SGDParams(_TorchSwitches, _Params):
    """Stochastic gradient descent, with torch's momentum."""

    momentum: float = key(0.0, "Momentum factor. 0 disables momentum.", minimum=0, maximum=1)
    dampening: float = key(0.0, "Dampening of the momentum.")
    nesterov: bool = key(False, "Use Nesterov momentum. Requires `momentum` above 0 and `dampening` 0.")


@dataclass(frozen=True)
class AdagradParams(_TorchSwitches, _Params):
    """Adagrad, with torch's learning rate decay."""

    lr: float = key(1e-2, "Learning rate.", minimum=0)
    lr_decay: float = key(
        0.0, "Learning rate decay: the learning rate is divided by 1 + `lr_decay` x steps.", minimum=0
    )
    initial_accumulator_value: float = key(0.0, "Initial value of the sum of squares.", minimum=0)
    eps: float = key(1e-10, "Term added to the denominator for numerical stability.", minimum=0)


@dataclass(frozen=True)
class LionParams(_Params):
    """Lion: the update is the sign of an interpolated momentum. Weight decay is decoupled."""

    lr: float = key(1e-4, "Learning rate.", minimum=0)
    betas: Betas = key(
        (0.9, 0.99), "Decay rates of the momentum in the weight update and in the momentum update.", **_BETA
    )


@dataclass(frozen=True)
class MuonParams(_Params):
    """Muon for hidden matrices, and AdamW for embeddings, heads and vectors. The defaults are DeepSpeed's."""

    lr: float | None = key(  # type: ignore[assignment]
        None, "Learning rate of all parameters for which `muon_lr` or `adam_lr` is not given.", minimum=0
    )
    muon_lr: float | None = key(0.02, "Learning rate of matrices. If only `lr` is given, `lr` is used.", minimum=0)
    adam_lr: float | None = key(
        3e-4, "Learning rate of all other parameters. If only `lr` is given, `lr` is used.", minimum=0
    )
    momentum: float = key(0.95, "Momentum factor.", **_BETA)
    nesterov: bool = key(True, "Use Nesterov momentum.")
    ns_steps: int = key(5, "Number of Newton-Schulz iterations.", minimum=1, below=100)
    ns_coefficients: Coefficients = key(
        "quintic", "Coefficients of the iterations: the usual ones, those of Polar Express, or three numbers."
    )
    ns_method: Literal["standard", "gram"] = noticed(
        "standard", "Method of the iterations.", "onefold always uses the standard method; gram is a shortcut of it"
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = key(
        None, "Adjustment of the learning rate to the shape of a matrix, as in torch. The default is original."
    )
    betas: Betas = key((0.9, 0.95), "Decay rates of AdamW's averages of the gradient and of its square.", **_BETA)
    eps: float = key(1e-10, "Term added to the denominator of AdamW.", minimum=0)
    adamw_names: tuple[str, ...] = key((), "Name patterns of parameters that AdamW updates.")
    split_rows: tuple[str, ...] = key(
        (),
        "Parameters that consist of several matrices stacked by rows: `*.qkv.weight=3`, `*.kv.weight=512,512`.",
    )


@dataclass(frozen=True)
class ShampooParams(_Params):
    """Shampoo for hidden matrices, with momentum, and AdamW for all other parameters."""

    adam_lr: float | None = key(None, "Learning rate of AdamW. The default is `lr`.", minimum=0)
    momentum: float = key(0.9, "Momentum factor.", **_BETA)
    covariance_decay: float = key(0.95, "Decay rate of the covariances of rows and columns.", **_BETA)
    covariance_eps: float = key(
        1e-6, "Fraction of the largest eigenvalue below which eigenvalues are ignored.", minimum=0
    )
    root_every: int = key(10, "Number of steps between two computations of the inverse roots.", minimum=1)
    betas: Betas = key((0.9, 0.999), "Decay rates of AdamW's averages of the gradient and of its square.", **_BETA)
    eps: float = key(1e-8, "Term added to the denominator of AdamW.", minimum=0)
    adamw_names: tuple[str, ...] = key((), "Name patterns of parameters that AdamW updates.")
    split_rows: tuple[str, ...] = key((), "Parameters that consist of several matrices stacked by rows, as for Muon.")


OPTIMIZERS: dict[str, type] = {
    "adam": AdamParams,
    "adamw": AdamWParams,
    "sgd": SGDParams,
    "adagrad": AdagradParams,
    "lion": LionParams,
    "muon": MuonParams,
    "shampoo": ShampooParams,
}
"""The optimizers by lower-case name. Names are case-insensitive, as in DeepSpeed."""


_8BIT = re.compile(r"(paged_?)?(?P<plain>adamw|adam|lion)_?(bnb_?|torch_?)?8bit", re.IGNORECASE)


def plain_name(name: str) -> str:
    """Return the lower-case optimizer name in a `type`, without the suffix for 8-bit states."""
    match = _8BIT.fullmatch(name)
    return (match["plain"] if match else name).lower()


def is_8bit(name: str) -> bool:
    """Return whether a `type` is a name of bitsandbytes, torchao or transformers for an optimizer with 8-bit states."""
    return _8BIT.fullmatch(name) is not None


def is_paged(name: str) -> bool:
    """Return whether a `type` is a name of bitsandbytes for an optimizer with paged 8-bit states."""
    return is_8bit(name) and name.lower().startswith("paged")


def check_together(values: Mapping[str, Any], path: str) -> None:
    """Raise if hyperparameters of one group contradict each other. `values` contains all of them."""
    if (
        values.get("nesterov")
        and "dampening" in values
        and not (float(values["momentum"]) > 0 and float(values["dampening"]) == 0)
    ):
        raise ConfigError(
            f"{path}.nesterov = true needs {path}.momentum above 0 and {path}.dampening 0 (they are "
            f"{values['momentum']} and {values['dampening']}). Set both, or nesterov to false."
        )


@dataclass(frozen=True)
class _Schedule:
    """Parameters of every schedule."""

    last_batch_iteration: int = key(-1, "Iteration from which to resume. -1 starts a new schedule.", minimum=-1)


@dataclass(frozen=True)
class LRRangeTestParams(_Schedule):
    """Learning rate range test: an increasing learning rate, to find the largest one that trains."""

    lr_range_test_min_lr: PerGroup = key(1e-3, "Initial learning rate.", minimum=0)
    lr_range_test_step_size: int = key(2000, "Steps per interval.", minimum=1)
    lr_range_test_step_rate: float = key(
        1.0, "Increase per interval, as a multiple of the initial learning rate.", minimum=0
    )
    lr_range_test_staircase: bool = key(False, "Increase the learning rate once per interval instead of every step.")


@dataclass(frozen=True)
class OneCycleParams(_Schedule):
    """One cycle: the learning rate rises and falls while the first beta falls and rises; then both decay."""

    cycle_min_lr: PerGroup | None = key(None, "Learning rate at the start and end of the cycle. Required.", minimum=0)
    cycle_max_lr: PerGroup | None = key(None, "Maximum learning rate. Required.", minimum=0)
    decay_lr_rate: float = key(
        0.0, "After the cycle, the learning rate is divided by 1 + `decay_lr_rate` x intervals.", minimum=0
    )
    cycle_first_step_size: int = key(2000, "Steps of the increase.", minimum=1)
    cycle_second_step_size: int | None = key(
        None, "Steps of the decrease. The default is `cycle_first_step_size`.", minimum=0
    )
    cycle_first_stair_count: int = key(0, "Stairs in the increase. 0: linear.", minimum=0)
    cycle_second_stair_count: int | None = key(
        None, "Stairs in the decrease. The default is `cycle_first_stair_count`.", minimum=0
    )
    decay_step_size: int = key(0, "Steps per decay interval. 0: no decay.", minimum=0)
    cycle_momentum: bool = key(True, "Cycle the first beta in the opposite direction.")
    cycle_min_mom: PerGroup = key(0.8, "First beta at the maximum learning rate.", **_BETA)
    cycle_max_mom: PerGroup = key(0.9, "First beta at the start and end of the cycle.", **_BETA)
    decay_mom_rate: float = key(
        0.0, "After the cycle, the first beta is multiplied by 1 + `decay_mom_rate` x intervals.", minimum=0
    )


@dataclass(frozen=True)
class WarmupLRParams(_Schedule):
    """Warmup, followed by a constant learning rate."""

    warmup_min_lr: PerGroup = key(0.0, "Initial learning rate.", minimum=0)
    warmup_max_lr: PerGroup | None = key(
        None, "Learning rate after the warmup. The default is the learning rate of each group.", minimum=0
    )
    warmup_num_steps: int = key(1000, "Steps of the warmup. 0 and 1 count as 2.", minimum=0)
    warmup_type: Literal["log", "linear"] = key("log", "Shape of the warmup.")


@dataclass(frozen=True)
class WarmupDecayLRParams(WarmupLRParams):
    """Warmup, followed by linear decay."""

    warmup_max_lr: PerGroup | None = key(0.001, "Learning rate after the warmup.", minimum=0)
    total_num_steps: int | None = key(None, "Step at which the decay ends. Required.", minimum=1)


@dataclass(frozen=True)
class WarmupCosineLRParams(_Schedule):
    """Warmup, followed by cosine decay. Ratios refer to the learning rate of each group."""

    total_num_steps: int | None = key(None, "Step at which the decay ends. Required.", minimum=1)
    warmup_min_ratio: float = key(0.0, "Initial ratio.", minimum=0)
    warmup_num_steps: int = key(1000, "Steps of the warmup. 0 and 1 count as 2.", minimum=0)
    cos_min_ratio: float = key(1e-4, "Final ratio.", minimum=0)
    warmup_type: Literal["log", "linear"] = key("log", "Shape of the warmup.")


SCHEDULES: dict[str, type] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}


def params_of(section: str, name: str) -> type | None:
    """Return the section class of `optimizer.params` or `scheduler.params` for a `type`, or None for torch classes."""
    return OPTIMIZERS.get(plain_name(name)) if section == "optimizer" else SCHEDULES.get(name)
