"""Export of unsharded weights from a checkpoint on disk, one tensor at a time.

The export needs no process group and no GPU, and never holds the whole model in memory. Checksums verify all bytes
read. The files are published together, so that a failed export leaves an earlier one unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from onefold.checkpoint.format import folder as folders
from onefold.checkpoint.format.files import CheckpointError, RemovedError
from onefold.checkpoint.format.manifest import NAME
from onefold.checkpoint.format.safetensors_files import ExportFiles, SafetensorsWriter
from onefold.checkpoint.format.shard_files import TRIES, CheckpointReader
from onefold.log import logger, parse_size
from onefold.storage.place import Place, PlaceLike, local_path, place

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("safetensors", "bin", "dcp")
BIN = "pytorch_model.bin"
SHARD_SIZE = "5GB"

_UNCUT = 1 << 62
_MAX_NAMED = 5

Progress = Callable[[str, int, int], None]
"""A function that is called after each tensor with its name, the bytes read so far and the total bytes."""
ReadTensor = Callable[[str], torch.Tensor]
T = TypeVar("T")


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the requested path."""


class ExportError(ValueError):
    """The requested export is not possible. The message gives the reason."""


@dataclass(frozen=True)
class Exported:
    """The result of an export: its checkpoint and the written files."""

    checkpoint: Place
    files: tuple[Path, ...]
    num_tensors: int
    nbytes: int


# -- selection of the checkpoint -------------------------------------------------------------------------------------


def find_checkpoint(path: PlaceLike, tag: str | None = None) -> folders.FoundCheckpoint:
    """Find the requested checkpoint, complete or not.

    `path` is the folder of a tag, or a folder of tags. In the latter, find `tag`, by default the one that `latest`
    names, or the newest. Unlike resuming, an export does not fall back to an older checkpoint if this one is damaged,
    because that would export older weights silently. If a job removes the checkpoint that `latest` names, `latest` is
    read again.
    """
    folder = place(path)
    if not folder.is_dir():
        raise NoCheckpointError(f"{folder}: no such folder")
    if tag is None and folders.is_tag_folder(folder):
        return folders.examine(folder)
    for _ in range(TRIES):
        found = _find_once(folder, tag)
        is_latest = folders.latest_of(folder)[0] in (None, found.tag)
        if tag is not None or not found.problems or (is_latest and not found.removed):
            break
    return found


def _find_once(folder: Place, tag: str | None) -> folders.FoundCheckpoint:
    try:
        candidates, warnings = folders.choose(folder, tag)
    except ValueError as error:  # an invalid tag
        raise CheckpointError(str(error)) from None
    for warning in warnings:
        logger.warning("%s", warning)
    if candidates:
        return candidates[0]
    if any(map(folders.is_dcp, [folder, *folder.iterdir()])):
        what = "a checkpoint of torch.distributed.checkpoint"
        raise CheckpointError(f"{folder} contains {what}. Run onefold import-dcp {folder} OUT.")
    if any(folders.is_deepspeeds(entry) for entry in folder.iterdir() if entry.is_dir()):
        raise CheckpointError(f"{folder} contains checkpoints of DeepSpeed. Run onefold import-deepspeed {folder} OUT.")
    raise NoCheckpointError(f"{folder} contains no checkpoint")


def read_one(path: PlaceLike, tag: str | None, work: Callable[[CheckpointReader], T]) -> T:
    """Open the requested checkpoint (see `find_checkpoint`) and call `work`, or raise its problems.

    If a job removes the checkpoint in the meantime, try the next one, unless it was requested by name. If a job
    replaces it, start again with the new one.
    """
    named = tag is not None or folders.is_tag_folder(place(path))
    for left in reversed(range(TRIES)):
        found = find_checkpoint(path, tag)
        listed = folders.list_tags(found.folder.parent) if found.problems else []
        others = [other.tag for other in listed if not other.problems]
        hint = f". Complete checkpoints, to request by tag: {', '.join(others)}" if others else ""
        try:
            with CheckpointReader.of(found, hint) as checkpoint:
                return work(checkpoint)
        except RemovedError:
            folder = place(path) if tag is None else place(path) / tag
            if not left or (named and not (folder / NAME).exists()):
                raise
    raise AssertionError


