"""The choice of the optimizer: from the config's name and params, from an instance, or from a callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from onefold.config import ConfigError
from onefold.config.keys import entries, spellings
from onefold.config.params import OPTIMIZERS, check_together, is_paged, plain_name
from onefold.config.read import meant_key
from onefold.optim.group_values import Check, check_names, check_of_class, check_of_kind, check_of_rate, read_group
from onefold.optim.instance import FORWARD_MARK, InstanceRule, is_torchs
from onefold.optim.low_bit_classes import LowBitClass, low_bit_class
from onefold.optim.matrix_groups import GroupsOfMatrices
from onefold.optim.matrix_rules import AnyRule, MatrixRule, MuonRule, ShampooRule, names_of_states
from onefold.optim.rules import AdagradRule, AdamRule, LionRule, SGDRule
from onefold.optim.signature import build, read_arguments
from onefold.plan import StateFormats, StateSpec
from onefold.plan.matrices import Splits

Groups = list[dict[str, Any]]
Optimizers = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | Sequence[torch.optim.Optimizer] | None
"""The types that `initialize` accepts as `optimizer`."""

RULES: dict[str, AnyRule] = {
    "adam": AdamRule(),
    "adamw": AdamRule(),
    "sgd": SGDRule(),
    "adagrad": AdagradRule(),
    "lion": LionRule(),
    "muon": MuonRule(),
    "shampoo": ShampooRule(),
}

_ONE_NUMBER = "computes one step size from all parameters"
_ADAPTIVE = ("prodigy", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "dog")
NOT_ELEMENTWISE = {
    **dict.fromkeys(("lamb", "fusedlamb", "onebitlamb", "lars"), "scales each parameter by its norm"),
    "muon": "orthogonalises whole matrices",
    "adafactor": "keeps row and column sums of whole matrices",
    **dict.fromkeys(("shampoo", "soap"), "preconditions whole matrices"),
    **dict.fromkeys(_ADAPTIVE, _ONE_NUMBER),
    "ldog": "computes a step size from each parameter",
}
NOWHERE = {
    "lbfgs": "evaluates the loss several times per step, which the engine cannot do",
    "sparseadam": "needs sparse gradients, but onefold stores gradients densely",
    **dict.fromkeys(("onebitadam", "zerooneadam"), "compresses communication by itself, but ZeRO replaces it"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "needs the `mup` package; pass an instance instead"),
}


@dataclass(frozen=True)
class Chosen:
    """The chosen optimizer: its groups, and a rule for each (stepped by unit) or an instance (stepped all at once)."""

    name: str
    groups: Groups
    rules: tuple[AnyRule, ...]
    """The update rule of each group. Empty if the instance is stepped over all shards at once."""
    instance: torch.optim.Optimizer | None
    splits: Splits = field(default_factory=dict)
    """The number of matrices, or the rows of each, of parameters that consist of several, by name pattern."""
    combined: tuple[torch.optim.Optimizer, ...] = ()
    """The optimizers of a list that the user passed. Their rules step them together."""
    low_bits: LowBitClass | None = None
    """The state format that the class of the user's instance implies, for classes of bitsandbytes and torchao."""
    is_paged: bool = False

    @property
    def instances(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that the user passed."""
        return self.combined or ((self.instance,) if self.instance is not None else ())

    @property
    def elementwise(self) -> bool:
        """Whether the optimizer is known to be elementwise. User-defined classes declare it by `elementwise = True`."""
        # ScheduleFree's classes store counters in their groups, but are elementwise.
        known = is_torchs(self.instance) or type(self.instance).__module__.startswith("schedulefree.")
        listed = known and self.name.lower() not in NOT_ELEMENTWISE
        return bool(self.rules) or listed or getattr(self.instance, "elementwise", False) is True

    @property
    def is_stepped(self) -> bool:
        """Whether the class of the instance computes the step, at once or tile by tile, and not one of our rules."""
        return self.instance is not None and all(isinstance(rule, InstanceRule) for rule in self.rules)

    @property
    def has_matrices(self) -> bool:
        """Whether a group is stepped as whole matrices."""
        return any(isinstance(rule, MatrixRule) for rule in self.rules)

    def states_of_groups(self) -> list[StateSpec]:
        """Return the optimizer states of each group."""
        if not self.rules:
            return [StateSpec(by_own_class=True)] * len(self.groups)
        names = names_of_states(self.rules, self.groups)
        return [
            StateSpec(each, isinstance(rule, MatrixRule), isinstance(rule, InstanceRule))
            for each, rule in zip(names, self.rules, strict=True)
        ]

    def checks_of_groups(self) -> list[Check | None]:
        """Return the check for values that are written to each group, or None if only the user's class can check."""
        if self.is_stepped:
            return [check_of_class(self.instance)] * len(self.groups)
        kinds = {id(rule): OPTIMIZERS[name] for name, rule in RULES.items()}
        return [check_of_kind(kinds[id(rule)]) if id(rule) in kinds else check_of_rate for rule in self.rules]

    def group_of_each(self) -> dict[int, int]:
        """Return the group index of each parameter, by its id. Raise if a parameter is in two groups."""
        groups: dict[int, int] = {}
        for index, group in enumerate(self.groups):
            for parameter in group["params"]:
                if groups.setdefault(id(parameter), index) != index:
                    raise ValueError(f"a parameter is in optimizer groups {groups[id(parameter)]} and {index}")
        return groups


def choose(
    optimizer: Optimizers,
    section: Any,
    parameters: Iterable[Any],
    model: nn.Module | None = None,
) -> Chosen | None:
    """Return the optimizer that the user means, or None if there is none, for an engine that only evaluates.

    `model` provides the names of parameters.
    """
    if isinstance(optimizer, list | tuple):
        return _of_several(optimizer)
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            if not callable(optimizer):
                raise TypeError(f"optimizer must be a torch optimizer or a callable, not {type(optimizer).__name__}")
            optimizer = optimizer(list(parameters))
        return _of_instance(optimizer)
    if section is None:
        return None
    return _of_name(section.type, dict(section.params), _as_groups(parameters), model)


def check_shardable(chosen: Chosen, *, allow_untested: bool) -> None:
    """Raise if the optimizer cannot run on shards of parameters. `allow_untested` accepts unknown classes."""
    reason = NOT_ELEMENTWISE.get(chosen.name.lower()) if not chosen.rules else None
    # Prodigy and D-Adaptation can all-reduce the sums that they compute from a shard.
    if reason is _ONE_NUMBER and all(group.get("fsdp_in_use") is True for group in chosen.groups):
        return
    if reason:
        or_reduce = " or let it reduce over ranks itself (fsdp_in_use=True)," if reason is _ONE_NUMBER else ""
        raise ConfigError(
            f"optimizer {chosen.name} cannot run with sharded optimizer states: it {reason}, but a rank has only a "
            f"slice. Use zero_optimization.stage 0,{or_reduce} or an elementwise optimizer such as AdamW, or Muon or "
            "Shampoo in the config, or define a whole-matrix rule for its class (onefold_rule, "
            "docs/optimizers.md)."
        )
    if not chosen.elementwise and not allow_untested:
        raise ConfigError(
            f"optimizer {type(chosen.instance).__module__}.{chosen.name} is unknown. If it is elementwise, set "
            '"zero_allow_untested_optimizer": true, so that it updates flat fp32 shards. If it needs whole matrices, '
            "define a rule for its class (onefold_rule, docs/optimizers.md)."
        )


def check_delayed(chosen: Chosen) -> None:
    """Raise if the step cannot be delayed, because matrices are computed on the device between two host passes."""
    if chosen.has_matrices:
        raise ConfigError(
            f"onefold.delayed_host_step: optimizer {chosen.name} updates whole matrices on the device between two "
            "passes on the host, so its step cannot be delayed. Set the key to false."
        )


def check_formats(chosen: Chosen, formats: StateFormats) -> None:
    """Raise if states are to be quantized but a user-defined class creates and steps them."""
    if chosen.is_stepped and not formats.are_plain:
        raise ConfigError(
            f"onefold.state_dtype = {formats.states}, onefold.master_dtype = {formats.masters}: optimizer "
            f"{chosen.name} creates its states itself. Leave these keys out, or use an optimizer that onefold "
            "implements: Adam, AdamW, SGD, Adagrad, Lion, Muon, Shampoo."
        )


def for_disk(chosen: Chosen) -> Chosen:
    """Return the optimizer in a form that steps tile by tile, so that its states need not fit in memory."""
    if chosen.rules:
        return chosen
    assert chosen.instance is not None
    if not chosen.elementwise:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device = nvme: optimizer {chosen.name} needs all of its states in "
            "memory at once. If it is elementwise, set elementwise = True in its class. Otherwise, offload to cpu."
        )
    return replace(chosen, rules=(InstanceRule(chosen.instance),) * len(chosen.groups))


