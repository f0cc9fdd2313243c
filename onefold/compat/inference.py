"""`init_inference` where it is plain evaluation: the model as it is, in the dtype and on the device asked for."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from onefold.comm import local_device
from onefold.compat.not_offered import NotOffered

# Settings of features other than evaluation, and the values that turn these off.
_MORE = {
    "replace_with_kernel_inject": (False, None),
    "kernel_inject": (False, None),
    "mp_size": (1, None),
    "quant": ({}, None),
    "moe": (False, {}, None),
    "checkpoint": (None,),
    "enable_cuda_graph": (False, None),
    "injection_policy": ({}, None),
    "injection_dict": ({}, None),
    "injection_policy_tuple": ((), None),
    "zero": ({}, None),
    "use_triton": (False, None),
    "keep_module_on_host": (False, None),
    "save_mp_checkpoint_path": (None,),
    "set_empty_params": (False, None),
    "mpu": (None,),
    "ep_size": (1, None),
}
# Settings of kernels and partitioned checkpoints, which have no effect without them.
_OF_KERNELS = """
    max_out_tokens max_tokens min_out_tokens min_tokens return_tuple triangular_masking tm replace_method base_dir
    training_mp_size transposed_mode triton_autotune checkpoint_config ckpt_config moe_experts moe_type config args
    ep_group expert_group ep_mp_group expert_mp_group
""".split()  # noqa: SIM905
_KEYS = {*_MORE, *_OF_KERNELS, "dtype", "tensor_parallel", "tp"}


class InferenceEngine(nn.Module):
    """A model that evaluates. Unknown attributes are the module's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Return the model for evaluation, cast to `dtype` and moved to this rank's device."""
    if config is not None and not isinstance(config, dict):
        raise TypeError(f"init_inference: config must be a dict, not {type(config).__name__}")
    settings = {**(config or {}), **kwargs}
    for name in settings.keys() - _KEYS:
        near = difflib.get_close_matches(name, _KEYS, 1)
        raise TypeError(f"init_inference: {name!r} is unknown.{f' Did you mean {near[0]!r}?' if near else ''}")
    parallel = settings.get("tensor_parallel") or settings.get("tp") or {}
    size = parallel.get("tp_size", 1) if isinstance(parallel, dict) else parallel
    more = [name for name, plain in _MORE.items() if name in settings and settings[name] not in plain]
    if more or size != 1:
        raise NotImplementedError(
            f"init_inference: {', '.join(more) or 'tensor_parallel'}: onefold evaluates models without "
            "kernels, quantization or tensor parallelism. Leave it out."
        )
    dtype = settings.get("dtype")
    if isinstance(dtype, str):
        dtype = getattr(torch, {"fp16": "half", "fp32": "float", "bf16": "bfloat16"}.get(dtype, dtype.split(".")[-1]))
    return InferenceEngine(model.to(device=local_device(), dtype=dtype))


class default_inference_config(NotOffered):
    what = "inference kernels, and hence their config"
