"""The modes of files: swap folders are always private, checkpoints if the config asks for it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from models import config, net, rank, start, train

from onefold.offload.swap_folder import SwapFolder
from onefold.tools.cli.ranks import _locked_folder


def modes(folder: Path) -> dict[str, int]:
    """The mode of a folder and of all that it contains, by path."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


def saved(folder: str, private: bool, background: bool) -> None:
    os.umask(0o022)
    engine = start(net(), config(2, checkpoint={"private": private, "async_save": background}))
    train(engine, 1)
    for tag in ("a", "b", "a"):  # the last replaces the first
        engine.save_checkpoint(folder, tag=tag)
    engine._saver.pointer_files.append("mp_rank_00_model_states.pt")
    engine.save_checkpoint(folder, tag="c")
    engine._saver.finish()
    dist.barrier()
    assert engine.load_checkpoint(folder, tag="c")[0] is not None
    engine.destroy()


@pytest.mark.parametrize("background", [False, True])
def test_no_other_user_can_read_a_private_checkpoint(on_ranks, tmp_path, background):
    folder = tmp_path / "new" / "checkpoints"
    on_ranks(2, saved, str(folder), True, background)
    found = modes(folder)
    assert {"a", "b", "c", "latest"} <= found.keys()
    assert any(path.endswith(".safetensors") for path in found)
    readable = {path: mode for path, mode in found.items() if mode & 0o077}
    assert readable == {}, {path: oct(mode) for path, mode in readable.items()}
    assert modes(tmp_path / "new")["."] == 0o700
    assert {mode for path, mode in found.items() if (folder / path).is_dir()} == {0o700}


def test_other_checkpoints_have_the_modes_of_the_umask(on_ranks, tmp_path):
    on_ranks(2, saved, str(tmp_path / "checkpoints"), False, False)
    found = modes(tmp_path / "checkpoints")
    assert {mode for path, mode in found.items() if (tmp_path / "checkpoints" / path).is_dir()} == {0o755}
    assert {mode for path, mode in found.items() if path.endswith((".safetensors", ".json", "latest"))} == {0o644}


def private_in(folder: str) -> None:
    engine = start(net(), config(2, checkpoint={"private": True}))
    engine.save_checkpoint(folder, tag="a")
    dist.barrier()
    engine.destroy()


def test_the_mode_of_a_folder_of_the_user_is_kept(on_ranks, tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    on_ranks(2, private_in, str(folder))
    found = modes(folder)
    assert found["."] == 0o755
    assert found["a"] == 0o700
    assert {mode for path, mode in found.items() if path.startswith("a/") and "data" not in Path(path).name} == {0o600}
    assert found["latest"] == 0o600


def test_swap_files_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        swap = SwapFolder(str(tmp_path), 0)
        swap.prepare()
        swap.make(8192)
    finally:
        os.umask(before)
    try:
        data = Path(swap.data_path)
        assert modes(data.parent) == {".": 0o700, "data": 0o600, "lock": 0o600}
    finally:
        swap.remove()


def offloaded(folder: str) -> dict[str, int]:
    os.umask(0)
    offload = {"device": "nvme", "nvme_path": folder}
    engine = start(net(), config(3, zero_optimization={"offload_optimizer": offload, "offload_param": offload}))
    train(engine, 1)
    dist.barrier()
    found = modes(Path(folder)) if rank() == 0 else {}
    dist.barrier()
    engine.destroy()
    os.umask(0o022)
    return found


def test_what_training_swaps_is_private(on_ranks, tmp_path):
    found, _ = on_ranks(2, offloaded, str(tmp_path))
    inside = {path: mode for path, mode in found.items() if path not in (".", "onefold-swap")}
    assert len(inside) >= 6
    assert {path: oct(mode) for path, mode in inside.items() if mode & 0o077} == {}


def test_the_folder_of_the_launcher_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        with _locked_folder("onefold_launch_") as folder:
            assert modes(Path(folder))["."] == 0o700
    finally:
        os.umask(before)
