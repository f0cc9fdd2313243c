"""Helpers under the names that DeepSpeed scripts import from its utils.

Masters, gradients and optimizer states of one parameter are read and set unsharded (`full`) or as this rank's part
(`local`), in every stage. All ranks call the functions with `full` together, with the same values to set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.comm import AllGatherOp
from onefold.engine.model_events import ModelEvents
from onefold.log import logger as logger
from onefold.offload.buffer import Buffer
from onefold.optim.step import ShardedStep
from onefold.plan import Member
from onefold.plan.cut import LEAF_MARK
from onefold.report.memory_usage import memory_status as memory_status
from onefold.report.memory_usage import see_memory_usage as see_memory_usage
from onefold.runtime import FlatParam, ParamHandle, handle_of
from onefold.runtime.order import Request

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""Every dtype, in an order that is the same on all ranks."""


@dataclass(frozen=True)
class _Place:
    """The place of a trained parameter's states on this rank."""

    owner: ModelEvents
    step: ShardedStep
    handle: ParamHandle
    param: FlatParam
    member: Member

    def master(self) -> _Range:
        return _Range(self, self.step.master_of(self.param.store), self.param.store.start)

    def gradient(self) -> _Range | None:
        shard = self.param.grad.shard
        if shard.value is None:
            return None
        shard.wait()
        self.param.grad.return_borrowed()  # the program may keep it
        return _Range(self, Buffer.of(shard.value), self.param.own_range[0])

    def state(self, name: str, *, local: bool) -> _Range | None:
        """Return this rank's part of a state, or None if the optimizer has not made it.

        A rank whose shard is all padding may have no states, so unless `local` is set the ranks, which call this
        together, compare what they have and all return a range or all return None.
        """
        store = self.param.store
        found = self.step.states_of(store, name)
        kind = 1 + _DTYPES.index(found[0][1].dtype) if found else 0
        if not local and store.stop - store.start < self.param.layout.total:
            kind = max(row[0] for row in self.handle.synchronize(Request.READ, [kind]))
        if not kind:
            return None
        flat = torch.zeros(store.stop - store.start, dtype=_DTYPES[kind - 1], device=self.param.device)
        for start, buffer in found:
            flat[start : start + buffer.numel()].copy_(buffer.fetch().flatten())
        return _Range(self, Buffer.of(flat), store.start)

    def set_state(self, name: str, flat: torch.Tensor) -> None:
        for start, buffer in self.step.states_of(self.param.store, name):
            buffer.store(flat[start : start + buffer.numel()])


@dataclass(frozen=True)
class _Range:
    """Part of a flat parameter, gradient or state: `buffer` begins at element `start` of it."""

    place: _Place
    buffer: Buffer
    start: int

    @property
    def _own(self) -> tuple[slice, slice]:
        """The parameter's elements in here: their place in the tensor, and in the flattened parameter."""
        member = self.place.member
        low = max(member.start, self.start)
        high = max(low, min(member.stop, self.start + self.buffer.numel()))
        return slice(low - self.start, high - self.start), slice(low - member.start, high - member.start)

    def unsharded(self) -> torch.Tensor:
        """Return the parameter's values, gathered from all ranks."""
        member, param = self.place.member, self.place.param
        own = full = self.buffer.fetch().to(param.device)
        if full.numel() < param.layout.total:
            handle = self.place.handle
            handle.synchronize(Request.READ, [])
            full = torch.empty(param.layout.total, dtype=full.dtype, device=full.device)
            handle.gather("gather of states of", [AllGatherOp(full, own)])
        return full[member.start : member.stop].view(member.shape).clone()

    def local(self) -> torch.Tensor:
        return self.buffer[self._own[0]].fetch().to(self.place.param.device, copy=True)

    def write(self, value: torch.Tensor, *, local: bool) -> None:
        inside, outside = self._own
        member, flat = self.place.member, value.detach().flatten()
        if not local and tuple(value.shape) != member.shape:
            raise ValueError(f"{member.name} has shape {member.shape}, but the value has {tuple(value.shape)}")
        held = inside.stop - inside.start
        if local and flat.numel() != held:
            raise ValueError(f"{member.name}: this rank stores {held} elements, but the value has {flat.numel()}")
        self.buffer[inside].store(flat if local else flat[outside])


def _place(parameter: nn.Parameter) -> _Place | None:
    handle = handle_of(parameter)
    owner = handle.owner if handle is not None else None
    if handle is None or not isinstance(owner, ModelEvents) or owner.state.step is None:
        return None
    owner.state.schedule.check_awake()
    owner.state.step.wait_for_host()
    param, index = handle.location_of(parameter)
    return _Place(owner, owner.state.step, handle, param, param.layout.members[index]) if param.trainable else None


