"""The built-in job: its data, its model, its config, and the whole command in real ranks."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from onefold.optim.schedules import WarmupCosineLR
from onefold.report.run_file import RunFile
from onefold.tools.cli.main import main
from onefold.tools.train.data import Corpus, DataError, load_corpus
from onefold.tools.train.gpt import GPT, PRESETS, GPTConfig
from onefold.tools.train.loop import continue_epochs, count_steps, set_rates
from onefold.tools.train.options import PRESET_NAMES, OptionError, TrainOptions, add_arguments, prepare_config
from onefold.tools.train.recipe import options_of, read_recipe, write_recipe
from onefold.tools.train.rows import ALPACA_HEAD, ALPACA_INPUT, check_first_rows
from onefold.tools.train.tokens import Rows, Tokens

pytestmark = pytest.mark.program

# -- data --------------------------------------------------------------------------------------------------------


def test_sequences_depend_on_the_seed_and_their_number_and_not_on_the_batch() -> None:
    corpus = load_corpus([], 64)
    batch = corpus.train_batch(seed=1, first=8, batch_size=4)
    assert torch.equal(batch[0], corpus.train_batch(seed=1, first=8, batch_size=4)[0])
    assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])
    halves = [corpus.train_batch(seed=1, first=number, batch_size=2)[0] for number in (8, 10)]
    assert torch.equal(batch[0], torch.cat(halves)), "two ranks with half of the batch read the same text"
    for other in ((0, 8), (1, 12)):
        assert not torch.equal(batch[0], corpus.train_batch(*other, batch_size=4)[0])


def test_windows_run_across_files() -> None:
    pieces = [np.arange(start, start + size, dtype=np.uint8) for start, size in ((0, 5), (5, 1), (6, 34))]
    corpus = Corpus(pieces, "numbers", sequence_length=7)
    whole = np.concatenate(pieces)
    for start in range(len(whole) - 8):
        assert np.array_equal(corpus._window(start), whole[start : start + 8])


def test_held_out_text_is_never_trained_on() -> None:
    corpus = Corpus([np.arange(200, dtype=np.uint8)], "numbers", sequence_length=8)
    trained = {int(corpus.train_batch(0, 8 * step, 8)[1].max()) for step in range(50)}
    held_out = [int(tokens.min()) for (tokens, _), _ in corpus.held_out_batches(0, 1, 2)]
    assert max(trained) < corpus.num_train <= min(held_out)


def test_every_rank_gets_as_many_held_out_batches() -> None:
    corpus = load_corpus([], 64)
    for world_size in (1, 2, 3, 4):
        counts = {len(list(corpus.held_out_batches(rank, world_size, 4))) for rank in range(world_size)}
        assert len(counts) == 1


def test_data_comes_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_bytes(b"a" * 500)
    (tmp_path / "folder" / "binary").write_bytes(b"\0" * 500)
    (tmp_path / "b.md").write_bytes(b"b" * 300)
    assert load_corpus([tmp_path / "folder", tmp_path / "b.md"], 16).num_bytes == 800


def test_data_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    with pytest.raises(DataError, match="no such file"):
        load_corpus([tmp_path / "missing"], 16)
    with pytest.raises(DataError, match="no readable text"):
        load_corpus([tmp_path / "empty"], 16)
    with pytest.raises(DataError, match="5 bytes"):
        load_corpus([tmp_path / "short"], 16)


# -- model -------------------------------------------------------------------------------------------------------


def test_presets_have_the_sizes_of_their_names() -> None:
    assert tuple(PRESETS) == PRESET_NAMES
    millions = {"tiny": 1.0, "small": 1.3, "25m": 25.6, "120m": 117.0, "1.3b": 1313.3}
    for name, expected in millions.items():
        with torch.device("meta"):
            assert GPT(PRESETS[name]).num_parameters() / 1e6 == pytest.approx(expected, rel=0.03)


def test_a_fresh_model_knows_nothing_and_sees_no_future() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=2, num_heads=2, dim=32, sequence_length=16))
    tokens = torch.randint(0, 256, (4, 16))
    assert model(tokens, tokens).item() == pytest.approx(np.log(256), rel=0.05)
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])


def test_generation_repeats_and_outgrows_the_sequence() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=1, num_heads=2, dim=32, sequence_length=8, tied=True))
    prompt = torch.tensor([[1, 2, 3]])
    texts = [model.generate(prompt, 12, 0.8, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*texts)
    assert texts[0].shape == (1, 15)


# -- config ------------------------------------------------------------------------------------------------------


def test_options_survive_the_way_to_the_ranks() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for options in (
        TrainOptions("c.json", 1, 7, "tiny", None, None, 0, "out dir", 3, ("a", "b c"), "--x", 0, save=False),
        TrainOptions(model="a folder", sequence_length=9, lora=4, out="x", epochs=0.5, lr=1e-4, batch=2),
        TrainOptions(model="a folder", accumulation=3, precision="bf16", eval_every=7, save_every=2),
        TrainOptions(model="m", data=("a.parquet",), eval_data=("b.jsonl", "c d"), qlora=8),
    ):
        assert options_of(parser.parse_args(list(options.to_arguments()))) == options


def test_the_shipped_config_needs_no_words() -> None:
    prepared = prepare_config(TrainOptions(steps=50), on_gpus=False)
    assert prepared.notes == ()
    assert prepared.document["zero_optimization"]["stage"] == 3
    assert prepared.document["scheduler"]["params"]["total_num_steps"] == 50
    assert "bf16" not in prepared.document
    assert prepare_config(TrainOptions(), on_gpus=True).document["bf16"] == {"enabled": True}


def test_gaps_are_filled_and_said(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "zero_optimization.stage": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 5}},
            }
        )
    )
    prepared = prepare_config(TrainOptions(config=str(file), stage=1, steps=30), on_gpus=False)
    assert prepared.document["zero_optimization"] == {"stage": 1}
    assert prepared.document["train_micro_batch_size_per_gpu"] > 0
    assert prepared.document["optimizer"]["params"]["lr"] > 0
    assert prepared.document["scheduler"]["params"] == {"total_num_steps": 30, "warmup_num_steps": 5}
    assert len(prepared.notes) == 1


def test_flags_take_the_place_of_what_the_config_has(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"

    def prepared(document: dict[str, object], **flags: object) -> dict[str, object]:
        file.write_text(json.dumps(document))
        return prepare_config(TrainOptions(config=str(file), **flags), on_gpus=False).document

    adam = {"type": "Adam", "params": {"lr": 1.0, "betas": [0.9, 0.95]}}
    found = prepared({"train_batch_size": 64, "gradient_accumulation_steps": 16, "optimizer": adam}, batch=2, lr=0.5)
    assert found["train_batch_size"] == 64, "it stays, and the accumulation follows from it"
    assert found["train_micro_batch_size_per_gpu"] == 2
    assert "gradient_accumulation_steps" not in found
    assert found["optimizer"] == {"type": "Adam", "params": {"lr": 0.5, "betas": [0.9, 0.95]}}
    found = prepared({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, accumulation=3, precision="bf16")
    assert found["gradient_accumulation_steps"] == 3
    assert "train_batch_size" not in found
    assert found["bf16"] == {"enabled": True}
    assert prepared({}, lr=0.25)["optimizer"] == {"type": "AdamW", "params": {"lr": 0.25}}


SCHEDULED = {"type": "AdamW", "params": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}, 0.5),
        ({"type": "WarmupLR", "params": {}}, None),
        ({"type": "WarmupDecayLR", "params": {"warmup_max_lr": [1e-3]}}, 0.5),
        ({"type": "WarmupDecayLR", "params": {}}, 0.5),
        ({"type": "WarmupCosineLR", "params": {}}, None),
    ],
)
def test_the_rate_of_the_command_is_that_of_a_schedule(tmp_path: Path, scheduler: dict, expected: float | None) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": SCHEDULED, "scheduler": scheduler}))
    document = prepare_config(TrainOptions(config=str(file), lr=0.5), on_gpus=False).document
    assert document["optimizer"]["params"]["lr"] == 0.5
    assert document["scheduler"]["params"].get("warmup_max_lr") == expected
    kept = prepare_config(TrainOptions(config=str(file)), on_gpus=False).document
    assert kept["scheduler"]["params"].get("warmup_max_lr") == scheduler["params"].get("warmup_max_lr")


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}}, "cycle_max_lr"),
        ({"scheduler": {"type": "LRRangeTest", "params": {}}}, "scheduler.params.lr_range_test_min_lr"),
        ({"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 1}}}, "scheduler.params.max_lr"),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": 0.1}}}, "optimizer.params.muon_lr"),
    ],
)
def test_a_key_that_overrides_the_rate_of_the_command_is_named(tmp_path: Path, document: dict, key: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": SCHEDULED} | document))
    prepare_config(TrainOptions(config=str(file)), on_gpus=False)
    with pytest.raises(OptionError, match=rf"--lr 0\.5 has no effect, because the config has .*{key}"):
        prepare_config(TrainOptions(config=str(file), lr=0.5), on_gpus=False)


@pytest.mark.parametrize("schedule", [None, "StepLR", "CosineAnnealingLR"])
def test_the_rate_of_the_command_replaces_that_of_a_checkpoint(schedule: str | None) -> None:
    """As if the run had begun with this rate, also for torch's schedules, which restore their initial rate."""

    def made(rate: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
        arguments = {"StepLR": (2,), "CosineAnnealingLR": (9,)}
        kind = getattr(torch.optim.lr_scheduler, schedule) if schedule else None
        return optimizer, kind(optimizer, *arguments[str(schedule)]) if kind else None

    def advanced(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> float:
        for _ in range(steps if scheduler else 0):
            optimizer.step()
            scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    saved, straight, resumed = made(0.1), made(0.02), made(0.02)
    advanced(*saved, 3)
    rates, base_rates = [0.02], getattr(resumed[1], "base_lrs", None)
    resumed[0].load_state_dict(saved[0].state_dict())
    if schedule:
        resumed[1].load_state_dict(saved[1].state_dict())
    set_rates(SimpleNamespace(optimizer=resumed[0], lr_scheduler=resumed[1]), rates, base_rates)
    assert resumed[0].param_groups[0]["lr"] == pytest.approx(advanced(*straight, 3))
    assert advanced(*resumed, 4) == pytest.approx(advanced(*straight, 4))


# -- what a run was made with --------------------------------------------------------------------------------------


def parsed(*flags: str) -> TrainOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(list(flags)))


def made_with(folder: Path, *flags: str) -> Path:
    """The folder of a run that has a checkpoint."""
    write_recipe(parsed(*flags, "--out", str(folder)))
    (folder / "checkpoints" / "global_step1").mkdir(parents=True)
    return folder


def test_a_resumed_run_has_the_options_that_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 6} // with a comment')
    flags = ("--data", "notes", "--preset", "tiny", "--seed", "3", "--config", "ds.json", "--stage", "1", "--lr", "0.5")
    run = made_with(tmp_path / "run", *flags, "--steps", "7", "--save-every", "2", "--no-save")
    Path("ds.json").write_text("gone")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = parsed("--resume", str(run), "--steps", "9")
    expected = TrainOptions(
        str(run / "ds_config.json"), 1, 9, "tiny", out=str(run), seed=3, data=(str(tmp_path / "notes"),),
        save=False, save_every=2, resume=True, lr=0.5,
    )  # fmt: skip
    assert found == expected
    assert prepare_config(found, on_gpus=False).document["train_batch_size"] == 6
    write_recipe(TrainOptions(out=str(tmp_path / "epochs"), model="m", epochs=2.5, steps=77))
    recorded = read_recipe(tmp_path / "epochs/recipe.yaml")
    assert (recorded.epochs, hasattr(recorded, "steps")) == (2.5, False), "steps depend on the batch"
    again = parsed("--resume", str(run), "--preset", "tiny", "--data", "../notes", "--seed", "3", "--stage", "3")
    assert (again.steps, again.stage) == (7, 3), "what it was made with may be given again"
    write_recipe(found)  # as the resumed run does
    assert parsed("--resume", str(run)) == found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset", "small"], r"the run uses --preset tiny\. Leave --preset out, or give --preset tiny"),
        (["--seed", "1"], r"the run uses --seed 0\. Leave --seed out, or give --seed 0"),
        (["--data", "other"], r"the run uses --data .*notes\. Leave --data out"),
        (["--model", "llama", "--lora"], r"the run does not use --model\. Leave it out"),
        (["--out", "elsewhere"], r"writes to its own folder\. Leave out --out"),
    ],
)
def test_options_that_contradict_the_run_are_named(tmp_path: Path, flags: list[str], words: str) -> None:
    run = made_with(tmp_path / "run", "--preset", "tiny", "--data", "notes")
    with pytest.raises(OptionError, match=words):
        parsed("--resume", str(run), *flags)


