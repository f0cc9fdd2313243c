"""The record of a run says what the engine says, costs nothing where it is off, and survives what ends a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net, batches, config, net, rank, start, weights_of
from programs import Ended, run_programs
from records import end, facts, row, write_run
from torch import nn

from onefold import ConfigError
from onefold.plan import Tier
from onefold.report.run_file import RunFile, RunFileError, line_of

KINDS = ("parameters", "gradients", "masters", "states")
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def held(engine: Any) -> dict[str, dict[str, int]]:
    sizes = {tier.value: engine.model_memory.held_bytes(tier) for tier in Tier}
    return {tier: {kind: getattr(size, kind) for kind in KINDS} for tier, size in sizes.items()}


def sent(engine: Any) -> dict[str, list[int]]:
    return {f"{row.operation} {row.group}": [row.calls, row.bytes] for row in engine.ledger.rows()}


def steps_with_a_record(folder: str, stage: int, extra: dict[str, Any]) -> dict[str, Any]:
    """Three steps of two micro-steps, and what the engine and its caller know of each."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01, "warmup_type": "linear"}}
    settings = config(stage, gradient_accumulation_steps=2, scheduler=scheduler, onefold={"report": folder}, **extra)
    engine = start(net(), settings)
    known: dict[str, Any] = {"planned": {}, "at_start": sent(engine), "steps": []}
    for tier in Tier:
        known["planned"][tier.value] = {kind: getattr(engine.model_memory.planned_bytes(tier), kind) for kind in KINDS}
    losses: list[float] = []
    for x, y in batches(6):
        loss = engine(x, y)
        engine.backward(loss)
        losses.append(loss.item())
        if engine.is_gradient_accumulation_boundary():
            step = {"held": held(engine), "rates": engine.get_lr(), "loss": sum(losses) / 2}
            losses.clear()
        engine.step()
        if engine.state.window.micro_steps % 2 == 0:
            known["steps"].append({**step, "norm": engine.get_global_grad_norm(), "sent": sent(engine)})
    known["describe"], known["samples"] = engine.describe(), engine.global_samples
    engine.close()
    return known


@pytest.mark.parametrize(("stage", "extra"), [(1, {}), (2, OFFLOADED), (3, {})])
def test_the_record_says_what_the_engine_says(on_ranks, tmp_path, stage, extra):
    known = on_ranks(2, steps_with_a_record, str(tmp_path), stage, extra)[0]
    run = RunFile.read(tmp_path)
    assert run.facts["plan"] == known["describe"]
    assert run.facts["world_size"] == 2
    assert run.facts["model"]["parameters_trained"] == sum(parameter.numel() for parameter in Net().parameters())
    assert sum(run.facts["model"]["units"].values()) == run.facts["model"]["parameters_trained"]
    for tier, kinds in known["planned"].items():
        assert run.facts["planned"].get(tier, dict.fromkeys(KINDS, 0)) == kinds
    assert [found.step for found in run.steps] == [1, 2, 3]
    assert run.steps[-1].samples == known["samples"] == 48
    before = known["at_start"]
    for found, expected in zip(run.steps, known["steps"], strict=True):
        assert found.loss == pytest.approx(expected["loss"], rel=1e-6)
        assert list(found.learning_rates) == expected["rates"]
        assert found.grad_norm == expected["norm"]
        assert (found.skipped, found.loss_scale) == (False, None)
        for tier, kinds in expected["held"].items():
            assert found.memory.held.get(tier, dict.fromkeys(KINDS, 0)) == kinds
        moved = {f"{line.operation} {line.group}": [line.calls, line.bytes] for line in found.traffic}
        zero = [0, 0]
        grown = {
            key: [now - then for now, then in zip(counts, before.get(key, zero), strict=True)]
            for key, counts in expected["sent"].items()
        }
        assert moved == {key: counts for key, counts in grown.items() if any(counts)}
        before = expected["sent"]
        assert set(found.phases) == {"forward", "backward", "step", "outside"}
        assert sum(found.phases.values()) == pytest.approx(found.seconds, rel=1e-6)
        assert all(value > 0 for value in found.phases.values())
        assert found.memory.host_resident <= found.memory.host_peak
    assert run.end is not None
    assert run.end["reason"] == "closed"
    report = run.report
    assert (report.planned, report.num_steps) == (run.facts["planned"], 3)
    assert report.held == run.steps[-1].memory.held
    for line in report.traffic:
        assert line.bytes == sum(found.bytes for step in run.steps for found in step.traffic
                                 if (found.operation, found.group) == (line.operation, line.group))  # fmt: skip


