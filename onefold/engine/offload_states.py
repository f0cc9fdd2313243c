"""Move the states of an engine off the device and back, for a job that runs in between (generation, another model).

[Note: how states sleep]
A storage is copied to the host and emptied, and refilled on reload, so every tensor and view of it stays the same
object. Tensors that compute (flat parameters, and the shards that gathers start from) are `lp_params`, also where they
are the fp32 master itself; `hp_params` are the other masters. In stage 3 a 16-bit flat parameter is gathered from its
fp32 master. If that master sleeps alone, a 16-bit shard replaces it, so the model still computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from onefold.engine.train_state import TrainState
from onefold.log import format_bytes, logger
from onefold.offload.host_memory import page_aligned
from onefold.offload.param_shard import DeviceShard, ParamShard
from onefold.offload.shard_store import ShardStore
from onefold.runtime import FlatParam

if TYPE_CHECKING:
    from onefold.engine.core import Engine


class OffloadStateTypeEnum(StrEnum):
    """What `offload_states` can move, by DeepSpeed's names: states, masters, parameters, gradients, their buffers."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_STATES, _MASTERS, _WEIGHTS, _GRADIENTS, _BUFFERS = OffloadStateTypeEnum


@dataclass
class OffloadedKind:
    """States of one kind that are off the device: each emptied storage with its bytes, and the shards that 16-bit ones
    replace.
    """

    freed: int = 0
    storages: list[tuple[torch.UntypedStorage, torch.Tensor]] = field(default_factory=list)
    replaced: list[tuple[ShardStore, ParamShard]] = field(default_factory=list)


def offload_states(
    state: TrainState, include: Iterable[Any] | None, device: Any, *, pin_memory: bool, non_blocking: bool
) -> dict[str, int]:
    """Move the kinds of state that `include` names, or all, to host memory. Return the bytes freed, by kind."""
    target = str(getattr(device, "value", device))
    if target == "none":
        logger.warning("offload_states: device 'none' moves nothing; pass device='cpu'")
        return {}
    if target != "cpu":
        raise ValueError(f"offload_states: device {target!r}; states go to the host, device='cpu'")
    kinds = [kind for kind in _kinds(include) if kind not in state.offloaded]
    schedule = state.schedule
    schedule.wait_for_step()
    schedule.reshard_for("offload_states")
    freed = {}
    for kind in kinds:
        freed[kind.value] = _offload(state, kind, kinds, pinned=pin_memory)
    schedule.offloaded = frozenset(kind.value for kind in state.offloaded)
    _wait(state.device, non_blocking=non_blocking)
    _report(state, "offload_states freed", freed)
    return freed


def _offload(state: TrainState, kind: OffloadStateTypeEnum, together: list[Any], *, pinned: bool) -> int:
    found = OffloadedKind()
    if kind is _BUFFERS:
        pool = state.schedule.in_flight.pool
        found.freed = pool.num_bytes
        pool.clear()
        found.freed -= pool.num_bytes
    if kind is _WEIGHTS:
        for param in state.schedule.unsharded_params():
            param.detach_views()
    if kind is _MASTERS and _WEIGHTS not in (*state.offloaded, *together):
        for param in state.schedule.trained_params():
            if _gathers_from_master(param) and not _computes(param):
                assert param.store.param is not None
                found.replaced.append((param.store, param.store.param))
    found.storages = _storages(list(_tensors(state, kind)))
    found.freed += sum(storage.size() for storage, _ in found.storages)
    for store, shard in found.replaced:
        store.param = DeviceShard(shard.buffer.fetch().to(store.spec.dtype))
        found.freed -= store.param.values.nbytes
    for index, (storage, _) in enumerate(found.storages):
        copy = page_aligned(storage.size(), pinned=pinned and storage.device.type == "cuda")
        copy.copy_(_bytes(storage), non_blocking=True)
        # Freed in the order of the stream that still copies from it.
        storage.resize_(0)
        found.storages[index] = storage, copy
    state.offloaded[kind] = found
    return found.freed


def reload_states(state: TrainState, include: Iterable[Any] | None = None, *, non_blocking: bool) -> dict[str, int]:
    """Move states back to the device. Return the bytes restored, by kind."""
    restored: dict[str, int] = {}
    copies = False
    for kind in _kinds(include):
        found = state.offloaded.pop(kind, None)
        if found is None:
            continue
        restored[kind.value] = 0 if kind is _BUFFERS else found.freed
        for storage, copy in found.storages:
            copies = True
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=True)
        for store, shard in found.replaced:
            store.param = shard
    state.schedule.offloaded = frozenset(kind.value for kind in state.offloaded)
    if not state.offloaded:
        state.schedule.wake = None
    if _WEIGHTS.value in restored:
        for param in state.schedule.unsharded_params():
            param.attach_views()
    # Host memory that is still being copied from must outlive the copy.
    _wait(state.device, non_blocking=non_blocking and not copies)
    if restored:
        _report(state, "reload_states restored", restored)
    return restored


