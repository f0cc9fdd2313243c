"""Proxy classes of Parameters whose values an engine, or `zero.Init`, stores in a flat parameter.

[Note: proxy classes of parameters]
A Parameter object is never replaced. While its values are in a flat parameter, its class is a cached subclass of its
own class, as torch does with `UninitializedParameter`, so that `isinstance`, optimizers, hooks and the compiler see a
Parameter.

* Unsharded. Torch functions run as on any Parameter. Three attributes are intercepted. `data = tensor` writes the
  values into the flat parameter; another shape or dtype raises; on another device the Parameter is a copy until it is
  moved back. `requires_grad` selects which parameters the step updates. `grad` is managed by the engine: autograd's
  gradient was copied into a flat buffer, so reading returns the gradient or a placeholder, and None discards it.
* Updating: unsharded, while the all-gather of updated values is in flight. An operation on values first waits for the
  all-gather (`finish_update`), because the program may have kept the Parameter instead of reading it from its module.
* Sharded. The Parameter has no elements. Metadata is returned as DeepSpeed does. `__torch_function__` intercepts
  operations on values: inside a pass they unshard (`ProxyHandle.operate`); before `initialize` an in-place function
  that every rank calls is executed (`ProxyHandle.initialise`); otherwise they raise.

[Note: tensors derived from sharded parameters]
`detach`, `data` and casts of a sharded parameter return a `DerivedTensor` without elements, and reading it raises.
Before `initialize` libraries also initialise such tensors (`init.normal_(weight.float())` in transformers 5.8.0) and
compare their addresses (5.2.0). DeepSpeed has an empty tensor there, so that neither has an effect. onefold does the
same until an engine manages the parameter: views and copies are derived tensors too, addresses are 0, and a function
that overwrites all values turns a derived tensor into the plain empty tensor that it would be in DeepSpeed. A function
that reads the values before they are overwritten still raises.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from onefold.log import logger
from onefold.runtime.torch_internals import (
    ADDRESSES,
    DATA,
    MEMORY,
    MOVES,
    VIEWS,
    WITHOUT_VALUES,
    describe,
    is_in_place,
    outside_compiler,
    overwrites,
    reads_no_values,
    tensors_in,
)

HANDLE = "_onefold_handle"
_PLAIN = "_onefold_plain_class"
_SHARDED = "_onefold_sharded"
_UPDATING = "_onefold_updating"


class ProxyHandle(Protocol):
    """Operations that a proxy forwards to the handle of its parameter (`param_handle.ParamHandle`)."""

    is_new: bool

    @property
    def in_pass(self) -> bool: ...

    @property
    def may_be_initialised(self) -> bool: ...

    def check_present(self) -> None: ...

    def name_of(self, parameter: nn.Parameter) -> str: ...

    def data_read(self, parameter: nn.Parameter) -> None: ...

    def set_data(self, parameter: nn.Parameter, value: torch.Tensor) -> None: ...

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None: ...

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None: ...

    def set_requires_grad(self, parameter: nn.Parameter, value: bool) -> None: ...

    def finish_update(self) -> None: ...

    def operate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sharded: list[nn.Parameter]
    ) -> Any: ...

    def initialise(
        self, parameter: nn.Parameter, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


# -- attributes of the Parameter itself -------------------------------------------------------------------------

_grad: Any = torch.Tensor.grad
_requires_grad: Any = torch.Tensor.requires_grad


def set_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set `parameter.data` without the proxy."""
    with torch._C.DisableTorchFunctionSubclass():
        DATA.__set__(parameter, value)


def raw_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that autograd has left on the Parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _grad.__get__(parameter)
        return gradient


def take_raw_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that autograd has left on the Parameter itself, and clear it."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _grad.__get__(parameter)
        if gradient is not None:
            _grad.__set__(parameter, None)
        return gradient


