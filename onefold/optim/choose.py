"""Which optimizer a user means: a name and params of the config, an instance, or a callable."""

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
"""What a user may hand in."""

RULES: dict[str, AnyRule] = {
    "adam": AdamRule(),
    "adamw": AdamRule(),
    "sgd": SGDRule(),
    "adagrad": AdagradRule(),
    "lion": LionRule(),
    "muon": MuonRule(),
    "shampoo": ShampooRule(),
}

_ONE_NUMBER = "makes one step size of sums over all parameters"
_ADAPTIVE = ("prodigy", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "dog")
NOT_ELEMENTWISE = {
    **dict.fromkeys(("lamb", "fusedlamb", "onebitlamb", "lars"), "scales each parameter by its own norm"),
    "muon": "orthogonalises whole matrices",
    "adafactor": "keeps row and column sums of whole matrices",
    **dict.fromkeys(("shampoo", "soap"), "preconditions whole matrices"),
    **dict.fromkeys(_ADAPTIVE, _ONE_NUMBER),
    "ldog": "makes a step size of sums over each parameter",
}
NOWHERE = {
    "lbfgs": "calls the loss again and again inside its step, which the engine cannot do",
    "sparseadam": "needs sparse gradients, and runs keep dense ones",
    **dict.fromkeys(("onebitadam", "zerooneadam"), "compresses its own communication, which ZeRO replaces"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "needs the `mup` package; pass an instance instead"),
}


@dataclass(frozen=True)
class Chosen:
    """Optimizer to build: live groups, and a rule for each (stepped by unit) or an instance (stepped once)."""

    name: str
    groups: Groups
    rules: tuple[AnyRule, ...]
    """One for each group; none where the instance is stepped in whole."""
    instance: torch.optim.Optimizer | None
    splits: Splits = field(default_factory=dict)
    """Parameters that are several matrices each, by patterns of their names."""
    beside: tuple[torch.optim.Optimizer, ...] = ()
    """Instances that rules step together, where the user has handed in several."""
    low_bits: LowBitClass | None = None
    """Where the user has handed in one whose class says in how many bits states are held."""
    is_paged: bool = False

    @property
    def instances(self) -> tuple[torch.optim.Optimizer, ...]:
        """What the user has handed in."""
        return self.beside or ((self.instance,) if self.instance is not None else ())

    @property
    def elementwise(self) -> bool:
        """Whether it is known to treat every element by itself; a user's own class says so by `elementwise = True`."""
        # ScheduleFree's classes keep counters in their groups and look at each element by itself.
        known = is_torchs(self.instance) or type(self.instance).__module__.startswith("schedulefree.")
        listed = known and self.name.lower() not in NOT_ELEMENTWISE
        return bool(self.rules) or listed or getattr(self.instance, "elementwise", False) is True

    @property
    def is_stepped(self) -> bool:
        """Whether the instance itself is stepped, in whole or a tile at a time; else a rule takes its place."""
        return self.instance is not None and all(isinstance(rule, InstanceRule) for rule in self.rules)

    @property
    def has_matrices(self) -> bool:
        """Whether a group is stepped as whole matrices."""
        return any(isinstance(rule, MatrixRule) for rule in self.rules)

    def states_of_groups(self) -> list[StateSpec]:
        """What is kept for each group beside its masters."""
        if not self.rules:
            return [StateSpec(by_own_class=True)] * len(self.groups)
        names = names_of_states(self.rules, self.groups)
        return [
            StateSpec(each, isinstance(rule, MatrixRule), isinstance(rule, InstanceRule))
            for each, rule in zip(names, self.rules, strict=True)
        ]

    def checks_of_groups(self) -> list[Check | None]:
        """How values that are written to each group are checked; None where only the user's class knows."""
        if self.is_stepped:
            return [check_of_class(self.instance)] * len(self.groups)
        kinds = {id(rule): OPTIMIZERS[name] for name, rule in RULES.items()}
        return [check_of_kind(kinds[id(rule)]) if id(rule) in kinds else check_of_rate for rule in self.rules]

    def group_of_each(self) -> dict[int, int]:
        """The id of each parameter, and the group it stands in."""
        groups: dict[int, int] = {}
        for index, group in enumerate(self.groups):
            for parameter in group["params"]:
                if groups.setdefault(id(parameter), index) != index:
                    raise ValueError(f"a parameter stands in optimizer groups {groups[id(parameter)]} and {index}")
        return groups


