"""Checkpoints in folders of torch.distributed.checkpoint, as FSDP2 users, torchtitan and Accelerate save them.

[Note: layouts of DCP]
`.metadata` gives the path of each entry in the nested state dict that was saved. Recognized are

    model      `model`, or weights at the top level (torchtitan)
    optimizer  `optimizer` or `optim`: {"state": {name: {...}}, "param_groups": [...]} as `get_optimizer_state_dict`
               returns it, or the same flattened: "state.NAME.exp_avg", "param_groups.NAME.lr" (torchtitan)
    schedule   `lr_scheduler` or `scheduler`
    others     the client state, if they are plain data

also inside of one more key, `app`. DCP stores a list index as an integer and the key of a dict as a string, even if it
was an integer. It stores nothing of an empty dict.

Accelerate and transformers write two such folders, `pytorch_model_fsdp_0` and `optimizer_0`, next to files of each
rank.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.dcp.dcp_metadata import METADATA, DcpFolder, DcpTensor, Entry, PathInState
from onefold.checkpoint.deepspeed.torch_files import read_torch_file
from onefold.checkpoint.format.manifest import single
from onefold.checkpoint.format.safetensors_files import DTYPE_NAMES
from onefold.log import logger
from onefold.storage.place import local_path

ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
_SCHEDULES = ("scheduler.bin", "scheduler.pt")
# Files that Accelerate and transformers write next to these folders, which contain no weights or optimizer states.
_NOT_CONVERTED = re.compile(
    r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|scaler\.pt|"
    r"custom_checkpoint_\d+\.pkl|training_args\.bin"
)
_DESCRIPTIONS = re.compile(r".*\.(json|txt|md|jinja|model)")
# The states of the optimizers that onefold computes. `onefold.fsdp.offload` also stores a `master`.
_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
_MASTER = "master"
# Other optimizers keep states of the same names. For each state: its optimizers in onefold, the key by which their
# groups are recognized, and an example of the others.
_GROUP_KEYS = {
    "exp_avg_sq": ("Adam and AdamW", "amsgrad", "RAdam"),
    "momentum_buffer": ("SGD", "dampening", "Muon"),
    "sum": ("Adagrad", "lr_decay", "SM3"),
}
# The state of a schedule of torch that has no fields but those of its base class.
_SCHEDULE_FIELDS = {"base_lrs", "last_epoch", "verbose", "_step_count", "_last_lr", "_is_initial"}
_SCHEDULE_FIELDS |= {"_get_lr_called_within_step"}
_SCHEDULE_KEYS, _OPTIMIZER_KEYS = ("lr_scheduler", "scheduler"), ("optimizer", "optim")
_LEAVE_OUT = "Leave the top-level key out with --leave-out."
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
    inside_app: dict[str, bool] = {}
    for path_in_state, entry in (item for found in opened for item in found.entries.items()):
        is_inside = path_in_state[0] == "app" and len(path_in_state) > 1 and "app" not in leave_out
        key, *inner = path_in_state[1:] if is_inside else path_in_state
        if inside_app.setdefault(str(key), is_inside) != is_inside and key not in leave_out:
            raise ValueError(
                f"{folder}: {key!r} is inside of 'app' and next to it. Leave out 'app' with --leave-out app"
            )
        top.setdefault(str(key), {})[tuple(inner)] = entry
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
    if not found:
        what = f"no {METADATA} of torch.distributed.checkpoint, and no folder {' or '.join(ACCELERATE)} of Accelerate"
        raise ValueError(f"{folder}: {what}")
    steps = {
        int(match[1]): entry
        for entry in folder.iterdir()
        if entry.is_dir() and (match := re.fullmatch(r"(?:step|checkpoint)-(\d+)", entry.name))
    }
    if len(found) > 1 and not found.keys() <= {entry.name for entry in steps.values()}:
        raise ValueError(f"{folder} contains several checkpoints: {', '.join(found)}. Give one with --tag.")
    newest = steps[max(steps)] if steps else next(iter(found.values()))
    if newest.name not in found:
        complete = ", ".join(found)
        raise ValueError(
            f"{newest} is the newest step, but has no {METADATA}. Give a complete one with --tag: {complete}."
        )
    return newest


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name / METADATA).is_file() for name in ("", *ACCELERATE))


def _check_accelerate(folder: Path) -> tuple[Any, list[str]]:
    """Return the state of the schedule in a folder of Accelerate, and the files that are not converted."""
    schedules, ignored = [], []
    for entry in sorted(folder.iterdir()):
        if entry.name in _SCHEDULES:
            schedules.append(read_torch_file(entry))
        elif _NOT_CONVERTED.fullmatch(entry.name) or (entry.is_file() and _DESCRIPTIONS.fullmatch(entry.name)):
            ignored.append(entry.name)
        elif entry.name not in ACCELERATE:
            raise ValueError(f"{folder}: {entry.name} is not a known file of Accelerate's checkpoints. Move it away.")
    if len(schedules) > 1:
        raise ValueError(f"{folder}: several schedules: {', '.join(_SCHEDULES)}. Move all but one away.")
    return (schedules[0] if schedules else None), ignored


def _build(
    folder: Path, num_files: int, top: dict[str, dict[PathInState, Entry]], schedule: Any, left_out: Sequence[str]
) -> DcpCheckpoint:
    for both in (_OPTIMIZER_KEYS, _SCHEDULE_KEYS):
        if all(key in top for key in both):
            raise ValueError(f"{folder}: both {' and '.join(both)}. Leave one of them out with --leave-out.")
    is_flat = "model" not in top
    model = _weights(folder, top)
    key = next((key for key in _OPTIMIZER_KEYS if key in top), None)
    optimizer = _Optimizer.of(folder, top.pop(key), model) if key else None
    trained = optimizer.parameters if optimizer is not None else {}
    scalars = (name for name in model if not model[name].shape and "." not in name and name not in trained)
    if is_flat and (key := next(scalars, None)):
        what = f"{folder}: {key!r} is a scalar next to weights without the key 'model', and may be one or a counter"
        raise ValueError(f"{what}. Save the weights as 'model', or leave it out with --leave-out {key}.")
    if optimizer is not None and schedule is not None:
        _check_position(folder, schedule, optimizer.num_steps)
    if key := next((key for key in _SCHEDULE_KEYS if key in top), None):
        schedule = _restored(f"{folder}: {key}", _nested(folder, key, top.pop(key)))
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
    for source in sources.values():
        if source.dtype not in DTYPE_NAMES:
            what = f"{folder}: {source.name!r} is of {source.dtype}, which onefold's checkpoints do not support"
            raise ValueError(f"{what}. Convert it before saving, or leave its top-level key out with --leave-out.")
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
        if "" in found:
            raise ValueError(f"{folder}: 'model' is one value instead of the state dict of a model")
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
    """Read values and build the nested state of one key."""
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
    return _with_lists(tree, f"{folder}: {key}")


def _with_lists(tree: Any, where: str) -> Any:
    """Replace dicts by lists where the keys are integers. Raise if elements are missing."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _with_lists(value, f"{where}.{key}") for key, value in tree.items()}
    if not any(type(key) is int for key in inner):
        return inner
    if set(inner) != set(range(len(inner))):
        raise ValueError(
            f"{where} is an incomplete list: DCP does not store elements that are empty dicts. {_LEAVE_OUT}"
        )
    return [inner[index] for index in range(len(inner))]


