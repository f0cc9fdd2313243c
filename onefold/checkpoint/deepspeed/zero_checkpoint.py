"""Reading and conversion of DeepSpeed's ZeRO checkpoints (stages 1, 2 and 3), without DeepSpeed or unsafe pickles.

[Note: DeepSpeed's files]
`<folder>/latest` names a folder with one optimizer file per data-parallel rank, and one model file (stages 1 and 2) or
one model file per rank (stage 3). An optimizer file contains flat vectors of master weights and, in the state of
torch's optimizer, a flat vector for each optimizer state. The order of `param_shapes` in the model file determines
which elements belong to which parameter.

    stage   a flat vector is     partitioned over ranks                                 frozen parameters
    1, 2    a parameter group    as a whole, in rank order, with padding at the end     in `module`, unsharded
    3       several parameters   per parameter, padded to a multiple of the number of   fragments in the model
            of one group         ranks; the slices of a rank are concatenated           file of each rank

Master weights of stages 1 and 2 are stored without padding, and optimizer states with padding (unless
`elastic_checkpoint` is set).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.deepspeed.expert_files import (
    Owners,
    check_weights,
    count_experts,
    owners_of,
    read_expert_files,
)
from onefold.checkpoint.deepspeed.torch_files import StandIn, read_torch_file
from onefold.checkpoint.format.manifest import NAME
from onefold.storage.place import local_path, read_small

MAX_TAG_BYTES = 4096
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
UNIVERSAL = "DeepSpeed's universal format is not supported. Give the checkpoint that it was converted from"
EXPERT_OPTIMIZER_FILE = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
NOT_READ = {
    r"expert_\d+_.*": "files of experts of all layers are not supported",
    r"layer_\d+-.*": "pipeline parallelism is not supported",
    r"zero": UNIVERSAL,
    r"offloaded_tensors": "optimizer states on NVMe are not supported. Save without NVMe offload",
}
# DeepSpeed's stages, and whether each parameter is partitioned separately.
SLICED = {1: False, 2: False, 3: True}
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
# DeepSpeed's keys in a model file. All other keys are the user's client state.
OWN_KEYS = {
    "buffer_names", "checkpoint_parallel_dimensions", "data_sampler", "dp_world_size", "ds_autoep_layers", "ds_config",
    "ds_version", "frozen_param_fragments", "frozen_param_shapes", "global_samples", "global_steps", "lr_scheduler",
    "module", "mp_world_size", "num_experts", "optimizer", "param_shapes", "random_ltd", "shared_params",
    "skipped_steps", "sparse_tensor_module_names", "universal_checkpoint_info",
}  # fmt: skip

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PartitionedTensor:
    """One tensor of the checkpoint, and the partitions of all ranks that contain its elements."""

    name: str
    dtype: torch.dtype
    shape: Shape
    partitions: Sequence[torch.Tensor]
    """The partitions by rank."""
    start: int = 0
    sliced: bool = False
    """Each partition has a slice of the tensor at `start` (stage 3). Otherwise the partitions form one vector."""

    def pieces(self) -> Iterator[torch.Tensor]:
        numel, start = math.prod(self.shape), self.start
        share = -(-numel // len(self.partitions))
        for rank, partition in enumerate(self.partitions):
            if self.sliced:
                yield partition[start : start + max(0, min(share, numel - rank * share))]
            else:
                if -numel < start < partition.numel():
                    yield partition.reshape(-1)[max(0, start) : start + numel]
                start -= partition.numel()

    def assemble(self) -> torch.Tensor:
        pieces = list(self.pieces())
        whole = torch.empty(self.shape, dtype=self.dtype)
        for target, piece in zip(whole.view(-1).split([piece.numel() for piece in pieces]), pieces, strict=True):
            target.copy_(piece)
        return whole


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """An open DeepSpeed checkpoint. Its tensors are assembled one at a time from memory-mapped files."""

    folder: Path
    stage: int
    world_size: int
    """The number of data-parallel ranks that wrote the checkpoint."""
    aliases: Mapping[str, str]
    """The names of tied parameters that are not stored, mapped to the stored names."""
    parameters: Mapping[str, int | None]
    """The optimizer group of each parameter, or None if it is frozen."""
    state: dict[str, Any]
    """The plain data, with the keys optimizer, lr_scheduler, loss_scale, counters and client_state."""
    sources: Sequence[PartitionedTensor]

    @property
    def writer(self) -> str:
        return f"imported from DeepSpeed, {self.world_size} ranks"

    def entries(self) -> Iterator[tuple[str, torch.dtype, Shape]]:
        """Iterate over the names, dtypes and shapes of the tensors without reading them."""
        for source in self.sources:
            yield source.name, source.dtype, source.shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the assembled tensors by name.

        `model/<name>` is the fp32 master weight, or a frozen parameter or buffer in its dtype.
        `optimizer/<name>/<state>` is an fp32 optimizer state.
        """
        for source in self.sources:
            yield source.name, source.assemble()


