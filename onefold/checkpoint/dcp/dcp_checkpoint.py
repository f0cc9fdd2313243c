"""Checkpoints in folders of torch.distributed.checkpoint, as FSDP2 users, torchtitan and Accelerate save them.

[Note: layouts of DCP]
`.metadata` gives the path of each entry in the nested state dict that was saved. Recognized are

    model      `model`, or weights at the top level (torchtitan)
    optimizer  `optimizer` or `optim`: {"state": {name: {...}}, "param_groups": [...]} as `get_optimizer_state_dict`
               returns it, or the same flattened: "state.NAME.exp_avg", "param_groups.NAME.lr" (torchtitan)
    schedule   `lr_scheduler` or `scheduler`
    others     the client state, if they are plain data

also inside of one more key, `app`. Accelerate and transformers write two such folders, `pytorch_model_fsdp_0` and
`optimizer_0`, next to files of each rank.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.dcp.dcp_metadata import METADATA, DcpFolder, DcpTensor, Entry, PathInState
from onefold.checkpoint.deepspeed.torch_files import read_torch_file
from onefold.checkpoint.format.manifest import single
from onefold.storage.place import local_path

ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
_SCHEDULES = ("scheduler.bin", "scheduler.pt")
# Files that Accelerate and transformers write next to these folders, which contain no weights or optimizer states.
_NOT_CONVERTED = re.compile(
    r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|scaler\.pt|"
    r"custom_checkpoint_\d+\.pkl|training_args\.bin"
)
_DESCRIPTIONS = re.compile(r".*\.(json|txt|md|jinja|model)")
# The states of the optimizers that onefold computes. A `master` is that of `onefold.fsdp.offload`.
_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
_MASTER = "master"
_NAMED = "Save with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which names parameters"
# Larger tensors are not client state, but perhaps another model.
_MAX_CLIENT_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class DcpCheckpoint:
    """An open checkpoint of DCP. Its tensors are assembled one at a time."""

    folder: Path
    num_files: int
    aliases: Mapping[str, str]
    parameters: Mapping[str, int | None]
    """The optimizer group of each trained parameter. Without the model, buffers and frozen parameters look alike."""
    state: dict[str, Any]
    sources: Mapping[str, DcpTensor]
    """The tensors by their names in onefold's format."""
    left_out: Sequence[str]
    """Files and keys that are not converted."""

    @property
    def writer(self) -> str:
        return f"imported from torch.distributed.checkpoint, {self.num_files} files"

    @property
    def model_names(self) -> list[str]:
        return [name for name in self.sources if name.startswith("model/")]

    def entries(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Iterate over the names, dtypes and shapes of the tensors without reading them."""
        for name, source in self.sources.items():
            yield name, source.dtype, source.shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the assembled tensors by name."""
        for name, source in self.sources.items():
            yield name, source.read()


def read_dcp(path: str | os.PathLike[str], tag: str | None = None, leave_out: Sequence[str] = ()) -> DcpCheckpoint:
    """Open a folder of DCP, of Accelerate, or one of several folders in `path`: `tag`, by default the latest step."""
    folder = _find(local_path(path, "a folder of torch.distributed.checkpoint").resolve(), tag)
    schedule, ignored = None, list[str]()
    if (folder / METADATA).is_file():
        opened = [DcpFolder.open(folder)]
    else:
        schedule, ignored = _check_accelerate(folder)
        opened = [DcpFolder.open(folder / name) for name in ACCELERATE if (folder / name).exists()]
    top: dict[str, dict[PathInState, Entry]] = {}
    for path_in_state, entry in (item for found in opened for item in found.entries.items()):
        inner = path_in_state[1:] if path_in_state[0] == "app" and len(path_in_state) > 1 else path_in_state
        top.setdefault(str(inner[0]), {})[inner[1:]] = entry
    if unknown := [key for key in leave_out if key not in top]:
        raise ValueError(f"{folder}: no key {unknown[0]!r} to leave out. Its keys: {', '.join(list(top)[:20])}")
    top = {key: value for key, value in top.items() if key not in leave_out}
    try:
        return _build(folder, sum(found.num_files for found in opened), top, schedule, [*ignored, *leave_out])
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: not a known state of a model and an optimizer: {error!r}") from error


def _find(folder: Path, tag: str | None) -> Path:
    """Return the folder of one checkpoint."""
    if tag is not None:
        if Path(tag).name != tag or not _is_checkpoint(folder / tag):
            raise ValueError(f"{folder}: no checkpoint {tag!r}")
        return folder / tag
    if _is_checkpoint(folder):
        return folder
    found = {entry.name: entry for entry in sorted(folder.iterdir()) if entry.is_dir() and _is_checkpoint(entry)}
    steps = {
        int(match[1]): found[name] for name in found if (match := re.fullmatch(r"(?:step|checkpoint)-(\d+)", name))
    }
    if not found:
        what = f"no {METADATA} of torch.distributed.checkpoint, and no folder {' or '.join(ACCELERATE)} of Accelerate"
        raise ValueError(f"{folder}: {what}")
    if len(found) > 1 and len(steps) < len(found):
        raise ValueError(f"{folder} contains several checkpoints: {', '.join(found)}. Give one with --tag.")
    return steps[max(steps)] if steps else next(iter(found.values()))


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name / METADATA).is_file() for name in ("", *ACCELERATE))


