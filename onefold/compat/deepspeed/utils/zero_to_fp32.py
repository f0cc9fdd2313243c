"""Whole weights of a checkpoint, one of onefold's or one of DeepSpeed's."""

from __future__ import annotations

import os
from typing import Any

import torch

from onefold.checkpoint.tools.export import DTYPES, export
from onefold.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

__all__ = [
    "OUTPUT_DTYPE_NAMES",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "to_torch_tensor",
]

OUTPUT_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()} | DTYPES


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: str | torch.dtype,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in fp32, fp16 or bf16."""
    export(
        checkpoint_dir,
        output_dir,
        tag=tag,
        dtype=next(name for name, known in DTYPES.items() if known is _output_dtype(dtype)),
        file_format="safetensors" if safe_serialization else "bin",
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )


def to_torch_tensor(
    state_dict: dict[str, Any], return_empty_tensor: bool = False, dtype: str | torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """A state dict of tensors, or of what is still on disk, read and cast. Names of one tensor stay names of one."""
    wanted = None if dtype is None else _output_dtype(dtype)
    made: dict[int, torch.Tensor] = {}
    for tensor in state_dict.values():
        if id(tensor) not in made:
            to = wanted if wanted is not None and tensor.dtype.is_floating_point else tensor.dtype
            made[id(tensor)] = (
                torch.empty(tensor.shape, dtype=to) if return_empty_tensor else tensor.contiguous().to(to)
            )
    return {name: made[id(tensor)] for name, tensor in state_dict.items()}


def _output_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = OUTPUT_DTYPE_NAMES.get(str(dtype).removeprefix("torch.").lower())
    if found is None:
        raise ValueError(f"Unsupported output dtype {dtype!r}: it is one of {', '.join(OUTPUT_DTYPE_NAMES)}")
    return found


if __name__ == "__main__":
    main()
