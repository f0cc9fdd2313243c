"""Weights out of a checkpoint: bit for bit the live engine's masters, one tensor at a time, whole or not at all."""

from __future__ import annotations

import json
import logging
import runpy
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import NO_STATE, Net, config, flip, net, precision, start, train
from torch import nn

from onefold.checkpoint.format import folder as folders
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import Manifest, join_parts
from onefold.checkpoint.format.safetensors_files import SafetensorsReader
from onefold.checkpoint.format.shard_files import CheckpointReader, Slot, write_shard
from onefold.checkpoint.tools.export import DTYPES, ExportError, export
from onefold.runtime import unsharded
from onefold.tools.cli.main import main as onefold_command
from onefold.utils import safe_get_full_fp32_param
from onefold.utils.zero_to_fp32 import (
    LazyTensor,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

FROZEN = "blocks.0.up.weight"
Tensors = dict[str, torch.Tensor]


def build(**shape: Any) -> Net:
    """Tied, partly frozen, with buffers of several dtypes."""
    model = net(tied=True, **shape)
    model.register_buffer("count", torch.arange(5))
    model.register_buffer("wide", torch.linspace(0, 1, 7, dtype=torch.float64))
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def save(path: str, stage: int, tags: tuple[str, ...] = ("one",), **more: Any) -> Tensors:
    """Train and save on every rank; what the last checkpoint must hold, in fp32, as the engine says."""
    engine = start(build(), config(stage, **precision("bf16")))
    for tag in tags:
        train(engine, 2)
        engine.save_checkpoint(path, tag, **more)
    found = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        with unsharded([parameter]):
            found[name] = (parameter.detach() if master is None else master).float().clone()
    found |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    found["wide"] = found["wide"].float()
    engine.destroy()
    return found


def save_without_frozen(path: str) -> Tensors:
    return save(path, 2, exclude_frozen_parameters=True)


@pytest.fixture(scope="module")
def saved(on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    path = tmp_path_factory.mktemp("saved")
    return path, on_ranks(1, save, str(path), 2, ("older", "newer"))[0]


@pytest.fixture
def checkpoints(saved: tuple[Path, Tensors], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def load(path: Path) -> Tensors:
    """What any export holds, under every name."""
    if list(path.glob("*.safetensors")):
        with SafetensorsReader.open(path) as weights:
            found = {}
            for name in (*weights.names, *weights.aliases):
                entry = weights.entry(name)
                flat = torch.empty(entry.numel, dtype=entry.dtype)
                weights.read(name, 0, entry.numel, flat)
                found[name] = flat.view(entry.shape)
            return found
    files = sorted(path.glob("pytorch_model*.bin"))
    return {name: tensor for file in files for name, tensor in torch.load(file, weights_only=True).items()}


def same(mine: Tensors, other: Tensors) -> bool:
    """Names, dtypes and bits."""
    return mine.keys() == other.keys() and all(
        mine[name].dtype is other[name].dtype and torch.equal(mine[name], other[name]) for name in mine
    )


def with_alias(tensors: Tensors) -> Tensors:
    return tensors | {"head.weight": tensors["embed.weight"]}


def data_file(checkpoints: Path, tag: str = "newer") -> Path:
    (file,) = checkpoints.glob(f"{tag}/data-*/rank-00000.safetensors")
    return file


def spoil(checkpoints: Path, how: str) -> Path:
    """Damage the newer checkpoint: a byte in the middle of a weight, the end of the file, or all of it."""
    file = data_file(checkpoints)
    if how == "flipped":
        stored = Manifest.read(checkpoints / "newer").tensors["model/blocks.2.up.weight"]
        flip(file, stored.parts[0].offset + stored.nbytes // 2)
    elif how == "truncated":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 100)
    else:
        file.unlink()
    return file


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} if path.exists() else set()


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_weights_are_the_live_masters(on_ranks: Callable[..., list[Any]], tmp_path: Path, stage: int) -> None:
    expected = with_alias(on_ranks(2, save, str(tmp_path / "ckpt"), stage)[0])
    assert same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt"), expected)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert same(load(tmp_path / "out"), expected)


@covering(size=("5GB", "8KB", None), dtype=("fp32", "bf16", "fp16"), file_format=("safetensors", "bin"), strength=1)
def test_casts_are_torchs_in_every_format(
    saved: tuple[Path, Tensors], tmp_path: Path, file_format: str, dtype: str, size: str | None
) -> None:
    path, masters = saved
    done = export(path, tmp_path, dtype=dtype, file_format=file_format, max_shard_size=size)
    expected = {
        name: tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor for name, tensor in masters.items()
    }
    assert same(load(tmp_path), with_alias(expected))
    assert {file.name for file in done.files} == names_in(tmp_path)
    assert (len(done.files) > 1) == (size == "8KB")
    assert done.num_tensors == len(masters)
    assert done.nbytes == sum(tensor.nbytes for tensor in expected.values())


def test_a_tag_or_its_folder_may_be_named(saved: tuple[Path, Tensors], tmp_path: Path) -> None:
    path, masters = saved
    export(path, tmp_path / "by_tag", tag="older")
    export(path / "older", tmp_path / "by_folder")
    older = load(tmp_path / "by_tag")
    assert same(older, load(tmp_path / "by_folder"))
    assert not same(older, with_alias(masters))


def test_tied_names_share_one_tensor(saved: tuple[Path, Tensors], tmp_path: Path) -> None:
    state = get_fp32_state_dict_from_zero_checkpoint(saved[0])
    assert state["head.weight"] is state["embed.weight"]
    export(saved[0], tmp_path / "bin", file_format="bin")
    there = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert there["head.weight"].data_ptr() == there["embed.weight"].data_ptr()
    export(saved[0], tmp_path / "safe")
    with SafetensorsReader.open(tmp_path / "safe") as weights:
        assert weights.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_frozen_parameters_are_left_out(saved: tuple[Path, Tensors], tmp_path: Path, file_format: str) -> None:
    export(saved[0], tmp_path, file_format=file_format, exclude_frozen=True)
    assert with_alias(saved[1]).keys() - load(tmp_path).keys() == {FROZEN}
    assert FROZEN not in get_fp32_state_dict_from_zero_checkpoint(saved[0], exclude_frozen_parameters=True)


def test_what_a_save_left_out_is_told(
    on_ranks: Callable[..., list[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_ranks(1, save_without_frozen, str(tmp_path / "ckpt"))
    with caplog.at_level(logging.WARNING, "onefold"):
        export(tmp_path / "ckpt", tmp_path / "out")
    assert FROZEN in caplog.text
    assert FROZEN not in load(tmp_path / "out")


def publish(path: Path, tensors: Tensors) -> None:
    """A checkpoint without an engine."""
    with folders.new_data_folder(path / "made") as data:
        pass
    slots = [Slot.whole(f"model/{name}", tensor) for name, tensor in tensors.items()]
    record = write_shard(data / "rank-00000.safetensors", slots, {})
    manifest = Manifest(
        tag="made",
        saved="2026-01-01T00:00:00+00:00",
        global_steps=0,
        world_size=1,
        files=(record.file,),
        tensors=join_parts(record.numbered(0)),
        parameters=dict.fromkeys(tensors, 0),
        state=NO_STATE,
        ranks=[{}],
    )
    folders.publish(path, manifest, save_latest=True)


def test_values_that_overflow_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    infinite = torch.tensor([1.0, float("inf")])
    publish(tmp_path / "ckpt", {"large": torch.tensor([1.0, 70000.0]), "infinite": infinite, "small": torch.ones(2)})
    with caplog.at_level(logging.WARNING, "onefold"):
        export(tmp_path / "ckpt", tmp_path / "bf16", dtype="bf16")
        assert not caplog.records
        export(tmp_path / "ckpt", tmp_path / "fp16", dtype="fp16")
    (record,) = caplog.records
    assert record.getMessage().endswith("in: large")


def test_scalars_and_empty_tensors_survive(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "flag": torch.tensor(True)}
    publish(tmp_path / "ckpt", tensors)
    for file_format in ("safetensors", "bin"):
        export(tmp_path / "ckpt", tmp_path / file_format, file_format=file_format)
        assert same(load(tmp_path / file_format), tensors)


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_index_is_as_hugging_face_has_it(saved: tuple[Path, Tensors], tmp_path: Path) -> None:
    path, masters = saved
    export(path, tmp_path, file_format="bin", max_shard_size="8KB")
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    count = len(files)
    assert count > 2
    assert files == [f"pytorch_model-{k + 1:05}-of-{count:05}.bin" for k in range(count)]
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in masters.values())}
    assert index["weight_map"].keys() == with_alias(masters).keys()
    for file in files:
        inside = torch.load(tmp_path / file, weights_only=True)
        assert inside.keys() == {name for name, where in index["weight_map"].items() if where == file}
        assert sum(tensor.nbytes for name, tensor in inside.items() if name != "head.weight") <= 8000


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_an_export_replaces_an_earlier_one(saved: tuple[Path, Tensors], tmp_path: Path, file_format: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    export(saved[0], tmp_path, file_format=file_format, max_shard_size="8KB")
    many = names_in(tmp_path)
    export(saved[0], tmp_path, file_format=file_format)
    assert len(names_in(tmp_path)) == 2
    assert (tmp_path / "config.json").exists()
    export(saved[0], tmp_path, file_format=file_format, max_shard_size="8KB")
    assert names_in(tmp_path) == many


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_memory_is_that_of_a_tensor_or_of_a_file(
    saved: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: str
) -> None:
    alive: dict[int, int] = {}
    peak = 0
    read = CheckpointReader.tensor

    def counted(checkpoint: CheckpointReader, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal peak
        tensor = read(checkpoint, name, dtype)
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        peak = max(peak, sum(alive.values()))
        return tensor

    monkeypatch.setattr(CheckpointReader, "tensor", counted)
    export(saved[0], tmp_path, file_format=file_format, max_shard_size="6KB")
    largest = max(tensor.nbytes for tensor in saved[1].values())
    assert largest <= peak <= (largest if file_format == "safetensors" else 6000)
    assert not alive


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damage_is_named_and_nothing_looks_complete(
    checkpoints: Path, tmp_path: Path, how: str, file_format: str
) -> None:
    out = tmp_path / "out"
    file = spoil(checkpoints, how)
    with pytest.raises(CheckpointError, match=file.name) as error:
        export(checkpoints, out, file_format=file_format, max_shard_size="8KB")
    assert how != "flipped" or "model/blocks.2.up.weight" in str(error.value)
    assert how == "flipped" or "older" in str(error.value), "the complete one is offered"
    assert names_in(out) == set()


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_a_failed_export_leaves_the_earlier_one(checkpoints: Path, tmp_path: Path, file_format: str) -> None:
    out = tmp_path / "out"
    export(checkpoints, out, tag="older", file_format=file_format, max_shard_size="8KB")
    before = {entry.name: entry.read_bytes() for entry in out.iterdir()}
    spoil(checkpoints, "flipped")
    with pytest.raises(CheckpointError):
        export(checkpoints, out, file_format=file_format, max_shard_size="8KB")
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == before


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_what_a_killed_export_left_is_removed(saved: tuple[Path, Tensors], tmp_path: Path, file_format: str) -> None:
    name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[file_format]
    (tmp_path / f".{name}-abcdef.partial").mkdir()
    export(saved[0], tmp_path, file_format=file_format)
    assert names_in(tmp_path) == {name}


def test_an_older_checkpoint_never_stands_in(checkpoints: Path, tmp_path: Path) -> None:
    (checkpoints / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match=r"gone.*newer, older"):
        export(checkpoints, tmp_path / "out")
    (checkpoints / "latest").unlink()
    assert export(checkpoints, tmp_path / "out").checkpoint == checkpoints / "newer"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "fp32, bf16, fp16"),
        ({"file_format": "gguf"}, "safetensors, bin"),
        ({"max_shard_size": "large"}, "max_shard_size"),
        ({"tag": "../newer"}, "plain folder name"),
        ({"tag": "never"}, "never.*Complete checkpoints.*newer"),
    ],
)
def test_wrong_options_are_refused(
    saved: tuple[Path, Tensors], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ExportError, CheckpointError), match=message):
        export(saved[0], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_wrong_folders_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    for inside in (checkpoints / "newer", checkpoints / "newer" / "weights"):
        with pytest.raises(ExportError, match="inside the checkpoint"):
            export(checkpoints, inside)
    with pytest.raises(ExportError, match="is a file"):
        export(checkpoints, checkpoints / "latest")
    with pytest.raises(CheckpointError, match="no such folder"):
        export(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "theirs" / "global_step1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        export(tmp_path / "theirs", tmp_path / "out")
    (tmp_path / "theirs" / "global_step1" / "mp_rank_00_model_states.pt").touch()
    for theirs in (tmp_path / "theirs", tmp_path / "theirs" / "global_step1"):
        with pytest.raises(CheckpointError, match="onefold import-deepspeed"):
            export(theirs, tmp_path / "out")


# -- DeepSpeed's zero_to_fp32 ----------------------------------------------------------------------------------------


def test_lazy_values_are_read_one_by_one(saved: tuple[Path, Tensors]) -> None:
    lazy = get_fp32_state_dict_from_zero_checkpoint(saved[0], lazy_mode=True)
    expected = with_alias(saved[1])
    assert all(isinstance(value, LazyTensor) for value in lazy.values())
    assert {name: (value.shape, value.dtype) for name, value in lazy.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()
    }
    assert lazy["head.weight"] is lazy["embed.weight"]
    assert same({name: value.contiguous() for name, value in lazy.items()}, expected)


@pytest.mark.parametrize("safe", [False, True])
def test_convert_writes_what_deepspeed_writes(saved: tuple[Path, Tensors], tmp_path: Path, safe: bool) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path, "5GB", safe, "newer")
    assert names_in(tmp_path) == {"model.safetensors" if safe else "pytorch_model.bin"}
    assert same(load(tmp_path), with_alias(saved[1]))


def test_a_plain_model_takes_the_weights(saved: tuple[Path, Tensors], caplog: pytest.LogCaptureFixture) -> None:
    model = Net(tied=True)
    model.register_buffer("count", torch.zeros(5, dtype=torch.long))
    model.register_buffer("wide", torch.zeros(7))
    with caplog.at_level(logging.WARNING, "onefold"):
        assert load_state_dict_from_zero_checkpoint(model, saved[0]) is model
    assert not caplog.records
    assert same(dict(model.state_dict()), with_alias(saved[1]))


def test_what_only_one_of_both_has_is_told(saved: tuple[Path, Tensors], caplog: pytest.LogCaptureFixture) -> None:
    model = Net(tied=True)
    model.extra = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "onefold"):
        load_state_dict_from_zero_checkpoint(model, saved[0])
    assert "extra.weight, extra.bias" in caplog.text
    assert "count, wide" in caplog.text


def load_into_shards(path: str) -> str:
    engine = start(build(), config(3))
    try:
        load_state_dict_from_zero_checkpoint(engine.module, path)
    except ExportError as error:
        return str(error)
    return ""


def test_a_model_in_shards_is_refused(saved: tuple[Path, Tensors], on_ranks: Callable[..., list[Any]]) -> None:
    assert all("load_module_only" in message for message in on_ranks(2, load_into_shards, str(saved[0])))


def test_the_script_beside_the_checkpoints_works(
    saved: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(saved[0]), str(tmp_path), "-t", "newer", "--max_shard_size", "8KB", "--safe_serialization", "-d"]
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", *arguments])
    runpy.run_path(str(saved[0] / "zero_to_fp32.py"), run_name="__main__")
    assert same(load(tmp_path), with_alias(saved[1]))
    assert "100%" in capsys.readouterr().err


def test_the_script_fails_with_a_line(checkpoints: Path, tmp_path: Path) -> None:
    spoil(checkpoints, "missing")
    with pytest.raises(SystemExit, match=r"zero_to_fp32.py: .*rank-00000.safetensors is missing"):
        main([str(checkpoints), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


# -- onefold export --------------------------------------------------------------------------------------------------


def test_the_command_exports(
    saved: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal then, and draws the bar
    assert onefold_command(["export", str(saved[0]), str(tmp_path), "--dtype", "bf16", "--format", "bin"]) == 0
    shown = capsys.readouterr()
    assert "pytorch_model.bin" in shown.out
    assert "export" in shown.err
    expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in with_alias(saved[1]).items()}
    assert same(load(tmp_path), expected)


def test_the_command_fails_with_a_line(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    spoil(checkpoints, "flipped")
    (tmp_path / "file").touch()
    for arguments, code, message in (
        ([str(checkpoints), out], 1, "the checksum does not match"),
        ([str(checkpoints), str(tmp_path / "file" / "out"), "--tag", "older"], 1, "file"),
        ([str(checkpoints), out, "--max-shard-size", "0"], 2, "--max-shard-size: '0' is not a size"),
        ([str(tmp_path / "nowhere"), out], 2, "no such folder"),
        ([str(tmp_path / "file"), out], 2, "not a folder"),
        ([str(tmp_path), out], 2, "contains no checkpoint"),
        ([str(checkpoints), str(checkpoints / "newer")], 2, "inside the checkpoint"),
    ):
        assert onefold_command(["export", *arguments]) == code
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("onefold: ")
        assert message in shown.err
        assert shown.err.count("\n") == 1
