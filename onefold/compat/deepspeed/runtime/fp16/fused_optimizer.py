"""DeepSpeed's optimizer for 16-bit parameters without ZeRO, by name."""

from __future__ import annotations

from typing import Any

from onefold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer


class _OfUnshardedStates(type):
    def __instancecheck__(cls, found: Any) -> bool:
        plan = found.plan if isinstance(found, ZeROOptimizer) else None
        return plan is not None and not plan.shards_states and plan.precision.compute is not None


class FP16_Optimizer(metaclass=_OfUnshardedStates):
    """`isinstance` of it: an optimizer whose states are not sharded, of a model that computes in 16 bits."""
