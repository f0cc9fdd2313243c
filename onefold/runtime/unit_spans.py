"""Forward and backward of each unit on a timeline: hooks that are there while somebody records, and at no other time.

A forward lasts as long as the call of the unit's module. Its backward begins when a node that produced one of its
outputs is about to run, and ends when a node that produced one of its inputs is, or with the unit's last gradient where
no input has one; that of a unit that encloses others ends with the last gradient of all ([Note: where a unit's backward
begins and ends] in hooks.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from onefold.recorder import Recorder, Span, Track
from onefold.runtime.hooks import Hooks, ModuleHook, producers
from onefold.runtime.schedule import Schedule
from onefold.runtime.torch_internals import inside_backward, inside_transform, tensors_in
from onefold.runtime.unit import Unit

_ENDS = "onefold spans that end"


class _Call:
    """One call of a unit's module, and its backward."""

    def __init__(self, unit: Unit, forward: Span) -> None:
        self.unit = unit
        self.forward = forward
        self.backward: Span | None = None
        self.is_over = False

    def begin_backward(self) -> None:
        if self.backward is None and not self.is_over:
            self.backward = _start("backward", self.unit)

    def mark_end(self) -> None:
        if self.backward is not None and not self.is_over:
            self.backward.finish()

    def end_backward(self) -> None:
        self.mark_end()
        self.is_over = True

    def forget(self) -> None:
        """Its backward is over, or never comes."""
        if self.backward is not None and self.backward.ended is None:
            self.mark_end()
        self.is_over = True


class UnitSpans:
    """The spans of all units of one engine, from its making until `remove`."""

    def __init__(self, hooks: Hooks, schedule: Schedule) -> None:
        self._handles: list[RemovableHandle] = []
        self._running: list[_Call] = []
        # Calls whose backward is to come, or under way.
        self._calls: dict[Unit, list[_Call]] = {unit: [] for unit in schedule.units}
        me, add = weakref.ref(hooks), self._handles.append
        for unit in schedule.units:
            module = unit.module
            before = ModuleHook(me, module, self._before_forward, unit)
            after = ModuleHook(me, module, self._after_forward, unit)
            add(module.register_forward_pre_hook(before, with_kwargs=True))
            add(module.register_forward_hook(after, always_call=True))
            around = [self._calls[other] for other in schedule.units if other.encloses and other is not unit]
            landed = _landed([self._calls[unit], *around])
            parameters = [parameter for param in unit.trained for parameter in param.parameters]
            self._handles += [p.register_post_accumulate_grad_hook(landed) for p in parameters]

    def remove(self) -> None:
        """No hooks any more; those in a graph that somebody keeps find everything over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.end_backwards()

    def end_backwards(self) -> None:
        """A backward is over, and so is that of every unit."""
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
            old.forget()  # of a backward that the engine did not bracket
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
        while self._running:  # calls that a stopped recomputation has left behind are over too
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
    """Where one call's backward ends and another's begins, the end comes first."""

    def hook(*_: Any) -> None:
        for other in ends:
            if other is not call:
                other.end_backward()
        call.begin_backward()

    return hook


def _landed(calls_of_units: list[list[_Call]]) -> Callable[..., None]:
    """A gradient is there: what is under way of its unit's backward, and of those around it, lasts until now."""

    def hook(*_: Any) -> None:
        for calls in calls_of_units:
            for call in calls:
                call.mark_end()

    return hook
