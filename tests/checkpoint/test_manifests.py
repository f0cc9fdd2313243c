"""Manifests that were edited and signed again, folders with what is no file: refused before anything changes."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import random
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from models import config, more, rank, start
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.checkpoint.format.files import CheckpointError, RemovedError
from onefold.checkpoint.format.folder import read_latest, removal, remove
from onefold.checkpoint.format.manifest import MAX_BYTES, NOT_STORED, Manifest, without_secrets
from onefold.checkpoint.format.safetensors_files import SafetensorsReader
from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.checkpoint.loading.load import MisfitError
from onefold.checkpoint.tools import audit
from onefold.checkpoint.tools.export import export
from onefold.checkpoint.tools.import_checkpoint import import_deepspeed
from onefold.storage.place import open_file
from onefold.tools.cli.main import main as command
from onefold.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

OnRanks = Callable[..., list[Any]]
FORMAT = "onefold.checkpoint.format"
SETTINGS = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}},
    "fp16": {"enabled": True, "initial_scale_power": 8},
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def engine_of(stage: int, seed: int = 0, optimizer: Any = None, **settings: Any) -> onefold.Engine:
    torch.manual_seed(seed + rank())
    model = Small()
    given = {**config(stage, **SETTINGS), **settings}
    if optimizer is not None:
        del given["optimizer"]
        settings = {"optimizer": optimizer(model.parameters())}
    else:
        settings = {}
    data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(9)))
    return start(model, given, training_data=data, **settings)


def learn(engine: onefold.Engine, seed: int) -> None:
    """A step on a batch of the engine's own data, after a few random numbers."""
    next(iter(engine.training_dataloader), None)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).half()
    engine.backward(engine(x))
    engine.step()
    random.gauss(0, 1), np.random.normal(), torch.randn(3)


