"""Conversion of DeepSpeed's checkpoints to onefold's format, one tensor at a time, by one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.deepspeed.zero_checkpoint import DeepSpeedCheckpoint, read_checkpoint
from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.folder import check_tag, clean, is_deepspeeds, new_data_folder, publish
from onefold.checkpoint.format.manifest import Manifest, join_parts
from onefold.checkpoint.format.shard_files import ShardWriter, Slot
from onefold.storage.place import local_path, remove_tree


@dataclass(frozen=True)
class Imported:
    """The result of an import. `left_out` lists the keys of the client state that are not plain data."""

    folder: Path
    source: DeepSpeedCheckpoint
    nbytes: int
    left_out: list[str]


def import_deepspeed(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Imported:
    """Convert a DeepSpeed checkpoint (stages 1, 2, 3) to OUT/TAG and OUT/latest. The source is not modified."""
    found = read_checkpoint(source, tag)
    save_dir, name = Path(os.path.abspath(local_path(out, "OUT"))), check_tag(found.folder.name)
    if is_deepspeeds(save_dir / name):
        raise CheckpointError(f"{save_dir / name} contains files of DeepSpeed. Give another folder for OUT.")
    client_state, left_out = _plain(found.state["client_state"])
    state, tensors = plain_data.encode({"config": None, **found.state, "client_state": client_state}, "state")
    more = [Slot.whole(f"state/{key}", tensor) for key, tensor in tensors.items()]
    entries = [Slot.whole(key, torch.empty(shape, dtype=dtype, device="meta")) for key, dtype, shape in found.entries()]
    total, done = sum(slot.buffer.nbytes for slot in entries), 0
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
                writer=f"imported from DeepSpeed, {found.world_size} ranks",
            )
            publish(save_dir, manifest, save_latest=True)
        except BaseException:
            with suppress(OSError):
                remove_tree(data)
            raise
    clean(save_dir / name)
    return Imported(save_dir / name, found, record.file.nbytes, left_out)


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
