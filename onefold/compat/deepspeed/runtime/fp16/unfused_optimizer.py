"""DeepSpeed's optimizer for LAMB and 1-bit Adam, by name."""

from __future__ import annotations

from typing import Any


class _OfNone(type):
    def __instancecheck__(cls, found: Any) -> bool:
        return False


class FP16_UnfusedOptimizer(metaclass=_OfNone):
    """`isinstance` of it: nothing. One optimizer serves all rules."""
