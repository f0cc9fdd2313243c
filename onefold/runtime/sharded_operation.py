"""One torch function on sharded parameters, inside a pass.

[Note: one operation on a sharded parameter]
The units of the parameters are unsharded, the function runs, and the units are resharded. If autograd recorded the
function, the units are unsharded again before the first of its nodes runs backward, and resharded after the last. A
result that is a view of a parameter needs its memory: the unit then stays unsharded until the pass ends, and that
memory is never emptied, because the view may be kept for longer. A write would be lost when the unit is resharded, so
it raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from onefold.runtime.parameter_proxy import name_of, sharded_error
from onefold.runtime.torch_internals import inside_backward, inside_transform, tensors_in
from onefold.runtime.unit import Unit


def run_on_sharded(
    units: Sequence[Unit],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sharded: list[nn.Parameter],
) -> Any:
    """Run a torch function on sharded parameters of some units, which are in the same order on every rank.

    Examples are penalties over `parameters()`, `functional_call` and weight norms.
    """
    recompute = inside_backward()
    with ExitStack() as stack:
        for unit in units:
            stack.callback(unit.end_use, recompute=recompute)
            unit.begin_use(recompute=recompute)
        versions = [parameter._version for parameter in sharded]
        result = func(*args, **kwargs)
        written = [p for p, version in zip(sharded, versions, strict=True) if p._version != version]
        if written:
            names = [name_of(parameter) for parameter in written]
            raise sharded_error(names, f"{getattr(func, '__name__', func)} writes inside a forward or backward")
        nodes = list(_nodes_of(result, (args, kwargs))) if torch.is_grad_enabled() else []
        for unit in units:
            if unit.is_seen_by(tensors_in(result)):
                unit.keep_for_pass()
                unit.hand_out()
            elif inside_transform():
                unit.keep_for_pass()
            elif nodes:
                _RecordedOperation.watch(unit, result, nodes, recompute=recompute)
    return result


def _nodes_of(result: Any, inputs: Any) -> Iterable[Any]:
    """Return the nodes that autograd has created for one torch function."""
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


class _RecordedOperation:
    """Operation that autograd will run backward: one call of the unit."""

    def __init__(self, unit: Unit, num_nodes: int) -> None:
        self._unit = weakref.ref(unit)
        self._call = unit.begin_call()
        self._num_nodes = self._left = num_nodes

    @staticmethod
    def watch(unit: Unit, result: Any, nodes: list[Any], *, recompute: bool) -> None:
        """Register hooks on the nodes of an operation."""
        recorded = _RecordedOperation(unit, len(nodes))
        first = [tensor.grad_fn for tensor in tensors_in(result)]
        for node in nodes:
            if any(node is output for output in first):
                node.register_prehook(recorded.begin)
            node.register_hook(recorded.end)
        if recompute:
            unit.mark_in_backward(recorded._call)

    def begin(self, *_: Any) -> None:
        """Unshard before the first node runs backward."""
        unit = self._unit()
        if unit is not None and self._call not in unit.uses.backwards:
            self._left = self._num_nodes
            unit.pre_backward(self._call)

    def end(self, *_: Any) -> None:
        """Reshard after the last node has run backward."""
        unit = self._unit()
        self._left -= 1
        if unit is not None and self._left == 0:
            unit.post_backward([self._call])