def read_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> DeepSpeedCheckpoint:
    """Open the checkpoint `tag` of a folder that DeepSpeed saved to, by default its latest."""
    where = _find(local_path(folder, "a checkpoint of DeepSpeed"), tag)
    try:
        return _build(where, _open(where))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not in DeepSpeed's format: {error!r}") from error


def _build(folder: Path, files: _Files) -> DeepSpeedCheckpoint:
    owned = [(index, owners) for index in range(len(files.shapes)) for owners in files.owners(index)]
    trained = [_read_trained(files, index, owners) for index, owners in owned]
    untrained, aliases = _read_untrained(files)
    weights = {name: source for masters, _ in trained for name, source in masters.items()} | untrained
    for name, value in files.experts.items():
        if name not in weights:  # a frozen parameter or a buffer
            weights[name] = PartitionedTensor(f"model/{name}", value.dtype, tuple(value.shape), [value])
    states = [source for _, of_flat in trained for source in of_flat]
    group_of = {index: number for number, group in enumerate(files.groups) for index in group["params"]}
    groups = {
        name: group_of[index] for (index, _), (masters, _) in zip(owned, trained, strict=True) for name in masters
    }
    if files.experts:
        check_weights(folder, files.experts, ((name, weights[name].assemble) for name in groups))
    in_order = [name for name in dict.fromkeys([*files.module, *weights]) if name in weights]
    return DeepSpeedCheckpoint(
        folder=folder,
        stage=files.stage,
        world_size=files.world_size,
        aliases=aliases,
        parameters={name: groups.get(name) for name in in_order if name not in files.buffers},
        state=_read_state(files),
        sources=[*(weights[name] for name in in_order), *states],
    )


def _find(folder: Path, tag: str | None) -> Path:
    """Return the folder of one checkpoint, which is `folder` itself if it contains the files."""
    if tag is None:
        if any(OPTIMIZER_FILE.fullmatch(file.name) for file in folder.iterdir()):
            return folder
        if not (folder / "latest").is_file():
            universal = (folder / "latest_universal").is_file()
            raise ValueError(f"{folder}: {UNIVERSAL if universal else 'the file `latest` names no checkpoint'}")
        tag = read_small(folder / "latest", MAX_TAG_BYTES).decode().strip()
    if tag in ("", "..") or Path(tag).name != tag or not (folder / tag).is_dir():
        raise ValueError(f"{folder}: no checkpoint {tag!r}")
    return folder / tag


