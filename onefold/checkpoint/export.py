"""Whole weights out of a checkpoint, one tensor at a time; also under the names of DeepSpeed's zero_to_fp32.

No process group, no GPU, and never the whole model in memory. Every byte is checked while it is read, and files appear
under their names when all of them are written: an export that fails leaves what was there before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from onefold.checkpoint.folder import (
    Found,
    choose,
    examine,
    is_deepspeeds,
    is_tag_folder,
    list_tags,
    read_latest,
    sync,
)
from onefold.checkpoint.manifest import NAME, CheckpointError, Manifest, RemovedError
from onefold.checkpoint.reader import TRIES, Checkpoint
from onefold.checkpoint.safetensors import Writer, parse_size
from onefold.log import logger

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("safetensors", "bin")
BIN = "pytorch_model.bin"
BIN_INDEX = BIN + ".index.json"

_OURS = re.compile(r"pytorch_model(-\d{5,}-of-\d{5,})?\.bin|pytorch_model\.bin\.index\.json")
_UNCUT = 1 << 62
_MAX_NAMED = 5

Progress = Callable[[str, int, int], None]
"""Told after each tensor: its name, the bytes read so far, the bytes there are to read."""
Model = TypeVar("Model", bound=nn.Module)
T = TypeVar("T")


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


def find_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> Found:
    """The one that is meant, sound or not: a tag's folder, or in a folder of tags `tag`, or `latest`, or the newest.

    Never another one in its place: resuming may take an older checkpoint where the latest is damaged, but nobody wants
    older weights exported without being asked. Where a job removes what `latest` named, `latest` is read again.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if tag is None and is_tag_folder(folder):
        return examine(folder)
    for _ in range(TRIES):
        found = _find_once(folder, tag)
        if tag is not None or not found.problems or (not found.removed and _latest(folder) in (None, found.tag)):
            break
    return found


def _latest(folder: Path) -> str | None:
    try:
        return read_latest(folder)
    except CheckpointError:
        return None


def _find_once(folder: Path, tag: str | None) -> Found:
    try:
        candidates, warnings = choose(folder, tag)
    except ValueError as error:  # of a tag that cannot be one
        raise CheckpointError(str(error)) from None
    for warning in warnings:
        logger.warning("%s", warning)
    if candidates:
        return candidates[0]
    if any(is_deepspeeds(entry) for entry in folder.iterdir() if entry.is_dir()):
        raise CheckpointError(f"{folder}: its checkpoints are DeepSpeed's: onefold import-deepspeed {folder} OUT")
    raise CheckpointError(f"{folder}: holds no checkpoint")


def open_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> Checkpoint:
    """The one that is meant, or an error: see `find_checkpoint`."""
    found = find_checkpoint(path, tag)
    others = [other.tag for other in list_tags(found.folder.parent) if not other.problems] if found.problems else []
    hint = f"; complete ones, to be asked for by their tag: {', '.join(others)}" if others else ""
    return Checkpoint.of(found, hint)


def _read_one(path: str | os.PathLike[str], tag: str | None, work: Callable[[Checkpoint], T]) -> T:
    """Work on the one that is meant. Where a job removes it meanwhile, on the next that is meant, unless one was named;
    where it saves to that tag again, on what is there then.
    """
    named = tag is not None or is_tag_folder(Path(path))
    for left in reversed(range(TRIES)):
        try:
            with open_checkpoint(path, tag) as checkpoint:
                return work(checkpoint)
        except RemovedError:
            if not left or (named and not Path(path, tag or "", NAME).exists()):
                raise
    raise AssertionError


# -- which tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """What is exported of a checkpoint: names and dtypes in the model's order, and the other names of what is tied."""

    checkpoint: Checkpoint
    dtypes: dict[str, torch.dtype]
    aliases: dict[str, str]

    @staticmethod
    def of(checkpoint: Checkpoint, dtype: torch.dtype, *, exclude_frozen: bool) -> _Choice:
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
        return _Choice(checkpoint, dtypes, aliases)

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


