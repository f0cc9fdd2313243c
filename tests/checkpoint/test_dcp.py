"""Folders of torch.distributed.checkpoint: FSDP2's continue in onefold and onefold's in FSDP2; pickles never run."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Net, batches, config, first_difference, more, net, rank, start, train, weights_of
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

from onefold.checkpoint.dcp.dcp_checkpoint import ACCELERATE, read_dcp
from onefold.checkpoint.dcp.dcp_metadata import METADATA, DcpFolder
from onefold.checkpoint.dcp.dcp_writer import PARTIAL
from onefold.checkpoint.deepspeed.torch_files import RefusedPickle
from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.files import CheckpointError
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
        save_as_accelerate(model, optimizer, folder)
        if rank() == 0:
            torch.save(schedule, f"{folder}/scheduler.bin")
            Path(folder, "random_states_0.pkl").write_bytes(pickle.dumps("never read"))
            Path(folder, "trainer_state.json").write_text("{}")
    found = state["optimizer"]["state"]
    return whole(state["model"]), {name: whole(values) for name, values in found.items()}


def save_as_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Call Accelerate's own functions. Its Accelerator uses FSDP on GPUs only."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(
        process_index=rank(), num_processes=dist.get_world_size(), is_fsdp2=True, wait_for_everyone=dist.barrier
    )
    PartialState(cpu=True)  # its log needs it
    try:
        save_fsdp_model(plugin, accelerator, model, folder)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    finally:
        PartialState._reset_state()


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
    """Return a function that saves in a layout on three ranks of FSDP2, once, and returns folder and tensors."""
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
    assert accelerate.left_out == ["random_states_0.pkl", "trainer_state.json"]
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
    to_dcp = ["export", str(tmp_path / "ours"), str(tmp_path / "new"), "--format", "dcp"]
    assert main([*to_dcp, "--max-shard-size", "5GB"]) == 2
    with pytest.raises(ExportError, match="max_shard_size"):
        export(tmp_path / "ours", tmp_path / "new", file_format="dcp", max_shard_size="1GB")


@pytest.mark.parametrize("out", [".", "new", "new/..", "../link"])
def test_an_export_to_any_empty_folder(written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    """Export by any path, also where a killed export has left files."""
    import_dcp(written("nested")[0], tmp_path / "ours")
    (tmp_path / "work" / f"killed{PARTIAL}").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    found = export(tmp_path / "ours", out, file_format="dcp")
    assert list(found.files) == sorted(Path(out).resolve().iterdir())
    assert read_dcp(out).model_names


@pytest.mark.filterwarnings("ignore")
def test_states_without_the_shape_of_their_parameter_are_not_exported(tmp_path: Path, on_ranks: OnRanks) -> None:
    on_ranks(1, save_shampoo, str(tmp_path / "saved"))
    with pytest.raises(ExportError, match=r"states of Shampoo \(.*safetensors or bin"):
        export(tmp_path / "saved", tmp_path / "out", file_format="dcp")
    assert not (tmp_path / "out").exists()


def save_shampoo(folder: str) -> None:
    engine = start(net(), config(2, optimizer={"type": "Shampoo", "params": {"lr": 1e-2}}))
    train(engine, 1, seed=0)
    engine.save_checkpoint(folder, tag="saved")


def save_alone(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


WEIGHT = torch.arange(6.0).view(2, 3)
ADAM = {"step": torch.tensor(3.0), "exp_avg": WEIGHT, "exp_avg_sq": WEIGHT}
GROUP = {"lr": 0.1, "amsgrad": False, "params": ["a"]}


def with_groups(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"state": {"a": ADAM}, "param_groups": [{**GROUP, **group} for group in groups]}}


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_one_process_and_masters(tmp_path: Path) -> None:
    """A model whose 16-bit weights have masters, as `onefold.fsdp.offload` stores them."""
    state = {"a": {**ADAM, "master": WEIGHT + 0.125}}
    optimizer = {"state": state, "param_groups": [{**GROUP, "lr": torch.tensor(0.5)}]}
    found = read_dcp(save_alone({"model": {"a": WEIGHT.bfloat16()}, "optimizer": optimizer}, tmp_path / "saved"))
    assert first_difference(dict(found.tensors())["model/a"], WEIGHT + 0.125) is None
    assert found.state["optimizer"]["groups"] == [{"lr": 0.5, "amsgrad": False}]


@pytest.mark.filterwarnings("ignore")
def test_tied_weights_load_into_a_tied_model(tmp_path: Path, on_ranks: OnRanks) -> None:
    """DCP stores a tied weight under each of its names, and its states under one."""
    torch.manual_seed(5)
    model = Net(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(*(torch.zeros(1, 3, dtype=torch.long),) * 2).backward()
    optimizer.step()
    state = state_of(model, optimizer)
    assert {"embed.weight", "head.weight"} <= state["model"].keys()
    import_dcp(save_alone(state, tmp_path / "saved"), tmp_path / "out")
    (loaded,) = on_ranks(1, load_tied, str(tmp_path / "out"), str(tmp_path / "saved"))
    assert first_difference(loaded, dict(model.state_dict())) is None


def load_tied(folder: str, source: str) -> dict[str, torch.Tensor]:
    engine = start(net(seed=8, tied=True), config(3))
    with pytest.raises(ValueError, match=f"Run onefold import-dcp {source} OUT"):
        engine.load_checkpoint(source)
    assert engine.load_checkpoint(folder)[0] is not None
    return weights_of(engine.module)


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
                    "param_groups": [{**GROUP, "params": ["a", "b"]}],
                },
            },
            r"different number of times: \[3, 4\]",
        ),
        ({"model": {"a": WEIGHT}, "optim": {"x": 1}, "optimizer": {"x": 1}}, "both optimizer and optim"),
        ({"model": {"a": WEIGHT}, "scheduler": {"x": 1}, "lr_scheduler": {"x": 1}}, "both lr_scheduler and scheduler"),
        ({"model": {"a": WEIGHT}, "app": {"model": {"a": WEIGHT}}}, "'model' is inside of 'app'.*--leave-out app"),
        ({"epoch": 1, "app": {"model": {"a": WEIGHT}, "epoch": 2}}, "'epoch' is inside of 'app'"),
        ({"model": WEIGHT}, "'model' is one value"),
        ({"a": WEIGHT, "step": torch.tensor(5)}, "'step' is a scalar.*--leave-out step"),
        ({"model": {"a": WEIGHT}, **with_groups({"lr": torch.ones(3)})}, "'lr' of parameter group 0 is a tensor"),
        ({"model": {"a": WEIGHT}, **with_groups({}, {})}, "'a' is in several parameter groups"),
        (
            {"model": {"a": WEIGHT}, "lr_scheduler": {"_schedulers": [{"a": 1}, {}, {"a": 2}]}},
            r"lr_scheduler\._schedulers is an incomplete list",
        ),
        (
            {"model": {"a": WEIGHT}, "lr_scheduler": {"base_lrs": [0.1, 0.1], "lr_lambdas": [{"a": 1}, {}]}},
            r"lr_scheduler\.lr_lambdas is incomplete",
        ),
        ({"model": {"a": WEIGHT}, "lr_scheduler": {"drops": {9: 0.1}}}, r"lr_scheduler\.drops has keys that may have"),
        ({"model": {"a": torch.zeros(2, dtype=torch.complex128)}}, r"'model\.a' is of torch\.complex128"),
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


def fraction(epoch: int, *, power: float = 1.0) -> float:
    return float((1 / (1 + epoch)) ** power)


class Fraction:
    """A callable with attributes, which torch's schedules save."""

    def __init__(self) -> None:
        self.power = 0.5

    def __call__(self, epoch: int) -> float:
        return fraction(int(epoch), power=self.power)


