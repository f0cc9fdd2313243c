"""Lion under DeepSpeed's names."""

from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(
    __name__,
    {
        **same("onefold.compat.deepspeed.ops.lion.cpu_lion", "DeepSpeedCPULion"),
        **same("onefold.compat.deepspeed.ops.lion.fused_lion", "FusedLion"),
    },
)
