"""The command line as a whole: every command has its help, and what it runs exists."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from onefold.cli.commands import COMMANDS
from onefold.cli.main import build_parser, main

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
        "from onefold.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        "import onefold.cli.ranks\n"
        "heavy = {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