def _check_accelerate(folder: Path) -> tuple[Any, list[str]]:
    """Return the state of the schedule in a folder of Accelerate, and the files that are not converted."""
    schedules, ignored = [], []
    for entry in sorted(folder.iterdir()):
        if entry.name in _SCHEDULES:
            schedules.append(read_torch_file(entry))
        elif _NOT_CONVERTED.fullmatch(entry.name):
            ignored.append(entry.name)
        elif entry.name not in ACCELERATE and not (entry.is_file() and _DESCRIPTIONS.fullmatch(entry.name)):
            raise ValueError(f"{folder}: {entry.name} is not a known file of Accelerate's checkpoints. Move it away.")
    if len(schedules) > 1:
        raise ValueError(f"{folder}: several schedules: {', '.join(_SCHEDULES)}. Move all but one away.")
    return (schedules[0] if schedules else None), ignored


def _build(
    folder: Path, num_files: int, top: dict[str, dict[PathInState, Entry]], schedule: Any, left_out: Sequence[str]
) -> DcpCheckpoint:
    model = _weights(folder, top)
    keys = [key for key in ("optimizer", "optim") if key in top]
    if len(keys) > 1:
        raise ValueError(f"{folder}: both optimizer and optim. Leave one of them out with --leave-out.")
    optimizer = _Optimizer.of(folder, top.pop(keys[0]), model) if keys else None
    if name := next((key for key in ("lr_scheduler", "scheduler") if key in top), ""):
        schedule = _nested(folder, name, top.pop(name))
    sources = {f"model/{name}": entry for name, entry in model.items()}
    client_state = {key: _nested(folder, key, inside) for key, inside in top.items()}
    state: dict[str, Any] = {"optimizer": None, "lr_scheduler": schedule or None, "loss_scale": None}
    train_state = client_state.get("train_state")  # of torchtitan
    num_steps = int(train_state["step"]) if isinstance(train_state, dict) and "step" in train_state else 0
    if optimizer is not None:
        # SGD does not count steps. At least one was taken if it has states.
        num_steps = optimizer.num_steps or num_steps or int(any(optimizer.states.values()))
        state["optimizer"] = {"name": None, "num_steps": num_steps, "groups": optimizer.groups}
        for name, states in optimizer.states.items():
            for key, entry in states.items():
                sources[f"model/{name}" if key == _MASTER else f"optimizer/{name}/{key}"] = entry
    # DCP has no counters. A checkpoint is assumed to be at the end of a step.
    counters = {"global_steps": num_steps, "global_samples": 0, "skipped_steps": 0, "micro_steps": num_steps}
    return DcpCheckpoint(
        folder=folder,
        num_files=num_files,
        aliases={},
        parameters=optimizer.parameters if optimizer is not None else {},
        state={**state, "counters": counters, "client_state": client_state},
        sources=sources,
        left_out=left_out,
    )


def _weights(folder: Path, top: dict[str, dict[PathInState, Entry]]) -> dict[str, DcpTensor]:
    """Remove the weights from the top level, and return them."""
    if "model" in top:
        found = {".".join(map(str, path)): entry for path, entry in top.pop("model").items()}
    else:
        found = {key: inside[()] for key, inside in top.items() if isinstance(inside.get(()), DcpTensor)}
        for key in found:
            del top[key]
    model = {name: entry for name, entry in found.items() if isinstance(entry, DcpTensor)}
    if len(model) < len(found):
        name = next(name for name in found if name not in model)
        raise ValueError(f"{folder}: {name!r} of the model is not a tensor (an extra state?), which is not supported")
    if not model:
        raise ValueError(f"{folder}: no weights. Its keys: {', '.join(top)}")
    return model


