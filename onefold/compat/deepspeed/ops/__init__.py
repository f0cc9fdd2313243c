"""DeepSpeed's operators by name. Nothing is compiled: torch's own kernels do the work."""

from __future__ import annotations

from onefold.compat.lazy import names

_COMPATIBLE = "onefold.compat.deepspeed.ops.op_builder.COMPATIBLE"
__getattr__, __dir__ = names(__name__, {"__compatible_ops__": _COMPATIBLE, "__installed_ops__": _COMPATIBLE})
