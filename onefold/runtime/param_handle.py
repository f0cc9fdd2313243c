"""Parameter handles: who can unshard a parameter that is a placeholder.

Units of a live engine are lent by its schedule, so that all ranks agree on the gather. What no engine has taken yet
(`zero.Init`), or has any more, is gathered here, by all ranks together.

[Note: one operation on a sharded parameter]
The units of the parameters are unsharded, the function runs, and they are resharded. Where autograd recorded it, the
units are unsharded again before the first of its nodes runs backward, and resharded when the last of them has. A result
that is a view of the parameter needs its memory: then the unit stays unsharded until the pass ends, and that memory is
never emptied, since the view may be kept for longer. A write would be lost when the unit is resharded, so it raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from onefold.comm import Agreement, Collective, Gathering, Ledger, agree, broadcast_from
from onefold.offload.fingerprint import fingerprint
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.order import Request
from onefold.runtime.parameter_proxy import (
    HANDLE,
    name_of,
    raw_grad,
    restore_plain_class,
    set_data,
    set_proxy_class,
    set_raw_grad,
    sharded_error,
)
from onefold.runtime.torch_internals import inside_backward, inside_transform, tensors_in
from onefold.runtime.unit import ParameterState, Unit

_next_number = 0

# Told of parameters that get a handle and that lose it for good.
on_attach: list[Callable[[nn.Parameter, ParamHandle], None]] = []
on_detach: list[Callable[[nn.Parameter], None]] = []


class Owner(Protocol):
    """The engine, as far as handles and hooks know it."""

    def begin_bare_backward(self) -> None:
        """Somebody called `backward` on a loss; begin it on the schedule."""

    def abort_backward(self) -> None:
        """A bare backward raised and will not end."""

    def about_to_write(self) -> None:
        """Parameters are about to be written from outside."""

    def parameters_loaded(self, units: list[Unit]) -> None:
        """Parameters of these units were written from outside."""

    def gradient_dropped(self) -> None:
        """Somebody has set a parameter's `grad` to None."""

    def model_moved(self) -> None:
        """Somebody has moved a parameter to another device."""


