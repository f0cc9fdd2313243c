"""The exchange between ranks before a step: the gradient norm, and digests of values that all ranks must share.

Every rank adds the square sums of all shards in the same order, so the norm has the same bits on all ranks. With NCCL
the square sums are exchanged on the device: hosts synchronize while gradients are still being reduced, and the sum is
copied to the host before the step is queued.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from onefold.comm.agreement import as_float, as_integer
from onefold.optim.instance import METHODS, is_plain, plain_number
from onefold.runtime import FlatParam, Schedule

# The call that a row is sent for. Methods of the optimizer are numbered from 1.
_STEP = 0
# The second number of a row has four flags, the number of a stop signal, and the call in its upper bits.
_LATE, _ALARM, _WAITS, _HAS_LOSS, _STOP, _CALL = 1, 2, 4, 8, 16, 16 * 128
# The indices of two digests in a row: of changes to parameters, and of parameter groups.
_CHANGES, _GROUPS = 2, 3
# The index of the loss in a row.
_LOSS = 4


class HostCopy:
    """An asynchronous copy of a device scalar to the host. Reading it does not wait for work that is queued later."""

    def __init__(self, number: torch.Tensor) -> None:
        self._copy, self._event = number, None
        if number.is_cuda:
            self._copy = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether the copy is complete."""
        return self._event is None or self._event.query()

    def read(self) -> float:
        """Wait for the copy, and return the number."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._copy.item())


class StepScalars:
    """The result of the exchange before a step: the square sum of all gradients, and flags that any rank has set.

    `square` is on the device if devices exchanged it. `late`: a rank has gradients that are not reduced yet. `alarm`: a
    rank requests that no rank steps. `waits`: a rank must know the norm before it steps. `losses` has the loss of each
    rank, or None where it is unknown. `stop_signal`: the largest number of a signal that has requested a rank to stop,
    or 0.
    """

    def __init__(
        self,
        square: torch.Tensor,
        losses: Sequence[float | None],
        *,
        late: bool,
        alarm: bool,
        waits: bool,
        stop_signal: int,
    ) -> None:
        self.square, self.late, self.alarm, self.waits = square, late, alarm, waits
        self.losses, self.stop_signal = losses, stop_signal
        self.copy = HostCopy(square)

    @cached_property
    def norm(self) -> float:
        """The norm of the gradients, or infinity. Reading it waits for the device."""
        square = self.copy.read()
        return math.sqrt(square) if math.isfinite(square) else math.inf

    @property
    def overflow(self) -> bool:
        """Whether a gradient is not finite. Reading it waits for the device."""
        return self.norm == math.inf


@dataclass(frozen=True)
class StepNorm:
    """The norm of one step's averaged gradient before clipping, which may still be computed on the device."""

    scalars: StepScalars
    unscaled: float

    @property
    def arrived(self) -> bool:
        """Whether `read` returns without waiting."""
        return self.scalars.copy.arrived

    def read(self) -> float:
        """Wait for the norm, and return it."""
        return self.scalars.norm * self.unscaled


