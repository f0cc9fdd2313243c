"""Stage 1 in bf16 by DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch

from onefold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer
from onefold.compat.deepspeed.runtime.zero.config import ZeroStageEnum


class _OfStage1(type):
    def __instancecheck__(cls, found: Any) -> bool:
        plan = found.plan if isinstance(found, ZeROOptimizer) else None
        if plan is None or plan.precision.compute is not torch.bfloat16:
            return False
        return plan.stage == ZeroStageEnum.optimizer_states and plan.precision.accumulate is torch.float32


class BF16_Optimizer(metaclass=_OfStage1):
    """`isinstance` of it: the optimizer of a stage-1 engine in bf16 whose gradients add up in fp32."""
