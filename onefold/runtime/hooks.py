"""Hooks on modules and parameters that tell the schedule what happens. They hold it weakly: no model keeps it alive.

[Note: where a backward begins and ends]
`engine.backward` brackets its backward itself. A bare `loss.backward()` begins when its first gradient lands
(`autograd.grad` lands none, and is nobody's backward) and ends in a callback of the autograd engine. The callback is
queued when a gradient reaches an output of the outermost module, so that it belongs to the outermost graph task:
reentrant checkpointing runs nested ones, whose callbacks come too early. Only where the model was called some other
way is it queued by the first landing itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from onefold.runtime.schedule import Schedule
from onefold.runtime.trees import tensors_in
from onefold.runtime.unit import Run, Unit


class Listener(Protocol):
    """The engine, as far as its hooks know it."""

    def begin_bare_backward(self) -> None:
        """Somebody called `backward` on a loss; begin it on the schedule."""

    def abort_backward(self) -> None:
        """A bare backward raised and will not end."""

    def parameters_loaded(self, units: list[Unit]) -> None:
        """`load_state_dict` has written parameters of these units."""


class Hooks:
    """All hooks of one engine. `watch`: gathers may be in flight between steps, so reading a parameter waits."""

    def __init__(self, model: nn.Module, schedule: Schedule, listener: Listener, *, watch: bool) -> None:
        self._schedule = schedule
        self._listener = weakref.ref(listener)
        # The callback of the bare backward under way; dead when that backward raised.
        self._bare: weakref.ref[_BareBackward] | None = None
        self._handles: list[RemovableHandle] = []
        self._watched: list[weakref.ref[nn.Module]] = []
        add = self._handles.append
        me = weakref.ref(self)
        owner = {
            id(parameter): unit.index for unit in schedule.units for run in unit.runs for parameter in run.parameters
        }
        for unit in schedule.units:
            add(unit.module.register_forward_pre_hook(_hook(me, unit.module, _before_forward, unit.index)))
            for run in unit.trained:
                for index, parameter in enumerate(run.parameters):
                    hook = _on_gradient(me, weakref.ref(unit), weakref.ref(run), index)
                    add(parameter.register_post_accumulate_grad_hook(hook))
        for module in model.modules():
            units = sorted({owner[id(p)] for p in module._parameters.values() if id(p) in owner})
            if units:
                add(module.register_load_state_dict_pre_hook(_hook(me, module, _settle, units)))
                add(module.register_load_state_dict_post_hook(_hook(me, module, _after_load, units)))
                add(module.register_state_dict_pre_hook(_hook(me, module, _settle, units)))
            if units and watch:
                module.__dict__["_parameters"] = WatchedParameters(module._parameters, me, units)
                self._watched.append(weakref.ref(module))
        add(model.register_forward_pre_hook(_hook(me, model, _recover)))
        add(model.register_forward_hook(_hook(me, model, _after_root_forward)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for reference in self._watched:
            module = reference()
            if module is not None:
                module.__dict__["_parameters"] = dict(module._parameters)
        self._watched.clear()

    def expect_end(self) -> None:
        """Inside a graph task that nobody brackets: have autograd call back when it ends."""
        listener = self._listener()
        if listener is None or (self._bare is not None and self._bare() is not None):
            return
        if self._schedule.in_backward:
            if self._bare is None:
                return  # the engine's own
            listener.abort_backward()
        backward = _BareBackward(self)
        self._bare = weakref.ref(backward)
        torch.autograd.Variable._execution_engine.queue_callback(backward)  # type: ignore[attr-defined]

    def end_bare_backward(self) -> None:
        self._bare = None
        if self._schedule.in_backward:
            self._schedule.end_backward()

    def recover(self) -> None:
        """Before a forward outside any backward: one that is still open has raised."""
        listener = self._listener()
        if listener is not None and self._schedule.in_backward and not inside_backward():
            listener.abort_backward()
            self._bare = None

    def land(self, unit: Unit, run: Run, index: int) -> None:
        listener = self._listener()
        if listener is None:
            return
        self.expect_end()
        if not self._schedule.in_backward:
            try:
                listener.begin_bare_backward()
            except RuntimeError:
                # The backward is refused: its gradient must not be found here by the next one.
                run.parameters[index].grad = None
                raise
        self._schedule.land(unit, run, index)

    def before_forward(self, unit: int) -> None:
        self._schedule.before_forward(self._schedule.units[unit])

    def settle(self, units: list[int]) -> None:
        for unit in units:
            self._schedule.settle(self._schedule.units[unit])

    def parameters_loaded(self, units: list[int]) -> None:
        listener = self._listener()
        if listener is not None:
            listener.parameters_loaded([self._schedule.units[unit] for unit in units])


class _BareBackward:
    """The callback that ends a bare backward. Only autograd's graph task holds it: when that dies, so does this."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = weakref.ref(hooks)

    def __call__(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.end_bare_backward()


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
        self._settle()
        return dict, (dict(super().items()),)


def inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _hook(me: weakref.ref[Hooks], owner: nn.Module, act: Callable[..., None], *fixed: Any) -> Callable[..., None]:
    """A module hook that acts for its own module only: a deep copy of a model carries its hooks along."""
    mine = weakref.ref(owner)

    def hook(module: nn.Module, *args: Any) -> None:
        hooks = me()
        if hooks is not None and module is mine():
            act(hooks, *fixed, *args)

    return hook


def _on_gradient(
    me: weakref.ref[Hooks], unit: weakref.ref[Unit], run: weakref.ref[Run], index: int
) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        hooks, its_unit, its_run = me(), unit(), run()
        if hooks is not None and its_unit is not None and its_run is not None:
            hooks.land(its_unit, its_run, index)

    return hook


def _before_forward(hooks: Hooks, unit: int, *_: Any) -> None:
    hooks.before_forward(unit)


def _settle(hooks: Hooks, units: list[int], *_: Any) -> None:
    hooks.settle(units)


def _after_load(hooks: Hooks, units: list[int], *_: Any) -> None:
    hooks.parameters_loaded(units)


def _recover(hooks: Hooks, *_: Any) -> None:
    hooks.recover()


def _after_root_forward(hooks: Hooks, args: Any, output: Any) -> None:
    # A recomputation inside a backward belongs to that backward.
    if not torch.is_grad_enabled() or inside_backward():
        return
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    me = weakref.ref(hooks)

    def begin(gradient: torch.Tensor) -> None:
        alive = me()
        if alive is not None:
            alive.expect_end()

    if tensors:
        register_multi_grad_hook(tensors, begin, mode="any")
