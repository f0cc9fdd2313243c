"""Forward and backward of each unit on a timeline. The hooks exist only while a timeline is recorded.

A forward lasts as long as the call of the unit's module. Its backward begins when a node that produced one of its
outputs is about to run. It ends when a node that produced one of its inputs is about to run, or with the unit's last
gradient if no input has a gradient. The backward of a unit that encloses others ends with the last gradient of all
([Note: where a unit's backward begins and ends] in call_hooks.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from onefold.recorder import Recorder, Span, Track
from onefold.runtime.call_hooks import ModuleHook, producers
from onefold.runtime.hooks import Hooks
from onefold.runtime.schedule import Schedule
from onefold.runtime.torch_internals import inside_backward, inside_transform, tensors_in
from onefold.runtime.unit import Unit

_ENDS = "onefold spans that end"


class _Call:
    """Spans of one call of a unit's module and of its backward."""

    def __init__(self, unit: Unit, forward: Span) -> None:
        self.unit = unit
        self.forward = forward
        self.backward: Span | None = None
        self.is_over = False

    def begin_backward(self) -> None:
        """Start the span of the backward."""
        if self.backward is None and not self.is_over:
            self.backward = _start("backward", self.unit)

    def mark_end(self) -> None:
        """Extend the span of the backward to the present time."""
        if self.backward is not None and not self.is_over:
            self.backward.finish()

    def end_backward(self) -> None:
        """End the span of the backward."""
        self.mark_end()
        self.is_over = True

    def forget(self) -> None:
        """End the call, whose backward has ended or will not run."""
        if self.backward is not None and self.backward.ended is None:
            self.mark_end()
        self.is_over = True


class UnitSpans:
    """Spans of all units of one engine, until `remove`."""

    def __init__(self, hooks: Hooks, schedule: Schedule) -> None:
        self._handles: list[RemovableHandle] = []
        self._running: list[_Call] = []
        # Calls whose backward has not ended.
        self._calls: dict[Unit, list[_Call]] = {unit: [] for unit in schedule.units}
        me, add = weakref.ref(hooks), self._handles.append
        for unit in schedule.units:
            module = unit.module
            before = ModuleHook(me, module, self._before_forward, unit)
            after = ModuleHook(me, module, self._after_forward, unit)
            add(module.register_forward_pre_hook(before, with_kwargs=True))
            add(module.register_forward_hook(after, always_call=True))
            around = [self._calls[other] for other in schedule.units if other.encloses and other is not unit]
            ready = _gradient_ready([self._calls[unit], *around])
            parameters = [parameter for param in unit.trained_params for parameter in param.parameters]
            self._handles += [p.register_post_accumulate_grad_hook(ready) for p in parameters]

    def remove(self) -> None:
        """Remove the hooks. Those in a graph that the user keeps do nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.end_backwards()

    def end_backwards(self) -> None:
        """End the spans of all units when a backward has ended."""
        for calls in self._calls.values():
            for call in calls:
                call.forget()
            calls.clear()

    def _before_forward(self, hooks: Hooks, unit: Unit, *arguments: Any) -> None:
        again = inside_backward()
        span = _start("recompute" if again else "forward", unit)
        if span is None:
            return
        for old in [old for old in self._calls[unit] if old.backward is not None and not again]:
            old.forget()  # its backward was not ended by the engine
            self._calls[unit].remove(old)
        call = _Call(unit, span)
        self._running.append(call)
        if not unit.encloses and torch.is_grad_enabled() and not inside_transform():
            for tensor in tensors_in(arguments):
                node: Any = tensor.grad_fn
                if node is not None:
                    node.metadata.setdefault(_ENDS, []).append(call)
                    node.register_prehook(_hook(call.end_backward))

    def _after_forward(self, hooks: Hooks, unit: Unit, args: Any, output: Any) -> None:
        while self._running:  # including calls that a stopped recomputation has left behind
            call = self._running.pop()
            call.forward.finish()
            if call.unit is unit:
                break
        else:
            return
        if torch.is_grad_enabled() and not inside_transform():
            self._calls[unit].append(call)
            for node in producers(output):
                node.register_prehook(_begins(node.metadata.setdefault(_ENDS, []), call))


def _start(name: str, unit: Unit) -> Span | None:
    recorder = Recorder.active
    if recorder is None:
        return None
    details = {"elements": sum(param.layout.numel for param in unit.params)}
    return recorder.start(Track.COMPUTE, f"{name} {unit.name}", unit.name, details)


def _hook(act: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: act()


def _begins(ends: list[_Call], call: _Call) -> Callable[..., None]:
    """Return a hook that ends the backwards of other calls before it begins this one's."""

    def hook(*_: Any) -> None:
        for other in ends:
            if other is not call:
                other.end_backward()
        call.begin_backward()

    return hook


def _gradient_ready(calls_of_units: list[list[_Call]]) -> Callable[..., None]:
    """Return a hook on a gradient that extends the backwards of its unit and of enclosing units to the present."""

    def hook(*_: Any) -> None:
        for calls in calls_of_units:
            for call in calls:
                call.mark_end()

    return hook
