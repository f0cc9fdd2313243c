"""DeepSpeed's public names over onefold's runtime, one module for each of DeepSpeed's that others import.

No module here keeps an engine's state: that is onefold's. Importing one costs little: names are fetched when they are
read. What is not ZeRO (pipelines, expert layers, inference kernels, compression) can be imported and says that it is
not offered when it is used.
"""

from __future__ import annotations

from onefold.compat.as_deepspeed import VERSION as __version__
from onefold.compat.lazy import names, same
from onefold.compat.not_offered import find_modules

_D = "onefold.compat.deepspeed"
__getattr__, __dir__ = names(
    __name__,
    {
        **same(f"{_D}.runtime.engine", "DeepSpeedEngine", "initialize"),
        **same(f"{_D}.runtime.config", "DeepSpeedConfig", "DeepSpeedConfigError"),
        **same(f"{_D}.runtime.base_optimizer", "DeepSpeedOptimizer"),
        **same(f"{_D}.runtime.dataloader", "DeepSpeedDataLoader"),
        **same(f"{_D}.runtime.hybrid_engine", "DeepSpeedHybridEngine"),
        **same(f"{_D}.runtime.lr_schedules", "add_tuning_arguments"),
        **same(f"{_D}.runtime.pipe.engine", "PipelineEngine"),
        **same(f"{_D}.runtime.activation_checkpointing", "checkpointing"),
        **same(f"{_D}.runtime", "zero"),
        **same(f"{_D}.runtime.tensor_parallel", "tp_model_init"),
        **same(f"{_D}.inference.engine", "InferenceEngine", "init_inference", "default_inference_config"),
        **same(f"{_D}.inference.config", "DeepSpeedInferenceConfig"),
        **same(f"{_D}.pipe", "PipelineModule"),
        **same(f"{_D}.ops.transformer", "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
        **same(f"{_D}.module_inject", "replace_transformer_layer"),
        **same(f"{_D}.accelerator", "get_accelerator"),
        **same(f"{_D}.comm", "init_distributed"),
        **same(f"{_D}.utils", "OnDevice", "log_dist", "logger"),
        **same(f"{_D}.constants", "TORCH_DISTRIBUTED_DEFAULT_PORT"),
        **same("onefold.start", "add_config_arguments"),
        **same(f"{_D}.git_version_info", "git_branch", "git_hash", "version"),
        "__git_branch__": f"{_D}.git_version_info.git_branch",
        "__git_hash__": f"{_D}.git_version_info.git_hash",
        "dist": f"{_D}.comm",
    },
)
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("+")[0].split("."))
HAS_TRITON = False
find_modules()
