"""DeepSpeed's checkpoints. Here: the conversion of one to onefold's format, one tensor at a time, by one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.deepspeed.zero_checkpoint import DeepSpeedCheckpoint, read_checkpoint
from onefold.checkpoint.format import folder, plain_data
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import Manifest, join_parts
from onefold.checkpoint.format.shard_files import ShardRecord, ShardWriter, Slot

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Imported:
    """The result of an import. `left_out`: keys of the client state that are not plain data."""

    folder: Path
    source: DeepSpeedCheckpoint
    nbytes: int
    left_out: list[str]


def import_deepspeed(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Imported:
    """Write OUT/TAG and OUT/latest from a checkpoint that DeepSpeed wrote (stages 1, 2, 3). The source is only read."""
    found = read_checkpoint(source, tag)
    save_dir, name = Path(os.path.abspath(out)), folder.check_tag(found.folder.name)
    if folder.is_deepspeeds(save_dir / name):
        raise CheckpointError(f"{save_dir / name} holds DeepSpeed's files: take another folder for OUT")
    client_state, left_out = _plain(found.state["client_state"])
    state, tensors = plain_data.encode({"config": None, **found.state, "client_state": client_state}, "state")
    more = [Slot.whole(f"state/{key}", tensor) for key, tensor in tensors.items()]
    entries = [Slot.whole(key, torch.empty(shape, dtype=dtype, device="meta")) for key, dtype, shape in found.entries()]
    with folder.new_data_folder(save_dir / name) as data:
        try:
            record = _write(found, data, entries, more, progress)
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
                writer=f"imported from DeepSpeed, {found.world_size} ranks",
            )
            folder.publish(save_dir, manifest, save_latest=True)
        except BaseException:
            shutil.rmtree(data, ignore_errors=True)
            raise
    folder.clean(save_dir / name)
    return Imported(save_dir / name, found, record.file.nbytes, left_out)


def _write(
    found: DeepSpeedCheckpoint, data: Path, entries: list[Slot], more: list[Slot], progress: Progress
) -> ShardRecord:
    total, done = sum(slot.memory.nbytes for slot in entries), 0
    with ShardWriter(data / "rank-00000.safetensors", entries + more) as writer:
        for slot in more:
            writer.write(slot)
        for key, tensor in found.tensors():
            writer.write(Slot.whole(key, tensor))
            done += tensor.nbytes
            progress(key, done, total)
        return writer.close({})


def _plain(client_state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The entries of a client state that a checkpoint can hold, and the keys of the others."""
    kept, left_out = {}, []
    for key, value in client_state.items():
        try:
            plain_data.encode(value, key)
            kept[key] = value
        except plain_data.ClientStateError:
            left_out.append(key)
    return kept, left_out
