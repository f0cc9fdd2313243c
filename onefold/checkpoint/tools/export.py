"""Tools for checkpoints on disk. Here: the export of whole weights, one tensor at a time.

No process group, no GPU, and never the whole model in memory. Every byte is checked while it is read, and files appear
under their names when all of them are written: an export that fails leaves what was there before.
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("safetensors", "bin")
BIN = "pytorch_model.bin"

_UNCUT = 1 << 62
_MAX_NAMED = 5

Progress = Callable[[str, int, int], None]
"""Told after each tensor: its name, the bytes read so far, the bytes there are to read."""
ReadTensor = Callable[[str], torch.Tensor]
T = TypeVar("T")


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class ExportError(ValueError):
    """What was asked for cannot be done; the message says why."""


@dataclass(frozen=True)
class Exported:
    """What an export has written, and from where."""

    checkpoint: Path
    files: tuple[Path, ...]
    num_tensors: int
    nbytes: int


# -- which checkpoint ------------------------------------------------------------------------------------------------


def find_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> folders.FoundCheckpoint:
    """Find the checkpoint that is meant, complete or not: a tag's folder, or of a folder `tag`, `latest`, the newest.

    Never another one in its place: resuming may take an older checkpoint where the latest is damaged, but nobody wants
    older weights exported without being asked. Where a job removes what `latest` named, `latest` is read again.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise NoCheckpointError(f"{folder}: there is no such folder")
    if tag is None and folders.is_tag_folder(folder):
        return folders.examine(folder)
    for _ in range(TRIES):
        found = _find_once(folder, tag)
        is_latest = folders.latest_of(folder)[0] in (None, found.tag)
        if tag is not None or not found.problems or (is_latest and not found.removed):
            break
    return found


def _find_once(folder: Path, tag: str | None) -> folders.FoundCheckpoint:
    try:
        candidates, warnings = folders.choose(folder, tag)
    except ValueError as error:  # of a tag that cannot be one
        raise CheckpointError(str(error)) from None
    for warning in warnings:
        logger.warning("%s", warning)
    if candidates:
        return candidates[0]
    if any(folders.is_deepspeeds(entry) for entry in folder.iterdir() if entry.is_dir()):
        raise CheckpointError(f"{folder}: its checkpoints are DeepSpeed's: onefold import-deepspeed {folder} OUT")
    raise NoCheckpointError(f"{folder}: holds no checkpoint")


def read_one(path: str | os.PathLike[str], tag: str | None, work: Callable[[CheckpointReader], T]) -> T:
    """Open the checkpoint that is meant (see `find_checkpoint`) and work on it, or raise what is wrong with it.

    Where a job removes it meanwhile, on the next that is meant, unless one was named; where the job saves to that tag
    again, on what is there then.
    """
    named = tag is not None or folders.is_tag_folder(Path(path))
    for left in reversed(range(TRIES)):
        found = find_checkpoint(path, tag)
        beside = folders.list_tags(found.folder.parent) if found.problems else []
        others = [other.tag for other in beside if not other.problems]
        hint = f"; complete ones, to be asked for by their tag: {', '.join(others)}" if others else ""
        try:
            with CheckpointReader.of(found, hint) as checkpoint:
                return work(checkpoint)
        except RemovedError:
            if not left or (named and not Path(path, tag or "", NAME).exists()):
                raise
    raise AssertionError


# -- which tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightSelection:
    """The weights of a checkpoint to export: names and dtypes in the model's order, and the names of what is tied."""

    checkpoint: CheckpointReader
    dtypes: dict[str, torch.dtype]
    aliases: dict[str, str]

    @staticmethod
    def of(checkpoint: CheckpointReader, dtype: torch.dtype, *, exclude_frozen: bool) -> WeightSelection:
        groups = checkpoint.manifest.parameters
        stored = dict.fromkeys(checkpoint.names("model/"))
        # Ranks wrote what they hold; `parameters` has the order in which the model has them.
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
        """Whether finite values became infinite. The original is read again only where something is infinite."""
        stored = self.checkpoint.stored(f"model/{name}").dtype
        if not stored.is_floating_point or torch.finfo(stored).max <= torch.finfo(cast.dtype).max:
            return False
        infinite = cast.isinf()
        return bool(infinite.any()) and not torch.equal(infinite, self.checkpoint.tensor(f"model/{name}").isinf())


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str = "fp32",
    file_format: str = "safetensors",
    max_shard_size: int | str | None = "5GB",
    exclude_frozen: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the weights of a checkpoint to the folder `out`, as Hugging Face names and cuts files.

    `path`: a folder of checkpoints (then `tag`, or what `latest` names) or that of one. `dtype`: fp32, bf16 or fp16,
    for floating-point tensors; others keep theirs. `file_format`: "safetensors" holds one tensor in memory at a time;
    "bin" is torch.save's, for `torch.load(weights_only=True)`, and holds one file of `max_shard_size` at a time.
    """
    for given, known, what in ((dtype, (*DTYPES,), "dtype"), (file_format, FORMATS, "file_format")):
        if given not in known:
            raise ExportError(f"{what} is one of {', '.join(known)}, not {given!r}")
    try:
        limit = _UNCUT if max_shard_size is None else parse_size(max_shard_size)
    except ValueError as error:
        raise ExportError(f"max_shard_size: {error}") from None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder} is a file; weights are written to a folder, which may hold several files")

    def work(checkpoint: CheckpointReader) -> Exported:
        if folder.resolve().is_relative_to(checkpoint.folder.resolve()):
            raise ExportError(f"{folder} is inside the checkpoint {checkpoint.folder}: choose a folder outside it")
        weights = WeightSelection.of(checkpoint, DTYPES[dtype], exclude_frozen=exclude_frozen)
        if not weights.dtypes:
            raise ExportError(f"{checkpoint.folder}: nothing is left to export: every weight is frozen")
        if checkpoint.manifest.left_out and not exclude_frozen:
            logger.warning(
                "%s was saved without its frozen parameters, so the export lacks them too: %s",
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

        write = _write_safetensors if file_format == "safetensors" else _write_bin
        names = write(folder, weights, limit, read)
        if beyond:
            logger.warning("finite values beyond what %s can hold became infinite in: %s", dtype, spell_names(beyond))
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
        raise ExportError(f"{folder}: {error}; the format 'bin' can hold it") from error
    with writer:
        for name in weights.dtypes:
            writer.write(name, read(name))
    return writer.file_names


def _write_bin(folder: Path, weights: WeightSelection, limit: int, read: ReadTensor) -> list[str]:
    """Write files of torch.save, cut and named as Hugging Face does. Tied names share a tensor, in one file."""
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
        logger.warning("%s also holds model.safetensors, which Hugging Face loads rather than %s", folder, BIN)
    return files.names
