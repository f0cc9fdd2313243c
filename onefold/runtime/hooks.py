"""Hooks on modules and parameters that tell the schedule what happens. They hold it weakly: no model keeps it alive.

[Note: where a backward begins and ends]
`engine.backward` brackets its backward itself. A bare `loss.backward()` begins when the first gradient reaches an
output of the outermost module (or, when the model was called some other way, when the first gradient lands), and ends
in a callback of the autograd engine, queued there. It is queued from the outermost graph task only: reentrant
checkpointing runs nested ones, whose callbacks come too early.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from onefold.runtime.schedule import Schedule
from onefold.runtime.unit import Run, Unit


class Hooks:
    """All hooks of one engine.

    `begin` is called when a bare backward starts, and begins it on the schedule; `loaded` after `load_state_dict`.
    `watch`: gathers may be in flight between steps, so reading a parameter must wait for them.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        begin: weakref.WeakMethod[Callable[[], None]],
        loaded: weakref.WeakMethod[Callable[[], None]],
        watch: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._schedule = schedule
        self._begin = begin
        self._loaded = loaded
        self._handles: list[RemovableHandle] = []
        self._watched: list[weakref.ref[nn.Module]] = []
        me = weakref.ref(self)
        add = self._handles.append
        for unit in schedule.units:
            add(unit.module.register_forward_pre_hook(_before_forward(me, unit.index)))
            for run in unit.trained:
                for index, parameter in enumerate(run.parameters):
                    hook = _on_gradient(me, weakref.ref(unit), weakref.ref(run), index)
                    add(parameter.register_post_accumulate_grad_hook(hook))
        add(model.register_forward_pre_hook(_recover(me)))
        add(model.register_forward_hook(_after_root_forward(me)))
        add(model.register_state_dict_pre_hook(_around_state_dict(me, Hooks.settle_all)))
        add(model.register_load_state_dict_pre_hook(_around_state_dict(me, Hooks.settle_all)))
        add(model.register_load_state_dict_post_hook(_around_state_dict(me, Hooks.after_load)))
        if watch:
            self._watch(model, me)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for reference in self._watched:
            module = reference()
            if module is not None:
                module.__dict__["_parameters"] = dict(module._parameters)
        self._watched.clear()

    def _watch(self, model: nn.Module, me: weakref.ref[Hooks]) -> None:
        owner = {
            id(parameter): unit.index
            for unit in self._schedule.units
            for run in unit.runs
            for parameter in run.parameters
        }
        for module in model.modules():
            units = {owner[id(p)] for p in module._parameters.values() if p is not None and id(p) in owner}
            if units:
                module.__dict__["_parameters"] = WatchedParameters(module._parameters, me, sorted(units))
                self._watched.append(weakref.ref(module))

    def begin_bare_backward(self) -> None:
        if self._schedule.in_backward:
            return
        begin = self._begin()
        if begin is None:
            return
        begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._schedule.end_backward)  # type: ignore[attr-defined]

    def land(self, unit: Unit, run: Run, index: int) -> None:
        self.begin_bare_backward()
        self._schedule.land(unit, run, index)

    def before_forward(self, index: int) -> None:
        self._schedule.before_forward(self._schedule.units[index])

    def settle(self, indices: list[int]) -> None:
        for index in indices:
            self._schedule.settle(self._schedule.units[index])

    def settle_all(self) -> None:
        self._schedule.settle_all()

    def after_load(self) -> None:
        loaded = self._loaded()
        if loaded is not None:
            loaded()

    def serves(self, module: nn.Module) -> bool:
        """A deep copy of the model carries these hooks along; it is not ours to serve."""
        return self._model() is module

    def recover(self) -> None:
        """A bare backward that raised never reached its callback: the next forward outside any backward says so."""
        if self._schedule.in_backward and not inside_backward():
            self._schedule.abort_backward()


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's parameter table that finishes gathers in flight before anyone reads a parameter out of it.

    Forward hooks cover a module's own forward; this covers parameters read from outside (a loss that reads
    `head.weight`, an average over `model.parameters()`). Copies of it are plain dicts.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], hooks: weakref.ref[Hooks], units: list[int]
    ) -> None:
        super().__init__(parameters)
        self._hooks = hooks
        self._units = units

    def _settle(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.settle(self._units)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._settle()
        return super().__getitem__(name)

    def items(self) -> Any:
        self._settle()
        return super().items()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def __reduce__(self) -> Any:
        return dict, (dict(super().items()),)


def inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _before_forward(me: weakref.ref[Hooks], index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        hooks = me()
        if hooks is not None:
            hooks.before_forward(index)

    return hook


def _on_gradient(
    me: weakref.ref[Hooks], unit: weakref.ref[Unit], run: weakref.ref[Run], index: int
) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        hooks, its_unit, its_run = me(), unit(), run()
        if hooks is not None and its_unit is not None and its_run is not None:
            hooks.land(its_unit, its_run, index)

    return hook


def _recover(me: weakref.ref[Hooks]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        hooks = me()
        if hooks is not None and hooks.serves(module):
            hooks.recover()

    return hook


def _after_root_forward(me: weakref.ref[Hooks]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        # A recomputation inside a backward belongs to that backward.
        hooks = me()
        if hooks is None or not hooks.serves(module) or not torch.is_grad_enabled() or inside_backward():
            return
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, begin, mode="any")

    def begin(gradient: torch.Tensor) -> None:
        hooks = me()
        if hooks is not None:
            hooks.begin_bare_backward()

    return hook


def _around_state_dict(me: weakref.ref[Hooks], act: Callable[[Hooks], None]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        hooks = me()
        if hooks is not None:
            act(hooks)

    return hook


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
