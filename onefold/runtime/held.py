"""How a Parameter behaves while its values are held by an engine, or by `zero.Init`.

[Note: classes of held parameters]
A Parameter object is one for life. While its values lie in a flat parameter its class is a cached subclass of its
own class, as torch does with `UninitializedParameter`: `isinstance`, optimizers, hooks and the compiler see a
Parameter.

* Unsharded. Torch functions run as on any Parameter. Three attributes are watched. `data = tensor` writes the values
  into the flat parameter; another shape or dtype raises, and on another device the Parameter is a copy to look at
  until it comes back. `requires_grad` tells the engine what to leave out of the step. `grad` is the engine's:
  autograd's gradient has been moved into a flat buffer, so reading it gives what stands for it, and setting it to None
  drops it.
* Unsharded, while the all-gather of updated values is in flight. An operation on values, in place or not, finishes the
  all-gather first (`finish_update`): the program may hold the Parameter itself, and need not get it from its module.
* Resting. The values are sharded and the Parameter has no elements. Metadata answers as DeepSpeed's does. An operation
  on values is seen by `__torch_function__`: inside a pass it unshards (`ParamHandle.operate`); before `initialize` a
  function in place that every rank calls is served (`ParamHandle.initialise`); elsewhere it raises.

[Note: tensors derived from sharded parameters]
`detach`, `data` and casts of a sharded parameter return a `DerivedTensor` without elements, and reading it raises.
Before `initialize` libraries also initialise such tensors (`init.normal_(weight.float())` in transformers 5.8.0) and
compare their addresses (5.2.0). DeepSpeed has an empty tensor there, so that neither has an effect. onefold does the
same until an engine has the parameter: views and copies are derived tensors too, addresses are 0, and a function that
overwrites all values turns a derived tensor into the plain empty tensor that it would be in DeepSpeed. A function that
reads the values before they are overwritten still raises.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from onefold.log import logger
from onefold.runtime.torch_internals import outside_compiler, tensors_in

if TYPE_CHECKING:
    from onefold.runtime.param_handle import ParamHandle

HOLDER = "_onefold_handle"
_PLAIN = "_onefold_plain_class"
_RESTING = "_onefold_resting"
_UPDATING = "_onefold_updating"


# -- the plain attributes ---------------------------------------------------------------------------------------

_data: Any = torch.Tensor.data
_grad: Any = torch.Tensor.grad
_requires_grad: Any = torch.Tensor.requires_grad


def set_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a Parameter other memory, whatever its class."""
    with torch._C.DisableTorchFunctionSubclass():
        _data.__set__(parameter, value)


def raw_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd has left on the Parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _grad.__get__(parameter)
        return gradient


