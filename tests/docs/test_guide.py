"""The guide and `get started` tell the truth: scripts run, configs load, and commands say what the pages show.

`python tests/docs/test_guide.py` writes what `onefold plan` says today into the guide: its blocks, and the table of
section 3. Sentences that name one of these numbers are found by `test_numbers_in_sentences_stand_in_a_block`.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.config import ConfigError, load_config
from onefold.offload import host_memory, swap_folder
from onefold.optim.loss_scale import DynamicLossScale, LossScaleError
from onefold.plan import make_plan
from onefold.tools.cli.commands import COMMANDS
from onefold.tools.cli.main import build_parser, main
from onefold.tools.estimate.forecast import forecast
from onefold.tools.estimate.machines import GB, find_machine
from onefold.tools.estimate.models import find_model
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, Setting

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GUIDE = DOCS / "guide.md"
TEXT = GUIDE.read_text()
START = (DOCS / "get-started.md").read_text()


@dataclass(frozen=True)
class Block:
    """What stands between two fences. `kind` is the first word after the first, `name` the rest: the file that it is,
    or what else there is to say.
    """

    kind: str
    name: str
    body: str


def blocks(kind: str, text: str = TEXT) -> list[Block]:
    found = re.findall(r"^```(\w+) ?(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found if each[0] == kind]


def block(kind: str, name: str) -> str:
    (found,) = [each.body.strip("\n") for each in blocks(kind) if each.name == name]
    return found


def commands(body: str) -> Iterator[tuple[str, list[str]]]:
    """Each `$ command` with the lines that it is said to print."""
    for part in ("\n" + body).split("\n$ ")[1:]:
        command, *said = part.splitlines()
        yield command, [line for line in said if line.strip()]


def write_files(folder: Path) -> None:
    for each in (*blocks("python", START), *blocks("python"), *blocks("json")):
        if each.name:
            path = folder / each.name
            path.parent.mkdir(exist_ok=True)
            path.write_text(each.body)


def run(command: str, folder: Path, *, fails: bool = False) -> list[str]:
    program, *arguments = shlex.split(command)
    assert program in ("onefold", "python")
    if program == "python" or arguments[0] in ("launch", "train"):
        started = [sys.executable, *(["-m", "onefold.tools.cli.main"] if program == "onefold" else [])]
        done = subprocess.run(
            [*started, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stdout.splitlines()
    printed = io.StringIO()
    with chdir(folder), redirect_stdout(printed):
        assert main(arguments) in (0, 1), command
    return printed.getvalue().splitlines()


# -- what onefold plan says --------------------------------------------------------------------------------------------


def first_cell(line: str) -> str:
    return "take" if line.startswith("take ") else re.split(r"\s{2,}|:", line)[0]


def as_printed(said: list[str], printed: list[str]) -> list[str]:
    """The lines of a block as the command prints them now: those that begin alike, in order; and all of the advice."""
    rest, now = iter(printed), []
    for line in said:
        if now and first_cell(now[-1]) == "take":
            continue
        if line == "...":
            now.append(line)
            continue
        now.append(next((each for each in rest if each.strip() and first_cell(each) == first_cell(line)), "(gone)"))
        if first_cell(line) == "take":
            now += itertools.takewhile(str.strip, rest)
            return now
    return now


def plans(slow: bool) -> list[tuple[str, list[str]]]:
    chosen = [each for each in blocks("console") if (each.name == "slow") == slow]
    return [found for each in chosen for found in commands(each.body) if found[0].startswith("onefold plan")]


HEAD = "| | 7B, 8xA100 |"


def decisions() -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The columns of the table of section 3, and its rows by setting."""
    lines = TEXT[TEXT.index(HEAD) :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return cells[0][1:], [(row[0], row[1:]) for row in cells[2:]]


def decided(column: str, folder: Path) -> dict[str, str]:
    """What the table has to say in a column, by setting."""
    number, machine = column.split(", ")
    command = f"onefold plan --params {number.removesuffix('B')}e9 --machine {machine} --json"
    rows = json.loads("\n".join(run(command, folder)))["settings"]
    sizes = {row["setting"]["name"]: (f"{row['device']['total'] / GB:.1f}", row["fits"]) for row in rows}
    return {name: f"**{size}**" if fits else size for name, (size, fits) in sizes.items()}


@pytest.mark.parametrize(("command", "said"), plans(slow=False))
def test_the_plans_are_what_the_command_says(tmp_path, command, said):
    write_files(tmp_path)
    assert as_printed(said, run(command, tmp_path)) == said


@pytest.mark.slow
@pytest.mark.parametrize(("command", "said"), plans(slow=True))
def test_so_are_those_with_activations(tmp_path, command, said):
    pytest.importorskip("transformers")
    write_files(tmp_path)
    assert as_printed(said, run(command, tmp_path)) == said


@pytest.mark.slow
def test_a_row_of_those_with_activations(tmp_path):
    """One setting of many, quickly."""
    pytest.importorskip("transformers")
    write_files(tmp_path)
    (said,) = [said for command, said in plans(slow=True) if "--recompute" not in command]
    at = next(place for place, line in enumerate(said) if "activations" in line)
    heads, row = (
        re.split(r"\s{2,}", line.strip()) for line in (said[at], next(x for x in said[at:] if "stage 2 " in x))
    )
    model = find_model(str(tmp_path / "llama-7b" / "config.json"))
    question = Question(model, find_machine("8xA100"), DEFAULT_CONFIG, 4, 2048)
    (found,) = forecast(question, [Setting("stage 2", {"stage": 2, "overlap_comm": True})], finds_batch=False)
    shown = dict(zip(heads, row, strict=False))
    assert shown["activations"] == f"{found.device.activations / GB:.1f}"
    assert shown["total"] == f"{found.device.total / GB:.1f}"


def test_the_table_of_decisions_is_what_the_commands_say(tmp_path):
    columns, rows = decisions()
    assert len(columns) == 5
    for place, column in enumerate(columns):
        now = decided(column, tmp_path)
        assert {name: row[place] for name, row in rows} == {name: now[name] for name, _ in rows}, column


# Numbers with a point that are no output: arithmetic that stands beside them, versions, losses, factors.
ARITHMETIC = {"0.4", "2.11", "3.5", "1.75", "12.6", "1.45", "1.5", "2.4", "1.0", "2.10", "34.2", "23.6"}


def test_numbers_in_sentences_stand_in_a_block():
    """In sections 2 to 4; those in ARITHMETIC are looked after by hand."""
    section = TEXT[TEXT.index("## 2. What") : TEXT.index("## 5. Buckets")]
    prose = re.sub(r"^```.*?^```$", "", section, flags=re.DOTALL | re.MULTILINE)
    table = section[section.index(HEAD) :].split("\n\n")[0]
    known = set(re.findall(r"\d+\.\d+", "\n".join([each.body for each in blocks("console", section)] + [table])))
    assert set(re.findall(r"\d+\.\d+", prose)) - known - ARITHMETIC == set()


def test_the_arithmetic_is_right():
    tables = {
        ("--recompute" in command, head.split()[1], first_cell(line)): line.split()
        for command, said in plans(slow=True)
        for head, line in zip(
            itertools.accumulate(said, lambda old, new: new if "setting" in new else old), said, strict=True
        )
        if line.startswith("stage")
    }
    sent2, sent3 = (float(tables[False, "inside", f"stage {stage}"][2]) for stage in (2, 3))
    assert [f"{sent2:.1f}", f"{sent3:.1f}", f"{sent3 / sent2:.2f}"] == ["23.6", "34.2", "1.45"]
    times = [float(tables[again, "GPU", f"stage {stage}"][5]) for again, stage in ((False, 2), (False, 3), (True, 2))]
    assert [f"{time:.2f}" for time in times] == ["2.10", "2.11", "2.65"]
    assert f"{12 * 8192 * 128256 / GB:.1f}" == "12.6"


def test_the_network_figures_are_those_of_the_reports():
    (section,) = re.findall(r"## 6\. Slow links.*?## 7\.", TEXT, re.DOTALL)
    reports = "".join(
        (ROOT / "docs" / path).resolve().read_text() for path in re.findall(r"\((\S+-bf16\.md)\)", section)
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in reports.splitlines() if "| 2 x 4 |" in line]
    seconds = {(row[2], row[1]): row[3] for row in rows}
    left = {row[2]: f"{float(row[7]):.0f}" for row in rows}
    table = section[section.index("| | 100mbit") :].split("\n\n")[0].splitlines()
    assert len(table) > 8
    for line in table[2:]:
        name, slow, fast, crossing = (cell.strip() for cell in line.split("|")[1:-1])
        assert (slow, fast, crossing) == (seconds[name, "100mbit"], seconds.get((name, "1gbit"), ""), left[name])


# -- scripts, configs, commands ----------------------------------------------------------------------------------------


def check_printed(command: str, said: list[str], printed: list[str]) -> None:
    """Check that a command has printed the lines that a page shows, in their order. `...` stands for anything."""
    lines = iter(" ".join(line.split()) for line in printed)
    for line in said:
        pattern = ".*".join(re.escape(part) for part in " ".join(line.split()).split("..."))
        assert any(re.fullmatch(pattern, each) for each in lines), (command, line)


@pytest.mark.slow
def test_the_story_runs_from_top_to_bottom(tmp_path):
    """The script of `get started`, on two ranks and then on one, and every command of both pages on its files."""
    write_files(tmp_path)
    shown = [each for each in (*blocks("console", START), *blocks("console")) if each.name != "install"]
    story = [found for each in shown for found in commands(each.body) if "onefold plan" not in found[0]]
    assert len(story) >= 14
    for command, said in story:
        check_printed(command, said, run(command, tmp_path))
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "a" / "report.html").exists()
    assert (tmp_path / "runs" / "gpt" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_installation_of_get_started(tmp_path):
    """The commands for the shell, in a copy of the repository."""
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "tests", "benchmarks", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "onefold", ignore=ignored)
    (lines,) = [each.body for each in blocks("console", START) if each.name == "install"]
    typed = [command for command, _ in commands(lines)]
    assert typed[-1] == "onefold env"
    # The packages of this environment, torch among them, are already installed in the new one.
    packages = "$(python -c \"import sysconfig; print(sysconfig.get_path('purelib'))\")"
    typed.insert(2, f'echo {shlex.quote(sysconfig.get_path("purelib"))} > "{packages}/installed.pth"')
    place = {"PATH": f"{Path(sys.executable).resolve().parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", " && ".join(typed)],
        cwd=tmp_path / "onefold", env={**os.environ, **place}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip finds no package index here, from which it takes setuptools")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_that_are_shown_can_be_typed(page):
    text = page.read_text()
    typed = [line for each in blocks("sh", text) for line in each.body.splitlines() if line.startswith("onefold ")]
    for line in typed:
        assert isinstance(build_parser().parse_args(shlex.split(line, comments=True)[1:]), argparse.Namespace), line
    for named in re.findall(r"`onefold ([a-z-]+(?: [a-z-]+)?)", text):
        assert named in COMMANDS or named.split()[0] in COMMANDS, named
    if page == GUIDE:
        assert len(typed) >= 5