def folders_written(folder: str) -> list[str]:
    engine = start(net(), config(1, onefold={"report": f"{folder}/{rank()}"}))
    for x, y in batches(1):
        engine.backward(engine(x, y))
        engine.step()
    engine.close()
    return [engine.plan_report(), *os.listdir(folder)] if rank() == 0 else [engine.plan_report()]


def test_only_the_first_rank_writes_and_paths_may_differ(on_ranks, tmp_path):
    found = on_ranks(2, folders_written, str(tmp_path))[0]
    assert found[1:] == ["0"]


def trained(folder: str | None) -> dict[str, torch.Tensor]:
    extra = {"onefold": {"report": folder}} if folder else {}
    engine = start(net(), config(2, **extra))
    for x, y in batches(3):
        engine.backward(engine(x, y))
        engine.step()
    assert (engine._reports.steps is None) == (folder is None or rank() > 0)
    weights = weights_of(engine.module)
    engine.close()
    return weights


def test_a_record_moves_no_bit_and_without_the_key_there_is_none(on_ranks, tmp_path):
    plain, recorded = on_ranks(2, trained, None)[0], on_ranks(2, trained, str(tmp_path))[0]
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)
    assert len(RunFile.read(tmp_path).steps) == 3


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight.float() * factor).sum()


def overflowing(folder: str) -> list[float]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = start(Weight(), config(1, fp16=fp16, onefold={"report": folder}))
    scales = []
    for factor in (1.0, float("inf"), 1.0):
        scales.append(engine.optimizer.loss_scale)
        engine.backward(engine(factor))
        engine.step()
    engine.close()
    return scales


def test_a_skipped_step_is_told_with_its_scale_and_what_is_not_finite(on_ranks, tmp_path):
    scales = on_ranks(1, overflowing, str(tmp_path))[0]
    run = RunFile.read(tmp_path)
    assert [found.skipped for found in run.steps] == [False, True, False]
    assert [found.loss_scale for found in run.steps] == scales == [16.0, 16.0, 8.0]
    assert [found.loss for found in run.steps] == [8.0, float("inf"), pytest.approx(8.0, rel=0.1)]
    assert run.steps[1].grad_norm == float("inf")
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def bare_backward(folder: str) -> None:
    engine = start(net(), config(1, onefold={"report": folder}))
    x, y = batches(1)[0]
    engine(x, y).backward()
    engine.step()
    engine.close()


def test_a_loss_that_the_engine_was_not_given_is_none(on_ranks, tmp_path):
    on_ranks(1, bare_backward, str(tmp_path))
    (found,) = RunFile.read(tmp_path).steps
    assert found.loss is None
    assert found.grad_norm is not None


def resumed(folder: str) -> tuple[list[float], list[float]]:
    """Three steps with a checkpoint after the second, a crash in the middle of a line, and the run taken up again."""
    settings = config(2, onefold={"report": folder})
    losses: list[list[float]] = [[], []]
    for life in (0, 1):
        engine = start(net(), settings)
        if life:
            engine.load_checkpoint(f"{folder}/checkpoints")
        for number, (x, y) in enumerate(batches(5)):
            if number in ((0, 1, 2), (2, 3, 4))[life]:
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()
                losses[life].append(loss.item())
                if engine.global_steps == 2:
                    engine.save_checkpoint(f"{folder}/checkpoints")
        engine.close()
        if not life and rank() == 0:
            with open(f"{folder}/run.jsonl", "a") as file:
                file.write('{"kind": "step", "step": 4, "sam')
    return losses[0], losses[1]


def test_a_resumed_run_appends_and_a_line_that_was_cut_off_is_gone(on_ranks, tmp_path):
    first, second = on_ranks(1, resumed, str(tmp_path))[0]
    run = RunFile.read(tmp_path)
    assert [found.step for found in run.steps] == [1, 2, 3, 4, 5]
    assert [found.loss for found in run.steps] == pytest.approx([*first[:2], *second], rel=1e-6)
    kinds = [json.loads(line)["kind"] for line in run.path.read_text().splitlines()]
    assert kinds == ["run", "step", "step", "step", "end", "run", "step", "step", "step", "end"]


