"""Groups of ranks: data parallelism over all of them, and neighbouring ranks that compute parts of sequences."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# The groups of sequence parallelism (`ulysses.SequenceMesh`), which new engines use; None without it.
mpu: Any = None


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(dist.get_world_size()))


def _one() -> int:
    return 1


def _none() -> None:
    return None


def _zero() -> int:
    return 0


def _get_data_parallel_world_size() -> int:
    """Return the number of ranks with different samples."""
    return dist.get_world_size() // _get_sequence_parallel_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank() // _get_sequence_parallel_world_size()


def _get_sequence_parallel_group() -> Any:
    return mpu.get_sequence_parallel_group() if mpu is not None else None


def _get_sequence_parallel_world_size() -> int:
    return int(mpu.get_sequence_parallel_world_size()) if mpu is not None else 1


def _get_sequence_parallel_rank() -> int:
    return int(mpu.get_sequence_parallel_rank()) if mpu is not None else 0


get_data_parallel_group = _get_sequence_data_parallel_group = _clone_world_group = _get_data_parallel_group
get_data_parallel_world_size, get_data_parallel_rank = _get_data_parallel_world_size, _get_data_parallel_rank
_get_sequence_data_parallel_world_size, _get_sequence_data_parallel_rank = dist.get_world_size, dist.get_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size = _get_model_parallel_world_size = _one
_get_expert_model_parallel_world_size = _one
get_tensor_model_parallel_rank = get_model_parallel_rank = _zero
get_tensor_model_parallel_group = get_model_parallel_group = _none
_get_broadcast_src_rank = _zero


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {}


_get_expert_data_parallel_group_dict = _get_expert_parallel_group_dict


def _ensure_divisibility(numerator: int, denominator: int) -> None:
    if denominator == 0:
        raise ValueError("denominator must be non-zero")
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


# -- tensor parallelism as a model-parallel unit of Megatron reports it ------------------------------------------------


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
