"""Events of training go where DeepSpeed's config sections say, under its names, from the first rank alone."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batches, config, net, rank, start
from torch import nn

from onefold import ConfigError
from onefold.report.run_file import RunFile


def learn(engine: Any, steps: int) -> None:
    for x, y in batches(steps * engine.batch.accumulation):
        engine.backward(engine(x, y))
        engine.step()


def read_csv(path: Path) -> tuple[list[str], list[tuple[int, float]]]:
    head, *rows = csv.reader(path.open(newline=""))
    return head, [(int(samples), float(value)) for samples, value in rows]


# -- CSV -------------------------------------------------------------------------------------------------------------


def with_csv(folder: str) -> dict[str, Any]:
    """The folder is another one on each rank."""
    monitor = {"enabled": True, "output_path": f"{folder}/{rank()}", "job_name": "job"}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01, "warmup_type": "linear"}}
    more = {"csv_monitor": monitor, "scheduler": scheduler, "onefold": {"report": folder}}
    engine = start(net(), config(2, gradient_accumulation_steps=2, **more))
    assert engine.monitor.enabled
    rates = []
    for _ in range(3):
        learn(engine, 1)
        rates.append(engine.get_lr()[0])
        engine.monitor.write_events([("Mine/some metric", 0.5, engine.global_samples)])
    engine.close()
    return {"rates": rates}


def test_csv_has_a_file_a_metric_with_deepspeeds_names_over_samples(on_ranks, tmp_path):
    known = on_ranks(2, with_csv, str(tmp_path))[0]
    assert not (tmp_path / "1").exists()
    folder, steps = tmp_path / "0" / "job", RunFile.read(tmp_path).steps
    samples = [16, 32, 48]
    columns = {
        "Train_Samples_train_loss": ("train_loss", [row.loss for row in steps]),
        "Train_Samples_lr": ("lr", known["rates"]),  # after the scheduler's step, as DeepSpeed has it
        "onefold_grad_norm": ("grad_norm", [row.grad_norm for row in steps]),
        "onefold_memory_host_resident": ("host_resident", [row.memory.host_resident for row in steps]),
        "onefold_memory_held_device": ("held_device", [row.memory.by_tier()["device"] for row in steps]),
        "onefold_traffic_reduce-scatter": ("reduce-scatter", [row.bytes_of("reduce-scatter") for row in steps]),
        "Mine_some_metric": ("some metric", [0.5] * 3),
    }
    for name, (header, values) in columns.items():
        head, found = read_csv(folder / f"{name}.csv")
        assert head == ["step", header]
        assert found == list(zip(samples, values, strict=True)), name
    assert not (folder / "Train_Samples_loss_scale.csv").exists()  # no loss is scaled
    assert not list(folder.glob("*elapsed*"))


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight.float() * factor).sum()


def scaled_and_timed(folder: str) -> list[float]:
    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    scales = []
    for _ in range(2):  # two runs into one folder
        engine = start(Weight(), config(1, fp16=fp16, csv_monitor=monitor, wall_clock_breakdown=True))
        for factor in (1.0, float("inf")):
            engine.backward(engine(factor))
            engine.step()
            scales.append(engine.optimizer.loss_scale)
        engine.close()
    return scales


def test_csv_has_scale_and_times_where_asked_and_its_header_once(on_ranks, tmp_path):
    scales = on_ranks(1, scaled_and_timed, str(tmp_path))[0]
    head, found = read_csv(tmp_path / "job" / "Train_Samples_loss_scale.csv")
    assert (head, [value for _, value in found]) == (["step", "loss_scale"], scales)
    assert scales == [16.0, 8.0] * 2
    for phase in ("forward", "backward", "step"):
        head, found = read_csv(tmp_path / "job" / f"Train_Samples_elapsed_time_ms_{phase}.csv")
        assert len(found) == 4
        assert all(value > 0 for _, value in found)


def goes_on_without(folder: str) -> int:
    engine = start(net(), config(1, csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"}))
    learn(engine, 1)
    shutil.rmtree(f"{folder}/job")
    learn(engine, 2)
    return engine.global_steps


def test_a_monitor_that_fails_does_not_end_the_training(on_ranks, tmp_path):
    assert on_ranks(1, goes_on_without, str(tmp_path)) == [3]
    assert not (tmp_path / "job").exists()


def switched_off() -> None:
    engine = start(net(), config(1, csv_monitor={"enabled": False}))
    assert not engine.monitor.enabled
    assert engine._reports.steps is None
    engine.monitor.write_events([("a", 1.0, 1)])
    learn(engine, 1)


def test_without_a_section_nothing_is_written(on_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_ranks(1, switched_off)
    assert list(tmp_path.iterdir()) == []


# -- packages --------------------------------------------------------------------------------------------------------

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def missing(section: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start(net(), config(1, **{section: {"enabled": True}}))
    return str(caught.value)


@pytest.mark.parametrize("section", PACKAGES)
def test_a_package_that_is_missing_is_named_with_key_and_command(on_ranks, section):
    package = PACKAGES[section]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    told = on_ranks(1, missing, section)[0]
    assert told.startswith(f"{section}.enabled needs the package {package}, which is not installed")
    assert "pip install " in told
    assert package in told.partition("pip install ")[2]


# Modules under the names of packages that cannot be installed where these tests run. They are real modules, which keep
# the calls that they get: whether the services behind the packages understand those calls is not tested.
KEEPS_CALLS = """
import json, os
def keep(name, *args, **given):
    with open(os.environ["KEPT_CALLS"], "a") as file:
        file.write(json.dumps([name, args, given]) + "\\n")
