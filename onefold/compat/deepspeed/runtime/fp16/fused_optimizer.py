"""Stage 0 in 16 bits, with DeepSpeed's fused Adam, by DeepSpeed's name."""

from __future__ import annotations

from typing import Any

from onefold.compat.deepspeed.ops.adam.fused_adam import FusedAdam
from onefold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer


def is_16bit_stage_0(found: Any) -> bool:
    if not isinstance(found, ZeROOptimizer):
        return False
    return not found.plan.shards_states and found.plan.precision.compute is not None


class _Fused(type):
    def __instancecheck__(cls, found: Any) -> bool:
        return is_16bit_stage_0(found) and isinstance(found, FusedAdam)


class FP16_Optimizer(metaclass=_Fused):
    """`isinstance` of it: the optimizer of a stage-0 engine in 16 bits that steps Adam."""
