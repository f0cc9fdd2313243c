"""Which optimizer a user means: a name and params of the config, an instance, or a callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from onefold.config import ConfigError
from onefold.config.keys import entries, read_value, spellings
from onefold.config.params import OPTIMIZERS, check_together, is_paged, plain_name
from onefold.config.read import meant_key
from onefold.optim.instance import FORWARD_MARK, InstanceRule, is_torchs, plain_number
from onefold.optim.low_bit_classes import LowBitClass, low_bit_class
from onefold.optim.matrix_groups import divide, read_splits
from onefold.optim.matrix_rules import MatrixRule, MuonRule, ShampooRule
from onefold.optim.rules import AdagradRule, AdamRule, LionRule, Rule, SGDRule
from onefold.optim.signature import build, read_arguments
from onefold.plan import KeptStates, StateFormats
from onefold.plan.matrices import Splits

Groups = list[dict[str, Any]]
Optimizers = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | Sequence[torch.optim.Optimizer] | None
"""What a user may hand in."""

RULES: dict[str, Rule] = {
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
    """The optimizer to build: live groups, and either a rule (stepped by unit) or an instance (stepped once)."""

    name: str
    groups: Groups
    rule: Rule | None
    instance: torch.optim.Optimizer | None
    splits: Splits = field(default_factory=dict)
    """Parameters that are several matrices each, by patterns of their names."""
    beside: tuple[torch.optim.Optimizer, ...] = ()
    """Instances that a rule steps together, where the user has handed in several."""
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
        return self.rule is not None or listed or getattr(self.instance, "elementwise", False) is True

    @property
    def is_stepped(self) -> bool:
        """Whether the instance itself is stepped, in whole or a tile at a time; else a rule takes its place."""
        return self.instance is not None and (self.rule is None or isinstance(self.rule, InstanceRule))

    def states_of_groups(self) -> list[KeptStates]:
        """What is kept for each group beside its masters: for matrices what their rule keeps, for all others alike."""
        if isinstance(self.rule, MatrixRule):
            rule = self.rule
            return [KeptStates(tuple(rule.state_names([group])), rule.takes(group)) for group in self.groups]
        names = tuple(self.rule.state_names(self.groups)) if self.rule is not None else ()
        own = self.rule is None or isinstance(self.rule, InstanceRule)
        return [KeptStates(names, by_own_class=own)] * len(self.groups)

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
    reason = NOT_ELEMENTWISE.get(chosen.name.lower()) if not isinstance(chosen.rule, MatrixRule) else None
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
    if isinstance(chosen.rule, MatrixRule):
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
    if chosen.rule is not None:
        return chosen
    assert chosen.instance is not None
    if not chosen.elementwise:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device = nvme: optimizer {chosen.name} is stepped once a step, over "
            "all of its states at once, and they are on disk because they do not fit in memory. If it treats every "
            "element by itself, let its class say so (elementwise = True); or offload to cpu"
        )
    return replace(chosen, rule=InstanceRule(chosen.instance))


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
    _check_own_class(optimizer, has_rule=own is not None)
    if own is None:
        return Chosen(name, optimizer.param_groups, None, optimizer)
    if isinstance(own, MatrixRule):
        for group in optimizer.param_groups:
            if not group.setdefault(f"use_{own.name}", True):
                for key, value in _ADAMW.items():
                    group.setdefault(key, value)
        return Chosen(name, optimizer.param_groups, own, optimizer)
    rule = RULES[own]
    for index, group in enumerate(optimizer.param_groups):
        if isinstance(rule, AdamRule):
            group.setdefault("decoupled_weight_decay", kind is torch.optim.AdamW or _decays_apart(optimizer, low_bits))
        if isinstance(rule, MatrixRule):
            group.setdefault(f"use_{rule.name}", True)
        # torch checks what its constructor gets, not what stands in a group.
        _read_group(OPTIMIZERS[own], group, f"optimizer.param_groups[{index}]")
        check_together(group, f"optimizer.param_groups[{index}]")
    paged = low_bits is not None and low_bits.is_paged
    return Chosen(name, optimizer.param_groups, rule, optimizer, low_bits=low_bits, is_paged=paged)


def _decays_apart(optimizer: torch.optim.Optimizer, low_bits: LowBitClass | None) -> bool:
    """bitsandbytes' Adam decays as its AdamW does; torchao's says."""
    return low_bits is not None and bool(getattr(optimizer, "is_adamw", True))


# Of groups beside a rule of the user's that are not stepped as matrices.
_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True}


def _of_several(optimizers: Sequence[torch.optim.Optimizer]) -> Chosen:
    """torch's Muon for some parameters and its AdamW for the others: one optimizer with the groups of both."""
    chosen = [_of_instance(optimizer) for optimizer in optimizers]
    if any(each.low_bits is not None for each in chosen):
        raise ConfigError(
            "optimizer: one of bitsandbytes or torchao was given in a list; give torch.optim.AdamW in its place, and "
            "onefold.state_dtype int8 in the config"
        )
    rules = [each.rule for each in chosen]
    matrix = next((rule for rule in rules if isinstance(rule, MatrixRule)), None)
    if matrix is None or not all(isinstance(rule, MatrixRule | AdamRule) for rule in rules):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ConfigError(
            f"optimizer: {names} were given together. One may have several for one model only as torch.optim.Muon with "
            "torch.optim.AdamW; anything else is groups of one optimizer"
        )
    for each in chosen:
        for group in each.groups:
            group.setdefault(f"use_{matrix.name}", isinstance(each.rule, MatrixRule))
    groups = [group for each in chosen for group in each.groups]
    return Chosen("+".join(each.name for each in chosen), groups, matrix, None, beside=tuple(optimizers))


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
        divided = divide(groups, f"use_{rule.name}", model, params.get("adamw_names", ()))
        splits = read_splits(params.get("split_rows", ()), model)
        return Chosen(name, _matrix_groups(rule, params, divided), rule, None, splits)
    if plain in OPTIMIZERS:
        return Chosen(name, _own_groups(plain, params, groups), RULES[plain], None, is_paged=is_paged(name))
    kind = _torch_class(name)
    read = read_arguments(kind, params, "optimizer.params", "params")
    for index, group in enumerate(groups):
        given = {key: value for key, value in group.items() if key != "params"}
        _check_names(given, list(inspect.signature(kind).parameters), f"model_parameters[{index}]")
    instance = build(kind, lambda values: kind([dict(group) for group in groups], **values), read, "optimizer.params")
    return Chosen(kind.__name__, instance.param_groups, None, instance)