def _check_anywhere(name: str) -> None:
    if name.lower() in NOWHERE:
        raise ConfigError(f"optimizer {name} is not supported: it {NOWHERE[name.lower()]}")


def _has_stepped(state: Mapping[str, Any]) -> bool:
    # Adagrad creates its states in the constructor, with a step of 0.
    return float(state["step"]) > 0 if "step" in state else bool(state)


def _of_instance(optimizer: torch.optim.Optimizer) -> Chosen:
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} already has states, from a step or from its constructor. Pass it to "
            "initialize before its first step, and let that step create the states."
        )
    kind = type(optimizer)
    name = kind.__name__
    _check_anywhere(name)
    low_bits = low_bit_class(optimizer)
    is_known = kind in _TORCH_CLASSES
    # A class may name the rule that computes its step. Subclasses may override the step, so they do not inherit it.
    declared: str | MatrixRule | None = name.lower() if is_known else vars(kind).get("onefold_rule")
    declared = low_bits.rule if low_bits is not None else declared
    declared = declared.name if type(declared) in (MuonRule, ShampooRule) else declared  # type: ignore[union-attr]
    _check_user_class(optimizer, has_rule=declared is not None)
    if declared is None:
        return Chosen(name, optimizer.param_groups, (), optimizer)
    rule = declared if isinstance(declared, MatrixRule) else RULES[declared]
    rules = tuple(_rule_of(rule, group) for group in optimizer.param_groups)
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
        if group_rule in RULES.values():
            read_group(OPTIMIZERS[_name_of(group_rule)], group, path)
            check_together(group, path)
    paged = low_bits is not None and low_bits.is_paged
    return Chosen(name, optimizer.param_groups, rules, optimizer, low_bits=low_bits, is_paged=paged)