def test_a_folder_that_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(OptionError) as raised:
            parsed("--resume", str(tmp_path / "run"))
        return str(raised.value)

    assert "no such folder" in refused()
    (tmp_path / "run").mkdir()
    assert "recipe.yaml is missing" in refused()
    write_recipe(TrainOptions(out=str(tmp_path / "run")))
    assert "no checkpoint in" in refused()
    assert "--save-every" in refused()
    (tmp_path / "run" / "recipe.yaml").write_text("preset: [ti")
    assert "cannot be read" in refused()
    (tmp_path / "run" / "recipe.yaml").write_text("colour: 1")
    assert "colour is not a key of a recipe" in refused()


# -- the command -------------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    preset = () if {"--model", "--resume"} & {*arguments} else ("--preset", "tiny")
    return subprocess.Popen(
        [sys.executable, "-m", "onefold.tools.cli.main", "train", *preset, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_job_trains_and_reports(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2} // no optimizer')
    flags = ("--config", str(config), "--stage", "2", "--steps", "8", "--eval-every", "4")
    process = start(*flags, "--out", str(tmp_path / "run"))
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    for expected in (
        "missing keys: train_micro",
        "optimizer states  sharded",
        "step     8/8",
        "step     4/8  held-out loss",
        "saving the trained weights\ncomputing the held-out loss\nwriting a sample of 200 bytes\ndrawing the plot\n",
        "a sample",
        f"safetensors.torch.load_file('{tmp_path}/run/model/model.safetensors')",
    ):
        assert expected in stdout
    assert stdout.startswith(f"onefold train: training the built-in GPT, preset tiny; output in {tmp_path}/run\n")
    assert load_file(tmp_path / "run/model/model.safetensors").keys() == GPT(PRESETS["tiny"]).state_dict().keys()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert re.search(r"step     8/8 .*  [\d,]+ tokens/s \([\d,]+ per rank\)  memory", stdout), "and no MFU of a CPU"
    assert {step["mfu"] for step in steps} == {None}
    assert [step["step"] for step in steps if step["held_out_loss"] is not None] == [4]
    assert steps[0]["loss"] == pytest.approx(np.log(256), abs=0.3)  # before a step every byte is as likely
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_ranks"] == len(summary["peak_bytes_per_rank"]) == 2
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    run = RunFile.read(tmp_path / "run")
    assert [row.step for row in run.steps] == list(range(1, 9))
    assert (run.facts["steps"], run.facts["name"]) == (8, "GPT tiny")
    assert {row.tokens for row in run.steps} == {2 * 2 * 4 * 64}, "ranks, micro-steps, sequences, bytes"
    assert run.end is not None
    assert run.end["reason"] == "closed"
    assert f"report: {tmp_path}/run/report.html" in stdout
    assert "GPT tiny: stage 2, 2 ranks" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_without_matplotlib_the_job_trains_and_says_how_to_get_the_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('No module named matplotlib')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    flags = ("--steps", "2", "--ranks", "1", "--sample-length", "0", "--no-save")
    process = start(*flags, "--out", str(tmp_path / "run"))
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    assert "no plot: matplotlib" in stdout
    assert "pip install 'onefold[plots]'" in stdout
    assert "the trained weights were not saved (--no-save)" in stdout
    written = {"metrics.jsonl", "summary.json", "run.jsonl", "report.html", "recipe.yaml"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == written


@pytest.mark.slow
def test_interrupt_ends_after_the_step_with_a_report(tmp_path: Path) -> None:
    process = start("--steps", "100000", "--sample-length", "4", "--out", str(tmp_path / "run"))
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step     1/"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"]
    assert f"interrupted at step {summary['steps_done']}; writing the summary" in stdout
    assert (tmp_path / "run/model/model.safetensors").exists(), "what was trained so far is saved too"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == summary["steps_done"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["launcher", "rank"])
def test_a_signal_of_a_scheduler_saves_for_resume(tmp_path: Path, target: str) -> None:
    flags = ("--sample-length", "0", "--ranks", "2")
    straight = start("--steps", "8", *flags, "--out", str(tmp_path / "straight"))
    straight.communicate(timeout=120)
    process = start("--steps", "8", *flags, "--max-restarts", "1", "--out", str(tmp_path / "run"))
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step     3/"):
        assert process.poll() is None
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if target == "launcher" else int(ranks[-1]), signal.SIGUSR1)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, stderr
    assert stderr == "onefold: stopped by SIGUSR1; all ranks have ended\n"
    assert f"continue with onefold train --resume {tmp_path}/run" in stdout
    assert not (tmp_path / "run" / "summary.json").exists()
    resumed = start("--resume", str(tmp_path / "run"), "--ranks", "2")
    _, stderr = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.parametrize(
    "flags",
    [
        ["--config", "no-such.json"],
        ["--config", "/dev/zero"],
        ["--data", "no-such-folder"],
        ["--ranks", "0"],
        ["--config", "bad.json"],
        ["--resume", "no-such-folder"],
        ["no-such.yaml"],
        ["/dev/zero"],
        ["bad.json"],
        ["--lora", "--qlora", "--model", "model"],
        ["--model", "model", "--data", "rows.parquet"],
        ["--model", "model", "--data", "notes.jsonl", "--eval-data", "missing"],
        ["--model", "no-such-model"],
        ["--model", "/dev/zero"],
        ["--model", "model", "--data", "rows.jsonl"],
        ["--out", "bad.json"],
        ["--lora"],
        ["--epochs", "2"],
        ["--lr", "0"],
        ["--steps", "many"],
        ["--no-save", "--save-16bit-model"],
        ["--stepz", "3"],
    ],
)
def test_mistakes_are_one_message_before_any_rank_starts(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text('{"zero_optimisation": {"stage": 2}}')
    (tmp_path / "rows.jsonl").write_text('\n{"question": "x", "answer": 3}\n')
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"onefold: .+\n", said.err)


@pytest.mark.slow
def test_an_error_that_only_ranks_can_see_is_one_message_too(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 7}')
    process = start("--config", str(config), "--ranks", "2", "--out", str(tmp_path / "run"))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.startswith("onefold: train_")
    assert "ConfigError" not in stderr
    assert "Traceback" not in stderr


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_survives_a_killed_rank_and_goes_on_elsewhere(tmp_path: Path) -> None:
    straight = start("--steps", "10", "--sample-length", "0", "--out", str(tmp_path / "straight"))
    flags = ("--sample-length", "0", "--save-every", "1")
    killed = start("--steps", "10", *flags, "--max-restarts", "1", "--out", str(tmp_path / "run"))
    assert killed.stdout is not None
    while not killed.stdout.readline().startswith("step     4/"):
        assert killed.poll() is None
    ranks = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    stdout, stderr = killed.communicate(timeout=120)
    assert killed.returncode == 0, stderr
    assert "resuming after step" in stdout
    straight.communicate(timeout=120)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")

    longer = start("--resume", str(tmp_path / "run"), "--steps", "12", "--ranks", "1", "--stage", "1", *flags)
    stdout, stderr = longer.communicate(timeout=120)
    assert longer.returncode == 0, stderr
    assert "resuming after step 10" in stdout
    assert losses(tmp_path / "run")[:10] == losses(tmp_path / "straight")
    assert len(losses(tmp_path / "run")) == 12

    settings = tmp_path / "run" / "recipe.yaml"
    before = settings.read_text()
    refused = start("--resume", str(tmp_path / "run"), "--steps", "9", "--prompt", "other", "--ranks", "1")
    _, stderr = refused.communicate(timeout=120)
    assert (refused.returncode, settings.read_text()) == (2, before), "a refused resume changes nothing"
    assert "has completed 12 of 9 steps. Give a larger --steps" in stderr
    settings.write_text(before.replace("tiny", "25m"))
    other = start("--resume", str(tmp_path / "run"), "--steps", "20", "--ranks", "1")
    _, stderr = other.communicate(timeout=120)
    assert other.returncode == 2
    assert stderr.startswith(f"onefold: --resume {tmp_path}/run: ")
    assert "does not fit the model" in stderr
    assert len(stderr.splitlines()) <= 6
    assert not {"load_module_strict", "Traceback", "MisfitError"} & {*re.findall(r"\w+", stderr)}


# -- a model of transformers ------------------------------------------------------------------------------------

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


class Words:
    """A tokenizer whose tokens are the lengths of words."""

    chat_template = None
    eos_token_id = 99

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [77] * add_special_tokens + [len(word) for word in text.split()]}