def _trained(parameter: nn.Parameter) -> _Place:
    place = _place(parameter)
    if place is None:
        raise ValueError("the parameter is not trained by an engine, so it has no master, gradient or state to set")
    return place


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the unsharded fp32 master weight, or None if the parameter is not trained."""
    place = _place(param)
    return place.master().unsharded() if place else None


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the fp32 master weight, or None if the parameter is not trained."""
    place = _place(param)
    return place.master().local() if place else None


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master weight, and the parameter with it."""
    place = _trained(param)
    place.owner.about_to_write()
    place.master().write(value, local=False)
    flat, member = place.param, place.member
    if flat.stays_unsharded:
        flat.full[member.start : member.stop].copy_(value.detach().flatten())
    else:
        flat.invalidate_secondary()
        flat.store.sync_model_weight_from_master().synchronize()


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master weight, and the parameter with it.

    It raises if masters are replicated, because ranks would then differ. All ranks call this together for a parameter
    that stays unsharded, because their parts are all-gathered, and for one that is all-gathered in FP8, because they
    agree on its scale. With secondary shards (hpZ) a write between two micro-steps takes effect after the step.
    """
    place = _trained(param)
    flat = place.param
    if flat.stays_unsharded and not place.owner.state.plan.shards_states:
        raise ValueError(f"{place.member.name} is unsharded on every rank. Use safe_set_full_fp32_param.")
    if not flat.stays_unsharded:
        place.step.about_to_write()
        place.master().write(value, local=True)
        flat.store.sync_model_weight_from_master().synchronize()
        if flat.fp8 is not None:
            place.handle.synchronize(Request.READ, [])
            flat.invalidate_secondary()
    else:
        place.owner.about_to_write()
        master = place.master()
        master.write(value, local=True)
        start, stop = flat.own_range
        flat.full[start:stop].copy_(master.buffer.fetch())
        place.handle.synchronize(Request.READ, [])
        place.handle.gather("gather of weights of", [AllGatherOp(flat.full)])
        flat.note_values()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the unsharded averaged gradient between backward and step, or None if no gradient is reduced."""
    return _get_gradient(param, local=False)


def unreduced_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that this rank has accumulated and not yet reduced, or None if it holds only a shard."""
    place = _place(param)
    found = place.param.grad.unreduced(place.param.layout.members.index(place.member)) if place else None
    if place is None or found is None:
        return None
    return found.float() * place.owner.state.gradient_factor * place.owner.state.group.size


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the averaged gradient, or None if no gradient is reduced."""
    return _get_gradient(param, local=True)


def _get_gradient(param: nn.Parameter, *, local: bool) -> torch.Tensor | None:
    place = _place(param)
    range_ = place.gradient() if place else None
    if place is None or range_ is None:
        return None
    return (range_.local() if local else range_.unsharded()).float() * place.owner.state.gradient_factor


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the averaged gradient that the next step uses."""
    _set_gradient(param, value, local=False)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the averaged gradient that the next step uses."""
    _set_gradient(param, value, local=True)


@torch.no_grad()
def _set_gradient(param: nn.Parameter, value: torch.Tensor, *, local: bool) -> None:
    place = _trained(param)
    range_ = place.gradient()
    if range_ is None:
        raise ValueError(f"{place.member.name} has no reduced gradient now. Set it between backward and step.")
    range_.write(value.float() / place.owner.state.gradient_factor, local=local)
    place.param.grad.shard.forget_square_sum()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return an unsharded optimizer state such as `exp_avg`, or None before the first step."""
    place = _place(param)
    range_ = place.state(optim_state_key, local=False) if place else None
    return range_.unsharded() if range_ else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of an optimizer state, or None before the first step."""
    place = _place(param)
    range_ = place.state(optim_state_key, local=True) if place else None
    return range_.local() if range_ else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set an optimizer state from its unsharded value."""
    _set_state(param, value, optim_state_key, local=False)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of an optimizer state."""
    _set_state(param, value, optim_state_key, local=True)


@torch.no_grad()
def _set_state(param: nn.Parameter, value: torch.Tensor, name: str, *, local: bool) -> None:
    place = _trained(param)
    range_ = place.state(name, local=local)
    if range_ is None:
        raise ValueError(f"{place.member.name} has no optimizer state {name!r}")
    place.step.about_to_write()
    range_.write(value, local=local)
    place.set_state(name, range_.buffer.fetch())


# -- modules that are never cut into smaller units. Set them before initialize -----------------------------------


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked as a leaf: one unit, with all modules inside it."""
    return bool(getattr(model, LEAF_MARK, False))


def z3_leaf_parameter(parameter: nn.Parameter, model: nn.Module) -> bool:
    """Return whether a parameter belongs to one of the model's leaf modules."""
    return any(parameter is own for leaf in get_z3_leaf_modules(model) for own in leaf.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module as a leaf, or remove its mark. Call it before `initialize`."""
    setattr(model, LEAF_MARK, flag)


def unset_z3_leaf_module(model: nn.Module) -> None:
    """Remove the mark of one module."""
    set_z3_leaf_module(model, False)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given as classes or by name, as leaves. Return them."""
    return _mark(model, leaf_module_classes, _is_of_class, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of modules of these classes. Return the modules."""
    return _mark(model, leaf_module_classes, _is_of_class, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules with these full names, as in `named_modules`, as leaves. Return them."""
    return _mark(model, module_names, lambda path, _, name: path == name, True, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules whose full names end with one of these suffixes as leaves. Return them."""
    return _mark(model, module_name_suffixes, lambda path, _, end: path.endswith(end), True, raise_if_not_found)


def _is_of_class(path: str, module: nn.Module, wanted: Any) -> bool:
    kind = type(module)
    if isinstance(wanted, str):
        return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)


def _mark(
    model: nn.Module, wanted: Iterable[Any], fits: Callable[[str, nn.Module, Any], bool], flag: bool, strict: bool
) -> list[nn.Module]:
    wanted = list(wanted)
    found = [module for path, module in model.named_modules() if any(fits(path, module, one) for one in wanted)]
    if not found and strict:
        raise ValueError(f"no module of {type(model).__name__} matches {', '.join(map(str, wanted))}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


class RepeatingLoader:
    """A data loader that starts again when it is exhausted, with a new shuffle each time."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader: Any = loader
        self._num_passes = 0
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._num_passes = self.epoch + 1
            if hasattr(self.loader, "sampler") and hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(self._num_passes)
            self._batches = iter(self.loader)
            return next(self._batches)

    @property
    def epoch(self) -> int:
        """The epoch of the sampler, or else the number of completed passes."""
        epoch: int = getattr(getattr(self.loader, "sampler", None), "epoch", self._num_passes)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped loader."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the wrapped loader."""
        self.loader.load_state_dict(state)
