"""The rules and groups of optimizers that the user passes to `initialize`.

A class that onefold knows is replaced by a rule, which reads the groups of the instance: torch's Adam, AdamW, SGD,
Adagrad and Muon, the 8-bit classes of bitsandbytes and torchao, and classes that name a rule (`onefold_rule`). An
instance of any other class computes its steps itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onefold.errors import ConfigError
from onefold.optim.chosen import RULES, ChosenOptimizer, LowBitClass, check_supported, name_of_rule, rule_of_group
from onefold.optim.instance import FORWARD_MARK
from onefold.optim.matrix_groups import DIVISION_KEYS, NORM_EPS
from onefold.optim.matrix_rules import AnyRule, MatrixRule, MuonRule, ShampooRule
from onefold.optim.rules import AdamRule
from onefold.plan import HYPERPARAMETERS
from onefold.plan.state_formats import BLOCK

_TORCH_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Muon)
# The hyperparameters of groups that AdamW steps, next to groups that a matrix rule steps.
_ADAMW_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True}


def from_instance(optimizer: torch.optim.Optimizer) -> ChosenOptimizer:
    """Return the rules and groups of one optimizer."""
    kind = type(optimizer)
    name = kind.__name__
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ValueError(
            f"optimizer {name} already has states: it has stepped, or its constructor creates them. Pass it to "
            "initialize before its first step, because the engine steps master weights, which have other states."
        )
    check_supported(name)
    low_bits = low_bit_class(optimizer)
    is_known = kind in _TORCH_CLASSES
    # A class may name the rule that computes its step. Subclasses may override the step, so they do not inherit it.
    declared: str | MatrixRule | None = name.lower() if is_known else vars(kind).get("onefold_rule")
    declared = low_bits.rule if low_bits is not None else declared
    declared = declared.name if type(declared) in (MuonRule, ShampooRule) else declared  # type: ignore[union-attr]
    _check_user_class(optimizer, has_rule=declared is not None)
    if declared is None:
        return ChosenOptimizer(name, optimizer.param_groups, (), optimizer)
    rule = declared if isinstance(declared, MatrixRule) else RULES[declared]
    rules = tuple(rule_of_group(rule, group) for group in optimizer.param_groups)
    for index, (group, group_rule) in enumerate(zip(optimizer.param_groups, rules, strict=True)):
        path = f"optimizer.param_groups[{index}]"
        for key, value in _missing(rule, group_rule, is_known=is_known).items():
            group.setdefault(key, value)
        if isinstance(group_rule, AdamRule):
            is_adamw = group_rule is not rule or kind is torch.optim.AdamW or _is_adamw(optimizer, low_bits)
            group.setdefault("decoupled_weight_decay", is_adamw)
        if is_known and group_rule is rule:
            _check_read(name, group, set(optimizer.defaults), path)
        # torch checks the arguments of its constructor, but not the values in a group.
        if (known := name_of_rule(group_rule)) is not None:
            HYPERPARAMETERS[known].complete(group, {}, path)
    paged = low_bits is not None and low_bits.is_paged
    return ChosenOptimizer(name, optimizer.param_groups, rules, optimizer, low_bits=low_bits, is_paged=paged)


def from_several(optimizers: Sequence[torch.optim.Optimizer]) -> ChosenOptimizer:
    """Combine several optimizers of one model into one with all of their groups, each stepped by its rule."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: a list must contain torch optimizers, not {type(optimizer).__name__}")
    chosen = [from_instance(optimizer) for optimizer in optimizers]
    if any(each.low_bits is not None for each in chosen):
        raise ConfigError(
            "optimizer: a list contains one of bitsandbytes or torchao. Pass torch.optim.AdamW instead, and set "
            "onefold.state_dtype to int8 in the config."
        )
    without_rule = [each.name for each in chosen if not each.rules]
    if without_rule or not chosen:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ConfigError(
            f"optimizer: a list ({names}) cannot "
            f"{'contain ' + ', '.join(without_rule) if without_rule else 'be empty'}. Use optimizers that onefold "
            "implements: torch's Adam, AdamW, SGD, Adagrad and Muon, and classes with an onefold_rule."
        )
    groups = [group for each in chosen for group in each.groups]
    rules = tuple(rule for each in chosen for rule in each.rules)
    return ChosenOptimizer("+".join(each.name for each in chosen), groups, rules, None, combined=tuple(optimizers))


def _has_stepped(state: Mapping[str, Any]) -> bool:
    # Adagrad creates its states in the constructor, with a step of 0.
    return float(state["step"]) > 0 if "step" in state else bool(state)


def _check_user_class(optimizer: torch.optim.Optimizer, *, has_rule: bool) -> None:
    """Raise if an engine step would bypass a patched `step`, a closure or states that the constructor created."""
    name, patched = type(optimizer).__name__, vars(optimizer).get("step")
    if patched is not None and not any(hasattr(patched, mark) for mark in ("_wrapped_by_lr_sched", FORWARD_MARK)):
        raise ConfigError(
            f"optimizer {name} has another `step` on the instance, which the engine would not call. Pass the optimizer "
            "without it, or override step in a subclass."
        )
    if has_rule:
        return
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer {name} is not supported: its step requires a closure. Use another optimizer.")
    if any(optimizer.state.values()):
        raise ConfigError(
            f"optimizer {name} is not supported: its constructor creates states of unsharded parameters, but the "
            "engine steps master weights. Create them in its first step."
        )


def _missing(rule: AnyRule, group_rule: AnyRule, *, is_known: bool) -> dict[str, Any]:
    """Return defaults of the hyperparameters that the group's rule reads, and its optimizer class may not set."""
    if group_rule is not rule:
        return _ADAMW_DEFAULTS
    if is_known or not isinstance(rule, MuonRule | ShampooRule):
        return {}
    found = HYPERPARAMETERS[rule.name].defaults | {"eps": NORM_EPS}
    return {key: value for key, value in found.items() if key not in DIVISION_KEYS}


def _check_read(optimizer: str, group: Mapping[str, Any], known: set[str], path: str) -> None:
    """Raise if a group of torch's class has a key of our config that torch's class does not read."""
    flags = {f"use_{name}" for name in RULES}
    for key in group.keys() - known - flags - {"params", "decoupled_weight_decay"}:
        if key in HYPERPARAMETERS[optimizer.lower()].names:
            raise ConfigError(f"{path}.{key}: torch.optim.{optimizer} does not use it. Leave it out of the group.")


def _is_adamw(optimizer: torch.optim.Optimizer, low_bits: LowBitClass | None) -> bool:
    """Return whether a low-bit Adam has decoupled weight decay: always in bitsandbytes, by attribute in torchao."""
    return low_bits is not None and bool(getattr(optimizer, "is_adamw", True))


# -- low-bit classes of bitsandbytes and torchao -----------------------------------------------------------------------

_MODULES = ("bitsandbytes.optim.", "torchao.optim.", "torchao.prototype.low_bit_optim.")
_INSTEAD = "Use AdamW with onefold.state_dtype int8 in the config, or pass AdamW8bit."


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
            f"optimizer {kind.__name__}: block_size = {size} is not supported. Leave it out: blocks have {BLOCK}."
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
