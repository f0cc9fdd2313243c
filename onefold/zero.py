"""Build a model as shards, read and write its sharded parameters, and load and stream weights.

[Note: building without ever holding the whole]
Inside `Init` torch tells us of every module that a parent takes as its child, right after the child's constructor;
its parameters are sharded there and then, one provisional handle a module, rank 0's values on every rank. No class is
patched. A parent that initialises its children's weights afterwards (`nn.init`, `.data`, `apply`) meets placeholders:
a torch-function mode sees the call, makes the module whole around it and takes rank 0's result. Parameters are cast
when all of them have their values, so that these are what a plain constructor and a cast would give. `initialize`
lays everything out anew, unit by unit.

Everything is built on the device: random numbers are made there, and nothing goes through the host. Ranks that were
seeded alike make the same values, so they compare fingerprints, and values travel only where these differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from onefold.checkpoint.state.weights import load_safetensors, stream_weights
from onefold.comm import (
    Agreement,
    Ledger,
    assert_same_by_exchange,
    data_group,
    init_distributed,
    local_device,
    make_collective,
)
from onefold.config import Config, load_config
from onefold.engine.offloaded_states import OffloadStateTypeEnum
from onefold.offload.write_check import fingerprint
from onefold.plan import FlatParamSpec, Layout, Placement, Plan, Precision, StatePlan
from onefold.plan.plan import make_precision
from onefold.runtime import FlatParam, ParamHandle, handle_of, handles_of, unsharded_shape
from onefold.runtime.order import Request
from onefold.runtime.parameter_proxy import plain_class, sources_of
from onefold.runtime.torch_internals import is_plain_float, overwrites, reads_no_values, tensors_in

__all__ = [
    "GatheredParameters", "Init", "OffloadStateTypeEnum", "gather_distributed_parameters", "load_safetensors",
    "register_external_parameter", "stream_weights", "unregister_external_parameter",
]  # fmt: skip

_SHARDED = StatePlan(Placement.SHARDED)
_PLAN = Plan(_SHARDED, _SHARDED, _SHARDED)

# Handles that stay open behind the one being written: code that initialises modules goes from one to the next.
_OPEN_HANDLES = 4


class Init:
    """A context in which every module is sharded as soon as it is built.

    No rank ever holds the whole model: each module is built on the device with the values that it has outside of the
    context, and each rank keeps its part. `Init(module=model)` shards a module that exists.

    Floating-point parameters are cast to `dtype`, by default that of the config's `bf16` or `fp16` section. Buffers
    are not cast. With `enabled=False` the context has no effect. The arguments are those of DeepSpeed; those that
    onefold does not support raise an error.
    """

    _active: Init | None = None
    _plan = _PLAN

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | torch.device | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | PathLike[str] | Config | None = None,
        config: Mapping[str, Any] | str | PathLike[str] | Config | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        others = {
            "data_parallel_group": data_parallel_group,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights or None,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights or None,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(f"zero.Init does not support {', '.join(given)}. Leave these arguments out.")
        self._enabled = enabled
        if not enabled:
            return
        source = config_dict_or_path if config_dict_or_path is not None else config
        settings = self._read_config(source) if source is not None else Config()
        init_distributed(nccl_error_handling=settings.onefold.nccl_error_handling)
        if str(remote_device).partition(":")[0] not in ("None", "none", "cpu", "nvme", local_device().type):
            raise ValueError(
                f"zero.Init: remote_device {str(remote_device)!r} is not supported. Leave it out: shards are stored on "
                f"{local_device()} until initialize moves them to the tier in the config."
            )
        base = make_precision(settings) if source is not None else Precision()
        self._precision = base if dtype is None else replace(base, compute=dtype)
        self._group, self._device, self._ledger = data_group(), local_device(), Ledger()
        self._collective = make_collective("auto", self._group, self._ledger, self._device)
        self._agreement = Agreement(self._group, self._ledger)
        self._hooks: list[Any] = []
        self._owners: list[weakref.ref[nn.Module]] = []
        self._open: list[ParamHandle] = []
        self._made: list[weakref.ref[ParamHandle]] = []
        self._touch = _Touch(self)
        self._on_device: Any = self._device if self._device.type == "cuda" else nullcontext()
        if module is not None:
            self._shard(module)
            self._cast()

    @staticmethod
    def _read_config(source: Any) -> Config:
        return load_config(source)

    def __enter__(self) -> Init:
        if self._enabled and Init._active is not None:
            self._first_owner = len(Init._active._owners)
        elif self._enabled:
            Init._active = self
            self._hooks = [
                register_module_module_registration_hook(self._child_taken),
                register_module_parameter_registration_hook(lambda owner, *_: self._owners.append(weakref.ref(owner))),
            ]
            self._on_device.__enter__()
            self._touch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        outer = Init._active
        if outer is not self:
            if self._enabled and outer is not None and error[0] is None:
                outer._shard_owners(self._first_owner)  # what was built in here is complete
            return
        self._touch.__exit__(*error)
        self._on_device.__exit__(*error)
        Init._active = None
        for hook in self._hooks:
            hook.remove()
        if error[0] is None:
            self._close(0)
            self._shard_owners(0)
            self._cast()
        self._owners.clear()

    def _shard_owners(self, first: int) -> None:
        """Shard what no parent has taken, from one module that got parameters on."""
        for owner in [reference() for reference in self._owners[first:]]:
            if owner is not None:
                self._shard_own(owner)

    def _child_taken(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        if child is not None:
            self._shard(child)

    def _shard(self, module: nn.Module) -> None:
        for inner in module.modules():
            self._shard_own(inner)

    def _shard_own(self, module: nn.Module) -> None:
        """Make one handle for the parameters that a module owns directly and that have none yet."""
        found: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            fit = plain_class(parameter) is nn.Parameter and is_plain_float(parameter.dtype) and not parameter.is_meta
            if fit and handle_of(parameter) is None:
                found.setdefault(parameter.dtype, []).append((name, parameter))
        if not found:
            return
        with torch._C.DisableTorchFunction():
            shapes = {n: f"{tuple(p.shape)} {p.dtype}" for members in found.values() for n, p in members}
            assert_same_by_exchange(self._agreement, "onefold.zero.Init", [(type(module).__name__, shapes)])
            params = []
            for dtype, members in found.items():
                layout = Layout.of([(name, tuple(parameter.shape), 0) for name, parameter in members], self._group.size)
                spec = FlatParamSpec(layout, dtype, trainable=False, persistent=False)
                own = [parameter for _, parameter in members]
                params.append(FlatParam(spec, own, plan=self._plan, rank=self._group.rank, device=self._device))
            handle = ParamHandle(params, self._collective, self._ledger)
            handle.take_values_of(0, self._agreement)
            handle.num_acquired = 1
            handle.release()
        self._made.append(weakref.ref(handle))

    def _cast(self) -> None:
        for handle in (reference() for reference in self._made):
            if handle is not None:
                handle.cast(self._precision.of_parameter)
        self._made.clear()

    # -- writes by a parent's own initialisation ----------------------------------------------------------------

    def open(self, handle: ParamHandle, *, blank: bool = False) -> None:
        """Unshard the parameters of a handle until others have been opened after it. `blank`: without their values."""
        if handle not in self._open:
            handle.acquire(blank=blank)
            self._open.append(handle)
            self._close(_OPEN_HANDLES)

    @contextmanager
    def overwriting(self, handle: ParamHandle) -> Iterator[None]:
        """Open a handle for overwriting one of its parameters. The only parameter of a handle is not gathered.

        A write that raises leaves the former values.
        """
        blank = handle not in self._open and sum(len(param.parameters) for param in handle.params) == 1
        self.open(handle, blank=blank)
        try:
            yield
        except BaseException:
            if blank:
                self._open.remove(handle)
                handle.release()
            raise

    def check_apart(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Refuse to let a parameter lie in the memory of another one: each is sharded by itself, so they would part."""
        for handle in self._open:
            if handle is not handle_of(parameter) and any(param.is_seen_by([value]) for param in handle.params):
                raise ValueError(
                    "two parameters share memory inside zero.Init (b.weight.data = a.weight.data). Tie the Parameter "
                    "itself (b.weight = a.weight), or clone its values."
                )

    def _close(self, keep: int) -> None:
        while len(self._open) > keep:
            handle = self._open.pop(0)
            with torch._C.DisableTorchFunction():
                for param in handle.params:
                    param.take_parameters()  # `.data` may have been given a tensor of its own
                handle.take_values_of(0, self._agreement)
                handle.release()


