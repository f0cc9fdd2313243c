"""Checkpoints of onefold load on any number of ranks; these are the names that others import."""

import importlib

from onefold.compat.lazy import names, same

_CONSTANTS = "onefold.compat.deepspeed.checkpoint.constants"

__getattr__, __dir__ = names(
    __name__,
    {
        **same(
            "onefold.compat.deepspeed.checkpoint.utils",
            "clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank",
        ),
        **same("onefold.compat.deepspeed.checkpoint.deepspeed_checkpoint", "DeepSpeedCheckpoint"),
        **same("onefold.compat.deepspeed.checkpoint.zero_checkpoint", "ZeROCheckpoint"),
        **{
            name: f"{_CONSTANTS}.{name}"
            for name in vars(importlib.import_module(_CONSTANTS))
            if name.isupper() and not name.startswith("_")
        },
    },
)  # fmt: skip
