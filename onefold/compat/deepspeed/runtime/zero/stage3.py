"""Stage 3 by DeepSpeed's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onefold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer
from onefold.compat.lazy import names, same
from onefold.zero import GatheredParameters


class _OfStage3(type):
    def __instancecheck__(cls, found: Any) -> bool:
        return isinstance(found, ZeROOptimizer) and found.plan.shards_parameters


class DeepSpeedZeroOptimizer_Stage3(metaclass=_OfStage3):
    """`isinstance` of it: an optimizer of an engine whose parameters are sharded."""


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield the module with all parameters unsharded, for several forwards."""
    module = getattr(model, "module", model)
    with GatheredParameters(module.parameters()):
        yield module


__getattr__, __dir__ = names(
    __name__,
    same(
        "onefold.tools.estimate.model_states",
        "estimate_zero3_model_states_mem_needs_all_live",
        "estimate_zero3_model_states_mem_needs_all_cold",
    ),
)
