"""The schedule of a training step over all units: forward, backward, gradients that are late, step.

`Unit` has the lifecycle of one unit, `Order` the order of collectives, `InFlightCollectives` those under way.

[Note: gradients that come late]
A gradient may arrive after its unit's reduce-scatter was launched: a module that runs twice under reentrant
checkpointing produces gradients in each run, and a rank that got past a unit may use it after all. Such gradients stay
in the unit's slots and are reduced with the unit's next reduction. If the step comes first, the scalars that ranks
exchange at every step show it, and all ranks reduce these units once more (`reduce_late`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from onefold.comm import Agreement, AllGatherOp, Collective, Ledger
from onefold.offload.cache_size import DeviceCache
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.plan import Plan
from onefold.pool import Pool
from onefold.runtime.batch_chunks import ChunkChecks
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.in_flight import InFlightCollectives, PendingCollective
from onefold.runtime.order import Order, Request
from onefold.runtime.parameter_proxy import raw_grad
from onefold.runtime.unit import Unit
from onefold.runtime.unit_state import GradientState, ParameterState, UnitContext
from onefold.runtime.update_gather import launch_update_gather


class Schedule:
    """All units of an engine, at each phase of a step."""

    def __init__(
        self,
        units: Sequence[Unit],
        plan: Plan,
        collective: Collective,
        ledger: Ledger,
        pool: Pool,
        memory: OffloadMemory | None = None,
    ) -> None:
        self.units = list(units)
        self.trained_units = [unit for unit in units if unit.trained_params]
        self.sharded_units = [unit for unit in units if unit.sharded_params]
        self.agreement = Agreement(collective.group, ledger)
        self.guard = self.agreement.guard
        self.in_flight = InFlightCollectives(plan, collective, self.guard, pool, memory)
        self.order = Order(units, plan, self.in_flight, self.agreement, ledger)
        self.context = UnitContext(units, plan, self.in_flight, self.order)
        for unit in units:
            unit.join(self.context)
        for param in self.trained_params():
            param.grad.batch = self.context.gradients
        self._plan = plan
        self.memory = memory
        stores = [param.store for unit in units for param in unit.params]
        self._cache = DeviceCache(stores, plan, self.agreement, memory.bus.device) if memory is not None else None
        # The checks of chunked blocks in the first step; None without chunks.
        self.chunk_checks: ChunkChecks | None = None
        frozen = [param for unit in units for param in unit.params if not param.trainable]
        self._frozen = [(name, p) for param in frozen for name, p in param.named_parameters() if not p.requires_grad]

    def check_present(self) -> None:
        """Raise if the model weights are off the device."""
        self.context.check_present()

    def check_awake(self) -> None:
        """Raise if any kind of state is off the device."""
        self.context.check_awake()

    # -- forward ------------------------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """Count a forward of the outermost module."""
        self.context.depth += 1

    def exit_forward(self) -> None:
        """End an `enter_forward`. Reshard everything after an evaluation."""
        self.context.depth -= 1
        self.context.reshard_after_evaluation()

    def begin_pass(self) -> None:
        """Begin a pass with a forward of the outermost module that will have a backward."""
        self.check_present()
        if self.sharded_units:
            self.context.begin_sharded_pass(forward=True)

    def reshard_all(self) -> None:
        """Reshard all units that the user has not gathered."""
        self.context.reshard_all()

    # -- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self, *, boundary: bool) -> None:
        """Begin a backward. `boundary`: a step follows it. Plans that keep unsharded gradients reduce only then."""
        context = self.context
        context.in_backward = True
        context.num_backwards += 1
        context.forget_cached()
        if not self.sharded_units or not self.order.open:
            self.order.begin(forward=False)
        self.order.reduces = boundary or not self._plan.keeps_unsharded_gradient
        context.before_step = boundary
        for unit in self.trained_units:
            unit.expect_gradients()
        if not boundary:
            for param in self.trained_params():
                param.grad.begin_accumulation(self.in_flight.pool)

    def end_backward(self, *, aborted: bool = False) -> None:
        """End a backward: finish all reductions and reshard everything."""
        if self.order.open:
            self.order.end(aborted=aborted)
        self.context.gradients.copy()
        for param in self.trained_params():
            param.remove_shape_placeholders()  # of gradients that were not produced after all
            if param.grad.drops_at_end:
                param.grad.apply_drops()
        if self.memory is not None:
            self.memory.forget_prefetched()
        self.reshard_all()
        self.context.in_backward = False
        if self.chunk_checks is not None:
            self.chunk_checks.end_backward(self.agreement)

    def abort_backward(self) -> None:
        """Discard a backward that raised, after joining what the other ranks still launch in it."""
        self.end_backward(aborted=True)
        self.drop_gradients()
        for param in self.trained_params():
            param.grad.clear_autograd_gradients()

    def drop_gradients(self) -> None:
        """Discard all gradients of the accumulation window."""
        self.in_flight.finish_reductions()
        for unit in self.trained_units:
            unit.drop_gradients()

    def late_units(self) -> list[Unit]:
        """Return the units with gradients that are not reduced, at the step."""
        return [unit for unit in self.trained_units if unit.grad_state is GradientState.OPEN]

    def reduce_late(self) -> None:
        """Reduce units in which any rank has late gradients once more. All ranks call this together."""
        late = self.late_units()
        mine = torch.tensor([unit in late for unit in self.trained_units], dtype=torch.int32)
        everybody = self.agreement.exchange("the late gradients", mine).sum(0).tolist()
        for unit, late_on in zip(self.trained_units, everybody, strict=True):
            if late_on:
                # Its gradients may be late again, so only the end of a backward reduces it from here on.
                unit.reduces_at_end = True
                self.order.close_last(unit)
                Unit.launch_reduce_scatter([unit])
        self.in_flight.finish_reductions()

    # -- step ---------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether the job has a single rank."""
        return self.in_flight.collective.group.size == 1

    @property
    def num_shards(self) -> int:
        """Number of ranks that hold one model state. The ranks after them hold replicas."""
        return self.in_flight.collective.group.num_shards

    def trained_params(self) -> Iterator[FlatParam]:
        """Yield all trained flat parameters."""
        return (param for unit in self.trained_units for param in unit.trained_params)

    def synchronize_for_step(self, numbers: Sequence[int]) -> list[list[int]]:
        """Reshard everything and synchronize at the step. Return the numbers of every rank."""
        self.reshard_for("a step")
        for param in self.trained_params():
            param.invalidate_secondary()
        return self.order.synchronize(Request.STEP, numbers)

    def synchronize_for_load(self, number: int = 0) -> list[int]:
        """Finish everything in flight and synchronize before a load. Return the number of every rank."""
        self.reshard_for("load_checkpoint")
        self.wait_for_step()
        for param in (param for unit in self.units for param in unit.params):
            param.invalidate_secondary()
            if param.store.param is not None:
                param.store.param.forget_prefetched()  # copies of values that are about to change
        for param in self.trained_params():
            param.grad.reset_error_feedback()
        return [row[0] for row in self.order.synchronize(Request.LOAD, [number])]

    def reshard_for(self, what: str) -> None:
        """Reshard everything, or raise if the user has gathered some of it."""
        gathered = [unit.name for unit in self.units if unit.is_gathered_by_user]
        if gathered:
            raise RuntimeError(
                f"{what} inside GatheredParameters of {', '.join(gathered)} is not possible. Leave the context first."
            )
        if self.memory is not None:
            self.memory.forget_prefetched()  # shards are about to change
        self.reshard_all()

    def gather_loaded(self) -> None:
        """All-gather parameters that stay unsharded, after each rank has loaded its slices."""
        for unit in self.units:
            params = [
                param
                for param in unit.params
                if param.stays_unsharded and (self._plan.shards_states or not param.trainable)
            ]
            if params and not self.alone:
                self.in_flight.all_gather_loaded(unit.name, [AllGatherOp(param.full) for param in params])

    def gradients_to_step(self) -> Iterator[tuple[list[Unit], dict[ShardStore, torch.Tensor]]]:
        """Yield batches of units in the order of first use, with the gradient that this rank steps each shard with."""
        batches = self.order.step_batches
        if self._plan.shards_states or self.alone:
            for batch in batches:
                yield batch, {param.store: param.grad.reduced for unit in batch for param in unit.trained_params}
            return
        ahead = deque(self._launch_gradient_gather(batch) for batch in batches[:1])
        for position, batch in enumerate(batches):
            ahead.extend(self._launch_gradient_gather(after) for after in batches[position + 1 : position + 2])
            gathered, pending = ahead.popleft()
            self.in_flight.wait(pending)
            yield batch, gathered
            for gradient in gathered.values():
                self.in_flight.pool.give_back(gradient)

    def _launch_gradient_gather(self, batch: list[Unit]) -> tuple[dict[ShardStore, torch.Tensor], PendingCollective]:
        gathered, gatherings = {}, []
        for param in (param for unit in batch for param in unit.trained_params):
            gathered[param.store] = self.in_flight.pool.take(param.layout.total, param.grad.reduced.dtype)
            gatherings.append(AllGatherOp(gathered[param.store], param.grad.reduced))
        size = sum(gradient.numel() for gradient in gathered.values())
        names = [unit.name for unit in batch]
        return gathered, self.in_flight.launch_gradient_gather(names, gatherings, size)

    def stepped_on_host(self) -> list[ShardStore]:
        """Return the shards that the host steps, in order of first use.

        Parameters that stay unsharded come first, because the other ranks wait for them.
        """
        params = [param for batch in self.order.step_batches for unit in batch for param in unit.trained_params]
        on_host = [param for param in params if param.store.is_offloaded]
        return [param.store for param in sorted(on_host, key=lambda param: not param.stays_unsharded)]

    def gather_updated(self, batch: list[Unit] | None = None) -> None:
        """Launch the all-gathers of updated parameters, for some units or for all."""
        for units in self.order.step_batches if batch is None else [batch]:
            launch_update_gather(units)

    def wait_for_step(self) -> None:
        """Wait for everything that a step has left in flight."""
        self.in_flight.finish_updates()
        for unit in self.sharded_units:
            for param in unit.params_with_offloaded_states:
                param.store.finish_step()

    def abandon_step(self) -> None:
        """Abandon a step that failed, without waiting for the rest of it."""
        self.in_flight.abandon_updates()
        for param in self.trained_params():
            param.store.abandon_step()

    def end_step(self) -> None:
        """End a step after its gradients were dropped. Without overlap, wait for everything it has left in flight."""
        if self._cache is not None:
            self._cache.after_step()
        if not self._plan.overlap:
            self.wait_for_step()

    # -- changes that the user has made to parameters since the last step ---------------------------------------

    def check_in_place(self) -> None:
        """Raise if the user has cast, moved or unfrozen parameters, which the step would not update."""
        for name, parameter in self._frozen:
            if raw_grad(parameter) is not None:
                raise RuntimeError(
                    f"Parameter {name} was frozen at initialize and has a gradient now, but no optimizer state. "
                    "Unfreeze it before initialize, or initialize again."
                )
        for unit in self.trained_units:
            for param in unit.trained_params:
                member, parameter = param.layout.members[0], param.parameters[0]
                is_sharded = not param.stays_unsharded and unit.param_state is ParameterState.SHARDED
                there = 0 if is_sharded else param.full[member.start : member.stop].data_ptr()
                if parameter.numel() and parameter.data_ptr() != there:
                    raise RuntimeError(
                        f"Parameter {member.name} is no longer a view of its flat parameter, because the model was "
                        "cast, moved or given new .data after initialize. Do that before, or write values in place."
                    )

    def frozen_names(self) -> list[str]:
        """Return the names of trained parameters that the user has frozen since `initialize`."""
        return sorted(p.layout.members[index].name for p in self.trained_params() for index in p.store.frozen)

    def written_names(self) -> list[str]:
        """Return the names of unsharded parameters whose version counters show a write since the last step."""
        return sorted(name for param in self.unsharded_params() for name in param.written_names())

    def note_values(self) -> None:
        """Record version counters, so that `written_names` reports writes from here on."""
        for param in self.unsharded_params():
            param.note_values()

    def unsharded_params(self) -> Iterator[FlatParam]:
        """Yield the flat parameters that stay unsharded."""
        return (param for unit in self.units for param in unit.params if param.stays_unsharded)

    def dropped_names(self) -> list[str]:
        """Return the names of parameters whose gradient the user has dropped after its reduction."""
        return sorted(p.layout.members[index].name for p in self.trained_params() for index in p.grad.drops_of_sums)

    def forget_units(self) -> None:
        """Release the units when the engine is destroyed."""
        self.context.forget_cached()
        for held in (self.units, self.trained_units, self.sharded_units, self.context.sharded_units, self._frozen):
            held.clear()
        self.order.forget_units()
