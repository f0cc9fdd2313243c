"""What ranks exchange at a step: the gradient norm as partial sums of each rank's shards, added alike on all ranks, and
groups of the optimizer as text that ranks compare. Where devices exchange the sums, hosts meet while those still
reduce, and a sum is on its way to the host before the step is queued behind it.
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

# What a row of a step says it is for; others are methods of the optimizer.
_STEP = 0
# A row's second number: two flags, and the call. Its third: a digest of what programs have done to parameters.
_LATE, _ALARM, _WAITS, _CALL = 1, 2, 4, 8
_DONE, _GROUPS = 2, 3


class HostCopy:
    """A number that the device may still compute, on its way to the host. Whoever reads it waits for this copy, and for
    nothing that is queued later.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._copy, self._event = number, None
        if number.is_cuda:
            self._copy = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._copy.item())


class StepScalars:
    """What ranks tell each other before a step: the sum of squares, on the device where that has it, and flags."""

    def __init__(self, square: torch.Tensor, *, late: bool, alarm: bool, waits: bool) -> None:
        self.square, self.late, self.alarm, self.waits = square, late, alarm, waits
        self.copy = HostCopy(square)

    @cached_property
    def norm(self) -> float:
        """Waits for the device where that computes it."""
        square = self.copy.read()
        return math.sqrt(square) if math.isfinite(square) else math.inf

    @property
    def overflow(self) -> bool:
        return self.norm == math.inf


@dataclass(frozen=True)
class StepNorm:
    """The norm of one step's averaged gradient before clipping, which the device may still compute."""

    scalars: StepScalars
    unscaled: float

    @property
    def arrived(self) -> bool:
        return self.scalars.copy.arrived

    def read(self) -> float:
        return self.scalars.norm * self.unscaled


def exchange_scalars(
    params: Iterable[FlatParam],
    schedule: Schedule,
    groups: GroupDigest | None,
    *,
    late: bool,
    alarm: bool = False,
    waits: bool = False,
) -> StepScalars:
    """Square sums of reduced gradients, and whether any rank holds late ones, is alarmed, or has to know the norm
    before it steps. `groups` must be alike.
    """
    squares = [param.grad.shard.square_sum().to(param.device) for param in params if param.layout.total]
    mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if schedule.alone:
        schedule.meet_for_step([])
        return StepScalars(mine, late=late, alarm=alarm, waits=waits)
    on_device = mine.is_cuda and schedule.in_flight.collective.group.uses_nccl
    flags = int(late) * _LATE + int(alarm) * _ALARM + int(waits) * _WAITS
    first = schedule.in_flight.num_reductions if on_device else as_integer(mine.item())
    rows = _meet(schedule, _STEP, first, flags, groups.digest if groups else 0)
    if on_device:
        _check_reductions(schedule, [row[0] for row in rows])
    if groups is not None and len({row[_GROUPS] for row in rows}) > 1:
        one, other = find_mismatch(schedule, "the optimizer's param_groups", groups.text)
        raise RuntimeError(
            f"{one.key} of the optimizer is {one.value} on rank {one.rank} and {other.value} on rank {other.rank} "
            "before a step, and must be the same on all, as each rank steps a slice of the model: let a schedule see "
            "the same numbers on all ranks (a metric reduced over them, as by torch.distributed.all_reduce), and set "
            "rates alike"
        )
    late, alarm, waits = (any(row[1] & flag for row in rows) for flag in (_LATE, _ALARM, _WAITS))
    if on_device:
        # What comes late is reduced first, and then all of this is done again.
        total = mine if late or alarm else schedule.in_flight.gather_scalar("gather of the norm", mine).sum()
        return StepScalars(total, late=late, alarm=alarm, waits=waits)
    square = 0.0
    for row in rows[: schedule.num_shards]:
        square += as_float(row[0])
    return StepScalars(torch.tensor(square, dtype=torch.float64), late=late, alarm=alarm, waits=waits)


def _check_reductions(schedule: Schedule, done: Sequence[int]) -> None:
    """Hosts that do not wait for their devices may meet at different steps, and devices would take one collective for
    another.
    """
    if len(set(done)) > 1:
        stands = "; ".join(f"rank {rank} is at a step after {number} reductions" for rank, number in enumerate(done))
        schedule.guard.fail(
            f"the ranks have diverged: {stands}. Let all ranks call forward, backward and step equally often"
        )


def meet_for_call(schedule: Schedule, method: str) -> None:
    """Every rank is about to call this method of the optimizer, and nothing is in use."""
    _meet(schedule, 1 + METHODS.index(method))


