"""`onefold compare`: settings as they are typed, and real runs of them beside each other."""

from __future__ import annotations

import json

import pytest

from onefold.cli.commands import UsageError
from onefold.cli.compare import recommend
from onefold.cli.main import main
from onefold.cli.trials import Trial, TrialJob, parse_setting, split_settings
from onefold.cli.tune import Knob, knobs_of
from onefold.config import load_config
from onefold.report.run_file import MemoryRow, StepRow

BOTH = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("2", {"stage": 2}),
        ("3+cpu", {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
        ("3+cpu+param", {"stage": 3, **BOTH}),
        ("1+nvme", {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/drive"}}),
    ],
)
def test_a_setting_is_a_stage_and_what_is_offloaded(text, zero):
    assert parse_setting(text, "/drive").zero == zero


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", "expected a stage"),
        ("3+disk", "'disk' is not known"),
        ("2+cpu+param", "stage 3"),
        ("3+nvme", "--nvme-path"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        split_settings(text, None)


def test_a_setting_takes_the_place_of_the_configs_own(tmp_path):
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 7}
    document = {"train_batch_size": 64, "gradient_accumulation_steps": 16, "zero_optimization": zero}
    found = TrialJob(document, (), 2, 4, tmp_path).config(parse_setting("3"), 8)
    assert found == {
        "train_batch_size": 64,  # as it was: the accumulation follows from it
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 7},
    }


def trial(name: str, seconds: float, peak: int, outcome: str = "done", loss: float = 1.0) -> Trial:
    memory = MemoryRow({}, 0, peak, peak)
    row = StepRow(1, 8, 8, 0.0, seconds, loss, (0.1,), 1.0, None, False, {}, memory, ())
    return Trial(parse_setting(name), 4, outcome, "it said so", (row,) * 5 if outcome == "done" else ())


def test_the_recommendation_is_the_fastest_and_of_equals_the_smallest():
    lost = trial("1", 0, 0, "out of memory")
    said = recommend([trial("0", 1.0, 400), trial("2", 1.01, 300), trial("3", 1.5, 100), lost])
    assert said.startswith("Take 2: 1.010 s a step")
    assert "3 takes 0.2 kB less and 1.49 times as long" in said
    assert "Out of memory: 1" in said
    assert "same loss" in said
    assert "differ" in recommend([trial("0", 1.0, 400), trial("2", 1.0, 300, loss=2.0)])
    assert recommend([trial("0", 0, 0, "failed")]) == "None of these runs: 0 ended with failed (it said so)"


def test_knobs_are_those_that_a_setting_reads():
    assert {knob.key for knob in knobs_of(parse_setting("2"))} == {"reduce_bucket_size"}
    keys = {knob.key for knob in knobs_of(parse_setting("3+cpu"))}
    assert keys == {
        "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "ratio"
    }  # fmt: skip
    turned = Knob("ratio", (0.4,)).applied_to(parse_setting("2+cpu"), 0.4)
    assert turned.zero == {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["tune", "--stages", "1", "--preset", "tiny", "--steps", "4", "--out", str(tmp_path / "tune"), "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    records = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("run.jsonl")}
    assert len(records) == 3  # the setting, and two values of its bucket
    assert main(arguments) == 0  # nothing is run again
    assert json.loads(capsys.readouterr().out) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("run.jsonl")} == records
    chosen = load_config(first["written"])
    assert chosen.zero_optimization.stage == 1
    assert (tmp_path / "cache" / "onefold" / "tiers.json").exists()


@pytest.mark.slow
def test_settings_are_run_beside_each_other(tmp_path, capsys):
    out = tmp_path / "compare"
    arguments = ["--stages", "1,3+cpu+param", "--preset", "tiny", "--steps", "3", "--out", str(out), "--json"]
    assert main(["compare", *arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    one, three = facts["settings"]
    assert [one["outcome"], three["outcome"]] == ["done", "done"]
    assert one["losses"] == three["losses"]  # bit for bit
    assert one["peak_bytes"] > 0
    assert one["sent_bytes"] > 0
    assert json.loads((out / "compare.json").read_text()) == facts
    assert (out / "1-batch4" / "run.jsonl").exists()
    assert "same loss" in facts["recommendation"]
