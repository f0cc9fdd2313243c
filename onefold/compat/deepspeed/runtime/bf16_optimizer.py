"""DeepSpeed's optimizer for bf16 with fp32 gradients, by name."""

from __future__ import annotations

from typing import Any

import torch

from onefold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer


class _OfBF16(type):
    def __instancecheck__(cls, found: Any) -> bool:
        plan = found.plan if isinstance(found, ZeROOptimizer) else None
        if plan is None or not plan.shards_states or not plan.keeps_whole_gradient:
            return False
        return plan.precision.compute is torch.bfloat16 and plan.precision.accumulate is torch.float32


class BF16_Optimizer(metaclass=_OfBF16):
    """`isinstance` of it: an optimizer of sharded states and whole gradients, in fp32, of a model in bf16."""
