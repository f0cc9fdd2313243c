"""The optimizer of an engine, as it was chosen: its groups, the rule of each, and what is known about its class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onefold.errors import ConfigError
from onefold.optim.group_values import Check, check_of_class, check_of_rate
from onefold.optim.instance import InstanceRule, is_torchs
from onefold.optim.matrix_rules import AnyRule, MatrixRule, MuonRule, ShampooRule, names_of_states
from onefold.optim.rules import AdagradRule, AdamRule, LionRule, SGDRule
from onefold.plan import HYPERPARAMETERS, StateSpec
from onefold.plan.matrices import Splits

Groups = list[dict[str, Any]]

RULES: dict[str, AnyRule] = {
    "adam": AdamRule(),
    "adamw": AdamRule(),
    "sgd": SGDRule(),
    "adagrad": AdagradRule(),
    "lion": LionRule(),
    "muon": MuonRule(),
    "shampoo": ShampooRule(),
}

ONE_STEP_SIZE = "computes one step size from all parameters"
_ADAPTIVE = ("prodigy", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "dog")
NOT_ELEMENTWISE = {
    **dict.fromkeys(("lamb", "fusedlamb", "onebitlamb", "lars"), "scales each parameter by its norm"),
    "muon": "orthogonalises whole matrices",
    "adafactor": "keeps row and column sums of whole matrices",
    **dict.fromkeys(("shampoo", "soap"), "preconditions whole matrices"),
    **dict.fromkeys(_ADAPTIVE, ONE_STEP_SIZE),
    "ldog": "computes a step size from each parameter",
}
"""The reasons why classes of these names cannot step shards, by lower-case name."""
_UNSUPPORTED = {
    "lbfgs": "evaluates the loss several times per step, which the engine cannot do",
    "sparseadam": "needs sparse gradients, but onefold stores gradients densely",
    **dict.fromkeys(("onebitadam", "zerooneadam"), "compresses communication by itself, but ZeRO replaces it"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "needs the `mup` package; pass an instance instead"),
}


def check_supported(name: str) -> None:
    """Raise if an optimizer cannot run in any stage."""
    if name.lower() in _UNSUPPORTED:
        raise ConfigError(f"optimizer {name} is not supported: it {_UNSUPPORTED[name.lower()]}")


def rule_of_group(rule: AnyRule, group: dict[str, Any]) -> AnyRule:
    """Return the rule of a group: AdamW if the optimizer's rule is for matrices and the group opts out."""
    if isinstance(rule, MatrixRule) and not group.setdefault(rule.flag, True):
        return RULES["adamw"]
    return rule


def name_of_rule(rule: AnyRule) -> str | None:
    """Return the name of a rule in `RULES`, or None for user-defined rules."""
    return next((name for name, known in RULES.items() if known is rule), None)


@dataclass(frozen=True)
class LowBitClass:
    """The update rule and the state format that an instance of bitsandbytes or torchao selects."""

    rule: str
    is_8bit: bool
    min_numel: int
    is_paged: bool = False
    """Whether states may be moved to the host if they do not fit on the device."""
    fp32_parameters: tuple[nn.Parameter, ...] = ()
    """The parameters whose states stay in fp32."""


@dataclass(frozen=True)
class ChosenOptimizer:
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
    def runs_user_class(self) -> bool:
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
        if self.runs_user_class:
            return [check_of_class(self.instance)] * len(self.groups)
        names = [name_of_rule(rule) for rule in self.rules]
        return [HYPERPARAMETERS[name].read if name is not None else check_of_rate for name in names]

    def group_of_each(self) -> dict[int, int]:
        """Return the group index of each parameter, by its id. Raise if a parameter is in two groups."""
        groups: dict[int, int] = {}
        for index, group in enumerate(self.groups):
            for parameter in group["params"]:
                if groups.setdefault(id(parameter), index) != index:
                    raise ValueError(f"a parameter is in optimizer groups {groups[id(parameter)]} and {index}")
        return groups