def exchange_scalars(
    params: Iterable[FlatParam],
    schedule: Schedule,
    groups: GroupDigest | None,
    *,
    late: bool,
    alarm: bool = False,
    waits: bool = False,
    loss: float | None = None,
    stop_signal: int = 0,
) -> StepScalars:
    """Exchange the square sums of the reduced gradients, the flags and the losses of all ranks (see `StepScalars`).

    Raise if `groups` is not consistent across ranks.
    """
    squares = [param.grad.shard.square_sum().to(param.device) for param in params if param.layout.total]
    mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if schedule.alone:
        schedule.synchronize_for_step([])
        return StepScalars(mine, [loss], late=late, alarm=alarm, waits=waits, stop_signal=stop_signal)
    on_device = mine.is_cuda and schedule.in_flight.collective.group.uses_nccl
    flags = int(late) * _LATE + int(alarm) * _ALARM + int(waits) * _WAITS + int(loss is not None) * _HAS_LOSS
    flags += stop_signal * _STOP
    first = schedule.in_flight.num_reductions if on_device else as_integer(mine.item())
    rows = _synchronize(schedule, _STEP, first, flags, groups.digest if groups else 0, as_integer(loss or 0.0))
    losses = [as_float(row[_LOSS]) if row[1] & _HAS_LOSS else None for row in rows]
    if on_device:
        _check_reductions(schedule, [row[0] for row in rows])
    if groups is not None and len({row[_GROUPS] for row in rows}) > 1:
        one, other = find_mismatch(schedule, "the optimizer's param_groups", groups.text)
        raise RuntimeError(
            f"{one.key} of the optimizer is {one.value} on rank {one.rank} and {other.value} on rank {other.rank} "
            "before a step, but must be the same on all ranks, because each updates a slice of the model. Set the same "
            "values on all ranks, and pass the same metric to a scheduler (reduced over the ranks, as by "
            "torch.distributed.all_reduce)."
        )
    late, alarm, waits = (any(row[1] & flag for row in rows) for flag in (_LATE, _ALARM, _WAITS))
    stop_signal = max(row[1] % _CALL // _STOP for row in rows)
    if on_device:
        # If there are late gradients, they are reduced first, and this exchange is repeated.
        total = mine if late or alarm else schedule.in_flight.gather_numbers("gather of the norm", mine).sum()
        return StepScalars(total, losses, late=late, alarm=alarm, waits=waits, stop_signal=stop_signal)
    square = 0.0
    for row in rows[: schedule.num_shards]:
        square += as_float(row[0])
    total = torch.tensor(square, dtype=torch.float64)
    return StepScalars(total, losses, late=late, alarm=alarm, waits=waits, stop_signal=stop_signal)


def _check_reductions(schedule: Schedule, done: Sequence[int]) -> None:
    """Fail if the ranks have launched different numbers of reductions.

    Hosts that do not wait for their devices may synchronize at different steps, and devices would then mix up their
    collectives.
    """
    if len(set(done)) > 1:
        counts = "; ".join(f"rank {rank} is at a step after {number} reductions" for rank, number in enumerate(done))
        schedule.guard.fail(
            f"the ranks have diverged: {counts}. Call forward, backward and step equally often on all ranks."
        )


def synchronize_call(schedule: Schedule, method: str) -> None:
    """Synchronize all ranks before they call this method of the optimizer. Raise if one calls another method."""
    _synchronize(schedule, 1 + METHODS.index(method))


def compare_written_groups(schedule: Schedule, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a step of a user-defined class over shards wrote different values to its groups on different ranks."""
    operation = "what the optimizer wrote to its param_groups"
    texts = _group_texts(groups)
    if len({row[0] for row in schedule.agreement.synchronize(operation, [_digest(texts)])}) > 1:
        one, other = find_mismatch(schedule, operation, texts)
        raise RuntimeError(
            f"optimizer {optimizer}: {one.key} is {one.value} on rank {one.rank} and {other.value} on rank "
            f"{other.rank} after a step, but must be the same on all ranks. Each updates a slice of the model, so an "
            "optimizer that computes one number from all parameters must reduce it over the ranks (fsdp_in_use=True "
            "if it has such a mode). Otherwise, use zero_optimization.stage 0."
        )


def _synchronize(
    schedule: Schedule, call: int, first: int = 0, flags: int = 0, groups: int = 0, loss: int = 0
) -> list[list[int]]:
    """Exchange one row of numbers per rank, and return the rows of all ranks.

    Raise if a rank makes another call, or has frozen, dropped or written other parameters since the last exchange.
    """
    changes = {
        "frozen": ", ".join(schedule.frozen_names()),
        "dropped": ", ".join(schedule.dropped_names()),
        "written": ", ".join(schedule.written_names()),
    }
    changes_digest = _digest(changes) if any(changes.values()) else 0
    rows = schedule.synchronize_for_step([first, flags + call * _CALL, changes_digest, groups, loss])
    schedule.note_values()
    calls = ["engine.step()", *(f"optimizer.{method}()" for method in METHODS)]
    made = [row[1] // _CALL for row in rows]
    for rank, call in enumerate(made):
        if call != made[0]:
            raise RuntimeError(
                f"rank {rank} calls {calls[call]}, but rank 0 calls {calls[made[0]]}. Make the same calls on all ranks."
            )
    if len({row[_CHANGES] for row in rows}) > 1:
        one, other = find_mismatch(schedule, "what was done to parameters", changes)
        raise RuntimeError(
            f"rank {other.rank} has {_CHANGE_MESSAGES[one.key]}; on rank {other.rank}: {other.value or 'none'}, on "
            f"rank {one.rank}: {one.value or 'none'}. Do the same on all ranks."
        )
    return rows


_CHANGE_MESSAGES = {
    "frozen": "frozen other parameters than rank 0 (requires_grad False), so each rank would update a slice of them by "
    "itself",
    "dropped": "dropped gradients of other parameters than rank 0 (p.grad = None, zero_grad of a module) after they "
    "were reduced, so each rank would leave out a slice of them",
    "written": "written to other parameters in place than rank 0, so each rank would use a slice of these writes",
}


# -- parameter groups across ranks ----------------------------------------------------------------------------------


def _group_texts(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the text of every value that is plain data, by its path."""
    return {
        f"param_groups[{index}][{key!r}]": _value_text(value)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key != "params" and is_plain(value)
    }


def _value_text(value: Any) -> str:
    # A value may be a tensor on one rank and a number on another, or 1 and 1.0.
    value = plain_number(value)
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)


def _digest(texts: Mapping[str, str]) -> int:
    """Return a digest of 64 bits, which fits in a row."""
    text = "\0".join(f"{key}={value}" for key, value in sorted(texts.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class GroupDigest:
    """The values of parameter groups as text and as a digest, to compare them across ranks.

    Only keys that the groups had at the start are compared. Text and digest are computed again if a value has changed.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._keys = [[key for key in group if key != "params"] for group in groups]
        self._values: list[dict[str, Any]] | None = None
        self.text: dict[str, str] = {}
        self.digest = 0

    def update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Read the current values of the groups."""
        with_keys = zip(groups, self._keys, strict=True)
        values = [{key: plain_number(group.get(key)) for key in keys} for group, keys in with_keys]
        if values != self._values:
            self._values, self.text = values, _group_texts(values)
            self.digest = _digest(self.text)


@dataclass(frozen=True)
class RankValue:
    """The value of a key on one rank."""

    key: str
    rank: int
    value: str | None


def find_mismatch(schedule: Schedule, operation: str, mine: Mapping[str, str]) -> tuple[RankValue, RankValue]:
    """Return a key whose value differs between two ranks, with both values. A collective call with a common result."""
    ranks = range(schedule.agreement.group.size)
    texts = [json.loads(schedule.agreement.broadcast_text(operation, json.dumps(mine), rank)) for rank in ranks]
    for key in dict.fromkeys(key for each in texts for key in each):
        for rank, each in enumerate(texts):
            if each.get(key) != texts[0].get(key):
                return RankValue(key, 0, texts[0].get(key)), RankValue(key, rank, each.get(key))
    raise AssertionError("all ranks have the same values")