def _restored(where: str, state: Any) -> Any:
    """Restore what DCP does not store of a schedule of torch: the types of keys, and empty dicts."""
    if isinstance(state, list):
        return [_restored(f"{where}.{index}", value) for index, value in enumerate(state)]
    if not isinstance(state, dict):
        return state
    if isinstance(state.get("milestones"), dict):  # of MultiStepLR
        state["milestones"] = Counter({int(key): value for key, value in state["milestones"].items()})
    if any(str(key).isdecimal() for key in state):
        raise ValueError(f"{where} has keys that may have been integers, which DCP stores as text. {_LEAVE_OUT}")
    lambdas, rates = state.get("lr_lambdas"), state.get("base_lrs")  # of LambdaLR and MultiplicativeLR
    if lambdas is None and isinstance(rates, list) and state.keys() <= _SCHEDULE_FIELDS:
        state["lr_lambdas"] = [{} for _ in rates]  # callables without attributes, such as functools.partial
    elif isinstance(lambdas, list) and isinstance(rates, list) and len(lambdas) != len(rates):
        raise ValueError(
            f"{where}.lr_lambdas is incomplete: DCP does not store elements that are empty dicts. {_LEAVE_OUT}"
        )
    if "step_ratio" in state:  # of CyclicLR
        state.setdefault("_scale_fn_custom", {})
    return {
        key: value if isinstance(value, Counter) else _restored(f"{where}.{key}", value) for key, value in state.items()
    }


def _check_position(folder: Path, schedule: Any, num_steps: int) -> None:
    """Warn if Accelerate has advanced a schedule several times per step."""
    position = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    if isinstance(position, int) and num_steps and position > num_steps and position % num_steps == 0:
        logger.warning(
            "%s: the schedule is at step %d after %d steps of the optimizer. Accelerate advances it once per process "
            "in each step, unless split_batches is set, and onefold once. See docs/moving-from-fsdp2.md.",
            folder, position, num_steps,
        )  # fmt: skip


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
            for state, (owner, key, other) in _GROUP_KEYS.items():
                if state in found and key not in groups[parameters[name]]:
                    what = f"{folder}: {found[state].name!r} is not a state of {owner}, whose groups have {key!r}"
                    raise ValueError(f"{what}. Others with such states ({other}) are not supported. {_LEAVE_OUT}")
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
    """Return the hyperparameters of each group, and the group of each parameter.

    In a flattened state, each parameter has a copy of its group. Equal ones are joined.
    """
    groups: list[dict[str, Any]] = []
    parameters: dict[str, int] = {}
    for number, found in sorted(values.items(), key=lambda item: item[0] if isinstance(item[0], int) else 0):
        names, group = found.pop("params"), {key: single(value) for key, value in found.items()}
        if key := next((key for key, value in group.items() if isinstance(value, torch.Tensor)), None):
            raise ValueError(f"{folder}: {key!r} of parameter group {number!r} is a tensor of several elements")
        if twice := [name for name in names if name in parameters]:
            raise ValueError(f"{folder}: {twice[0]!r} is in several parameter groups")
        if unknown := [name for name in names if name not in model]:
            raise ValueError(
                f"{folder}: a parameter group has {unknown[0]!r}, which is no weight of the model. {_NAMED}."
            )
        if isinstance(number, int) or group not in groups:
            groups.append(group)
        parameters |= dict.fromkeys(names, len(groups) - 1 if isinstance(number, int) else groups.index(group))
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
