"""The modules of DeepSpeed's runtime that others import."""

from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(
    __name__, same("onefold.compat.deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer", "ZeROOptimizer")
)