def _rule_of(rule: AnyRule, group: dict[str, Any]) -> AnyRule:
    """Return the rule of a group: AdamW if the optimizer's rule is for matrices and the group opts out."""
    if isinstance(rule, MatrixRule) and not group.setdefault(rule.flag, True):
        return RULES["adamw"]
    return rule


def _missing(rule: AnyRule, group_rule: AnyRule, *, is_known: bool) -> dict[str, Any]:
    """Return defaults of the hyperparameters that the group's rule reads, and its optimizer class may not set."""
    if group_rule is not rule:
        return _ADAMW_DEFAULTS
    if is_known or not isinstance(rule, MuonRule | ShampooRule):
        return {}
    found = _defaults(OPTIMIZERS[rule.name], {}) | {"eps": _NORM_EPS}
    return {key: value for key, value in found.items() if key not in _DIVISION_KEYS}


def _name_of(rule: AnyRule) -> str:
    return next(name for name, other in RULES.items() if other is rule)


def _check_read(optimizer: str, group: Mapping[str, Any], known: set[str], path: str) -> None:
    """Raise if a group of torch's class has a key of our config that torch's class does not read."""
    flags = {f"use_{name}" for name in OPTIMIZERS}
    for key in group.keys() - known - flags - {"params", "decoupled_weight_decay"}:
        if key in spellings(OPTIMIZERS[optimizer.lower()]):
            raise ConfigError(f"{path}.{key}: torch.optim.{optimizer} does not use it. Leave it out of the group.")