@pytest.mark.parametrize("each", [each for each in blocks("json") if "model_type" not in each.body], ids=str)
def test_configs_load(tmp_path, each):
    path = tmp_path / "ds_config.json"
    path.write_text(each.body)
    make_plan(load_config(str(path)), 16)


def test_python_that_is_no_script_is_python():
    for each in (*blocks("python", START), *blocks("python")):
        ast.parse(each.body)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_the_error_of_a_misspelt_key():
    said = block("text", "config")
    key = said.partition(":")[0].rpartition(".")[2]
    with pytest.raises(ConfigError) as found:
        load_config({"zero_optimization": {key: 1}})
    assert str(found.value) == said


def test_the_account_of_memory_is_that_of_its_page():
    account = (DOCS / "profiling.md").read_text().splitlines()
    assert all(line in account for line in block("text", "memory").splitlines())


def take_a_bad_step() -> str:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine = onefold.initialize(model=model, config={**config, "log_level": "error"})[0]
    factor = float("nan") if engine.global_rank == 1 else 1.0
    engine.backward(engine(torch.randn(4, 64)).square().mean() * factor)
    try:
        engine.step()
    except FloatingPointError as error:
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def test_the_error_of_a_loss_that_is_nan(on_ranks):
    assert on_ranks(2, take_a_bad_step) == 2 * [block("text", "nan")]


