"""The schedule of a step over all units: passes, backwards, and what is unsharded, reduced and refreshed around them.
`order` knows which collective comes next, `in_flight` starts and finishes it, `unit` tells a unit's own life.

[Note: gradients that come late]
A gradient may land after its unit has been launched: a module run twice under reentrant checkpointing reports each
run by itself, and a rank that was held to have skipped a unit may come to it after all. Such gradients stay in the
unit's slots and travel with its next reduction; if the step comes first, the scalars that ranks exchange at every step
say so, and all ranks reduce those units once more (`reduce_late`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch

from onefold.comm import Agreement, Collective, Ledger
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.shard_store import ShardStore
from onefold.plan import Plan
from onefold.pool import Pool
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.held import raw_grad
from onefold.runtime.in_flight import InFlightCollectives
from onefold.runtime.order import Order, Request
from onefold.runtime.unit import GradientState, ParameterState, Unit


class Schedule:
    """All units of an engine, at the moments of a step."""

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
        self.trained = [unit for unit in units if unit.trained]
        self.sharded = [unit for unit in units if unit.sharded]
        self.in_backward = False
        agreement = Agreement(collective.group, ledger)
        self.in_flight = InFlightCollectives(plan, collective, agreement.guard, pool, memory)
        self.order = Order(units, plan, self.in_flight, agreement, ledger)
        for unit in units:
            unit.join(self)
        self._plan = plan
        self.memory = memory
        frozen = [param for unit in units for param in unit.params if not param.trainable]
        self._frozen = [(name, p) for param in frozen for name, p in param.named_parameters() if not p.requires_grad]
        # Kinds of state that `offload_states` has moved off the device, by name.
        self.offloaded: frozenset[str] = frozenset()
        # Reloads them, where a program has moved them by hand and does not call `reload_states`.
        self.wake: Callable[[], object] | None = None
        # The unit that `GatheredParameters` read last: a loop over parameters gathers each unit once.
        self.cached: Unit | None = None
        # Forwards under way, of the outermost module and of units.
        self.depth = 0
        # Numbers the calls of units that have a backward.
        self.calls = count(1)
        self.num_backwards = 0

    # -- passes -------------------------------------------------------------------------------------------------

    @property
    def in_pass(self) -> bool:
        """Inside a forward, or between a forward and its backward: all ranks are there, so a unit can be unsharded."""
        return self.depth > 0 or self.order.open

    def check_present(self) -> None:
        """Raise if the weights that compute are off the device."""
        self._check_reloaded(self.offloaded & {"lp_params"})

    def check_awake(self) -> None:
        """Raise if any kind of state is off the device."""
        self._check_reloaded(self.offloaded)

    def _check_reloaded(self, missing: frozenset[str]) -> None:
        if missing and self.wake is not None:
            self.wake()
        elif missing:
            raise RuntimeError(
                f"the engine's states are off the device ({', '.join(sorted(missing))}): call engine.reload_states() "
                "first"
            )

    def begin_pass(self) -> None:
        """The outermost module is called, and its outputs will have gradients."""
        self.check_present()
        if self.sharded:
            self.begin_sharded_pass(forward=True)

    def begin_sharded_pass(self, *, forward: bool) -> None:
        started = self.order.open
        self.order.begin(forward=forward)
        if not started:  # otherwise an earlier forward of this pass still waits for its backward
            for unit in self.sharded:
                unit.uses.forget_pass()
                unit.uses.calls = 0 if forward else unit.uses.calls
                unit.reshard_unused()

    def reshard_after_evaluation(self) -> None:
        if self.depth == 0 and not self.order.open:
            self.reshard_all()

    def forget_cached(self) -> None:
        """Free the unsharded values that `GatheredParameters` has left for its next reader."""
        unit, self.cached = self.cached, None
        for param in unit.sharded if unit is not None else ():
            param.forget_cached()

    def reshard_all(self) -> None:
        """Everything that nobody has borrowed."""
        self.forget_cached()
        for unit in self.sharded:
            unit.uses.forget_pass()
            unit.reshard_unused()

    # -- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self, *, boundary: bool) -> None:
        """`boundary`: a step follows. Plans that keep unsharded gradients reduce only then."""
        self.in_backward = True
        self.num_backwards += 1
        self.forget_cached()
        if not self.sharded or not self.order.open:
            self.order.begin(forward=False)
        self.order.reduces = boundary or not self._plan.keeps_whole_gradient
        self.in_flight.before_step = boundary
        for unit in self.trained:
            unit.expect_gradients()
        if not boundary:
            for param in self.trained_params():
                param.grad.accumulate(self.in_flight.pool)

    def end_backward(self, *, aborted: bool = False) -> None:
        """Every gradient of this backward has landed. What got none is reduced with zeros."""
        if self.order.open:
            self.order.end(aborted=aborted)
        for param in self.trained_params():
            param.end_stand_ins()  # of gradients that did not land after all
            if param.grad.drops_at_end:
                param.grad.end_backward()
        if self.memory is not None:
            self.memory.forget_prefetched()
        self.reshard_all()
        self.in_backward = False

    def abort_backward(self) -> None:
        """Backward raised. Join what the other ranks still do, forget everything, and be ready for another try."""
        self.end_backward(aborted=True)
        self.drop_gradients()
        for param in self.trained_params():
            param.grad.drop_landing()

    def drop_gradients(self) -> None:
        self.in_flight.finish_reductions()
        for unit in self.trained:
            unit.drop_gradients(self.in_flight.pool)

    def late_units(self) -> list[Unit]:
        """Units that still hold gradients which were not reduced, at the step."""
        return [unit for unit in self.trained if unit.gradient is GradientState.OPEN]

    def reduce_late(self) -> None:
        """Reduce once more whatever units any rank has late gradients in. Every rank calls this together."""
        late = self.late_units()
        mine = torch.tensor([unit in late for unit in self.trained], dtype=torch.int32)
        everybody = self.order.agreement.exchange("the late gradients", mine).sum(0).tolist()
        for unit, late_on in zip(self.trained, everybody, strict=True):
            if late_on:
                # It came late once: from now on only the end of backward finishes it.
                unit.shared = True
                self.order.close_last(unit)
                self.in_flight.start_reduction([unit])
        self.in_flight.finish_reductions()

    # -- step ---------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        return self.in_flight.collective.group.size == 1

    @property
    def num_shards(self) -> int:
        """The first ranks, that hold every byte of model state once between them."""
        return self.in_flight.collective.group.num_shards

    def trained_params(self) -> Iterator[FlatParam]:
        return (param for unit in self.trained for param in unit.trained)

    def meet_for_step(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, once every rank is at its step."""
        self.reshard_for("a step")
        for param in self.trained_params():
            param.invalidate_secondary()
        return self.order.meet(Request.STEP, numbers)

    def meet_for_load(self, number: int = 0) -> list[int]:
        """Every rank's number, once nothing is in flight anywhere and nobody uses what is about to be written."""
        self.reshard_for("load_checkpoint")
        self.wait_for_step()
        for param in (param for unit in self.units for param in unit.params):
            param.invalidate_secondary()
        for param in self.trained_params():
            param.grad.forget_error()
        return [row[0] for row in self.order.meet(Request.LOAD, [number])]

    def reshard_for(self, what: str) -> None:
        """Reshard everything, or raise if the user has gathered some of it."""
        lent = [unit.name for unit in self.units if unit.uses.lent]
        if lent:
            raise RuntimeError(f"{what} inside GatheredParameters of {', '.join(lent)}: leave the context first")
        if self.memory is not None:
            self.memory.forget_prefetched()  # shards are about to change
        self.reshard_all()

    def refresh_now(self) -> None:
        """This rank's slices of what stays unsharded were written: every rank gets all of them."""
        for unit in self.units:
            params = [
                param
                for param in unit.params
                if param.stays_unsharded and (self._plan.shards_states or not param.trainable)
            ]
            if params and not self.alone:
                self.in_flight.refresh_now(unit, params)

    def gradients_to_step(self) -> Iterator[tuple[list[Unit], dict[ShardStore, torch.Tensor]]]:
        """Batches in the order of first use, each shard with the gradient this rank steps it with."""
        batches = self.order.refresh_batches
        if self._plan.shards_states or self.alone:
            for batch in batches:
                yield batch, {param.store: param.grad.reduced for unit in batch for param in unit.trained}
        else:
            yield from self.in_flight.unsharded_gradients(batches)

    def stepped_on_host(self) -> list[ShardStore]:
        """What the host steps, in the order of first use; what other ranks wait for comes before what is gathered."""
        params = [param for batch in self.order.refresh_batches for unit in batch for param in unit.trained]
        on_host = [param for param in params if param.store.is_offloaded]
        return [param.store for param in sorted(on_host, key=lambda param: not param.stays_unsharded)]

    def start_refreshes(self) -> None:
        for batch in self.order.refresh_batches:
            self.in_flight.start_refresh(batch)

    def wait_for_step(self) -> None:
        """Whatever a step left in flight has arrived."""
        self.in_flight.finish_refreshes()
        for unit in self.sharded:
            for param in unit.sharded:
                param.store.finish_step()

    def abandon_step(self) -> None:
        """Nothing that is still to come from a step is waited for any more."""
        self.in_flight.give_up_refreshes()
        for param in self.trained_params():
            param.store.abandon_step()

    def end_step(self) -> None:
        if not self._plan.overlap:
            self.wait_for_step()

    # -- what users have done to parameters since the last step -------------------------------------------------

    def check_in_place(self) -> None:
        """Someone may have cast, moved or unfrozen the bare model: what is stepped would not be what computes."""
        for name, parameter in self._frozen:
            if raw_grad(parameter) is not None:
                raise RuntimeError(
                    f"parameter {name} was frozen at initialize and has a gradient now: it has no optimizer state. "
                    "Unfreeze it before initialize, or initialize again"
                )
        for unit in self.trained:
            for param in unit.trained:
                member, parameter = param.layout.members[0], param.parameters[0]
                is_sharded = not param.stays_unsharded and unit.parameter is ParameterState.SHARDED
                there = 0 if is_sharded else param.full[member.start : member.stop].data_ptr()
                if parameter.numel() and parameter.data_ptr() != there:
                    raise RuntimeError(
                        f"parameter {member.name} no longer lies where initialize put it: the model was cast, moved "
                        "or given new .data after initialize. Do that before, or write values in place"
                    )

    def frozen_names(self) -> list[str]:
        """Trained parameters that the user has frozen since `initialize`."""
        return sorted(p.layout.members[index].name for p in self.trained_params() for index in p.store.frozen)

    def written_names(self) -> list[str]:
        """Unsharded parameters that the user has written to in place since the last step, as version counters show."""
        return sorted(name for param in self.unsharded_params() for name in param.written_names())

    def note_values(self) -> None:
        """Writes up to now have been seen."""
        for param in self.unsharded_params():
            param.note_values()

    def unsharded_params(self) -> Iterator[FlatParam]:
        return (param for unit in self.units for param in unit.params if param.stays_unsharded)

    def dropped_names(self) -> list[str]:
        """Parameters whose gradient the user has dropped after it was summed over the ranks."""
        return sorted(p.layout.members[index].name for p in self.trained_params() for index in p.grad.drops_of_sums)

    def forget_units(self) -> None:
        self.forget_cached()
        for held in (self.units, self.trained, self.sharded, self._frozen):
            held.clear()
        self.order.forget_units()
