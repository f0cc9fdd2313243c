"""The device that this process computes on, under DeepSpeed's names."""

from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(
    __name__,
    {
        **same("onefold.compat.deepspeed.accelerator.abstract_accelerator", "DeepSpeedAccelerator"),
        **same(
            "onefold.compat.deepspeed.accelerator.real_accelerator",
            "get_accelerator",
            "is_current_accelerator_supported",
            "set_accelerator",
        ),
    },
)