# -- selection of the tensors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightSelection:
    """The weights of a checkpoint to export: names and dtypes in the model order, and aliases of tied weights."""

    checkpoint: CheckpointReader
    dtypes: dict[str, torch.dtype]
    aliases: dict[str, str]

    @staticmethod
    def of(checkpoint: CheckpointReader, dtype: torch.dtype, *, exclude_frozen: bool) -> WeightSelection:
        groups = checkpoint.manifest.parameters
        stored = dict.fromkeys(checkpoint.names("model/"))
        # The tensors are in the order of the ranks. `parameters` is in the order of the model.
        names = [*(name for name in groups if name in stored), *(name for name in stored if name not in groups)]
        dtypes = {}
        for name in names:
            if not (exclude_frozen and name in groups and groups[name] is None):
                own = checkpoint.stored(f"model/{name}").dtype
                dtypes[name] = dtype if own.is_floating_point else own
        aliases = {alias: name for alias, name in checkpoint.manifest.aliases.items() if name in dtypes}
        return WeightSelection(checkpoint, dtypes, aliases)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.stored(f"model/{name}").shape

    def nbytes(self, name: str) -> int:
        return self.checkpoint.stored(f"model/{name}").numel * self.dtypes[name].itemsize

    def read(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(f"model/{name}", self.dtypes[name])

    def is_beyond(self, name: str, cast: torch.Tensor) -> bool:
        """Return whether the cast made finite values infinite. The original is read again only if needed."""
        stored = self.checkpoint.stored(f"model/{name}").dtype
        if not stored.is_floating_point or torch.finfo(stored).max <= torch.finfo(cast.dtype).max:
            return False
        infinite = cast.isinf()
        return bool(infinite.any()) and not torch.equal(infinite, self.checkpoint.tensor(f"model/{name}").isinf())


def export(
    path: PlaceLike,
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str = "fp32",
    file_format: str = "safetensors",
    max_shard_size: int | str | None = SHARD_SIZE,
    exclude_frozen: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the weights of a checkpoint to the folder `out`, with files split and named as Hugging Face does.

    `path` is the folder of a checkpoint, or a folder of checkpoints, from which `tag` or the latest is exported.
    Floating-point tensors are cast to `dtype` (fp32, bf16 or fp16); others keep their dtype. The `file_format`
    "safetensors" needs memory for one tensor. "bin" uses torch.save, for `torch.load(weights_only=True)`, and needs
    memory for one file of `max_shard_size`. "dcp" writes a folder of torch.distributed.checkpoint with the weights and
    the optimizer states, as FSDP2 users save them.
    """
    for given, known, what in ((dtype, (*DTYPES,), "dtype"), (file_format, FORMATS, "file_format")):
        if given not in known:
            raise ExportError(f"{what} must be one of {', '.join(known)}, not {given!r}")
    try:
        limit = _UNCUT if max_shard_size is None else parse_size(max_shard_size)
    except ValueError as error:
        raise ExportError(f"max_shard_size: {error}") from None
    folder = local_path(out, "the folder of an export")
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder} is a file. Give a folder, to which several files may be written.")
    if file_format == "dcp":
        folder = folder.resolve()  # of a path such as NEW/.., whose parts may not exist
        if max_shard_size not in (None, SHARD_SIZE):
            raise ExportError("max_shard_size: the format dcp has one file. Leave it out.")

    def work(checkpoint: CheckpointReader) -> Exported:
        source = checkpoint.folder
        if isinstance(source, Path) and folder.resolve().is_relative_to(source.resolve()):
            raise ExportError(f"{folder} is inside the checkpoint {checkpoint.folder}. Choose a folder outside it.")
        weights = WeightSelection.of(checkpoint, DTYPES[dtype], exclude_frozen=exclude_frozen)
        if not weights.dtypes:
            raise ExportError(f"{checkpoint.folder}: every weight is frozen. Leave out exclude_frozen.")
        if checkpoint.manifest.left_out and not exclude_frozen:
            logger.warning(
                "%s was saved without its frozen parameters, so the export does not contain them: %s",
                checkpoint.folder,
                spell_names(checkpoint.manifest.left_out),
            )
        sizes = {name: checkpoint.stored(f"model/{name}").nbytes for name in weights.dtypes}
        beyond: list[str] = []
        done, total = 0, sum(sizes.values())

        def read(name: str) -> torch.Tensor:
            nonlocal done
            tensor = weights.read(name)
            if weights.is_beyond(name, tensor):
                beyond.append(name)
            done += sizes[name]
            if progress is not None:
                progress(name, done, total)
            return tensor

        writers = {"safetensors": _write_safetensors, "bin": _write_bin, "dcp": _write_dcp}
        names = writers[file_format](folder, weights, limit, read)
        if beyond:
            logger.warning("values outside the range of %s became infinite in: %s", dtype, spell_names(beyond))
        nbytes = sum(weights.nbytes(name) for name in weights.dtypes)
        return Exported(checkpoint.folder, tuple(folder / name for name in names), len(weights.dtypes), nbytes)

    return read_one(path, tag, work)


def spell_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _write_safetensors(folder: Path, weights: WeightSelection, limit: int, read: ReadTensor) -> list[str]:
    entries = [(name, dtype, weights.shape(name)) for name, dtype in weights.dtypes.items()]
    try:
        writer = SafetensorsWriter(folder, entries, max_shard_size=limit, aliases=weights.aliases)
    except ValueError as error:
        raise ExportError(f"{folder}: {error}. Use the format 'bin'.") from error
    with writer:
        for name in weights.dtypes:
            writer.write(name, read(name))
    return writer.file_names


def _write_bin(folder: Path, weights: WeightSelection, limit: int, read: ReadTensor) -> list[str]:
    """Write files with torch.save, split and named as Hugging Face does. Tied names share a tensor in one file."""
    sizes = {name: weights.nbytes(name) for name in weights.dtypes}
    weight_map: dict[str, str] = {}
    with ExportFiles(folder, BIN, sizes, limit) as files:
        for file_name, inside in files.shards.items():
            tensors = {name: read(name) for name in inside}
            tensors |= {alias: tensors[name] for alias, name in weights.aliases.items() if name in tensors}
            weight_map |= dict.fromkeys(tensors, file_name)
            torch.save(tensors, files.path(file_name))
            del tensors
        files.write_index(weight_map)
    if any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        logger.warning("%s also contains model.safetensors, which Hugging Face loads instead of %s", folder, BIN)
    return files.names


def _write_dcp(folder: Path, weights: WeightSelection, _: int, read: ReadTensor) -> list[str]:
    from onefold.checkpoint.dcp.dcp_writer import PARTIAL, write_dcp  # loads torch.distributed.checkpoint

    checkpoint = weights.checkpoint
    if folder.exists() and any(not entry.name.endswith(PARTIAL) for entry in folder.iterdir()):
        raise ExportError(f"{folder} is not empty, and dcp.load would read its other files. Give a new folder.")
    loose = [checkpoint.loose(rank) for rank in range(checkpoint.manifest.world_size)]
    keys = {key for states in loose for found in states.values() for key in found} - {"step"}
    if keys:
        states = f"the states of {checkpoint.state['optimizer']['name']} ({', '.join(sorted(keys))})"
        raise ExportError(
            f"{checkpoint.folder}: {states} do not have the shapes of their parameters, which the format dcp does not "
            "support. Export the weights in the format safetensors or bin."
        )
    named = {name: (name, dtype) for name, dtype in weights.dtypes.items()}
    named |= {alias: (name, weights.dtypes[name]) for alias, name in weights.aliases.items()}
    return write_dcp(folder, checkpoint, named, read)
