"""What all builders inherit from."""

from onefold.compat.deepspeed.ops.op_builder import OpBuilder

CUDAOpBuilder = TorchCPUOpBuilder = OpBuilder

__all__ = ["CUDAOpBuilder", "OpBuilder", "TorchCPUOpBuilder"]
