"""The command line as a whole: every command has its help, and what it runs exists."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from onefold.log import parse_bytes, parse_count, parse_rate
from onefold.tools.cli.commands import COMMANDS
from onefold.tools.cli.main import build_parser, main

pytestmark = pytest.mark.program


@pytest.mark.parametrize("path", COMMANDS)
def test_a_command_shows_its_help_with_examples(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([*path.split(), "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"usage: onefold {path} " in said
    head, _, examples = said.partition("\nexamples:\n")
    assert COMMANDS[path].add_arguments.__doc__.split()[0] in head
    assert f"onefold {path}" in examples


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if command.run])
def test_what_a_command_runs_exists(path: str) -> None:
    module, _, function = str(COMMANDS[path].run).partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if not command.run])
def test_a_group_without_its_command_shows_the_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([path]) == 2
    said = capsys.readouterr().err
    for member in COMMANDS:
        if member.startswith(f"{path} "):
            assert COMMANDS[member].help in " ".join(said.split())


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from onefold.tools.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        "import onefold.tools.cli.ranks\n"
        "heavy = {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_validation_does_not_wait_for_torch(tmp_path: Path) -> None:
    """Every command finds what is wrong with its arguments first, in one line."""
    wrong = [
        ["train", "--resume", "nowhere"],
        ["train", "--preset", "tinny"],
        ["train", "--data", "nowhere"],
        ["train", "--model", "nowhere"],
        ["launch", "nowhere.py"],
        ["launch", "--master_port", "99999", "x.py"],
        ["compare", "--stages", "2,7"],
        ["compare", "--rounds", "0"],
        ["compare", "--model", "nowhere"],
        ["tune", "--stages", "3+disk"],
        ["tune", "--steps", "3"],
        ["watch", "nowhere", "--once"],
        ["watch", "nowhere", "--every", "0"],
        ["report", "nowhere"],
        ["export", "nowhere", "out"],
        ["export", ".", "out", "--max-shard-size", "much"],
        ["ckpt", "ls", "nowhere"],
        ["ckpt", "inspect", "nowhere"],
        ["ckpt", "verify", "nowhere"],
        ["ckpt", "rm", "nowhere", "tag"],
        ["import-deepspeed", "nowhere", "out"],
        ["import-dcp", "nowhere", "out"],
        ["env", "--jsn"],
    ]
    code = (
        "import sys\n"
        "from onefold.tools.cli.main import main\n"
        f"for arguments in {wrong!r}:\n"
        "    print(main(arguments), 'torch' in sys.modules, flush=True)\n"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.splitlines() == ["2 False"] * len(wrong), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(wrong)
    assert all(line.startswith("onefold: ") for line in said)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["trian"], "'trian' is not a command. Did you mean train?"),
        (["ckpt", "lst"], "'lst' is not a command. Did you mean ls?"),
        (["train", "--stepz", "3"], "--stepz is not an option. Did you mean --steps?"),
        (["train", "--preset", "smal"], "--preset smal is invalid. Did you mean small?"),
        (["qqqq"], "'qqqq' is not a command. Choose from train, merge"),
        (["env", "qqqq"], "qqqq is not an option."),
    ],
)
def test_a_misspelt_word_is_one_line_with_what_was_meant(
    typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"onefold: {meant}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_help_keeps_to_the_width_of_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    parser = build_parser()
    texts = {"onefold": parser.format_help()}
    for path in COMMANDS:
        with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
            parser.parse_args([*path.split(), "--help"])
        texts[path] = said.getvalue()
    for path, text in texts.items():
        assert max(map(len, text.splitlines())) <= width, path
    assert "exit codes:" in texts["onefold"]
    words = " ".join(texts["train"].split())
    assert "or train a small built-in GPT. Runs on every GPU, or as two processes on a machine without GPUs." in words


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    for arguments in (["--help"], ["env", "--json"]):
        command = [sys.executable, "-u", "-m", "onefold.tools.cli.main", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert set(process.stderr.read().splitlines()) <= {"onefold: loading torch"}
        assert process.returncode in (0, 141)


MISTAKES = [
    ["plan", "--params", "x", "--machine", "H100"],
    ["plan", "--params", "7B", "--machine", "8*A100"],
    ["plan", "--model", "nowhere", "--machine", "H100"],
    ["plan", "--model", "25m", "--machine", "H100", "--batch", "0"],
    ["plan", "--params", "7B", "--machine", "H100", "--config", "nowhere.json"],
    ["bench", "tiers", "--size", "x"],
    ["bench", "tiers", "--path", "nowhere"],
]


def test_mistakes_do_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from onefold.tools.cli.main import main\n"
        f"for arguments in {MISTAKES!r}:\n"
        "    assert main(arguments) == 2, arguments\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(MISTAKES)


def test_a_reader_that_ends_early_is_no_error() -> None:
    command = [
        sys.executable,
        "-m",
        "onefold.tools.cli.main",
        "plan",
        "--params",
        "7B",
        "--machine",
        "8xA100",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        said = running.stderr.read()
    assert running.returncode == 141
    assert said.splitlines() == ["planning 7B parameters ..."]


def test_what_nobody_expected_is_one_line_and_a_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "env", COMMANDS["env"]._replace(run="test_commands:fail_oddly"))
    monkeypatch.delenv("ONEFOLD_TRACEBACK", raising=False)
    assert main(["env"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("onefold: KeyError: 'odd'\n")
    assert "ONEFOLD_TRACEBACK=1" in said
    monkeypatch.setenv("ONEFOLD_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["env"])


def fail_oddly(options: object) -> int:
    raise KeyError("odd")


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "80", 80_000_000_000),
        (parse_bytes, "80GB", 80_000_000_000),
        (parse_bytes, "80 gb", 80_000_000_000),
        (parse_bytes, "80GiB", 80 << 30),
        (parse_bytes, "1.5TB", 1_500_000_000_000),
        (parse_bytes, "512MiB", 512 << 20),
        (parse_bytes, "5Gb", None),
        (parse_bytes, "80iB", None),
        (parse_bytes, "nan", None),
        (parse_bytes, "", None),
        (parse_rate, "50", 50_000_000_000),
        (parse_rate, "50GB/s", 50_000_000_000),
        (parse_rate, "400Gbit/s", 50_000_000_000),
        (parse_rate, "400Gbps", 50_000_000_000),
        (parse_rate, "50Gb/s", None),
        (parse_count, "7B", 7_000_000_000),
        (parse_count, "1.3b", 1_300_000_000),
        (parse_count, "350M", 350_000_000),
        (parse_count, "7e9", 7_000_000_000),
        (parse_count, "7_000", 7_000),
        (parse_count, "7GB", None),
        (parse_count, "seven", None),
    ],
)
def test_sizes_rates_and_counts(parse: Callable[[str], int], text: str, value: int | None) -> None:
    if value is not None:
        assert parse(text) == value
        return
    with pytest.raises(ValueError, match="is not a"):
        parse(text)
