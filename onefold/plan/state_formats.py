"""In what masters and optimizer states are held, where that is not fp32: their formats. No tensors.

[Note: state formats]
A format holds fp32 values along a shard in one or two flat tensors, its parts: `int8` as a byte a value and a scale for
every 256 of them, a split master as the 16-bit weight and what is left of the fp32 value beside it. Formats are decided
parameter by parameter, by its name, dtype and size alone, and a block of 256 values never crosses a parameter or a
rank: so whatever the stage, the ranks, the cut or the tier, the same values are rounded in the same way, and bits stay
equal.
What the values of each format are is told by `offload/state_codec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

# Values that share a scale. Parameters lie at multiples of it (`PARAMETER_ALIGNMENT`).
BLOCK = 256

StateDtype = Literal["fp32", "int8", "bf16"]
MasterDtype = Literal["fp32", "bf16_int16", "bf16_int8", "bf16"]


@dataclass(frozen=True)
class FormatPart:
    """A flat tensor of a format: one element of it serves so many values."""

    dtype: torch.dtype
    values: int = 1

    def numel(self, num_values: int) -> int:
        return -(-num_values // self.values)


@dataclass(frozen=True)
class StateFormat:
    """The parts in which values are held. Of a master the first part is the weight that computes."""

    name: str
    parts: tuple[FormatPart, ...]
    is_dithered: bool = False
    """Rounded at random, by the step and the place in the parameter ([Note: dithered rounding])."""

    @property
    def block(self) -> int:
        """Values that are encoded together."""
        return max(part.values for part in self.parts)

    def num_bytes(self, num_values: int) -> int:
        return sum(part.numel(num_values) * part.dtype.itemsize for part in self.parts)


_SCALES = FormatPart(torch.float32, BLOCK)
SIGNED = StateFormat("int8 of either sign", (FormatPart(torch.int8), _SCALES))
SQUARES = StateFormat("int8 of squares", (FormatPart(torch.uint8), _SCALES))
DITHERED = StateFormat("bf16", (FormatPart(torch.bfloat16),), is_dithered=True)
SPLIT_16 = StateFormat("bf16 and 16 bits", (FormatPart(torch.bfloat16), FormatPart(torch.int16)))
SPLIT_8 = StateFormat("bf16 and 8 bits", (FormatPart(torch.bfloat16), FormatPart(torch.int8)))

MASTERS: dict[str, StateFormat | None] = {"fp32": None, "bf16_int16": SPLIT_16, "bf16_int8": SPLIT_8, "bf16": DITHERED}

# States that are never negative, and span twice as many orders of magnitude.
_OF_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum")


@dataclass(frozen=True)
class StateFormats:
    """What the config says of masters and states."""

    states: StateDtype = "fp32"
    masters: MasterDtype = "fp32"
    min_numel: int = 4096
    """Parameters of fewer elements keep fp32 states where others have int8."""
    fp32_names: tuple[str, ...] = ()
    """Patterns of names of parameters that keep fp32 states in any case."""

    @property
    def are_plain(self) -> bool:
        return self.states == self.masters == "fp32"

    def of_state(self, name: str, parameter: str, dtype: torch.dtype, numel: int) -> StateFormat | None:
        """None: in the dtype of the masters."""
        is_plain = dtype == torch.float64 or self.states == "fp32"
        if is_plain or any(fnmatchcase(parameter, pattern) for pattern in self.fp32_names):
            return None
        if self.states == "bf16":
            return DITHERED
        if numel < self.min_numel:
            return None
        return SQUARES if name in _OF_SQUARES else SIGNED

    def of_master(self, dtype: torch.dtype) -> StateFormat | None:
        """Only a parameter that computes in bf16 has one to be held in fewer bytes."""
        return MASTERS[self.masters] if dtype == torch.bfloat16 else None