@dataclass(frozen=True)
class _Files:
    """The loaded files of a checkpoint."""

    stage: int
    model_files: Sequence[Path]
    """The model files by rank."""
    optimizer_files: Sequence[Path]
    """The optimizer files by rank."""
    model: dict[str, Any]
    """The content of rank 0's model file."""
    optimizers: Sequence[dict[str, Any]]
    """The optimizer state dicts by rank."""

    @property
    def sliced(self) -> bool:
        return SLICED[self.stage]

    @property
    def world_size(self) -> int:
        return len(self.optimizers)

    @property
    def module(self) -> dict[str, Any]:
        return self.model["module"]  # type: ignore[no-any-return]

    @cached_property
    def buffers(self) -> set[str]:
        return set(self.model["buffer_names"])

    @cached_property
    def shapes(self) -> list[dict[str, Shape]]:
        """The shapes of the parameters in each flat vector."""
        return [_shapes(group) for group in self.model["param_shapes"]]

    @cached_property
    def bases(self) -> list[Any]:
        """The state of torch's optimizer by rank: a state_dict, or a list of states with `elastic_checkpoint`."""
        key = "optimizer_state_dict" if self.sliced else "base_optimizer_state"
        return [optimizer[key] for optimizer in self.optimizers]

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of torch's optimizer, with the flat vectors in each."""
        if isinstance(self.bases[0], list):  # hyperparameters were not saved
            return [{"params": [index]} for index in range(len(self.shapes))]
        return list(self.bases[0]["param_groups"])

    @cached_property
    def experts(self) -> dict[str, torch.Tensor]:
        """The weights in the files of experts, by their names among all experts."""
        return read_expert_files(self.model_files[0].parent, self.model.get("num_experts") or (), _read_dict)

    @cached_property
    def num_experts(self) -> dict[str, int]:
        """The number of experts in each list of experts."""
        return count_experts(self.experts)

    def owners(self, index: int) -> list[Owners]:
        """Return the ranks that partition one flat vector: once, or for each part of the experts."""
        counts, config = self.optimizers[0]["partition_count"], self.model.get("ds_config")
        if not self.model.get("num_experts") or not isinstance(counts, list):
            return [Owners(range(self.world_size))]
        return owners_of(counts[index], self.world_size, config if isinstance(config, dict) else {})

    def states(self, rank: int, index: int) -> dict[str, Any]:
        """Return the optimizer states of one flat vector, which are empty before the first step."""
        base = self.bases[rank]
        found = base[index] if isinstance(base, list) else base["state"].get(index, {})
        return {name: value for name, value in found.items() if value is not None}


def _open(folder: Path) -> _Files:
    model_files, optimizer_files = _classify(folder)
    if not optimizer_files and (folder / NAME).is_file():
        raise ValueError(f"{folder} is already a checkpoint of onefold. Load it with engine.load_checkpoint.")
    if not optimizer_files:
        raise ValueError(f"{folder}: not a checkpoint of ZeRO stage 1, 2 or 3, because it has no *_optim_states.pt")
    first = optimizer_files[min(optimizer_files)]
    optimizer = _read_dict(first)["optimizer_state_dict"]
    stage, world_size = _stage(optimizer, first), _world_size(optimizer, first)
    _check_ranks(folder, "optim_states", optimizer_files, world_size)
    _check_ranks(folder, "model_states", model_files, world_size if SLICED[stage] else 1)
    model = _read_dict(model_files[0])
    degrees = [model.get("mp_world_size", 1), *model.get("checkpoint_parallel_dimensions", {}).values()]
    if any(degree != 1 for degree in degrees):
        raise ValueError(f"{model_files[0]}: tensor and pipeline parallelism are not supported, only data parallelism")
    if model.get("param_shapes") is None:
        raise ValueError(
            f"{model_files[0]}: has no param_shapes, which name the parameters of the flat vectors. Some versions of "
            "DeepSpeed leave them out for models with experts. Load the checkpoint in DeepSpeed 0.19.8 or newer, and "
            "save it again."
        )
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise ValueError(f"{model_files[0]}: experts (MoE) of AutoEP are not supported, only those of the layer MoE")
    others = [_read_dict(optimizer_files[rank])["optimizer_state_dict"] for rank in range(1, world_size)]
    by_rank = [[files[rank] for rank in sorted(files)] for files in (model_files, optimizer_files)]
    return _Files(stage, by_rank[0], by_rank[1], model, [optimizer, *others])