def choose(
    optimizer: Optimizers,
    section: Any,
    parameters: Iterable[Any],
    model: nn.Module | None = None,
) -> Chosen | None:
    """None where the user gave no optimizer at all: an engine for evaluation. `model`: for names of parameters."""
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
    """Refuse, by name and by reason, what cannot run on slices of a parameter."""
    reason = NOT_ELEMENTWISE.get(chosen.name.lower()) if not chosen.rules else None
    # Prodigy and D-Adaptation can add what they see of a shard up over all ranks.
    if reason is _ONE_NUMBER and all(group.get("fsdp_in_use") is True for group in chosen.groups):
        return
    if reason:
        itself = " or let it add up over ranks itself (fsdp_in_use=True)," if reason is _ONE_NUMBER else ""
        raise ConfigError(
            f"optimizer {chosen.name} cannot run where optimizer states are sharded: it {reason}, and a rank holds "
            f"only a slice. Use zero_optimization.stage 0,{itself} or an elementwise optimizer such as AdamW, or Muon "
            "or Shampoo in the config, or give its class a rule of whole matrices (onefold_rule, docs/optimizers.md)"
        )
    if not chosen.elementwise and not allow_untested:
        raise ConfigError(
            f"optimizer {type(chosen.instance).__module__}.{chosen.name} is not one onefold knows. If it treats every "
            'element by itself, set "zero_allow_untested_optimizer": true; it then steps flat fp32 shards. If it looks '
            "at whole matrices, give its class a rule that says how, in ten lines (onefold_rule, docs/optimizers.md)"
        )


def check_delayed(chosen: Chosen) -> None:
    """Refuse what the device and the host step together, where the host's step may last."""
    if chosen.has_matrices:
        raise ConfigError(
            f"onefold.delayed_host_step: optimizer {chosen.name} works on whole matrices on the device between two "
            "passes of the host, and cannot be delayed. Set it to false"
        )


def check_formats(chosen: Chosen, formats: StateFormats) -> None:
    """Refuse states in fewer bytes where it is the user's own class that steps them."""
    if chosen.is_stepped and not formats.are_plain:
        raise ConfigError(
            f"onefold.state_dtype = {formats.states}, onefold.master_dtype = {formats.masters}: optimizer "
            f"{chosen.name} steps by its own class, which makes its states itself. Leave these keys out, or use one "
            "that onefold steps: Adam, AdamW, SGD, Adagrad, Lion, Muon, Shampoo"
        )


def for_disk(chosen: Chosen) -> Chosen:
    """The same optimizer, in a form that never needs all of its states in memory."""
    if chosen.rules:
        return chosen
    assert chosen.instance is not None
    if not chosen.elementwise:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device = nvme: optimizer {chosen.name} is stepped once a step, over "
            "all of its states at once, and they are on disk because they do not fit in memory. If it treats every "
            "element by itself, let its class say so (elementwise = True); or offload to cpu"
        )
    return replace(chosen, rules=(InstanceRule(chosen.instance),) * len(chosen.groups))


def _check_anywhere(name: str) -> None:
    if name.lower() in NOWHERE:
        raise ConfigError(f"optimizer {name} is not supported: it {NOWHERE[name.lower()]}")


def _has_stepped(state: Mapping[str, Any]) -> bool:
    # Adagrad fills its state in the constructor, with a step of 0.
    return float(state["step"]) > 0 if "step" in state else bool(state)


def _of_instance(optimizer: torch.optim.Optimizer) -> Chosen:
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} has states: it has already stepped, or its constructor makes them. "
            "Pass it to initialize before its first step, which is to make them, for the masters that are stepped"
        )
    kind = type(optimizer)
    name = kind.__name__
    _check_anywhere(name)
    low_bits = low_bit_class(optimizer)
    is_known = kind in _OF_TORCH
    # A class may name the rule that does what its step does; classes that inherit from it may do something else.
    own: str | MatrixRule | None = name.lower() if is_known else vars(kind).get("onefold_rule")
    own = low_bits.rule if low_bits is not None else own
    own = own.name if type(own) in (MuonRule, ShampooRule) else own  # type: ignore[union-attr]
    _check_own_class(optimizer, has_rule=own is not None)
    if own is None:
        return Chosen(name, optimizer.param_groups, (), optimizer)
    rule = own if isinstance(own, MatrixRule) else RULES[own]
    rules = tuple(_rule_of(rule, group) for group in optimizer.param_groups)
    for index, (group, its) in enumerate(zip(optimizer.param_groups, rules, strict=True)):
        path = f"optimizer.param_groups[{index}]"
        for key, value in _missing(rule, its, is_known=is_known).items():
            group.setdefault(key, value)
        if isinstance(its, AdamRule):
            decays_apart = its is not rule or kind is torch.optim.AdamW or _decays_apart(optimizer, low_bits)
            group.setdefault("decoupled_weight_decay", decays_apart)
        if is_known and its is rule:
            _check_read(name, group, set(optimizer.defaults), path)
        # torch checks what its constructor gets, not what stands in a group.
        if its in RULES.values():
            read_group(OPTIMIZERS[_name_of(its)], group, path)
            check_together(group, path)
    paged = low_bits is not None and low_bits.is_paged
    return Chosen(name, optimizer.param_groups, rules, optimizer, low_bits=low_bits, is_paged=paged)


