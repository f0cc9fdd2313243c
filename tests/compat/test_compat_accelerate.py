"""What accelerate and Lightning ask of an engine and its optimizer by DeepSpeed's names; Lightning's examples."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_as_deepspeed import ROOT, installed  # noqa: F401 - a fixture
from torch import nn

pytestmark = pytest.mark.program

EXAMPLES = ROOT / "examples/lightning"
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")


def start(stage: int, model: nn.Module | None = None, **more: Any) -> Any:
    """An engine over a linear layer whose weight rests sharded in stage 3."""
    from onefold.compat import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "log_level": "error",
        **more,
    }
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(model=model or nn.Linear(8, 8), config=config)
    return engine


def backward(engine: Any, seed: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean())


def masters(engine: Any) -> list[torch.Tensor]:
    return [master.clone() for master in engine.optimizer.fp32_partitioned_groups_flat]


# -- the optimizer -----------------------------------------------------------------------------------------------------


def states_by_name(stage: int) -> dict[str, Any]:
    engine = start(stage)
    backward(engine)
    engine.step()
    found = engine.optimizer.state_dict()
    key, states = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    shapes = [value["momentum_buffer"].shape for value in found[states]["state"].values()]
    return {
        "stage": found["zero_stage"],
        "ranks": found["partition_count"],
        "masters": all(map(torch.equal, found[key], masters(engine))),
        "states": shapes == [master.shape for master in found[key]],
        "group": found[states]["param_groups"][0]["lr"],
        "copies": any(master is found[key][0] for master in engine.optimizer.fp32_partitioned_groups_flat),
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizers_state_dict_is_this_ranks_part_by_deepspeeds_names(on_ranks, stage):
    expected = {"stage": stage, "ranks": 2, "masters": True, "states": True, "group": 0.1, "copies": True}
    assert on_ranks(2, states_by_name, stage) == [expected, expected]


def steps_by_the_optimizer(stage: int) -> list[Any]:
    one, other = start(stage), start(stage)
    for seed in range(2):
        backward(one, seed)
        one.optimizer.step()
        backward(other, seed)
        other.step()
    found: list[Any] = [one.global_steps, all(map(torch.equal, masters(one), masters(other)))]
    try:
        one.optimizer.step(lambda: None)
    except ValueError as error:
        found.append("closure" in str(error))
    optimizer = one.optimizer
    del one
    try:
        optimizer.step()
    except RuntimeError as error:
        found.append("closed" in str(error))
    return found


def test_a_step_of_the_optimizer_is_a_step_of_its_engine(on_ranks):
    assert on_ranks(2, steps_by_the_optimizer, 2) == 2 * [[2, True, True, True]]


def optimizer_of_a_config() -> list[bool]:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = start(2, scheduler=schedule)
    basic = engine.optimizer.optimizer
    backward(engine)
    basic.step()  # as on the user's own instance, which the engine steps
    engine.lr_scheduler.step(2)
    torch.optim.lr_scheduler.StepLR(basic, 1)
    return [
        type(basic) is torch.optim.SGD,
        engine.lr_scheduler.optimizer is basic,
        engine.global_steps == 1,
        basic.param_groups is engine.optimizer.param_groups,
        engine.get_lr() == [0.2],
        "lr: 0.2" in repr(basic),
    ]


def test_an_optimizer_that_the_config_names_has_the_class_it_names(on_ranks):
    assert on_ranks(1, optimizer_of_a_config) == [6 * [True]]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_inside_a_window(folder: str) -> list[Any]:
    from onefold.log import logger

    engine = start(2, gradient_accumulation_steps=2)
    for seed in range(3):
        backward(engine, seed)
        engine.step()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)
    engine.save_checkpoint(folder, tag="one", client_state={"epoch": 4})
    logger.setLevel(level)
    logger.removeHandler(handler)
    saved = masters(engine)
    other = start(2, gradient_accumulation_steps=2)
    _, client = other.load_checkpoint(folder, tag="one")
    found: list[Any] = [client["epoch"], all(map(torch.equal, saved, masters(other)))]
    backward(other)
    other.step()
    found.append(other.global_steps)  # its window began when it was loaded
    return [*found, any("continues without them" in line for line in heard)]


def test_a_save_inside_a_window_is_warned_of_under_deepspeeds_name(on_ranks, tmp_path):
    assert on_ranks(1, saved_inside_a_window, str(tmp_path)) == [[4, True, 1, True]]


def files_of_a_checkpoint(folder: str) -> list[Any]:
    from onefold.compat.deepspeed.utils import zero_to_fp32

    engine = start(3)
    engine.save_checkpoint(folder, tag="one", client_state={"epoch": 4, "names": ["a", "b"]})
    stage = torch.load(zero_to_fp32.get_optim_files(f"{folder}/one")[0])["optimizer_state_dict"]["zero_stage"]
    path = zero_to_fp32.get_model_state_file(f"{folder}/one", stage)
    client = torch.load(path)
    missing = None
    try:
        zero_to_fp32.get_model_state_file(f"{folder}/two", stage)
    except FileNotFoundError as error:
        missing = "two" in str(error)
    return [stage, Path(path).name, client["epoch"], client["names"], client["dp_world_size"], missing]


def test_a_checkpoint_tells_its_stage_and_client_state_through_torch_load(on_ranks, tmp_path):
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert on_ranks(1, files_of_a_checkpoint, str(tmp_path)) == [[3, name, 4, ["a", "b"], 1, True]]


# -- the module --------------------------------------------------------------------------------------------------------


def empty_state_dict() -> list[Any]:
    engine = start(3)
    found = engine.module.state_dict()
    refused = []
    for use in (lambda: found["weight"] + 1, lambda: torch.save(found, io.BytesIO())):
        try:
            use()
        except RuntimeError as error:
            refused.append("GatheredParameters" in str(error))
    return [list(found), [tuple(value.shape) for value in found.values()], refused]


def test_a_state_dict_of_sharded_parameters_raises_when_it_is_used(on_ranks):
    expected = [["weight", "bias"], [(0,), (0,)], [True, True]]
    assert on_ranks(2, empty_state_dict) == [expected, expected]


def moved_with_gradients(stage: int) -> bool:
    """Lightning moves the module to the CPU when it is done, whatever gradients are left."""
    engine = start(stage, gradient_accumulation_steps=2, fp16={"enabled": True})
    backward(engine)
    engine.step()
    engine.module.cpu()
    backward(engine)
    engine.step()
    return engine.global_steps == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_moving_a_module_leaves_the_engines_gradients_alone(on_ranks, stage):
    assert on_ranks(2, moved_with_gradients, stage) == [True, True]


# -- the examples ------------------------------------------------------------------------------------------------------

# Lightning's strategies ask for a CUDA device. This lets them take a CPU for one.
ON_CPU = """
import runpy, sys
import lightning, lightning.fabric
import lightning.fabric.strategies.deepspeed as of_fabric
import lightning.pytorch.strategies.deepspeed as of_trainer
from lightning.fabric.accelerators import CPUAccelerator
of_trainer.CUDAAccelerator = lightning.pytorch.accelerators.CPUAccelerator
of_fabric.CUDAAccelerator = CPUAccelerator
of_trainer._validate_device_index_selection = of_fabric._validate_device_index_selection = lambda devices: None
def on_cpu(kind):
    class OnCPU(kind):
        def __init__(self, *args, accelerator, **kwargs):
            super().__init__(*args, accelerator="cpu", **kwargs)
    return OnCPU
