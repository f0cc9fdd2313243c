"""DeepSpeed's checkpoints: read bit for bit, at any number of ranks, and never run."""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering

from onefold.checkpoint.deepspeed.torch_files import RefusedPickle, StandIn, read_torch_file
from onefold.checkpoint.deepspeed.zero_checkpoint import DeepSpeedCheckpoint, read_checkpoint
from onefold.checkpoint.format.safetensors_files import SafetensorsReader
from onefold.checkpoint.tools.import_checkpoint import import_deepspeed
from onefold.optim.loss_scale import DynamicLossScale
from onefold.tools.cli.main import main

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
SPEC = importlib.util.spec_from_file_location("deepspeed_fixture_model", FIXTURES / "model.py")
fixture = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = fixture
SPEC.loader.exec_module(fixture)

every_case = pytest.mark.parametrize("name", fixture.CASES)


def expected_tensors(name: str) -> dict[str, torch.Tensor]:
    found = {}
    with SafetensorsReader.open(FIXTURES / name / "expected.safetensors") as weights:
        for entry_name in weights.names:
            entry = weights.entry(entry_name)
            found[entry_name] = torch.empty(entry.shape, dtype=entry.dtype)
            weights.read(entry_name, 0, entry.numel, found[entry_name].view(-1))
    return found


def assert_holds(checkpoint: DeepSpeedCheckpoint, expected: dict[str, torch.Tensor]) -> None:
    found = dict(checkpoint.tensors())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


# What DeepSpeed wrote


@every_case
def test_holds_what_the_live_engine_held(name: str) -> None:
    checkpoint = read_checkpoint(FIXTURES / name)
    assert_holds(checkpoint, expected_tensors(name))
    assert checkpoint.stage == fixture.CASES[name].config["zero_optimization"]["stage"]
    assert checkpoint.world_size == fixture.CASES[name].world_size


@every_case
def test_entries_are_known_without_assembling(name: str) -> None:
    checkpoint = read_checkpoint(FIXTURES / name)
    tensors = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in checkpoint.tensors()]
    assert list(checkpoint.entries()) == tensors


@every_case
def test_weights_fit_the_model(name: str) -> None:
    case = fixture.CASES[name]
    model, checkpoint = fixture.build(case), read_checkpoint(FIXTURES / name)
    weights = {name.removeprefix("model/"): t for name, t in checkpoint.tensors() if name.startswith("model/")}
    assert list(weights) == [name for name in model.state_dict() if name not in checkpoint.aliases]
    weights |= {alias: weights[stored] for alias, stored in checkpoint.aliases.items()}
    model.load_state_dict(weights)
    assert checkpoint.aliases == ({"head.weight": "embed.weight"} if case.tied else {})


@every_case
def test_parameters_know_their_group(name: str) -> None:
    case = fixture.CASES[name]
    model, checkpoint = fixture.build(case), read_checkpoint(FIXTURES / name)
    group_of = {
        id(parameter): number
        for number, group in enumerate(fixture.parameter_groups(case, model))
        for parameter in group["params"]
    }
    assert checkpoint.parameters == {name: group_of.get(id(value)) for name, value in model.named_parameters()}


@every_case
def test_counters_schedule_and_user_state(name: str) -> None:
    state = read_checkpoint(FIXTURES / name).state
    saved = json.loads((FIXTURES / name / "continued.json").read_text())["saved"]
    assert state["counters"] == {
        key: saved[key] for key in ("global_steps", "global_samples", "skipped_steps", "micro_steps")
    }
    assert state["lr_scheduler"] == saved["scheduler"]
    assert state["client_state"] == fixture.CLIENT_STATE
    assert state["optimizer"]["name"] == fixture.CASES[name].config["optimizer"]["type"]
    assert state["optimizer"]["num_steps"] == saved["global_steps"] - saved["skipped_steps"]
    assert (state["loss_scale"] or {"value": 1.0})["value"] == saved["loss_scale"]
    if "elastic" not in name:  # which does not save hyperparameters
        assert [group["lr"] for group in state["optimizer"]["groups"]] == saved["learning_rates"]


def test_groups_keep_their_hyperparameters() -> None:
    for name in ("stage2_fp16", "stage3_bf16", "stage1_bf16_accumulates_fp32"):
        groups = read_checkpoint(FIXTURES / name).state["optimizer"]["groups"]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert all(group["betas"] == (0.9, 0.95) and "params" not in group for group in groups)


