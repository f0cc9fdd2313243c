"""`onefold ckpt`: what is listed is there, what is damaged is named, what is removed was onefold's."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import NO_STATE, config, flip, net, precision, start, train

from onefold.checkpoint.format import folder as folders
from onefold.checkpoint.format.manifest import RANGE_BYTES, Manifest, join_parts
from onefold.checkpoint.format.shard_files import Slot, write_shard
from onefold.checkpoint.tools import audit
from onefold.checkpoint.tools.audit import spell
from onefold.tools.cli.main import main

TAGS = ["global_step6", "global_step4", "global_step2"]
Command = Callable[..., tuple[int, str, str]]


def save(path: str) -> None:
    model = net(tied=True)
    model.blocks[0].up.weight.requires_grad_(False)
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}
    engine = start(model, config(2, scheduler=scheduler, **precision("bf16")))
    for epoch in range(3):
        train(engine, 2)
        engine.save_checkpoint(path, client_state={"epoch": epoch, "mask": torch.ones(3), 5: "five"})
    engine.destroy()


@pytest.fixture(scope="module")
def saved(on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    on_ranks(2, save, str(path))
    return path


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil: three tags of two ranks, `latest` names the last."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(action: str, *arguments: object) -> tuple[int, str, str]:
        code = main(["ckpt", action, *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture
def read(ckpt: Command) -> Callable[..., Any]:
    """What a command says in JSON, and its exit code."""

    def run(*arguments: object) -> tuple[int, Any]:
        code, out, _ = ckpt(*arguments, "--json")
        return code, json.loads(out)

    return run


def data_file(checkpoints: Path, tag: str = TAGS[0], rank: int = 0) -> Path:
    (file,) = checkpoints.glob(f"{tag}/data-*/rank-{rank:05}.safetensors")
    return file


def truncate(file: Path, nbytes: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - nbytes)


def make_leftover(checkpoints: Path, tag: str, nbytes: int = 1000) -> Path:
    """What a save that was killed leaves."""
    with folders.new_data_folder(checkpoints / tag) as data:
        pass
    (data / "rank-00000.safetensors").write_bytes(bytes(nbytes))
    return data


def make_deepspeeds(checkpoints: Path, tag: str) -> Path:
    (checkpoints / tag).mkdir(parents=True)
    file = checkpoints / tag / "mp_rank_00_model_states.pt"
    file.write_bytes(b"theirs")
    return file


# -- ls --------------------------------------------------------------------------------------------------------------


def test_ls_lists_newest_first(checkpoints: Path, ckpt: Command, read: Callable[..., Any]) -> None:
    code, out, err = ckpt("ls", checkpoints)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if "global_step" in line]
    assert [next(word for word in line.split() if "global" in word) for line in lines] == TAGS
    assert ["latest" in line for line in lines] == [True, False, False]
    assert all("complete" in line for line in lines)

    listed = read("ls", checkpoints)[1]
    assert listed["latest"] == TAGS[0]
    rows = listed["checkpoints"]
    assert [(row["tag"], row["steps"], row["ranks"], row["complete"]) for row in rows] == [
        (tag, steps, 2, True) for tag, steps in zip(TAGS, (6, 4, 2), strict=True)
    ]
    size = sum(data_file(checkpoints, rank=rank).stat().st_size for rank in (0, 1))
    assert rows[0]["bytes"] == size
    assert all(row["problems"] == [] and row["unpublished_bytes"] == 0 for row in rows)


def test_ls_of_a_tags_own_folder(checkpoints: Path, read: Callable[..., Any]) -> None:
    (row,) = read("ls", checkpoints / TAGS[0])[1]["checkpoints"]
    assert row["tag"] == TAGS[0]
    assert row["latest"]


def test_ls_of_nothing(tmp_path: Path, ckpt: Command, read: Callable[..., Any]) -> None:
    code, out, _ = ckpt("ls", tmp_path)
    assert code == 0
    assert "contains no checkpoint" in out
    assert read("ls", tmp_path)[1]["checkpoints"] == []
    code, _, err = ckpt("ls", tmp_path / "nowhere")
    assert code == 2
    assert "no such folder" in err


def test_ls_shows_deepspeeds_and_how_to_take_them(tmp_path: Path, ckpt: Command, read: Callable[..., Any]) -> None:
    make_deepspeeds(tmp_path, "global_step1")
    (tmp_path / "latest").write_text("global_step1")
    _, out, _ = ckpt("ls", tmp_path)
    assert "DeepSpeed's" in out
    assert f"onefold import-deepspeed {tmp_path}" in out
    (row,) = read("ls", tmp_path)[1]["checkpoints"]
    assert not row["complete"]
    assert row["latest"]


def test_ls_tells_what_is_wrong(checkpoints: Path, ckpt: Command, read: Callable[..., Any]) -> None:
    flip(checkpoints / TAGS[0] / "manifest.json", 500)
    truncate(data_file(checkpoints, TAGS[1], rank=1), 10)
    missing = data_file(checkpoints, TAGS[2])
    missing.unlink()
    make_leftover(checkpoints, "killed")
    (checkpoints / "latest").write_text("gone")
    code, out, _ = ckpt("ls", checkpoints)
    assert code == 0
    assert f"{TAGS[0]}: " in out
    assert "the manifest is damaged" in out
    assert "truncated or overwritten" in out
    assert f"{missing} is missing" in out
    assert "killed: 1.0 kB of a save that is in progress or was interrupted" in out
    assert "names gone, which does not exist" in out
    states = {row["tag"]: row["state"] for row in read("ls", checkpoints)[1]["checkpoints"]}
    assert states == {**dict.fromkeys(TAGS, "damaged"), "killed": "not published"}


# -- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_tells_what_it_holds(checkpoints: Path, read: Callable[..., Any]) -> None:
    code, facts = read("inspect", checkpoints)
    assert code == 0
    assert (facts["tag"], facts["ranks"], facts["complete"]) == (TAGS[0], 2, True)
    assert facts["counters"]["global_steps"] == facts["optimizer"]["num_steps"] == 6
    assert facts["optimizer"]["name"] == "AdamW"
    assert facts["optimizer"]["groups"][0]["weight_decay"] == 0.1
    assert facts["parameters_by_group"] == {"0": 15, "frozen": 1}
    assert facts["aliases"] == {"head.weight": "embed.weight"}
    assert facts["client_state_keys"] == ["epoch", "mask", "5"]
    assert facts["config"]["bf16"] == {"enabled": True}
    assert facts["lr_scheduler"] == {"last_batch_iteration": 5}
    kinds = {kind["kind"]: (kind["tensors"], kind["elements"], kind["dtypes"]) for kind in facts["kinds"]}
    assert kinds["trained parameters"] == kinds["optimizer: exp_avg"] == kinds["optimizer: exp_avg_sq"]
    assert kinds["trained parameters"] == (15, 5313, ["F32"])
    assert kinds["frozen parameters"] == (1, 882, ["BF16"])
    assert kinds["buffers"] == (1, 1, ["F32"])
    assert len(facts["files"]) == 2


def test_inspect_lists_tensors(checkpoints: Path, read: Callable[..., Any]) -> None:
    tag = TAGS[1]
    _, facts = read("inspect", checkpoints, "--tag", tag, "--tensors")
    assert facts["tag"] == tag
    rows = {row["name"]: row for row in facts["tensors"]}
    manifest = Manifest.read(checkpoints / tag)
    assert rows.keys() == manifest.tensors.keys()
    assert rows["model/blocks.1.up.weight"]["shape"] == [42, 21]
    assert rows["model/blocks.0.up.weight"]["dtype"] == "BF16"


def test_inspect_is_readable(checkpoints: Path, ckpt: Command) -> None:
    data_file(checkpoints, rank=1).unlink()
    code, out, _ = ckpt("inspect", checkpoints / TAGS[0], "--tensors")
    assert code == 0
    for text in (
        "complete        no",
        "is missing",
        "AdamW, 6 steps",
        "betas [0.9, 0.999]",
        "head.weight = embed.weight",
        "epoch, mask, 5",
        "trained parameters",
        "model/blocks.1.up.weight",
        '"stage": 2',
        "last_batch_iteration 5",
    ):
        assert text in out


def test_tagged_values_are_spelled() -> None:
    tree = {"a": {"$tuple": [1, 2.5]}, "b": {"$dict": [[3, {"$float": "nan"}]]}, "c": {"$tensor": "0"}, "d": None}
    assert spell(tree) == "{a: [1, 2.5], b: {3: nan}, c: a tensor, d: None}"


def test_inspect_of_a_damaged_manifest_fails_with_a_line(checkpoints: Path, ckpt: Command) -> None:
    flip(checkpoints / TAGS[0] / "manifest.json", 500)
    code, out, err = ckpt("inspect", checkpoints)
    assert (code, out) == (1, "")
    assert "the manifest is damaged" in err
    assert err.count("\n") == 1


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_of_what_is_whole(checkpoints: Path, ckpt: Command, read: Callable[..., Any]) -> None:
    assert ckpt("verify", checkpoints)[1].startswith(f"{TAGS[0]}: valid")
    code, found = read("verify", checkpoints, "--all")
    assert code == 0
    assert found["ok"]
    assert [row["tag"] for row in found["checkpoints"]] == TAGS
    assert all(row["ok"] and not row["damages"] for row in found["checkpoints"])


def test_every_damage_is_named(checkpoints: Path, ckpt: Command, read: Callable[..., Any]) -> None:
    manifest = Manifest.read(checkpoints / TAGS[0])
    name = "optimizer/blocks.1.up.weight/exp_avg"
    stored = manifest.tensors[name]
    part = next(part for part in stored.parts if part.file == 1 or len(stored.parts) == 1)
    weight = manifest.tensors["model/embed.weight"].parts[0]
    flipped = checkpoints / TAGS[0] / manifest.files[part.file].name
    flip(flipped, part.offset + 5)
    flip(checkpoints / TAGS[0] / manifest.files[weight.file].name, weight.offset)
    flip(data_file(checkpoints, TAGS[1]), 20)  # the header
    truncate(data_file(checkpoints, TAGS[1], rank=1), 4)
    data_file(checkpoints, TAGS[2]).unlink()

    code, found = read("verify", checkpoints, "--all")
    assert code == 1
    assert not found["ok"]
    first, second, third = (row["damages"] for row in found["checkpoints"])
    assert {damage["tensors"][0] for damage in first} == {name, "model/embed.weight"}
    (damage,) = (damage for damage in first if damage["tensors"] == [name])
    assert damage["file"] == str(flipped)
    assert damage["bytes"] == [part.offset, part.offset + (part.stop - part.start) * 4]
    problems = [damage["problem"] for damage in second]
    assert any("the header" in problem for problem in problems)
    assert sum("truncated" in problem for problem in problems) == 2, "the file, and the tensor at its end"
    (damage,) = third
    assert damage["problem"] == "is missing"
    assert len(damage["tensors"]) > 10

    code, out, _ = ckpt("verify", checkpoints, "--all")
    assert code == 1
    assert re.search(rf"\n  {flipped}:\n(    .*\n)*    {name!r}, bytes {part.offset} to ", out)
    assert out.count(str(flipped)) == 1
    assert out.count(": damaged in") == 3
    assert ckpt("verify", checkpoints, "--tag", TAGS[2])[0] == 1


def test_any_flipped_byte_is_found(checkpoints: Path) -> None:
    """Of all files of a checkpoint: headers, tensors, the manifest."""
    tag_folder = checkpoints / TAGS[0]
    files = [file for file in tag_folder.rglob("*") if file.is_file() and file.name != ".lock"]
    assert len(files) == 3
    generator = random.Random(0)
    for file in files:
        content = file.read_bytes()
        places = {0, 7, len(content) - 1} | {generator.randrange(len(content)) for _ in range(25)}
        for place in places:
            flip(file, place)
            assert list(audit.verify(folders.examine(tag_folder), lambda nbytes: None)), (file, place)
            file.write_bytes(content)
    dealt_with: list[int] = []
    assert not list(audit.verify(folders.examine(tag_folder), dealt_with.append))
    assert sum(dealt_with) == Manifest.read(tag_folder).nbytes


def publish(path: Path, tensors: dict[str, torch.Tensor], *, forget: str = "") -> tuple[Path, Manifest]:
    """A checkpoint without an engine, and its file. `forget`: a tensor that the manifest does not name."""
    with folders.new_data_folder(path / "made") as data:
        file = data / "rank-00000.safetensors"
    record = write_shard(file, [Slot.whole(f"model/{name}", tensor) for name, tensor in tensors.items()], {})
    stored = join_parts(part for part in record.numbered(0) if part[0] != f"model/{forget}")
    manifest = Manifest("made", "2026-01-01T00:00:00+00:00", 0, 1, (record.file,), stored, {}, NO_STATE, [{}])
    folders.publish(path, manifest, save_latest=True)
    return file, manifest


def test_neighbouring_ranges_are_told_as_one(tmp_path: Path, read: Callable[..., Any]) -> None:
    file, manifest = publish(tmp_path, {"w": torch.zeros(4 * RANGE_BYTES + 8, dtype=torch.uint8)})
    begin = manifest.tensors["model/w"].parts[0].offset
    for range_number in (0, 1, 3):
        flip(file, begin + range_number * RANGE_BYTES + 17)
    _, found = read("verify", tmp_path)
    assert [damage["bytes"] for damage in found["checkpoints"][0]["damages"]] == [
        [begin, begin + 2 * RANGE_BYTES],
        [begin + 3 * RANGE_BYTES, begin + 4 * RANGE_BYTES],
    ]


def test_bytes_without_a_checksum_are_told(tmp_path: Path, ckpt: Command) -> None:
    publish(tmp_path, {"w": torch.zeros(8), "forgotten": torch.zeros(5)}, forget="forgotten")
    code, out, _ = ckpt("verify", tmp_path)
    assert code == 1
    assert "20 bytes belong to no tensor" in out


def test_verify_of_latest_itself(checkpoints: Path, ckpt: Command) -> None:
    (checkpoints / "latest").write_text("gone")
    code, out, _ = ckpt("verify", checkpoints)
    assert code == 1
    assert "gone: damaged" in out
    code, out, _ = ckpt("verify", checkpoints, "--all")
    assert code == 1
    assert out.count(": valid") == 3
    assert "names gone, which does not exist" in out
    assert ckpt("verify", checkpoints / TAGS[0])[0] == 0


def test_what_was_never_published_is_not_damaged(checkpoints: Path, ckpt: Command) -> None:
    make_leftover(checkpoints, "killed")
    code, out, _ = ckpt("verify", checkpoints, "--all")
    assert code == 0
    assert "killed: no published checkpoint" in out


def test_verify_of_nothing_fails(tmp_path: Path, ckpt: Command) -> None:
    code, _, err = ckpt("verify", tmp_path, "--all")
    assert code == 2
    assert "contains no checkpoint" in err
    make_deepspeeds(tmp_path, "global_step1")
    (tmp_path / "latest").write_text("global_step1")
    code, _, err = ckpt("verify", tmp_path)
    assert code == 1
    assert "onefold import-deepspeed" in err


# -- rm --------------------------------------------------------------------------------------------------------------


def test_rm_removes(checkpoints: Path, ckpt: Command) -> None:
    code, out, _ = ckpt("rm", checkpoints, TAGS[1], TAGS[2], "--yes")
    assert code == 0
    assert f"{TAGS[1]}: removed" in out
    assert {entry.name for entry in checkpoints.iterdir()} == {TAGS[0], "latest", "zero_to_fp32.py"}
    assert ckpt("verify", checkpoints, "--all")[0] == 0


def test_rm_keeps_what_is_not_onefolds(checkpoints: Path, ckpt: Command) -> None:
    notes = checkpoints / TAGS[1] / "notes.txt"
    notes.write_text("mine")
    _, out, _ = ckpt("rm", checkpoints, TAGS[1], "--yes")
    assert "notes.txt was not written by onefold and is kept" in out
    assert [entry.name for entry in (checkpoints / TAGS[1]).iterdir()] == ["notes.txt"]
    theirs = make_deepspeeds(checkpoints, "theirs")
    foreign = checkpoints / "web" / "manifest.json"
    foreign.parent.mkdir()
    foreign.write_text("{}")
    for tag, message in (
        ("theirs", "checkpoint of DeepSpeed"),
        ("web", "unreadable manifest.json"),
        ("never", TAGS[0]),
        ("..", "not a checkpoint"),
    ):
        code, _, err = ckpt("rm", checkpoints, TAGS[2], tag, "--yes")
        assert code == 2
        assert message in err
    assert theirs.exists()
    assert foreign.exists()
    assert (checkpoints / TAGS[2]).exists(), "all is refused before anything is removed"


def test_rm_asks_first(checkpoints: Path, ckpt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = ckpt("rm", checkpoints, TAGS[1])
    assert code == 2
    assert "--yes" in err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, code in (("", 1), ("no", 1), ("y", 0)):
        assert (checkpoints / TAGS[1]).exists()
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert ckpt("rm", checkpoints, TAGS[1])[0] == code
    assert not (checkpoints / TAGS[1]).exists()


def test_rm_of_the_latest_needs_force(checkpoints: Path, ckpt: Command) -> None:
    code, _, err = ckpt("rm", checkpoints, *TAGS, "--yes")
    assert code == 2
    assert "--force" in err
    assert (checkpoints / TAGS[2]).exists()
    data_file(checkpoints, TAGS[1]).unlink()
    assert ckpt("rm", checkpoints, TAGS[0], "--yes", "--force")[0] == 0
    assert (checkpoints / "latest").read_text() == TAGS[2], "the newest complete one"
    assert ckpt("rm", checkpoints, *TAGS[1:], "--yes", "--force")[0] == 0
    assert {entry.name for entry in checkpoints.iterdir()} == {"zero_to_fp32.py"}


def test_rm_of_a_damaged_checkpoint(checkpoints: Path, ckpt: Command) -> None:
    flip(checkpoints / TAGS[1] / "manifest.json", 500)
    assert ckpt("rm", checkpoints, TAGS[1], "--yes")[0] == 0
    assert not (checkpoints / TAGS[1]).exists()


def test_leftovers_go_and_what_is_written_stays(checkpoints: Path, ckpt: Command) -> None:
    killed = make_leftover(checkpoints, "killed")
    beside = make_leftover(checkpoints, TAGS[0])
    written = make_leftover(checkpoints, "under_way")
    uncertain = make_leftover(checkpoints, TAGS[1])
    flip(checkpoints / TAGS[1] / "manifest.json", 500)
    with folders.locked(written) as ours:
        assert ours
        code, out, _ = ckpt("rm", checkpoints, "--leftovers", "--yes")
    assert code == 0
    assert "under_way: 1.0 kB are being written and are kept" in out
    assert not killed.parent.exists()
    assert not beside.exists()
    assert written.exists()
    assert uncertain.exists(), "a damaged manifest may name it"
    assert ckpt("verify", checkpoints)[0] == 0
    assert ckpt("rm", checkpoints, "--leftovers", "--yes")[0] == 0
    assert "there are no leftovers" in ckpt("rm", checkpoints, "--leftovers")[1]


def test_rm_of_nothing_is_wrong_use(checkpoints: Path, ckpt: Command) -> None:
    code, _, err = ckpt("rm", checkpoints)
    assert code == 2
    assert "--leftovers" in err
