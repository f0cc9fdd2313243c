"""What is installed under the name of DeepSpeed."""

from __future__ import annotations

from onefold.compat.as_deepspeed import VERSION as version

git_hash = git_branch = "onefold"
installed_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info = {
    "version": "0.0",
    "bf16_support": False,
    "cuda_version": "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}

__all__ = ["accelerator_name", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
