"""The engine gives its device memory up for a while, for a job that comes in between (generation, another model)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

import torch

from onefold.engine.loading import Loading
from onefold.plan import Tier
from onefold.tier.parking import bring_back, park


class OffloadStateTypeEnum(StrEnum):
    """What `offload_states` can move, by DeepSpeed's names: states, masters, parameters, gradients, their buffers."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class Parking(Loading):
    """The part of the engine that leaves the device and comes back."""

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states, masters, parameters and gradients (or those that `include` names) to host memory and free the
        device's, until `reload_states`. What rests below the device already stays there.
        """
        if torch.device(str(getattr(device, "value", device))).type != "cpu":
            raise ValueError(f"offload_states: device {device!r}; states go to the host, device='cpu'")
        kinds = _kinds(include)
        if self._parked:
            raise RuntimeError("offload_states was called before: call engine.reload_states() first")
        self._schedule.settle_all()
        self._schedule.rest()
        if OffloadStateTypeEnum.lp_params in kinds:
            for run in (run for unit in self._units for run in unit.runs if run.rests_whole):
                run.put_away()
        if OffloadStateTypeEnum.contiguous_grad_buffer in kinds:
            self._pool.clear()
        self._schedule.away = True
        self._parked = park(list(self._tensors(kinds)), pinned=pin_memory)
        self._wait(non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Everything is on the device again, as it was."""
        parked, self._parked = self._parked, []
        bring_back(parked)
        self._schedule.away = False
        for run in (run for unit in self._units for run in unit.runs if run.rests_whole):
            run.show()
        # Host memory that is still being copied from must outlive the copy.
        self._wait(non_blocking=non_blocking and not parked)

    def _tensors(self, kinds: set[OffloadStateTypeEnum]) -> Iterator[torch.Tensor]:
        for run in (run for unit in self._units for run in unit.runs):
            piece = self.optimizer.piece_of(run) if self.optimizer is not None and run.trainable else None
            shard = run.shard if piece is None else piece.out
            held: dict[OffloadStateTypeEnum, list[Any]] = {
                OffloadStateTypeEnum.lp_params: [
                    run.full,
                    shard if run.rest.parameters is Tier.DEVICE else None,
                    run.second,
                ],
                OffloadStateTypeEnum.lp_grads: [*run.gradient_tensors()],
            }
            if piece is not None and not run.rest.offloads_states:
                assert self.optimizer is not None
                held[OffloadStateTypeEnum.hp_params] = [piece.master]
                held[OffloadStateTypeEnum.optim_states] = [s.memory for s in self.optimizer.held_states(piece)]
                if piece.out is None and run.rests_whole:  # the line itself is the master
                    held[OffloadStateTypeEnum.hp_params] = []
                    held[OffloadStateTypeEnum.lp_params].append(piece.master)
            for kind in kinds & held.keys():
                yield from (tensor for tensor in held[kind] if isinstance(tensor, torch.Tensor))

    def _wait(self, *, non_blocking: bool) -> None:
        if not non_blocking and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _kinds(include: Iterable[Any] | None) -> set[OffloadStateTypeEnum]:
    if include is None:
        return set(OffloadStateTypeEnum)
    names = [str(getattr(kind, "value", kind)) for kind in include]
    known = {kind.value for kind in OffloadStateTypeEnum}
    for name in names:
        if name not in known:
            raise ValueError(f"offload_states: include {name!r} is not known; known: {', '.join(sorted(known))}")
    return {OffloadStateTypeEnum(name) for name in names}
