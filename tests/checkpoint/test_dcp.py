"""Folders of torch.distributed.checkpoint: FSDP2's continue in onefold and onefold's in FSDP2; pickles never run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Net, batches, config, first_difference, more, net, rank, start, train
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from onefold.checkpoint.dcp.dcp_checkpoint import read_dcp
from onefold.checkpoint.dcp.dcp_metadata import METADATA, DcpFolder
from onefold.checkpoint.deepspeed.torch_files import RefusedPickle
from onefold.checkpoint.tools.export import ExportError, export
from onefold.checkpoint.tools.import_checkpoint import import_dcp
from onefold.tools.cli.main import main

OnRanks = Callable[..., list[Any]]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# Three steps on three ranks, then three more on two.
STEPS = 3


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups that both systems have: no decay for vectors."""
    vectors = [each for each in model.parameters() if each.ndim == 1]
    return [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


def fsdp_job(kind: str = "AdamW", seed: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[kind](two_groups(model))


def fsdp_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    losses = []
    for x, y in batches(STEPS, seed=seed):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state.items()
    }


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, options: Any = None) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def save(folder: str, layout: str = "nested", kind: str = "AdamW") -> tuple[dict[str, Any], dict[str, Any]]:
    """Train under FSDP2, save in a layout, and return the weights and the optimizer states."""
    model, optimizer = fsdp_job(kind)
    fsdp_steps(model, optimizer, seed=0)
    state = state_of(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict()
    if layout == "nested":
        dcp.save(state, checkpoint_id=folder)
    elif layout == "flattened":
        dcp.save({"model": state["model"], "optim": flat}, checkpoint_id=folder)
    elif layout == "app":
        app = {"model": state["model"], "optim": state["optimizer"]}
        dcp.save({"app": app, "epoch": 7, "seen": torch.tensor(5)}, checkpoint_id=folder)
    elif layout == "torchtitan":
        others = {
            "lr_scheduler": schedule,
            "train_state": {"step": torch.tensor(STEPS, dtype=torch.int32)},
            "dataloader": {"world_size": 3, f"dp_rank_{rank()}": pickle.dumps({"position": rank()})},
        }
        dcp.save({**state["model"], "optimizer": flat, **others}, checkpoint_id=f"{folder}/step-{STEPS}")
        dcp.save({**state["model"]}, checkpoint_id=f"{folder}/step-2")
    else:
        dcp.save({"model": state["model"]}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": state["optimizer"]}, checkpoint_id=f"{folder}/optimizer_0")
        if rank() == 0:
            torch.save(schedule, f"{folder}/scheduler.bin")
            Path(folder, "random_states_0.pkl").write_bytes(pickle.dumps("never read"))
            Path(folder, "trainer_state.json").write_text("{}")
    found = state["optimizer"]["state"]
    return whole(state["model"]), {name: whole(values) for name, values in found.items()}


def continue_in_fsdp(folder: str, kind: str = "AdamW") -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = fsdp_job(kind, seed=99)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for group in optimizer.param_groups:
        group["fused"] = True if kind == "AdamW" else None
    return fsdp_steps(model, optimizer, seed=1), whole(get_model_state_dict(model))


def engine_of(stage: int, kind: str = "AdamW") -> Any:
    model = net(seed=77)
    return start(model, config(stage, optimizer=None), optimizer=OPTIMIZERS[kind](two_groups(model)))


def continue_in_onefold(
    folder: str, stage: int, kind: str, num_steps: int = STEPS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_of(stage, kind)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    assert engine.global_steps == num_steps
    trace = train(engine, STEPS, seed=1)
    return trace.losses, trace.weights


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, on_ranks: OnRanks) -> Callable[[str], tuple[Path, Any]]:
    """What three ranks of FSDP2 saved in a layout, once."""
    done: dict[str, tuple[Path, Any]] = {}

    def write(layout: str, kind: str = "AdamW") -> tuple[Path, Any]:
        if layout + kind not in done:
            folder = tmp_path_factory.mktemp(layout) / "saved"
            folder.mkdir()
            done[layout + kind] = folder, on_ranks(3, save, str(folder), layout, kind)[0]
        return done[layout + kind]

    return write


@pytest.fixture
def copied(written: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written("nested")[0], tmp_path / "saved"))


@pytest.mark.parametrize("layout", ["nested", "flattened", "app", "torchtitan", "accelerate"])
def test_every_layout_is_read_bit_for_bit(written: Any, layout: str) -> None:
    folder, (weights, states) = written(layout)
    found = read_dcp(folder)
    expected = {f"model/{name}": value for name, value in weights.items()}
    expected |= {f"optimizer/{n}/{s}": v for n, each in states.items() for s, v in each.items() if s != "step"}
    assert first_difference(dict(found.tensors()), expected) is None
    assert [(name, dtype, shape) for name, dtype, shape in found.entries()] == [
        (name, value.dtype, tuple(value.shape)) for name, value in found.tensors()
    ]
    assert found.state["counters"]["global_steps"] == found.state["optimizer"]["num_steps"] == STEPS
    decay = [group["weight_decay"] for group in found.state["optimizer"]["groups"]]
    assert {name: decay[index] for name, index in found.parameters.items()} == {
        name: 0.1 if weights[name].ndim > 1 else 0.0 for name in states
    }
    assert all(group["betas"] == (0.9, 0.999) for group in found.state["optimizer"]["groups"])


def test_what_is_not_model_or_optimizer_becomes_schedule_and_client_state(written: Any) -> None:
    assert read_dcp(written("app")[0]).state["client_state"] == {"epoch": 7, "seen": torch.tensor(5)}
    titan = read_dcp(written("torchtitan")[0])
    assert titan.folder.name == f"step-{STEPS}"
    assert titan.state["lr_scheduler"]["last_epoch"] == 0
    assert titan.state["client_state"]["train_state"] == {"step": torch.tensor(STEPS)}
    assert pickle.loads(titan.state["client_state"]["dataloader"]["dp_rank_2"]) == {"position": 2}
    accelerate = read_dcp(written("accelerate")[0])
    assert accelerate.state["lr_scheduler"]["last_epoch"] == 0
    assert accelerate.left_out == ["random_states_0.pkl"]
    older = read_dcp(written("torchtitan")[0], "step-2")
    assert (older.state["optimizer"], len(older.sources)) == (None, len(titan.model_names))


def assert_continues(found: Any, expected: Any) -> None:
    """Compare runs of two systems from one checkpoint.

    The first loss is computed from equal weights, and bit-equal. The others are equal up to rounding, because torch's
    fused kernel rounds the elements behind the last eight of a tensor in another way, and the tensors that the two
    systems step end at other elements.
    """
    for (losses, weights), (wanted, others) in zip(found, expected, strict=True):
        assert losses[0] == wanted[0]
        assert losses == pytest.approx(wanted, rel=1e-6)
        for name, weight in others.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("stage", "kind"), [(3, "AdamW"), more(1, "AdamW"), more(2, "SGD"), more(3, "Adagrad")])