def _nested(folder: Path, key: str, inside: Mapping[PathInState, Entry]) -> Any:
    """Read values and build the nested state of one key. Lists of more than plain data become dicts."""
    tree: dict[Any, Any] = {}
    for path, entry in inside.items():
        if isinstance(entry, DcpTensor) and math.prod(entry.shape) > _MAX_CLIENT_ELEMENTS:
            why = "is neither the model, nor an optimizer or a schedule"
            raise ValueError(f"{folder}: {key!r} {why}, but has large tensors. Leave it out with --leave-out {key}.")
        try:
            value = entry.read()
        except ValueError as error:
            raise ValueError(f"{entry.name!r}: {error} To import the rest, give --leave-out {key}.") from error
        if not path:
            return value
        place = tree
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = value
    return tree


@dataclass(frozen=True)
class _Optimizer:
    """The optimizer states by parameter, and the parameter groups."""

    num_steps: int
    groups: list[dict[str, Any]]
    parameters: dict[str, int]
    states: dict[str, dict[str, DcpTensor]]

    @staticmethod
    def of(folder: Path, inside: Mapping[PathInState, Entry], model: Mapping[str, DcpTensor]) -> _Optimizer:
        states: dict[str, dict[str, Entry]] = {}
        values: dict[Any, dict[str, Any]] = {}
        for path, entry in inside.items():
            match [*path]:
                case ["state", str() as name, str() as key]:
                    states.setdefault(name, {})[key] = entry
                case ["param_groups", int() as group, str() as key]:
                    values.setdefault(group, {})[key] = entry.read()
                case ["param_groups"]:  # torch before 2.4
                    values.update(enumerate(entry.read()))
                case [str() as flat] if flat.startswith("state."):
                    name, _, key = flat.removeprefix("state.").rpartition(".")
                    states.setdefault(name, {})[key] = entry
                case [str() as flat] if flat.startswith("param_groups."):
                    name, _, key = flat.removeprefix("param_groups.").rpartition(".")
                    values.setdefault(name, {"params": [name]})[key] = entry.read()
                case _:
                    raise ValueError(f"{folder}: {entry.name!r} is not a known entry of an optimizer's state")
        groups, parameters = _groups(folder, values, model)
        if unknown := sorted(states.keys() - parameters.keys()):
            raise ValueError(f"{folder}: states of {unknown[0]!r}, which is no parameter of a group. {_NAMED}.")
        tensors: dict[str, dict[str, DcpTensor]] = {}
        steps = set()
        for name, found in states.items():
            if "step" in found:
                steps.add(_step(folder, found.pop("step")))
            kept = {
                key: entry for key, entry in found.items() if isinstance(entry, DcpTensor) or entry.read() is not None
            }
            tensors[name] = {key: _check_state(folder, key, entry, model[name]) for key, entry in kept.items()}
        if len(steps) > 1:
            raise ValueError(f"{folder}: parameters have been stepped a different number of times: {sorted(steps)}")
        return _Optimizer(next(iter(steps), 0), groups, parameters, tensors)


def _groups(
    folder: Path, values: Mapping[Any, dict[str, Any]], model: Mapping[str, DcpTensor]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the hyperparameters of each group, and the group of each parameter. Equal groups are joined."""
    groups: list[dict[str, Any]] = []
    parameters: dict[str, int] = {}
    for found in values.values():
        names, group = found.pop("params"), {key: single(value) for key, value in found.items()}
        if unknown := [name for name in names if name not in model]:
            raise ValueError(
                f"{folder}: a parameter group has {unknown[0]!r}, which is no weight of the model. {_NAMED}."
            )
        if group not in groups:
            groups.append(group)
        parameters |= dict.fromkeys(names, groups.index(group))
    return groups, parameters


def _step(folder: Path, entry: Entry) -> int:
    value = single(entry.read())
    if not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(f"{folder}: {entry.name!r} is {value!r}, not a number of steps")
    return int(value)


def _check_state(folder: Path, state: str, entry: Entry, weight: DcpTensor) -> DcpTensor:
    if state not in (*_STATES, _MASTER):
        known = "Adam, AdamW, SGD, Adagrad and Lion"
        raise ValueError(f"{folder}: {entry.name!r} is a state of an optimizer that is not supported, only {known}")
    if not isinstance(entry, DcpTensor) or entry.shape != weight.shape:
        raise ValueError(f"{folder}: {entry.name!r} does not have the shape of its parameter, {list(weight.shape)}")
    return entry