class _Touch(TorchFunctionMode):
    """Answers for placeholders: their shape from their handle, everything else from the unsharded tensor."""

    def __init__(self, init: Init) -> None:
        super().__init__()
        self._init = init

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parameters = (value for value in tensors_in((args, kwargs)) if isinstance(value, nn.Parameter))
        resting = [(parameter, handle) for parameter in parameters if (handle := handle_of(parameter)) is not None]
        if resting:
            if func in _SHAPES:
                return _SHAPES[func](unsharded_shape(resting[0][0]), *args[1:], **kwargs)
            if reads_no_values(func):
                return func(*args, **kwargs)
            written = args[0] if args else kwargs.get("tensor")
            if len(resting) == 1 and written is resting[0][0] and overwrites(func):
                with self._init.overwriting(resting[0][1]):
                    return func(*args, **kwargs)
            for _, handle in resting:
                self._init.open(handle)
        if func == _SET_DATA:
            self._init.check_apart(*args)
        return func(*args, **kwargs)


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SHAPES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: lambda shape: shape,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__: len,  # type: ignore[attr-defined]
    torch.Tensor.size: lambda shape, dim=None: shape if dim is None else shape[dim],
    torch.Tensor.dim: len,
    torch.Tensor.numel: lambda shape: shape.numel(),
    torch.Tensor.nelement: lambda shape: shape.numel(),
    torch.Tensor.__len__: lambda shape: shape[0],
}