def lines(tmp_path: Path, *rows: object, length: int = 8) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Rows([str(file)], Tokens(Words(), 99), length, seed=3)


def test_lines_of_json_become_rows(tmp_path: Path) -> None:
    rows = [{"text": "a bb ccc"}, {"prompt": "dddd e", "completion": "ff"}]
    source = lines(tmp_path, *rows, {"text": "held out"})
    rows_of_tokens = sorted(source.train_rows(0, 2))
    assert rows_of_tokens[0] == ([77, 1, 2, 3, 99], [-100, 1, 2, 3, 99]), "as the tokenizer begins a text"
    assert rows_of_tokens[1] == ([77, 4, 1, 2, 99], [-100, -100, -100, 2, 99]), "nothing is learnt of a prompt"
    assert list(source.held_out_rows(0, 1, 2)) == [([([77, 4, 3, 99], [-100, 4, 3, 99])], 1)]
    cut = lines(tmp_path, {"text": "a bb ccc"}, {"text": "a"}, length=3)
    assert cut.train_rows(0, 1) == [([77, 1, 2], [-100, 1, 2])]
    long = lines(tmp_path, {"prompt": "a bb ccc dddd eeeee", "completion": "x yy"}, {"text": "a"}, length=6)
    assert long.train_rows(0, 1) == [([77, 4, 5, 1, 2, 99], [-100, -100, -100, 1, 2, 99])], "a prompt's end"


