"""Every builder by the name of its operator."""

from onefold.compat.deepspeed.ops.op_builder import ALL_OPS

__all__ = ["ALL_OPS"]
