"""`deepspeed.zero`."""

from onefold.compat.lazy import names, same

_PARTITION = "onefold.compat.deepspeed.runtime.zero.partition_parameters"
__getattr__, __dir__ = names(
    __name__,
    {
        **same(
            _PARTITION,
            "GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "register_external_parameter",
            "unregister_external_parameter",
        ),
        **same("onefold.compat.deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
        "MiCS_Init": f"{_PARTITION}.Init",
        **same("onefold.compat.deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload"),
        **same("onefold.compat.deepspeed.runtime.zero.tiling", "TiledLinear", "TiledLinearReturnBias"),
        **same("onefold.compat.deepspeed.runtime.zero.stage3", "unwrap_model_for_generation"),
    },
)  # fmt: skip
