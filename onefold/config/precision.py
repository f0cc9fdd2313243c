"""Sections for the data types of weights, gradients, buffers and autocast."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule requires.

from dataclasses import dataclass
from functools import partial
from typing import Literal

from onefold.config.keys import Dtype, key, noticed, refused

_if_enabled = partial(key, switch="enabled")
_MASTERS = "small updates of fp16 weights are lost without fp32 master weights; leave it out, or compute in bf16"


@dataclass(frozen=True)
class Fp16:
    """Computation in fp16 with fp32 master weights and a loss scale."""

    enabled: bool = key(False, "Compute in fp16 with fp32 master weights.")
    auto_cast: bool = _if_enabled(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: float = _if_enabled(0.0, "Fixed loss scale. 0 selects dynamic loss scaling.", minimum=0)
    initial_scale_power: int = _if_enabled(16, "Initial dynamic loss scale, as a power of 2.", minimum=0)
    loss_scale_window: int = _if_enabled(
        1000, "Steps without overflow after which the dynamic loss scale doubles.", minimum=1
    )
    hysteresis: int = _if_enabled(2, "Overflows that are tolerated before the loss scale is halved.", minimum=1)
    consecutive_hysteresis: bool = _if_enabled(False, "Reset the hysteresis count after each step without overflow.")
    min_loss_scale: float = _if_enabled(
        1.0, "Lower limit of the dynamic loss scale. An overflow at this scale raises an error.", minimum=0
    )
    fp16_master_weights_and_grads: bool = refused(False, "Keep master weights and gradients in fp16.", _MASTERS)


@dataclass(frozen=True)
class Bf16:
    """Computation in bf16 with fp32 master weights."""

    enabled: bool = key(False, "Compute in bf16 with fp32 master weights.")
    check_grad_overflow: bool = _if_enabled(True, "Skip the step on all ranks if a gradient is infinite or NaN.")
    immediate_grad_update: bool = noticed(
        False,
        "Accumulate each gradient as soon as it is computed.",
        "gradients are always accumulated in place as soon as they are computed",
    )
    bf16_master_weights_and_grads: bool = _if_enabled(
        False,
        "Keep no master weights: update the bf16 weights with stochastic rounding, and accumulate gradients in bf16.",
    )
    bf16_optimizer_states: bool = _if_enabled(
        False, "Keep optimizer states in bf16, with stochastic rounding at every step."
    )
    loss_scale: float | None = noticed(None, "Loss scale.", "bf16 has the range of fp32 and needs no loss scale")


@dataclass(frozen=True)
class Fp8:
    """Matrix products of linear layers in FP8 with dynamic scales. Weights and master weights keep their data types."""

    enabled: bool = key(False, "Multiply in FP8 in the `nn.Linear` layers of the model.")
    recipe: Literal["tensorwise", "rowwise"] = _if_enabled(
        "tensorwise", "One scale for each tensor, or one for each row. Rows are more precise and slower."
    )
    skip: tuple[str, ...] = _if_enabled(
        (),
        "Name patterns of layers, or of modules with layers, that multiply in the data type of the model. `*` matches "
        "any characters. Output heads, routers, and layers whose sizes are no multiples of 16 always do.",
        or_one=True,
    )
    all_gather: bool | None = _if_enabled(
        None,
        "Stage 3: all-gather the weights of these layers in FP8. By default, they are if the recipe is tensorwise and "
        "shards are on the device.",
        from_stage=3,
    )
    emulate: bool = _if_enabled(
        False, "Round to FP8 and multiply in fp32, for devices without FP8 products. This is slow and meant for tests."
    )


@dataclass(frozen=True)
class TorchAutocast:
    """Mixed precision by `torch.autocast`. Parameters are fp32, or in the format that `bf16` or `fp16` selects."""

    enabled: bool = key(False, "Run forward under `torch.autocast`.")
    dtype: Dtype | None = _if_enabled(
        None, "Autocast format, bf16 or fp16. The default is the 16-bit format of the parameters, otherwise bf16."
    )
    lower_precision_safe_modules: tuple[str, ...] = _if_enabled(
        ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        "Module classes whose gradients may be communicated in the lower precision.",
        notice="gradients of all classes are reduced in the parameters' format, or in communication_data_type",
    )


@dataclass(frozen=True)
class DataTypes:
    """Data types of gradients, parameters and buffers."""

    grad_accum_dtype: Dtype | None = key(None, "Data type in which gradients are accumulated. The default is fp32.")
    param_dtype: Dtype | None = key(None, "Compute format. It must agree with the enabled section, `bf16` or `fp16`.")
    buffer_dtype: Dtype | None = key(
        None,
        "Data type to which floating-point buffers are cast. By default, buffers of torch.nn layers (batch norm, "
        "spectral norm) are cast to the parameters' format, and other buffers are not cast.",
    )
    keep_in_fp32_modules: tuple[str, ...] = key(
        (),
        "Name patterns of buffers that stay fp32 under bf16 and fp16. `*` matches any characters, and a pattern may "
        "match any part of a name. By default, buffers of the model keep their data type.",
        or_one=True,
    )
