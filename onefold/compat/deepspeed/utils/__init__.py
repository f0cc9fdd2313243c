"""Helpers under the names that DeepSpeed scripts import from its utils."""

from onefold.compat.lazy import names, same

_ACCESS = (
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param",
    "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "safe_get_full_model_grads", "safe_update_full_grad_vectorized",
)  # fmt: skip
_LEAVES = (
    "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter",
)  # fmt: skip

__getattr__, __dir__ = names(
    __name__,
    {
        **same("onefold.compat.deepspeed.utils.tensor_fragment", *_ACCESS),
        **same("onefold.utils", *_LEAVES),
        **same("onefold.compat.deepspeed.utils.logging", "log_dist", "logger", "set_log_level_from_string"),
        **same("onefold.compat.deepspeed.utils.init_on_device", "OnDevice"),
        **same("onefold.compat.deepspeed.utils.nvtx", "instrument_w_nvtx"),
        **same("onefold.compat.deepspeed.utils.module_utils", "recursive_getattr", "recursive_setattr"),
        **same("onefold.utils", "RepeatingLoader"),
        **same("torch.distributed", "is_initialized"),
    },
)