def compare_written_groups(schedule: Schedule, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """After a step of a class of the user's own over shards: groups must be the same on all ranks."""
    what = "what the optimizer wrote to its param_groups"
    mine = _spell_groups(groups)
    if len({row[0] for row in schedule.synchronize(what, [_digest(mine)])}) > 1:
        one, other = find_mismatch(schedule, what, mine)
        raise RuntimeError(
            f"optimizer {optimizer}: {one.key} is {one.value} on rank {one.rank} and {other.value} on rank "
            f"{other.rank} after a step, and must be the same on all. Each rank steps a slice of the model, so an "
            "optimizer that makes one number of all parameters has to add it up over ranks itself (fsdp_in_use=True "
            "where it has such a mode); or use zero_optimization.stage 0"
        )


def _meet(schedule: Schedule, call: int, first: int = 0, flags: int = 0, groups: int = 0) -> list[list[int]]:
    """Every rank's numbers, once all make the same call, and have done the same to parameters since the last one."""
    done = {
        "frozen": ", ".join(schedule.frozen_names()),
        "dropped": ", ".join(schedule.dropped_names()),
        "written": ", ".join(schedule.written_names()),
    }
    done_digest = _digest(done) if any(done.values()) else 0
    rows = schedule.meet_for_step([first, flags + call * _CALL, done_digest, groups])
    schedule.note_values()
    calls = ["engine.step()", *(f"optimizer.{method}()" for method in METHODS)]
    made = [row[1] // _CALL for row in rows]
    for rank, call in enumerate(made):
        if call != made[0]:
            raise RuntimeError(
                f"rank {rank} calls {calls[call]} where rank 0 calls {calls[made[0]]}: call the same on all"
            )
    if len({row[_DONE] for row in rows}) > 1:
        one, other = find_mismatch(schedule, "what was done to parameters", done)
        raise RuntimeError(
            f"rank {other.rank} has {_WORDS[one.key]}; on rank {other.rank}: {other.value or 'none'}, on rank "
            f"{one.rank}: {one.value or 'none'}. Do the same on all ranks"
        )
    return rows


_WORDS = {
    "frozen": "frozen other parameters than rank 0 (requires_grad False), and each rank would step a slice of them by "
    "itself",
    "dropped": "dropped gradients of other parameters than rank 0 (p.grad = None, zero_grad of a module) after they "
    "were summed over the ranks, and each rank would leave out a slice of them",
    "written": "written to other parameters in place than rank 0, and each rank would take over a slice of them",
}


# -- groups of all ranks --------------------------------------------------------------------------------------------


def _spell_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every value that is plain data, under a name that says where it stands."""
    return {
        f"param_groups[{index}][{key!r}]": _spell(value)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key != "params" and is_plain(value)
    }


def _spell(value: Any) -> str:
    # One rank may hold as a tensor what another holds as a number, or 1 as 1.0.
    value = plain_number(value)
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)


def _digest(spelled: Mapping[str, str]) -> int:
    """A number that fits in a row."""
    text = "\0".join(f"{key}={value}" for key, value in sorted(spelled.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class GroupDigest:
    """The values of parameter groups as text and as a digest, to compare them over ranks.

    Only keys that the groups had at the start count. The text is made again when a value has changed.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._keys = [[key for key in group if key != "params"] for group in groups]
        self._held: list[dict[str, Any]] | None = None
        self.text: dict[str, str] = {}
        self.digest = 0

    def update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        named = zip(groups, self._keys, strict=True)
        held = [{key: plain_number(group.get(key)) for key in keys} for group, keys in named]
        if held != self._held:
            self._held, self.text = held, _spell_groups(held)
            self.digest = _digest(self.text)


@dataclass(frozen=True)
class RankValue:
    """The value that one rank has under a key."""

    key: str
    rank: int
    value: str | None


def find_mismatch(schedule: Schedule, what: str, mine: Mapping[str, str]) -> tuple[RankValue, RankValue]:
    """Return a key that two ranks hold differently, and their values. All ranks call this, and get the same."""
    held = [json.loads(schedule.publish(what, json.dumps(mine), rank)) for rank in range(schedule.agreement.group.size)]
    for key in dict.fromkeys(key for one in held for key in one):
        for rank, one in enumerate(held):
            if one.get(key) != held[0].get(key):
                return RankValue(key, 0, held[0].get(key)), RankValue(key, rank, one.get(key))
    raise AssertionError("ranks hold the same")