lightning.Trainer, lightning.fabric.Fabric = on_cpu(lightning.Trainer), on_cpu(lightning.fabric.Fabric)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(site: Path, folder: Path, port: int, name: str, *options: str) -> dict[str, Any]:
    """Two ranks, each a node of its own, as two ranks on one GPU would be."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", ON_CPU, str(EXAMPLES / name), "out", "--num_nodes", "2", *options]
    ranks = [
        subprocess.Popen(
            command, cwd=folder, env={**environment, "NODE_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-4000:] + outputs[1][-4000:]
    found: dict[str, Any] = json.loads([line for line in outputs[0].splitlines() if line.startswith("{")][-1])
    return found


@pytest.fixture
def port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        number: int = listening.getsockname()[1]
        return number


@pytest.mark.slow
@needs_lightning
@pytest.mark.parametrize("name", ["trainer.py", "fabric.py"])
def test_lightning_trains_validates_saves_and_resumes(installed, tmp_path, port, name):  # noqa: F811
    """Stage 3, in which every layer rests sharded, equals stage 2; a resumed run equals one that was not stopped."""
    second = ["--strategy", "deepspeed_stage_2"] if name == "trainer.py" else ["--stage", "2"]
    found = []
    for number, stage in enumerate((second, ["--config", str(EXAMPLES / "ds_zero3.json")])):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(run_example(installed, folder, port + number, name, *stage, "--precision", "32-true"))
        if name == "trainer.py":
            weights = torch.load(folder / "out/weights.pt", weights_only=False)
            assert "net.words.weight" in weights["state_dict"]
            assert weights["epoch"] == 1
    two, three = found
    assert two["ranks"] == 2
    assert two["losses"][6:] == two["resumed"]
    assert two["losses"][-1] < two["losses"][0] - 1
    for key in ("losses", "resumed", "eval"):
        assert three[key] == pytest.approx(two[key], rel=1e-5), key