def refused_folders(folder: str) -> None:
    Path(folder, "file").touch()
    with pytest.raises(ConfigError, match=r"onefold\.report = .*file/a.*cannot be written"):
        start(net(), config(1, onefold={"report": f"{folder}/file/a"}))
    Path(folder, "run.jsonl").write_text("something else\n")
    with pytest.raises(ConfigError, match=r"onefold\.report = .*is not a run record"):
        start(net(), config(1, onefold={"report": folder}))
    assert Path(folder, "run.jsonl").read_text() == "something else\n"
    one = start(net(), config(1, onefold={"report": f"{folder}/one"}))
    with pytest.raises(ConfigError, match=r"onefold\.report = .*another engine.*engine\.close\(\)"):
        start(net(), config(1, onefold={"report": f"{folder}/one"}))
    one.close()
    model = net()
    start(model, config(1, onefold={"report": f"{folder}/one"}))
    start(model, config(1, onefold={"report": f"{folder}/one"})).close()  # the model's earlier engine is retired


def test_a_folder_that_cannot_be_used_is_refused_by_its_key(on_ranks, tmp_path):
    on_ranks(1, refused_folders, str(tmp_path))


def with_secrets(folder: str) -> None:
    start(net(), config(1, onefold={"report": folder}, comet={"enabled": False, "api_key": "hunter2"})).close()


def test_secrets_of_the_config_are_not_recorded(on_ranks, tmp_path):
    on_ranks(1, with_secrets, str(tmp_path))
    assert b"hunter2" not in (tmp_path / "run.jsonl").read_bytes()


# -- how a run ends --------------------------------------------------------------------------------------------------