def test_every_line_comes_once_an_epoch_whatever_the_batches(tmp_path: Path) -> None:
    source = lines(tmp_path, *({"text": "x" * number} for number in range(1, 41)))
    for sizes in ([1] * 38, [2] * 19, [4] * 5 + [1] * 18):
        firsts = np.cumsum([0, *sizes])
        drawn = [
            row[0][1] for first, size in zip(firsts, sizes, strict=False) for row in source.train_rows(first, size)
        ]
        assert sorted(drawn) == list(range(1, 39)) != drawn


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (2, 4), (3, 50), (7, 16)])
def test_all_rows_of_evaluation_data_are_evaluated_once(tmp_path: Path, world_size: int, batch_size: int) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(f'{{"text": "{"x" * number}"}}\n' for number in range(1, 101)))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n' * 3000)
    source = Rows([str(file)], Tokens(Words(), 99), 8, seed=3, held_out=[str(held_out)])
    batches = [list(source.held_out_rows(rank, world_size, batch_size)) for rank in range(world_size)]
    assert len({len(found) for found in batches}) == 1, "all ranks take part in every forward"
    assert all(len(rows) == max(num, 1) for found in batches for rows, num in found)
    evaluated = [row[0][1] for found in batches for rows, num in found for row in rows[:num]]
    assert sorted(evaluated) == list(range(1, 101))
    assert source.describe().endswith("3,000 rows of " + str(file) + " (text), 100 held out")
    own = Rows([str(file)], Tokens(Words(), 99), 8, seed=3)
    assert own.describe().endswith("(text), 150 held out, 64 of them evaluated")
    ranks = range(world_size)
    assert sum(num for rank in ranks for _, num in own.held_out_rows(rank, world_size, batch_size)) == 64


