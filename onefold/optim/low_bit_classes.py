"""Optimizers of bitsandbytes and torchao with states of 8 bits: the same update here, in our form of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.config import ConfigError
from onefold.plan.state_formats import BLOCK

_HOMES = ("bitsandbytes.optim.", "torchao.optim.", "torchao.prototype.low_bit_optim.")
_INSTEAD = "Leave the optimizer to the config (AdamW with onefold.state_dtype int8), or hand in AdamW8bit"


@dataclass(frozen=True)
class LowBitClass:
    """What an instance asks for: the rule that does its update, and how its states are held."""

    rule: str
    is_8bit: bool
    min_numel: int
    is_paged: bool = False
    """States may be moved to the host when the device is full."""
    fp32_parameters: tuple[nn.Parameter, ...] = ()
    """Whose states are to stay in fp32."""


def low_bit_class(optimizer: torch.optim.Optimizer) -> LowBitClass | None:
    """None for a class of anybody else."""
    kind = type(optimizer)
    home = f"{kind.__module__}."
    if not home.startswith(_HOMES):
        return None
    name = kind.__name__.lower()
    rule = name.removeprefix("paged").removesuffix("8bit").removesuffix("32bit")
    if rule not in ("adam", "adamw", "lion"):
        raise ConfigError(
            f"optimizer {kind.__module__}.{kind.__name__}: only its Adam, AdamW and Lion are taken. {_INSTEAD}"
        )
    if home.startswith("bitsandbytes"):
        return _of_bitsandbytes(optimizer, rule)
    if not name.endswith("8bit"):
        raise ConfigError(f"optimizer {kind.__module__}.{kind.__name__}: states have 8 or 32 bits here. {_INSTEAD}")
    if getattr(optimizer, "bf16_stochastic_round", False):
        raise ConfigError(
            f"optimizer {kind.__name__}: bf16_stochastic_round is onefold.master_dtype bf16 here; leave it out"
        )
    if (size := getattr(optimizer, "block_size", BLOCK)) != BLOCK:
        raise ConfigError(
            f"optimizer {kind.__name__}: block_size = {size}; blocks have {BLOCK} values here, leave it out"
        )
    return LowBitClass(rule, True, 4096)


def _of_bitsandbytes(optimizer: Any, rule: str) -> LowBitClass:
    """What its constructor was given, and the exceptions that its manager was told of, as transformers does."""
    given, manager = optimizer.args, optimizer.mng
    for name, default in (("max_unorm", 0), ("skip_zeros", False), ("percentile_clipping", 100), ("block_wise", True)):
        if getattr(given, name, default) != default:
            raise ConfigError(f"optimizer {type(optimizer).__name__}: {name} is not offered; leave it out")
    parameters = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    changed = {id(getattr(module, name)): values for module, name, values in manager.module_weight_config_triple}
    changed |= manager.pid2config
    in_fp32 = []
    for key in changed.keys() & parameters.keys():
        if changed[key] != {"optim_bits": 32}:
            raise ConfigError(
                f"optimizer {type(optimizer).__name__}: bitsandbytes' manager was told {changed[key]} of a parameter; "
                "only optim_bits = 32 is offered. Use parameter groups for other rates"
            )
        in_fp32.append(parameters[key])
    return LowBitClass(rule, given.optim_bits == 8, given.min_8bit_size, bool(optimizer.is_paged), tuple(in_fp32))
