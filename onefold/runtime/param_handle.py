"""Handles of parameters: how code outside of a forward unshards, reads and writes a parameter.

The units of a live engine are gathered through its schedule, so that all ranks agree on the all-gather. Parameters
without an engine (between `zero.Init` and `initialize`, or after the engine was destroyed) are gathered here, by all
ranks together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from onefold.comm import Agreement, AllGatherOp, Collective, Ledger, assert_same_on_all_ranks, broadcast_from
from onefold.offload.write_check import fingerprint
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.order import Request
from onefold.runtime.parameter_proxy import (
    HANDLE,
    raw_grad,
    restore_plain_class,
    set_data,
    set_proxy_class,
    set_raw_grad,
)
from onefold.runtime.sharded_operation import run_on_sharded
from onefold.runtime.torch_internals import describe, inside_backward
from onefold.runtime.unit import Unit
from onefold.runtime.unit_state import ParameterState, UnitContext

_next_number = 0

# Called for parameters that get a handle, and for those that lose it.
on_attach: list[Callable[[nn.Parameter, ParamHandle], None]] = []
on_detach: list[Callable[[nn.Parameter], None]] = []


class Owner(Protocol):
    """The engine, as far as handles and hooks use it."""

    def begin_bare_backward(self) -> None:
        """Begin a backward that the user has started with `loss.backward()`."""

    def abort_backward(self) -> None:
        """Abort a bare backward that has raised."""

    def about_to_write(self) -> None:
        """Finish what is in flight, before the user writes to parameters."""

    def parameters_loaded(self, units: list[Unit]) -> None:
        """Update the masters of units that the user has written to."""

    def gradient_dropped(self) -> None:
        """Note that the user has set a parameter's `grad` to None."""

    def model_moved(self) -> None:
        """Note that the user has moved a parameter to another device."""


