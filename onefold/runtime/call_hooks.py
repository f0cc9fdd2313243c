"""Hooks of one call of a unit's module: on the module, and on the autograd nodes where its backward begins and ends.

[Note: where a unit's backward begins and ends]
Units whose parameters are sharded are watched call by call. The backward of a call begins when the node that produced
one of its outputs is about to run. For an output that is a view, the node of its base counts too, because an in-place
write to the view removes the view's own node from the graph. Tensors that a call stores on its modules (the loss of a
router) are outputs too. The backward of a call ends when the node that produced one of its inputs is about to run; if
that node also begins another unit's backward, the end is handled first. The hooks are on nodes, and tensors are not
passed through a function of ours, so that a module may write to its inputs in place. A backward that is itself recorded
(`create_graph`) creates nodes without hooks: the units that it uses stay unsharded until the pass ends.

[Note: hooks in compiled regions]
Before a module uses parameters that stay unsharded, its hook only waits for the all-gather of their last update. If the
user compiles more than one unit in a region, such a hook would break the graph at each unit. So it is left out of the
graph. Instead, every engine waits for all updates before each forward of its model, from the moment when the first
region with such a hook is traced. Hooks that unshard parameters break the graph, as they do under FSDP2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from operator import is_
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from onefold.runtime.torch_internals import constant_in_graphs, may_hold_tensors, outside_compiler, tensors_in


class ModuleHook:
    """Module hook that acts only for the module it was registered on, because copies of a model have its hooks too."""

    def __init__(self, target: weakref.ref[Any], owner: nn.Module, act: Callable[..., None], *fixed: Any) -> None:
        self._target, self._owner, self._act, self._fixed = target, weakref.ref(owner), act, fixed

    @outside_compiler
    def __call__(self, module: nn.Module, *args: Any) -> None:
        target = self._target()
        if target is not None and module is self._owner():
            self._act(target, *self._fixed, *args)

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return self

    def __reduce__(self) -> Any:
        return _absent_hook, ()


class CompiledRegionListener(Protocol):
    """The hooks of one engine, as far as compiled regions use them."""

    def enter_compiled_region(self) -> None: ...


listeners_to_compiled_regions: weakref.WeakSet[CompiledRegionListener] = weakref.WeakSet()


@constant_in_graphs
def note_compiled_region() -> bool:
    """Have all engines wait for their updates, now and before each forward. Called while a region is traced."""
    for listener in list(listeners_to_compiled_regions):
        listener.enter_compiled_region()
    return True


class UpdateHook(ModuleHook):
    """Module hook that waits for updates before parameters are used ([Note: hooks in compiled regions])."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling():
            note_compiled_region()
            return
        super().__call__(module, *args)


def _nothing(*_: Any) -> None:
    """Do nothing: the hook of a model that was pickled while an engine managed it."""


def _absent_hook() -> Callable[..., None]:
    return _nothing


def while_alive(act: Callable[..., None], reference: weakref.ref[Any], *given: Any) -> Callable[..., None]:
    """Return a hook that calls `act` with the target of a weak reference and what was given, while the target lives."""

    def hook(*_: Any) -> None:
        target = reference()
        if target is not None:
            act(target, *given)

    return hook


def is_embedding_lookup(module: nn.Module, output: Any) -> bool:
    """Return whether a call was a plain `nn.Embedding` lookup, whose backward needs the weight's shape but no values.

    A hook of the user or an overridden forward may have used the weight in other ways.
    """
    return (
        type(module) is nn.Embedding
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None  # type: ignore[attr-defined]
        and isinstance(output, torch.Tensor)
        and output.grad_fn is not None
        and output.grad_fn.name() == "EmbeddingBackward0"
        and all(isinstance(hook, ModuleHook) for hook in module._forward_hooks.values())
        and all(isinstance(hook, ModuleHook) for hook in module._forward_pre_hooks.values())
        and not _global_forward_hooks
        and not _global_forward_pre_hooks
    )


_ENDS = "onefold ends"


def hook_end(end: Callable[..., None], arguments: Any) -> tuple[list[Any], bool]:
    """Have `end` called when the backward of a call is over.

    Return the nodes that produced the call's arguments, and whether `end` will be called.
    """
    nodes, seen = [], False
    for tensor in tensors_in(arguments):
        node: Any = tensor.grad_fn
        if node is not None:
            nodes.append(node)
            node.metadata.setdefault(_ENDS, []).append(end)
            node.register_prehook(end)
        elif tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            # A leaf gets its gradient before parameters of the same call do, so wait for the end of the graph task.
            once: list[RemovableHandle] = []
            once.append(tensor.register_hook(partial(_after_graph_task, end, once)))
        else:
            continue
        seen = True
    return nodes, seen


def hook_begin(node: Any, begin: Callable[..., None]) -> None:
    """Have `begin` called before a node runs, and after the backwards of other calls that end there.

    A unit is thus resharded before the next one is unsharded.
    """
    ends: list[Callable[..., None]] = node.metadata.setdefault(_ENDS, [])

    def hook(*_: Any) -> None:
        for end in ends:
            end()
        begin()

    node.register_prehook(hook)


def _after_graph_task(then: Callable[..., None], handle: list[RemovableHandle], *_: Any) -> None:
    while handle:
        handle.pop().remove()  # the leaf may be an input of every step
    torch.autograd.Variable._execution_engine.queue_callback(then)  # type: ignore[attr-defined]


_OF_PLAIN_MODULE = {*nn.Module().__dict__}
_OF_EVERY_MODULE = {*_OF_PLAIN_MODULE, "_onefold_external"}


class StoredTensors:
    """The search for tensors that calls store on a module and on those inside it, after every call.

    [Note: the search for stored tensors]
    Any call may store a tensor under any attribute, so every call searches all of them. What can be skipped is found
    once: the attributes that every module has, which its constructor sets first. The list of modules is compared with
    the tables of children in every call, and made again if it differs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._list_modules()

    def _list_modules(self) -> None:
        modules = list(self._module.modules())
        self._tables = [module._modules for module in modules]
        self._children = [child for table in self._tables for child in table.values()]
        self._attributes: list[tuple[dict[str, Any], int]] = []
        for module in modules:
            attributes = module.__dict__
            first = set(islice(attributes, len(_OF_PLAIN_MODULE)))
            self._attributes.append((attributes, len(first) if first == _OF_PLAIN_MODULE else 0))

    def find(self) -> list[Any]:
        """Return the values of attributes that may hold tensors."""
        children = [*chain.from_iterable(map(dict.values, self._tables))]
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._list_modules()
        return [
            value
            for attributes, first in self._attributes
            for name, value in islice(attributes.items(), first, None)
            if type(value) not in _WITHOUT_TENSORS and name not in _OF_EVERY_MODULE and may_hold_tensors(value)
        ]


_WITHOUT_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, MethodType, FunctionType))


def stored_tensors(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module, and of those inside it, that may hold tensors, with their names."""
    return [
        (f"{path}.{name}" if path else name, value)
        for path, inner in module.named_modules()
        for name, value in inner.__dict__.items()
        if name not in _OF_EVERY_MODULE and may_hold_tensors(value)
    ]


def producers(output: Any) -> Iterable[Any]:
    """Yield the nodes before which the backward of an output begins."""
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            yield tensor.grad_fn
            base = tensor._base if tensor._is_view() else None
            if base is not None and base.grad_fn is not None:
                yield base.grad_fn