def snapshot(engine: onefold.Engine) -> dict[str, Any]:
    """All that this rank holds, by bits."""
    request = type("Request", (), {"exclude_frozen": False, "buffers": {}})()
    slots, _ = engine._saver.part_of(request, joined=False)
    found: dict[str, Any] = {
        f"{slot.name}[{slot.start}:{slot.stop}]": slot.buffer.fetch().clone().numpy().tobytes() for slot in slots
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    found["job"] = copy.deepcopy({**engine._saver._job_state(), "groups": groups})
    found["data"] = engine.training_dataloader.state_dict()
    found["random"] = random.getstate(), torch.get_rng_state().numpy().tobytes(), str(np.random.get_state())
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def body_of(tag_folder: Path) -> Any:
    return json.loads((tag_folder / "manifest.json").read_bytes())["manifest"]


def sign(tag_folder: Path, body: bytes) -> None:
    """As if nobody had touched it."""
    head = b'{"xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'","manifest":'
    (tag_folder / "manifest.json").write_bytes(head + body + b"}\n")


# -- every field -------------------------------------------------------------------------------------------------

WRONG = [None, True, -1, 2.5, "x", [], {}, [1], {"a": 1}, 10**30, {"$float": "nan"}, {"$tuple": [0.9]}, {"$no": 1}]
GONE = object()


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All ways into a tree; of long lists only the first and the last."""
    if path:
        yield path
    if path == ("state", "config"):  # only shown to people
        return
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    for key in keys if len(keys) < 20 or isinstance(tree, dict) else [keys[0], keys[-1]]:
        yield from paths_in(tree[key], (*path, key))


def edited(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return tree


def save_and_copy(engine: onefold.Engine, folder: str) -> tuple[dict[str, Any], Any]:
    """A checkpoint "good" and its copy "bad"; the engine has gone on since. What was saved, and the manifest."""
    for number in range(2):
        learn(engine, number)
    engine.save_checkpoint(folder, "good", {"epoch": 3, "mask": torch.ones(2)})
    good = snapshot(engine)
    if rank() == 0:
        shutil.copytree(Path(folder, "good"), Path(folder, "bad"))
    dist.barrier()
    learn(engine, 5)
    return good, body_of(Path(folder, "good"))


def edit(folder: str, body: bytes) -> None:
    """On all ranks together: "bad" has this manifest."""
    dist.barrier()
    if rank() == 0:
        sign(Path(folder, "bad"), body)
    dist.barrier()


def edit_every_field(folder: str, stage: int, every: int) -> Any:
    """Each value by each wrong one: refused, and nothing is another bit than before; or loaded, and weights and states
    are those that were saved, and the next step works.
    """
    engine = engine_of(stage)
    good, tree = save_and_copy(engine, folder)
    before, wrong, num_refused = snapshot(engine), [], 0
    for path, value in [(path, value) for path in paths_in(tree) for value in (*WRONG, GONE)][::every]:
        edit(folder, json.dumps(edited(tree, path, value)).encode())
        where = f"{'.'.join(map(str, path))} = {'gone' if value is GONE else value}"
        try:
            engine.load_checkpoint(folder, "bad")
        except (CheckpointError, MisfitError) as error:
            num_refused += 1
            unlike = differing(before, snapshot(engine))
            if unlike or f"{folder}/bad" not in str(error):
                wrong.append((where, str(error), unlike))
        except Exception as error:
            wrong.append((where, repr(error), differing(before, snapshot(engine))))
        else:
            unlike = [key for key in differing(good, snapshot(engine)) if key not in ("job", "data", "random")]
            if unlike:
                wrong.append((where, "loaded", unlike))
            try:
                learn(engine, 7)
            except Exception as error:
                wrong.append((where, f"loaded, then {error!r}", []))
            engine.load_checkpoint(folder, "good")
            learn(engine, 5)
            before = snapshot(engine)
    return num_refused, wrong


@pytest.mark.parametrize(
    ("stage", "world", "every"), [(2, 1, 19), (3, 2, 61), more(2, 1, 2), more(3, 2, 7), more(0, 2, 11)]
)
def test_any_field_of_a_manifest_may_be_wrong(
    on_ranks: OnRanks, tmp_path: Path, stage: int, world: int, every: int
) -> None:
    for num_refused, wrong in on_ranks(world, edit_every_field, str(tmp_path), stage, every):
        assert not wrong, "\n".join(map(str, wrong))
        assert num_refused > 2000 // every


def group(manifest: Any) -> Any:
    return manifest["state"]["optimizer"]["groups"][0]


def first_tensor(manifest: Any) -> Any:
    return manifest["tensors"]["model/first.weight"]


# The edit, and what the error names.
EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "group out of range": (lambda m: m["parameters"].update({name: 7 for name in m["parameters"]}), "is in group 7"),
    "group is negative": (lambda m: m["parameters"].update({"first.weight": -1}), "parameters.first.weight"),
    "no groups": (lambda m: m["state"]["optimizer"].update(groups=[]), "has 0 groups"),
    "groups null": (lambda m: m["state"]["optimizer"].update(groups=None), "state.optimizer.groups"),
    "lr is a string": (lambda m: group(m).update(lr="abc"), "groups[0].lr must be a finite number"),
    "lr is NaN": (lambda m: group(m).update(lr={"$float": "nan"}), "groups[0].lr"),
    "lr is negative": (lambda m: group(m).update(lr=-0.1), "groups[0].lr"),
    "one beta": (lambda m: group(m).update(betas={"$tuple": [0.9]}), "betas must be 2 values"),
    "beta of 1": (lambda m: group(m).update(betas={"$tuple": [0.9, 1.0]}), "betas"),
    "random state is garbage": (lambda m: m["ranks"][0].update(rng={"python": [1, 2], "torch": 5}), "random state"),
    "random state is gone": (lambda m: m["ranks"][0].pop("rng"), "ranks[0] lacks rng"),
    "ranks empty": (lambda m: m.update(ranks=[]), "ranks has 0 entries"),
    "ranks null": (lambda m: m.update(ranks=None), "ranks must be a list"),
    "world_size 1e9": (lambda m: m.update(world_size=10**9), "world_size is 1000000000"),
    "world_size 0": (lambda m: m.update(world_size=0, ranks=[]), "world_size"),
    "state is a list": (lambda m: m.update(state=[]), "state must be an object"),
    "header_bytes 2^40": (lambda m: m["files"][0].update(header_bytes=2**40), "files[0].header_bytes"),
    "bytes 2^40": (lambda m: m["files"][0].update(bytes=2**40), "1099511627776 were written"),
    "num_steps is a string": (lambda m: m["state"]["optimizer"].update(num_steps="x"), "state.optimizer.num_steps"),
    "counters differ": (lambda m: m.update(global_steps=7), "global_steps is 7"),
    "a counter is negative": (lambda m: m["state"]["counters"].update(micro_steps=-1), "counters.micro_steps"),
    "loss scale of 0": (lambda m: m["state"]["loss_scale"].update(value=0), "loss_scale.value"),
    "another dtype": (lambda m: first_tensor(m).update(dtype="I32"), "'model/first.weight' is F32"),
    "another shape": (lambda m: first_tensor(m).update(shape=[6, 5]), "first.weight"),
    "a tensor is gone": (lambda m: m["tensors"].pop("optimizer/first.weight/exp_avg"), "but missing in the manifest"),
    "beyond the file": (lambda m: first_tensor(m)["parts"][0].update(offset=10**6), "are outside"),
    "into the header": (lambda m: first_tensor(m)["parts"][0].update(offset=0), "are outside"),
    "another file's place": (lambda m: m["files"][0].update(name="../../x"), "files[0].name"),
    "a file without a name": (lambda m: m["files"][0].update(name="a/\ud800"), "files[0].name"),
    "the data's epoch": (lambda m: m["ranks"][0]["data"].update(epoch="x"), "position in the data"),
    "the schedule": (lambda m: m["state"]["lr_scheduler"].update(last_batch_iteration="x"), "last_batch_iteration"),
    "the schedule is empty": (lambda m: m["state"].update(lr_scheduler={}), "last_batch_iteration"),
}  # fmt: skip


def edit_each(folder: str, stage: int) -> Any:
    engine = engine_of(stage)
    good, tree = save_and_copy(engine, folder)
    before, found = snapshot(engine), {}
    bodies = {}
    for name, (change, _) in EDITS.items():
        changed = copy.deepcopy(tree)
        change(changed)
        bodies[name] = json.dumps(changed).encode()
    bodies["a key twice"] = json.dumps(tree).encode().replace(b'"world_size"', b'"world_size":5,"world_size"')
    bodies["NaN"] = json.dumps(tree).encode().replace(b'"world_size": ', b'"world_size": NaN, "x": ')
    bodies["deep"] = b"[" * 100_000
    for name, body in bodies.items():
        edit(folder, body)
        try:
            engine.load_checkpoint(folder, "bad")
            told = "loaded"
        except (CheckpointError, MisfitError) as error:
            told = str(error)
        found[name] = told, differing(before, snapshot(engine))
    path, _ = engine.load_checkpoint(folder, "good")
    return found, path, differing(good, snapshot(engine))


@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 2), more(0, 2), more(3, 1)])
def test_an_edited_manifest_is_refused_by_its_field(on_ranks: OnRanks, tmp_path: Path, stage: int, world: int) -> None:
    words = {name: told for name, (_, told) in EDITS.items()}
    words |= {"a key twice": "a key is given twice: 'world_size'", "NaN": "NaN is not JSON", "deep": "not a manifest"}
    for found, path, unlike in on_ranks(world, edit_each, str(tmp_path), stage):
        for name, (told, changed) in found.items():
            assert f"{tmp_path}/bad" in told, (name, told)
            assert words[name] in told, (name, told)
            assert changed == [], (name, told)
        assert (path, unlike) == (f"{tmp_path}/good", [])


def loose_states(folder: str) -> Any:
    """Step counts of torch's own optimizers stand in `loose`."""
    engine = engine_of(2, optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9))
    _, tree = save_and_copy(engine, folder)
    before, found = snapshot(engine), []
    assert tree["ranks"][0]["loose"]
    for value in ("x", -1, None, {"$float": "nan"}, GONE):
        edit(folder, json.dumps(edited(tree, ("ranks", 0, "loose", "first.weight", "step"), value)).encode())
        with pytest.raises(CheckpointError, match=r"first\.weight"):
            engine.load_checkpoint(folder, "bad")
        found += differing(before, snapshot(engine))
    return found