def test_the_error_of_a_loss_scale_at_its_minimum():
    scale = DynamicLossScale(initial_scale_power=0, hysteresis=1)
    for _ in range(7):
        scale.update(overflow=False)
    with pytest.raises(LossScaleError) as found:
        scale.update(overflow=True)
    assert str(found.value) == block("text", "loss scale")


def test_the_error_of_a_host_that_is_too_small(monkeypatch):
    said = block("text", "host")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 64 * GB)
    what = re.findall(r"available: (.*?)\. Offload less", said)[0]
    with pytest.raises(host_memory.HostShortage) as found:
        host_memory.check_room(int(12.25 * GB), what, 8, 1.0)
    assert str(found.value) == said


def test_the_error_of_a_disk_that_is_too_small():
    assert str(swap_folder._too_small("/local_nvme", int(10.5 * GB), 2 * GB)) == block("text", "disk")


@pytest.mark.slow
def test_the_error_of_ranks_that_wait_for_each_other(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, onefold\n"
        "from torch import nn\n"
        "model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))\n"
        "config = {'train_micro_batch_size_per_gpu': 4, 'optimizer': {'type': 'AdamW'}, "
        "'zero_optimization': {'stage': 3}}\n"
        "engine = onefold.initialize(model=model, config=config)[0]\n"
        "for step in range(3):\n"
        "    if step == 1 and dist.get_rank() == 1:\n"
        "        dist.barrier()\n"
        "    engine.backward(engine(torch.randn(4, 64)).square().mean())\n"
        "    engine.step()\n"
    )
    command = [sys.executable, "-m", "onefold.tools.cli.main", "launch", "--nproc", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert block("text", "hang") in done.stdout + done.stderr


# -- pages -------------------------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, place = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if place and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert place in {anchor(heading) for heading in headings}, target


def refresh() -> None:
    text = TEXT
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_files(folder)
        for command, said in (*plans(slow=False), *plans(slow=True)):
            now = as_printed(said, run(command, folder))
            assert "(gone)" not in now, (command, said)
            old_block, new_block = ("\n".join([f"$ {command}", *lines]) for lines in (said, now))
            assert old_block in text, command
            text = text.replace(old_block, new_block)
        columns, rows = decisions()
        now = [decided(column, folder) for column in columns]
    for name, cells in rows:
        old, new = (f"| {' | '.join([name, *row])} |" for row in (cells, [column[name] for column in now]))
        text = text.replace(old, new)
    GUIDE.write_text(text)


if __name__ == "__main__":
    refresh()
