"""The `optimizer` and `scheduler` sections of the config, as the plan carries them.

The code that chooses an optimizer reads these specs and not the config.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from onefold.config import Config
from onefold.config.hyperparameters import HYPERPARAMETERS
from onefold.config.params import SCHEDULES, is_paged, plain_name
from onefold.config.signature import build, check_required, read_arguments
from onefold.config.suggestions import meant_key
from onefold.errors import ConfigError


@dataclass(frozen=True)
class _ClassSpec:
    """A section with `type`, the name of a class, and `params`, the arguments of its constructor."""

    type: str
    params: Mapping[str, Any]
    section: ClassVar[str]
    first: ClassVar[str]
    """The argument of the constructor that the engine passes."""

    def read_arguments(self, kind: builtins.type) -> dict[str, Any]:
        """Return `params` in the types that the signature of a torch class annotates."""
        return read_arguments(kind, self.params, f"{self.section}.params", self.first)

    def build(self, kind: builtins.type, make: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> Any:
        """Return the result of `make`, an instance of `kind`. If it fails, raise an error that names the key."""
        return build(kind, make, arguments, f"{self.section}.params")

    def unknown_type(self, known: Iterable[str], note: str = "") -> ConfigError:
        """Make the error for a `type` that is not known."""
        near = meant_key(self.type, known := list(known))
        hint = f"Did you mean {near}? " if near else ""
        return ConfigError(f"{self.section}.type {self.type!r} is not known{note}. {hint}Known are {', '.join(known)}.")


@dataclass(frozen=True)
class OptimizerSpec(_ClassSpec):
    """The optimizer of the config. `params` has all hyperparameters of a rule, or the given ones of a torch class."""

    rule: str | None = None
    """The name of the rule that updates by these hyperparameters, or None for a torch class."""
    is_paged: bool = False
    """Whether the type is a name of bitsandbytes for paged states."""
    section = "optimizer"
    first = "params"


@dataclass(frozen=True)
class SchedulerSpec(_ClassSpec):
    """The learning rate scheduler of the config."""

    section = "scheduler"
    first = "optimizer"

    def read_arguments(self, kind: builtins.type) -> dict[str, Any]:
        """Return the arguments of a torch class, or `params` as the config has read them for onefold's schedules."""
        if self.type not in SCHEDULES:
            return super().read_arguments(kind)
        check_required(kind, self.params, f"{self.section}.params", self.first)
        return dict(self.params)


def make_optimizer_spec(config: Config) -> OptimizerSpec | None:
    """Return the optimizer of a config, with the defaults of its hyperparameters filled in."""
    if config.optimizer is None:
        return None
    given, rule = config.optimizer.params, plain_name(config.optimizer.type)
    if rule not in HYPERPARAMETERS:
        return OptimizerSpec(config.optimizer.type, given)
    params = {name: given.get(name, default) for name, default in HYPERPARAMETERS[rule].defaults.items()}
    if rule == "adamw":
        params["decoupled_weight_decay"] = True
    for name in ("muon_lr", "adam_lr"):
        # A given `lr` has precedence over the default rates of matrices and of other parameters.
        if name in params and name not in given:
            params[name] = next(rate for rate in (given.get("lr"), params[name], params["lr"]) if rate is not None)
    return OptimizerSpec(config.optimizer.type, params, rule, is_paged(config.optimizer.type))


def make_scheduler_spec(config: Config) -> SchedulerSpec | None:
    """Return the scheduler of a config."""
    return SchedulerSpec(config.scheduler.type, config.scheduler.params) if config.scheduler is not None else None
