"""DeepSpeed's operators by name. Nothing is compiled: torch's own kernels do the work."""

from __future__ import annotations

from onefold.compat.lazy import names

__compatible_ops__ = {
    "async_io": True,
    "cpu_adam": True,
    "cpu_adagrad": True,
    "cpu_lion": True,
    "fused_adam": True,
    "fused_lion": True,
    "fused_lamb": False,
    "quantizer": False,
    "transformer": False,
    "transformer_inference": False,
}
__installed_ops__ = __compatible_ops__

__getattr__, __dir__ = names(__name__, {})
