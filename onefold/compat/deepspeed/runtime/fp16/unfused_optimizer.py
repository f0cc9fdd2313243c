"""Stage 0 in 16 bits, with any other optimizer, by DeepSpeed's name."""

from __future__ import annotations

from typing import Any

from onefold.compat.deepspeed.ops.adam.fused_adam import FusedAdam
from onefold.compat.deepspeed.runtime.fp16.fused_optimizer import is_16bit_stage_0


class _Unfused(type):
    def __instancecheck__(cls, found: Any) -> bool:
        return is_16bit_stage_0(found) and not isinstance(found, FusedAdam)


class FP16_UnfusedOptimizer(metaclass=_Unfused):
    """`isinstance` of it: the optimizer of a stage-0 engine in 16 bits that steps something else than our Adam."""