def test_dynamic_loss_scale_is_ours() -> None:
    state = read_checkpoint(FIXTURES / "stage2_fp16").state["loss_scale"]
    scale = DynamicLossScale()
    scale.load_state_dict(state)
    assert scale.state_dict() == state
    assert (scale.remaining_hysteresis, scale.iteration, scale.last_overflow_iteration) == (1, 7, 5)


def test_a_tag_or_its_own_folder_will_do(tmp_path: Path) -> None:
    folder = FIXTURES / "stage3_fp32"
    for found in (read_checkpoint(folder, "global_step7"), read_checkpoint(folder / "global_step7")):
        assert found.folder == folder / "global_step7"
    with pytest.raises(ValueError, match="no checkpoint 'global_step8'"):
        read_checkpoint(folder, "global_step8")
    with pytest.raises(ValueError, match="file `latest`"):
        read_checkpoint(tmp_path)
    for elsewhere in ("..", "../stage3_fp32", ""):
        (tmp_path / "latest").write_text(elsewhere)
        with pytest.raises(ValueError, match="no checkpoint"):
            read_checkpoint(tmp_path)


# Other numbers of ranks than DeepSpeed could be run with here


def slices(tensor: torch.Tensor, world_size: int, multiple: int) -> list[torch.Tensor]:
    """Flat, padded to a multiple, and cut over the ranks."""
    flat = tensor.reshape(-1)
    padding = torch.full((-flat.numel() % multiple,), torch.nan, dtype=flat.dtype)
    return list(torch.cat([flat, padding]).view(world_size, -1))


def cut(
    folder: Path, stage: int, world_size: int, trained: list[dict[str, torch.Tensor]], frozen: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A checkpoint as the note in deepspeed.py tells; returns what it holds. Each moment is its master, doubled."""

    def partitions(group: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        if stage < 3:
            return slices(torch.cat([tensor.reshape(-1) for tensor in group.values()]), world_size, 2 * world_size)
        by_name = [slices(tensor, world_size, world_size) for tensor in group.values()]
        return [torch.cat(of_rank) for of_rank in zip(*by_name, strict=True)]

    everything = {name: tensor for part in (*trained, frozen) for name, tensor in part.items()}
    model = {
        "module": {name: tensor.new_empty(0) if stage == 3 else tensor for name, tensor in everything.items()},
        "buffer_names": [],
        "param_shapes": [{name: tensor.shape for name, tensor in group.items()} for group in trained],
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
    } | dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 0)
    folder.mkdir()
    for rank in range(world_size):
        vectors = [partitions(group)[rank] for group in trained]
        numels = [sum(tensor.numel() for tensor in group.values()) for group in trained]
        lean = [max(0, min(len(v), numel - rank * len(v))) for v, numel in zip(vectors, numels, strict=True)]
        states = {number: {"step": 1, "exp_avg": 2 * vector} for number, vector in enumerate(vectors)}
        base = {"state": states, "param_groups": [{"params": [number]} for number in states]}
        optimizer = {"zero_stage": stage, "partition_count": world_size}
        if stage == 3:
            optimizer |= {"optimizer_state_dict": base, "fp32_flat_groups": vectors}
        else:
            masters = [vector[:length] for vector, length in zip(vectors, lean, strict=True)]
            paddings = [len(vector) - length for vector, length in zip(vectors, lean, strict=True)]
            optimizer |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
            optimizer |= {"group_paddings": paddings}
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            cut_over = world_size if stage == 3 else 1
            model["frozen_param_fragments"] = {name: slices(t, cut_over, cut_over)[rank] for name, t in frozen.items()}
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")
    expected = {f"model/{name}": tensor for name, tensor in everything.items()}
    return expected | {f"optimizer/{name}/exp_avg": 2 * tensor for group in trained for name, tensor in group.items()}


@pytest.mark.parametrize("world_size", [1, 3, 8, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reads_any_number_of_ranks(tmp_path: Path, stage: int, world_size: int) -> None:
    trained = [{"a": torch.randn(7, 5), "b.c": torch.randn(1), "d": torch.randn(())}, {"e": torch.randn(3)}]
    frozen = {"f": torch.randn(5, 3).bfloat16(), "empty": torch.empty(0, 4)}
    expected = cut(tmp_path / "saved", stage, world_size, trained, frozen)
    checkpoint = read_checkpoint(tmp_path / "saved")
    assert_holds(checkpoint, expected)
    assert checkpoint.parameters == {"a": 0, "b.c": 0, "d": 0, "e": 1, "f": None, "empty": None}


# What is not read


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "stage3_fp32" / "global_step7", tmp_path / "saved"))


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The same file with other contents; records of classes become what `read_checkpoint` takes as well."""
    found = read_torch_file(file)
    if "optimizer_state_dict" in found:
        found["optimizer_state_dict"] |= {"zero_stage": 3, "loss_scaler": None}
    change(found)
    torch.save(found, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)  # what was read is still mapped


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("mp_rank_01_model_states.pt", "model parallelism is not supported"),
        ("zero_pp_rank_0_mp_rank_03_optim_states.pt", "model parallelism is not supported"),
        ("layer_00-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", r"too many: \[\(0, 1\)\]"),
        ("expert_1_mp_rank_00_model_states.pt", "files of experts of all layers"),
        ("zero", "universal format"),
        ("offloaded_tensors", "NVMe"),
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "ranks 2 belong to another run"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "files of two checkpoints"),
        ("mp_rank_00_model_states.pt", "files of two checkpoints"),
    ],
)
def test_other_layouts_are_named(saved: Path, extra: str, message: str) -> None:
    (saved / extra).touch()
    with pytest.raises(ValueError, match=message):
        read_checkpoint(saved)


