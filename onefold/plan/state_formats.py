"""The formats of master weights and optimizer states that are not stored as fp32. No tensors.

[Note: state formats]
A format stores the fp32 values of a shard in one or two flat tensors, its parts. `int8` is one byte per value and a
scale per 256 values. A split master is the bf16 weight and the remaining bits of the fp32 value. The format of a
parameter depends only on its name, dtype and size, and a block of 256 values never spans two parameters or ranks. So
values are rounded in the same way, and results are bit-equal, for every stage, number of ranks, cut and tier.
`offload/state_codec.py` defines the encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

# The number of values that share a scale. Parameters start at multiples of it (`PARAMETER_ALIGNMENT`).
BLOCK = 256

StateDtype = Literal["fp32", "int8", "bf16"]
MasterDtype = Literal["fp32", "bf16_int16", "bf16_int8", "bf16"]


@dataclass(frozen=True)
class FormatPart:
    """One flat tensor of a format."""

    dtype: torch.dtype
    values: int = 1
    """The number of values that share an element of this tensor."""

    def numel(self, num_values: int) -> int:
        return -(-num_values // self.values)


@dataclass(frozen=True)
class StateFormat:
    """The parts that store a tensor of values. The first part of a master is the model weight."""

    name: str
    parts: tuple[FormatPart, ...]
    is_dithered: bool = False
    """Values are rounded stochastically ([Note: dithered rounding])."""

    @property
    def block(self) -> int:
        """The number of values that are encoded together."""
        return max(part.values for part in self.parts)

    def num_bytes(self, num_values: int) -> int:
        return sum(part.numel(num_values) * part.dtype.itemsize for part in self.parts)


_SCALES = FormatPart(torch.float32, BLOCK)
INT8 = StateFormat("int8 of either sign", (FormatPart(torch.int8), _SCALES))
INT8_SQUARES = StateFormat("int8 of squares", (FormatPart(torch.uint8), _SCALES))
BF16_STOCHASTIC = StateFormat("bf16", (FormatPart(torch.bfloat16),), is_dithered=True)
SPLIT_16 = StateFormat("bf16 and 16 bits", (FormatPart(torch.bfloat16), FormatPart(torch.int16)))
SPLIT_8 = StateFormat("bf16 and 8 bits", (FormatPart(torch.bfloat16), FormatPart(torch.int8)))

MASTERS: dict[str, StateFormat | None] = {
    "fp32": None,
    "bf16_int16": SPLIT_16,
    "bf16_int8": SPLIT_8,
    "bf16": BF16_STOCHASTIC,
}

# Names of states that are never negative and span twice as many orders of magnitude.
_OF_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum")


@dataclass(frozen=True)
class StateFormats:
    """The formats of masters and states that the config selects."""

    states: StateDtype = "fp32"
    masters: MasterDtype = "fp32"
    min_numel: int = 4096
    """Parameters with fewer elements have fp32 states instead of int8 ones."""
    fp32_names: tuple[str, ...] = ()
    """Name patterns of parameters that always have fp32 states."""

    @property
    def are_plain(self) -> bool:
        """Whether masters and states are fp32."""
        return self.states == self.masters == "fp32"

    def of_state(self, name: str, parameter: str, dtype: torch.dtype, numel: int) -> StateFormat | None:
        """Return the format of one state of a parameter, or None for the dtype of its master."""
        is_plain = dtype == torch.float64 or self.states == "fp32"
        if is_plain or any(fnmatchcase(parameter, pattern) for pattern in self.fp32_names):
            return None
        if self.states == "bf16":
            return BF16_STOCHASTIC
        if numel < self.min_numel:
            return None
        return INT8_SQUARES if name in _OF_SQUARES else INT8

    def of_master(self, dtype: torch.dtype) -> StateFormat | None:
        """Return the format of the master of a parameter. It is None unless the model weight is bf16."""
        return MASTERS[self.masters] if dtype == torch.bfloat16 else None
