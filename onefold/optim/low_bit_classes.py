"""Low-bit optimizer classes of bitsandbytes and torchao, which are replaced by a rule with our 8-bit state format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.config import ConfigError
from onefold.plan.state_formats import BLOCK

_MODULES = ("bitsandbytes.optim.", "torchao.optim.", "torchao.prototype.low_bit_optim.")
_INSTEAD = "Use the optimizer of the config (AdamW with onefold.state_dtype int8), or pass AdamW8bit."


@dataclass(frozen=True)
class LowBitClass:
    """The settings of a low-bit optimizer instance: its update rule and its state format."""

    rule: str
    is_8bit: bool
    min_numel: int
    is_paged: bool = False
    """Whether states may be moved to the host if they do not fit on the device."""
    fp32_parameters: tuple[nn.Parameter, ...] = ()
    """The parameters whose states stay in fp32."""


def low_bit_class(optimizer: torch.optim.Optimizer) -> LowBitClass | None:
    """Return the settings of an instance of bitsandbytes or torchao, or None for other classes."""
    kind = type(optimizer)
    module = f"{kind.__module__}."
    if not module.startswith(_MODULES):
        return None
    name = kind.__name__.lower()
    rule = name.removeprefix("paged").removesuffix("8bit").removesuffix("32bit")
    if rule not in ("adam", "adamw", "lion"):
        raise ConfigError(
            f"optimizer {kind.__module__}.{kind.__name__}: only its Adam, AdamW and Lion are supported. {_INSTEAD}"
        )
    if module.startswith("bitsandbytes"):
        return _of_bitsandbytes(optimizer, rule)
    if not name.endswith("8bit"):
        raise ConfigError(f"optimizer {kind.__module__}.{kind.__name__}: only 8 and 32 bits are supported. {_INSTEAD}")
    if getattr(optimizer, "bf16_stochastic_round", False):
        raise ConfigError(
            f"optimizer {kind.__name__}: bf16_stochastic_round is not supported. Set onefold.master_dtype to bf16."
        )
    if (size := getattr(optimizer, "block_size", BLOCK)) != BLOCK:
        raise ConfigError(
            f"optimizer {kind.__name__}: block_size = {size} is not supported, only {BLOCK}. Leave it out."
        )
    return LowBitClass(rule, True, 4096)


def _of_bitsandbytes(optimizer: Any, rule: str) -> LowBitClass:
    """Read the constructor arguments, and the per-parameter overrides of bitsandbytes' manager (transformers)."""
    arguments, manager = optimizer.args, optimizer.mng
    for name, default in (("max_unorm", 0), ("skip_zeros", False), ("percentile_clipping", 100), ("block_wise", True)):
        if getattr(arguments, name, default) != default:
            raise ConfigError(f"optimizer {type(optimizer).__name__}: {name} is not supported. Leave it out.")
    parameters = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    overrides = {id(getattr(module, name)): values for module, name, values in manager.module_weight_config_triple}
    overrides |= manager.pid2config
    in_fp32 = []
    for key in overrides.keys() & parameters.keys():
        if overrides[key] != {"optim_bits": 32}:
            raise ConfigError(
                f"optimizer {type(optimizer).__name__}: bitsandbytes' manager overrides {overrides[key]} for a "
                "parameter, but only optim_bits = 32 is supported. Use parameter groups for other rates."
            )
        in_fp32.append(parameters[key])
    is_8bit = arguments.optim_bits == 8
    return LowBitClass(rule, is_8bit, arguments.min_8bit_size, bool(optimizer.is_paged), tuple(in_fp32))
