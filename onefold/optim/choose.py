"""The choice of the optimizer: from the user's instances, from a callable, or from the section of the config.

`choose` returns the groups and their rules, and `fit_to_plan` checks that the plan can run them. Instances are read in
`from_instance.py`, and the groups of Muon and Shampoo are divided in `matrix_groups.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onefold.errors import ConfigError
from onefold.optim.chosen import (
    NOT_ELEMENTWISE,
    ONE_STEP_SIZE,
    RULES,
    ChosenOptimizer,
    Groups,
    check_supported,
    rule_of_group,
)
from onefold.optim.from_instance import from_instance, from_several
from onefold.optim.instance import InstanceRule
from onefold.optim.matrix_groups import divide_groups
from onefold.optim.matrix_rules import MatrixRule
from onefold.plan import HYPERPARAMETERS, OptimizerSpec, Plan, StateFormats, Tier, check_names

Optimizers = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | Sequence[torch.optim.Optimizer] | None
"""The types that `initialize` accepts as `optimizer`."""


def choose(
    optimizer: Optimizers, spec: OptimizerSpec | None, parameters: Iterable[Any], model: nn.Module | None = None
) -> ChosenOptimizer | None:
    """Return the optimizer that the user means, or None if there is none, for an engine that only evaluates.

    `spec` is the optimizer of the config. It is used if `optimizer` is None. `model` provides the names of parameters.
    """
    if optimizer is None:
        return _from_config(spec, _as_groups(parameters), model) if spec is not None else None
    if isinstance(optimizer, list | tuple):
        return from_several(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise TypeError(f"optimizer must be a torch optimizer or a callable, not {type(optimizer).__name__}")
        optimizer = optimizer(list(parameters))
    return from_instance(optimizer)


# -- the optimizer of the config ---------------------------------------------------------------------------------------


def _from_config(spec: OptimizerSpec, groups: Groups, model: nn.Module | None) -> ChosenOptimizer:
    check_supported(spec.type)
    if spec.rule is None:
        return _of_torch_class(spec, groups)
    rule = RULES[spec.rule]
    if isinstance(rule, MatrixRule):
        found, splits = divide_groups(rule, spec, groups, model)
        return ChosenOptimizer(spec.type, found, tuple(rule_of_group(rule, group) for group in found), None, splits)
    hyper, found = HYPERPARAMETERS[spec.rule], []
    for index, group in enumerate(groups):
        path = f"model_parameters[{index}]"
        check_names(group, hyper.names, path, spec.rule)
        found.append(hyper.complete(group, spec.params, path))
    return ChosenOptimizer(spec.type, found, (rule,) * len(found), None, is_paged=spec.is_paged)


def _of_torch_class(spec: OptimizerSpec, groups: Groups) -> ChosenOptimizer:
    """Build an instance of the class of torch.optim that the config names."""
    classes: dict[str, Any] = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = classes.get(spec.type.lower())
    if kind is None:
        reason = NOT_ELEMENTWISE.get(spec.type.lower())
        raise spec.unknown_type(sorted({*RULES, *classes}), f" ({reason})" if reason else "")
    arguments = spec.read_arguments(kind)
    for index, group in enumerate(groups):
        given = {key: value for key, value in group.items() if key != "params"}
        check_names(given, list(inspect.signature(kind).parameters), f"model_parameters[{index}]", kind.__name__)
    # A failed attempt may have written to its groups.
    instance = spec.build(kind, lambda values: kind([dict(group) for group in groups], **values), arguments)
    return ChosenOptimizer(kind.__name__, instance.param_groups, (), instance)


def _as_groups(parameters: Iterable[Any]) -> Groups:
    items = list(parameters)
    if items and all(isinstance(item, dict) for item in items):
        return [{**item, "params": _only_parameters(item["params"])} for item in items]
    return [{"params": _only_parameters(items)}]


def _only_parameters(items: Any) -> list[nn.Parameter]:
    each: Any = [items] if isinstance(items, torch.Tensor) else items
    # Some versions of Hugging Face libraries pass (name, parameter) pairs.
    plain = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in each]
    for item in plain:
        if not isinstance(item, torch.Tensor):
            raise TypeError(f"model_parameters must contain parameters or parameter groups, not {type(item).__name__}")
    return plain


# -- whether the plan can run it ---------------------------------------------------------------------------------------


def fit_to_plan(chosen: ChosenOptimizer, plan: Plan) -> ChosenOptimizer:
    """Return the optimizer as the plan runs it. Raise if the plan cannot run it."""
    check_formats(chosen, plan.formats)
    if plan.shards_states and plan.num_shards > 1:
        check_shardable(chosen, allow_untested=plan.allows_untested_optimizer)
    if plan.delays_host and chosen.has_matrices:
        raise ConfigError(
            f"onefold.delayed_host_step: optimizer {chosen.name} computes whole matrices on the device between two "
            "passes of the host, and cannot be delayed. Set the key to false."
        )
    return for_disk(chosen) if plan.states.tier is Tier.NVME else chosen


def check_formats(chosen: ChosenOptimizer, formats: StateFormats) -> None:
    """Raise if states are to be quantized but a user-defined class creates and steps them."""
    if chosen.runs_user_class and not formats.are_plain:
        raise ConfigError(
            f"onefold.state_dtype = {formats.states}, onefold.master_dtype = {formats.masters}: optimizer "
            f"{chosen.name} steps by its own class, which creates its states itself. Leave these keys out, or use an "
            "optimizer of onefold: Adam, AdamW, SGD, Adagrad, Lion, Muon or Shampoo."
        )


def check_shardable(chosen: ChosenOptimizer, *, allow_untested: bool) -> None:
    """Raise if the optimizer cannot run on shards of parameters. `allow_untested` accepts unknown classes."""
    reason = NOT_ELEMENTWISE.get(chosen.name.lower()) if not chosen.rules else None
    # Prodigy and D-Adaptation can all-reduce the sums that they compute from a shard.
    if reason is ONE_STEP_SIZE and all(group.get("fsdp_in_use") is True for group in chosen.groups):
        return
    if reason:
        or_reduce = " or let it reduce its sums over ranks (fsdp_in_use=True)," if reason is ONE_STEP_SIZE else ""
        raise ConfigError(
            f"optimizer {chosen.name} cannot run where optimizer states are sharded: it {reason}, but a rank stores "
            f"only a shard. Use zero_optimization.stage 0,{or_reduce} or an elementwise optimizer such as AdamW, or "
            "Muon or Shampoo in the config, or define a rule for its class (onefold_rule, docs/optimizers.md)."
        )
    if not chosen.elementwise and not allow_untested:
        raise ConfigError(
            f"optimizer {type(chosen.instance).__module__}.{chosen.name} is unknown, and optimizer states are "
            'sharded. If it is elementwise, set "zero_allow_untested_optimizer": true, so that it steps flat fp32 '
            "shards. If it needs whole matrices, define a rule for its class (onefold_rule, docs/optimizers.md)."
        )


def for_disk(chosen: ChosenOptimizer) -> ChosenOptimizer:
    """Return the optimizer in a form that steps tile by tile, so that its states need not fit in memory."""
    if chosen.rules:
        return chosen
    assert chosen.instance is not None
    if not chosen.elementwise:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device = nvme: optimizer {chosen.name} steps all of its states "
            "at once, so they must fit in memory. If it is elementwise, declare it in its class (elementwise = True). "
            "Otherwise offload to cpu."
        )
    return replace(chosen, rules=(InstanceRule(chosen.instance),) * len(chosen.groups))