LR = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: LR.ChainedScheduler([LR.LinearLR(o), LR.ExponentialLR(o, 0.9)]),
    "ConstantLR": LR.ConstantLR,
    "CosineAnnealingLR": lambda o: LR.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: LR.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: LR.CyclicLR(o, 0.1, 1.0, 3),
    "CyclicLR of a callable": lambda o: LR.CyclicLR(o, 0.1, 1.0, 3, scale_fn=functools.partial(fraction)),
    "ExponentialLR": lambda o: LR.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: LR.LambdaLR(o, lambda epoch: fraction(epoch)),
    "LambdaLR of a partial": lambda o: LR.LambdaLR(o, functools.partial(fraction, power=2.0)),
    "LambdaLR of a callable": lambda o: LR.LambdaLR(o, Fraction()),
    "LinearLR": LR.LinearLR,
    "MultiStepLR": lambda o: LR.MultiStepLR(o, [3, 6, 6]),
    "MultiplicativeLR": lambda o: LR.MultiplicativeLR(o, functools.partial(fraction)),
    "OneCycleLR": lambda o: LR.OneCycleLR(o, 1.0, 20),
    "PolynomialLR": lambda o: LR.PolynomialLR(o, 9),
    "ReduceLROnPlateau": lambda o: LR.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: LR.SequentialLR(o, [LR.LambdaLR(o, Fraction()), LR.MultiStepLR(o, [2, 4])], [4]),
    "StepLR": lambda o: LR.StepLR(o, 2),
}


