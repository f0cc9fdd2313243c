"""The version that is installed under the name of DeepSpeed."""

from __future__ import annotations

from typing import Any

from onefold.compat.as_deepspeed import VERSION as version

git_hash = git_branch = "onefold"
installed_ops: dict[str, bool] = {}
accelerator_name = ""

__all__ = ["accelerator_name", "git_branch", "git_hash", "installed_ops", "version"]


def __getattr__(name: str) -> Any:
    if name != "torch_info":
        raise AttributeError(f"module 'deepspeed.git_version_info' has no attribute {name!r}")
    import torch

    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "cuda_version": torch.version.cuda or "0.0",
        # Three numbers without NCCL, because readers of "0.0" query torch for the version, which then raises.
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "0.0.0",
        "hip_version": torch.version.hip or "0.0",
    }
