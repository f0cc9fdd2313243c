"""Tensor parallelism as a model-parallel unit of Megatron tells it: its methods have had three names."""

from __future__ import annotations

from typing import Any

_PREFIXES = ("tensor_model_parallel", "slice_parallel", "model_parallel")


def _ask(mpu: Any, what: str, otherwise: Any) -> Any:
    methods = (getattr(mpu, f"get_{prefix}_{what}", None) for prefix in _PREFIXES)
    return next((method() for method in methods if method is not None), otherwise)


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    return int(_ask(mpu, "rank", 0))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    return int(_ask(mpu, "world_size", 1))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    return _ask(mpu, "group", None)