def _is_adamw(optimizer: torch.optim.Optimizer, low_bits: LowBitClass | None) -> bool:
    """Return whether a low-bit Adam has decoupled weight decay: always in bitsandbytes, by attribute in torchao."""
    return low_bits is not None and bool(getattr(optimizer, "is_adamw", True))


# The hyperparameters of groups that AdamW steps, next to groups that a matrix rule steps.
_ADAMW_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True}


def _of_several(optimizers: Sequence[torch.optim.Optimizer]) -> Chosen:
    """Combine several optimizers of one model into one with all of their groups, each stepped by its rule."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: a list must contain torch optimizers, not {type(optimizer).__name__}")
    chosen = [_of_instance(optimizer) for optimizer in optimizers]
    if any(each.low_bits is not None for each in chosen):
        raise ConfigError(
            "optimizer: a list cannot contain an optimizer of bitsandbytes or torchao. Pass torch.optim.AdamW, and "
            "set onefold.state_dtype to int8."
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
    return Chosen("+".join(each.name for each in chosen), groups, rules, None, combined=tuple(optimizers))


_TORCH_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Muon)


def _check_user_class(optimizer: torch.optim.Optimizer, *, has_rule: bool) -> None:
    """Raise if an engine step would bypass a patched `step`, a closure or states that the constructor created."""
    name, patched = type(optimizer).__name__, vars(optimizer).get("step")
    if patched is not None and not any(hasattr(patched, mark) for mark in ("_wrapped_by_lr_sched", FORWARD_MARK)):
        raise ConfigError(
            f"optimizer {name} has a `step` on the instance, which is not called. Remove it, or override step in a "
            "subclass."
        )
    if has_rule:
        return
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer {name} is not supported: its step needs a closure, but the engine passes none")
    if any(optimizer.state.values()):
        raise ConfigError(
            f"optimizer {name} is not supported: its constructor creates states for whole parameters, but "
            "sharded master weights are updated. Let its first step create them."
        )


def _of_name(name: str, params: dict[str, Any], groups: Groups, model: nn.Module | None = None) -> Chosen:
    _check_anywhere(name)
    plain = plain_name(name)
    if isinstance(rule := RULES.get(plain), MatrixRule):
        return _of_matrices(name, rule, params, groups, model)
    if plain in OPTIMIZERS:
        found = _elementwise_groups(plain, params, groups)
        return Chosen(name, found, (RULES[plain],) * len(found), None, is_paged=is_paged(name))
    kind = _torch_class(name)
    read = read_arguments(kind, params, "optimizer.params", "params")
    for index, group in enumerate(groups):
        given = {key: value for key, value in group.items() if key != "params"}
        check_names(given, list(inspect.signature(kind).parameters), f"model_parameters[{index}]", kind.__name__)
    instance = build(kind, lambda values: kind([dict(group) for group in groups], **values), read, "optimizer.params")
    return Chosen(kind.__name__, instance.param_groups, (), instance)


def _defaults(kind: type, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return every hyperparameter that a rule reads: the value of the config, or its default.

    Keys that only have a notice or a refusal are left out, because no rule reads them.
    """
    read = [key for key, entry in entries(kind).items() if not (entry.key.notice or entry.key.refused)]
    return {key: params.get(key, entries(kind)[key].default) for key in read}