def test_missing_ranks_are_named(tmp_path: Path, saved: Path) -> None:
    trained = [{"a": torch.randn(9)}]
    cut(tmp_path / "cut", 2, 5, trained, {})
    for rank in (0, 3):
        (tmp_path / "cut" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"5 \*_optim_states.pt, but those of ranks 0, 3 are missing"):
        read_checkpoint(tmp_path / "cut")
    (saved / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"2 \*_model_states.pt, but those of ranks 1 are missing"):
        read_checkpoint(saved)
    for file in saved.glob("*_optim_states.pt"):
        file.unlink()
    (tmp_path / "latest").write_text("saved")
    with pytest.raises(ValueError, match=r"no \*_optim_states.pt"):
        read_checkpoint(tmp_path)


def optimizer_changes(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found["optimizer_state_dict"].update(values)


def state_changes(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].update(values)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("optim", optimizer_changes(zero_stage=0), "stage 0 is not supported"),
        ("optim", optimizer_changes(partition_count=10**12), "not a number of ranks"),
        ("optim", optimizer_changes(fp32_flat_groups=[torch.zeros(579)]), "579"),
        ("optim", optimizer_changes(fp32_flat_groups=None), "not in DeepSpeed's format"),
        ("optim", state_changes(step=torch.tensor(8.0)), r"different steps: \[7, 8\]"),
        ("optim", state_changes(factors=torch.zeros(3)), "'factors' does not have one number for each of 580 elements"),
        ("optim", state_changes(exp_avg=None), "'exp_avg' does not have one number"),
        ("model", lambda found: found.update(mp_world_size=2), "only data parallelism"),
        ("model", lambda found: found.update(ds_autoep_layers={"a": 1}), "AutoEP"),
        ("model", lambda found: found.update(num_experts=[2]), r"\[2\], but there are 0 files of experts"),
        ("model", lambda found: found["module"].update({"up._extra_state": torch.zeros(1)}), "extra state"),
        ("model", lambda found: found["module"].update(unknown=torch.empty(0)), "'unknown' is incomplete"),
        ("model", lambda found: found["frozen_param_fragments"].pop("adapter.bias"), "adapter.bias"),
        ("model", lambda found: found["module"].update({"adapter.bias": torch.empty(0).half()}), "quantized"),
        ("model", lambda found: found["param_shapes"][0].update({"up.bias": (31,)}), "parameters 581"),
        ("model", lambda found: found["param_shapes"][0].update({"up.bias": (-29,)}), "must have a shape"),
        ("model", lambda found: found.pop("module"), "not in DeepSpeed's format: KeyError"),
    ],
)
def test_contents_that_do_not_fit_are_named(saved: Path, kind: str, change: Any, message: str) -> None:
    rewrite(saved / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt", change)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(saved)


def test_states_before_the_first_step(saved: Path) -> None:
    for rank in (0, 1):
        empty = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}
        rewrite(
            saved / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", optimizer_changes(optimizer_state_dict=empty)
        )
        rewrite(saved / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", lambda found: found.update(skipped_steps=7))
    checkpoint = read_checkpoint(saved)
    assert not [name for name, *_ in checkpoint.entries() if name.startswith("optimizer/")]
    assert checkpoint.state["optimizer"] == {"name": "AdamW", "num_steps": 0, "groups": [{"lr": 0.1}]}


# Files of torch.save, honest and not


def test_plain_data_and_tensors_come_back(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.randn(3, 4).t(),
        "view": torch.arange(10)[3:7],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "bits": torch.randn(5).bfloat16(),
        "complex": torch.randn(2, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    plain = {
        "numbers": [0, 1, -5, 300, 70_000, 2**40, -(2**100), 1.5, float("inf"), True, None, 1 + 2j],
        "text": ("", "plain", "\u00e4\u20ac"),
        "bytes": [b"", b"\x00\xff", bytearray(), bytearray(b"\xff")],
        "sets": [{1, 2}, frozenset("ab"), set()],
        "ordered": collections.OrderedDict([(1, 2), ("b", [])]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, (2,)], 5),
        "namespace": argparse.Namespace(lr=0.1, layers=[1, 2]),
        ("a", 1): torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "numpy": [np.float64(1.5), np.int64(-3), np.bool_(True), np.str_("x")],
    }
    arrays = {"matrix": np.arange(6).reshape(2, 3).T, "text": np.array(["ab", "c"]), "random": np.random.get_state()[1]}
    torch.save({"tensors": tensors, "plain": plain, "arrays": arrays}, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt")
    # A Namespace and a defaultdict become dicts, a deque a list.
    assert found["plain"] == plain | {"namespace": vars(plain["namespace"]), "deque": [*plain["deque"]]}
    assert type(found["plain"]["default"]) is dict
    for name, tensor in tensors.items():
        assert found["tensors"][name].dtype is tensor.dtype
        assert torch.equal(found["tensors"][name], tensor)
        assert not found["tensors"][name].requires_grad
    for name, array in arrays.items():
        assert found["arrays"][name].dtype == array.dtype
        assert np.array_equal(found["arrays"][name], array)


def test_tensors_are_views_of_a_file_that_never_changes(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    torch.save({"a": weight, "b": weight[10:20]}, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    found = read_torch_file(tmp_path / "a.pt")
    assert found["a"].data_ptr() + 40 == found["b"].data_ptr()  # one storage, held once
    found["a"].zero_()
    assert (tmp_path / "a.pt").read_bytes() == before
    assert torch.equal(read_torch_file(tmp_path / "a.pt")["a"], weight)


def write(path: Path, program: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A file as torch.save lays it out, with any pickle in it."""
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.write_record("data.pkl", program, len(program))
    for key, data in (storages or {}).items():
        writer.write_record(f"data/{key}", data, len(data))
    writer.write_end_of_file()
    return path


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """What is called in a pickle must look like it."""


class Stranger:
    def __setstate__(self, state: Any) -> None:
        Path(state["marker"]).touch()


def attacks(marker: Path) -> dict[str, Any]:
    """Objects whose pickles make the marker, each in its own way, or would go on to."""
    touch, code = f"touch {marker}", f"open({str(marker)!r}, 'w')"
    nested = pickle.dumps(Calls(os.system, touch), 2)
    stranger = Stranger()
    stranger.marker = str(marker)
    return {
        "os.system": Calls(os.system, touch),
        "eval": Calls(eval, code),
        "exec": Calls(exec, code),
        "import": Calls(__import__, "os"),
        "Popen": Calls(subprocess.Popen, ["touch", str(marker)]),
        "getattr": Calls(getattr, Path, "touch"),
        "getattr of a dict": Calls(getattr, {}, "update"),
        "partial": Calls(functools.partial, os.system, touch),
        "a result called": Calls(Calls(getattr, Path, "touch"), str(marker)),
        "a class": stranger,
        "a class called": Calls(Path, str(marker)),
        "pickle.loads": Calls(pickle.loads, nested),
        "a storage's pickle": Calls(torch.storage._load_from_bytes, nested),
        "torch.load": Calls(torch.load, str(marker)),
        "numpy.load": Calls(np.load, str(marker)),
        "a default": collections.defaultdict(Path),
        "map": Calls(map, os.system, [touch]),
        "inside a tensor's attributes": Calls(
            torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (touch,), {}
        ),
        "inside a parameter": Calls(torch._utils._rebuild_parameter, Calls(os.system, touch), True, {}),
        "a state": Calls(collections.OrderedDict, state={"a": Calls(os.system, touch)}),
        "an array of objects": np.array([Calls(os.system, touch)], dtype=object),
        "a codec": Calls(importlib.import_module("_codecs").encode, "Y29kZQ==", "base64"),
        "a decoder": Calls(importlib.import_module("_codecs").decode, b"Y29kZQ==", "base64"),
    }


@pytest.mark.parametrize("how", attacks(Path("marker")))
def test_nothing_is_executed(tmp_path: Path, how: str) -> None:
    marker = tmp_path / "marker"
    attack = {"weights": torch.ones(2), "more": [attacks(marker)[how]]}
    torch.save(attack, tmp_path / "attack.pt")
    with pytest.raises(RefusedPickle, match=r"attack\.pt: .*refused; nothing was executed"):
        read_torch_file(tmp_path / "attack.pt")
    assert not marker.exists()


def test_the_attacks_are_real(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save(attacks(marker)["os.system"], tmp_path / "attack.pt")
    torch.load(tmp_path / "attack.pt", weights_only=False)
    assert marker.exists()
    with pytest.raises(RefusedPickle, match=r"requests posix\.system: not plain data or a tensor"):
        read_torch_file(tmp_path / "attack.pt")


def test_a_checkpoint_with_an_attack_is_refused(saved: Path, tmp_path: Path) -> None:
    file = saved / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    rewrite(file, optimizer_changes(loss_scaler=attacks(tmp_path / "marker")["os.system"]))
    with pytest.raises(RefusedPickle, match=file.name):
        read_checkpoint(saved)
    assert not (tmp_path / "marker").exists()


SCALER = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"


def test_classes_of_deepspeed_are_inert(tmp_path: Path) -> None:
    state = b"}(X\x09\x00\x00\x00__class__K\x01X\x0c\x00\x00\x00__setstate__cposix\nsystem\nu"
    with pytest.raises(RefusedPickle, match=r"posix\.system"):
        read_torch_file(write(tmp_path / "a.pt", b"\x80\x02" + SCALER + b")\x81" + state + b"b."))
    state = state.replace(b"cposix\nsystem\n", b"K\x02")
    record = read_torch_file(write(tmp_path / "b.pt", b"\x80\x02" + SCALER + b")\x81" + state + b"b."))
    assert isinstance(record, StandIn)
    assert (record.name, record.args) == ("deepspeed.runtime.fp16.loss_scaler.LossScaler", ())
    assert record.state == {"__class__": 1, "__setstate__": 2}
    # As Python 3.11.0 writes a member of an enum.
    member = read_torch_file(
        write(tmp_path / "c.pt", b"\x80\x02c__builtin__\ngetattr\n" + STAGE + b"X\x07\x00\x00\x00weights\x86R.")
    )
    assert member.args == ("weights",)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (SCALER + b")\x81N}b.", "Can only build"),
        (SCALER + b"}b.", "Can only build"),
        (SCALER + b")\x81(K\x01K\x02u.", "Can only SETITEMS"),
        (SCALER + b")\x81(K\x01e.", "Can only extend lists"),
        (SCALER + b")\x81)R.", "unrecognized function"),
        (SCALER + b".", "LossScaler among the data"),
        (b"cdeepspeed.runtime.engine\nDeepSpeedEngine\n.", r"requests deepspeed\.runtime\.engine\.DeepSpeedEngine"),
        (b"}(K\x01K\x02K\x03u.", "damaged"),
        (b"}]K\x01s.", "unhashable type: 'list'"),
        (b")" + b"\x85" * 100_000 + b".", "too deep"),
        (b"]q\x00h\x00a.", "nested in itself"),
        (b"]" + b"".join(b"q%c](h%ch%ce" % (k, k, k) for k in range(60)) + b".", "nested in itself, or too deep"),
        (b"}(" + b")" + b"\x85" * 100_000 + b"K\x01u.", "too deep"),
        (b"c__builtin__\nset\n](" + b")" + b"\x85" * 100_000 + b"e\x85R.", "too deep"),
        (b"c__builtin__\nbytes\n\x8a\x05\x00\x00\x00\x00\x10\x85R.", "damaged"),
        (b"(iposix\nsystem\n.", "Unsupported operand"),
        (b"(cposix\nsystem\no.", r"requests posix\.system"),
        (b"\x82\x01.", "Unsupported operand"),
        (b"X\x05\x00\x00\x00posixX\x06\x00\x00\x00system\x93.", "Unsupported operand"),
        (b"X\x01\x00\x00\x00aQ.", "persistent_load id must be"),
        (b"K\x01", "damaged"),
        (b".", "damaged"),
        (b"h\x07.", "damaged"),
        (b"e.", "damaged"),
    ],
)  # fmt: skip
def test_hostile_programs_are_refused(tmp_path: Path, program: bytes, message: str) -> None:
    with pytest.raises(RefusedPickle, match=rf"a\.pt: .*{message}.*refused; nothing was executed"):
        read_torch_file(write(tmp_path / "a.pt", b"\x80\x02" + program))


def test_other_pickle_protocols_are_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt", pickle_protocol=4)
    with pytest.raises(RefusedPickle, match="Unsupported operand"):
        read_torch_file(tmp_path / "a.pt")


def tensor_program(numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], key: str = "0") -> bytes:
    """A pickle of one float tensor that says what it likes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if value == "here" else None

    buffer = io.BytesIO()
    arguments = ("here", offset, size, stride, False, collections.OrderedDict())
    Pickler(buffer, 2).dump(Calls(torch._utils._rebuild_tensor_v2, *arguments))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 0, (5,), (1,)), "20 bytes in a storage of 20"),
        ((2**60, 0, (4,), (1,)), "16 bytes in a storage of"),
        ((-4, 0, (4,), (1,)), "damaged"),
        ((4, 0, (4,), (1,), "../0"), "failed locating file"),
        ((4, 1, (4,), (1,)), "resize storage"),
        ((4, 0, (2, 2), (3, 1)), "resize storage"),
        ((4, 0, (2**40,), (0,)), "in a storage of 16"),
        ((4, 2**62, (1,), (1,)), "damaged"),
        ((4, 3, (4,), (-1,)), "damaged"),
        ((4, -1, (4,), (1,)), "invalid storage offset"),
        ((4, 0, (4,), (1, 1)), "unequal size length"),
        ((4, 0, ("4",), (1,)), "damaged"),
    ],
)
def test_storages_that_lie_are_refused(tmp_path: Path, arguments: Any, message: str) -> None:
    honest = write(tmp_path / "b.pt", tensor_program(4, 0, (4,), (1,)), {"0": bytes(16)})
    assert torch.equal(read_torch_file(honest), torch.zeros(4))
    with pytest.raises(RefusedPickle, match=message):
        read_torch_file(write(tmp_path / "a.pt", tensor_program(*arguments), {"0": bytes(16)}))


def test_a_storage_is_not_allocated_by_a_call(tmp_path: Path) -> None:
    """Read tensors whose storages torch calls untyped, but refuse to create such a storage of any size."""
    torch.save(torch.ones(4, dtype=torch.uint16), tmp_path / "a.pt")
    assert torch.equal(read_torch_file(tmp_path / "a.pt"), torch.ones(4, dtype=torch.uint16))
    torch.save(Calls(torch.UntypedStorage, 64), tmp_path / "b.pt")
    with pytest.raises(RefusedPickle, match="'StorageType' object is not callable"):
        read_torch_file(tmp_path / "b.pt")


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(100)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for length in (0, 3, 10, 64, 500, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises(RefusedPickle, match=r"cut\.pt: .*(zip file|truncated)"):
            read_torch_file(tmp_path / "cut.pt")


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Calls(os.system, f"touch {tmp_path / 'marker'}"), 2))
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("readme", "not ours")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02K\x01." + bytes(1000))
    messages = {
        "old": "before torch 1.6",
        "pickle": "not a zip file",
        "zip": "data.pkl",
        "packed": "is compressed or encrypted",
    }
    for name, message in messages.items():
        with pytest.raises(RefusedPickle, match=message):
            read_torch_file(tmp_path / f"{name}.pt")
    assert not (tmp_path / "marker").exists()


def test_names_that_others_allowed_are_refused_here(tmp_path: Path) -> None:
    """A program's own list of safe globals is neither used nor changed."""
    torch.save({"a": Path("/b")}, tmp_path / "a.pt")
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([Path, type(Path())]):
        allowed = torch.serialization.get_safe_globals()
        with pytest.raises(RefusedPickle, match=r"requests pathlib\.\w*Path"):
            read_torch_file(tmp_path / "a.pt")
        assert set(torch.serialization.get_safe_globals()) == set(allowed)
    assert set(torch.serialization.get_safe_globals()) == before


# Going on from it


def resume(folder: str, name: str, stage: int) -> tuple[Any, ...]:
    """Load the imported checkpoint in some stage and go on as DeepSpeed did."""
    import torch.distributed as dist

    import onefold
    from onefold.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    case = fixture.CASES[name]
    model = fixture.build(case)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {**case.config, "zero_optimization": zero, "log_level": "error"}
    groups = fixture.parameter_groups(case, model)
    engine, *_ = onefold.initialize(model=model, model_parameters=groups, config=config)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    states = [key.rpartition("/")[2] for key in expected_tensors(name) if key.startswith("optimizer/")]
    held = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            held[f"model/{parameter_name}"] = safe_get_full_fp32_param(parameter).clone()
            for state in dict.fromkeys(states):
                held[f"optimizer/{parameter_name}/{state}"] = safe_get_full_optimizer_state(parameter, state).clone()
    rates, scale = engine.get_lr(), engine.optimizer.loss_scale
    first = fixture.NUM_STEPS_SAVED * case.accumulation_steps
    losses = []
    for micro_step in range(first, first + fixture.NUM_STEPS_CONTINUED * case.accumulation_steps):
        loss = engine(fixture.batch(micro_step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return held, client_state, rates, scale, losses


@covering(name=fixture.CASES, stage=(3, 1), strength=1)
def test_training_goes_on_as_deepspeed_did(on_ranks: Any, tmp_path: Path, name: str, stage: int) -> None:
    import_deepspeed(FIXTURES / name, tmp_path)
    continued = json.loads((FIXTURES / name / "continued.json").read_text())
    expected = expected_tensors(name)
    for rank, found in enumerate(on_ranks(fixture.CASES[name].world_size, resume, str(tmp_path), name, stage)):
        held, client_state, rates, scale, losses = found
        for key, tensor in held.items():
            assert torch.equal(tensor, expected[key]), key
        assert client_state == fixture.CLIENT_STATE
        assert rates == continued["saved"]["learning_rates"]
        if "loss_scale" in continued["saved"] and fixture.CASES[name].config.get("fp16"):
            assert scale == continued["saved"]["loss_scale"]
        # The arithmetic is ours: DeepSpeed rounds sums and clips elsewhere.
        assert losses == pytest.approx([by_rank[rank] for by_rank in continued["losses"]], rel=2e-2)


def test_it_loads_on_another_number_of_ranks(on_ranks: Any, tmp_path: Path) -> None:
    import_deepspeed(FIXTURES / "stage3_fp32", tmp_path)
    expected = expected_tensors("stage3_fp32")
    held, *_ = on_ranks(3, resume, str(tmp_path), "stage3_fp32", 2)[0]
    for key, tensor in held.items():
        assert torch.equal(tensor, expected[key]), key


def test_the_command_imports_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-deepspeed", str(FIXTURES / "stage2_fp16"), str(tmp_path / "out")]) == 0
    assert "step 7, 9 parameters" in capsys.readouterr().out
    assert (tmp_path / "out" / "latest").read_text() == "global_step7"
    assert main(["import-deepspeed", str(tmp_path / "out"), str(tmp_path / "other")]) == 1
    assert "is already a checkpoint of onefold" in capsys.readouterr().err
    assert main(["import-deepspeed", str(tmp_path), str(tmp_path / "other")]) == 1
    assert not (tmp_path / "other").exists()
    assert "latest" in capsys.readouterr().err


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "stage1_bf16", source)
    (broken,) = source.glob("*/mp_rank_00_model_states.pt")
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"mp_rank_00_model_states\.pt"):
        import_deepspeed(source, tmp_path / "out")
    assert not list(tmp_path.glob("out/*"))
    with pytest.raises(ValueError, match="files of DeepSpeed"):
        import_deepspeed(FIXTURES / "stage1_bf16", FIXTURES / "stage1_bf16")
