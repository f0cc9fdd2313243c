"""The `ds_*` attributes that other tools read on parameters. Importing this puts them on all that get a home."""

from __future__ import annotations

import weakref
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.runtime import Home, homes


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class LiveStatus:
    """Compares as what the parameter's status is at that moment."""

    def __init__(self, home: Home) -> None:
        self._home = home

    @property
    def now(self) -> ZeroParamStatus:
        if self._home.in_flight:
            return ZeroParamStatus.INFLIGHT
        return ZeroParamStatus.AVAILABLE if self._home.is_whole else ZeroParamStatus.NOT_AVAILABLE

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


def _came(parameter: nn.Parameter, home: Home) -> None:
    run, index = home.run_of(parameter)
    if not run.plan.shards_parameters:
        return
    member, whole = run.layout.members[index], run.rests_whole
    start, stop = run.own_range
    low, high = max(start, member.start), min(stop, member.stop)
    if run.shard is not None:
        kept = run.shard[low - start : max(low, high) - start]
    else:  # a view of a line that is about to be sharded would keep all of it
        kept = run.full[low : max(low, high)] if whole else run.full.new_empty(0)
    parameter.__dict__.update(
        ds_id=home.number + home.place_of(parameter),
        ds_shape=torch.Size(member.shape),
        ds_numel=member.stop - member.start,
        ds_status=LiveStatus(home),
        ds_tensor=kept,
        ds_persist=whole,
        ds_process_group=home.collective.group.process_group,
        ds_active_sub_modules=set(),
        all_gather=lambda *_, **__: home.borrow(),
        partition=lambda *_, **__: home.give_back(),
        partition_numel=kept.numel,
        ds_summary=partial(_summary, weakref.ref(parameter)),
    )


def _left(parameter: nn.Parameter) -> None:
    for name in [name for name in parameter.__dict__ if name.startswith("ds_") or name in _METHODS]:
        del parameter.__dict__[name]


def _summary(reference: weakref.ref[nn.Parameter], *_: Any, **__: Any) -> dict[str, Any]:
    parameter = reference()
    assert parameter is not None
    known: Any = parameter
    return {
        "id": known.ds_id,
        "status": known.ds_status.name,
        "numel": parameter.numel(),
        "ds_numel": known.ds_numel,
        "shape": tuple(parameter.shape),
        "ds_shape": tuple(known.ds_shape),
        "requires_grad": parameter.requires_grad,
        "persist": known.ds_persist,
    }


_METHODS = {"all_gather", "partition", "partition_numel"}
homes.came.append(_came)
homes.left.append(_left)
