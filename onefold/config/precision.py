"""The sections that choose number formats."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule wants.

from dataclasses import dataclass
from typing import Literal

from onefold.config.keys import key

Dtype = Literal["fp32", "bf16", "fp16"]

_MASTERS = "masters are always fp32; leave it out"


@dataclass(frozen=True)
class Fp16:
    """Compute in fp16 with fp32 masters and a loss scale."""

    enabled: bool = key(False, "Compute in fp16 with fp32 masters.")
    auto_cast: bool = key(False, "Cast floating-point inputs of the model to fp16.", switch="enabled")
    loss_scale: float = key(0.0, "A fixed loss scale; 0: dynamic.", switch="enabled", minimum=0)
    initial_scale_power: int = key(16, "The dynamic scale starts at two to this power.", switch="enabled", minimum=0)
    loss_scale_window: int = key(
        1000, "Steps without overflow after which the dynamic scale doubles.", switch="enabled", minimum=1
    )
    hysteresis: int = key(2, "Overflows that are forgiven before the scale halves.", switch="enabled", minimum=1)
    consecutive_hysteresis: bool = key(False, "A step without overflow forgives all earlier ones.", switch="enabled")
    min_loss_scale: float = key(
        1.0, "The dynamic scale never goes below; overflow there raises.", switch="enabled", minimum=0
    )
    fp16_master_weights_and_grads: bool = key(False, "Keep masters and gradients in fp16.", refused=_MASTERS)


@dataclass(frozen=True)
class Bf16:
    """Compute in bf16 with fp32 masters."""

    enabled: bool = key(False, "Compute in bf16 with fp32 masters.")
    check_grad_overflow: bool = key(
        True, "Skip the step, on all ranks alike, when a gradient is not finite.", switch="enabled"
    )
    immediate_grad_update: bool = key(
        False, "Accumulate as each gradient lands.", notice="gradients always accumulate in place as they land"
    )
    bf16_master_weights_and_grads: bool = key(False, "Keep masters and gradients in bf16.", refused=_MASTERS)
    bf16_optimizer_states: bool = key(
        False, "Keep optimizer states in bf16.", refused="states are always fp32; leave it out"
    )
    loss_scale: float | None = key(
        None, "Seen in the wild.", notice="bf16 has the range of fp32 and needs no loss scale"
    )


@dataclass(frozen=True)
class TorchAutocast:
    """Parameters stay fp32, `torch.autocast` picks the format of each operation."""

    enabled: bool = key(False, "Run forward under `torch.autocast`.")
    dtype: Dtype | None = key(None, "The lower precision, bf16 or fp16; bf16 when left out.", switch="enabled")
    lower_precision_safe_modules: tuple[str, ...] = key(
        ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        "Classes whose gradients may travel in the lower precision.",
        notice="gradients travel in the parameters' format, or in communication_data_type, whatever the class",
        switch="enabled",
    )


@dataclass(frozen=True)
class DataTypes:
    """Number formats beside the compute format."""

    grad_accum_dtype: Dtype | None = key(None, "Gradients accumulate in it; fp32 when left out.")
    param_dtype: Dtype | None = key(None, "The compute format; must agree with the enabled section.")
    buffer_dtype: Dtype | None = key(
        None,
        "Cast floating-point buffers to it; left out: buffers of torch.nn layers (batch norms, spectral norms) "
        "follow the parameters, others are kept as they are.",
    )
