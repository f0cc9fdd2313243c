"""Detection of changes to a model's modules and parameters after `initialize`.

torch's registration hooks report every parameter and every module that a module gets, and handles report parameters
that were moved. Both set a mark, and the next forward or step checks the model once. Changes without a hook (a
container's `insert`, a parameter that `to("meta")` replaces) are found by the number of a container's children and by
one parameter per unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from onefold.runtime.unit import Unit

# Engines may share modules.
_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ModelWatch]] = weakref.WeakKeyDictionary()


class ModelWatch:
    """Modules and parameters of a model as they were at `initialize`."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = weakref.ref(model)
        self._changed = False
        # Names of the parameters in flat parameters.
        self._names = {id(p): name for unit in units for param in unit.params for name, p in param.named_parameters()}
        self._device = units[0].params[0].full.device if units else None
        self._known: dict[str, int] = {}
        # Frozen parameters that were added since. If they are unfrozen later, no optimizer trains them.
        self._newcomers: list[weakref.ref[nn.Parameter]] = []
        self._samples: list[tuple[weakref.ref[nn.Module], str, int]] = []
        self._remember(model)
        self._first = set(self._known.values())
        first = {id(unit.params[0].parameters[0]) for unit in units}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in first:
                    self._samples.append((weakref.ref(module), name, id(parameter)))
        self._handles: list[RemovableHandle] = [
            register_module_module_registration_hook(_registered),
            register_module_parameter_registration_hook(_registered),
        ]

    def _remember(self, model: nn.Module) -> None:
        self._known = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        self._containers = [
            (weakref.ref(module), len(module._modules))
            for module in model.modules()
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        ]
        for module in model.modules():
            _watched.setdefault(module, weakref.WeakSet()).add(self)

    @property
    def model(self) -> nn.Module | None:
        """The model, or None if it was freed."""
        return self._model()

    def mark(self) -> None:
        """Have the model checked at the next forward or step."""
        self._changed = True

    def check(self) -> None:
        """Raise if the model has parameters that would not be trained as the user expects."""
        model = self._model()
        trains = any((new := reference()) is not None and new.requires_grad for reference in self._newcomers)
        if model is None or not (self._changed or trains or self._looks_changed()):
            return
        problems = [
            problem
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if (problem := self._problem(name, parameter))
        ]
        if problems:
            more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
            raise RuntimeError(
                f"The model was changed after initialize: {'; '.join(problems[:2])}{more}. Change the model before "
                "initialize or call initialize again; add parameters that are not trained with requires_grad=False; "
                f"move a model that was moved back (model.to('{self._device}'))."
            )
        self._newcomers = [
            weakref.ref(parameter)
            for _, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) not in self._first and not parameter.requires_grad
        ]
        self._remember(model)
        self._changed = False

    def _problem(self, name: str, parameter: nn.Parameter) -> str | None:
        if id(parameter) in self._names and parameter.device != self._device:
            return f"{name} was moved to {parameter.device}"
        if self._known.get(name) == id(parameter):
            is_new = any(reference() is parameter for reference in self._newcomers)
            return f"{name} was added and requires a gradient now" if is_new and parameter.requires_grad else None
        if id(parameter) in self._names:
            return f"{name} is now tied to {self._names[id(parameter)]}"
        if parameter.is_meta:
            return f"{name} is on the meta device"
        if not parameter.requires_grad:
            return None
        return f"{name} was {'replaced' if name in self._known else 'added'} and requires a gradient"

    def _looks_changed(self) -> bool:
        for reference, length in self._containers:
            container = reference()
            if container is not None and len(container._modules) != length:
                return True
        for owner, name, parameter in self._samples:
            module = owner()
            if module is not None and id(module._parameters.get(name)) != parameter:
                # `functional_call` replaces parameters by tensors for one call.
                return isinstance(module._parameters.get(name), nn.Parameter)
        return False

    def remove(self) -> None:
        """Remove the registration hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _registered(module: nn.Module, name: str, taken: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a container of layers that a forward makes, such as a slice of a ModuleList
    for watch in _watched.get(module, ()):
        watch.mark()