def _elementwise_groups(name: str, params: Mapping[str, Any], groups: Groups) -> Groups:
    """Return the groups with every hyperparameter of the rule. Values of a group override those of the config."""
    kind = OPTIMIZERS[name]
    defaults = _defaults(kind, params)
    if name == "adamw":
        defaults["decoupled_weight_decay"] = True
    found = []
    for index, group in enumerate(groups):
        path = f"model_parameters[{index}]"
        check_names(group, list(spellings(kind)), path, name)
        found.append({**defaults, **group, **read_group(kind, group, path)})
        check_together(found[-1], path)
    return found


# The keys of a group, or of the config, that control how parameters are divided, and the learning rates of both kinds.
_DIVISION_KEYS = ("muon_lr", "adam_lr", "adamw_names", "split_rows")


def _of_matrices(
    name: str, rule: MatrixRule, params: Mapping[str, Any], groups: Groups, model: nn.Module | None
) -> Chosen:
    """Divide each group into matrices, with the hyperparameters of the rule, and others, with those of AdamW."""
    params = {key: value for key, value in params.items() if value is not None}
    kind, adamw = OPTIMIZERS[rule.name], OPTIMIZERS["adamw"]
    defaults, rate = _defaults(kind, params), {True: "muon_lr", False: "adam_lr"}
    division = GroupsOfMatrices(rule.flag, model, params.get("adamw_names", ()))
    found: Groups = []
    for index, group in enumerate(groups):
        path, is_matrices = f"model_parameters[{index}]", group.get(rule.flag)
        read = {**group, **read_group(kind, group, path)}
        known = [*spellings(kind), rule.flag]
        if is_matrices is not None and not is_matrices:  # AdamW steps the whole group, which may have all of its keys
            others = {key: value for key, value in group.items() if key not in known}
            read |= read_group(adamw, others, path)
            known += spellings(adamw)
        check_names(group, known, path, name)
        if is_matrices is not None:
            _check_division(read, rule.flag, path)
        for part in division.divide(read, path):
            as_matrices = part[rule.flag]
            of_group = [part.get(rate[as_matrices]), part.get("lr")]
            rates = [
                *of_group,
                *(values.get(key) for values in (params, defaults) for key in (rate[as_matrices], "lr")),
            ]
            values = {**defaults, **part, "lr": next(rate for rate in rates if rate is not None)}
            if as_matrices:
                values["eps"] = part.get("eps", _NORM_EPS)
            else:
                values["decoupled_weight_decay"] = True
            found.append({key: value for key, value in values.items() if key not in _DIVISION_KEYS})
    splits = division.splits(params.get("split_rows", ()))
    return Chosen(name, found, tuple(_rule_of(rule, group) for group in found), None, splits)


def _check_division(group: Mapping[str, Any], flag: str, path: str) -> None:
    """Raise if a group that is only matrices, or only others, has keys for the other kind."""
    wrong = ["adam_lr"] if group[flag] and not group.get("adamw_names") else []
    wrong = wrong if group[flag] else ["muon_lr", "split_rows"]
    for key in wrong:
        if group.get(key) not in (None, ()):
            raise ConfigError(
                f"{path}.{key}: it has no effect in a group with {flag} = {bool(group[flag])}. Leave it out, or leave "
                f"{flag} out."
            )


# The smallest norm that a matrix is divided by, torch's default.
_NORM_EPS = 1e-7


def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    classes = {
        attribute.lower(): kind
        for attribute, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if name.lower() not in classes:
        known = sorted({*OPTIMIZERS, *classes})
        near = meant_key(name, known)
        hint = f". Did you mean {near}? Known are {', '.join(known)}" if near else f". Known are {', '.join(known)}"
        extra = f" ({NOT_ELEMENTWISE[name.lower()]})" if name.lower() in NOT_ELEMENTWISE else ""
        raise ConfigError(f"optimizer.type {name!r} is unknown{extra}{hint}")
    return classes[name.lower()]


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