def set_raw_grad(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    """Set `parameter.grad` without the proxy."""
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(parameter, value)


def attach_values(parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
    """Give Parameters their unsharded values, and the proxy class for them."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, view in zip(parameters, views, strict=True):
            DATA.__set__(parameter, view)
            set_proxy_class(parameter, sharded=False)


def detach_values(parameters: Sequence[nn.Parameter], placeholder: torch.Tensor) -> None:
    """Turn Parameters into placeholders without elements, and give them the proxy class for these."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            DATA.__set__(parameter, placeholder)
            set_proxy_class(parameter, sharded=True)


# -- the classes ------------------------------------------------------------------------------------------------


def set_proxy_class(parameter: nn.Parameter, *, sharded: bool) -> None:
    """Give a Parameter the proxy class of its state."""
    now = type(parameter)
    parameter.__class__ = _proxy_class(getattr(now, _PLAIN, now), sharded)


def set_updating_class(parameter: nn.Parameter) -> None:
    """Make operations on an unsharded Parameter wait until its updated values have been gathered."""
    parameter.__class__ = _proxy_class(plain_class(parameter), False, True)


def restore_plain_class(parameter: nn.Parameter) -> None:
    """Remove the proxy class of a Parameter."""
    parameter.__class__ = plain_class(parameter)


def plain_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that the user gave a Parameter."""
    found: type[nn.Parameter] = getattr(type(parameter), _PLAIN, type(parameter))
    return found


def is_sharded(value: object) -> bool:
    """Return whether a value is a Parameter whose values are sharded, so that it is a placeholder."""
    return bool(getattr(type(value), _SHARDED, False))


@cache
def _proxy_class(plain: type[nn.Parameter], sharded: bool, updating: bool = False) -> type[nn.Parameter]:
    base: type[nn.Parameter] = _proxy_class(plain, False) if sharded or updating else plain
    members: dict[str, Any] = {_PLAIN: plain, _SHARDED: sharded, _UPDATING: updating, "__module__": plain.__module__}
    members |= _SHARDED_MEMBERS if sharded else _UPDATING_MEMBERS if updating else _PROXY_MEMBERS
    made: Any = type(plain)
    proxy: type[nn.Parameter] = made(plain.__name__, (base,), members)
    return proxy


def _handle(parameter: nn.Parameter) -> ProxyHandle | None:
    return parameter.__dict__.get(HANDLE)


def _get_data(self: nn.Parameter) -> torch.Tensor:
    handle = _handle(self)
    if handle is not None and not is_sharded(self):
        handle.data_read(self)
    values: torch.Tensor = DATA.__get__(self)
    return values


def _set_data(self: nn.Parameter, value: torch.Tensor) -> None:
    handle = _handle(self)
    if handle is None or is_sharded(self):
        DATA.__set__(self, value)  # `__torch_function__` intercepts it for a sharded Parameter
    else:
        handle.set_data(self, value)


def _set_sharded_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Accept the empty data that casting or moving a module sets, and refuse any other."""
    if value.numel() or value.dtype != parameter.dtype:
        what = f"data of {value.dtype} on {value.device}, shape {tuple(value.shape)}, for a parameter"
        raise sharded_error([name_of(parameter)], what)


def _get_grad(self: nn.Parameter) -> torch.Tensor | None:
    gradient, handle = raw_grad(self), _handle(self)
    return handle.gradient_of(self) if gradient is None and handle is not None else gradient


def _set_grad(self: nn.Parameter, value: torch.Tensor | None) -> None:
    handle = _handle(self)
    if handle is None:
        set_raw_grad(self, value)
    else:
        handle.set_gradient(self, value)


def _get_requires_grad(self: nn.Parameter) -> bool:
    if torch.compiler.is_dynamo_compiling():  # torch 2.11 would trace `__get__` as a call of this function
        with torch.enable_grad():
            return self.view_as(self).requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        return bool(_requires_grad.__get__(self))


def _set_requires_grad(self: nn.Parameter, value: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _requires_grad.__set__(self, value)
    handle = _handle(self)
    if handle is not None:
        handle.set_requires_grad(self, bool(value))


def _requires_grad_(self: nn.Parameter, requires_grad: bool = True) -> nn.Parameter:
    _set_requires_grad(self, requires_grad)
    return self


def _deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copy a Parameter as a plain one, which no engine manages."""
    if id(self) not in memo:
        with torch.no_grad():
            values = self.detach()
            if isinstance(values, DerivedTensor):
                raise sharded_error([name_of(self)], "copying it")
            copied = values.clone(memory_format=torch.preserve_format)
        memo[id(self)] = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)].__class__ = plain_class(self)
    found: nn.Parameter = memo[id(self)]
    return found


def _reduce(self: nn.Parameter, protocol: Any) -> Any:
    return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())


_PROXY_MEMBERS: dict[str, Any] = {
    "data": property(_get_data, _set_data),
    "grad": property(_get_grad, _set_grad, lambda self: _set_grad(self, None)),
    "requires_grad": property(_get_requires_grad, _set_requires_grad),
    "requires_grad_": _requires_grad_,
    "__deepcopy__": _deepcopy,
    "__reduce_ex__": _reduce,
}


# -- operations on parameters whose updated values are being gathered -------------------------------------------


@outside_compiler
def _wait_and_call(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if reads_no_values(func) and func not in MEMORY:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for value in tensors_in((args, kwargs)):
        if isinstance(value, nn.Parameter) and getattr(type(value), _UPDATING, False):
            finish_update(value)
    return func(*args, **kwargs)


def finish_update(parameter: nn.Parameter) -> None:
    """Wait until the updated values of an unsharded Parameter have been gathered."""
    handle = _handle(parameter)
    if handle is not None:
        handle.finish_update()
    set_proxy_class(parameter, sharded=False)


_UPDATING_MEMBERS: dict[str, Any] = {"__torch_function__": classmethod(_wait_and_call)}


# -- operations on sharded parameters ---------------------------------------------------------------------------


@outside_compiler
def _torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if reads_no_values(func):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func == DATA.__set__:
        return _set_sharded_data(*args)
    sharded = [value for value in tensors_in((args, kwargs)) if isinstance(value, nn.Parameter) and is_sharded(value)]
    handle = _handle(sharded[0])
    if handle is not None and func not in WITHOUT_VALUES:
        handle.check_present()
        if not is_sharded(sharded[0]):  # it was off the device and has been reloaded
            return func(*args, **kwargs)
    if handle is not None and handle.in_pass:
        return handle.operate(func, args, kwargs, sharded)
    written = args[0] if args else kwargs.get("tensor")  # functions of `torch.nn.init` come with keywords
    if handle is not None and handle.may_be_initialised and written is sharded[0] and is_in_place(func):
        return handle.initialise(sharded[0], func, args, kwargs)
    if func in WITHOUT_VALUES or (func in VIEWS and _are_new(sharded)):
        return DerivedTensor.of(func, args, kwargs, sharded)
    raise sharded_error([name_of(parameter) for parameter in sharded], describe(func))


_SHARDED_MEMBERS: dict[str, Any] = {"__torch_function__": classmethod(_torch_function)}


class DerivedTensor(torch.Tensor):
    """Tensor without elements that `detach`, `data` and casts of a sharded parameter return. Reading it raises.

    [Note: tensors derived from sharded parameters] says what it allows before `initialize`.
    """

    _onefold_names: list[str]
    _onefold_parameters: list[weakref.ref[nn.Parameter]]
    _onefold_is_view: bool

    @staticmethod
    def of(func: Callable[..., Any], args: Any, kwargs: Any, sources: Sequence[torch.Tensor]) -> Any:
        """Run a function that reads no values on the empty tensors, and derive its result from `sources`."""
        names: list[str] = []
        parameters: list[weakref.ref[nn.Parameter]] = []
        for source in sources:
            if isinstance(source, DerivedTensor):
                names += source._onefold_names
                parameters += source._onefold_parameters
            elif isinstance(source, nn.Parameter):
                names.append(name_of(source))
                parameters.append(weakref.ref(source))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if func not in VIEWS:
                raise
            raise sharded_error(names, describe(func)) from error  # an index or a shape that needs elements
        if isinstance(result, torch.Tensor) and not result.numel():
            result = result.detach().as_subclass(DerivedTensor)
            # Libraries mark parameters, and look for the marks in `state_dict()`: transformers' `_is_hf_initialized`.
            marks = vars(sources[0]) if len(sources) == 1 else {}
            vars(result).update({name: mark for name, mark in marks.items() if isinstance(mark, bool)})
            result._onefold_names, result._onefold_parameters = names, parameters
            copies = func in MOVES or func in (torch.Tensor.clone, torch.clone, torch.empty_like)
            result._onefold_is_view = not copies and getattr(sources[0], "_onefold_is_view", True)
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        derived = [value for value in tensors if isinstance(value, DerivedTensor)]
        if func not in MEMORY and (reads_no_values(func) or func in WITHOUT_VALUES):
            return DerivedTensor.of(func, args, kwargs, derived)
        parameters = [reference() for value in derived for reference in value._onefold_parameters]
        if _are_new(parameters):
            if func in ADDRESSES or func in VIEWS or func is torch.empty_like:
                return DerivedTensor.of(func, args, kwargs, derived)
            written = args[0] if args else kwargs.get("tensor")
            # Values of another tensor would be lost, and DeepSpeed's empty tensor raises there too.
            loses = any(value.dim() and value.numel() for value in tensors)
            if overwrites(func) and written is derived[0] and not loses:
                written._become_plain(func)
                return func(*args, **kwargs)
        raise sharded_error([name for value in derived for name in value._onefold_names], describe(func))

    def _become_plain(self, func: Callable[..., Any]) -> None:
        """Turn into a plain empty tensor, because all values are overwritten."""
        if self._onefold_is_view:
            _warn_of_lost_write(describe(func).replace("a parameter", f"a view of {', '.join(self._onefold_names)}"))
        self.__class__ = torch.Tensor  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise sharded_error(self._onefold_names, "pickling it")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise sharded_error(self._onefold_names, "copying it")


def sources_of(value: object) -> list[object]:
    """Return the sharded parameters that a tensor without values is a view of, or the value itself."""
    if isinstance(value, DerivedTensor) and value._onefold_is_view:
        return [parameter for reference in value._onefold_parameters if (parameter := reference()) is not None]
    return [value]


@cache
def _warn_of_lost_write(what: str) -> None:
    logger.warning(
        "%s before initialize has no effect, as in DeepSpeed, because its values are sharded over the ranks. "
        "Initialise the parameter itself on all ranks, or write inside "
        "onefold.zero.GatheredParameters(parameters, modifier_rank=0).",
        what,
    )


def _are_new(parameters: Sequence[nn.Parameter | None]) -> bool:
    """Return whether no engine has had these parameters."""
    handles = [_handle(parameter) if parameter is not None else None for parameter in parameters]
    return all(handle is not None and handle.is_new for handle in handles)


class GradientPlaceholder(torch.Tensor):
    """Shape without values for a gradient that is sharded over the ranks or multiplied by the loss scale.

    Functions that clear gradients (`zero_grad`, `grad = None`, `grad.zero_()`) clear the engine's gradient. Casting or
    moving a module leaves it as it is. Reading or writing raises.
    """

    _onefold_parameter: nn.Parameter
    _onefold_name: str
    _onefold_where: str
    SHARDED = "reduced and sharded over the ranks"

    @staticmethod
    def of(parameter: nn.Parameter, name: str, shape: tuple[int, ...], where: str) -> GradientPlaceholder:
        """Make the placeholder of a parameter's gradient. `where` completes the error message."""
        made: GradientPlaceholder = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            GradientPlaceholder, shape, dtype=parameter.dtype, device=parameter.device
        )
        made._onefold_parameter, made._onefold_name, made._onefold_where = parameter, name, where
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_no_values(func) or func in (torch.Tensor.detach_, torch.Tensor.detach):
            with torch._C.DisableTorchFunctionSubclass():
                return args[0] if func in (torch.Tensor.detach_, torch.Tensor.detach) else func(*args, **kwargs)
        held = [value for value in tensors_in((args, kwargs)) if isinstance(value, GradientPlaceholder)]
        if func in (torch.Tensor.zero_, torch._foreach_zero_):
            for gradient in held:
                gradient._onefold_parameter.grad = None
            return args[0]
        if func in MOVES and isinstance(args[0], GradientPlaceholder):
            like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            if not func(like, *args[1:], **kwargs).is_meta:  # a model on the meta device has no values
                return args[0]
        elif func in MOVES:  # cast another tensor to the gradient's dtype
            return args[0].to(dtype=held[0].dtype, device=held[0].device)
        if func == DATA.__set__ and isinstance(args[1], GradientPlaceholder):
            return None
        raise RuntimeError(
            f"{describe(func)}'s gradient: the gradient of {held[0]._onefold_name} is {held[0]._onefold_where}. Clip "
            "with the config's gradient_clipping, read the norm with "
            "engine.get_global_grad_norm() after the step, or read and set one gradient with "
            "onefold.utils.safe_get_full_grad / safe_set_full_grad between backward and step, on all ranks."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(
            f"{func}: the gradient is sharded over the ranks or scaled. Use onefold.utils.safe_get_full_grad."
        )


def sharded_error(names: list[str], what: str) -> RuntimeError:
    """Return the error for an operation on values that are sharded."""
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return RuntimeError(
        f"{what}: the values of {shown} are sharded over the ranks. Read or write them on all ranks inside "
        "onefold.zero.GatheredParameters(parameters) (to write: modifier_rank=0). In a loss, use parameters "
        "after the engine's forward has begun."
    )


def name_of(parameter: nn.Parameter) -> str:
    """Return the name of a parameter in its layout."""
    handle = _handle(parameter)
    return handle.name_of(parameter) if handle is not None else "a parameter"
