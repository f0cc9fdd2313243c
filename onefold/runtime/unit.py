"""Units: parameters that are unsharded, resharded, reduced and stepped together, usually those of one block.

`Unit` has the lifecycle in the order of a training step: forward, backward, unshard, reshard, reduce, and the
all-gather of updated parameters. `Order` decides when collectives are launched, in the same order on every rank: a unit
requests its all-gather, and the order launches those before it first. `InFlightCollectives` starts and awaits them.

[Note: when a unit may be resharded]
After its forward, unless the recorded order keeps it unsharded. In backward, when no operation will read it any more:
when, for every call whose backward has begun, autograd is about to run a node that produced one of its inputs (autograd
runs later nodes first, so that all nodes of the call have run). A call without inputs that need gradients ends when all
its gradients have been received. Units that are still unsharded when backward ends are resharded then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.comm import AllGatherOp, Reduction
from onefold.graphs import Gradients
from onefold.plan import PassPhase, Wire
from onefold.recorder import within
from onefold.runtime.call_hooks import StoredTensors, hook_begin, hook_end, is_embedding_lookup, producers, while_alive
from onefold.runtime.flat_param import FlatParam, unrecorded
from onefold.runtime.parameter_proxy import sharded_error
from onefold.runtime.torch_internals import inside_backward, inside_transform
from onefold.runtime.unit_state import GradientState, ParameterState, UnitContext, Uses


class Unit:
    """The parameters of one module, or those outside all other units, as flat parameters."""

    def __init__(
        self, name: str, module: nn.Module, params: Sequence[FlatParam], *, index: int, reduces_at_end: bool
    ) -> None:
        self.name = name or "(root)"
        self.module = module
        # Searches for tensors that calls store, on `module` and on modules inside it that may be called without it.
        self.stored_tensors = [StoredTensors(module)]
        self.params = list(params)
        self.trained_params = [param for param in params if param.trainable]
        self.sharded_params = [param for param in params if not param.stays_unsharded]
        # Sharded ones that other threads step: an all-gather waits for them.
        self.params_with_offloaded_states = [param for param in self.sharded_params if param.store.is_offloaded]
        # Flat parameters that a step changes and every rank stores: all-gathered after the step.
        self.updated_params = [param for param in self.trained_params if param.stays_unsharded]
        self.index = index
        # Whether its module is a repeated block, and whether it contains modules of other units.
        self.is_block = self.encloses = False
        # Whether the unit is reduced only when a backward ends, because a tied parameter may get two gradients in it.
        self.reduces_at_end = reduces_at_end
        self.param_state = ParameterState.UNSHARDED
        self.grad_state = GradientState.EMPTY
        self.uses = Uses()
        # Whether the all-gather of its updated parameters is in flight.
        self.is_updating = False
        # All-gathers in flight. An unsharded unit is gathered again if another rank needs this rank's shard.
        self.num_gathers_in_flight = 0
        self.num_trained_elements = sum(param.spec.used_layout.total for param in self.trained_params)
        self.num_sharded_elements = sum(param.spec.used_layout.total for param in self.sharded_params)
        self._num_gradients_missing = 0
        self._num_gradients_expected = sum(
            param.spec.is_used(index) for param in self.trained_params for index in range(len(param.parameters))
        )
        for param in self.params:
            param.store.unit_name = self.name
        self._context: weakref.ref[UnitContext] | None = None  # weak, because the engine owns it

    @property
    def context(self) -> UnitContext:
        """The state shared with the other units of the engine."""
        context = self._context() if self._context is not None else None
        assert context is not None, "the engine of this unit was destroyed"
        return context

    def join(self, context: UnitContext) -> None:
        """Set the state that all units of an engine share."""
        self._context = weakref.ref(context)

    # -- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, *arguments: Any) -> None:
        """Unshard before a call of the unit's module, and register hooks on the end of the call's backward."""
        if not self.sharded_params:
            self.unshard(PassPhase.FORWARD)
            return
        recompute, uses = inside_backward(), self.uses
        self.begin_use(recompute=recompute)
        uses.stack.append((0, []))
        if inside_transform():
            self.keep_for_pass()  # its backward runs on nodes of wrapped tensors, which have no hooks
            return
        # A recomputed call whose first graph was kept is already counted, and its end has a hook.
        if torch.is_grad_enabled() and not (recompute and uses.calls > uses.ended):
            call = self.begin_call()
            inputs, has_end = hook_end(while_alive(Unit.post_backward, weakref.ref(self), [call]), arguments)
            uses.stack[-1] = (call if has_end else -call, inputs)

    def post_forward(self, search: int, args: Any, output: Any) -> None:
        """Register hooks on the beginning of the call's backward. Reshard unless the recorded order keeps the unit."""
        recompute, uses = inside_backward(), self.uses
        call, inputs = uses.stack.pop() if uses.stack else (0, [])
        if call:
            produced = list(producers([output, self.stored_tensors[search].find()]))
            nodes = [node for node in produced if not any(node is passed_on for passed_on in inputs)]
            act = partial(Unit.pre_backward, is_lookup=is_embedding_lookup(self.module, output))
            for node in nodes:
                hook_begin(node, while_alive(act, weakref.ref(self), call))
            if recompute:
                self.mark_in_backward(call)
            elif not produced and (self.trained_params or call > 0) and output is not None:
                self.keep_for_pass()  # no hook shows when its backward begins
        self.end_use(recompute=recompute)

    def begin_use(self, *, recompute: bool) -> None:
        """Unshard for a call or an operation. `recompute`: inside a backward, for activation checkpointing."""
        context = self.context
        if context.moved_kinds:
            context.check_present()
        self.uses.forwards += 1
        context.depth += 1
        if self.uses.forwards == 1 or self.param_state is not ParameterState.UNSHARDED:
            self.unshard(PassPhase.BACKWARD if recompute else PassPhase.FORWARD)

    def end_use(self, *, recompute: bool) -> None:
        """End a `begin_use`."""
        context = self.context
        self.uses.forwards -= 1
        context.depth -= 1
        if not recompute and not context.order.keeps(self.uses.event):
            self.reshard_unused()
        context.reshard_after_evaluation()

    def begin_call(self) -> int:
        """Return the number of a new call that will have a backward."""
        self.uses.calls += 1
        return next(self.context.calls)

    # -- backward -----------------------------------------------------------------------------------------------

    def pre_backward(self, call: int, *, is_lookup: bool = False) -> None:
        """Unshard when a gradient has reached an output of a call.

        A negative `call` is one whose end has no hook. `is_lookup`: its backward reads no values.
        """
        if is_lookup and not torch.is_grad_enabled():
            return
        if not self.uses.backwards:
            self.unshard(PassPhase.BACKWARD)
        self.uses.backwards.add(call)
        if torch.is_grad_enabled():  # a backward that is itself recorded creates nodes without hooks
            self.keep_for_pass()

    def mark_in_backward(self, call: int) -> None:
        """Count a recomputed call as in backward, because the backward around it runs through it next."""
        self.uses.backwards.add(call)

    def expect_gradients(self) -> None:
        """Count the parameters that may get a gradient, at the beginning of a backward."""
        self._num_gradients_missing = self._num_gradients_expected

    def receive_gradient(self, param: FlatParam, index: int) -> None:
        """Accumulate the gradient that autograd has produced for a parameter. After the last, reduce and reshard."""
        if self.grad_state is not GradientState.OPEN:
            self._open_for_gradients()
        param.grad.accumulate_into_slot(index, self.context.in_flight.pool)
        param.remove_shape_placeholders()
        self._count_gradient(param, index)

    def receive_gradients(self, gradients: Sequence[Gradients]) -> None:
        """Accumulate the gradients of all flat parameters at once, as a captured backward produces them."""
        found = [(param, some) for param, some in zip(self.params, gradients, strict=True) if some.flat is not None]
        if self.context.before_step and self.grad_state is GradientState.EMPTY:
            for param, some in found:
                param.grad.borrow(some, self.context.in_flight.pool)
        self._open_for_gradients()
        for param, some in found:
            param.grad.accumulate_flat(some, self.context.in_flight.pool)
        for param, some in found:
            for index in some.present:
                self._count_gradient(param, index)

    def _open_for_gradients(self) -> None:
        while self.grad_state is GradientState.REDUCING:
            self.context.in_flight.finish_reduction()
        self._open_gradients()

    def _count_gradient(self, param: FlatParam, index: int) -> None:
        context, grad = self.context, param.grad
        if grad.last_backward[index] == context.num_backwards:
            return
        grad.last_backward[index] = context.num_backwards
        self._num_gradients_missing -= 1
        if self._num_gradients_missing == 0:
            if not self.reduces_at_end:
                context.order.request_reduce_scatter(self.index)
            if not self.encloses and all(param.trainable for param in self.sharded_params):
                self.post_backward([call for call in self.uses.backwards if call < 0])

    def post_backward(self, calls: Iterable[int]) -> None:
        """Reduce and reshard when the last of the unit's calls has ended its backward."""
        context, uses = self.context, self.uses
        ended = uses.backwards.intersection(calls)
        uses.backwards -= ended
        uses.ended += len(ended)
        if ended and not uses.backwards:
            if context.in_backward and self.trained_params and uses.ended >= uses.calls and not self.reduces_at_end:
                context.order.request_reduce_scatter(self.index)
            if not context.order.keeps(uses.event):
                self.reshard_unused()

    # -- unshard ------------------------------------------------------------------------------------------------

    def unshard(self, phase: PassPhase) -> None:
        """All-gather the parameters, in the order that all ranks keep, and wait for them."""
        context = self.context
        self.wait_for_update()
        context.order.record_use(self.index)
        if not self.sharded_params:
            return
        context.forget_cached()
        begins_pass = not context.order.open and (torch.is_grad_enabled() or phase is PassPhase.BACKWARD)
        with unrecorded():
            if begins_pass:
                context.begin_sharded_pass(forward=phase is PassPhase.FORWARD)
            event = context.order.request_unshard(phase, self.index)
            if event is not None:
                self.uses.event = event
            self.wait_for_unshard()

    def wait_for_unshard(self) -> None:
        """Wait for the unit's all-gathers in flight, and those launched before them."""
        while self.num_gathers_in_flight:
            self.context.in_flight.finish_gather()

    @staticmethod
    def launch_all_gather(units: list[Unit], *, lossless: bool = False, use_secondary: bool = False) -> None:
        """Launch one all-gather for some units, in any state: another rank may need this rank's shards."""
        context, plan = units[0].context, units[0].context.plan
        for unit in units:
            if plan.node_shard_size > 1:
                unit.wait_for_unshard()  # it may be filling the secondary shard
            for param in unit.params_with_offloaded_states:
                param.store.finish_step()
        if not lossless:
            context.fp8_scales.refresh(context.in_flight.gather_numbers)
        started: list[Unit] = []

        def prepare() -> list[AllGatherOp]:
            gatherings: list[AllGatherOp] = []
            for unit in units:
                started.append(unit)
                gatherings += unit._prepare_all_gather(lossless=lossless, use_secondary=use_secondary)
            return gatherings

        try:
            context.in_flight.enqueue_all_gather(
                [unit.name for unit in units],
                prepare,
                num_elements=sum(unit.num_sharded_elements for unit in units),
                wire=Wire.NATIVE if lossless else plan.parameters.wire,
                on_finish=partial(Unit._finish_all_gather, units),
            )
        except BaseException:
            for unit in started:
                unit._undo_all_gather()
            raise

    @staticmethod
    def prefetch(units: Iterable[Unit]) -> None:
        """Read shards from disk for the all-gathers that come next, as far as buffers are free."""
        for unit in units:
            with within(unit.name):
                if not all(param.read_ahead() for param in unit.sharded_params):
                    return

    def _prepare_all_gather(self, *, lossless: bool, use_secondary: bool) -> list[AllGatherOp]:
        self.num_gathers_in_flight += 1
        if self.param_state is ParameterState.SHARDED:
            self.param_state = ParameterState.UNSHARDING
        return [p.prepare_all_gather(lossless=lossless, use_secondary=use_secondary) for p in self.sharded_params]

    def _undo_all_gather(self) -> None:
        """Roll back `_prepare_all_gather` after its collective failed to launch."""
        for param in self.sharded_params:
            param.invalidate_secondary(values_change=False)
        self.num_gathers_in_flight -= 1
        if self.param_state is ParameterState.UNSHARDING and not self.num_gathers_in_flight:
            self.param_state = ParameterState.SHARDED
            for param in self.sharded_params:
                param.free_unsharded()

    @staticmethod
    def _finish_all_gather(units: list[Unit]) -> None:
        for unit in units:
            unit.num_gathers_in_flight -= 1
            # A unit that was unsharded when another rank requested it stays as it is.
            if unit.param_state is ParameterState.UNSHARDING:
                for param in unit.sharded_params:
                    param.attach_views()
                unit.param_state = ParameterState.UNSHARDED
            for param in unit.sharded_params:
                param.fill_secondary()

    # -- reshard ------------------------------------------------------------------------------------------------

    @property
    def needs_unshard(self) -> bool:
        """Whether the unit has to be unsharded before it can be used."""
        return self.param_state is ParameterState.SHARDED

    def reshard_unused(self, *, after_user_gather: bool = False) -> None:
        """Reshard, unless the unit is still used on this rank.

        `after_user_gather`: skip the in-place write check, because `GatheredParameters` performs it.
        """
        if not self.sharded_params or self.param_state is not ParameterState.UNSHARDED or self.uses.any:
            return
        context = self.context
        self.wait_for_unshard()
        checked = [] if after_user_gather else self.sharded_params
        written = [name for param in checked for name in param.written_names()]
        self.reshard(drop=not (context.order.open or context.in_backward))
        if written:
            raise sharded_error(written, "a write in place inside a forward or backward")

    def reshard(self, *, drop: bool = False) -> None:
        """Free the unsharded parameters. With `drop`, replace their storage (`FlatParam.free_unsharded`)."""
        assert self.param_state is ParameterState.UNSHARDED, (self.name, self.param_state)
        assert not self.num_gathers_in_flight, self.name
        if self.sharded_params:
            for param in self.sharded_params:
                param.free_unsharded(drop=drop)
            self.param_state = ParameterState.SHARDED

    def end_uses_of_pass(self, *, reset_calls: bool = False) -> None:
        """Discard uses that last until the pass ends, and reshard. `reset_calls`: a new forward begins."""
        self.uses.clear_pass()
        if reset_calls:
            self.uses.calls = 0
        self.reshard_unused()

    # -- reduce -------------------------------------------------------------------------------------------------

    @staticmethod
    def launch_reduce_scatter(units: list[Unit]) -> None:
        """Launch one reduce-scatter for the gradients of some units. Missing gradients are reduced as zeros."""
        units[0].context.in_flight.enqueue_reduce_scatter(
            [unit.name for unit in units],
            partial(Unit._prepare_reduce_scatter, units),
            num_elements=sum(unit.num_trained_elements for unit in units),
            on_finish=partial(Unit._finish_reduce_scatter, units),
        )

    def _open_gradients(self) -> None:
        if self.grad_state is GradientState.EMPTY:
            for param in self.trained_params:
                param.grad.take_slot(self.context.in_flight.pool)
            self.grad_state = GradientState.OPEN
        assert self.grad_state is GradientState.OPEN, (self.name, self.grad_state)

    @staticmethod
    def _prepare_reduce_scatter(units: list[Unit]) -> list[Reduction]:
        context = units[0].context
        prescale, pool = context.plan.scaling.prescale, context.in_flight.pool
        for unit in units:
            unit._open_gradients()
        reductions = []
        for unit in units:
            unit.grad_state = GradientState.REDUCING
            found = [param.grad.prepare_reduce_scatter(prescale, pool) for param in unit.trained_params]
            if context.on_gradient is not None:
                for param, reduction in zip(unit.trained_params, found, strict=True):
                    context.on_gradient(unit, param, reduction.source)
            reductions += found
        return reductions

    @staticmethod
    def _finish_reduce_scatter(units: list[Unit]) -> None:
        context = units[0].context
        for unit in units:
            assert unit.grad_state is GradientState.REDUCING, (unit.name, unit.grad_state)
            with within(unit.name):
                for param in unit.trained_params:
                    param.grad.store_reduced(context.in_flight.pool)
                unit.grad_state = GradientState.EMPTY
            if context.before_step:
                for param in unit.trained_params:
                    param.grad.shard.prepare_step(with_norm=context.in_flight.collective.group.size > 1)
                    context.on_reduced(param.store)

    def drop_gradients(self) -> None:
        """Discard all gradients of the unit."""
        assert self.grad_state is not GradientState.REDUCING, self.name
        for param in self.trained_params:
            param.grad.drop(self.context.in_flight.pool)
        self.grad_state = GradientState.EMPTY

    # -- all-gather of updated parameters, after a step ---------------------------------------------------------

    def wait_for_update(self) -> None:
        """Wait for the all-gather of the unit's updated parameters, and those launched before it."""
        while self.is_updating:
            self.context.in_flight.finish_update()

    # -- uses outside of the unit's module ----------------------------------------------------------------------

    def read(self, *, backward: bool = False, within_pass: bool = False) -> None:
        """Unshard for a read of a parameter outside its module's forward, until the pass or the evaluation ends."""
        self.wait_for_update()
        if self.sharded_params and (within_pass or backward or self.context.in_pass) and not self.uses.any:
            self.unshard(PassPhase.BACKWARD if backward else PassPhase.FORWARD)
            self.keep_for_pass()

    def keep_for_pass(self) -> None:
        """Keep the unit unsharded until the pass ends, because no hook shows the end of a use."""
        self.uses.until_pass_ends = True

    @property
    def is_gathered_by_user(self) -> bool:
        """Whether a `GatheredParameters` of the unit is open."""
        return self.uses.gathered_by_user > 0

    def gather_for_user(self) -> None:
        """Unshard losslessly until `end_gather_context`, on all ranks together outside a pass."""
        context = self.context
        context.check_present()
        if context.order.open:
            self.unshard(PassPhase.FORWARD)
        elif self.sharded_params:
            with unrecorded():
                self.wait_for_update()
                is_cached = context.cached is self and all(param.has_valid_cache() for param in self.sharded_params)
                if not is_cached:
                    context.forget_cached()
                if context.order.all_have_cached(self.index, is_cached=is_cached):
                    self._use_cached()
                else:
                    context.forget_cached()
                    Unit.launch_all_gather([self], lossless=True)
                    context.in_flight.finish_gathers()
        else:
            self.wait_for_update()
        self.uses.gathered_by_user += 1

    def end_gather_context(self, *, cache: bool = False) -> None:
        """End a `gather_for_user`. `cache`: nothing was written, so the values may be kept for the next one."""
        context = self.context
        self.uses.gathered_by_user -= 1
        if context.order.open and torch.is_grad_enabled():
            self.keep_for_pass()  # results computed from it may have a backward that no hook sees begin
        if cache and self.sharded_params and not self.uses.any and not context.in_pass and not context.in_backward:
            context.forget_cached()
            for param in self.sharded_params:
                param.cache_unsharded()
            context.cached = self
        self.reshard_unused(after_user_gather=True)

    def _use_cached(self) -> None:
        assert self.param_state is ParameterState.SHARDED, (self.name, self.param_state)
        for param in self.sharded_params:
            param.restore_cached()
        self.param_state = ParameterState.UNSHARDED

    def update_shards(self) -> None:
        """Copy this rank's slices of the unsharded values into its shards, after the user has written them."""
        assert self.param_state is ParameterState.UNSHARDED, (self.name, self.param_state)
        for param in self.sharded_params:
            param.update_shard()

    def is_seen_by(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether one of the tensors is a view of these parameters."""
        found = list(tensors)
        return any(param.is_seen_by(found) for param in self.sharded_params)

    def hand_out(self) -> None:
        """Record that a view of these parameters was returned to the user, who may keep it."""
        for param in self.sharded_params:
            param.handed_out = True