"""
WANDB = (
    KEEPS_CALLS
    + """
def init(**given):
    keep("init", **given)
def log(data, step=None, commit=None):
    keep("log", data, step=step, commit=commit)
"""
)
COMET = (
    KEEPS_CALLS
    + """
class Experiment:
    def set_name(self, name):
        keep("set_name", name)
    def __internal_api__log_metric__(self, name, value, step):
        keep("metric", name, value, step)
def start(**given):
    keep("start", **given)
    return Experiment()
"""
)


def with_package(folder: str, package: str, code: str, section: str, given: dict[str, Any]) -> None:
    """Each rank has a folder of its own, with the module in it."""
    mine = Path(folder, str(rank()))
    mine.mkdir()
    (mine / f"{package}.py").write_text(code)
    os.environ["KEPT_CALLS"] = str(mine / "calls")
    sys.path.insert(0, str(mine))
    importlib.invalidate_caches()
    try:
        engine = start(net(), config(1, **{section: {"enabled": True, **given}}, onefold={"report": folder}))
        learn(engine, 4)
        engine.close()
    finally:
        sys.path.remove(str(mine))
        sys.modules.pop(package, None)


def calls(folder: Path) -> list[list[Any]]:
    assert not (folder / "1" / "calls").exists()  # only the first rank writes
    return [json.loads(line) for line in (folder / "0" / "calls").read_text().splitlines()]


def test_wandb_gets_the_run_and_every_event(on_ranks, tmp_path):
    given = {"project": "p", "group": "g", "team": "t"}
    on_ranks(2, with_package, str(tmp_path), "wandb", WANDB, "wandb", given)
    (name, _, arguments), *logged = calls(tmp_path)
    assert (name, arguments) == ("init", {"project": "p", "group": "g", "entity": "t"})
    losses = [(call[2]["step"], call[1][0]["Train/Samples/train_loss"]) for call in logged if "train_loss" in str(call)]
    assert losses == [(row.samples, row.loss) for row in RunFile.read(tmp_path).steps]
    steps = [call[2]["step"] for call in logged]
    assert steps == sorted(steps)


def test_comet_gets_an_event_every_so_many_samples(on_ranks, tmp_path):
    given = {"project": "p", "workspace": "w", "api_key": "k", "experiment_name": "n", "samples_log_interval": 16}
    on_ranks(2, with_package, str(tmp_path), "comet_ml", COMET, "comet", given)
    (name, _, arguments), (named, (called,), _), *logged = calls(tmp_path)
    expected = {"project": "p", "workspace": "w", "api_key": "k", "experiment_key": None, "mode": None, "online": None}
    assert (name, arguments) == ("start", expected)
    assert (named, called) == ("set_name", "n")
    steps = RunFile.read(tmp_path).steps
    assert [row.samples for row in steps] == [8, 16, 24, 32]
    losses = [call[1][1:] for call in logged if call[1][0] == "Train/Samples/train_loss"]
    assert losses == [[row.loss, row.samples] for row in steps if row.samples in (8, 24)]


def with_tensorboard(folder: str) -> None:
    engine = start(net(), config(1, tensorboard={"enabled": True, "output_path": folder, "job_name": "job"}))
    learn(engine, 3)
    engine.close()


def test_tensorboard_reads_what_was_written(on_ranks, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_ranks(1, with_tensorboard, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [event.step for event in events.Scalars("Train/Samples/lr")] == [4, 8, 12]
    assert events.Scalars("onefold/grad_norm")[0].value > 0


# -- DeepSpeed's names -----------------------------------------------------------------------------------------------


def test_a_master_is_made_from_deepspeeds_config_object(tmp_path):
    pytest.importorskip("pydantic")
    from onefold.compat.deepspeed.monitor import monitor
    from onefold.compat.deepspeed.monitor.config import get_monitor_config

    assert not get_monitor_config({}).enabled
    found = get_monitor_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}, "wandb": {"team": "t"}})
    assert found.enabled
    assert found.wandb.project == "deepspeed"
    master = monitor.MonitorMaster(found)
    assert isinstance(master.csv_monitor, monitor.csvMonitor)
    assert master.wandb_monitor is None
    master.write_events([("Train/Samples/lr", 0.25, 7)])
    assert read_csv(tmp_path / "DeepSpeedJobName" / "Train_Samples_lr.csv") == (["step", "lr"], [(7, 0.25)])
    with pytest.raises(ValueError, match="other"):
        get_monitor_config({"csv_monitor": {"other": 1}})
