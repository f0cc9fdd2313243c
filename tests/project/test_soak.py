"""The soak and the kills: they find a job that does not resume exactly, and onefold's jobs do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benchmarks lie beside the package, and are not installed

from benchmarks.kills import report
from benchmarks.launch import ROOT
from benchmarks.soak import parse_arguments
from benchmarks.soak_records import Records


class Writer:
    """The records of a job, line by line."""

    def __init__(self, folder: Path, num_ranks: int = 2) -> None:
        self.folder = folder
        self.records = Records(folder, num_ranks)

    def resume(self, start: int, step: int, world: int = 2) -> None:
        for rank in range(world):
            event = {"event": "resumed", "start": start, "step": step, "world": world, "pid": start + rank}
            with (self.folder / f"events.{rank}").open("a") as file:
                file.write(json.dumps(event) + "\n")

    def train(self, start: int, steps: range, suffix: str = "", world: int = 2) -> None:
        for rank in range(world):
            with (self.folder / f"losses.{rank}").open("a") as file:
                file.writelines(f"{step} {start} loss{step}.{rank}{suffix}\n" for step in steps)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def test_a_repeated_step_must_have_the_same_losses(writer: Writer) -> None:
    writer.resume(100, 0)
    writer.train(100, range(1, 8))
    assert writer.records.read() == []
    writer.resume(200, 4)
    writer.train(200, range(5, 9))
    assert writer.records.read() == []
    assert (writer.records.num_repeated, writer.records.newest_step) == (3, 8)
    writer.resume(300, 6)
    writer.train(300, range(7, 8), suffix="x")
    first, second = writer.records.read()
    assert first.startswith("rank 0, step 7: the losses ['loss7.0x'] differ")
    assert second.startswith("rank 1, step 7: ")


def test_steps_on_another_number_of_ranks_are_other_steps(writer: Writer) -> None:
    writer.resume(100, 0)
    writer.train(100, range(1, 8))
    writer.resume(200, 4, world=1)
    writer.train(200, range(5, 9), suffix="x", world=1)
    assert writer.records.read() == []
    assert writer.records.segments == ((0, 2), (4, 1))
    curve = writer.records.curve()
    assert curve[0, 4] == ["loss4.0"]
    assert curve[0, 5] == ["loss5.0x"]
    assert (1, 5) not in curve
    # A checkpoint of the first start is loaded again, on two ranks.
    writer.resume(300, 2)
    writer.train(300, range(3, 5))
    assert writer.records.read() == []
    assert writer.records.segments == ((0, 2),)


def test_runs_with_other_losses_or_steps_differ(writer: Writer, tmp_path: Path) -> None:
    writer.resume(100, 0)
    writer.train(100, range(1, 8))
    writer.records.read()
    for suffix, steps, words in (("", 8, ""), ("x", 8, "rank 0, step 1: "), ("", 6, "step 6 and 3 others are in one")):
        folder = tmp_path / f"other{suffix}{steps}"
        folder.mkdir()
        other = Writer(folder)
        other.resume(1, 0)
        other.train(1, range(1, steps), suffix)
        other.records.read()
        assert words in " ".join(writer.records.compare(other.records))
        assert bool(writer.records.compare(other.records)) == bool(words)


def test_losses_before_their_start_is_known_are_read_later(writer: Writer) -> None:
    writer.train(100, range(1, 3))
    assert writer.records.read() == []
    assert writer.records.newest_step == 0
    writer.resume(100, 0)
    assert writer.records.read() == []
    assert writer.records.newest_step == 2


def test_a_fault_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(["--faults", "fill the disk,kill a rank"]).faults == ["fill the disk", "kill a rank"]
    with pytest.raises(SystemExit):
        parse_arguments(["--faults", "kill a rank,kill a bank"])
    assert "--faults kill a bank: no such fault. Choose from kill a rank," in capsys.readouterr().err


def run(module: str, *arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("sabotage", [(), ("--sabotage", "manifest"), ("--sabotage", "random numbers")], ids=str)
def test_kills_lose_no_checkpoint_and_a_sabotaged_job_is_found(tmp_path: Path, sabotage: tuple[str, ...]) -> None:
    """Kill a job of two ranks, with saves in the foreground. One that writes its manifests in place loses some."""
    tally = tmp_path / "tally.jsonl"
    # It ends at the first lost checkpoint, for which a kill must fall into the write of a manifest.
    number = "80" if "manifest" in sabotage else "12"
    done = run("kills", "--kills", number, "--seed", "1", "--tally", str(tally), *sabotage)
    assert done.returncode == (1 if sabotage else 0), done.stderr
    (line,) = [json.loads(line) for line in tally.read_text().splitlines()]
    assert bool(line["problems"]) == bool(sabotage)
    assert sabotage or line["checkpoints_verified"] > 0
    assert "| sum " in report(tally)
    if "manifest" in sabotage:
        assert "is published, but not loadable" in line["problems"][0]


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("more", [("--offload",), ("--reshape", "--stage", "2")], ids=" ".join)
def test_two_minutes_of_faults_do_not_change_a_bit(tmp_path: Path, more: tuple[str, ...]) -> None:
    folder = tmp_path / "soak"
    done = run("soak", "--minutes", "2", "--every", "5", "--seed", "1", "--keep", str(folder), *more, timeout=1500)
    assert done.returncode == 0, done.stderr
    assert "are bit-equal to those of the run without faults" in done.stdout
    starts = [json.loads(line)["event"] for line in (folder / "soak" / "events.0").read_text().splitlines()]
    assert starts.count("resumed") > 2


@pytest.mark.slow
@pytest.mark.program
def test_a_job_that_does_not_resume_its_data_is_found() -> None:
    only = ("--faults", "kill all ranks", "--nodes", "1")
    done = run("soak", "--minutes", "1", "--every", "3", *only, "--sabotage", "data")
    assert done.returncode == 1
    assert "differ" in done.stderr
