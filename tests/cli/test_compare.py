"""`onefold compare`: settings as they are typed, and real runs of them beside each other."""

from __future__ import annotations

import json

import pytest

from onefold.config import load_config
from onefold.report.run_file import MemoryRow, StepRow
from onefold.tools.cli.compare import recommend
from onefold.tools.cli.main import main
from onefold.tools.cli.terminal import progress_bar
from onefold.tools.cli.trials import Trial, TrialJob, parse_setting, split_settings
from onefold.tools.cli.tune import Knob, knobs_of
from onefold.tools.cli.usage import UsageError
from onefold.tools.estimate.question import Setting

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
    assert parse_setting(text, "/drive") == zero


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", "is not a setting. Give a stage"),
        ("3+disk", "'disk' is unknown"),
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
    found = TrialJob(document, (), 2, 4, tmp_path).config(setting("3"), 8)
    assert found == {
        "train_batch_size": 64,  # as it was: the accumulation follows from it
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 7},
    }


def setting(text: str) -> Setting:
    (found,) = split_settings(text, None)
    return found


def trial(
    name: str, seconds: float, peak: int, outcome: str = "done", loss: float = 1.0, rounds: tuple[float, ...] = ()
) -> Trial:
    memory = MemoryRow({}, 0, peak, peak)
    row = StepRow(1, 8, 8, 0.0, seconds, loss, (0.1,), 1.0, None, False, {}, memory, ())
    steps = (row,) * 5 if outcome == "done" else ()
    return Trial(setting(name), 4, outcome, "it said so", steps, rounds=rounds)


def test_the_recommendation_is_the_fastest_and_within_the_noise_the_smallest():
    lost = trial("1", 0, 0, "out of memory")
    close = trial("0", 1.0, 400, rounds=(1.0, 0.98, 1.04)), trial("2", 1.01, 300, rounds=(1.02, 1.3, 1.01))
    said = recommend([*close, trial("3", 1.5, 100, rounds=(1.5, 1.45, 1.6)), lost])
    assert said.startswith("Use 2: 1.020 s/step")
    assert "The speeds of 0, 2 do not differ beyond the noise; 2 takes the least memory" in said
    assert "use 3: 0.2 kB less, 1.47 times the step time" in said
    apart = recommend([trial("0", 1.0, 400, rounds=(1.0, 1.01)), trial("2", 1.1, 300, rounds=(1.02, 1.1))])
    assert apart.startswith("Use 0: 1.005 s/step")
    assert "noise" not in apart
    assert "Out of memory: 1" in said
    assert "last losses are equal" in said
    assert "differ" in recommend([trial("0", 1.0, 400), trial("2", 1.0, 300, loss=2.0)])
    assert recommend([trial("0", 0, 0, "failed")]) == "No setting completed. 0: failed (it said so)"


def test_knobs_are_those_that_a_setting_reads_and_that_make_a_difference():
    defaults = vars(load_config({}).zero_optimization)

    def knobs(text: str, trained: int, frozen: int = 0) -> dict[str, tuple[float, ...]]:
        return {knob.key: knob.values for knob in knobs_of(setting(text), defaults, trained, frozen)}

    large = {"reduce_bucket_size": (5e7, 2e8), "stage3_prefetch_bucket_size": (0, 2e8),
             "stage3_max_live_parameters": (1e8, 3e9), "ratio": (0.7, 0.4)}  # fmt: skip
    assert knobs("3+cpu", int(7e9)) == large
    assert knobs("2", int(7e9)) == {"reduce_bucket_size": (5e7, 2e8)}
    assert knobs("2", int(1e8)) == {"reduce_bucket_size": (5e7,)}, "2e8 and the default hold all of them"
    assert knobs("2", int(1e6)) == {}
    assert knobs("3", int(1e6)) == {"stage3_prefetch_bucket_size": (0,)}
    assert knobs("3", int(1e6), int(7e9)).keys() == large.keys() - {"reduce_bucket_size", "ratio"}
    turned = Knob("ratio", (0.4,)).applied_to(setting("2+cpu"), 0.4)
    assert turned.zero == {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}


def test_folders_are_named_after_what_was_tried(tmp_path):
    job = TrialJob({}, (), 2, 4, tmp_path)
    turned = Knob("reduce_bucket_size", (2e8,)).applied_to(setting("3+cpu"), 2e8)
    assert job.folder_of(turned, 4).name == "3+cpu-reduce_bucket_size=2e+08-batch4"
    assert job.folder_of(setting("2"), 4, round=3).name == "2-batch4-round3"


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys):
    with progress_bar("compare", in_bytes=False, in_lines=True) as tell:
        for place, name in enumerate(("0", "0", "1")):
            tell(name, place, 3)
    assert capsys.readouterr().err == "compare: 0 (0 of 3 done)\ncompare: 1 (2 of 3 done)\n"


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["tune", "--stages", "3", "--preset", "tiny", "--steps", "4", "--out", str(tmp_path / "tune"), "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    records = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("run.jsonl")}
    assert len(records) == 2  # the setting, and without prefetch; all other buckets hold the whole model
    assert main(arguments) == 0  # nothing is run again
    assert json.loads(capsys.readouterr().out) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("run.jsonl")} == records
    chosen = load_config(first["written"])
    assert chosen.zero_optimization.stage == 3
    assert (tmp_path / "cache" / "onefold" / "tiers.json").exists()


@pytest.mark.slow
def test_settings_are_run_beside_each_other(tmp_path, capsys):
    out = tmp_path / "compare"
    arguments = ["--stages", "1,3+cpu+param", "--preset", "tiny", "--steps", "3", "--out", str(out), "--json"]
    assert main(["compare", *arguments, "--rounds", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    one, three = facts["settings"]
    assert [one["outcome"], three["outcome"]] == ["done", "done"]
    assert one["losses"] == three["losses"]  # bit for bit
    assert one["peak_bytes"] > 0
    assert one["sent_bytes"] > 0
    assert json.loads((out / "compare.json").read_text()) == facts
    assert (out / "1-batch4" / "run.jsonl").exists()
    assert (out / "3+cpu+param-batch4-round2" / "run.jsonl").exists()
    assert one["step_seconds_spread"][0] <= one["step_seconds"] <= one["step_seconds_spread"][1]
    assert "last losses are equal" in facts["recommendation"]
