"""Run the `onefold` command: parse the arguments, then import and run the chosen command."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import NoReturn

import onefold
from onefold.redaction import redact
from onefold.tools.cli.commands import COMMANDS, Command
from onefold.tools.cli.usage import UsageError, check_folder, loading_torch

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

EPILOG = """\
examples:
  onefold train --model llama/ --data rows.jsonl --lora   fine-tune a Hugging Face model and save the adapter
  onefold chat runs/a                                     chat with the model of a run
  onefold train                                           train a small GPT on a CPU, in under two minutes
  onefold plan --params 7e9 --machine 8xA100              show what fits, and which setting to choose
  onefold launch --nproc 2 train.py                       run your own script on two ranks
  onefold watch runs/a                                    show a job while it runs: loss, memory, traffic
  onefold report runs/a                                   write one page about a run
  onefold export checkpoints weights                      write a checkpoint's unsharded weights for other tools
  onefold import-deepspeed checkpoints out                convert a DeepSpeed checkpoint
  onefold import-dcp step-1000 out                        convert a checkpoint of torch.distributed.checkpoint
  onefold ckpt ls checkpoints                             list checkpoints, and whether they are complete
  onefold bench tiers                                     measure bus, host and disk, and the cost of offloading
  onefold env                                             show versions, devices, memory, and the backend in use

exit codes:
  0    success
  1    failure
  2    wrong use, or a missing input
  130  stopped by Ctrl-C
  `launch` and `train` return the exit code of the rank that failed.

`onefold COMMAND --help` describes a command.
"""


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps descriptions and examples to the same width as the options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_fill(text.splitlines(), width))


def _fill(lines: Iterable[str], width: int) -> Iterator[str]:
    """Wrap prose, and keep the columns of indented lines."""
    for is_columns, found in groupby(lines, key=lambda line: line.startswith(" ") if line else None):
        block = list(found)
        if is_columns is None:
            yield from block
        else:
            yield from _fill_columns(block, width) if is_columns else _wrap(" ".join(block), width)


def _fill_columns(lines: Sequence[str], width: int) -> Iterator[str]:
    """Keep lines such as `command    meaning`. If one is too long, put each meaning below its command."""
    too_wide = max(map(len, lines)) > width
    for line in lines:
        margin, text = line[: len(line) - len(line.lstrip())], line.strip()
        first, *meaning = re.split(r" {2,}", text, maxsplit=1) if too_wide else [text]
        hanging = margin if first.endswith(":") else f"{margin}    "
        yield from _wrap(first, width, margin, hanging) if len(meaning) or too_wide else [line]
        for part in meaning:
            yield from _wrap(part, width, f"{margin}    ", f"{margin}    ")


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` with one line, and with a suggestion where a word is misspelt."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        wrong = re.fullmatch(r"(.*): invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        if wrong is not None:
            choices = [choice.strip("'") for choice in wrong[3].split(", ")]
            what = f"{wrong[2]!r} is not a command" if wrong[1] == "COMMAND" else f"{wrong[1]} {wrong[2]} is invalid"
            near = _nearest(wrong[2], choices)
            message = f"{what}. Did you mean {near}?" if near else f"{what}. Choose from {', '.join(choices)}."
        raise UsageError(f"{message} (see {self.prog} --help)")

    def unknown(self, given: Sequence[str]) -> NoReturn:
        """Raise for arguments that this command does not have."""
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        near = _nearest(given[0].split("=")[0], known) if given[0].startswith("-") else None
        self.error(f"{given[0]} is not an option.{f' Did you mean {near}?' if near else ''}")


def _nearest(word: str, choices: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)), None)


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="onefold",
        description="Train models with sharded states (ZeRO stages 0 to 3) from DeepSpeed configs.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onefold {onefold.__version__}")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", required=True)}
    for path, command in COMMANDS.items():
        group, _, name = path.rpartition(" ")
        text, _, examples = inspect.cleandoc(command.add_arguments.__doc__ or "").partition("\n\nexamples:\n")
        epilog = f"examples:\n{examples}"
        added = groups[group].add_parser(
            name, help=command.help, description=text, epilog=epilog, formatter_class=HelpFormatter
        )
        added.set_defaults(command=command, parser=added, reads_folder=None)
        command.add_arguments(added)
        if command.run is None:
            groups[path] = added.add_subparsers(title="commands", metavar="COMMAND")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, see EPILOG."""
    try:
        exit_code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader ended first, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return exit_code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options, unknown = build_parser().parse_known_args(arguments)
        if unknown:
            options.parser.unknown(unknown)
        command: Command = options.command
        if command.run is None:  # a group without its command
            options.parser.print_help(sys.stderr)
            return EXIT_USAGE
        check_folder(options)
        exit_code: int = _import(command)(options)
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as error:
        # onefold's own errors (UsageError, ConfigError, DataError) have a message for the user.
        if not (isinstance(error, ValueError) and type(error).__module__.startswith("onefold.")):
            return _fail_unexpectedly(error)
        print(f"onefold: {redact(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    return exit_code


def _import(command: Command) -> Callable[[argparse.Namespace], int]:
    module, _, function = str(command.run).partition(":")
    with loading_torch() if command.loads_torch else nullcontext():
        run: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(module), function)
    return run


def _fail_unexpectedly(error: Exception) -> int:
    """Print an unexpected error in one line, or raise it if ONEFOLD_TRACEBACK=1 asks for a traceback."""
    if os.environ.get("ONEFOLD_TRACEBACK", "0") not in ("", "0"):
        raise error
    text = " ".join(redact(str(error)).split())
    print(
        f"onefold: {type(error).__name__}: {text[:500]}\nThis is a bug in onefold. Set ONEFOLD_TRACEBACK=1 to see the "
        "traceback.",
        file=sys.stderr,
    )
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
