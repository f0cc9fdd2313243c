"""Units, the parameters that are unsharded, reduced and stepped together, and the life of one from forward to step.

[Note: when a unit may be resharded]
After its forward, unless the program keeps it. In backward, when nothing will read it any more: when the producer of
an input of every call that had begun is about to run (autograd runs later nodes first, so all of the call's nodes
have), or, for a call without inputs that need gradients, when all its gradients have landed. Whatever is still
unsharded when backward ends is resharded then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from onefold.comm import Gathering, Reduction
from onefold.plan import Moment
from onefold.pool import Pool
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.parameter_proxy import set_proxy_class, set_updating_class, sharded_error
from onefold.runtime.torch_internals import unrecorded

if TYPE_CHECKING:
    from onefold.runtime.schedule import Schedule


class ParameterState(Enum):
    """SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED. A unit whose parameters all stay unsharded is always UNSHARDED."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class GradientState(Enum):
    """EMPTY -> OPEN (gradients land) -> REDUCING (in flight) -> EMPTY, the sum left in each gradient's shard."""

    EMPTY = "empty"
    OPEN = "open"
    REDUCING = "reducing"


class Uses:
    """Who needs a unit unsharded right now, on this rank.

    `forwards`: calls of its module under way. `backwards`: calls whose backward has begun and not ended; `calls` and
    `ended` count those of the pass that will have a backward, and those whose backward is over.
    `held`: somebody outside reads it; it stays until the pass ends. `lent`: open `GatheredParameters`.
    """

    def __init__(self) -> None:
        self.forwards = 0
        # The forwards under way: the number of the call, 0 without a backward, and the producers of its inputs.
        self.stack: list[tuple[int, list[object]]] = []
        self.backwards: set[int] = set()
        self.calls = 0
        self.ended = 0
        self.held = False
        self.lent = 0
        # The event of the program that this use belongs to, where one is followed.
        self.event: int | None = None

    @property
    def any(self) -> bool:
        return bool(self.forwards or self.backwards or self.held or self.lent)

    def forget_pass(self) -> None:
        self.backwards.clear()
        self.ended = 0
        self.held = False
        self.event = None


