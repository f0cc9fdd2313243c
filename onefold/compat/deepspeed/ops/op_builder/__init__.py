"""DeepSpeed's builders of compiled operators, by name. Nothing is compiled: torch's kernels do the work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from onefold.compat.deepspeed.ops.aio import AsyncIOBuilder


class OpBuilder:
    """An operator by its name; where torch's kernels do its work, `instead` says under which name."""

    NAME = "deepspeed_not_implemented"
    instead = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the feature of the operator is available here, for scripts that check before they train."""
        return bool(self.instead)

    def load(self, verbose: bool = False) -> Any:
        use = f"Use {self.instead}." if self.instead else "Run the script with DeepSpeed itself."
        raise NotImplementedError(f"{type(self).__name__}: onefold has no operator {self.name!r}. {use}")


class UtilsBuilder(OpBuilder):
    """Many tensors as one and back."""

    NAME = "utils"
    instead = "torch._utils"

    def load(self, verbose: bool = False) -> Any:
        from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

        return SimpleNamespace(flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors)


def _builder(name: str, operator: str, instead: str = "") -> type[OpBuilder]:
    return type(name, (OpBuilder,), {"NAME": operator, "instead": instead, "__module__": __name__})


CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", "deepspeed.ops.adam.DeepSpeedCPUAdam")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", "deepspeed.ops.lion.DeepSpeedCPULion")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", "deepspeed.ops.adam.FusedAdam")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", "deepspeed.ops.lion.FusedLion")
CCLCommBuilder = _builder("CCLCommBuilder", "deepspeed_ccl_comm")
DeepCompileBuilder = _builder("DeepCompileBuilder", "dc")
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn")
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer")
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb")
GDSBuilder = _builder("GDSBuilder", "gds")
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference")
InferenceCoreBuilder = _builder("InferenceCoreBuilder", "inference_core_ops")
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", "cutlass_ops")
NotImplementedBuilder = _builder("NotImplementedBuilder", "deepspeed_not_implemented")
PinMemoryBuilder = _builder("PinMemoryBuilder", "pin_memory")
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer")
RaggedOpsBuilder = _builder("RaggedOpsBuilder", "ragged_device_ops")
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", "ragged_ops")
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd")
ShareMemCommBuilder = _builder("ShareMemCommBuilder", "deepspeed_shm_comm")
SparseAttnBuilder = _builder("SparseAttnBuilder", "sparse_attn")
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference")
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", "stochastic_transformer")
TransformerBuilder = _builder("TransformerBuilder", "transformer")

ALL_OPS: dict[str, Any] = {
    kind.NAME: kind() for name, kind in list(globals().items()) if name.endswith("Builder") and name != "OpBuilder"
}
COMPATIBLE = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}

__all__ = ["ALL_OPS", "COMPATIBLE", "AsyncIOBuilder", "OpBuilder"]
