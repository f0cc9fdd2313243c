"""Stages 1 and 2 by DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch

from onefold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer
from onefold.compat.lazy import names, same


class _OfStages1And2(type):
    def __instancecheck__(cls, found: Any) -> bool:
        plan = found.plan if isinstance(found, ZeROOptimizer) else None
        return plan is not None and plan.shards_states and not plan.shards_parameters


class DeepSpeedZeroOptimizer(metaclass=_OfStages1And2):
    """`isinstance` of it: an optimizer of an engine whose states are sharded and whose parameters are not."""


def split_half_float_double(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Dense tensors by dtype: fp16, fp32, fp64, bf16; none for a dtype that is not there."""
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    found = [[tensor for tensor in dense if tensor.dtype is dtype] for dtype in dtypes]
    return [bucket for bucket in found if bucket]


__getattr__, __dir__ = names(
    __name__,
    same(
        "onefold.tools.estimate.model_states",
        "estimate_zero2_model_states_mem_needs_all_live",
        "estimate_zero2_model_states_mem_needs_all_cold",
    ),
)