def test_a_folder_of_three_ranks_continues_on_two(
    written: Any, tmp_path: Path, on_ranks: OnRanks, stage: int, kind: str
) -> None:
    folder, _ = written("nested", kind)
    import_dcp(folder, tmp_path / "out")
    num_steps = 1 if kind == "SGD" else STEPS  # torch's SGD does not count them
    found = on_ranks(2, continue_in_onefold, str(tmp_path / "out"), stage, kind, num_steps)
    assert_continues(found, on_ranks(2, continue_in_fsdp, str(folder), kind))


def save_in_onefold(folder: str, stage: int, kind: str) -> None:
    engine = engine_of(stage, kind)
    train(engine, STEPS, seed=0)
    engine.save_checkpoint(folder, tag="saved")


@pytest.mark.parametrize(("stage", "kind"), [(3, "AdamW"), more(2, "SGD"), more(1, "Adagrad")])
def test_an_exported_checkpoint_continues_in_fsdp(tmp_path: Path, on_ranks: OnRanks, stage: int, kind: str) -> None:
    on_ranks(3, save_in_onefold, str(tmp_path / "saved"), stage, kind)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "dcp"]) == 0
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [METADATA, "__0_0.distcp"]
    found = on_ranks(2, continue_in_fsdp, str(tmp_path / "out"), kind)
    assert_continues(found, on_ranks(2, continue_in_onefold, str(tmp_path / "saved"), stage, kind))


def test_an_export_is_imported_again_bit_for_bit(written: Any, tmp_path: Path) -> None:
    folder, _ = written("nested")
    import_dcp(folder, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "theirs", file_format="dcp")
    first, second = read_dcp(folder), read_dcp(tmp_path / "theirs")
    assert first_difference(dict(second.tensors()), dict(first.tensors())) is None
    assert second.parameters == first.parameters
    for before, after in zip(first.state["optimizer"]["groups"], second.state["optimizer"]["groups"], strict=True):
        assert before.items() <= after.items()


