"""Hooks on modules and parameters that tell the schedule what happens. They hold it weakly: no model keeps it alive.

[Note: where a backward begins and ends]
`engine.backward` brackets its backward itself. A bare `loss.backward()` begins when its first gradient lands
(`autograd.grad` lands none, and is nobody's backward) and ends in a callback of the autograd engine. The callback is
queued when a gradient reaches an output of the outermost module, so that it belongs to the outermost graph task:
reentrant checkpointing runs nested ones, whose callbacks come too early. Only where the model was called some other
way is it queued by the first landing itself.

[Note: where a unit's backward begins and ends]
Units whose parameters are sharded at rest are watched call by call. A call's backward begins when the node that
produced one of its outputs is about to run; of an output that is a view also the node of its base, since writing to
the view in place takes the view's own node out of the graph. Tensors that a call leaves on its modules (the loss of a
router) are outputs too. It ends when the node that produced one of its inputs is about to run; where that is an output
of another unit, the end comes first. Nodes are watched and not tensors passed through a function of ours, so that a
module may write to its inputs in place. A backward that is itself recorded (`create_graph`) leaves nodes that no hook
knows: units it goes through stay unsharded until the pass ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from onefold.plan import Moment
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.model_watch import ModelWatch
from onefold.runtime.param_handle import Owner
from onefold.runtime.parameter_proxy import is_sharded, raw_grad, set_raw_grad
from onefold.runtime.schedule import Schedule
from onefold.runtime.torch_internals import (
    inside_backward,
    inside_transform,
    may_hold_tensors,
    outside_compiler,
    tensors_in,
)
from onefold.runtime.unit import Unit


class Hooks:
    """All hooks of one engine. `watch`: parameters may be in flight when somebody reads them, so reading waits."""

    def __init__(self, model: nn.Module, schedule: Schedule, listener: Owner, *, watch: bool) -> None:
        self._schedule = schedule
        self._listener = weakref.ref(listener)
        # The callback of the bare backward under way; dead when that backward raised.
        self._bare: weakref.ref[Callable[..., None]] | None = None
        self._handles: list[RemovableHandle] = []
        self._model_watch = ModelWatch(model, schedule.units)
        # Whether a state dict has placeholders for what is sharded, which raise when somebody uses or saves them.
        self.state_dicts_may_be_empty = False
        self._watched: list[weakref.ref[nn.Module]] = []
        me = weakref.ref(self)
        self._handles.append(model.register_forward_pre_hook(ModuleHook(me, model, Hooks.before_root_forward)))
        self._handles.append(model.register_state_dict_pre_hook(ModuleHook(me, model, Hooks.before_root_state_dict)))
        owner = {id(p): unit.index for unit in schedule.units for param in unit.params for p in param.parameters}
        for unit in schedule.units:
            self._watch_calls(unit, unit.module)
            for param in unit.trained:
                for index, parameter in enumerate(param.parameters):
                    land = _while_alive(Hooks.land, me, weakref.ref(unit), weakref.ref(param), index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(land))
                    if not param.stays_unsharded:
                        # A gradient may come from an operation that no hook has seen, or that reads no values.
                        stand_in = _while_alive(FlatParam.attach_shape_placeholder, weakref.ref(param), index)
                        self._handles.append(parameter.register_hook(stand_in))
        sharded = {id(p) for unit in schedule.units for param in unit.sharded for p in param.parameters}
        for module in model.modules():
            own = [id(p) for p in module._parameters.values() if id(p) in owner]
            units = sorted({owner[parameter] for parameter in own})
            if units:
                self._watch_table(module, units, watch=watch)
            for unit in (schedule.units[index] for index in units):
                # Children of an enclosing module may be called without it; by one rank alone, where all they have
                # of it stays unsharded.
                if unit.encloses and unit.sharded and module is not unit.module:
                    if any(owner[parameter] == unit.index for parameter in own if parameter in sharded):
                        self._watch_calls(unit, module)
                    else:
                        wait = ModuleHook(me, module, Hooks.wait_for_refresh, [unit.index])
                        self._handles.append(module.register_forward_pre_hook(wait))
        after = ModuleHook(me, model, Hooks.after_root_forward)
        self._handles.append(model.register_forward_hook(after, always_call=True))

    def _watch_calls(self, unit: Unit, module: nn.Module) -> None:
        me, add = weakref.ref(self), self._handles.append
        before = ModuleHook(me, module, Hooks.before_forward, unit.index)
        if unit.sharded:
            add(module.register_forward_pre_hook(before, with_kwargs=True))
            after = ModuleHook(me, module, Hooks.after_forward, unit.index)
            add(module.register_forward_hook(after, always_call=True))
        else:
            add(module.register_forward_pre_hook(before))

    def serve(self, model: nn.Module) -> list[RemovableHandle]:
        """Unshard parameters of this engine where another model uses them, in modules that this engine does not watch.

        A unit is unsharded around the smallest module of `model` that contains all of its parameters there.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        root = self._model_watch.model
        own = set(root.modules()) if root is not None else set()
        first = len(self._handles)
        for unit in self._schedule.units:
            parameters = {id(p) for param in unit.params for p in param.parameters}
            paths = [
                path.split(".") if path else []
                for path, module in modules.items()
                if any(id(p) in parameters for p in module._parameters.values())
            ]
            if not paths:
                continue
            common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
            while isinstance(modules[".".join(common)], nn.ModuleList | nn.ModuleDict):
                common = common[:-1]  # containers are not called
            module = modules[".".join(common)]
            is_watched = unit.module in modules.values() or (unit.encloses and module in own)
            if not is_watched:
                self._watch_calls(unit, module)
        return self._handles[first:]

    def _watch_table(self, module: nn.Module, units: list[int], *, watch: bool) -> None:
        me, add = weakref.ref(self), self._handles.append
        add(module.register_load_state_dict_pre_hook(ModuleHook(me, module, Hooks.before_load, units)))
        add(module.register_load_state_dict_post_hook(ModuleHook(me, module, Hooks.after_load, units)))
        # What rests as shards comes out of it without values, and whoever reads them is told.
        add(module.register_state_dict_pre_hook(ModuleHook(me, module, Hooks.wait_for_refresh, units)))
        if watch:
            module.__dict__["_parameters"] = WatchedParameters(module._parameters, me, units)
            self._watched.append(weakref.ref(module))

    def remove(self) -> None:
        self._model_watch.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in (reference() for reference in self._watched):
            if module is not None:
                self.stop_watching(module)
        self._watched.clear()

    def stop_watching(self, module: nn.Module) -> None:
        """Plain parameter tables from here down: a compiler traces them, and the unit's own hooks do the work."""
        for inner in module.modules():
            if isinstance(inner._parameters, WatchedParameters):
                inner.__dict__["_parameters"] = dict(dict.items(inner._parameters))

    def expect_end(self) -> None:
        """Inside a graph task that nobody brackets: have autograd call back when it ends."""
        listener = self._listener()
        if listener is None or (self._bare is not None and self._bare() is not None):
            return
        if self._schedule.in_backward:
            if self._bare is None:
                return  # the engine's own
            listener.abort_backward()
        # Only autograd's graph task holds the callback: when that dies, so does this.
        backward = _while_alive(Hooks.end_bare_backward, weakref.ref(self))
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

    def land(self, unit: Unit, param: FlatParam, index: int) -> None:
        listener = self._listener()
        if listener is None:
            return
        landed = raw_grad(param.parameters[index])
        self.expect_end()
        # An earlier backward that raised is forgotten only now, with what it left on parameters: not this one's.
        set_raw_grad(param.parameters[index], landed)
        if not self._schedule.in_backward:
            try:
                listener.begin_bare_backward()
            except RuntimeError:
                # The backward is refused: its gradient must not be found here by the next one.
                set_raw_grad(param.parameters[index], None)
                raise
        unit.land(param, index, self._schedule.num_backwards)

    def check_model(self) -> None:
        """Raise where the model has been changed since it was laid out."""
        self._model_watch.check()

    def model_moved(self) -> None:
        """A parameter is on another device: the next look at the model finds it, unless it is back."""
        self._model_watch.mark()

    # -- calls of units -----------------------------------------------------------------------------------------

    def before_root_forward(self, *_: Any) -> None:
        self._schedule.depth += 1
        self.check_model()
        self.recover()
        if torch.is_grad_enabled() and not inside_backward():
            self._schedule.begin_pass()

    def after_root_forward(self, args: Any, output: Any) -> None:
        self._schedule.depth -= 1
        self._schedule.reshard_after_evaluation()
        # A recomputation inside a backward belongs to that backward.
        if torch.is_grad_enabled() and not inside_backward() and not inside_transform():
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if tensors and self._schedule.trained:
                register_multi_grad_hook(tensors, _while_alive(Hooks.expect_end, weakref.ref(self)), mode="any")

    def before_forward(self, index: int, *arguments: Any) -> None:
        unit = self._schedule.units[index]
        if not unit.sharded:
            unit.unshard(Moment.FORWARD)
            return
        again = inside_backward()
        unit.pre_forward(recompute=again)
        unit.uses.stack.append((0, []))
        if inside_transform():
            unit.keep_for_pass()  # whoever runs its backward, it runs on nodes of wrapped tensors
            return
        # A call recomputed by a checkpoint that kept its graph has been counted, and its end is watched already.
        if torch.is_grad_enabled() and not (again and unit.uses.calls > unit.uses.ended):
            call = unit.begin_call()
            inputs, seen = _watch_end(unit, call, arguments)
            unit.uses.stack[-1] = (call if seen else -call, inputs)

    def after_forward(self, index: int, args: Any, output: Any) -> None:
        unit = self._schedule.units[index]
        again = inside_backward()
        call, inputs = unit.uses.stack.pop() if unit.uses.stack else (0, [])
        if call:
            produced = list(producers([output, _left_on_modules(unit.module)]))
            nodes = [node for node in produced if not any(node is passed_on for passed_on in inputs)]
            act = partial(Unit.pre_backward, looks_up=_looks_up(unit.module, output))
            for node in nodes:
                begin = _while_alive(act, weakref.ref(unit), call)
                node.register_prehook(_ends_first(node.metadata.setdefault(_ENDS, []), begin))
            if again:
                unit.uses.backwards.add(call)  # inside the backward that will run through it at once
            elif not produced and (unit.trained or call > 0) and output is not None:
                unit.keep_for_pass()  # nothing tells when its backward begins, so it must stay
        unit.post_forward(recompute=again)

    # -- reads and writes from outside --------------------------------------------------------------------------

    def read(self, units: list[int]) -> None:
        for unit in units:
            self._schedule.units[unit].read(backward=inside_backward())

    def wait_for_refresh(self, units: list[int], *_: Any) -> None:
        for unit in units:
            self._schedule.in_flight.wait_for_refresh(self._schedule.units[unit])

    def before_root_state_dict(self, *_: Any) -> None:
        """A whole model's, with nothing gathered: somebody is about to save it."""
        self._schedule.check_present()
        units = self._schedule.units
        if not self.state_dicts_may_be_empty and not any(unit.uses.lent for unit in units):
            self.check_whole([unit.index for unit in units], "state_dict()", _USE_MODULE_STATE_DICT)

    def check_whole(self, units: list[int], what: str, instead: str) -> None:
        for unit in (self._schedule.units[index] for index in units):
            self._schedule.in_flight.wait_for_refresh(unit)
            # Another engine may hold the same frozen parameters, and have unsharded them.
            if any(is_sharded(parameter) for param in unit.sharded for parameter in param.parameters):
                raise RuntimeError(
                    f"{what}: the parameters of {unit.name} rest as shards, and would come out empty. {instead}"
                )

    def before_load(self, units: list[int], *_: Any) -> None:
        listener = self._listener()
        if listener is not None:
            listener.about_to_write()
        self.wait_for_refresh(units)
        for unit in units:
            self._schedule.units[unit].lend()

    def after_load(self, units: list[int], *_: Any) -> None:
        listener = self._listener()
        loaded = [self._schedule.units[unit] for unit in units]
        for unit in loaded:
            unit.write_back()
            unit.take_back()
        if listener is not None:
            listener.parameters_loaded(loaded)


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

    @outside_compiler
    def __getitem__(self, name: str) -> nn.Parameter | None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.read(self._units)
        return super().__getitem__(name)

    def _wait(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.wait_for_refresh(self._units)

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def __reduce__(self) -> Any:
        hooks = self._hooks()
        if hooks is not None:
            hooks.check_whole(self._units, "copying or pickling the model", _USE_GATHERED)
        return dict, (dict(super().items()),)


_USE_GATHERED = "Do it inside onefold.zero.GatheredParameters(model.parameters())"
_USE_MODULE_STATE_DICT = (
    "Use engine.module_state_dict() or engine.save_16bit_model(), or wrap the call in "
    "onefold.zero.GatheredParameters(model.parameters())"
)


class ModuleHook:
    """A module hook that acts for its own module only: a copy of a model, or a pickled one, carries its hooks along."""

    def __init__(self, me: weakref.ref[Hooks], owner: nn.Module, act: Callable[..., None], *fixed: Any) -> None:
        self._hooks, self._owner, self._act, self._fixed = me, weakref.ref(owner), act, fixed

    @outside_compiler
    def __call__(self, module: nn.Module, *args: Any) -> None:
        hooks = self._hooks()
        if hooks is not None and module is self._owner():
            self._act(hooks, *self._fixed, *args)

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return self

    def __reduce__(self) -> Any:
        return _absent_hook, ()


def _nothing(*_: Any) -> None:
    """The hook of a model that was pickled while an engine had it."""


def _absent_hook() -> Callable[..., None]:
    return _nothing


def _while_alive(act: Callable[..., None], *given: Any) -> Callable[..., None]:
    """A hook that acts on what it was given, unless something of it that is held weakly is gone."""

    def hook(*_: Any) -> None:
        found = [each() if isinstance(each, weakref.ref) else each for each in given]
        if all(each is not None for each in found):
            act(*found)

    return hook


def _looks_up(module: nn.Module, output: Any) -> bool:
    """Whether a call was torch's own lookup in a table and nothing else: its backward needs the table's shape, and no
    values. Somebody else's hook, or a forward of its own, may have done more.
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


def _watch_end(unit: Unit, call: int, arguments: Any) -> tuple[list[Any], bool]:
    """Have the unit told when this call's backward is over: the nodes of its inputs, and whether it will be."""
    end = _while_alive(Unit.post_backward, weakref.ref(unit), [call])
    nodes, seen = [], False
    for tensor in tensors_in(arguments):
        node: Any = tensor.grad_fn
        if node is not None:
            nodes.append(node)
            node.metadata.setdefault(_ENDS, []).append(end)
            node.register_prehook(end)
        elif tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            # A leaf takes its gradient before the parameters beside it do: wait for the end of this graph task.
            once: list[RemovableHandle] = []
            once.append(tensor.register_hook(partial(_after_graph_task, end, once)))
        else:
            continue
        seen = True
    return nodes, seen


def _ends_first(ends: list[Callable[..., None]], begin: Callable[..., None]) -> Callable[..., None]:
    """Where one call's backward ends and another's begins: reshard the one before the other is unsharded."""

    def hook(*_: Any) -> None:
        for end in ends:
            end()
        begin()

    return hook


def _after_graph_task(then: Callable[..., None], handle: list[RemovableHandle], *_: Any) -> None:
    while handle:
        handle.pop().remove()  # a leaf may be an input of every step
    torch.autograd.Variable._execution_engine.queue_callback(then)  # type: ignore[attr-defined]


_OF_EVERY_MODULE = {*nn.Module().__dict__, "_onefold_external"}


def _left_on_modules(module: nn.Module) -> list[Any]:
    """What calls have set as attributes, tensors and containers of them."""
    return [
        value
        for inner in module.modules()
        for name, value in inner.__dict__.items()
        if name not in _OF_EVERY_MODULE and may_hold_tensors(value)
    ]


def producers(output: Any) -> Iterable[Any]:
    """The nodes whose turn in a backward means that the backward of this output begins."""
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            yield tensor.grad_fn
            base = tensor._base if tensor._is_view() else None
            if base is not None and base.grad_fn is not None:
                yield base.grad_fn