def set_raw_grad(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(parameter, value)


# -- the classes ------------------------------------------------------------------------------------------------


def hold(parameter: nn.Parameter, *, resting: bool) -> None:
    """The Parameter behaves as one whose values are held, from now on."""
    parameter.__class__ = _held_class(plain_class(parameter), resting)


def hold_while_updating(parameter: nn.Parameter) -> None:
    """Make operations on an unsharded Parameter wait until its updated values have been gathered."""
    parameter.__class__ = _held_class(plain_class(parameter), False, True)


def let_go(parameter: nn.Parameter) -> None:
    """The Parameter is a plain one again."""
    parameter.__class__ = plain_class(parameter)


def plain_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """The class that the user gave it."""
    found: type[nn.Parameter] = getattr(type(parameter), _PLAIN, type(parameter))
    return found


def is_resting(value: object) -> bool:
    return bool(getattr(type(value), _RESTING, False))


@cache
def _held_class(plain: type[nn.Parameter], resting: bool, updating: bool = False) -> type[nn.Parameter]:
    base: type[nn.Parameter] = _held_class(plain, False) if resting or updating else plain
    members: dict[str, Any] = {_PLAIN: plain, _RESTING: resting, _UPDATING: updating, "__module__": plain.__module__}
    members |= _RESTING_MEMBERS if resting else _UPDATING_MEMBERS if updating else _HELD_MEMBERS
    made: Any = type(plain)
    held: type[nn.Parameter] = made(plain.__name__, (base,), members)
    return held


def _holder(parameter: nn.Parameter) -> ParamHandle | None:
    return parameter.__dict__.get(HOLDER)


def _get_data(self: nn.Parameter) -> torch.Tensor:
    holder = _holder(self)
    if holder is not None and not is_resting(self):
        holder.data_read(self)
    values: torch.Tensor = _data.__get__(self)
    return values


def _set_data(self: nn.Parameter, value: torch.Tensor) -> None:
    holder = _holder(self)
    if holder is None or is_resting(self):
        _data.__set__(self, value)  # at rest `__torch_function__` sees it
    else:
        holder.set_data(self, value)


def _set_resting_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Casting or moving a module ends here. Its values rest where the engine has them, so a move changes nothing."""
    if value.numel() or value.dtype != parameter.dtype:
        what = f"data of {value.dtype} on {value.device}, shape {tuple(value.shape)}, for a parameter"
        raise at_rest([name_of(parameter)], what)


def _get_grad(self: nn.Parameter) -> torch.Tensor | None:
    gradient, holder = raw_grad(self), _holder(self)
    return holder.gradient_of(self) if gradient is None and holder is not None else gradient


def _set_grad(self: nn.Parameter, value: torch.Tensor | None) -> None:
    holder = _holder(self)
    if holder is None:
        set_raw_grad(self, value)
    else:
        holder.set_gradient(self, value)


def _get_requires_grad(self: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(_requires_grad.__get__(self))


def _set_requires_grad(self: nn.Parameter, value: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _requires_grad.__set__(self, value)
    holder = _holder(self)
    if holder is not None:
        holder.set_requires_grad(self, bool(value))


def _requires_grad_(self: nn.Parameter, requires_grad: bool = True) -> nn.Parameter:
    _set_requires_grad(self, requires_grad)
    return self


def _deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A copy is nobody's: a plain Parameter."""
    if id(self) not in memo:
        with torch.no_grad():
            values = self.detach()
            if isinstance(values, DerivedTensor):
                raise at_rest([name_of(self)], "copying it")
            copied = values.clone(memory_format=torch.preserve_format)
        memo[id(self)] = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)].__class__ = plain_class(self)
    found: nn.Parameter = memo[id(self)]
    return found


def _reduce(self: nn.Parameter, protocol: Any) -> Any:
    return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())


