"""The comparison of values that all ranks must have with the same bits.

[Note: what is compared]
Per unit, an int64 sum of the bits of all flat parameters that stay unsharded: all parameters in stages 0 to 2, and
persistent ones in stage 3. The comparison runs before a step, on the values that forward and backward have used: in
stages 1 to 3 the step replaces trained parameters on all ranks by those of the shards, and a bit that has flipped
before is then gone, or is the same on all ranks.

Buffers start with rank 0's values, but a forward may write other ones on each rank, such as the statistics of a batch
norm. Each rank therefore compares a buffer with itself at the last comparison. A buffer has changed silently if its
bits differ, but its version counter does not, which a write of the program increments. A buffer that has changed
silently on some ranks, and has not changed on others, is a difference. torch's norms write their statistics without
the counter, so these are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from onefold.recovery.refused_step import ReplicaError
from onefold.runtime import Schedule

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_Noted = tuple[int, int, int]
_ADVICE = (
    "These values must have the same bits on all ranks, so a device or a link has changed some of them, or the program "
    "has written them on some ranks only. No weight was changed by this step. Load the last checkpoint on all ranks, "
    "and test the devices of the ranks that differ."
)


class BufferState(IntEnum):
    """What has happened to a buffer on one rank since the last comparison."""

    KEPT = 0
    CHANGED_SILENTLY = 1
    WRITTEN = 2


class ReplicaCheck:
    """Compares sums of bits between the ranks every few steps."""

    def __init__(self, schedule: Schedule, model: nn.Module, every: int) -> None:
        self._schedule, self._every = schedule, every
        self._num_steps = 0
        self._units = [unit for unit in schedule.units if any(param.stays_unsharded for param in unit.params)]
        self._buffers = [
            (f"{prefix}.{name}".removeprefix("."), module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.layout is torch.strided and not isinstance(module, _NormBase)
        ]
        # Address, version counter and sum of each buffer at the last comparison.
        self._noted: list[_Noted | None] = []

    def run(self) -> None:
        """Count a step. Compare before every n-th one, and raise on all ranks if a value differs.

        All ranks call this together, after they have synchronized for the step.
        """
        self._num_steps += 1
        if self._num_steps == 1:
            self._noted = [self._note(*place) for _, *place in self._buffers]
        if self._num_steps % self._every:
            return
        self._schedule.wait_for_step()
        sums = [
            torch.stack([sum_of_bits(param.full) for param in unit.params if param.stays_unsharded]).sum()
            for unit in self._units
        ]
        now = [self._note(*place) for _, *place in self._buffers]
        states = [_compare(then, after) for then, after in zip(self._noted, now, strict=True)]
        self._noted = now
        values = torch.stack(sums).tolist() if sums else []
        mine = torch.tensor([*values, *states], dtype=torch.int64)
        rows = self._schedule.agreement.exchange("the comparison of replicas", mine).tolist()
        different = []
        for index, unit in enumerate(self._units):
            different += _describe(f"unit {unit.name}", [row[index] for row in rows])
        for index, (name, *_) in enumerate(self._buffers, len(self._units)):
            found = [row[index] for row in rows]
            if BufferState.KEPT in found and BufferState.CHANGED_SILENTLY in found:
                ranks = [str(rank) for rank, state in enumerate(found) if state == BufferState.CHANGED_SILENTLY]
                different.append(f"buffer {name} on rank {', '.join(ranks)}")
        if different:
            raise ReplicaError(f"replicas differ before a step: {'; '.join(different)}", _ADVICE)

    def _note(self, module: nn.Module, name: str) -> _Noted | None:
        """Return address, version counter and sum of a buffer, or None if it has no values."""
        buffer = module._buffers.get(name)
        if buffer is None or buffer.is_meta or buffer.is_inference():
            return None
        return buffer.data_ptr(), buffer._version, int(sum_of_bits(buffer).item())


def _compare(then: _Noted | None, now: _Noted | None) -> BufferState:
    if then is None or now is None or then[:2] != now[:2]:
        return BufferState.WRITTEN
    return BufferState.KEPT if then[2] == now[2] else BufferState.CHANGED_SILENTLY


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements of a tensor, read as integers. It wraps around."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def _describe(name: str, sums: Sequence[int]) -> list[str]:
    """Return which ranks have another sum than most ranks, in a list that is empty if all are the same."""
    (most, count), *others = Counter(sums).most_common()
    if not others:
        return []
    is_majority = 2 * count > len(sums)
    ranks = [rank for rank, each in enumerate(sums) if each != (most if is_majority else sums[0])]
    than = "" if is_majority else " (from rank 0; either may be wrong)"
    return [f"{name} on rank {', '.join(map(str, ranks))}{than}"]
