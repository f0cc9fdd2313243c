"""Move the states of an engine off the device and back, for a job that runs in between (generation, another model).

[Note: how states are offloaded]
A storage is copied to the host and emptied, and refilled on reload, so every tensor and view of it stays the same
object. Model weights (flat parameters, and the shards that gathers start from) are `lp_params`, also where they are the
fp32 master itself; `hp_params` are the other masters. In stage 3 a 16-bit flat parameter is gathered from its fp32
master. If that master is offloaded alone, a 16-bit shard replaces it, so the model still computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from onefold.engine.train_state import TrainState
from onefold.log import format_bytes, logger
from onefold.offload.host_memory import page_aligned
from onefold.offload.param_shard import DeviceShard, ParamShard
from onefold.offload.shard_store import ShardStore
from onefold.runtime import FlatParam


class OffloadStateTypeEnum(StrEnum):
    """The kinds of state that `offload_states` moves, by DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    """Master weights."""
    lp_params = "lp_params"
    """Model weights."""
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_STATES, _MASTERS, _WEIGHTS, _GRADIENTS, _BUFFERS = OffloadStateTypeEnum


@dataclass
class OffloadedKind:
    """The states of one kind that are off the device."""

    freed: int = 0
    """Bytes freed on the device."""
    storages: list[tuple[torch.UntypedStorage, torch.Tensor]] = field(default_factory=list)
    """Each emptied storage with its copy on the host."""
    replaced: list[tuple[ShardStore, ParamShard]] = field(default_factory=list)
    """Shards that 16-bit shards replace until the reload."""


