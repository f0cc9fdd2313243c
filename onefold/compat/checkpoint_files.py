"""Files that tools read and write by themselves with DeepSpeed's names: `TorchCheckpointEngine`, names, copies.

`engine.save_checkpoint` and `engine.load_checkpoint` use none of this: their format is onefold's.
"""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class CheckpointCommitInfo:
    """The checkpoint that files belong to."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """The interface that DeepSpeed's checkpoint engines share."""

    name: str | None = None

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None: ...

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None: ...

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any: ...

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        return None

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        return None

    def cleanup(self) -> None:
        return None

    def preserves_storage_sharing(self) -> bool:
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Read and write files of torch. Loading executes nothing that a file contains."""

    name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(
                f"{path} contains pickled objects other than tensors and plain data, and loading them would execute "
                "its code. Load a checkpoint folder with engine.load_checkpoint, or save only tensors and plain data."
            ) from error

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008
    """Return the nested dicts and lists with all tensors copied, because a view would keep its whole buffer."""
    if torch.is_tensor(item):
        return item.detach().clone() if device is None else item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")
