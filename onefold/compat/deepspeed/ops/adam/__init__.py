"""Adam under DeepSpeed's names."""

from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(
    __name__,
    {
        **same("onefold.compat.deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"),
        **same("onefold.compat.deepspeed.ops.adam.fused_adam", "FusedAdam"),
    },
)