class _Reading:
    """Reads tensors one after another, tells how far it is, and keeps the names of those that the dtype cannot hold."""

    def __init__(self, choice: _Choice, progress: Progress | None) -> None:
        self.beyond: list[str] = []
        self._choice, self._progress = choice, progress
        self._sizes = {name: choice.checkpoint.stored(f"model/{name}").nbytes for name in choice.dtypes}
        self._total, self._done = sum(self._sizes.values()), 0

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self._choice.read(name)
        if self._choice.is_beyond(name, tensor):
            self.beyond.append(name)
        self._done += self._sizes[name]
        if self._progress is not None:
            self._progress(name, self._done, self._total)
        return tensor


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

    def work(checkpoint: Checkpoint) -> Exported:
        if folder.resolve().is_relative_to(checkpoint.folder.resolve()):
            raise ExportError(f"{folder} is inside the checkpoint {checkpoint.folder}: choose a folder outside it")
        choice = _Choice.of(checkpoint, DTYPES[dtype], exclude_frozen=exclude_frozen)
        if not choice.dtypes:
            raise ExportError(f"{checkpoint.folder}: nothing is left to export: every weight is frozen")
        if checkpoint.manifest.left_out and not exclude_frozen:
            logger.warning(
                "%s was saved without its frozen parameters, so the export lacks them too: %s",
                checkpoint.folder,
                _spell(checkpoint.manifest.left_out),
            )
        read = _Reading(choice, progress)
        write = _write_safetensors if file_format == "safetensors" else _write_bin
        names = write(folder, choice, limit, read)
        if read.beyond:
            logger.warning("finite values beyond what %s can hold became infinite in: %s", dtype, _spell(read.beyond))
        nbytes = sum(choice.nbytes(name) for name in choice.dtypes)
        return Exported(checkpoint.folder, tuple(folder / name for name in names), len(choice.dtypes), nbytes)

    return _read_one(path, tag, work)


