"""Writing of a folder of torch.distributed.checkpoint that FSDP2 users load with `dcp.load`."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.storage.place import remove_tree, sync

Read = Callable[[str], torch.Tensor]
# torch's classes by the names of onefold's optimizers. Adam and AdamW have the same keys and states.
_CLASSES: dict[str, Any] = {
    "adam": torch.optim.AdamW, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad,
}  # fmt: skip
_COUNTS_STEPS = ("exp_avg", "sum")
PARTIAL = ".dcp-partial"


class _LazyPlanner(DefaultSavePlanner):
    """A planner that reads each tensor when it is written. The state dict that it plans has meta tensors."""

    def __init__(self, names: Mapping[tuple[Any, ...], str], read: Read) -> None:
        super().__init__()
        self._names, self._read = names, read

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = self._names.get(self.mappings[index.fqn])
        return super().lookup_object(index) if name is None else self._read(name)


def write_dcp(
    folder: Path,
    checkpoint: CheckpointReader,
    weights: Mapping[str, tuple[str, torch.dtype]],
    read_weight: Read,
) -> list[str]:
    """Write weights and optimizer states, keyed `model` and `optimizer`. Return the names of the files.

    `weights` gives the stored name and the dtype of each weight. The folder must be empty, except for what a killed
    export has left. Its files appear when all are written.
    """
    names: dict[tuple[Any, ...], str] = {}

    def later(path: tuple[Any, ...], name: str, dtype: torch.dtype) -> torch.Tensor:
        names[path] = name
        return torch.empty(checkpoint.stored(name).shape, dtype=dtype, device="meta")

    state: dict[str, Any] = {
        "model": {name: later(("model", name), f"model/{of}", dtype) for name, (of, dtype) in weights.items()}
    }
    optimizer = checkpoint.state["optimizer"]
    if optimizer is not None:
        states: dict[str, dict[str, torch.Tensor]] = {}
        for key in checkpoint.names("optimizer/"):
            name, _, of = key.rpartition("/")
            dtype = checkpoint.stored(f"optimizer/{key}").dtype
            states.setdefault(name, {})[of] = later(("optimizer", "state", name, of), f"optimizer/{key}", dtype)
        for found in states.values():
            if any(of in found for of in _COUNTS_STEPS):
                found["step"] = torch.tensor(float(optimizer["num_steps"]))
        state["optimizer"] = {"state": states, "param_groups": _groups(checkpoint, optimizer)}

    def read(name: str) -> torch.Tensor:
        return read_weight(name.removeprefix("model/")) if name.startswith("model/") else checkpoint.tensor(name)

    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"*{PARTIAL}"):  # from an export that was killed
        remove_tree(leftover)
    try:
        with tempfile.TemporaryDirectory(suffix=PARTIAL, dir=folder) as partial, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            writer = FileSystemWriter(partial, per_thread_copy_ahead=0)  # one tensor at a time, also next to a GPU
            save(state, storage_writer=writer, planner=_LazyPlanner(names, read), no_dist=True)
            # `.metadata` is the last: without it, the folder is no checkpoint.
            written = sorted(os.listdir(partial))
            for name in reversed(written):
                os.replace(Path(partial, name), folder / name)
            sync(folder)
    except BaseException as error:
        if not existed:
            remove_tree(folder)
        if isinstance(error, CheckpointException):  # which is no Exception
            raise error.failures[0][0] from error
        raise
    return written


def _groups(checkpoint: CheckpointReader, optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups with all keys that torch's class has, because `dcp.load` requires them."""
    parameters = checkpoint.manifest.parameters
    groups = []
    for number, saved in enumerate(optimizer["groups"]):
        name = optimizer["name"]
        if name is None:  # imported
            name = next((of for of, key in (("sgd", "dampening"), ("adagrad", "lr_decay")) if key in saved), "adamw")
        kind = _CLASSES.get(name.lower())
        defaults = kind([torch.zeros(1)]).param_groups[0] if kind is not None else {}
        group = {**defaults, "initial_lr": saved.get("lr"), **saved}  # `initial_lr` is that of schedules
        groups.append({**group, "params": [of for of, index in parameters.items() if index == number]})
    return groups
