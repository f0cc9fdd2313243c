"""Stages 1 and 2 by DeepSpeed's name."""

from __future__ import annotations

from typing import Any

from onefold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer


class _OfStages1And2(type):
    def __instancecheck__(cls, found: Any) -> bool:
        plan = found.plan if isinstance(found, ZeROOptimizer) else None
        return plan is not None and plan.shards_states and not plan.shards_parameters


class DeepSpeedZeroOptimizer(metaclass=_OfStages1And2):
    """`isinstance` of it: an optimizer of an engine whose states are sharded and whose parameters are not."""