class ChatWords(Words):
    """`Words` with a chat template that prints the first token of a text."""

    chat_template = "begin"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return " ".join(["<begin>", *(each["content"] for each in messages)])

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = [77 if word == "<begin>" else len(word) for word in text.split()]
        return {"input_ids": [77] * add_special_tokens + ids}


def test_a_chat_template_alone_begins_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bb"}]
    for row in ({"messages": messages}, {"conversations": turns}):
        file = tmp_path / "rows.jsonl"
        file.write_text(f"{json.dumps(row)}\n" * 2)
        source = Rows([str(file)], Tokens(ChatWords(), 99), 8, seed=3)
        assert source.train_rows(0, 1) == [([77, 1, 2, 99], [77, 1, 2, 99])], "one begin, that of the template"
    source = lines(tmp_path, {"text": "a bb"}, {"text": "c"})
    assert source.train_rows(0, 1)[0][0] == [77, 1, 2, 99], "the tokenizer begins a text"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"body": "x", "number": 3}, r"has body \(string\), number \(number\)\. Give text"),
        ([1], "expected an object, .* not array"),
        ({}, "has nothing"),
        ({"text": None}, r"has text \(null\)"),
        ({"messages": []}, "chat template"),
        ({"messages": "hello"}, "a list of objects with role"),
        ({"text": " "}, "text is empty"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, row: object, words: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl, line 3: .*{words}"):
        lines(tmp_path, {"text": "a"}, {"text": "b"}, row)


def test_rows_of_alpaca_are_prompts_with_completions(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Sing.", "input": "", "output": "la"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_first_rows([str(tmp_path)])
    source = Rows([str(file)], Tokens(None, 0), 512, seed=0)
    with_input, without = (source._row(index) for index in range(2))
    for (tokens, labels), prompt, answer in (
        (with_input, f"{ALPACA_HEAD.format(ALPACA_INPUT)}\n\n### Instruction:\nAdd.\n\n### Input:\n1 2", "3"),
        (without, f"{ALPACA_HEAD.format('')}\n\n### Instruction:\nSing.", "la"),
    ):
        text = f"{prompt}\n\n### Response:\n"
        assert bytes(tokens[:-1]).decode() == text + answer
        assert [label for label in labels if label != -100] == [*answer.encode(), 0], "only the answer is learnt"


def test_epochs_are_steps_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows:
        num_rows: int | None = 38

    monkeypatch.setenv("WORLD_SIZE", "2")
    options = TrainOptions(model="m", epochs=1.5, batch=3, accumulation=2)
    assert count_steps(options, Rows()).steps == 5  # 57 rows, 12 in a step
    Rows.num_rows = None
    with pytest.raises(DataError, match="--epochs needs rows"):
        count_steps(options, Rows())


def test_epochs_continue_with_the_samples_that_are_left() -> None:
    """And a schedule ends at the last step, wherever the batch of the first ones would have put it."""
    weight = torch.nn.Parameter(torch.ones(1))
    schedule = WarmupCosineLR(torch.optim.SGD([weight], lr=1.0), total_num_steps=20, warmup_num_steps=2)
    schedule.step(5)
    engine = SimpleNamespace(global_steps=5, global_samples=20, batch=SimpleNamespace(train=2), lr_scheduler=schedule)
    options = continue_epochs(engine, TrainOptions(model="m", epochs=1, steps=20), SimpleNamespace(num_rows=41))
    assert options.steps == 5 + 11
    straight = WarmupCosineLR(torch.optim.SGD([weight], lr=1.0), total_num_steps=16, warmup_num_steps=2)
    straight.step(5)
    assert schedule.get_last_lr() == straight.get_last_lr()


@needs_transformers
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_an_adapter_of_random_weights_is_refused(tmp_path: Path, adapter: str) -> None:
    """Its weights would not be saved, so the adapter could not be used."""
    from transformers import LlamaConfig

    from onefold.tools.train.huggingface import HuggingFaceTask

    LlamaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    options = TrainOptions(model=str(tmp_path / "config.json"), sequence_length=8)
    HuggingFaceTask(options)
    with pytest.raises(DataError, match=r"LoRA of rank 4: --model .*config.json has no weights"):
        HuggingFaceTask(replace(options, **{adapter: 4}))


@needs_transformers
@pytest.mark.slow
def test_epochs_continue_on_another_number_of_ranks(tmp_path: Path) -> None:
    """The rest of the rows is trained on, whatever the batch of a step, with the rate of the command."""
    examples = Path(__file__).parents[2] / "examples/huggingface"
    subprocess.run([sys.executable, str(examples / "tiny.py"), str(tmp_path / "base")], check=True, capture_output=True)
    data, held_out, config = tmp_path / "rows.jsonl", tmp_path / "held-out.jsonl", tmp_path / "ds.json"
    data.write_text('{"text": "the cat sleeps"}\n' * 40)
    held_out.write_text('{"text": "the dog runs"}\n' * 3)
    config.write_text('{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}')
    flags = ["--model", str(tmp_path / "base"), "--data", str(data), "--eval-data", str(held_out), "--batch", "2"]
    flags += ["--config", str(config), "--save-every", "1", "--sample-length", "0", "--no-save"]
    first = start(*flags, "--epochs", "0.5", "--ranks", "2", "--out", str(tmp_path / "run"))
    stdout, stderr = first.communicate(timeout=120)
    assert first.returncode == 0, stderr
    assert "training: 5 steps of 4 sequences, 0.5 epochs" in stdout
    resumed = start("--resume", str(tmp_path / "run"), "--epochs", "1", "--ranks", "1", "--lr", "0.01")
    stdout, stderr = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, stderr
    assert "training: 15 steps of 2 sequences, 1 epochs" in stdout, "20 rows on two ranks, and 20 on one"
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["learning_rate"] for step in metrics] == [0.1] * 5 + [0.01] * 10
    assert "epochs: 1.0" in (tmp_path / "run/recipe.yaml").read_text()
    again = start("--resume", str(tmp_path / "run"), "--ranks", "2")
    _, stderr = again.communicate(timeout=120)
    assert again.returncode == 2
    assert "has completed 15 of 15 steps. Give a larger --epochs" in stderr


@needs_transformers
@pytest.mark.slow
def test_a_model_of_transformers_is_trained_in_every_stage(tmp_path: Path) -> None:
    """From a folder with weights: the losses of every stage are the same, and what was saved loads again."""
    examples = Path(__file__).parents[2] / "examples/huggingface"
    subprocess.run([sys.executable, str(examples / "tiny.py"), str(tmp_path / "base")], check=True, capture_output=True)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "the cat ", "completion": "sleeps at home"}\n{"text": "the dog runs"}\n' * 20)
    common = ["--model", str(tmp_path / "base"), "--data", str(data), "--steps", "4", "--sample-length", "3"]
    losses: dict[str, list[float]] = {}
    for name, more in {"two": ["--stage=2"], "three": ["--stage=3"], "lora": ["--stage=3", "--lora=4"]}.items():
        process = start(*common, *more, "--out", str(tmp_path / name), "--save-every=2")
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr[-2000:]
        assert "LlamaForCausalLM" in stdout
        assert f"{tmp_path}/{name}/{'adapter' if name == 'lora' else 'model'}; load it with" in stdout
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in metrics]
    assert losses["two"] == losses["three"]
    assert losses["lora"][0] == losses["two"][0]
    assert {path.name for path in (tmp_path / "lora/adapter").glob("adapter*")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    check = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM as A, AutoTokenizer as T\n"
        "two, three, base = (A.from_pretrained(folder).state_dict() for folder in sys.argv[1:])\n"
        "assert all(torch.equal(two[name], three[name]) for name in two)\n"
        "assert not torch.equal(two['lm_head.weight'], base['lm_head.weight'])\n"
        "assert T.from_pretrained(sys.argv[1])('the cat')['input_ids']\n"
    )
    folders = [str(tmp_path / name) for name in ("two/model", "three/model", "base")]
    subprocess.run([sys.executable, "-c", check, *folders], check=True, timeout=120)
    longer = start("--resume", str(tmp_path / "lora"), "--steps", "5", "--sample-length", "0")
    stdout, stderr = longer.communicate(timeout=300)
    assert longer.returncode == 0, stderr[-2000:]
    assert "resuming after step 4" in stdout
    assert f"{tmp_path}/lora/adapter; load it with" in stdout