class GatheredParameters:
    """A context in which the given parameters are unsharded. All ranks enter it together.

    `params` is one parameter or an iterable of them; plain tensors and None in it are skipped. With `modifier_rank`
    the values of that rank are kept on all ranks. Without it, writes are kept if every rank has written the same
    values, as an average of weights does. Other writes raise an error, because they would be lost.

    The engine keeps the unit that was read last unsharded until another unit is gathered, a forward, backward or step
    begins, or `engine.empty_partition_cache()` is called. A loop with one context per parameter therefore gathers each
    unit once.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        listed = [params] if isinstance(params, torch.Tensor) else list(params or ())
        # Values of a state dict stand for their parameters: transformers 4.57 gathers those that a checkpoint lacks.
        self._handles = handles_of(source for each in listed for source in sources_of(each)) if enabled else []
        self._borrowed: list[ParamHandle] = []
        self._modifier_rank = modifier_rank
        self._before: list[list[tuple[int, ...]]] = []
        if fwd_module is not None:
            for parameter in listed:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        try:
            for handle in self._handles:
                if self._modifier_rank is not None and handle.owner is not None:
                    handle.owner.about_to_write()
                handle.acquire()
                self._borrowed.append(handle)
            if self._modifier_rank is None:
                self._before = [[_fingerprint(param) for param in handle.params] for handle in self._borrowed]
            ParamHandle.num_contexts += 1
        except BaseException:
            self._give_back()
            raise

    def _give_back(self, *, cache: bool = False) -> None:
        while self._borrowed:
            self._borrowed.pop().release(cache=cache)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        ParamHandle.num_contexts -= 1
        only_read = False
        try:
            if kind is not None or not self._borrowed:
                return
            if self._modifier_rank is None:
                only_read = not self._keep_equal_writes()
            else:
                self._check_shapes()
                for handle in self._borrowed:
                    handle.take_values_of(self._modifier_rank)
        finally:
            self._give_back(cache=only_read and len(self._borrowed) == 1)

    def _check_shapes(self) -> None:
        """Raise if parameters were resized after an engine has laid the model out, or not on all ranks."""
        names = [name for handle in self._borrowed for name in handle.reshaped()]
        counts = [row[0] for row in self._borrowed[0].synchronize(Request.GATHER, [len(names)])]
        laid_out = any(handle.owner is not None for handle in self._borrowed)
        if any(counts) and (laid_out or len(set(counts)) > 1):
            raise RuntimeError(
                f"parameters changed their shape inside GatheredParameters (number of them on each rank: {counts}"
                f"{'; ' + ', '.join(names) if names else ''}). Resize parameters on every rank, before initialize."
            )

    def _keep_equal_writes(self) -> bool:
        """Keep what every rank has written alike, and return whether there is any. Raise where ranks differ."""
        written = [
            handle.moved() or [_fingerprint(param) for param in handle.params] != before
            for handle, before in zip(self._borrowed, self._before, strict=True)
        ]
        changed = [handle for handle, is_written in zip(self._borrowed, written, strict=True) if is_written]
        digest = _digest(changed) if changed else 0
        first = 1 + written.index(True) if changed else 0
        ranks = [tuple(row) for row in self._borrowed[0].synchronize(Request.GATHER, [first, digest])]
        if changed and digest and len(set(ranks)) == 1:
            for handle in changed:
                if handle.owner is not None:
                    handle.owner.about_to_write()
                handle.take_values_of(0)
            return True
        for rank, (place, *_) in enumerate(ranks):
            if place:
                names = [member.name for param in self._borrowed[place - 1].params for member in param.layout.members]
                raise RuntimeError(
                    f"in-place modification: rank {rank} wrote to {', '.join(names[:4])}"
                    f"{', ...' if len(names) > 4 else ''} inside GatheredParameters without modifier_rank, and not "
                    "every rank wrote the same values. The write would be lost. Pass the rank whose values are kept, "
                    "as in modifier_rank=0."
                )
        return False


def _digest(handles: Sequence[ParamHandle]) -> int:
    """Return a number of the values of these handles; 0 where their writes cannot be kept.

    Data of another shape is laid out anew by `initialize` alone, and a delayed host step still replaces the values.
    """
    params = [(handle.number, param) for handle in handles for param in handle.params if not param.stays_unsharded]
    if any(handle.reshaped() for handle in handles) or any(param.plan.delays_host for _, param in params):
        return 0
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for _, param in params:
            param.take_parameters()  # `.data` may have been given another tensor
        # The hash of a tuple of numbers is the same in every process.
        return hash(tuple((number, int(fingerprint(param.full))) for number, param in params)) or 1


def _fingerprint(param: FlatParam) -> tuple[int, ...]:
    """Return a value that changes when a sharded flat parameter is written, also through `.data`."""
    if param.stays_unsharded or param.is_sharded:  # gathered in FP8 for its layers
        return ()
    with torch._C.DisableTorchFunction():
        return (int(fingerprint(param.full)), *(parameter._version for parameter in param.parameters))


def gather_distributed_parameters(model: nn.Module) -> None:
    """Unshard all parameters of a model on every rank, to read or save them.

    The next forward or step of the engine reshards them. A model without an engine stays unsharded.
    """
    for handle in handles_of(model.parameters()):
        handle.acquire()
        handle.leave_unsharded()


def register_external_parameter(module: nn.Module, parameter: torch.Tensor | None) -> None:
    """Declare that `module.forward` uses a parameter of another module that is not one of its attributes."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_external_parameter expects a module, not {type(module).__name__}.")
    external = _external(module)
    if not isinstance(parameter, nn.Parameter) or any(parameter is known for known in external):
        return
    if not external:
        module.register_forward_pre_hook(_read_external)
    external.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Withdraw a declaration of `register_external_parameter`."""
    external = _external(module)
    external[:] = [known for known in external if known is not parameter]


def _external(module: nn.Module) -> list[nn.Parameter]:
    found: list[nn.Parameter] = module.__dict__.setdefault("_onefold_external", [])
    return found


def _read_external(module: nn.Module, args: Any) -> None:
    for parameter in _external(module):
        handle = handle_of(parameter)
        if handle is not None:
            handle.read()
