"""A checkpoint on its way to the disk and back: every range of a tensor is checked, and what is named is flushed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import config, flip, net, rank, start, train
from torch import nn

import onefold
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import RANGE_BYTES
from onefold.checkpoint.format.shard_files import CheckpointReader

# -- ranges ------------------------------------------------------------------------------------------------------


def long_engine() -> onefold.Engine:
    """One weight of two and a half ranges in fp32."""
    torch.manual_seed(0)
    model = nn.Linear(RANGE_BYTES // 4 // 1024, 2560, bias=False)
    return start(model, config(0, optimizer={"type": "SGD", "params": {"lr": 0.1}}))


def damaged_in_each_range(folder: str) -> list[tuple[int, list[str]]]:
    """For each range of a long tensor: how many bytes a flip hit, and who is told of it."""
    engine = long_engine()
    engine.save_checkpoint(folder, "long")
    with CheckpointReader.open(folder) as checkpoint:
        (name,) = (name for name, stored in checkpoint.manifest.tensors.items() if stored.nbytes > 2 * RANGE_BYTES)
        stored = checkpoint.stored(name)
        (part,) = stored.parts
        file = checkpoint.folder / checkpoint.manifest.files[part.file].name
    found = []
    for number in range(len(part.checksums)):
        place = part.offset + min(number * RANGE_BYTES + RANGE_BYTES // 3, stored.nbytes - 1)
        flip(file, place)
        told = []
        with CheckpointReader.open(folder) as checkpoint:
            for read in (checkpoint.tensor, checkpoint.verify):
                with pytest.raises(CheckpointError) as caught:
                    read(name)
                told.append(str(caught.value))
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, "long")
        found.append((place, [*told, str(caught.value)]))
        flip(file, place)
    engine.load_checkpoint(folder, "long")  # each flip was undone
    return found


def test_damage_in_any_range_of_a_long_tensor_is_told(on_ranks, tmp_path):
    (found,) = on_ranks(1, damaged_in_each_range, str(tmp_path))
    assert len(found) == 3
    for place, told in found:
        for text in told:
            assert "damaged, the checksum does not match" in text
            # The range that holds the byte, and no other.
            first, last = (int(word) for word in text.split("bytes ")[1].split(":")[0].split(" to "))
            assert first <= place < last


# -- the order in which a save reaches the disk --------------------------------------------------------------------

Event = tuple[int, str, str]


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Every flush and every rename in this process: (when, which, path)."""
    events: list[Event] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        fsync(descriptor)
        events.append((time.monotonic_ns(), "flush", path))

    def watched_replace(source: Any, target: Any, **more: Any) -> None:
        events.append((time.monotonic_ns(), "from", str(source)))
        replace(source, target, **more)
        events.append((time.monotonic_ns(), "to", str(target)))

    os.fsync, os.replace = watched_fsync, watched_replace  # type: ignore[assignment]
    try:
        yield events
    finally:
        os.fsync, os.replace = fsync, replace


def save_and_watch(folder: str, background: bool) -> list[Event]:
    engine = start(net(), config(2))
    train(engine, 1)
    with watched() as events:
        engine.save_checkpoint(folder, "tag", background=background)
        engine.wait_for_checkpoint()
        torch.distributed.barrier()
    assert rank() < 2
    return events


@pytest.mark.parametrize("background", [False, True])
def test_everything_is_flushed_before_a_rename_makes_it_count(on_ranks, tmp_path, background):
    """A power cut may undo whatever was not flushed, in any order: flushes come before the renames that name them."""
    folder = str(tmp_path / "saved")
    of_rank = on_ranks(2, save_and_watch, folder, background)
    flushed = sorted((when, path) for events in of_rank for when, which, path in events if which == "flush")
    renamed = {path: when for events in of_rank for when, which, path in events if which == "to"}
    begun = {path: when for events in of_rank for when, which, path in events if which == "from"}
    manifest, latest = f"{folder}/tag/manifest.json", f"{folder}/latest"
    assert {manifest, latest} <= renamed.keys()
    assert renamed[manifest] < renamed[latest]

    # Whatever is renamed was flushed under its former name.
    for path, when in begun.items():
        assert any(flush < when and name == path for flush, name in flushed), f"{path} was renamed and not flushed"
    # The manifest counts from its rename on: data of all ranks, and the folders that name it, come before.
    data = [str(path) for path in (tmp_path / "saved" / "tag").glob("data-*/*.safetensors")]
    assert len(data) == 2
    before = {name for flush, name in flushed if flush < begun_of(manifest, begun)}
    for path in [*data, *{str(Path(file).parent) for file in data}, f"{folder}/tag", folder]:
        assert path in before, f"{path} was not flushed before the manifest was published"
    # And each rename is flushed itself, the manifest's before `latest` names the tag.
    assert any(renamed[manifest] < flush < renamed[latest] and name == f"{folder}/tag" for flush, name in flushed)
    assert any(renamed[latest] < flush and name == folder for flush, name in flushed)


def begun_of(target: str, begun: dict[str, int]) -> int:
    """When the rename to a file began: what is renamed is named after it."""
    partial = f".{Path(target).name}-"
    (when,) = (when for path, when in begun.items() if Path(path).name.startswith(partial))
    return when
