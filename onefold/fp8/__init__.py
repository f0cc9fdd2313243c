"""FP8: linear layers that multiply in 8-bit floats with dynamic scales, and their all-gathers in FP8."""

from onefold.fp8.convert import Fp8Layers, convert_layers
from onefold.fp8.gathered_weights import Fp8Scales, GatheredWeights
from onefold.fp8.linear import Fp8Linear
from onefold.fp8.scaled_tensor import ScaledTensor
from onefold.fp8.torchao_layers import unwrap_weights

__all__ = [
    "Fp8Layers", "Fp8Linear", "Fp8Scales", "GatheredWeights", "ScaledTensor", "convert_layers", "unwrap_weights",
]  # fmt: skip