def test_step_counts_of_any_optimizer_are_checked(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(1, loose_states, str(tmp_path)) == [[]]


# -- loads that fail half-way ------------------------------------------------------------------------------------


@contextmanager
def failing_reads(after: int) -> Iterator[None]:
    """The disk fails, for good, after some reads."""
    works, count = os.preadv, itertools.count()

    def fails(*args: Any) -> int:
        if next(count) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return works(*args)

    with mock.patch.object(os, "preadv", fails):
        yield


def told_by(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fails_half_way(folder: str, stage: int, how: str) -> Any:
    trained = engine_of(stage)
    good, _ = save_and_copy(trained, folder)
    engine = engine_of(stage, seed=3)  # has nothing to lose, so that nothing is verified before it is written
    found: dict[str, Any] = {}
    if how == "disk":
        # So many reads a good load needs, less the last.
        with mock.patch.object(os, "preadv", wraps=os.preadv) as counted:
            engine_of(stage, seed=4).load_checkpoint(folder, "good")
        with failing_reads(counted.call_count - 1) if rank() == 0 else nullcontext():
            found["load"] = told_by(lambda: engine.load_checkpoint(folder, "good"))
    else:

        def load(src: Any, dst: nn.Module) -> None:
            with torch.no_grad():
                dst.first.weight.zero_()
            raise KeyError("my own mistake")

        found["load"] = told_by(lambda: engine.load_checkpoint(folder, "good", custom_load_fn=load))
    found["forward"] = told_by(lambda: engine(torch.ones(4, 6).half()))
    found["step"] = told_by(engine.step)
    found["save"] = told_by(lambda: engine.save_checkpoint(f"{folder}/saved"))
    found["export"] = told_by(lambda: engine.save_16bit_model(f"{folder}/saved"))
    found["saved"] = Path(folder, "saved").exists()
    dist.barrier()
    engine.load_checkpoint(folder, "good")
    found["unlike"] = differing(good, snapshot(engine))
    learn(engine, 1)
    if how == "disk":  # an engine that stays so can be left
        with failing_reads(counted.call_count - 1):
            assert told_by(lambda: engine.load_checkpoint(folder, "good"))
    model = engine.module
    found["destroy"] = told_by(engine.destroy)
    again = start(model, config(stage, fp16=SETTINGS["fp16"]))
    again.backward(again(torch.ones(4, 6).half()))
    again.step()
    return found


@pytest.mark.parametrize(
    ("stage", "world", "how"), [(3, 2, "disk"), (2, 1, "custom"), more(2, 1, "disk"), more(0, 2, "disk")]
)
def test_a_load_that_fails_half_way_leaves_an_engine_that_says_so(
    on_ranks: OnRanks, tmp_path: Path, stage: int, world: int, how: str
) -> None:
    for found in on_ranks(world, fails_half_way, str(tmp_path), stage, how):
        assert ("Input/output error" if how == "disk" else "my own mistake") in found["load"]
        for name in ("forward", "step", "save", "export"):
            assert f"load_checkpoint of {tmp_path}/good failed half-way" in found[name], (name, found)
            assert "Call load_checkpoint again" in found[name]
        assert not found["saved"]
        assert (found["unlike"], found["destroy"]) == ([], "")


# -- what is no file ---------------------------------------------------------------------------------------------


def no_file(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "a FIFO":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case "a socket":
            with socket.socket(socket.AF_UNIX) as opened:
                here = Path.cwd()
                os.chdir(path.parent)  # a socket's path must be short
                opened.bind(path.name)
                os.chdir(here)
        case "a folder":
            path.mkdir()


def within(seconds: float, work: Callable[[], Any]) -> str:
    """What work raises; "hangs" where it does not come back."""
    told = ["hangs"]
    thread = threading.Thread(target=lambda: told.append(told_by(work)), daemon=True)
    thread.start()
    thread.join(seconds)
    return told[-1]


def save_plain(folder: str) -> None:
    engine = engine_of(2)
    learn(engine, 1)
    engine.save_checkpoint(folder, "one")
    learn(engine, 1)
    engine.save_checkpoint(folder, "two")


@pytest.fixture(scope="module")
def saved(on_ranks: OnRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(1, save_plain, str(folder))
    return folder


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a socket", "a folder"])
def test_what_is_no_file_is_refused(saved: Path, tmp_path: Path, kind: str) -> None:
    def spoilt(name: str, file: str) -> Path:
        folder = Path(shutil.copytree(saved, tmp_path / name))
        no_file(next(folder.glob(file)), kind)
        return folder

    manifest, data, latest = (
        spoilt(*of) for of in (("m", "two/manifest.json"), ("d", "two/data-*/rank-*"), ("l", "latest"))
    )
    for name, folder in (("manifest.json", manifest), ("rank-00000.safetensors", data)):
        for work in (
            lambda folder=folder: CheckpointReader.open(folder, "two"),
            lambda folder=folder: export(folder, tmp_path / "out"),
            lambda folder=folder: get_fp32_state_dict_from_zero_checkpoint(folder, "two"),
        ):
            told = within(20, work)
            assert told.startswith("CheckpointError"), told
            assert name in told
            assert kind == "a socket" or f"it is {kind}, not a regular file" in told
        # Without a tag, what is whole is found.
        assert within(20, lambda folder=folder: CheckpointReader.open(folder).close()) == ""
        verified = within(20, lambda folder=folder: command(["ckpt", "verify", str(folder), "--tag", "two"]))
        assert verified in ("", "SystemExit")
    assert within(20, lambda: CheckpointReader.open(latest).close()) == ""
    assert within(20, lambda: CheckpointReader.open(latest, "two").close()) == ""

    weights = tmp_path / "weights"
    export(saved, weights)
    no_file(weights / "model.safetensors", kind)
    assert within(20, lambda: SafetensorsReader.open(weights / "model.safetensors")) not in ("", "hangs")
    (weights / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    told = within(20, lambda: SafetensorsReader.open(weights / "model.safetensors.index.json"))
    assert told.startswith("ValueError"), told
    assert "model.safetensors" in told

    theirs = tmp_path / "deepspeed"
    theirs.mkdir()
    no_file(theirs / "latest", kind)
    assert within(20, lambda: import_deepspeed(theirs, tmp_path / "out2")) not in ("", "hangs")
    (theirs / "tag").mkdir()
    no_file(theirs / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", kind)
    assert within(20, lambda: import_deepspeed(theirs, tmp_path / "out2", "tag")) not in ("", "hangs")


def load_no_file(folder: str) -> Any:
    engine = engine_of(2)
    found = []
    for tag in ("two", None):
        found.append(told_by(lambda tag=tag: engine.load_checkpoint(folder, tag)))
    return found


def test_an_engine_refuses_what_is_no_file_too(on_ranks: OnRanks, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    no_file(folder / "two" / "manifest.json", "a FIFO")
    ((tagged, untagged),) = on_ranks(1, load_no_file, str(folder))
    assert "it is a FIFO, not a regular file" in tagged
    assert untagged == ""


def test_a_manifest_is_not_read_beyond_its_limit(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    os.truncate(folder / "two" / "manifest.json", MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"it has {MAX_BYTES + 1} bytes, more than the limit of {MAX_BYTES}"):
        Manifest.read(folder / "two")


# -- tags that are gone ------------------------------------------------------------------------------------------


def load_gone(folder: str) -> Any:
    engine = engine_of(2)
    before = snapshot(engine)
    found = [told_by(lambda tag=tag: engine.load_checkpoint(folder, tag)) for tag in ("two", "absent", None)]
    return found, differing(before, snapshot(engine))


def test_a_tag_that_is_asked_for_and_gone_is_an_error(on_ranks: OnRanks, saved: Path, tmp_path: Path) -> None:
    """Also where `latest` asks for it, and nothing else is there."""
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    shutil.rmtree(folder / "one")
    (folder / "two" / "manifest.json").unlink()
    for found, unlike in on_ranks(2, load_gone, str(folder)):
        for told, tag in zip(found, ("two", "absent", "two"), strict=True):
            assert told.startswith("CheckpointError"), told
            assert f"{folder}/{tag}: not a published checkpoint: it has no manifest.json" in told
        assert unlike == []


# -- secrets -----------------------------------------------------------------------------------------------------


def save_secrets(folder: str) -> None:
    engine = engine_of(2, comet={"enabled": False, "api_key": "hunter2", "workspace": "open"})
    learn(engine, 1)
    engine.save_checkpoint(folder, "one", {"api_key": "mine"})


def test_secrets_of_the_config_are_not_stored(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, save_secrets, str(tmp_path))
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert b"hunter2" not in path.read_bytes(), path
    with CheckpointReader.open(tmp_path) as checkpoint:
        state = checkpoint.state
    assert state["client_state"] == {"api_key": "mine"}  # the user's own
    assert state["config"]["comet"] == {"enabled": False, "api_key": NOT_STORED, "workspace": "open"}


def test_what_names_a_secret_is_not_stored_in_any_section() -> None:
    config = {
        "a": {"API-KEY": "x", "hub_token": "x", "Password": "x", "clientSecret": ["x"], "access_key": "x"},
        "b": [{"credentials": {"user": "x", "all": ["x"]}}, ("https://me:pw@example.org/x", {"db.passwd": "x"})],
        "tokenizer": "gpt2",
        "max_tokens": 512,
        "use_token": True,
        "token": None,
    }
    before = copy.deepcopy(config)
    assert without_secrets(config) == {
        "a": dict.fromkeys(config["a"], NOT_STORED),
        "b": [{"credentials": NOT_STORED}, (f"https://{NOT_STORED}@example.org/x", {"db.passwd": NOT_STORED})],
        "tokenizer": "gpt2",
        "max_tokens": 512,
        "use_token": True,
        "token": None,
    }
    assert config == before


def save_badly(folder: str) -> list[str]:
    engine = engine_of(2)
    learn(engine, 1)
    found = [
        told_by(lambda given=given: engine.save_checkpoint(folder, "bad", given)) for given in ([1, 2], [], "x", 5)
    ]
    engine.save_checkpoint(folder, "good", None)
    return found


def test_a_client_state_that_is_no_dict_is_refused_by_its_name(on_ranks: OnRanks, tmp_path: Path) -> None:
    for number, found in enumerate(on_ranks(2, save_badly, str(tmp_path))):
        for told, kind in zip(found, ("list", "list", "str", "int"), strict=True):
            assert f"client_state must be a dict or None, not a {kind}" in told
            assert told.startswith("ClientStateError" if number == 0 else "SaveError")
    assert [path.parent.name for path in tmp_path.glob("*/manifest.json")] == ["good"]


# -- readers beside a job that removes -----------------------------------------------------------------------------


def test_a_reader_is_told_that_its_checkpoint_was_removed(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    with CheckpointReader.open(folder, "one") as checkpoint:
        remove(folder / "one")
        with pytest.raises(RemovedError, match=r"one was removed while it was read.*a job \(checkpoint.keep_last\)"):
            checkpoint.tensor("model/first.weight")
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    remove(folder / "two")
    with pytest.raises(RemovedError, match="two was removed while it was read"):
        lazy["first.weight"].contiguous()


@contextmanager
def removed_at(folder: Path, tag: str, call: str) -> Iterator[None]:
    """The tag goes when a file of its data is first opened: after its manifest was read."""
    works = open_file

    def opens(path: Any) -> Any:
        if tag in Path(path).parts and "data-" in str(path) and (folder / tag).exists():
            remove(folder / tag)
        return works(path)

    with mock.patch(f"onefold.checkpoint.{call}.open_file", opens):
        yield


@contextmanager
def moving_latest(folder: Path) -> Iterator[None]:
    """A job has named its next checkpoint the latest before it removes the one before."""
    works = removal

    def found(*args: Any) -> str:
        (folder / "latest").write_text("one")
        return works(*args)

    with mock.patch(f"{FORMAT}.folder.removal", found), mock.patch(f"{FORMAT}.shard_files.removal", found):
        yield


@pytest.mark.parametrize("call", ["format.folder", "format.shard_files", "tools.audit"])
def test_without_a_tag_a_reader_takes_what_is_left(
    saved: Path, tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(saved, tmp_path / name))

    if call == "tools.audit":
        folder = copied("verify")
        with removed_at(folder, "two", call):
            (folder / "latest").write_text("two")
            assert command(["ckpt", "verify", str(folder), "--all"]) in (0, 1)
        assert "one: valid" in capsys.readouterr().out
        folder = copied("verify tag")
        with removed_at(folder, "two", call):
            assert command(["ckpt", "verify", str(folder), "--tag", "two"]) != 0
        assert "two was removed while it was read" in capsys.readouterr().err
        return
    folder = copied("export")
    with removed_at(folder, "two", call), moving_latest(folder):
        assert export(folder, tmp_path / "out").checkpoint == folder / "one"
    folder = copied("state dict")
    with removed_at(folder, "two", call), moving_latest(folder):
        assert get_fp32_state_dict_from_zero_checkpoint(folder)
    folder = copied("named")
    with removed_at(folder, "two", call), pytest.raises(RemovedError, match="was removed while it was read"):
        export(folder, tmp_path / "out", tag="two")
    folder = copied("its folder")
    with removed_at(folder, "two", call), pytest.raises(RemovedError, match="was removed while it was read"):
        export(folder / "two", tmp_path / "out")


def load_beside(folder: str, spare: str) -> Any:
    """A job saves "three" and removes "one", the only other, while it is loaded here."""
    works = open_file

    def opens(path: Any) -> Any:
        if "data-" in str(path) and "one" in Path(path).parts and Path(spare).exists():
            Path(spare).rename(Path(folder, "three"))
            Path(folder, "latest").write_text("three")
            remove(Path(folder, "one"))
        return works(path)

    engine = engine_of(2)
    with mock.patch(f"{FORMAT}.shard_files.open_file", opens) if rank() == 0 else nullcontext():
        path, _ = engine.load_checkpoint(folder)
    return path, told_by(lambda: engine.load_checkpoint(folder, "one"))


def test_an_engine_that_loads_beside_a_job_takes_its_latest(on_ranks: OnRanks, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    (folder / "two").rename(tmp_path / "spare")
    (folder / "latest").write_text("one")
    for path, told in on_ranks(2, load_beside, str(folder), str(tmp_path / "spare")):
        assert path == f"{folder}/three"
        assert told.startswith("CheckpointError")


def job_with_retention(folder: str, num_saves: int) -> None:
    engine = engine_of(2, checkpoint={"keep_last": 2})
    for number in range(num_saves):
        learn(engine, number)
        engine.save_checkpoint(folder)
    Path(folder, "done").touch()


def read_for_ever(folder: Path, counts: Counter[str]) -> None:
    while not (folder / "done").exists():
        if not (folder / "latest").exists():
            time.sleep(0.01)
            continue
        tag = read_latest(folder)
        for work in (
            lambda: get_fp32_state_dict_from_zero_checkpoint(folder),
            lambda tag=tag: get_fp32_state_dict_from_zero_checkpoint(folder, tag),
            lambda: CheckpointReader.open(folder).close(),
            lambda: audit.list_all(folder) and [audit.summary(found) for found in audit.list_all(folder)],
        ):
            try:
                work()
                counts["read"] += 1
            except CheckpointError as error:
                known = "removed while it was read" in str(error) or "has no manifest.json" in str(error)
                counts["removed" if known else str(error)] += 1


@pytest.mark.parametrize("num_saves", [25, more(300)])
def test_readers_beside_a_job_that_keeps_two(on_ranks: OnRanks, tmp_path: Path, num_saves: int) -> None:
    counts, errors = Counter[str](), list[BaseException]()

    def read() -> None:
        try:
            read_for_ever(tmp_path, counts)
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        on_ranks(1, job_with_retention, str(tmp_path), num_saves)
    finally:
        (tmp_path / "done").touch()
        reader.join()
    assert not errors, errors
    assert counts.keys() <= {"read", "removed"}, counts
    assert counts["read"] > 0
