"""The functions of DeepSpeed's zero_to_fp32 that `onefold.utils.zero_to_fp32` does not have."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.checkpoint.tools.export import DTYPES, export, read_one
from onefold.compat.as_deepspeed import VERSION
from onefold.compat.config import read_config
from onefold.compat.config_models import ZeroStageEnum
from onefold.compat.not_offered import NotOffered
from onefold.utils.zero_to_fp32 import main

_LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
EXPORT_DTYPES = _LONG_NAMES | {name: name for name in DTYPES}
"""Dtypes of `export` by the names that DeepSpeed has for them."""
OUTPUT_DTYPE_NAMES = {name: DTYPES[known] for name, known in EXPORT_DTYPES.items()}


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
        dtype=EXPORT_DTYPES[_dtype_name(dtype)],
        file_format="safetensors" if safe_serialization else "bin",
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )


def to_torch_tensor(
    state_dict: dict[str, Any], return_empty_tensor: bool = False, dtype: str | torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return a state dict of tensors, read from disk and cast. Tied names remain tied."""
    wanted = None if dtype is None else OUTPUT_DTYPE_NAMES[_dtype_name(dtype)]
    made: dict[int, torch.Tensor] = {}
    for tensor in state_dict.values():
        if id(tensor) not in made:
            to = wanted if wanted is not None and tensor.dtype.is_floating_point else tensor.dtype
            made[id(tensor)] = (
                torch.empty(tensor.shape, dtype=to) if return_empty_tensor else tensor.contiguous().to(to)
            )
    return {name: made[id(tensor)] for name, tensor in state_dict.items()}


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.").lower()
    if name not in OUTPUT_DTYPE_NAMES:
        raise ValueError(f"Unsupported output dtype {dtype!r}. Use one of {', '.join(OUTPUT_DTYPE_NAMES)}.")
    return name


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """Write a file for `torch.load` with a checkpoint's counters and client state, and return its path.

    The checkpoint has them in its manifest, so the file is temporary: it is removed when the process ends.
    """
    name = "zero_pp_rank_0_mp_rank_00" if zero_stage == ZeroStageEnum.weights else "mp_rank_00"
    return _made_file(checkpoint_dir, f"{name}_model_states.pt", _model_state)


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    return [_made_file(checkpoint_dir, "mp_rank_00_model_states.pt", _model_state)]


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Write a file for `torch.load` with the stage but without states, and return its path."""
    return [_made_file(checkpoint_dir, "zero_pp_rank_0_mp_rank_00_optim_states.pt", _optimizer_state)]


class parse_optim_states(NotOffered):
    what = "flat groups of each rank out of a checkpoint (get_fp32_state_dict_from_zero_checkpoint reads whole weights)"


class parse_model_states(parse_optim_states):
    pass


def _model_state(checkpoint: CheckpointReader) -> dict[str, Any]:
    state = checkpoint.state
    sizes = {"dp_world_size": checkpoint.manifest.world_size, "mp_world_size": 1, "ds_version": VERSION}
    return {**state["client_state"], **state["counters"], **sizes, "ds_config": state["config"]}


def _optimizer_state(checkpoint: CheckpointReader) -> dict[str, Any]:
    stage = read_config(checkpoint.state["config"] or {}).zero_optimization.stage
    return {"optimizer_state_dict": {"zero_stage": stage}, "ds_version": VERSION}


def _made_file(
    checkpoint_dir: str | os.PathLike[str], name: str, content: Callable[[CheckpointReader], dict[str, Any]]
) -> str:
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    found = read_one(checkpoint_dir, None, content)
    folder = tempfile.mkdtemp(prefix="onefold-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.save(found, path := Path(folder, name))
    return str(path)


if __name__ == "__main__":
    main()
