"""The `ds_*` attributes that other tools read on parameters.

Parameters get them in processes that use `deepspeed.initialize` or `deepspeed.zero`, whose modules call `install`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.compat.moved_by_hand import HandedOut, Mover
from onefold.engine.offloaded_states import OffloadedStates, OffloadStateTypeEnum
from onefold.runtime import ParamHandle, param_handle

# In stage 3 the shard of a trained parameter is its master.
_WEIGHTS = (OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.hp_params)


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class LiveStatus:
    """The present status of a parameter. It compares equal to that `ZeroParamStatus`."""

    def __init__(self, handle: ParamHandle, parameter: nn.Parameter) -> None:
        self._handle, self._parameter = handle, weakref.ref(parameter)

    @property
    def now(self) -> ZeroParamStatus:
        parameter = self._parameter()
        assert parameter is not None
        param, _ = self._handle.location_of(parameter)
        if param.stays_unsharded:
            return ZeroParamStatus.AVAILABLE
        if self._handle.in_flight:
            return ZeroParamStatus.INFLIGHT
        return ZeroParamStatus.NOT_AVAILABLE if param.is_sharded else ZeroParamStatus.AVAILABLE

    def __eq__(self, other: object) -> bool:
        return self.now == (other.now if isinstance(other, LiveStatus) else other)

    def __hash__(self) -> int:
        return hash(self.now)

    def __repr__(self) -> str:
        return repr(self.now)

    @property
    def name(self) -> str:
        return self.now.name

    @property
    def value(self) -> int:
        return self.now.value


class MultipleAllGatherHandles:
    """All-gathers that were launched together."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def wait(self, handle_dependency: bool = True) -> None:
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


def _gather_together(params: Iterable[nn.Parameter]) -> MultipleAllGatherHandles:
    """Unshard parameters until each is partitioned again. Return after the all-gathers have completed."""
    for parameter in params:
        found = param_handle.handle_of(parameter)
        if found is not None:
            found.acquire()
    return MultipleAllGatherHandles([])


def _add_attributes(parameter: nn.Parameter, handle: ParamHandle) -> None:
    """Set the attributes of a parameter that has got a handle."""
    param, index = handle.location_of(parameter)
    member, unsharded = param.layout.members[index], param.stays_unsharded
    if not param.plan.shards_parameters or member.start == member.stop:  # a parameter without elements has no shards
        return
    start, stop = param.own_range
    low, high = max(start, member.start), min(stop, member.stop)
    if param.store.param is not None:
        kept = param.store.param.values[low - start : max(low, high) - start]
    else:  # a view would keep the memory of a flat parameter that is about to be sharded
        kept = param.full[low : max(low, high)] if unsharded else param.full.new_empty(0)
    if isinstance(kept, torch.Tensor):
        name = f"ds_tensor of {member.name}"
        kept = HandedOut.of(kept.detach(), Mover(name, partial(_offloaded_states, weakref.ref(handle)), _WEIGHTS))
    parameter.__dict__.update(
        ds_id=handle.number_of(parameter),
        ds_shape=torch.Size(member.shape),
        ds_numel=member.stop - member.start,
        ds_status=LiveStatus(handle, parameter),
        ds_tensor=kept,
        ds_persist=unsharded,
        ds_process_group=handle.collective.group.process_group,
        ds_active_sub_modules=set(),
        all_gather=lambda *_, **__: handle.acquire(),
        all_gather_coalesced=lambda params, **_: _gather_together(params),
        partition=lambda *_, **__: handle.release(),
        partition_numel=kept.numel,
        ds_summary=partial(_summary, weakref.ref(parameter)),
    )
    if param.plan.node_shard_size == 1:  # these exist only without hpZ
        parameter.__dict__.update(ds_secondary_tensor=None, ds_zero_param_process_group=None)


def _offloaded_states(reference: weakref.ref[ParamHandle]) -> OffloadedStates | None:
    """Return the offloaded states of the engine that holds a parameter."""
    handle = reference()
    return getattr(handle.owner, "offloaded_states", None) if handle is not None else None


def _remove_attributes(parameter: nn.Parameter) -> None:
    """Remove the attributes of a parameter that has lost its handle."""
    for name in [name for name in parameter.__dict__ if name.startswith("ds_") or name in _METHODS]:
        del parameter.__dict__[name]


def _summary(reference: weakref.ref[nn.Parameter], *_: Any, **__: Any) -> dict[str, Any]:
    parameter: Any = reference()
    assert parameter is not None
    return {
        "id": parameter.ds_id,
        "status": parameter.ds_status.name,
        "numel": parameter.numel(),
        "ds_numel": parameter.ds_numel,
        "shape": tuple(parameter.shape),
        "ds_shape": tuple(parameter.ds_shape),
        "requires_grad": parameter.requires_grad,
        "persist": parameter.ds_persist,
    }


_METHODS = {"all_gather", "all_gather_coalesced", "partition", "partition_numel"}


def install() -> None:
    """Add the attributes to all parameters that get a handle from now on, in this process."""
    if _add_attributes not in param_handle.on_attach:
        param_handle.on_attach.append(_add_attributes)
        param_handle.on_detach.append(_remove_attributes)