def offload_engine(
    engine: Engine,
    include: Iterable[Any] | None = None,
    device: Any = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> dict[str, int]:
    """Move optimizer states, master weights, model weights and gradients (or the kinds that `include` names) to host
    memory until `reload_states`. Return the bytes freed on the device, by kind.

    States that the config offloads already stay where they are. A second call moves further kinds. While `lp_params`
    are on the device, the model computes and its weights can be gathered; all other work raises.
    """
    return offload_states(engine.state, include, device, pin_memory=pin_memory, non_blocking=non_blocking)


def reload_engine(engine: Engine, non_blocking: bool = False) -> dict[str, int]:
    """Move all states back to the device. Return the bytes restored, by kind."""
    return reload_states(engine.state, non_blocking=non_blocking)


def devices_of(state: TrainState, kind: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices that hold the states of one kind."""
    host = torch.device("cpu")
    moved = {storage._cdata for found in state.offloaded.values() for storage, _ in found.storages}
    params = [param for unit in state.schedule.units for param in unit.params]
    kinds_of_step = (_MASTERS, _STATES, _GRADIENTS)
    found = {host for param in params if kind in kinds_of_step and param.trainable and param.store.is_offloaded}
    for storage in (tensor.untyped_storage() for tensor in _tensors(state, kind)):
        if storage._cdata in moved:
            found.add(host)
        elif storage.size():
            found.add(storage.device)
    return found


# -- states that a program moves by hand ------------------------------------------------------------------------


def move_by_hand(state: TrainState, kinds: Iterable[OffloadStateTypeEnum], device: torch.device, what: str) -> None:
    """Offload or reload whole kinds of state, because a program has moved one tensor of them to `device` itself.

    The engine reloads them when it needs them, because such a program does not call `reload_states`.
    """
    if device.type == state.device.type:
        if state.schedule.wake is not None:
            reload_states(state, kinds, non_blocking=False)
    elif device.type == "cpu":
        if not state.offloaded:
            state.schedule.wake = partial(reload_states, state, non_blocking=False)
        offload_states(state, kinds, "cpu", pin_memory=True, non_blocking=False)
    else:
        raise RuntimeError(
            f"{what} was moved to {device.type!r} by hand: the engine's states are on {state.device.type!r} or on the "
            "host. Free the device's memory with engine.offload_states(include=[...])"
        )


def host_copy(state: TrainState, tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that was moved off the device by hand; raise after `offload_states`."""
    if state.schedule.wake is None:
        state.schedule.check_awake()
    here = tensor.untyped_storage()._cdata
    copies: list[torch.Tensor] = [
        copy for found in state.offloaded.values() for storage, copy in found.storages if storage._cdata == here
    ]
    return copies[0].view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


# -- which tensors are of a kind --------------------------------------------------------------------------------


def _gathers_from_master(param: FlatParam) -> bool:
    store = param.store
    return store.param is not None and not store.is_offloaded and store.spec.master_is_shard


def _computes(param: FlatParam) -> bool:
    """Whether the master of a flat parameter is the shard that it is gathered from, in the same dtype."""
    store = param.store
    return _gathers_from_master(param) and store.param is not None and store.param.values.dtype == param.dtype


def _tensors(state: TrainState, kind: OffloadStateTypeEnum) -> Iterator[torch.Tensor]:
    """Iterate over what is on the device of a kind."""
    for param in (param for unit in state.schedule.units for param in unit.params):
        store = param.store
        held: list[Any] = []
        steps = state.step is not None and param.trainable and not store.is_offloaded
        if kind is _WEIGHTS:
            held = [param.full, *store.device_params(), param.secondary]
            held += store.own_master() if steps and _computes(param) else []
        elif kind is _GRADIENTS and param.trainable:
            held = param.grad.device_tensors()
        elif kind is _MASTERS and steps and not _computes(param):
            held = store.own_master()
        elif kind is _STATES and steps:
            assert state.step is not None
            held = [part for s in state.step.stepper.held_states(store) for part in s.buffer.parts]
            held += [value for *_, values in state.step.loose_states(store) for value in values.values()]
        yield from (tensor for tensor in held if isinstance(tensor, torch.Tensor) and tensor.device == state.device)


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Return the storages that can be emptied, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() and storage.resizable():  # what is not lies in mappings of the host already
            found[storage.data_ptr()] = storage
    return [(storage, torch.empty(0)) for storage in found.values()]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _report(state: TrainState, what: str, sizes: dict[str, int]) -> None:
    if state.group.rank == 0:
        by_kind = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items() if size)
        total = format_bytes(sum(sizes.values()))
        logger.info("%s %s on the device%s", what, total, f": {by_kind}" if by_kind else "")


def _wait(device: torch.device, *, non_blocking: bool) -> None:
    if not non_blocking and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _kinds(include: Iterable[Any] | None) -> list[OffloadStateTypeEnum]:
    if include is None:
        return list(OffloadStateTypeEnum)
    names = [str(getattr(kind, "value", kind)) for kind in include]
    known = {kind.value for kind in OffloadStateTypeEnum}
    for name in names:
        if name not in known:
            raise ValueError(f"offload_states: include {name!r} is not known; known: {', '.join(sorted(known))}")
    return [kind for kind in OffloadStateTypeEnum if kind.value in names]