_HELD_MEMBERS: dict[str, Any] = {
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
    if reads_no_values(func) and func not in _MEMORY:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for value in tensors_in((args, kwargs)):
        if isinstance(value, nn.Parameter) and getattr(type(value), _UPDATING, False):
            finish_update(value)
    return func(*args, **kwargs)


def finish_update(parameter: nn.Parameter) -> None:
    """Wait until the updated values of an unsharded Parameter have been gathered."""
    holder = _holder(parameter)
    if holder is not None:
        holder.finish_update()
    hold(parameter, resting=False)


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
    if func == _data.__set__:
        return _set_resting_data(*args)
    resting = [value for value in tensors_in((args, kwargs)) if isinstance(value, nn.Parameter) and is_resting(value)]
    holder = _holder(resting[0])
    if holder is not None and func not in _WITHOUT_VALUES:
        holder.check_present()
        if not is_resting(resting[0]):  # it was off the device, and is reloaded
            return func(*args, **kwargs)
    if holder is not None and holder.in_pass:
        return holder.operate(func, args, kwargs, resting)
    written = args[0] if args else kwargs.get("tensor")  # functions of `torch.nn.init` come with keywords
    if holder is not None and holder.may_be_initialised and written is resting[0] and _is_in_place(func):
        return holder.initialise(resting[0], func, args, kwargs)
    if func in _WITHOUT_VALUES or (func in _VIEWS and _are_new(resting)):
        return DerivedTensor.of(func, args, kwargs, resting)
    raise at_rest([name_of(parameter) for parameter in resting], _words(func))


_RESTING_MEMBERS: dict[str, Any] = {"__torch_function__": classmethod(_torch_function)}


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
            if func not in _VIEWS:
                raise
            raise at_rest(names, _words(func)) from error  # an index or a shape that needs elements
        if isinstance(result, torch.Tensor) and not result.numel():
            result = result.detach().as_subclass(DerivedTensor)
            # Libraries mark parameters, and look for the marks in `state_dict()`: transformers' `_is_hf_initialized`.
            marks = vars(sources[0]) if len(sources) == 1 else {}
            vars(result).update({name: mark for name, mark in marks.items() if isinstance(mark, bool)})
            result._onefold_names, result._onefold_parameters = names, parameters
            copies = func in _MOVES or func in (torch.Tensor.clone, torch.clone, torch.empty_like)
            result._onefold_is_view = not copies and getattr(sources[0], "_onefold_is_view", True)
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        derived = [value for value in tensors if isinstance(value, DerivedTensor)]
        if func not in _MEMORY and (reads_no_values(func) or func in _WITHOUT_VALUES):
            return DerivedTensor.of(func, args, kwargs, derived)
        parameters = [reference() for value in derived for reference in value._onefold_parameters]
        if _are_new(parameters):
            if func in _ADDRESSES or func in _VIEWS or func is torch.empty_like:
                return DerivedTensor.of(func, args, kwargs, derived)
            written = args[0] if args else kwargs.get("tensor")
            # Values of another tensor would be lost, and DeepSpeed's empty tensor raises there too.
            loses = any(value.dim() and value.numel() for value in tensors)
            if overwrites(func) and written is derived[0] and not loses:
                written._become_plain(func)
                return func(*args, **kwargs)
        raise at_rest([name for value in derived for name in value._onefold_names], _words(func))

    def _become_plain(self, func: Callable[..., Any]) -> None:
        """Give up the parameter's values, because all of them are overwritten."""
        if self._onefold_is_view:
            _warn_of_lost_write(_words(func).replace("a parameter", f"a view of {', '.join(self._onefold_names)}"))
        self.__class__ = torch.Tensor  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise at_rest(self._onefold_names, "pickling it")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise at_rest(self._onefold_names, "copying it")


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
    holders = [_holder(parameter) if parameter is not None else None for parameter in parameters]
    return all(holder is not None and holder.is_new for holder in holders)


class HeldGradient(torch.Tensor):
    """Stands for a gradient that is sharded over the ranks, or scaled: it has a shape and no values. What clears
    gradients (`zero_grad`, `grad = None`, `grad.zero_()`) clears the engine's, and casting or moving a module changes
    nothing here. Reading or writing raises.
    """

    _onefold_parameter: nn.Parameter
    _onefold_name: str
    _onefold_where: str
    SHARDED = "reduced and sharded over the ranks, and not here"

    @staticmethod
    def of(parameter: nn.Parameter, name: str, shape: tuple[int, ...], where: str) -> HeldGradient:
        made: HeldGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            HeldGradient, shape, dtype=parameter.dtype, device=parameter.device
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
        held = [value for value in tensors_in((args, kwargs)) if isinstance(value, HeldGradient)]
        if func in (torch.Tensor.zero_, torch._foreach_zero_):
            for gradient in held:
                gradient._onefold_parameter.grad = None
            return args[0]
        if func in _MOVES and isinstance(args[0], HeldGradient):
            like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            if not func(like, *args[1:], **kwargs).is_meta:  # a model without values has no use for an engine
                return args[0]
        elif func in _MOVES:  # another tensor is cast as the gradient is
            return args[0].to(dtype=held[0].dtype, device=held[0].device)
        if func == _data.__set__ and isinstance(args[1], HeldGradient):
            return None
        raise RuntimeError(
            f"{_words(func)}'s gradient: the gradient of {held[0]._onefold_name} is {held[0]._onefold_where}. Clip "
            "with the config's gradient_clipping; read the norm with "
            "engine.get_global_grad_norm() after the step; read or set one gradient with "
            "onefold.utils.safe_get_full_grad / safe_set_full_grad between backward and step, on all ranks"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(
            f"{func}: the gradient is sharded over the ranks or scaled; use onefold.utils.safe_get_full_grad"
        )


def at_rest(names: list[str], what: str) -> RuntimeError:
    """The error for whoever wants values that are not here."""
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return RuntimeError(
        f"{what}: the values of {shown} are sharded over the ranks and not here. Read or write them inside "
        "onefold.zero.GatheredParameters(parameters) (to write: modifier_rank=0), which all ranks enter together; in "
        "a loss, use parameters after the engine's forward has begun"
    )


def name_of(parameter: nn.Parameter) -> str:
    """The name under which a parameter was laid out."""
    holder = _holder(parameter)
    return holder.name_of(parameter) if holder is not None else "a parameter"


def _words(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f".{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return f"{name} of a parameter" if name.startswith((".", "__")) else f"{name.removeprefix('_')}() on a parameter"


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def overwrites(func: Callable[..., Any]) -> bool:
    """Return whether a function overwrites all values of its first argument."""
    return getattr(func, "__name__", "") in _OVERWRITES


def reads_no_values(func: Callable[..., Any]) -> bool:
    """Metadata: shapes, dtype, device, requires_grad, grad, hooks and their kin."""
    if func in _METADATA:
        return True
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    return func.__name__ in ("__get__", "__set__", "__delete__") and name not in _VALUES


_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}
_METADATA: set[Any] = {
    getattr(torch.Tensor, name)
    for name in """
        size dim ndimension numel nelement stride storage_offset is_contiguous dim_order __len__ data_ptr
        untyped_storage storage element_size get_device is_floating_point is_complex is_signed is_shared is_pinned
        is_inference is_set_to _is_view requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook
        __hash__ __repr__ __format__ __dir__ new_empty new_zeros new_ones new_full new_tensor new_empty_strided
    """.split()  # noqa: SIM905
    if hasattr(torch.Tensor, name)
} | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch._has_compatible_shallow_copy_type}
_ADDRESSES: set[Any] = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage}
# Code that is about to save a tensor's bytes asks for these. safetensors asks for the layout before it asks for an
# address, and would write an empty tensor.
_MEMORY: set[Any] = {*_ADDRESSES, torch.Tensor.layout.__get__}  # type: ignore[attr-defined]
# Outside a pass these give a tensor without values, so that casting and moving a module, and detaching, do not fail
# before anybody reads a value.
_MOVES: set[Any] = {
    getattr(torch.Tensor, name)
    for name in ("to", "half", "float", "double", "bfloat16", "cpu", "cuda", "type", "type_as")
    if hasattr(torch.Tensor, name)
}
_WITHOUT_VALUES: set[Any] = {*_MOVES, torch.Tensor.detach, _data.__get__, torch.detach}
# Before `initialize` these do so too.
_VIEWS: set[Any] = {
    getattr(where, name)
    for where in (torch, torch.Tensor)
    for name in """
        clone contiguous view view_as reshape reshape_as flatten ravel t transpose swapaxes permute squeeze unsqueeze
        narrow __getitem__ alias
    """.split()  # noqa: SIM905
    if hasattr(where, name)
} | {getattr(torch.Tensor, name).__get__ for name in ("T", "mT")}
# Names, because libraries replace functions of `torch.nn.init` by their own while they initialise a model.
_OVERWRITES = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_", "constant_", "zeros_", "ones_", "kaiming_uniform_",
}  # fmt: skip
