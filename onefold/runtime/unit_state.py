"""States and use counts of a unit, and the context that all units of an engine share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from itertools import count
from typing import Any, Protocol

from onefold.comm import Agreement
from onefold.fp8 import Fp8Scales
from onefold.offload.shard_store import ShardStore
from onefold.plan import PassPhase, Plan
from onefold.runtime.flat_grad import GradientBatch
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.in_flight import InFlightCollectives


class ParameterState(Enum):
    """SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED. A unit whose parameters all stay unsharded is always UNSHARDED."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class GradientState(Enum):
    """EMPTY -> OPEN (gradients are accumulated) -> REDUCING (in flight) -> EMPTY, the sum in the gradient shard."""

    EMPTY = "empty"
    OPEN = "open"
    REDUCING = "reducing"


class Uses:
    """Use counts of a unit on this rank. Only the unit writes them."""

    def __init__(self) -> None:
        # Calls of the module, and operations on its parameters, under way.
        self.forwards = 0
        # For each call under way: its number (0 without a backward, negative if its end has no hook), and the nodes
        # that produced its inputs.
        self.stack: list[tuple[int, list[object]]] = []
        # Numbers of the calls whose backward has begun and not ended.
        self.backwards: set[int] = set()
        # Calls of this pass that have a backward, and those whose backward has ended.
        self.calls = 0
        self.ended = 0
        # Whether the unit must stay unsharded until the pass ends.
        self.until_pass_ends = False
        # `GatheredParameters` that are open.
        self.gathered_by_user = 0
        # The event of the recorded order that the last unshard belongs to.
        self.event: int | None = None

    @property
    def any(self) -> bool:
        """Whether the unit has to stay unsharded."""
        return bool(self.forwards or self.backwards or self.until_pass_ends or self.gathered_by_user)

    def clear_pass(self) -> None:
        """Discard the uses that last until the pass ends."""
        self.backwards.clear()
        self.ended = 0
        self.until_pass_ends = False
        self.event = None


class CollectiveOrder(Protocol):
    """The order of collectives as far as units use it. `order.Order` implements it. Units are named by their index."""

    open: bool
    """Whether a pass is under way."""
    agreement: Agreement

    def begin(self, *, forward: bool) -> None: ...

    def record_use(self, unit: int) -> None: ...

    def request_unshard(self, phase: PassPhase, unit: int) -> int | None: ...

    def keeps(self, event: int | None) -> bool: ...

    def request_reduce_scatter(self, unit: int) -> None: ...

    def synchronize(self, request: IntEnum, numbers: Sequence[int]) -> list[list[int]]: ...

    def all_have_cached(self, unit: int, *, is_cached: bool) -> bool: ...


class PassMember(Protocol):
    """A unit as far as its context uses it. `unit.Unit` implements it."""

    sharded_params: list[FlatParam]

    def end_uses_of_pass(self, *, reset_calls: bool = False) -> None: ...


class UnitContext:
    """State that all units of an engine share, as FSDP2's `FSDPCommContext`."""

    def __init__(
        self, units: Sequence[PassMember], plan: Plan, in_flight: InFlightCollectives, order: CollectiveOrder
    ) -> None:
        self.sharded_units = [unit for unit in units if unit.sharded_params]
        self.plan = plan
        self.in_flight = in_flight
        self.order = order
        # Forwards under way, of the outermost module and of units.
        self.depth = 0
        # Numbers of calls that have a backward.
        self.calls = count(1)
        self.in_backward = False
        self.num_backwards = 0
        # Whether a step follows the present backward.
        self.before_step = False
        params = [param for unit in self.sharded_units for param in unit.sharded_params]
        self.fp8_scales = Fp8Scales([(param.fp8, param.stepped_shard) for param in params if param.fp8 is not None])
        # Gradients that are not in their slots yet.
        self.gradients = GradientBatch()
        # Called with each shard whose gradient is complete, in the last backward before a step.
        self.on_reduced: Callable[[ShardStore], None] = lambda store: None
        # Called with each flat gradient of this rank when its reduction is launched.
        self.on_gradient: Callable[[Any, Any, Any], None] | None = None
        # The unit that `GatheredParameters` read last: a loop over parameters gathers each unit once.
        self.cached: PassMember | None = None
        # Kinds of state that `offload_states` has moved off the device, by name.
        self.moved_kinds: frozenset[str] = frozenset()
        # Reloads them, if a program has moved them by hand and does not call `reload_states`.
        self.wake: Callable[[], object] | None = None

    @property
    def in_pass(self) -> bool:
        """Whether a forward is under way or waits for its backward, so that all ranks can unshard a unit."""
        return self.depth > 0 or self.order.open

    def check_present(self) -> None:
        """Raise if the model weights are off the device."""
        self._check_reloaded(self.moved_kinds & {"lp_params"})

    def check_awake(self) -> None:
        """Raise if any kind of state is off the device."""
        self._check_reloaded(self.moved_kinds)

    def _check_reloaded(self, missing: frozenset[str]) -> None:
        if missing and self.wake is not None:
            self.wake()
        elif missing:
            raise RuntimeError(
                f"The engine's states are offloaded ({', '.join(sorted(missing))}). Call engine.reload_states() first."
            )

    def begin_sharded_pass(self, *, forward: bool) -> None:
        """Begin a pass of sharded units, with its forward or, if no forward of it was seen, with its backward."""
        was_open = self.order.open
        self.order.begin(forward=forward)
        if not was_open:  # otherwise an earlier forward of this pass still waits for its backward
            for unit in self.sharded_units:
                unit.end_uses_of_pass(reset_calls=forward)

    def reshard_after_evaluation(self) -> None:
        """Reshard everything when the outermost forward without a backward has ended."""
        if self.depth == 0 and not self.order.open:
            self.reshard_all()

    def reshard_all(self) -> None:
        """Reshard all units that the user has not gathered."""
        self.forget_cached()
        for unit in self.sharded_units:
            unit.end_uses_of_pass()

    def forget_cached(self) -> None:
        """Free the unsharded values that `GatheredParameters` has kept for its next use."""
        unit, self.cached = self.cached, None
        for param in unit.sharded_params if unit is not None else ():
            param.drop_cache()