def _classify(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return the model files and the optimizer files by rank."""
    found: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    for file in sorted(folder.iterdir()):
        for pattern, why in NOT_READ.items():
            if re.fullmatch(pattern, file.name):
                raise ValueError(f"{file}: {why}")
        if EXPERT_OPTIMIZER_FILE.fullmatch(file.name) and _read_dict(file).get("optimizer") is not None:
            raise ValueError(f"{file}: experts (MoE) of stage 0 are not supported, only of stages 1 and 2")
        for kind, by_rank in zip((MODEL_FILE, OPTIMIZER_FILE), found, strict=True):
            if match := kind.fullmatch(file.name):
                rank = int(match[1] or 0)
                if int(match[2]) > 0:
                    raise ValueError(f"{file}: model parallelism is not supported, only data parallelism")
                if rank in by_rank:
                    raise ValueError(f"{folder}: files of two checkpoints: {by_rank[rank].name} and {file.name}")
                by_rank[rank] = file
    return found


def _check_ranks(folder: Path, what: str, files: dict[int, Path], count: int) -> None:
    missing, more = sorted(set(range(count)) - set(files)), sorted(set(files) - set(range(count)))
    for ranks, why in ((missing, "are missing"), (more, "belong to another run")):
        if ranks:
            these = ", ".join(map(str, ranks))
            raise ValueError(f"{folder}: expected {count} *_{what}.pt, but those of ranks {these} {why}")


def _read_dict(file: Path) -> dict[str, Any]:
    if not isinstance(found := read_torch_file(file), dict):
        raise ValueError(f"{file}: not a file of a DeepSpeed checkpoint")
    return found


def _stage(optimizer: dict[str, Any], file: Path) -> int:
    stage = optimizer.get("zero_stage", 1)  # DeepSpeed's BF16_Optimizer is stage 1, but does not store it
    if isinstance(stage, StandIn):
        (value,) = stage.args
        stage = STAGES.get(value, value)
    if stage not in SLICED:
        raise ValueError(f"{file}: ZeRO stage {stage!r} is not supported, only 1, 2 and 3")
    return int(stage)


def _world_size(optimizer: dict[str, Any], file: Path) -> int:
    counts = optimizer.get("partition_count")
    counts = counts if isinstance(counts, list) and counts else [counts]
    if not all(type(count) is int and 0 < count < 2**20 for count in counts):
        raise ValueError(f"{file}: partition_count is {counts}, not a number of ranks")
    return int(max(counts))  # experts are sharded over fewer ranks


def _shapes(found: dict[str, Any]) -> dict[str, Shape]:
    for name, shape in found.items():
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} must have a shape, not {shape!r}")
    return {name: tuple(shape) for name, shape in found.items()}


def _read_trained(
    files: _Files, index: int, owners: Owners
) -> tuple[dict[str, PartitionedTensor], list[PartitionedTensor]]:
    """Return the parameters of one flat vector, or of one part of its experts, and their optimizer states."""
    sliced, shapes, ranks = files.sliced, files.shapes[index], owners.ranks
    gaps = None if sliced else files.optimizers[0].get("param_alignment_paddings")  # a setting of newer versions
    starts, end = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps[index] if gaps else [0] * len(shapes), strict=True):
        starts[name] = end
        end += -(-math.prod(shape) // len(ranks)) if sliced else math.prod(shape) + gap

    key = "fp32_flat_groups" if sliced else "single_partition_of_fp32_groups"
    masters = [files.optimizers[rank][key][index] for rank in ranks]
    sizes = {rank: master.numel() for rank, master in zip(ranks, masters, strict=True)}
    # If padding was written, the partitions of all ranks have the same size.
    fits = set(sizes.values()) == {end} if sliced else 0 <= sum(sizes.values()) - end < 2 * len(ranks)
    if not fits or {len(optimizer[key]) for optimizer in files.optimizers} != {len(files.shapes)}:
        shown = list(sizes.values())
        raise ValueError(f"{files.optimizer_files[0]}: ranks have {shown} master elements, parameters {end}")
    names = {name: None for rank in ranks for name in files.states(rank, index) if name != "step"}
    states = {name: _read_states(files, index, name, sizes) for name in names}
    renamed = owners.rename(shapes, files.num_experts)

    def source(kind: str, name: str, partitions: Sequence[torch.Tensor], state: str = "") -> PartitionedTensor:
        where = f"{kind}/{renamed.get(name, name)}{state}"
        return PartitionedTensor(where, torch.float32, shapes[name], partitions, starts[name], sliced)

    weights = {renamed.get(name, name): source("model", name, masters) for name in shapes}
    return weights, [source("optimizer", n, found, f"/{state}") for n in shapes for state, found in states.items()]


def _read_states(files: _Files, index: int, name: str, sizes: Mapping[int, int]) -> list[torch.Tensor]:
    found = []
    for rank, size in sizes.items():
        state = files.states(rank, index).get(name)
        padding = 0 if files.sliced else files.optimizers[rank]["group_paddings"][index]
        if not isinstance(state, torch.Tensor) or tuple(state.shape) not in {(size,), (size + padding,)}:
            what = f"optimizer state {name!r} does not have one number for each of {size} elements"
            raise ValueError(f"{files.optimizer_files[rank]}: {what}")
        found.append(state)
    return found


def _read_untrained(files: _Files) -> tuple[dict[str, PartitionedTensor], dict[str, str]]:
    """Return the frozen parameters and buffers, and the aliases of all tied parameters."""
    frozen = _shapes(files.model.get("frozen_param_shapes") or {})
    trained = {name for shapes in files.shapes for name in shapes}
    stored = {*files.module, *trained, *frozen}
    tied = (files.model.get("shared_params") or {}).items()
    aliases = {alias: name for alias, name in tied if alias not in trained and alias not in frozen and name in stored}
    models = [files.model, *(_read_dict(file) for file in files.model_files[1:])] if frozen else []
    found = {}
    for name in dict.fromkeys([*files.module, *frozen]):
        if name in trained or name in aliases or name in files.experts:
            continue
        whole, fragments = files.module.get(name), [model["frozen_param_fragments"].get(name) for model in models]
        sliced = files.sliced and name in frozen
        parts = fragments if sliced or whole is None else [whole]
        if name.endswith("_extra_state") or not all(isinstance(part, torch.Tensor) for part in parts):
            raise ValueError(f"{files.model_files[0]}: {name!r} is an extra state of a module, which is not supported")
        shape, dtype = frozen.get(name, tuple(parts[0].shape)), parts[0].dtype
        lost = files.sliced and not sliced and name not in files.buffers and parts[0].numel() == 0
        share = -(-math.prod(shape) // len(parts))
        if lost or any(part.numel() != share for part in parts):
            raise ValueError(f"{files.model_files[0]}: {name!r} is incomplete")
        if whole is not None and whole.dtype is not dtype:
            raise ValueError(f"{files.model_files[0]}: {name!r} is quantized ({dtype}), which is not supported")
        found[name] = PartitionedTensor(f"model/{name}", dtype, shape, parts, 0, sliced)
    return found, aliases


def _read_state(files: _Files) -> dict[str, Any]:
    model, config = files.model, files.model.get("ds_config")
    config = config if isinstance(config, dict) else {}  # DeepSpeed stores a path if it was given one
    optimizer = config.get("optimizer")
    counters = {key: int(model[key]) for key in ("global_steps", "global_samples", "skipped_steps")}
    # DeepSpeed does not save this counter. A checkpoint is assumed to be at the end of a step.
    counters["micro_steps"] = counters["global_steps"] * _accumulation_steps(config, files.world_size)
    groups = [{key: value for key, value in group.items() if key not in ("params", "step")} for group in files.groups]
    return {
        "optimizer": {
            "name": optimizer.get("type") if isinstance(optimizer, dict) else None,
            "num_steps": _num_steps(files, counters["global_steps"] - counters["skipped_steps"]),
            "groups": groups,
        },
        "lr_scheduler": model.get("lr_scheduler"),
        "loss_scale": _loss_scale(files.optimizers[0].get("loss_scaler")),
        "counters": counters,
        "client_state": {key: value for key, value in model.items() if key not in OWN_KEYS},
    }


def _accumulation_steps(config: dict[str, Any], world_size: int) -> int:
    if isinstance(given := config.get("gradient_accumulation_steps"), int):
        return given
    whole, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    return whole // (micro * world_size) if isinstance(whole, int) and isinstance(micro, int) else 1


def _num_steps(files: _Files, otherwise: int) -> int:
    """Return the number of steps that the optimizer counted, or `otherwise` if it does not count them (SGD)."""
    all_states = [files.states(rank, index) for rank in range(files.world_size) for index in range(len(files.shapes))]
    steps = {int(states["step"]) for states in all_states if "step" in states}
    if len(steps) > 1:
        raise ValueError(f"{files.optimizer_files[0].parent}: the files belong to different steps: {sorted(steps)}")
    # Older versions of DeepSpeed count steps in the groups. Newer ones store 0 there.
    counts = [group["step"] for group in files.groups if "step" in group]
    otherwise = files.optimizers[0].get("base_optimizer_state_step", otherwise)
    return int(max(steps or counts, default=otherwise))


def _loss_scale(scaler: Any) -> dict[str, Any] | None:
    """Convert the state of a loss scaler to the form of onefold's loss scales."""
    if not isinstance(scaler, StandIn) or not isinstance(scaler.state, dict):
        return None
    found = {"value": float(scaler.state["cur_scale"])}
    if scaler.name.endswith(".DynamicLossScaler"):
        found["remaining_hysteresis"] = scaler.state["cur_hysteresis"]
        found["iteration"] = scaler.state["cur_iter"]
        found["last_overflow_iteration"] = scaler.state["last_overflow_iter"]
    return found
