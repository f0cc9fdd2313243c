"""Torch functions on sharded parameters, inside a pass: penalties over `parameters()`, `functional_call`, weight norms.

[Note: one operation on a sharded parameter]
The units of the parameters are unsharded, the function runs, and they are resharded. Where autograd recorded it, the
units are unsharded again before the first of its nodes runs backward, and resharded when the last of them has. A result
that is a view of the parameter needs its memory: then the unit stays unsharded until the pass ends, and that memory is
never emptied, since the view may be kept for longer. A write would be lost when the unit is resharded, so it raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from onefold.runtime.held import at_rest, name_of
from onefold.runtime.torch_internals import inside_backward, inside_transform, tensors_in
from onefold.runtime.unit import Unit


def operate(
    units: Iterable[Unit],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    resting: list[nn.Parameter],
) -> Any:
    """`func(*args, **kwargs)`, with the units unsharded meanwhile: they come in one order on every rank."""
    again = inside_backward()
    used = list(units)
    with ExitStack() as stack:
        for unit in used:
            stack.callback(unit.post_forward, recompute=again)
            unit.pre_forward(recompute=again)
        versions = [parameter._version for parameter in resting]
        result = func(*args, **kwargs)
        written = [p for p, version in zip(resting, versions, strict=True) if p._version != version]
        if written:
            names = [name_of(parameter) for parameter in written]
            raise at_rest(names, f"{getattr(func, '__name__', func)} writes inside a forward or backward")
        nodes = list(_nodes_of(result, (args, kwargs))) if torch.is_grad_enabled() else []
        for unit in used:
            if unit.is_seen_by(tensors_in(result)):
                unit.keep_for_pass()
                unit.hand_out()
            elif inside_transform():
                unit.keep_for_pass()
            elif nodes:
                _Recorded.watch(unit, result, nodes, again=again)
    return result


def _nodes_of(result: Any, inputs: Any) -> Iterable[Any]:
    """The nodes that autograd has made of one torch function."""
    before = [tensor.grad_fn for tensor in tensors_in(inputs)]
    waiting = [tensor.grad_fn for tensor in tensors_in(result)]
    seen: list[Any] = []
    while waiting:
        node = waiting.pop()
        if node is None or hasattr(node, "variable") or any(node is other for other in (*before, *seen)):
            continue
        seen.append(node)
        waiting += [following for following, _ in node.next_functions]
    return seen


class _Recorded:
    """An operation that autograd will run backward: a call of the unit, as far as the schedule knows."""

    def __init__(self, unit: Unit, num_nodes: int) -> None:
        self._unit = weakref.ref(unit)
        self._call = unit.begin_call()
        self._num_nodes = self._left = num_nodes

    @staticmethod
    def watch(unit: Unit, result: Any, nodes: list[Any], *, again: bool) -> None:
        recorded = _Recorded(unit, len(nodes))
        first = [tensor.grad_fn for tensor in tensors_in(result)]
        for node in nodes:
            if any(node is output for output in first):
                node.register_prehook(recorded.begin)
            node.register_hook(recorded.end)
        if again:
            unit.uses.backwards.add(recorded._call)  # inside the backward that will run through it at once

    def begin(self, *_: Any) -> None:
        unit = self._unit()
        if unit is not None and self._call not in unit.uses.backwards:
            self._left = self._num_nodes
            unit.pre_backward(self._call)
            if torch.is_grad_enabled():
                unit.keep_for_pass()

    def end(self, *_: Any) -> None:
        unit = self._unit()
        self._left -= 1
        if unit is not None and self._left == 0:
            unit.post_backward([self._call])