def _rule_of(rule: AnyRule, group: dict[str, Any]) -> AnyRule:
    """Return what steps a group of an optimizer that has this rule: AdamW where a group is not to be matrices."""
    if isinstance(rule, MatrixRule) and not group.setdefault(rule.flag, True):
        return RULES["adamw"]
    return rule


def _missing(rule: AnyRule, its: AnyRule, *, is_known: bool) -> dict[str, Any]:
    """Return what the rule of a group reads, and the class of its optimizer may not have put there."""
    if its is not rule:
        return _ADAMW
    if is_known or not isinstance(rule, MuonRule | ShampooRule):
        return {}
    found = _defaults(OPTIMIZERS[rule.name], {}) | {"eps": _EPS_OF_NORM}
    return {key: value for key, value in found.items() if key not in _OF_DIVISION}


def _name_of(rule: AnyRule) -> str:
    return next(name for name, its in RULES.items() if its is rule)


def _check_read(optimizer: str, group: Mapping[str, Any], known: set[str], path: str) -> None:
    """Raise for a key of the config that stands in a group of torch's class, and that neither of the two reads."""
    flags = {f"use_{name}" for name in OPTIMIZERS}
    for key in group.keys() - known - flags - {"params", "decoupled_weight_decay"}:
        if key in spellings(OPTIMIZERS[optimizer.lower()]):
            raise ConfigError(f"{path}.{key}: torch.optim.{optimizer} does not read it. Leave it out of the group")


def _decays_apart(optimizer: torch.optim.Optimizer, low_bits: LowBitClass | None) -> bool:
    """bitsandbytes' Adam decays as its AdamW does; torchao's says."""
    return low_bits is not None and bool(getattr(optimizer, "is_adamw", True))


# Of groups beside a rule of the user's that are not stepped as matrices.
_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True}


def _of_several(optimizers: Sequence[torch.optim.Optimizer]) -> Chosen:
    """Several optimizers for one model, as one with the groups of all, each stepped by its own rule."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: a list must hold torch optimizers, not {type(optimizer).__name__}")
    chosen = [_of_instance(optimizer) for optimizer in optimizers]
    if any(each.low_bits is not None for each in chosen):
        raise ConfigError(
            "optimizer: one of bitsandbytes or torchao was given in a list; give torch.optim.AdamW in its place, and "
            "onefold.state_dtype int8 in the config"
        )
    others = [each.name for each in chosen if not each.rules]
    if others or not chosen:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ConfigError(
            f"optimizer: {names} were given together, and {', '.join(others) or 'an empty list'} cannot be. Only those "
            "that onefold steps by a rule can share a model: torch's Adam, AdamW, SGD, Adagrad and Muon, and classes "
            "with an onefold_rule"
        )
    groups = [group for each in chosen for group in each.groups]
    rules = tuple(rule for each in chosen for rule in each.rules)
    return Chosen("+".join(each.name for each in chosen), groups, rules, None, beside=tuple(optimizers))


_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Muon)


def _check_own_class(optimizer: torch.optim.Optimizer, *, has_rule: bool) -> None:
    """Refuse what a step of ours would leave out."""
    name, patched = type(optimizer).__name__, vars(optimizer).get("step")
    if patched is not None and not any(hasattr(patched, mark) for mark in ("_wrapped_by_lr_sched", FORWARD_MARK)):
        raise ConfigError(
            f"optimizer {name} was given another `step` on the instance, which would not be called: pass the optimizer "
            "as its class makes it, or override step in a subclass"
        )
    if has_rule:
        return
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer {name} is not supported: its step needs a closure, and the engine has none")
    if any(optimizer.state.values()):
        raise ConfigError(
            f"optimizer {name} is not supported: its constructor makes states for whole parameters, and masters are "
            "stepped in their place. Let its first step make them"
        )


def _of_name(name: str, params: dict[str, Any], groups: Groups, model: nn.Module | None = None) -> Chosen:
    _check_anywhere(name)
    plain = plain_name(name)
    if isinstance(rule := RULES.get(plain), MatrixRule):
        return _of_matrices(name, rule, params, groups, model)
    if plain in OPTIMIZERS:
        found = _own_groups(plain, params, groups)
        return Chosen(name, found, (RULES[plain],) * len(found), None, is_paged=is_paged(name))
    kind = _torch_class(name)
    read = read_arguments(kind, params, "optimizer.params", "params")
    for index, group in enumerate(groups):
        given = {key: value for key, value in group.items() if key != "params"}
        check_names(given, list(inspect.signature(kind).parameters), f"model_parameters[{index}]", kind.__name__)
    instance = build(kind, lambda values: kind([dict(group) for group in groups], **values), read, "optimizer.params")
    return Chosen(kind.__name__, instance.param_groups, (), instance)


def _defaults(kind: type, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return every hyperparameter that a rule reads: the config's, or its default.

    Keys that only have a notice or a refusal are left out, because no rule reads them.
    """
    read = [key for key, entry in entries(kind).items() if not (entry.key.notice or entry.key.refused)]
    return {key: params.get(key, entries(kind)[key].default) for key in read}