def _own_groups(name: str, params: Mapping[str, Any], groups: Groups) -> Groups:
    """Groups with every hyperparameter of the rule: the config's, and before them the group's own."""
    kind = OPTIMIZERS[name]
    # What only has a notice or a refusal is nothing that a rule reads.
    rule_reads = [key for key, entry in entries(kind).items() if not (entry.key.notice or entry.key.refused)]
    defaults = {key: params.get(key, entries(kind)[key].default) for key in rule_reads}
    if name == "adamw":
        defaults["decoupled_weight_decay"] = True
    found = []
    for index, group in enumerate(groups):
        path = f"model_parameters[{index}]"
        _check_names(group, list(spellings(kind)), path)
        found.append({**defaults, **group, **_read_group(kind, group, path)})
        check_together(found[-1], path)
    return found


def _matrix_groups(rule: MatrixRule, params: Mapping[str, Any], groups: Groups) -> Groups:
    """Groups of matrices with what the rule reads, and groups of others with what AdamW reads."""
    params = {key: value for key, value in params.items() if value is not None}
    found = _own_groups(rule.name, params, groups)
    for given, group in zip(groups, found, strict=True):
        is_matrices = rule.takes(group)
        default = {True: group.pop("muon_lr", None), False: group.pop("adam_lr")}[is_matrices] or group["lr"]
        if given.get("lr") is None:
            group["lr"] = params.get("muon_lr" if is_matrices else "adam_lr", params.get("lr", default))
        for name in ("adamw_names", "split_rows"):
            group.pop(name)
        if is_matrices:
            group["eps"] = given.get("eps", _EPS_OF_NORM)
        else:
            group["decoupled_weight_decay"] = True
    return found


# Below this a matrix is not scaled by its norm; torch's default.
_EPS_OF_NORM = 1e-7


def _read_group(kind: type, group: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The hyperparameters of a group, each in its type and under its own name; a tensor stays the one it is."""
    read = {}
    for name, value in group.items():
        entry = spellings(kind).get(name)
        if entry is None or (value is None and entry.optional):
            continue
        plain = read_value(f"{path}.{name}", _plain(value), entry)
        if entry.key.refused is not None and entry.asks(plain):
            raise ConfigError(f"{path}.{name} = {plain!r}: {entry.key.refused}")
        read[entry.name] = value if _has_tensor(value) else plain
    return read


def _check_names(group: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    """A group may have keys of the user's own, so only what is as good as a known one is taken for a mistake."""
    for name in group:
        meant = meant_key(name, known, certain=True) if name not in (*known, "params") else None
        if meant is not None:
            raise ConfigError(f"{path}.{name}: no optimizer reads it; did you mean {path}.{meant}?")


def _plain(value: Any) -> Any:
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else plain_number(value)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(inner, torch.Tensor) for inner in (value if isinstance(value, list | tuple) else [value]))


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
