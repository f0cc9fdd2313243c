"""Conversion of checkpoints of DeepSpeed and of torch to onefold's format, one tensor at a time, by one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from onefold.checkpoint.dcp.dcp_checkpoint import DcpCheckpoint, read_dcp
from onefold.checkpoint.deepspeed.zero_checkpoint import DeepSpeedCheckpoint, read_checkpoint
from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.folder import check_tag, clean, is_dcp, is_deepspeeds, new_data_folder, publish
from onefold.checkpoint.format.manifest import NAME, Manifest, join_parts
from onefold.checkpoint.format.shard_files import ShardWriter, Slot
from onefold.storage.place import local_path, remove_tree

Progress = Callable[[str, int, int], None]


class ForeignCheckpoint(Protocol):
    """An open checkpoint of another library, with the names of onefold's format."""

    @property
    def folder(self) -> Path: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def parameters(self) -> Mapping[str, int | None]: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @property
    def writer(self) -> str:
        """The writer that the manifest names."""
        ...

    def entries(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]: ...
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


Source = TypeVar("Source", bound=ForeignCheckpoint)


@dataclass(frozen=True)
class Imported(Generic[Source]):
    """The result of an import. `left_out` lists what was not converted."""

    folder: Path
    source: Source
    nbytes: int
    left_out: list[str]


def import_deepspeed(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Imported[DeepSpeedCheckpoint]:
    """Convert a DeepSpeed checkpoint (stages 1, 2, 3) to OUT/TAG and OUT/latest. The source is not modified.

    Keys of the client state that are not plain data are left out.
    """
    found = read_checkpoint(source, tag)
    client_state, left_out = _plain(found.state["client_state"])
    return Imported(*_convert(found, client_state, out, progress), left_out)


def import_dcp(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    leave_out: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> Imported[DcpCheckpoint]:
    """Convert a folder of torch.distributed.checkpoint to OUT/TAG and OUT/latest. The source is not modified.

    The tag is the name of the folder. `leave_out` names top-level keys that are not converted.
    """
    found = read_dcp(source, tag, leave_out)
    return Imported(*_convert(found, found.state["client_state"], out, progress), list(found.left_out))


def _convert(
    found: Source, client_state: dict[str, Any], out: str | os.PathLike[str], progress: Progress
) -> tuple[Path, Source, int]:
    save_dir, name = Path(os.path.abspath(local_path(out, "OUT"))), check_tag(found.folder.name)
    for is_of, library in ((is_deepspeeds, "DeepSpeed"), (is_dcp, "torch.distributed.checkpoint")):
        if is_of(save_dir / name):
            raise CheckpointError(f"{save_dir / name} contains files of {library}. Give another folder for OUT.")
    source = found.folder.resolve()
    if save_dir.resolve().is_relative_to(source) or (save_dir / name).resolve() == source:
        raise CheckpointError(f"{save_dir} is in the checkpoint {source}, or contains it. Give another folder for OUT.")
    if (save_dir / name / NAME).exists():
        what = f"{save_dir / name} is a checkpoint already"
        raise CheckpointError(f"{what}. Give another folder for OUT, or run onefold ckpt rm {save_dir} {name!r}.")
    state, tensors = plain_data.encode({"config": None, **found.state, "client_state": client_state}, "state")
    more = [Slot.whole(f"state/{key}", tensor) for key, tensor in tensors.items()]
    entries = [Slot.whole(key, torch.empty(shape, dtype=dtype, device="meta")) for key, dtype, shape in found.entries()]
    total, done = sum(slot.buffer.nbytes for slot in entries), 0
    existed = save_dir.exists()
    with new_data_folder(save_dir / name) as data:
        try:
            with ShardWriter(data / "rank-00000.safetensors", entries + more) as writer:
                for slot in more:
                    writer.write(slot)
                for key, tensor in found.tensors():
                    writer.write(Slot.whole(key, tensor))
                    done += tensor.nbytes
                    progress(key, done, total)
                record = writer.close({})
            manifest = Manifest(
                tag=name,
                saved=datetime.now(UTC).isoformat(),
                global_steps=found.state["counters"]["global_steps"],
                world_size=1,
                files=(record.file,),
                tensors=join_parts(record.numbered(0)),
                parameters=dict(found.parameters),
                state=state,
                ranks=[{}],
                aliases=dict(found.aliases),
                writer=found.writer,
            )
            publish(save_dir, manifest, save_latest=True)
        except BaseException:
            with suppress(OSError):
                remove_tree(data)
                (save_dir / name).rmdir()  # unless it contains other files
                if not existed:
                    save_dir.rmdir()
            raise
    clean(save_dir / name)
    return save_dir / name, found, record.file.nbytes


def _plain(client_state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of a client state that a checkpoint can hold, and the keys of the other entries."""
    kept, left_out = {}, []
    for key, value in client_state.items():
        try:
            plain_data.encode(value, key)
            kept[key] = value
        except plain_data.ClientStateError:
            left_out.append(key)
    return kept, left_out