class OffloadedStates:
    """The states of one engine that are off the device until `reload`."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._kinds: dict[OffloadStateTypeEnum, OffloadedKind] = {}

    def __bool__(self) -> bool:
        return bool(self._kinds)

    @property
    def device(self) -> torch.device:
        """The device of the engine."""
        return self._state.device

    def offload(
        self, include: Iterable[Any] | None, device: Any, *, pin_memory: bool, non_blocking: bool
    ) -> dict[str, int]:
        """Move the kinds of state in `include`, or all, to host memory. Return the bytes freed, by kind."""
        target = str(getattr(device, "value", device))
        if target == "none":
            logger.warning("offload_states: device 'none' has no effect. Pass device='cpu'")
            return {}
        if target != "cpu":
            raise ValueError(f"offload_states: device {target!r} is not supported. Pass device='cpu'.")
        kinds = [kind for kind in _kinds(include) if kind not in self._kinds]
        schedule = self._state.schedule
        if self._state.step is not None:
            self._state.step.give_up_early("offload_states")
        schedule.wait_for_step()
        schedule.reshard_for("offload_states")
        freed = {}
        for kind in kinds:
            freed[kind.value] = self._offload_kind(kind, kinds, pinned=pin_memory)
        schedule.context.moved_kinds = frozenset(kind.value for kind in self._kinds)
        _wait(self.device, non_blocking=non_blocking)
        self._report("offload_states freed", freed)
        return freed

    def _offload_kind(self, kind: OffloadStateTypeEnum, together: list[Any], *, pinned: bool) -> int:
        """Move the states of one kind, of those that one call moves `together`. Return the bytes freed."""
        schedule, found = self._state.schedule, OffloadedKind()
        if kind is _BUFFERS:
            pool = schedule.in_flight.pool
            found.freed = pool.num_bytes
            pool.clear()
            found.freed -= pool.num_bytes
        if kind is _WEIGHTS:
            for param in schedule.unsharded_params():
                param.detach_views()
        if kind is _MASTERS and _WEIGHTS not in (*self._kinds, *together):
            for param in schedule.trained_params():
                if _gathers_from_master(param) and not _is_model_weight(param):
                    assert param.store.param is not None
                    found.replaced.append((param.store, param.store.param))
        found.storages = _storages(list(self._tensors(kind)))
        found.freed += sum(storage.size() for storage, _ in found.storages)
        for store, shard in found.replaced:
            store.param = DeviceShard(shard.buffer.fetch().to(store.spec.dtype))
            found.freed -= store.param.values.nbytes
        for index, (storage, _) in enumerate(found.storages):
            copy = page_aligned(storage.size(), pinned=pinned and storage.device.type == "cuda")
            copy.copy_(_bytes(storage), non_blocking=True)
            # The memory is freed in the order of the stream that still copies from it.
            storage.resize_(0)
            found.storages[index] = storage, copy
        self._kinds[kind] = found
        return found.freed

    def reload(self, include: Iterable[Any] | None = None, *, non_blocking: bool) -> dict[str, int]:
        """Move the kinds of state in `include`, or all, back to the device. Return the bytes restored, by kind."""
        schedule = self._state.schedule
        restored: dict[str, int] = {}
        copies = False
        for kind in _kinds(include):
            found = self._kinds.pop(kind, None)
            if found is None:
                continue
            restored[kind.value] = 0 if kind is _BUFFERS else found.freed
            for storage, copy in found.storages:
                copies = True
                storage.resize_(copy.numel())
                _bytes(storage).copy_(copy, non_blocking=True)
            for store, shard in found.replaced:
                store.param = shard
        schedule.context.moved_kinds = frozenset(kind.value for kind in self._kinds)
        if not self._kinds:
            schedule.context.wake = None
        if _WEIGHTS.value in restored:
            for param in schedule.unsharded_params():
                param.attach_views()
        # The host memory must outlive the copies that read it.
        _wait(self.device, non_blocking=non_blocking and not copies)
        if restored:
            self._report("reload_states restored", restored)
        return restored

    def devices_of(self, kind: OffloadStateTypeEnum) -> set[torch.device]:
        """Return the devices that hold the states of one kind."""
        host = torch.device("cpu")
        moved = {storage._cdata for found in self._kinds.values() for storage, _ in found.storages}
        params = [param for unit in self._state.schedule.units for param in unit.params]
        kinds_of_step = (_MASTERS, _STATES, _GRADIENTS)
        found = {host for param in params if kind in kinds_of_step and param.trainable and param.store.is_offloaded}
        for storage in (tensor.untyped_storage() for tensor in self._tensors(kind)):
            if storage._cdata in moved:
                found.add(host)
            elif storage.size():
                found.add(storage.device)
        return found

    # -- states that a program moves by hand --------------------------------------------------------------------

    @property
    def moved_by_hand(self) -> bool:
        """Whether the engine reloads the states when it needs them, because a program has moved them by hand."""
        return self._state.schedule.context.wake is not None

    def reload_on_use(self) -> None:
        """Have the engine reload all states when it needs them."""
        self._state.schedule.context.wake = partial(self.reload, non_blocking=False)

    def move_by_hand(self, kinds: Iterable[OffloadStateTypeEnum], device: torch.device, what: str) -> None:
        """Offload or reload whole kinds of state, because a program has moved one tensor of them to `device` itself.

        The engine reloads them when it needs them, because such a program does not call `reload_states`.
        """
        if device.type == self.device.type:
            if self.moved_by_hand:
                self.reload(kinds, non_blocking=False)
        elif device.type == "cpu":
            if not self._kinds:
                self.reload_on_use()
            self.offload(kinds, "cpu", pin_memory=True, non_blocking=False)
        else:
            raise RuntimeError(
                f"{what} was moved to {device.type!r}, but the engine keeps its states on {self.device.type!r} or on "
                "the host. Call engine.offload_states(include=[...]) to free device memory."
            )

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor that was moved off the device by hand. Raise after `offload_states`."""
        if not self.moved_by_hand:
            self._state.schedule.check_awake()
        here = tensor.untyped_storage()._cdata
        copies: list[torch.Tensor] = [
            copy for found in self._kinds.values() for storage, copy in found.storages if storage._cdata == here
        ]
        return copies[0].view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _tensors(self, kind: OffloadStateTypeEnum) -> Iterator[torch.Tensor]:
        """Iterate over the tensors of one kind that are on the device."""
        step = self._state.step
        for param in (param for unit in self._state.schedule.units for param in unit.params):
            store = param.store
            held: list[Any] = []
            steps = step is not None and param.trainable and not store.is_offloaded
            if kind is _WEIGHTS:
                held = [param.full, *store.device_params(), param.secondary]
                held += store.own_master() if steps and _is_model_weight(param) else []
            elif kind is _GRADIENTS and param.trainable:
                held = param.grad.device_tensors()
            elif kind is _MASTERS and steps and not _is_model_weight(param):
                held = store.own_master()
            elif kind is _STATES and steps:
                assert step is not None
                held = [part for s in step.states.held_states(store) for part in s.buffer.parts]
                held += [value for *_, values in step.loose_states(store) for value in values.values()]
            yield from (tensor for tensor in held if isinstance(tensor, torch.Tensor) and tensor.device == self.device)

    def _report(self, what: str, sizes: dict[str, int]) -> None:
        """Log bytes by kind on rank 0."""
        if self._state.group.rank == 0:
            by_kind = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items() if size)
            total = format_bytes(sum(sizes.values()))
            logger.info("%s %s on the device%s", what, total, f": {by_kind}" if by_kind else "")


def _gathers_from_master(param: FlatParam) -> bool:
    """Return whether the shard that a flat parameter is gathered from is its master on the device."""
    store = param.store
    return store.param is not None and not store.is_offloaded and store.spec.master_is_shard


def _is_model_weight(param: FlatParam) -> bool:
    """Return whether the master of a flat parameter is also its model weight: gathered in the same dtype."""
    store = param.store
    return _gathers_from_master(param) and store.param is not None and store.param.values.dtype == param.dtype


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Return the storages that can be emptied, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() and storage.resizable():  # the others are mappings of host memory
            found[storage.data_ptr()] = storage
    return [(storage, torch.empty(0)) for storage in found.values()]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(device: torch.device, *, non_blocking: bool) -> None:
    """Wait for the current stream unless `non_blocking`."""
    if not non_blocking and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _kinds(include: Iterable[Any] | None) -> list[OffloadStateTypeEnum]:
    """Return the kinds in `include`, given as members or by name; all kinds for None."""
    if include is None:
        return list(OffloadStateTypeEnum)
    names = [str(getattr(kind, "value", kind)) for kind in include]
    known = {kind.value for kind in OffloadStateTypeEnum}
    for name in names:
        if name not in known:
            raise ValueError(f"offload_states: include has an unknown state {name!r}. Use {', '.join(sorted(known))}.")
    return [kind for kind in OffloadStateTypeEnum if kind.value in names]