class ParamHandle:
    """Flat parameters that are unsharded and resharded together.

    `number` is that of the first parameter, and the same on every rank.
    """

    num_contexts = 0
    """Number of `GatheredParameters` that are open in this process."""

    def __init__(self, params: Sequence[FlatParam], collective: Collective, ledger: Ledger) -> None:
        global _next_number
        self.number = _next_number
        _next_number += sum(len(param.parameters) for param in params)
        self.num_acquired = 0
        self.is_new = True
        self.collective = collective
        self.ledger = ledger
        # Weak, because the engine owns the unit and a handle must not keep it alive.
        self._unit: weakref.ref[Unit] | None = None
        self._owner: weakref.ref[Owner] | None = None
        self._params: list[FlatParam] | None = list(params)
        self._members = {
            id(parameter): (which, index)
            for which, param in enumerate(params)
            for index, parameter in enumerate(param.parameters)
        }
        for param in params:
            for parameter in param.parameters:
                parameter.__dict__[HANDLE] = self
                set_proxy_class(parameter, sharded=not param.stays_unsharded and param.is_sharded)
        self._notify()

    @staticmethod
    def of_unit(unit: Unit, ledger: Ledger, owner: Owner) -> ParamHandle:
        """Make the handle of a unit of a live engine."""
        handle = ParamHandle(unit.params, unit.context.in_flight.collective, ledger)
        handle._unit, handle._params, handle._owner = weakref.ref(unit), None, weakref.ref(owner)
        handle.is_new = False
        return handle

    def _notify(self) -> None:
        here = [parameter for param in self.params for parameter in param.parameters if handle_of(parameter) is self]
        for attached in on_attach:
            for parameter in here:
                attached(parameter, self)

    @property
    def owner(self) -> Owner | None:
        """The live engine of the parameters."""
        return self._owner() if self._owner is not None else None

    @property
    def unit(self) -> Unit | None:
        """The unit of a live engine."""
        return self._unit() if self._unit is not None else None

    @property
    def _context(self) -> UnitContext | None:
        unit = self.unit
        return unit.context if unit is not None else None

    @property
    def params(self) -> list[FlatParam]:
        """The flat parameters."""
        unit = self.unit
        params = unit.params if unit is not None else self._params
        assert params is not None
        return params

    def location_of(self, parameter: torch.Tensor) -> tuple[FlatParam, int]:
        """Return the flat parameter of a parameter, and the parameter's index in it."""
        which, index = self._members[id(parameter)]
        return self.params[which], index

    def number_of(self, parameter: torch.Tensor) -> int:
        """Return the number of a parameter, which is the same on every rank."""
        return self.number + list(self._members).index(id(parameter))

    def stand_alone(self) -> None:
        """Take over sharded parameters when the engine is destroyed. Others become plain Parameters."""
        params, self._unit, self._owner = self.params, None, None
        for param in params:
            param.forget_training()
        if all(param.stays_unsharded for param in params):
            detach(parameter for param in params for parameter in param.parameters)
        else:
            self._params = params
            self._notify()  # shards were moved out of the engine's memory

    @property
    def in_flight(self) -> bool:
        """Whether the all-gather of the parameters is in flight."""
        unit = self.unit
        return unit is not None and unit.param_state is ParameterState.UNSHARDING

    def acquire(self, *, blank: bool = False) -> None:
        """Unshard until `release`. All ranks call this together.

        `blank`: gather nothing if there is no engine, because all values are about to be overwritten.
        """
        unit = self.unit
        with torch._C.DisableTorchFunction():
            if unit is not None:
                unit.gather_for_user()
            elif self.num_acquired == 0:
                sharded = [param for param in self.params if not param.stays_unsharded]
                with torch.inference_mode(mode=False), torch.no_grad():
                    gatherings = [param.prepare_all_gather(lossless=True) for param in sharded]
                    if not blank:
                        self.gather("gather of", gatherings)
                    for param in sharded:
                        param.attach_views()
        self.num_acquired += 1

    def release(self, *, cache: bool = False) -> None:
        """End an `acquire`. `cache`: nothing was written, so the engine may keep the values for the next one."""
        self.num_acquired -= 1
        unit = self.unit
        with torch._C.DisableTorchFunction():
            if unit is not None:
                unit.end_gather_context(cache=cache)
            elif self.num_acquired == 0:
                for param in self.params:
                    if not param.stays_unsharded:
                        param.free_unsharded(drop=True)

    def gather(self, what: str, gatherings: list[AllGatherOp]) -> None:
        """All-gather and wait, under a name that the hang guard reports. All ranks call this together."""
        name = self.params[0].layout.members[0].name
        with self._agreement.guard.launching(what, [name]):
            self.collective.start_gather(gatherings).finish()

    # -- operations of the proxy (parameter_proxy.ProxyHandle) --------------------------------------------------

    def check_present(self) -> None:
        """Raise while the engine's weights are off the device."""
        context = self._context
        if context is not None:
            context.check_present()

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter in its layout."""
        param, index = self.location_of(parameter)
        return param.layout.members[index].name

    @property
    def in_pass(self) -> bool:
        """Whether the engine is in a pass, so that all ranks can unshard together."""
        context = self._context
        return context is not None and context.in_pass

    def operate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sharded: list[nn.Parameter]
    ) -> Any:
        """Run one torch function on sharded parameters, inside a pass."""
        _check_has_values(sharded, func)
        units = [unit for handle in handles_of(sharded) if (unit := handle.unit) is not None]
        return run_on_sharded(units, func, args, kwargs, sharded)

    @property
    def may_be_initialised(self) -> bool:
        """Whether code may initialise sharded parameters.

        It may if no engine has had them and no `GatheredParameters` is open, inside which one rank writes alone.
        """
        return self.is_new and not ParamHandle.num_contexts

    def initialise(
        self, parameter: nn.Parameter, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an in-place function that every rank calls, as initialising code does after `zero.Init`.

        All ranks get rank 0's values.
        """
        what = f"{getattr(func, '__name__', func)}() on a parameter before initialize"
        assert_same_on_all_ranks(what, [(self.name_of(parameter), {"number": str(self.number_of(parameter))})])
        self.acquire()
        try:
            result = func(*args, **kwargs)
            self.take_values_of(0)
        finally:
            self.release()
        return result

    def set_data(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Write `parameter.data = value` into the flat parameter, while the parameter is unsharded."""
        unit = self.unit
        is_gathered = unit is not None and unit.is_gathered_by_user
        if self.owner is None or (is_gathered and value.shape != parameter.shape):
            set_data(parameter, value)  # `GatheredParameters` and `Init` handle it, on all ranks together
            return
        if (value.shape, value.dtype) == (parameter.shape, parameter.dtype) and not (is_gathered or self.in_pass):
            self._move(parameter, value)
            return
        if (value.shape, value.dtype, value.device) != (parameter.shape, parameter.dtype, parameter.device):
            raise RuntimeError(
                f"Parameter {self.name_of(parameter)} ({parameter.dtype}, {tuple(parameter.shape)} on "
                f"{parameter.device}) was given data of {value.dtype}, {tuple(value.shape)} on {value.device}, but the "
                "engine's model cannot be cast or resized, nor moved inside a pass. Do it before initialize. Dtypes "
                "and devices are set in the config."
            )
        if value.data_ptr() != parameter.data_ptr() or value.stride() != parameter.stride():
            with torch.no_grad():
                parameter.copy_(value)

    def _move(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Move a parameter to another device, or back to the engine's.

        On another device it is a copy. The engine keeps and saves its own values, and can compute again when the
        model was moved back.
        """
        param, index = self.location_of(parameter)
        if value.device != param.full.device:
            set_data(parameter, value)
            if (owner := self.owner) is not None:
                owner.model_moved()
            return
        if parameter.device != param.full.device:
            set_data(parameter, param.view_of(index))
        with torch.no_grad():
            parameter.copy_(value)

    def finish_update(self) -> None:
        """Wait until the parameters that the last step has updated are gathered from all ranks."""
        unit = self.unit
        if unit is not None:
            with torch._C.DisableTorchFunction():
                unit.wait_for_update()

    def data_read(self, parameter: nn.Parameter) -> None:
        """Detect writes through `parameter.data` by value, because resharding would lose them."""
        param, index = self.location_of(parameter)
        if self.in_pass and not param.stays_unsharded:
            param.look_for_writes(index)

    def set_requires_grad(self, parameter: nn.Parameter, value: bool) -> None:
        """Leave a frozen parameter out of the step until it is unfrozen."""
        param, index = self.location_of(parameter)
        if param.trainable:
            (param.store.frozen.discard if value else param.store.frozen.add)(index)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the value of `p.grad`, whose gradient was copied into the flat gradient."""
        param, index = self.location_of(parameter)
        return param.grad.of_parameter(index) if param.trainable and self.unit is not None else None

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Handle `p.grad = value`: None discards the engine's gradient, any other value raises."""
        param, index = self.location_of(parameter)
        unit = self.unit
        # Autograd has just accumulated it. This is a user hook, which runs before ours and may change the gradient.
        is_new = inside_backward() and raw_grad(parameter) is not None
        if value is not None and param.trainable and self.owner is not None and not is_new:
            raise RuntimeError(
                f"The gradient of {self.name_of(parameter)} is reduced and stored by the engine. Set it between "
                "backward and step with onefold.utils.safe_set_full_grad(parameter, value)."
            )
        set_raw_grad(parameter, value)
        if value is not None or not param.trainable or unit is None:
            return
        if inside_backward() and (is_new or unit.context.in_backward):
            param.grad.drops_at_end.add(index)
        else:
            param.grad.drop_of_parameter(index)
            owner = self.owner
            if owner is not None:
                owner.gradient_dropped()

    def moved(self) -> bool:
        """Return whether a parameter was given another tensor (`.data = ...`) while it was unsharded."""
        with torch._C.DisableTorchFunction():
            present = [param for param in self.params if not param.is_sharded]  # others are gathered in FP8
            return any(not param.is_attached(index) for param in present for index in range(len(param.parameters)))

    def reshaped(self) -> list[str]:
        """Return the names of parameters that were given data of another shape."""
        with torch._C.DisableTorchFunction():
            return [name for param in self.params for name in param.reshaped_names()]

    def cast(self, of: Callable[[torch.dtype], torch.dtype]) -> None:
        """Change the dtype of the parameters, before any engine has them."""
        for param in self.params:
            if of(param.dtype) != param.dtype:
                param.cast(of(param.dtype))
        self._notify()

    def leave_unsharded(self) -> None:
        """End an `acquire` without resharding.

        The engine's next forward or step reshards. Without an engine the parameters become plain ones.
        """
        unit = self.unit
        if unit is not None:
            self.num_acquired -= 1
            unit.keep_for_pass()
            unit.end_gather_context()
        else:
            detach(parameter for param in self.params for parameter in param.parameters)

    def read(self) -> None:
        """Unshard for a module that uses these parameters but does not own them."""
        unit = self.unit
        if unit is not None:
            unit.read(within_pass=True)

    def synchronize(self, request: Request, numbers: Sequence[int]) -> list[list[int]]:
        """Synchronize all ranks, and return the numbers of each."""
        context = self._context
        if context is not None:
            return context.order.synchronize(request, numbers)
        return self._agreement.synchronize("GatheredParameters", numbers)

    @property
    def _agreement(self) -> Agreement:
        context = self._context
        if context is not None:
            return context.order.agreement
        return Agreement(self.collective.group, self.ledger)

    def take_values_of(self, rank: int, agreement: Agreement | None = None) -> None:
        """Broadcast the values that one rank has written.

        A parameter that was given data of another shape becomes a plain one, and `initialize` lays it out again.
        `agreement`: all ranks have written, so compare fingerprints first, and broadcast only if they differ.
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for param in self.params:
                detach(param.remove_parameter(name) for name in param.reshaped_names())
                param.take_parameters()
            alike = False
            if agreement is not None and self.collective.group.size > 1:
                mine = torch.stack([fingerprint(param.full) for param in self.params]).cpu()
                rows = agreement.exchange("the values that onefold.zero.Init has made", mine)
                alike = bool((rows == rows[rank]).all())
            for param in self.params:
                if not alike:
                    broadcast_from(self.collective.group, rank, param.full, self.ledger)
                param.update_shard()
        if self.owner is None:
            self._notify()  # the shards are new
        self.report_written()

    def report_written(self) -> None:
        """Discard copies of the old values, and have the engine update its masters, after a write on every rank."""
        for param in self.params:
            param.invalidate_secondary()
        owner, unit = self.owner, self.unit
        if owner is not None and unit is not None:
            owner.parameters_loaded([unit])

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # no engine manages a pickled parameter


def handle_of(parameter: object) -> ParamHandle | None:
    """Return the handle of a parameter, or None for a plain one."""
    handle = getattr(parameter, "__dict__", {}).get(HANDLE)
    return handle if isinstance(handle, ParamHandle) and id(parameter) in handle._members else None


def handles_of(parameters: Iterable[object]) -> list[ParamHandle]:
    """Return the handles of parameters, each once, in the same order on every rank."""
    found = {handle for parameter in parameters if (handle := handle_of(parameter)) is not None}
    return sorted(found, key=lambda handle: handle.number)


def _check_has_values(sharded: Iterable[nn.Parameter], func: Callable[..., Any]) -> None:
    """Raise if a parameter has no values, or only some, in a pass, because it is gathered for its layer alone."""
    for parameter in sharded:
        handle = handle_of(parameter)
        if handle is not None:
            param, index = handle.location_of(parameter)
            if param.fp8 is not None:
                raise RuntimeError(
                    f"{param.layout.members[index].name} is all-gathered in FP8, for its layer only, so "
                    f"{describe(func)} has no values to read. Add the layer to fp8.skip, or set fp8.all_gather to "
                    "false."
                )
            if param.spec.num_expert_parts > 1:
                raise RuntimeError(
                    f"{param.layout.members[index].name} is gathered for its expert layer only, with the experts of "
                    f"this rank, so {describe(func)} would see a part of it. Set onefold.expert_parallel_size to 1, or "
                    "read it in GatheredParameters, outside of forward and backward."
                )


def about_to_write(parameter: object) -> None:
    """Have the engine of a parameter finish what is in flight, before the parameter is written."""
    handle = handle_of(parameter)
    owner = handle.owner if handle is not None else None
    if owner is not None:
        owner.about_to_write()


def unsharded_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter, even while it is a placeholder."""
    handle = handle_of(parameter)
    if handle is None:
        return parameter.shape
    param, index = handle.location_of(parameter)
    return torch.Size(param.layout.members[index].shape)


def detach(parameters: Iterable[nn.Parameter]) -> None:
    """Turn parameters into plain ones. A handle without parameters is freed."""
    for parameter in parameters:
        restore_plain_class(parameter)
        if parameter.__dict__.pop(HANDLE, None) is not None:
            for detached in on_detach:
                detached(parameter)


@contextmanager
def unsharded(parameters: Iterable[nn.Parameter]) -> Iterator[list[ParamHandle]]:
    """Unshard parameters inside a `with` block."""
    handles = handles_of(parameters)
    acquired: list[ParamHandle] = []
    try:
        for handle in handles:
            handle.acquire()
            acquired.append(handle)
        yield handles
    finally:
        for handle in acquired:
            handle.release()
