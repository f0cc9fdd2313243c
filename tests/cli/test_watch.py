"""`onefold watch`: a run in the terminal from its record, while it is written, when it stalls, and after its end."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from records import end, facts, row, write_run

from onefold.report.plan_report import TrafficRow
from onefold.report.run_file import RunFile, line_of, write_line
from onefold.tools.cli.main import main
from onefold.tools.cli.watch_run import line_of_now, rows_of, silence, sparkline

pytestmark = pytest.mark.program

COMMAND = [sys.executable, "-m", "onefold.tools.cli.main", "watch"]


def steps(num: int, **more: object) -> list[str]:
    traffic = (TrafficRow("gather", "data", 2, 2_000_000), TrafficRow("gather", "near", 1, 1_000_000))
    return [line_of(row(n + 1, loss=4.0 / (n + 1), traffic=traffic, **more)) for n in range(num)]


def test_once_says_what_there_is(tmp_path, capsys):
    write_run(tmp_path, facts(), write_line("note", steps=10, name="GPT"), *steps(4), end())
    assert main(["watch", str(tmp_path), "--once"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.replace("learning ", "").splitlines())
    assert said["run"] == "GPT: stage 2, 2 ranks"
    assert said["state"] == "ended"
    assert said["step"] == "4 of 10"
    assert said["loss"].split() == ["1.0000", "█▃▂▁"]
    assert said["rate"] == "0.001, 0.002"
    assert said["gradient"] == "norm  0.5"
    assert said["speed"].startswith("8 samples/s")
    assert said["memory"] == "model state: device 18.0 kB; total 88.0 kB, peak 99.0 kB"
    assert said["traffic"] == "gather 3.0 MB"
    assert said["time"] == "forward 250 ms, backward 500 ms, step 125 ms, outside 125 ms"


def test_once_without_a_run_says_so_and_fails(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none"), "--once"]) == 2
    assert "no run in" in capsys.readouterr().err
    write_run(tmp_path, "")
    assert main(["watch", str(tmp_path), "--once"]) == 2


def test_a_bad_file_is_an_error(tmp_path, capsys):
    write_run(tmp_path, facts(), "{oops\n", *steps(1))
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert "run.jsonl: line 2" in capsys.readouterr().err


def test_silence_is_told_after_longer_than_steps_take(tmp_path):
    begin = 1_700_000_000.0
    write_run(tmp_path, facts(), *steps(3))  # a second each, the last at begin + 3
    run = RunFile.read(tmp_path)
    assert silence(run, begin + 12) is None
    assert silence(run, begin + 43) == 40
    assert dict(rows_of(run, begin + 43))["state"] == "no new line for 40 s"
    assert "no new line for 40 s" in line_of_now(run, begin + 43)
    write_run(tmp_path, facts(), *steps(3, seconds=60.0))
    assert silence(RunFile.read(tmp_path), begin + 43) is None  # within a step of this run
    write_run(tmp_path, facts())
    assert silence(RunFile.read(tmp_path), begin + 30) == 30  # no first step
    write_run(tmp_path, facts(), *steps(3), end())
    assert silence(RunFile.read(tmp_path), begin + 1000) is None


def test_tokens_and_mfu_are_shown_if_the_record_has_them(tmp_path):
    write_run(tmp_path, facts(peak_flops=2e15), *(row(step, tokens=4000, flops=0.5e15) for step in (1, 2)))
    run = RunFile.read(tmp_path)
    assert dict(rows_of(run, 0.0))["speed"].endswith("ms/step, 4,000 tokens/s (2,000 per rank), MFU 25.0%")
    assert "samples/s, 4,000 tokens/s, MFU 25.0%" in line_of_now(run, 0.0)
    write_run(tmp_path, facts(), *(row(step) for step in (1, 2)))
    assert "tokens" not in dict(rows_of(RunFile.read(tmp_path), 0.0))["speed"]


def test_time_left_is_told_by_the_last_steps(tmp_path):
    write_run(tmp_path, facts(), write_line("note", steps=63), *steps(3, seconds=60.0))
    found = dict(rows_of(RunFile.read(tmp_path), 1_700_000_003.0))
    assert found["step"] == "3 of 63, 1:00:00 left"
    assert found["state"] == "running"


def test_nothing_in_a_record_moves_the_cursor(tmp_path, capsys):
    bell = "a\x1b[2Jb\x07\rc\n\x9b"
    write_run(tmp_path, facts(), write_line("note", name=bell), *steps(1), end(reason="error", error=bell))
    assert main(["watch", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    assert "a?[2Jb??c??" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


@pytest.mark.parametrize(
    ("values", "shown"),
    [([1.0], "▁"), ([0.0, 7.0], "▁█"), ([1.0, math.nan, 2.0, math.inf], "▁×█×"), ([math.nan], "×")],
)
def test_a_sparkline_goes_from_the_least_to_the_greatest(values, shown):
    assert sparkline(values) == shown
    assert len(sparkline([float(n) for n in range(1000)])) <= 48


def wait_for(read, text: str) -> str:
    said = ""
    deadline = time.monotonic() + 60
    while text not in said and time.monotonic() < deadline:
        said += read()
    assert text in said, said
    return said


def test_it_waits_for_a_run_follows_it_and_ends_with_it(tmp_path):
    """In a pipe: plain lines."""
    process = subprocess.Popen([*COMMAND, str(tmp_path / "run"), "--every", "0.05"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    wait_for(process.stdout.readline, "waiting for run.jsonl")
    path = write_run(tmp_path / "run", facts(), *steps(2))
    wait_for(process.stdout.readline, "step 2 ")
    with path.open("a") as file:
        file.write("".join(steps(3)[2:]) + end())
    rest, _ = process.communicate(timeout=60)
    assert "step 3 " in rest
    assert rest.rstrip().endswith("ended")
    assert "\x1b" not in rest
    assert process.returncode == 0


def test_on_a_terminal_it_draws_and_ends(tmp_path):
    path = write_run(tmp_path, facts(), write_line("note", steps=5), *steps(2))
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen([*COMMAND, str(tmp_path), "--every", "0.05"], stdout=there, env=environment)
    os.close(there)

    def read() -> str:
        try:
            return os.read(here, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            return ""

    said = wait_for(read, "2 of 5")
    assert "\x1b[" in said
    with path.open("a") as file:
        file.write(end())
    wait_for(read, "ended")
    assert process.wait(timeout=60) == 0
    os.close(here)


def test_reading_a_record_needs_no_torch():
    code = (
        "import sys, onefold.tools.cli.watch_run, onefold.tools.cli.reports\n"
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_look_more_often_than_never_is_needed(tmp_path: Path, capsys):
    assert main(["watch", str(tmp_path), "--every", "0"]) == 2
    assert "--every" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "endless", "cut"])
def test_a_path_that_is_no_record_is_one_line_at_once(tmp_path, capsys, kind):
    path = tmp_path / "run.jsonl"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # takes no space on disk
    else:
        path.write_text(facts()[:50])
    for command in (["report", str(tmp_path)], ["watch", str(tmp_path), "--once"], ["watch", f"{path}/x", "--once"]):
        assert main(command) == 2
        said = capsys.readouterr()
        assert re.fullmatch(r"onefold: .+\n", said.err)
        assert said.out == ""