def _own_groups(name: str, params: Mapping[str, Any], groups: Groups) -> Groups:
    """Groups with every hyperparameter of the rule: the config's, and before them the group's own."""
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


# The keys of a group, or of the config, that say how its parameters are divided, and at which rates they are stepped.
_OF_DIVISION = ("muon_lr", "adam_lr", "adamw_names", "split_rows")


def _of_matrices(
    name: str, rule: MatrixRule, params: Mapping[str, Any], groups: Groups, model: nn.Module | None
) -> Chosen:
    """Groups of matrices with what the rule reads, and groups of others with what AdamW reads."""
    params = {key: value for key, value in params.items() if value is not None}
    kind, adamw = OPTIMIZERS[rule.name], OPTIMIZERS["adamw"]
    defaults, rate = _defaults(kind, params), {True: "muon_lr", False: "adam_lr"}
    division = GroupsOfMatrices(rule.flag, model, params.get("adamw_names", ()))
    found: Groups = []
    for index, group in enumerate(groups):
        path, is_matrices = f"model_parameters[{index}]", group.get(rule.flag)
        read = {**group, **read_group(kind, group, path)}
        known = [*spellings(kind), rule.flag]
        if is_matrices is not None and not is_matrices:  # AdamW steps all of it, and all of its keys may stand there
            rest = {key: value for key, value in group.items() if key not in known}
            read |= read_group(adamw, rest, path)
            known += spellings(adamw)
        check_names(group, known, path, name)
        if is_matrices is not None:
            _check_division(read, rule.flag, path)
        for part in division.divide(read, path):
            takes = part[rule.flag]
            own = [part.get(rate[takes]), part.get("lr")]
            rates = [*own, *(values.get(key) for values in (params, defaults) for key in (rate[takes], "lr"))]
            values = {**defaults, **part, "lr": next(rate for rate in rates if rate is not None)}
            if takes:
                values["eps"] = part.get("eps", _EPS_OF_NORM)
            else:
                values["decoupled_weight_decay"] = True
            found.append({key: value for key, value in values.items() if key not in _OF_DIVISION})
    splits = division.splits(params.get("split_rows", ()))
    return Chosen(name, found, tuple(_rule_of(rule, group) for group in found), None, splits)


def _check_division(group: Mapping[str, Any], flag: str, path: str) -> None:
    """Raise for keys of the other kind of parameters, in a group that is of one kind alone."""
    wrong = ["adam_lr"] if group[flag] and not group.get("adamw_names") else []
    wrong = wrong if group[flag] else ["muon_lr", "split_rows"]
    for key in wrong:
        if group.get(key) not in (None, ()):
            raise ConfigError(
                f"{path}.{key}: nothing reads it in a group with {flag} = {bool(group[flag])}. Leave it out, or leave "
                f"{flag} out"
            )


# Below this a matrix is not scaled by its norm; torch's default.
_EPS_OF_NORM = 1e-7


def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    classes = {
        attribute.lower(): kind
        for attribute, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if name.lower() not in classes:
        known = sorted({*OPTIMIZERS, *classes})
        near = meant_key(name, known)
        hint = f"; did you mean {near}? Known are {', '.join(known)}" if near else f"; known: {', '.join(known)}"
        extra = f" ({NOT_ELEMENTWISE[name.lower()]})" if name.lower() in NOT_ELEMENTWISE else ""
        raise ConfigError(f"optimizer.type {name!r} is not known here{extra}{hint}")
    return classes[name.lower()]


def _as_groups(parameters: Iterable[Any]) -> Groups:
    items = list(parameters)
    if items and all(isinstance(item, dict) for item in items):
        return [{**item, "params": _only_parameters(item["params"])} for item in items]
    return [{"params": _only_parameters(items)}]


def _only_parameters(items: Any) -> list[nn.Parameter]:
    each: Any = [items] if isinstance(items, torch.Tensor) else items
    # Hugging Face passes (name, parameter) pairs in places; accept them.
    plain = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in each]
    for item in plain:
        if not isinstance(item, torch.Tensor):
            raise TypeError(f"model_parameters must hold parameters or parameter groups, not {type(item).__name__}")
    return plain
