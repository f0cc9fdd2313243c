"""Hooks on modules and parameters that call units and the schedule.

They hold the schedule weakly, so that a model does not keep its engine alive.

[Note: where a bare backward begins and ends]
`engine.backward` begins and ends its backward itself. A bare `loss.backward()` begins when its first gradient is
produced (`autograd.grad` produces none on parameters, and is ignored) and ends in a callback of autograd. The
callback is queued when a gradient reaches an output of the outermost module, so that it belongs to the outermost
graph task: reentrant checkpointing runs nested graph tasks, whose callbacks come too early. If the model was called in
another way, the first gradient queues it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from onefold.config import ConfigError
from onefold.fp8 import Fp8Linear
from onefold.graphs import CapturableBlock, CapturedBlocks, Gradients
from onefold.offload.grad_offload import square_sum
from onefold.runtime.batch_chunks import ChunkedBlocks
from onefold.runtime.call_hooks import (
    ModuleHook,
    StoredTensors,
    UpdateHook,
    listeners_to_compiled_regions,
    note_compiled_region,
    while_alive,
)
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.model_watch import ModelWatch
from onefold.runtime.param_handle import Owner
from onefold.runtime.parameter_proxy import is_sharded, raw_grad, set_raw_grad
from onefold.runtime.schedule import Schedule
from onefold.runtime.tiled_modules import TiledModules
from onefold.runtime.torch_internals import (
    constant_in_graphs,
    inside_backward,
    inside_transform,
    outside_compiler,
    tensors_in,
)
from onefold.runtime.unit import Unit

COMPILED_AND_CAPTURED = (
    "blocks that are compiled cannot be captured as well. Compile the model, or set cuda_graphs, but not both."
)


class Hooks:
    """All hooks of one engine. `watch`: reading a parameter waits, because its update may be in flight."""

    def __init__(self, model: nn.Module, schedule: Schedule, listener: Owner, *, watch: bool) -> None:
        self._schedule = schedule
        self._context = schedule.context
        self._listener = weakref.ref(listener)
        # The callback of the bare backward under way; dead if that backward has raised.
        self._bare: weakref.ref[Callable[..., None]] | None = None
        self._handles: list[RemovableHandle] = []
        self._model_watch = ModelWatch(model, schedule.units)
        # Whether state dicts may have placeholders for sharded parameters, which raise when they are used or saved.
        self.state_dicts_may_be_empty = False
        self._watched: list[weakref.ref[nn.Module]] = []
        # Whether each forward begins by waiting for all updates, because hooks may be left out of a compiled region.
        self.updates_before_forward = False
        listeners_to_compiled_regions.add(self)
        plan = schedule.context.plan
        self._blocks = (
            ChunkedBlocks(schedule.units, plan.activations.batch_chunks) if plan.activations.batch_chunks != 0 else None
        )
        tiles = (plan.activations.tiled_modules, plan.activations.mlp_tiles)
        self._tiles = TiledModules(model, *tiles) if plan.activations.mlp_tiles != 0 else None
        schedule.chunk_checks = self._blocks.checks if self._blocks is not None else None
        scope = plan.activations.cuda_graphs
        self.graphs = self._capture_blocks(model, scope) if scope != "off" else None
        me = weakref.ref(self)
        self._handles.append(model.register_forward_pre_hook(ModuleHook(me, model, Hooks.before_root_forward)))
        self._handles.append(model.register_state_dict_pre_hook(ModuleHook(me, model, Hooks.before_root_state_dict)))
        owner = {id(p): unit.index for unit in schedule.units for param in unit.params for p in param.parameters}
        for unit in schedule.units:
            self._watch_calls(unit, unit.module)
            for position, param in enumerate(unit.trained_params):
                for index, parameter in enumerate(param.parameters):
                    ready = while_alive(Hooks.gradient_ready, me, unit.index, position, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(ready))
                    if not param.stays_unsharded:
                        # The gradient may come from an operation without hooks, or from one that reads no values.
                        attach = while_alive(FlatParam.attach_shape_placeholder, weakref.ref(param), index)
                        self._handles.append(parameter.register_hook(attach))
        sharded = {id(p) for unit in schedule.units for param in unit.sharded_params for p in param.parameters}
        for module in model.modules():
            own = [id(p) for p in module._parameters.values() if id(p) in owner]
            units = sorted({owner[parameter] for parameter in own})
            if units:
                self._watch_table(module, units, watch=watch)
            for unit in (schedule.units[index] for index in units):
                # Submodules of an enclosing module may be called without it, and by one rank alone if their parameters
                # stay unsharded.
                if unit.encloses and unit.sharded_params and module is not unit.module:
                    if any(owner[parameter] == unit.index for parameter in own if parameter in sharded):
                        unit.stored_tensors.append(StoredTensors(module))
                        self._watch_calls(unit, module, search=len(unit.stored_tensors) - 1)
                    else:
                        wait = UpdateHook(me, module, Hooks.wait_for_updates, [unit.index])
                        self._handles.append(module.register_forward_pre_hook(wait))
        after = ModuleHook(me, model, Hooks.after_root_forward)
        self._handles.append(model.register_forward_hook(after, always_call=True))

    def _capture_blocks(self, model: nn.Module, scope: str) -> CapturedBlocks:
        """Replace the forwards of blocks, and of the model if its parameters stay unsharded, to capture them."""
        schedule = self._schedule
        device = schedule.units[0].params[0].device
        if any(module._compiled_call_impl is not None for module in model.modules()):  # type: ignore[attr-defined]
            raise ConfigError(f"onefold.cuda_graphs: {COMPILED_AND_CAPTURED}")
        me = weakref.ref(self)

        def deliver(numbers: list[int], gradients: list[Gradients]) -> None:
            hooks, remaining = me(), iter(gradients)
            if hooks is not None:
                for number in numbers:
                    hooks.gradients_ready(number, [next(remaining) for _ in hooks._schedule.units[number].params])

        captured = [unit for unit in schedule.units if unit.is_block and not unit.encloses]
        blocks = [
            CapturableBlock(
                unit.name,
                unit.module,
                unit.params,
                partial(deliver, [unit.index]),
                lambda hook: isinstance(hook, ModuleHook),
                _problem_of(unit),
            )
            for unit in captured
        ]
        if scope != "blocks" and self._may_capture_model(model, asked=scope == "model"):
            units = schedule.units[::-1]  # in the order of the backward
            whole = CapturableBlock(
                "the model",
                model,
                [param for unit in units for param in unit.params],
                partial(deliver, [unit.index for unit in units]),
                lambda hook: isinstance(hook, ModuleHook),
                "it multiplies in FP8" if _multiplies_in_fp8(model) else "",
                encloses=True,
                before_forward=while_alive(Hooks.before_graph_of_model, me),
                square_sum=square_sum if schedule.alone else None,
            )
            blocks.append(whole)
        context = weakref.ref(self._context)
        is_first = schedule.agreement.group.rank == 0

        def in_forward() -> bool:
            found = context()
            return found is not None and found.depth > 0

        return CapturedBlocks(blocks, device, in_forward, logs=is_first)

    def _may_capture_model(self, model: nn.Module, *, asked: bool) -> bool:
        """Return whether the model is captured as a whole.

        By default this is so if no gradient would wait for the end of the backward to be reduced or copied to the host.
        """
        params = [param for unit in self._schedule.units for param in unit.params]
        if not all(param.stays_unsharded for param in params):
            if asked:
                raise ConfigError(
                    'onefold.cuda_graphs "model" needs parameters that stay unsharded, but stage 3 shards them. Use '
                    '"blocks", or stage 2.'
                )
            return False
        return asked or (self._schedule.alone and not any(param.store.is_offloaded for param in params))

    def before_graph_of_model(self) -> None:
        """Wait for updated parameters, and copy gradients of an earlier backward out of the memory of the graphs."""
        self.wait_for_all_updates()
        for param in self._schedule.trained_params():
            param.grad.return_borrowed()

    def _watch_calls(self, unit: Unit, module: nn.Module, search: int = 0) -> None:
        """Call a unit before and after forwards of a module. `search`: which of the unit's searches a forward runs."""
        target, add = weakref.ref(unit), self._handles.append
        if unit.sharded_params:
            before = ModuleHook(target, module, Unit.pre_forward)
            add(module.register_forward_pre_hook(before, with_kwargs=True))
            after = ModuleHook(target, module, Unit.post_forward, search)
            add(module.register_forward_hook(after, always_call=True))
        else:
            add(module.register_forward_pre_hook(UpdateHook(target, module, Unit.pre_forward)))

    def serve(self, model: nn.Module) -> list[RemovableHandle]:
        """Unshard parameters of this engine where another model uses them, in modules without hooks of this engine.

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
        # Sharded parameters are placeholders in a state dict, and raise when they are read.
        add(module.register_state_dict_pre_hook(ModuleHook(me, module, Hooks.wait_for_updates, units)))
        if watch:
            module.__dict__["_parameters"] = WatchedParameters(module._parameters, me, units)
            self._watched.append(weakref.ref(module))

    def remove(self) -> None:
        """Remove all hooks."""
        self._model_watch.remove()
        if self._blocks is not None:
            self._blocks.remove()
        if self._tiles is not None:
            self._tiles.remove()
        if self.graphs is not None:
            self.graphs.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in (reference() for reference in self._watched):
            if module is not None:
                self.stop_watching(module)
        self._watched.clear()

    def stop_watching(self, module: nn.Module) -> None:
        """Restore plain parameter tables below a module for the compiler. The hooks of units remain."""
        for inner in module.modules():
            if isinstance(inner._parameters, WatchedParameters):
                inner.__dict__["_parameters"] = dict(dict.items(inner._parameters))

    def expect_end(self) -> None:
        """Have autograd call back when a bare backward ends."""
        listener = self._listener()
        if listener is None or (self._bare is not None and self._bare() is not None):
            return
        if self._context.in_backward:
            if self._bare is None:
                return  # the engine ends its own backward
            listener.abort_backward()
        # Only autograd's graph task holds the callback, so that both are freed together.
        backward = while_alive(Hooks.end_bare_backward, weakref.ref(self))
        self._bare = weakref.ref(backward)
        torch.autograd.Variable._execution_engine.queue_callback(backward)  # type: ignore[attr-defined]

    def end_bare_backward(self) -> None:
        """End a bare backward."""
        self._bare = None
        if self._context.in_backward:
            self._schedule.end_backward()

    def recover(self) -> None:
        """Abort a backward that has raised, before the next forward."""
        listener = self._listener()
        if listener is not None and self._context.in_backward and not inside_backward():
            listener.abort_backward()
            self._bare = None

    def gradient_ready(self, number: int, position: int, index: int) -> None:
        """Give a unit the gradient that autograd has accumulated on a parameter of one of its flat parameters."""
        unit = self._schedule.units[number]
        param = unit.trained_params[position]
        if not self._context.in_backward or self._bare is not None:  # not in a backward of the engine
            listener = self._listener()
            if listener is None:
                return
            self._join_bare_backward(listener, param.parameters[index])
        unit.receive_gradient(param, index)

    def gradients_ready(self, number: int, gradients: list[Gradients]) -> None:
        """Give a unit the gradients of a captured backward, as `gradient_ready` does for each of them."""
        unit = self._schedule.units[number]
        if not self._context.in_backward or self._bare is not None:
            listener = self._listener()
            if listener is None:
                return
            self._join_bare_backward(listener, unit.trained_params[0].parameters[0])
        unit.receive_gradients(gradients)

    def _join_bare_backward(self, listener: Owner, parameter: nn.Parameter) -> None:
        """Begin a bare backward with its first gradient, and have it ended."""
        gradient = raw_grad(parameter)
        self.expect_end()
        # `expect_end` may have aborted an earlier backward and cleared the gradients on parameters. Restore this one.
        set_raw_grad(parameter, gradient)
        if not self._context.in_backward:
            try:
                listener.begin_bare_backward()
            except RuntimeError:
                # The backward is refused, and the next one must not find its gradient.
                set_raw_grad(parameter, None)
                raise

    def check_model(self) -> None:
        """Raise if the model was changed since `initialize`."""
        self._model_watch.check()

    def model_moved(self) -> None:
        """Check the model at the next forward or step, because a parameter was moved to another device."""
        self._model_watch.mark()

    # -- calls of the outermost module --------------------------------------------------------------------------

    def before_root_forward(self, *_: Any) -> None:
        """Begin a pass before a forward of the outermost module."""
        self._schedule.enter_forward()
        self.check_model()
        if self.updates_before_forward:
            self.wait_for_all_updates()
        self.recover()
        if torch.is_grad_enabled() and not inside_backward():
            self._schedule.begin_pass()
            if self.graphs is not None:
                self.graphs.begin_pass()

    def after_root_forward(self, args: Any, output: Any) -> None:
        """Reshard after an evaluation, and watch the outputs for a bare backward."""
        self._schedule.exit_forward()
        # A recomputation inside a backward belongs to that backward.
        if torch.is_grad_enabled() and not inside_backward() and not inside_transform():
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if tensors and self._schedule.trained_units:
                register_multi_grad_hook(tensors, while_alive(Hooks.expect_end, weakref.ref(self)), mode="any")

    # -- reads and writes outside of forwards -------------------------------------------------------------------

    def are_used(self, units: list[int]) -> bool:
        """Return whether a forward of each of some units is under way, or its parameters stay unsharded."""
        found = (self._schedule.units[unit] for unit in units)
        return all(unit.uses.forwards for unit in found if unit.sharded_params) and note_compiled_region()

    def unshard_for_read(self, units: list[int]) -> None:
        """Unshard units whose parameters are read by attribute."""
        for number in units:
            unit = self._schedule.units[number]
            # Inside a forward of the unit's module, a hook has unsharded it.
            if unit.is_updating or (unit.sharded_params and not unit.uses.forwards):
                unit.read(backward=inside_backward())

    def wait_for_updates(self, units: list[int], *_: Any) -> None:
        """Wait for the all-gathers of updated parameters of some units."""
        for unit in units:
            self._schedule.units[unit].wait_for_update()

    def enter_compiled_region(self) -> None:
        """Wait for all updates now and before each forward, because a region without hooks is being traced."""
        self.updates_before_forward = True
        self.wait_for_all_updates()

    def wait_for_all_updates(self) -> None:
        """Wait for the all-gathers of updated parameters of all units."""
        self.wait_for_updates([unit.index for unit in self._schedule.units])

    def before_root_state_dict(self, *_: Any) -> None:
        """Raise before a state dict of the model that would have placeholders."""
        self._schedule.check_present()
        units = self._schedule.units
        if not self.state_dicts_may_be_empty and not any(unit.is_gathered_by_user for unit in units):
            self.check_unsharded([unit.index for unit in units], "state_dict()", _USE_MODULE_STATE_DICT)

    def check_unsharded(self, units: list[int], what: str, instead: str) -> None:
        """Raise if parameters of some units are sharded."""
        for unit in (self._schedule.units[index] for index in units):
            unit.wait_for_update()
            # Another engine may share the same frozen parameters, and have unsharded them.
            if any(is_sharded(parameter) for param in unit.sharded_params for parameter in param.parameters):
                raise RuntimeError(f"{what}: the parameters of {unit.name} are sharded and would be empty. {instead}.")

    def before_load(self, units: list[int], *_: Any) -> None:
        """Gather units before `load_state_dict` writes to them."""
        listener = self._listener()
        if listener is not None:
            listener.about_to_write()
        self.wait_for_updates(units)
        for unit in units:
            self._schedule.units[unit].gather_for_user()

    def after_load(self, units: list[int], *_: Any) -> None:
        """Update shards and masters after `load_state_dict`."""
        listener = self._listener()
        loaded = [self._schedule.units[unit] for unit in units]
        for unit in loaded:
            unit.update_shards()
            unit.end_gather_context()
        if listener is not None:
            listener.parameters_loaded(loaded)


def _problem_of(unit: Unit) -> str:
    """Return why a block cannot be captured, or an empty string."""
    if unit.reduces_at_end:
        return "it shares parameters with other modules"
    return "it multiplies in FP8" if _multiplies_in_fp8(unit.module) else ""


def _multiplies_in_fp8(module: nn.Module) -> bool:
    return any(isinstance(inner, Fp8Linear) for inner in module.modules())


class WatchedParameters(dict[str, nn.Parameter | None]):
    """Parameter table of a module that waits for updates in flight before it returns a parameter.

    Forward hooks cover a module's own forward. This covers parameters that are read elsewhere (a loss that reads
    `head.weight`, an average over `model.parameters()`). Copies of it are plain dicts.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], hooks: weakref.ref[Hooks], units: list[int]
    ) -> None:
        super().__init__(parameters)
        self._hooks = hooks
        self._units = units

        def is_used() -> bool:
            found = hooks()
            return found is None or found.are_used(units)

        self._is_used = constant_in_graphs(is_used)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        # In a region that is traced inside the forward of its unit, the hooks have made the parameter ready. If the
        # region runs outside of it later, the parameter has another shape, and the region is traced again.
        if not (torch.compiler.is_compiling() and self._is_used()):
            self._make_ready()
        return super().__getitem__(name)

    @outside_compiler
    def _make_ready(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.unshard_for_read(self._units)

    def _wait(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.wait_for_updates(self._units)

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def __reduce__(self) -> Any:
        hooks = self._hooks()
        if hooks is not None:
            hooks.check_unsharded(self._units, "copying or pickling the model", _USE_GATHERED)
        return dict, (dict(super().items()),)


_USE_GATHERED = "Do it inside onefold.zero.GatheredParameters(model.parameters())"
_USE_MODULE_STATE_DICT = (
    "Use engine.module_state_dict() or engine.save_16bit_model(), or wrap the call in "
    "onefold.zero.GatheredParameters(model.parameters())"
)
