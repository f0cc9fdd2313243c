"""Parameters of a model that another engine already holds, such as a policy's frozen weights in a reference model.

[Note: engines that share parameters]
The engine that has laid a parameter out stores it, with its dtype, its stage and its tier. A second engine over the
same Parameter objects leaves them out of its layout, so nothing is stored twice; the first engine unshards them where
the second one uses them. Parameters that the second engine trains are laid out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from onefold.comm import Group
from onefold.config import ConfigError
from onefold.engine.model_events import ModelEvents
from onefold.log import logger
from onefold.plan import Plan
from onefold.runtime import handle_of
from onefold.runtime.parameter_proxy import is_sharded


class SharedParameters:
    """The parameters of a model that other live engines store and this one does not train."""

    def __init__(self, model: nn.Module, plan: Plan, groups: Mapping[int, int]) -> None:
        self._named: dict[str, nn.Parameter] = {}
        self._owners: list[ModelEvents] = []
        # The engines of the owners, which must stay alive as long as this one.
        self._engines: list[Any] = []
        self._handles: list[RemovableHandle] = []
        trained_here: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            handle = handle_of(parameter)
            owner = handle.owner if handle is not None else None
            if handle is None or not isinstance(owner, ModelEvents):
                continue
            flat, _ = handle.location_of(parameter)
            if parameter.requires_grad and id(parameter) in groups:
                trained_here.setdefault(id(owner), name)
            else:
                dtype = flat.dtype if flat.spec.packed else plan.precision.of_parameter(flat.dtype)
                if dtype != flat.dtype:
                    raise ConfigError(
                        f"parameter {name} belongs to another engine, which stores it in {flat.dtype}, but this config "
                        f"requests {dtype}. Give both engines the same bf16 / fp16 section, or this one a copy of the "
                        "model (copy.deepcopy before initialize)."
                    )
                self._named[name] = parameter
                if all(owner is not known for known in self._owners):
                    self._owners.append(owner)
                    self._engines.append(owner.engine())
        for owner in self._owners:
            if id(owner) in trained_here:
                raise ValueError(
                    f"parameter {trained_here[id(owner)]} is trained here but belongs to another engine, which also "
                    f"stores {next(iter(self._named))} for this one. Create the engine that trains it first, or give "
                    "this one a copy of the parameter."
                )
        self.ids = {id(parameter) for parameter in self._named.values()}

    def watch(self, model: nn.Module, group: Group) -> None:
        """Have the engines that hold the parameters unshard them where `model` uses them."""
        for owner in self._owners:
            self._handles += owner.hooks.serve(model)
        if self._named and group.rank == 0:
            logger.info(
                "%d parameters are shared with another engine, which stores them: %s%s", len(self._named),
                ", ".join(list(self._named)[:2]), ", ..." if len(self._named) > 2 else "",
            )  # fmt: skip

    def check_present(self) -> None:
        """Raise if an engine that stores parameters of this one was closed and they are still sharded."""
        if any(owner.is_closed for owner in self._owners):
            missing = [name for name, parameter in self._named.items() if is_sharded(parameter)]
            if missing:
                raise RuntimeError(
                    f"the engine that stores {missing[0]} is closed. Close it after the engines that share its "
                    "parameters, or call initialize again for this one."
                )

    def release(self) -> None:
        """Remove the hooks of the other engines from the modules of this one."""
        while self._handles:
            self._handles.pop().remove()
        self._owners.clear()
        self._engines.clear()
