"""DeepSpeed's builders of operators by name. Nothing is built: torch's own kernels do the work."""

from __future__ import annotations

from typing import Any

from onefold.compat.deepspeed.ops import __compatible_ops__
from onefold.compat.deepspeed.ops.aio import AsyncIOBuilder
from onefold.compat.not_offered import NotOffered

__all__ = [
    "AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "FusedAdamBuilder", "FusedLambBuilder",
    "FusedLionBuilder", "InferenceBuilder", "OpBuilder", "QuantizerBuilder", "TransformerBuilder",
]  # fmt: skip


class _Kernels(NotOffered):
    what = "DeepSpeed's compiled kernels (its optimizers by name step with torch's)"


class OpBuilder:
    """An operator's name, and whether what it does is offered here."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return __compatible_ops__.get(self.NAME, False)

    def load(self, verbose: bool = False) -> Any:
        return _Kernels()


class CPUAdagradBuilder(OpBuilder):
    NAME = "cpu_adagrad"


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"


class CPULionBuilder(OpBuilder):
    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    NAME = "fused_adam"


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"


class FusedLionBuilder(OpBuilder):
    NAME = "fused_lion"


class InferenceBuilder(OpBuilder):
    NAME = "transformer_inference"


class QuantizerBuilder(OpBuilder):
    NAME = "quantizer"


class TransformerBuilder(OpBuilder):
    NAME = "transformer"