def test_an_export_leaves_no_half_of_a_folder(written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_dcp(written("nested")[0], tmp_path / "ours")
    (file,) = (tmp_path / "ours").rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\xff")
    with pytest.raises(ValueError, match="checksum"):
        export(tmp_path / "ours", tmp_path / "out", file_format="dcp")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ours"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other").touch()
    with pytest.raises(ExportError, match="is not empty"):
        export(tmp_path / "ours", tmp_path / "out", file_format="dcp")
    with pytest.raises(ExportError, match="max_shard_size"):
        export(tmp_path / "ours", tmp_path / "new", file_format="dcp", max_shard_size="1GB")


def save_alone(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


WEIGHT = torch.arange(6.0).view(2, 3)
ADAM = {"step": torch.tensor(3.0), "exp_avg": WEIGHT, "exp_avg_sq": WEIGHT}
GROUP = {"lr": 0.1, "params": ["a"]}


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_one_process_and_masters(tmp_path: Path) -> None:
    """A model whose 16-bit weights have masters, as `onefold.fsdp.offload` stores them."""
    state = {"a": {**ADAM, "master": WEIGHT + 0.125}}
    optimizer = {"state": state, "param_groups": [{**GROUP, "lr": torch.tensor(0.5)}]}
    found = read_dcp(save_alone({"model": {"a": WEIGHT.bfloat16()}, "optimizer": optimizer}, tmp_path / "saved"))
    assert first_difference(dict(found.tensors())["model/a"], WEIGHT + 0.125) is None
    assert found.state["optimizer"]["groups"] == [{"lr": 0.5}]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": 1}, "no weights. Its keys: a"),
        ({"model": {"a": WEIGHT, "b._extra_state": {1: 2}}}, "extra state"),
        ({"model": {"a": WEIGHT}, "optimizer": {"state": {0: ADAM}, "param_groups": [{"params": [0]}]}}, "names param"),
        ({"model": {"a": WEIGHT}, "optimizer": {"fp8": 1}}, "'optimizer.fp8' is not a known entry"),
        ({"model": {"a": WEIGHT}, "optimizer": {"state": {"b": ADAM}, "param_groups": [GROUP]}}, "states of 'b'"),
        (
            {"model": {"a": WEIGHT}, "optimizer": {"state": {"a": {"row": WEIGHT}}, "param_groups": [GROUP]}},
            "'optimizer.state.a.row' is a state of an optimizer that is not supported",
        ),
        (
            {"model": {"a": WEIGHT}, "optimizer": {"state": {"a": {"exp_avg": WEIGHT[0]}}, "param_groups": [GROUP]}},
            "does not have the shape",
        ),
        (
            {
                "model": {"a": WEIGHT, "b": WEIGHT},
                "optimizer": {
                    "state": {"a": ADAM, "b": {"step": 4}},
                    "param_groups": [{"params": ["a", "b"]}],
                },
            },
            r"different number of times: \[3, 4\]",
        ),
        ({"model": {"a": WEIGHT}, "optim": {"x": 1}, "optimizer": {"x": 1}}, "both optimizer and optim"),
        ({"model": {"a": WEIGHT}, "ema": {"a": torch.zeros(1025, 1025)}}, "Leave it out with --leave-out ema"),
        ({"model": {"a": WEIGHT}, "config": Path("x")}, "requests pathlib.*--leave-out config"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_unknown_contents_are_named(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    save_alone(state, tmp_path / "saved")
    with pytest.raises(ValueError, match=message):
        read_dcp(tmp_path / "saved")
    if "--leave-out" in message:
        key = message.rpartition(" ")[2]
        assert read_dcp(tmp_path / "saved", leave_out=[key]).left_out == [key]


def test_unknown_files_are_named(copied: Path, written: Any, tmp_path: Path) -> None:
    (copied / "weights.gguf").touch()
    with pytest.raises(ValueError, match=r"weights\.gguf"):
        read_dcp(copied)
    accelerate = Path(shutil.copytree(written("accelerate")[0], tmp_path / "accelerate"))
    (accelerate / "pytorch_model_fsdp_1").mkdir()
    with pytest.raises(ValueError, match="pytorch_model_fsdp_1 is not a known file"):
        read_dcp(accelerate)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \.metadata"):
        read_dcp(tmp_path / "empty")
    with pytest.raises(ValueError, match="no checkpoint 'step-9'"):
        read_dcp(written("torchtitan")[0], "step-9")
    (accelerate / "pytorch_model_fsdp_1").rmdir()
    with pytest.raises(ValueError, match="several checkpoints: accelerate, saved"):
        read_dcp(tmp_path)


def test_the_command_imports(written: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["import-dcp", str(written("accelerate")[0]), str(out)]) == 0
    assert "step 3, 18 weights" in (shown := capsys.readouterr().out)
    assert "left out: random_states_0.pkl" in shown
    assert main(["ckpt", "inspect", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["writer"] == "imported from torch.distributed.checkpoint, 6 files"
    assert main(["ckpt", "verify", str(out)]) == 0
    assert main(["import-dcp", str(tmp_path), str(out)]) != 0
    folder = written("nested")[0]
    assert main(["import-dcp", str(folder), str(folder.parent)]) != 0
    assert "contains files of torch.distributed.checkpoint" in capsys.readouterr().err
    assert main(["export", str(written("nested")[0]), str(tmp_path / "weights")]) != 0
    assert "onefold import-dcp" in capsys.readouterr().err


# -- hostile files -----------------------------------------------------------------------------------------------------


class Command:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_a_malicious_metadata_is_refused(copied: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    metadata = FileSystemReader(copied).read_metadata()
    metadata.planner_data["model.embed.weight"] = Command(proof)
    for protocol in range(2, 6):
        (copied / METADATA).write_bytes(pickle.dumps(metadata, protocol))
        with pytest.raises(RefusedPickle, match=r"requests posix\.system.*nothing was executed"):
            DcpFolder.open(copied)
    assert not proof.exists()
    pickle.loads((copied / METADATA).read_bytes())  # as torch reads it
    assert proof.exists()


@pytest.mark.filterwarnings("ignore")
def test_a_malicious_value_is_refused(tmp_path: Path) -> None:
    state = {"model": {"a": WEIGHT}, "epoch": Command(tmp_path / "executed")}
    with pytest.raises(ValueError, match=r"requests posix\.system.*nothing was executed"):
        read_dcp(save_alone(state, tmp_path / "saved"))
    assert not (tmp_path / "executed").exists()


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Write changed metadata as torch would."""
    metadata = FileSystemReader(folder).read_metadata()
    edit(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def first_chunk(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.embed.weight"].chunks[0]


def first_place(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "model.embed.weight")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: setattr(first_place(m), "relative_path", "../secret"), "not a file of the folder"),
        (lambda m: setattr(first_place(m), "relative_path", "/etc/passwd"), "not a file of the folder"),
        (lambda m: setattr(first_place(m), "offset", -1), "no range of bytes"),
        (lambda m: setattr(first_place(m), "length", 2**60), "truncated"),
        (lambda m: setattr(first_place(m), "offset", 1), "not a zip file"),
        (lambda m: setattr(first_place(m), "transform_descriptors", ["zstd"]), "compressed or encrypted"),
        (lambda m: setattr(first_chunk(m), "sizes", torch.Size([99, 21])), "outside of"),
        (lambda m: setattr(first_chunk(m), "sizes", torch.Size([1, 21])), r"is not a torch.float32 \[1, 21\]"),
        (lambda m: setattr(first_chunk(m), "offsets", torch.Size([2, 0])), "is not stored"),
        (lambda m: m.state_dict_metadata["model.embed.weight"].chunks.pop(), "incomplete"),
        (lambda m: m.state_dict_metadata["model.embed.weight"].chunks.append(first_chunk(m)), "overlap"),
        (lambda m: setattr(m.state_dict_metadata["model.embed.weight"], "size", torch.Size([2**40, 2**20])), "larger"),
        (lambda m: m.storage_data.clear(), "not written by"),
        (lambda m: setattr(m, "state_dict_metadata", None), "not in the format"),
        (lambda m: m.planner_data.update({"model.embed.weight": ("model", "head.weight")}), "no path of its own"),
    ],
)  # fmt: skip
def test_damaged_metadata_is_refused(copied: Path, edit: Callable[[Any], None], message: str) -> None:
    change(copied, edit)
    with pytest.raises(ValueError, match=message):
        list(read_dcp(copied).tensors())


def test_truncated_files_are_refused(copied: Path) -> None:
    file = copied / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"__1_0\.distcp: truncated"):
        read_dcp(copied)
    content = (copied / METADATA).read_bytes()
    for length in (0, 1, 100, len(content) - 1):
        (copied / METADATA).write_bytes(content[:length])
        with pytest.raises(RefusedPickle):
            read_dcp(copied)