class Unit:
    """The parameters of one module, or of what is left outside others, as flat parameters."""

    def __init__(self, name: str, module: nn.Module, params: Sequence[FlatParam], *, index: int, shared: bool) -> None:
        self.name = name or "(root)"
        self.module = module
        self.params = list(params)
        self.trained = [param for param in params if param.trainable]
        self.sharded = [param for param in params if not param.stays_unsharded]
        # What a step changes and every rank holds: all-gathered after it.
        self.refreshed = [param for param in self.trained if param.stays_unsharded]
        self.index = index
        # Its module contains modules of other units.
        self.encloses = False
        # Some gradient may arrive twice in one backward, so only the end of backward finishes this unit.
        self.shared = shared
        self.parameter = ParameterState.UNSHARDED
        self.gradient = GradientState.EMPTY
        self.uses = Uses()
        # Stepped, and the other ranks' slices of what stays unsharded are on their way.
        self.is_refreshing = False
        # Gathers in flight. A unit that is unsharded may be gathered again, since another rank needs this one's shard.
        self.num_gathers = 0
        self.num_elements = sum(param.layout.total for param in self.trained)
        self.num_gathered = sum(param.layout.total for param in self.sharded)
        self._num_to_land = 0
        for param in self.params:
            param.store.unit = self.name
        # An engine holds its schedule; a unit must not.
        self._schedule: weakref.ref[Schedule] | None = None

    @property
    def schedule(self) -> Schedule:
        schedule = self._schedule() if self._schedule is not None else None
        assert schedule is not None, "a unit of an engine that is gone"
        return schedule

    def join(self, schedule: Schedule) -> None:
        """From now on the schedule knows which collective comes next."""
        self._schedule = weakref.ref(schedule)

    # -- the all-gather of updated parameters -------------------------------------------------------------------

    def begin_refresh(self) -> None:
        self.is_refreshing = True
        for parameter in self._refreshed_parameters():
            set_updating_class(parameter)

    def end_refresh(self) -> None:
        self.is_refreshing = False
        for parameter in self._refreshed_parameters():
            set_proxy_class(parameter, sharded=False)

    def _refreshed_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for param in self.refreshed for parameter in param.parameters)

    # -- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, *, recompute: bool = False) -> None:
        """The unit's module is about to run. `recompute`: inside a backward, for activation checkpointing."""
        schedule = self.schedule
        schedule.check_present()
        self.uses.forwards += 1
        schedule.depth += 1
        if self.uses.forwards == 1 or self.parameter is not ParameterState.UNSHARDED:
            self.unshard(Moment.BACKWARD if recompute else Moment.FORWARD)

    def post_forward(self, *, recompute: bool = False) -> None:
        schedule = self.schedule
        self.uses.forwards -= 1
        schedule.depth -= 1
        if not recompute and not schedule.order.keeps(self):
            self.reshard_unused()
        schedule.reshard_after_evaluation()

    # -- backward -----------------------------------------------------------------------------------------------

    def pre_backward(self, call: int, *, looks_up: bool = False) -> None:
        """A gradient has reached an output of one call of the unit's module. Negative: its end cannot be seen.
        `looks_up`: its backward reads no values.
        """
        if looks_up and not torch.is_grad_enabled():
            return
        if not self.uses.backwards:
            self.unshard(Moment.BACKWARD)
        self.uses.backwards.add(call)
        if torch.is_grad_enabled():  # a backward that is itself recorded leaves nodes that no hook knows
            self.keep_for_pass()

    def expect_gradients(self) -> None:
        """A backward begins: so many parameters may get a gradient."""
        self._num_to_land = sum(len(param.parameters) for param in self.trained)

    def land(self, param: FlatParam, index: int, backward_number: int) -> None:
        """Autograd has produced one parameter's gradient."""
        schedule = self.schedule
        while self.gradient is GradientState.REDUCING:
            schedule.in_flight.finish_reduction()
        self.open_gradients(schedule.in_flight.pool)
        grad = param.grad
        grad.accumulate_into_slot(index)
        param.remove_shape_placeholders()
        if grad.last_backward[index] == backward_number:
            return
        grad.last_backward[index] = backward_number
        self._num_to_land -= 1
        if self._num_to_land == 0:
            if not self.shared:
                schedule.order.finish(self)
            if not self.encloses and all(param.trainable for param in self.sharded):
                self.post_backward([call for call in self.uses.backwards if call < 0])

    def post_backward(self, calls: Iterable[int]) -> None:
        """Nothing of these calls is left to run backward."""
        schedule, uses = self.schedule, self.uses
        ended = uses.backwards.intersection(calls)
        uses.backwards -= ended
        uses.ended += len(ended)
        if ended and not uses.backwards:
            if schedule.in_backward and self.trained and uses.ended >= uses.calls and not self.shared:
                schedule.order.finish(self)
            if not schedule.order.keeps(self):
                self.reshard_unused()

    # -- uses from outside its module ---------------------------------------------------------------------------

    def read(self, *, backward: bool = False, within: bool = False) -> None:
        """A parameter is read outside its module's forward: it stays unsharded until the pass, or evaluation, ends."""
        schedule = self.schedule
        schedule.in_flight.wait_for_refresh(self)
        within = within or backward or schedule.in_pass
        if self.sharded and within and not self.uses.any:
            self.unshard(Moment.BACKWARD if backward else Moment.FORWARD)
            self.keep_for_pass()

    def lend(self) -> None:
        """Unsharded until `take_back`, whatever happens in between."""
        schedule = self.schedule
        schedule.check_present()
        if schedule.order.open:
            self.unshard(Moment.FORWARD)
        elif self.sharded:
            with unrecorded():
                schedule.in_flight.wait_for_refresh(self)
                is_cached = schedule.cached is self and all(param.has_valid_cache() for param in self.sharded)
                if not is_cached:
                    schedule.forget_cached()
                schedule.order.lend(self, is_cached=is_cached)
        else:
            schedule.in_flight.wait_for_refresh(self)
        self.uses.lent += 1

    def take_back(self, *, cache: bool = False) -> None:
        """End a `lend`. `cache`: nothing was written, and the same unit may be lent next."""
        schedule = self.schedule
        self.uses.lent -= 1
        if schedule.order.open and torch.is_grad_enabled():
            self.keep_for_pass()  # what was computed from it may have a backward that nobody sees begin
        if cache and self.sharded and not self.uses.any and not schedule.in_pass and not schedule.in_backward:
            schedule.forget_cached()
            for param in self.sharded:
                param.cache_unsharded()
            schedule.cached = self
        self.reshard_unused(lent=True)

    def use_cached(self) -> None:
        """Unshard from the values of the last `lend`."""
        assert self.parameter is ParameterState.SHARDED, (self.name, self.parameter)
        for param in self.sharded:
            param.restore_cached()
        self.parameter = ParameterState.UNSHARDED

    def keep_for_pass(self) -> None:
        """Somebody outside uses it, and nothing tells for how long: it stays unsharded until the pass ends."""
        self.uses.held = True

    def begin_call(self) -> int:
        """The number of a use that will have a backward."""
        self.uses.calls += 1
        return next(self.schedule.calls)

    def is_seen_by(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors is a view of these parameters."""
        found = list(tensors)
        return any(param.is_seen_by(found) for param in self.sharded)

    def hand_out(self) -> None:
        """Somebody got a view of these parameters, and may keep it."""
        for param in self.sharded:
            param.handed_out = True

    # -- unshard and reshard ------------------------------------------------------------------------------------

    def unshard(self, moment: Moment) -> None:
        """All-gather the parameters in the order that all ranks keep, and wait for them."""
        schedule = self.schedule
        schedule.in_flight.wait_for_refresh(self)
        schedule.order.note_use(self)
        if not self.sharded:
            return
        schedule.forget_cached()
        begins = not schedule.order.open and (torch.is_grad_enabled() or moment is Moment.BACKWARD)
        with unrecorded():
            if begins:
                schedule.begin_sharded_pass(forward=moment is Moment.FORWARD)
            schedule.order.demand(moment, self)
            schedule.in_flight.wait_for_unshard(self)

    def start_unshard(self, *, lossless: bool = False, use_secondary: bool = False) -> list[Gathering]:
        """What the collective has to gather."""
        self.num_gathers += 1
        if self.parameter is ParameterState.SHARDED:
            self.parameter = ParameterState.UNSHARDING
        return [param.prepare_all_gather(lossless=lossless, use_secondary=use_secondary) for param in self.sharded]

    def undo_unshard(self) -> None:
        """It could not be started."""
        for param in self.sharded:
            param.invalidate_secondary()
        self.num_gathers -= 1
        if self.parameter is ParameterState.UNSHARDING and not self.num_gathers:
            self.parameter = ParameterState.SHARDED
            for param in self.sharded:
                param.free_unsharded()

    def finish_unshard(self) -> None:
        """The gather is done."""
        self.num_gathers -= 1
        # A unit that was unsharded when another rank asked for it stays as it is.
        if self.parameter is ParameterState.UNSHARDING:
            for param in self.sharded:
                param.attach_views()
            self.parameter = ParameterState.UNSHARDED
        for param in self.sharded:
            param.fill_secondary()

    def reshard_unused(self, *, lent: bool = False) -> None:
        """Reshard, unless somebody on this rank still uses it. `lent`: the borrower answers for what he wrote."""
        if not self.sharded or self.parameter is not ParameterState.UNSHARDED or self.uses.any:
            return
        schedule = self.schedule
        schedule.in_flight.wait_for_unshard(self)
        written = [] if lent else [name for param in self.sharded for name in param.written_names()]
        self.reshard(drop=not (schedule.order.open or schedule.in_backward))
        if written:
            raise sharded_error(written, "a write in place inside a forward or backward")

    def reshard(self, *, drop: bool = False) -> None:
        """Free the unsharded parameters. `drop`: no graph will look for the next values in the memory of these."""
        assert self.parameter is ParameterState.UNSHARDED, (self.name, self.parameter)
        assert not self.num_gathers, self.name
        if self.sharded:
            for param in self.sharded:
                param.free_unsharded(drop=drop)
            self.parameter = ParameterState.SHARDED

    def write_back(self) -> None:
        """The unsharded values were written from outside: shards take them over."""
        assert self.parameter is ParameterState.UNSHARDED, (self.name, self.parameter)
        for param in self.sharded:
            param.update_shard()

    # -- gradients ----------------------------------------------------------------------------------------------

    def open_gradients(self, pool: Pool) -> None:
        if self.gradient is GradientState.EMPTY:
            for param in self.trained:
                param.grad.take_slot(pool)
            self.gradient = GradientState.OPEN
        assert self.gradient is GradientState.OPEN, (self.name, self.gradient)

    def start_reduction(self, prescale: float, pool: Pool) -> list[Reduction]:
        """What the collective has to reduce and scatter."""
        assert self.gradient is GradientState.OPEN, (self.name, self.gradient)
        self.gradient = GradientState.REDUCING
        return [param.grad.prepare_reduce_scatter(prescale, pool) for param in self.trained]

    def finish_reduction(self, pool: Pool) -> None:
        assert self.gradient is GradientState.REDUCING, (self.name, self.gradient)
        for param in self.trained:
            param.grad.store_reduced(pool)
        self.gradient = GradientState.EMPTY

    def drop_gradients(self, pool: Pool) -> None:
        assert self.gradient is not GradientState.REDUCING, self.name
        for param in self.trained:
            param.grad.drop(pool)
        self.gradient = GradientState.EMPTY