JOB = """
import os, resource, signal, sys, torch, onefold
model = torch.nn.Linear(64, 64)
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "onefold": {"report": sys.argv[1]}}
engine, *_ = onefold.initialize(model=model, config={**config, "log_level": "warning"})
def train(steps):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
train(3)
"""
# What a program does after three steps, and the last line of its record: reason and error.
ENDS: dict[str, tuple[str, str | None, str | None]] = {
    "falls off its end": ("", "the process ended", None),
    "closes the engine": ("engine.close()", "closed", None),
    "raises": ("raise RuntimeError('no more')", "error", "RuntimeError: no more"),
    "raises inside": ("with engine:\n    raise KeyError('inside')", "error", "KeyError: 'inside'"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", None, None),
    "fills the disk": (
        "size = os.path.getsize(sys.argv[1] + '/run.jsonl') + 100\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\n"
        "train(2)\n"
        "engine.close()\n"
        "print('trained', engine.global_steps)\n",
        None,
        None,
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Ended], dict[str, Path]]:
    """All of these programs in one start of an interpreter, and the folders of their records."""
    folders = {name: tmp_path_factory.mktemp("run") for name in ENDS}
    return run_programs({name: (JOB + ENDS[name][0], str(folders[name])) for name in ENDS}), folders


@pytest.mark.program
@pytest.mark.parametrize("name", [name for name, (_, reason, _) in ENDS.items() if reason is not None])
def test_the_last_line_says_how_the_run_ended(ended, name):
    run = RunFile.read(ended[1][name])
    assert run.end is not None
    assert (run.end["reason"], run.end["error"], len(run.steps)) == (*ENDS[name][1:], 3)


@pytest.mark.program
def test_a_killed_process_loses_no_step_that_was_taken(ended):
    done, folders = ended
    assert done["is killed"].returncode == -9
    run = RunFile.read(folders["is killed"])
    assert (run.end, len(run.steps)) == (None, 3)
    assert run.report.num_steps == 3  # from the lines that there are


@pytest.mark.program
def test_a_full_disk_ends_the_record_and_not_the_training(ended):
    done, folders = ended
    assert "trained 5" in done["fills the disk"].stdout, done["fills the disk"].stderr
    assert done["fills the disk"].stderr.count("Recording is disabled and training continues") == 1
    assert len(RunFile.read(folders["fills the disk"]).steps) == 3


# -- plan against measurement ----------------------------------------------------------------------------------------


def planned_and_told(folder: str | None, stage: int) -> tuple[str, dict[str, int], int]:
    engine = start(net(), config(stage, **({"onefold": {"report": folder}} if folder else {})))
    assert "planned" in engine.plan_report()  # before any step
    for x, y in batches(2):
        engine.backward(engine(x, y))
        engine.step()
    planned = engine.model_memory.planned_bytes()
    text = engine.plan_report()
    engine.close()
    assert folder is None or rank() > 0 or engine.plan_report().splitlines()[:5] == text.splitlines()[:5]
    return text, {kind: getattr(planned, kind) for kind in KINDS}, engine.ledger.bytes("reduce-scatter") // 2


@pytest.mark.parametrize("recorded", [True, False])
def test_the_report_of_the_plan_has_planned_and_held_bytes_and_traffic(on_ranks, tmp_path, recorded):
    from onefold.log import format_bytes

    text, planned, reduced = on_ranks(2, planned_and_told, str(tmp_path) if recorded else None, 2)[0]
    lines = {tuple(line.split()[:2]): line.split()[2:] for line in text.splitlines()}
    for kind in ("parameters", "states"):
        assert lines["device", kind] == format_bytes(planned[kind]).split() * 2
    assert planned["masters"] == 0  # those of fp32 are the parameters
    assert ("device", "masters") not in lines
    assert lines["device", "gradients"][:2] == format_bytes(planned["gradients"]).split()
    # As they were at the end of the backward: the step has freed them.
    assert lines["device", "gradients"][2:] == format_bytes(planned["gradients"]).split()
    assert lines["device", "model"][1:3] == lines["device", "model"][3:5]
    assert " ".join(lines["a", "step"][-2:]) in text
    assert f"sent: reduce-scatter (data) {'-':>17} {format_bytes(reduced):>11}".split() == next(
        line for line in text.splitlines() if "reduce-scatter" in line
    ).removeprefix("a step").split()  # fmt: skip
    assert "mean of 2 steps" in text


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_record_is_read_on_as_it_is_written(tmp_path):
    path = write_run(tmp_path, facts(), row(1))
    run = RunFile(tmp_path)
    assert run.update()
    assert not run.update()
    with path.open("a") as file:
        text = line_of(row(2))
        file.write(text[:40])
        file.flush()
        assert not run.update()
        file.write(text[40:] + end())
    assert run.update()
    assert [found.step for found in run.steps] == [1, 2]
    assert run.end is not None
    write_run(tmp_path, facts(stage=3))  # somebody has begun anew
    assert run.update()
    assert (run.steps, run.end, run.facts["stage"]) == ([], None, 3)


@pytest.mark.parametrize("tail", ['{"kind": "step", "st', "\0\0\0\0\n", '{"kind": "step", "step": 2}'])
def test_a_last_line_that_was_cut_off_is_no_error(tmp_path, tail):
    write_run(tmp_path, facts(), row(1), tail)
    assert [found.step for found in RunFile.read(tmp_path).steps] == [1]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["", facts()], "line 1|no run"),
        ([facts(), "{broken\n", line_of(row(1))], "line 2 is not valid"),
        ([line_of(row(1))], "line 1: .*must begin with a line of facts"),
        ([facts(), '{"kind": "step", "step": 1}\n'], "line 2: KeyError"),
        ([facts(), line_of(row(1)).replace('"step": 1', '"step": "1"', 1)], "line 2: TypeError: .*whole number"),
        ([facts(planned=[])], "line 1: TypeError: expected an object"),
        (['{"kind": "run"}\n'], "line 1: KeyError"),
        (["[" * 100_000 + "\n", facts()], "line 1|no run"),
        ([], "it contains no run yet"),
    ],
)
def test_a_file_that_is_no_record_is_told_by_its_line(tmp_path, lines, told):
    write_run(tmp_path, *lines)
    if lines[:1] in ([""], ["[" * 100_000 + "\n"]):
        assert RunFile.read(tmp_path).facts  # a run that comes after a line that was cut off
        return
    with pytest.raises(RunFileError, match=told) as caught:
        RunFile.read(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_row_comes_back_as_it_was_written(tmp_path):
    written = row(7, loss=float("nan"), grad_norm=float("-inf"), loss_scale=2.0, skipped=True)
    write_run(tmp_path, facts(), written)
    (found,) = RunFile.read(tmp_path).steps
    assert repr(found) == repr(written)