def test_every_schedule_of_torch_is_listed() -> None:
    found = {name for name, each in vars(LR).items() if isinstance(each, type) and issubclass(each, LR.LRScheduler)}
    assert found - SCHEDULES.keys() == {"LRScheduler", "_LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore")
def test_schedules_continue(tmp_path: Path, name: str) -> None:
    """Compare the state, and the rates of seven more steps, with those of a schedule that was not saved."""

    def make() -> tuple[torch.optim.Optimizer, Any]:
        parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
        optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=1.0, momentum=0.9)
        return optimizer, SCHEDULES[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found += [group["lr"] for group in optimizer.param_groups]
        return found

    optimizer, schedule = make()
    rates(optimizer, schedule, 2)
    saved = save_alone({"model": {"a": WEIGHT}, "lr_scheduler": schedule.state_dict()}, tmp_path / "saved")
    other, loaded = make()
    state = plain_data.decode(*plain_data.encode(read_dcp(saved).state["lr_scheduler"], "state"))
    loaded.load_state_dict(copy.deepcopy(state))
    other.load_state_dict(optimizer.state_dict())
    assert state == schedule.state_dict()
    assert rates(other, loaded, 7) == rates(optimizer, schedule, 7)


@pytest.mark.parametrize(("name", "message"), [
    ("RAdam", "AdamW, whose groups have 'amsgrad'.*RAdam"), ("SparseAdam", "AdamW, whose"), ("NAdam", "AdamW, whose"),
    ("Muon", "SGD, whose groups have 'dampening'.*Muon"), ("Adamax", "exp_inf"), ("RMSprop", "square_avg"),
    ("Adafactor", "_var"), ("Adam", ""), ("SGD", ""), ("Adagrad", ""),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_states_of_other_optimizers_are_refused(tmp_path: Path, name: str, message: str) -> None:
    parameter = nn.Parameter(WEIGHT.clone())
    optimizer = getattr(torch.optim, name)([parameter], **{"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})})
    parameter.grad = torch.ones(2, 3).to_sparse() if name == "SparseAdam" else torch.ones(2, 3)
    optimizer.step()
    groups = [{**optimizer.param_groups[0], "params": ["a"]}]
    state = {"model": {"a": WEIGHT}, "optimizer": {"state": {"a": optimizer.state[parameter]}, "param_groups": groups}}
    save_alone(state, tmp_path / "saved")
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        read_dcp(tmp_path / "saved")


@pytest.mark.filterwarnings("ignore")
def test_equal_groups_stay_apart_and_flattened_ones_are_joined(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": WEIGHT.clone(), "b": WEIGHT.clone(), "c": WEIGHT.clone()})
    groups = [{"params": [model["a"]]}, {"params": [model["b"]]}, {"params": [model["c"]], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    sum(each.sum() for each in model.values()).backward()
    optimizer.step()
    for options, expected in ((None, {"a": 0, "b": 1, "c": 2}), (FLAT, {"a": 0, "b": 0, "c": 1})):
        folder = tmp_path / str(len(set(expected.values())))
        save_alone(state_of(model, optimizer, options), folder / "saved")
        assert read_dcp(folder / "saved").parameters == expected
        import_dcp(folder / "saved", folder / "ours")
        export(folder / "ours", folder / "theirs", file_format="dcp")
        if options is None:
            optimizer.param_groups[0]["initial_lr"] = 7.0
            for group in optimizer.param_groups[1:]:
                group["initial_lr"] = 7.0
            state = state_of(model, optimizer)
            dcp.load(state, checkpoint_id=folder / "theirs", no_dist=True)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            found = [(group["lr"], group["initial_lr"], group["momentum"]) for group in optimizer.param_groups]
            assert found == [(0.1, 0.1, 0.9), (0.1, 0.1, 0.9), (0.5, 0.5, 0.9)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16])
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_newer_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(6).view(2, 3).to(dtype)
    found = dict(read_dcp(save_alone({"model": {"a": value}}, tmp_path / "saved")).tensors())["model/a"]
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.filterwarnings("ignore")
def test_an_incomplete_newest_step_is_named(tmp_path: Path) -> None:
    for step in (9, 10):
        save_alone({"model": {"a": WEIGHT}}, tmp_path / f"step-{step}")
    assert read_dcp(tmp_path).folder.name == "step-10"
    (tmp_path / "step-10" / METADATA).unlink()
    with pytest.raises(ValueError, match=r"step-10 is the newest step, but has no \.metadata.*--tag: step-9"):
        read_dcp(tmp_path)
    assert read_dcp(tmp_path, "step-9").folder.name == "step-9"


@pytest.mark.filterwarnings("ignore")
def test_an_import_neither_writes_into_the_source_nor_over_a_checkpoint(tmp_path: Path, written: Any) -> None:
    folder = Path(shutil.copytree(written("accelerate")[0], tmp_path / "saved"))
    before = sorted(folder.rglob("*"))
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, folder / "out", tmp_path, tmp_path / "link" / "out"):
        with pytest.raises(CheckpointError, match="is in the checkpoint"):
            import_dcp(folder, out)
    assert sorted(folder.rglob("*")) == before
    import_dcp(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is a checkpoint already.*onefold ckpt rm"):
        import_dcp(folder, tmp_path / "out")


def test_a_failed_import_leaves_no_folder(copied: Path, tmp_path: Path) -> None:
    change(copied, lambda m: m.state_dict_metadata["model.embed.weight"].chunks.pop())
    with pytest.raises(ValueError, match="incomplete"):
        import_dcp(copied, tmp_path / "out")
    (tmp_path / "kept").mkdir()
    with pytest.raises(ValueError, match="incomplete"):
        import_dcp(copied, tmp_path / "kept")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept", "saved"]
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize(("position", "warns"), [(12, True), (3, False), (13, False)])
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_that_accelerate_advanced_per_process_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, position: int, warns: bool
) -> None:
    save_alone({"model": {"a": WEIGHT}}, tmp_path / "saved" / ACCELERATE[0])
    save_alone(with_groups({}), tmp_path / "saved" / ACCELERATE[1])
    torch.save({"last_epoch": position}, tmp_path / "saved" / "scheduler.bin")
    assert read_dcp(tmp_path / "saved").state["lr_scheduler"] == {"last_epoch": position}
    assert ("the schedule is at step 12 after 3 steps" in caplog.text) == warns


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
    shutil.copytree(written("nested")[0], tmp_path / "copies" / "saved")
    assert main(["import-dcp", str(written("nested")[0]), str(tmp_path / "copies")]) != 0
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
        (lambda m: vars(first_place(m)).update(offset=first_place(m).offset + 1, length=9), "not a zip file"),
        (lambda m: setattr(first_place(m), "offset", 1), "share bytes"),
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
