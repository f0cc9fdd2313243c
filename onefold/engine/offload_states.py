"""States off the device for a while, for a job that comes in between (generation, another model).

A storage is emptied and refilled, so that every tensor and every view of it stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from onefold.engine.train_state import TrainState
from onefold.offload.host_memory import page_aligned
from onefold.offload.param_shard import tensors_of

if TYPE_CHECKING:
    from onefold.engine.core import Engine


class OffloadStateTypeEnum(StrEnum):
    """What `offload_states` can move, by DeepSpeed's names: states, masters, parameters, gradients, their buffers."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def offload_states(
    state: TrainState, include: Iterable[Any] | None, device: Any, *, pin_memory: bool, non_blocking: bool
) -> None:
    """Move states, masters, parameters and gradients (or those that `include` names) to host memory."""
    if torch.device(str(getattr(device, "value", device))).type != "cpu":
        raise ValueError(f"offload_states: device {device!r}; states go to the host, device='cpu'")
    kinds = _kinds(include)
    if state.offloaded:
        raise RuntimeError("offload_states was called before: call engine.reload_states() first")
    schedule = state.schedule
    schedule.wait_for_step()
    schedule.reshard_all()
    if OffloadStateTypeEnum.lp_params in kinds:
        for param in schedule.unsharded_params():
            param.detach_views()
    if OffloadStateTypeEnum.contiguous_grad_buffer in kinds:
        schedule.in_flight.pool.clear()
    schedule.is_offloaded = True
    state.offloaded = _offload(list(_tensors(state, kinds)), pinned=pin_memory)
    _wait(state.device, non_blocking=non_blocking)


def reload_states(state: TrainState, *, non_blocking: bool) -> None:
    """Everything is on the device again, as it was."""
    offloaded, state.offloaded = state.offloaded, []
    for storage, copy in offloaded:
        storage.resize_(copy.numel())
        _bytes(storage).copy_(copy, non_blocking=True)
    state.schedule.is_offloaded = False
    for param in state.schedule.unsharded_params():
        param.attach_views()
    # Host memory that is still being copied from must outlive the copy.
    _wait(state.device, non_blocking=non_blocking and not offloaded)


def offload_engine(
    engine: Engine,
    include: Iterable[Any] | None = None,
    device: Any = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move states, masters, parameters and gradients (or those that `include` names) to host memory and free the
    device's, until `reload_states`. What rests below the device already stays there.
    """
    offload_states(engine.state, include, device, pin_memory=pin_memory, non_blocking=non_blocking)


def reload_engine(engine: Engine, non_blocking: bool = False) -> None:
    """Everything is on the device again, as it was."""
    reload_states(engine.state, non_blocking=non_blocking)


def devices_of(state: TrainState, kind: OffloadStateTypeEnum) -> set[torch.device]:
    """Where the states of one kind are."""
    host, moved = torch.device("cpu"), {storage._cdata for storage, _ in state.offloaded}
    params = [param for unit in state.schedule.units for param in unit.params]
    kinds_of_step = (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.lp_grads)
    found = {host for param in params if kind in kinds_of_step and param.trainable and param.store.steps_on_host}
    for storage in (tensor.untyped_storage() for tensor in _tensors(state, {kind})):
        if storage._cdata in moved:
            found.add(host)
        elif storage.size():
            found.add(storage.device)
    return found


def _offload(tensors: Iterable[torch.Tensor], *, pinned: bool) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Copy the storages of these tensors to the host, in the order of the caller's stream, and empty them.

    Each emptied storage comes with its bytes.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() and storage.resizable():  # what is not lies in mappings of the host already
            found[storage.data_ptr()] = storage
    offloaded = []
    for storage in found.values():
        copy = page_aligned(storage.size(), pinned=pinned and storage.device.type == "cuda")
        copy.copy_(_bytes(storage), non_blocking=True)
        # Freed in the order of the stream that still copies from it.
        storage.resize_(0)
        offloaded.append((storage, copy))
    return offloaded


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tensors(state: TrainState, kinds: set[OffloadStateTypeEnum]) -> Iterator[torch.Tensor]:
    """What is on the device of each kind."""
    for param in (param for unit in state.schedule.units for param in unit.params):
        store = param.store
        held: dict[OffloadStateTypeEnum, list[Any]] = {
            OffloadStateTypeEnum.lp_params: [param.full, *store.device_params(), param.secondary],
            OffloadStateTypeEnum.lp_grads: param.grad.device_tensors() if param.trainable else [],
        }
        if state.step is not None and param.trainable and not store.steps_on_host:
            held[OffloadStateTypeEnum.hp_params] = store.own_master()
            states = state.step.stepper.held_states(store)
            held[OffloadStateTypeEnum.optim_states] = [part for s in states for part in tensors_of(s.memory)]
        for kind in kinds & held.keys():
            yield from (tensor for tensor in held[kind] if isinstance(tensor, torch.Tensor))


def _wait(device: torch.device, *, non_blocking: bool) -> None:
    if not non_blocking and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _kinds(include: Iterable[Any] | None) -> set[OffloadStateTypeEnum]:
    if include is None:
        return set(OffloadStateTypeEnum)
    names = [str(getattr(kind, "value", kind)) for kind in include]
    known = {kind.value for kind in OffloadStateTypeEnum}
    for name in names:
        if name not in known:
            raise ValueError(f"offload_states: include {name!r} is not known; known: {', '.join(sorted(known))}")
    return {OffloadStateTypeEnum(name) for name in names}