class ParamHandle:
    """Flat parameters that are unsharded and resharded together. `number`: of the first, the same on every rank."""

    num_contexts = 0
    """`GatheredParameters` that are open in this process."""

    def __init__(self, params: Sequence[FlatParam], collective: Collective, ledger: Ledger) -> None:
        global _next_number
        self.number = _next_number
        _next_number += sum(len(param.parameters) for param in params)
        self.lent = 0
        self.is_new = True
        self.collective = collective
        self.ledger = ledger
        # A live engine holds the unit; this must not keep it alive.
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
        self._tell()

    @staticmethod
    def of_unit(unit: Unit, ledger: Ledger, owner: Owner) -> ParamHandle:
        handle = ParamHandle(unit.params, unit.schedule.in_flight.collective, ledger)
        handle._unit, handle._params, handle._owner = weakref.ref(unit), None, weakref.ref(owner)
        handle.is_new = False
        return handle

    def _tell(self) -> None:
        here = [parameter for param in self.params for parameter in param.parameters if handle_of(parameter) is self]
        for tell in on_attach:
            for parameter in here:
                tell(parameter, self)

    @property
    def owner(self) -> Owner | None:
        return self._owner() if self._owner is not None else None

    @property
    def unit(self) -> Unit | None:
        return self._unit() if self._unit is not None else None

    @property
    def params(self) -> list[FlatParam]:
        unit = self.unit
        params = unit.params if unit is not None else self._params
        assert params is not None
        return params

    def place_of(self, parameter: torch.Tensor) -> tuple[FlatParam, int]:
        """The flat parameter that a parameter lies in, and its place there."""
        which, index = self._members[id(parameter)]
        return self.params[which], index

    def number_of(self, parameter: torch.Tensor) -> int:
        """The same on every rank."""
        return self.number + list(self._members).index(id(parameter))

    def stand_alone(self) -> None:
        """The engine goes: from now on sharded parameters are held here; others need no handle."""
        params, self._unit, self._owner = self.params, None, None
        for param in params:
            param.forget_training()
        if all(param.stays_unsharded for param in params):
            detach(parameter for param in params for parameter in param.parameters)
        else:
            self._params = params
            self._tell()  # shards that lay in the engine's memory lie elsewhere now

    @property
    def in_flight(self) -> bool:
        unit = self.unit
        return unit is not None and unit.parameter is ParameterState.UNSHARDING

    def borrow(self, *, blank: bool = False) -> None:
        """Unsharded until given back. All ranks call this together. `blank`: all of it is about to be written, so
        nothing is gathered; where there is no engine.
        """
        unit = self.unit
        with torch._C.DisableTorchFunction():
            if unit is not None:
                unit.lend()
            elif self.lent == 0:
                sharded = [param for param in self.params if not param.stays_unsharded]
                with torch.inference_mode(mode=False), torch.no_grad():
                    gatherings = [param.prepare_all_gather(lossless=True) for param in sharded]
                    if not blank:
                        self.gather("gather of", gatherings)
                    for param in sharded:
                        param.attach_views()
        self.lent += 1

    def give_back(self, *, cache: bool = False) -> None:
        """End a `borrow`. `cache`: nothing was written, and the engine may keep the values for the next reader."""
        self.lent -= 1
        unit = self.unit
        with torch._C.DisableTorchFunction():
            if unit is not None:
                unit.take_back(cache=cache)
            elif self.lent == 0:
                for param in self.params:
                    if not param.stays_unsharded:
                        param.free_unsharded(drop=True)

    def gather(self, what: str, gatherings: list[Gathering]) -> None:
        """Gather now, under a name that the hang guard reports. All ranks call this together."""
        name = self.params[0].layout.members[0].name
        with self._agreement.guard.launching(what, [name]):
            self.collective.start_gather(gatherings).finish()

    # -- what a held parameter asks -----------------------------------------------------------------------------

    def check_present(self) -> None:
        """Raise while the engine's weights are off the device."""
        unit = self.unit
        if unit is not None:
            unit.schedule.check_present()

    def name_of(self, parameter: nn.Parameter) -> str:
        param, index = self.place_of(parameter)
        return param.layout.members[index].name

    @property
    def in_pass(self) -> bool:
        unit = self.unit
        return unit is not None and unit.schedule.in_pass

    def operate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], resting: list[nn.Parameter]
    ) -> Any:
        """One torch function on sharded parameters, inside a pass: penalties over `parameters()`, `functional_call`,
        weight norms. Units are unsharded in one order on every rank.
        """
        again = inside_backward()
        used = [unit for handle in handles_of(resting) if (unit := handle.unit) is not None]
        with ExitStack() as stack:
            for unit in used:
                stack.callback(unit.post_forward, recompute=again)
                unit.pre_forward(recompute=again)
            versions = [parameter._version for parameter in resting]
            result = func(*args, **kwargs)
            written = [p for p, version in zip(resting, versions, strict=True) if p._version != version]
            if written:
                names = [name_of(parameter) for parameter in written]
                raise sharded_error(names, f"{getattr(func, '__name__', func)} writes inside a forward or backward")
            nodes = list(_nodes_of(result, (args, kwargs))) if torch.is_grad_enabled() else []
            for unit in used:
                if unit.is_seen_by(tensors_in(result)):
                    unit.keep_for_pass()
                    unit.hand_out()
                elif inside_transform():
                    unit.keep_for_pass()
                elif nodes:
                    _Recorded.watch(unit, result, nodes, again=again)
        return result

    @property
    def may_be_initialised(self) -> bool:
        """Whether code may still give values to parameters at rest: no engine has had them, and no rank writes alone,
        as one does inside `GatheredParameters`.
        """
        return self.is_new and not ParamHandle.num_contexts

    def initialise(
        self, parameter: nn.Parameter, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One function in place that every rank calls, as initialising code does after `zero.Init`; rank 0's values
        are taken.
        """
        what = f"{getattr(func, '__name__', func)}() on a parameter before initialize"
        agree(what, [(self.name_of(parameter), {"number": str(self.number_of(parameter))})])
        self.borrow()
        try:
            result = func(*args, **kwargs)
            self.take_values_of(0)
        finally:
            self.give_back()
        return result

    def set_data(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """`parameter.data = value` while it is unsharded: its values are written to where they lie."""
        unit = self.unit
        lent = unit is not None and unit.uses.lent > 0
        if self.owner is None or (lent and value.shape != parameter.shape):
            set_data(parameter, value)  # `GatheredParameters` and `Init` see to it, on all ranks together
            return
        if (value.shape, value.dtype) == (parameter.shape, parameter.dtype) and not (lent or self.in_pass):
            self._move(parameter, value)
            return
        if (value.shape, value.dtype, value.device) != (parameter.shape, parameter.dtype, parameter.device):
            raise RuntimeError(
                f"parameter {self.name_of(parameter)} ({parameter.dtype}, {tuple(parameter.shape)} on "
                f"{parameter.device}) was given data of {value.dtype}, {tuple(value.shape)} on {value.device}: the "
                "engine's model cannot be cast or resized, nor moved inside a pass. Do it before initialize; dtypes "
                "and devices come from the config"
            )
        if value.data_ptr() != parameter.data_ptr() or value.stride() != parameter.stride():
            with torch.no_grad():
                parameter.copy_(value)

    def _move(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """The same parameter on another device, or back on the engine's. While it is away it is a copy: the engine
        keeps its own values, saves them, and computes again when the model has come back.
        """
        param, index = self.place_of(parameter)
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
                unit.schedule.in_flight.wait_for_refresh(unit)

    def data_read(self, parameter: nn.Parameter) -> None:
        """From now on writes are looked for by value: resharding would lose them."""
        param, index = self.place_of(parameter)
        if self.in_pass and not param.stays_unsharded:
            param.look_for_writes(index)

    def set_requires_grad(self, parameter: nn.Parameter, value: bool) -> None:
        """A trained parameter that is frozen is left out of the step until it is unfrozen."""
        param, index = self.place_of(parameter)
        if param.trainable:
            (param.store.frozen.discard if value else param.store.frozen.add)(index)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What stands for a gradient that was moved into the flat buffer."""
        param, index = self.place_of(parameter)
        return param.grad.of_parameter(index) if param.trainable and self.unit is not None else None

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        param, index = self.place_of(parameter)
        unit = self.unit
        # Autograd has just left it there: a hook of the user's runs before ours, which will take what it leaves.
        landing = inside_backward() and raw_grad(parameter) is not None
        if value is not None and param.trainable and self.owner is not None and not landing:
            raise RuntimeError(
                f"the gradient of {self.name_of(parameter)} is reduced and held by the engine: set it between "
                "backward and step with onefold.utils.safe_set_full_grad(parameter, value)"
            )
        set_raw_grad(parameter, value)
        if value is not None or not param.trainable or unit is None:
            return
        if inside_backward() and (landing or unit.schedule.in_backward):
            param.grad.drops_at_end.add(index)
        else:
            param.grad.drop_of_parameter(index)
            owner = self.owner
            if owner is not None:
                owner.gradient_dropped()

    def moved(self) -> bool:
        """Whether some parameter was given a tensor of its own while it was unsharded (`.data = ...`)."""
        with torch._C.DisableTorchFunction():
            return any(not param.is_attached(index) for param in self.params for index in range(len(param.parameters)))

    def reshaped(self) -> list[str]:
        """Parameters that were given data of another shape."""
        with torch._C.DisableTorchFunction():
            return [name for param in self.params for name in param.reshaped_names()]

    def cast(self, of: Callable[[torch.dtype], torch.dtype]) -> None:
        """Another dtype for everything here, before any engine has it."""
        for param in self.params:
            if of(param.dtype) != param.dtype:
                param.cast(of(param.dtype))
        self._tell()

    def leave_unsharded(self) -> None:
        """Do not give back: the engine's next forward or step reshards; without an engine parameters are plain now."""
        unit = self.unit
        if unit is not None:
            self.lent -= 1
            unit.keep_for_pass()
            unit.take_back()
        else:
            detach(parameter for param in self.params for parameter in param.parameters)

    def read(self) -> None:
        """A module that does not own these parameters is about to use them."""
        unit = self.unit
        if unit is not None:
            unit.read(within=True)

    def meet(self, request: Request, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers."""
        unit = self.unit
        if unit is not None:
            return unit.schedule.order.meet(request, numbers)
        return self._agreement.meet("GatheredParameters", numbers)

    @property
    def _agreement(self) -> Agreement:
        unit = self.unit
        if unit is not None:
            return unit.schedule.order.agreement
        return Agreement(self.collective.group, self.ledger)

    def take_values_of(self, rank: int, agreement: Agreement | None = None) -> None:
        """One rank has written: its values become everybody's. A parameter that was given data of another shape leaves
        for good, and is laid out anew by `initialize`. `agreement`: all ranks have written, most likely the same, so
        they compare first, and nothing travels where they have.
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
            self._tell()  # of shards that were made just now
        self.tell_written()

    def tell_written(self) -> None:
        """Parameters have new values, on every rank: whoever keeps masters of them must know."""
        for param in self.params:
            param.invalidate_secondary()
        owner, unit = self.owner, self.unit
        if owner is not None and unit is not None:
            owner.parameters_loaded([unit])

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # a pickled parameter is nobody's


def handle_of(parameter: object) -> ParamHandle | None:
    handle = getattr(parameter, "__dict__", {}).get(HANDLE)
    return handle if isinstance(handle, ParamHandle) and id(parameter) in handle._members else None


def handles_of(parameters: Iterable[object]) -> list[ParamHandle]:
    """Each once, in one order on every rank."""
    found = {handle for parameter in parameters if (handle := handle_of(parameter)) is not None}
    return sorted(found, key=lambda handle: handle.number)


def about_to_write(parameter: object) -> None:
    """Somebody outside is about to write a parameter: the engine that trains it, if any, finishes what it does."""
    handle = handle_of(parameter)
    owner = handle.owner if handle is not None else None
    if owner is not None:
        owner.about_to_write()


def unsharded_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, also while it is a placeholder."""
    handle = handle_of(parameter)
    if handle is None:
        return parameter.shape
    param, index = handle.place_of(parameter)
    return torch.Size(param.layout.members[index].shape)


def detach(parameters: Iterable[nn.Parameter]) -> None:
    """These parameters lie elsewhere now; a handle that all have left is freed."""
    for parameter in parameters:
        restore_plain_class(parameter)
        if parameter.__dict__.pop(HANDLE, None) is not None:
            for tell in on_detach:
                tell(parameter)


@contextmanager
def unsharded(parameters: Iterable[nn.Parameter]) -> Iterator[list[ParamHandle]]:
    """Unsharded inside."""
    handles = handles_of(parameters)
    borrowed: list[ParamHandle] = []
    try:
        for handle in handles:
            handle.borrow()
            borrowed.append(handle)
        yield handles
    finally:
        for handle in borrowed:
            handle.give_back()


def _nodes_of(result: Any, inputs: Any) -> Iterable[Any]:
    """The nodes that autograd has made of one torch function."""
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


class _Recorded:
    """An operation that autograd will run backward: a call of the unit, as far as the schedule knows."""

    def __init__(self, unit: Unit, num_nodes: int) -> None:
        self._unit = weakref.ref(unit)
        self._call = unit.begin_call()
        self._num_nodes = self._left = num_nodes

    @staticmethod
    def watch(unit: Unit, result: Any, nodes: list[Any], *, again: bool) -> None:
        recorded = _Recorded(unit, len(nodes))
        first = [tensor.grad_fn for tensor in tensors_in(result)]
        for node in nodes:
            if any(node is output for output in first):
                node.register_prehook(recorded.begin)
            node.register_hook(recorded.end)
        if again:
            unit.uses.backwards.add(recorded._call)  # inside the backward that will run through it at once

    def begin(self, *_: Any) -> None:
        unit = self._unit()
        if unit is not None and self._call not in unit.uses.backwards:
            self._left = self._num_nodes
            unit.pre_backward(self._call)

    def end(self, *_: Any) -> None:
        unit = self._unit()
        self._left -= 1
        if unit is not None and self._left == 0:
            unit.post_backward([self._call])