def _spell(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _write_safetensors(folder: Path, choice: _Choice, limit: int, read: _Reading) -> list[str]:
    entries = [(name, dtype, choice.shape(name)) for name, dtype in choice.dtypes.items()]
    try:
        writer = Writer(folder, entries, max_shard_size=limit, aliases=choice.aliases)
    except ValueError as error:
        raise ExportError(f"{folder}: {error}; the format 'bin' can hold it") from error
    with writer:
        for name in choice.dtypes:
            writer.write(name, read(name))
    return writer.file_names


def _write_bin(folder: Path, choice: _Choice, limit: int, read: _Reading) -> list[str]:
    """As Hugging Face cuts and names files of torch.save. Tied names share a tensor, in one file."""
    shards = list(_cut({name: choice.nbytes(name) for name in choice.dtypes}, limit))
    count = len(shards)
    names = [f"pytorch_model-{k + 1:05}-of-{count:05}.bin" for k in range(count)] if count > 1 else [BIN]
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f".{BIN}-*.partial"):  # of an export that was killed
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{BIN}-", suffix=".partial", dir=folder) as partial:
        weight_map: dict[str, str] = {}
        for file_name, inside in zip(names, shards, strict=True):
            tensors = {name: read(name) for name in inside}
            tensors |= {alias: tensors[name] for alias, name in choice.aliases.items() if name in tensors}
            weight_map |= dict.fromkeys(tensors, file_name)
            torch.save(tensors, Path(partial, file_name))
            sync(Path(partial, file_name))
            del tensors
        if count > 1:
            total = {"total_size": sum(choice.nbytes(name) for name in choice.dtypes)}
            index = {"metadata": total, "weight_map": weight_map}
            Path(partial, BIN_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            sync(Path(partial, BIN_INDEX))
            names.append(BIN_INDEX)
        _move_into_place(Path(partial), folder, names)
    if any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        logger.warning("%s also holds model.safetensors, which Hugging Face loads rather than %s", folder, BIN)
    return names


def _cut(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """A tensor that no longer fits begins the next file; a larger one has its own."""
    inside: list[str] = []
    filled = 0
    for name, nbytes in sizes.items():
        if inside and filled + nbytes > limit:
            yield inside
            inside, filled = [], 0
        inside.append(name)
        filled += nbytes
    yield inside


def _move_into_place(partial: Path, folder: Path, names: Sequence[str]) -> None:
    """All is flushed: rename it, the index last, and remove what is left of an earlier export."""
    # An old index over files that are half replaced would name a mixture. Without it, a crash here is loud.
    (folder / BIN_INDEX).unlink(missing_ok=True)
    sync(folder)
    for name in names:
        os.replace(partial / name, folder / name)
    sync(folder)
    for file in [entry for entry in folder.iterdir() if _OURS.fullmatch(entry.name) and entry.name not in names]:
        file.unlink()


# -- DeepSpeed's zero_to_fp32 ----------------------------------------------------------------------------------------


class LazyTensor:
    """A tensor that is still on disk; `contiguous` reads it. Tied names have the same one."""

    def __init__(self, folder: Path, manifest: Manifest, name: str, dtype: torch.dtype) -> None:
        self._folder, self._manifest, self._name = folder, manifest, name
        self.shape = torch.Size(manifest.tensors[name].shape)
        self.dtype = dtype

    def contiguous(self) -> torch.Tensor:
        with Checkpoint(self._folder, self._manifest) as checkpoint:
            return checkpoint.tensor(self._name, self.dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self._name.removeprefix('model/')!r}, {list(self.shape)}, {self.dtype})"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The weights of a checkpoint as a state dict of fp32 tensors in host memory, buffers and tied names included.

    With `lazy_mode` the values are still on disk: `value.contiguous()` reads that one, `.shape` and `.dtype` are known.
    """

    def work(checkpoint: Checkpoint) -> dict[str, Any]:
        choice = _Choice.of(checkpoint, torch.float32, exclude_frozen=exclude_frozen_parameters)
        found: dict[str, Any]
        if lazy_mode:
            found = {
                name: LazyTensor(checkpoint.folder, checkpoint.manifest, f"model/{name}", dtype)
                for name, dtype in choice.dtypes.items()
            }
        else:
            found = {name: choice.read(name) for name in choice.dtypes}
        return found | {alias: found[name] for alias, name in choice.aliases.items()}

    return _read_one(checkpoint_dir, tag, work)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in fp32: `pytorch_model.bin`, or safetensors; in several files where large."""
    export(
        checkpoint_dir,
        output_dir,
        tag=tag,
        file_format="safetensors" if safe_serialization else "bin",
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: Model, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> Model:
    """Move a model to the CPU and give it the weights of a checkpoint. What only one of the two has is warned of."""
    from onefold.runtime import handle_of

    for name, parameter in model.named_parameters():
        handle = handle_of(parameter)
        if handle is not None and not handle.place_of(parameter)[0].stays_unsharded:
            raise ExportError(
                f"{name} rests as shards: give a model that was built without zero.Init and is no engine's of stage 3, "
                "or load into the engine by engine.load_checkpoint(..., load_module_only=True)"
            )
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    misfits = model.load_state_dict(state, strict=False)
    for what, names in (("not in the checkpoint", misfits.missing_keys), ("not in the model", misfits.unexpected_keys)):
        if names:
            logger.warning("%s: %d tensors are %s: %s", checkpoint_dir, len(names), what, _spell(names))
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of zero_to_fp32.py."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py",
        description="Write the weights of a checkpoint, whole and in fp32. No GPU is needed, and little memory.",
        epilog="example: python zero_to_fp32.py . fp32_weights --tag global_step100. `onefold export` also writes bf16 "
        "and fp16.",
    )
    add = parser.add_argument
    add("checkpoint_dir", help="the folder with `latest` and the tags' folders, or a tag's folder")
    add("output_dir", help="the folder to write to")
    add("--max_shard_size", default="5GB", help="where to cut into several files: 500MB, 5GB (default), 2GiB")
    add("--safe_serialization", action="store_true", help="safetensors (streamed) instead of pytorch_model.bin")
    add("-t", "--tag", help="which checkpoint (default: what `latest` names)")
    add("--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained")
    add("-d", "--debug", action="store_true", help="name each tensor, and show where an error came from")
    options = parser.parse_args(argv)

    def tell(name: str, done: int, total: int) -> None:
        print(f"{done / max(1, total):4.0%} {name}", file=sys.stderr)

    try:
        exported = export(
            options.checkpoint_dir,
            options.output_dir,
            tag=options.tag,
            file_format="safetensors" if options.safe_serialization else "bin",
            max_shard_size=options.max_shard_size,
            exclude_frozen=options.exclude_frozen_parameters,
            progress=tell if options.debug else None,
        )
    except (CheckpointError, ExportError, OSError) as error:
        if options.debug:
            raise
        sys.exit(f"zero_to_fp32.py: {error}")
    print(f"{exported.num_tensors} tensors of {exported.checkpoint} in {', '.join(map(str, exported.files))}")
