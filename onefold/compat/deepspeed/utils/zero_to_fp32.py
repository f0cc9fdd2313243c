"""Whole fp32 weights of a checkpoint, one of onefold's or one of DeepSpeed's."""

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
from onefold.checkpoint.tools.export import read_one
from onefold.compat.as_deepspeed import VERSION
from onefold.compat.deepspeed.runtime.zero.config import ZeroStageEnum
from onefold.config import load_config
from onefold.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
]


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """A file for `torch.load` with a checkpoint's counters and client state, as DeepSpeed's first has them.

    The checkpoint itself has them in its manifest, so the file is made now and is gone when the process ends.
    """
    name = "zero_pp_rank_0_mp_rank_00" if zero_stage == ZeroStageEnum.weights else "mp_rank_00"
    return _made_file(checkpoint_dir, f"{name}_model_states.pt", _model_state)


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    return [_made_file(checkpoint_dir, "mp_rank_00_model_states.pt", _model_state)]


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """A file for `torch.load` that says the stage, as DeepSpeed's do. It has no states: the engine loads them."""
    return [_made_file(checkpoint_dir, "zero_pp_rank_0_mp_rank_00_optim_states.pt", _optimizer_state)]


def _model_state(checkpoint: CheckpointReader) -> dict[str, Any]:
    state = checkpoint.state
    sizes = {"dp_world_size": checkpoint.manifest.world_size, "mp_world_size": 1, "ds_version": VERSION}
    return {**state["client_state"], **state["counters"], **sizes, "ds_config": state["config"]}


def _optimizer_state(checkpoint: CheckpointReader) -> dict[str, Any]:
    stage = load_config(checkpoint.state["config"] or {}).zero_optimization.stage
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
