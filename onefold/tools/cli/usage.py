"""Shared parts of commands: usage errors, checks of arguments, defaults. No torch is imported here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onefold.log import parse_size
from onefold.storage.object_path import StorageError
from onefold.storage.place import place
from onefold.tools.train.options import at_least_one

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500
CPU_RANKS = 2
# Large enough to exceed caches, and measured within seconds on a laptop.
DEFAULT_BENCH_SIZE = "0.5GB"


class UsageError(ValueError):
    """An error in the arguments of a command, which ends it with exit code 2."""


@contextmanager
def loading_torch() -> Iterator[None]:
    """Print that torch is being loaded, which takes seconds. On a terminal the line is erased afterwards."""
    if "torch" in sys.modules:
        yield
        return
    erase = "\r\033[K" if sys.stderr.isatty() else ""
    print("onefold: loading torch", end="" if erase else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(erase, end="", file=sys.stderr, flush=True)


def read_number(
    options: argparse.Namespace, name: str, parse: Callable[[str], int], example: str, most: float, least: int = 1
) -> int | None:
    """Return an option as a number from `least` to `most`, or None if it was not given. Raise UsageError otherwise."""
    text = getattr(options, name)
    if text is None:
        return None
    option, text = f"--{name.replace('_', '-')}", str(text)
    try:
        value = parse(text)
    except ValueError as error:
        is_number = text.strip(" +-").lower() in ("nan", "inf", "infinity")
        raise UsageError(
            f"{option} {text}: {f'must be above 0 and finite, as in {example}' if is_number else error}"
        ) from None
    if value < least:
        raise UsageError(f"{option} {text}: must be {'above 0' if least else '0 or more'}, as in {example}")
    if value > most:
        raise UsageError(f"{option} {text} is too large. Give a number such as {example}.")
    return value


def check_folder(options: argparse.Namespace) -> None:
    """Raise UsageError if the folder that a command reads does not exist. The parser does not look at files."""
    if options.reads_folder is None:
        return
    try:
        path = place(getattr(options, options.reads_folder))
        is_folder = path.is_dir()
    except StorageError as error:
        raise UsageError(str(error)) from None
    if not is_folder:
        raise UsageError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")


def size(text: str) -> str:
    """Check that an argument is a number of bytes, with or without a unit, and return it."""
    try:
        parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def port(text: str) -> int:
    """Return an argument as the number of a TCP port."""
    number = at_least_one(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port. Give a number from 1 to 65535.")
    return number


def add_folder(
    parser: argparse.ArgumentParser,
    name: str = "dir",
    metavar: str = "DIR",
    help: str = "the folder passed to save_checkpoint, or the folder of one tag",
) -> None:
    """Add the folder that a command reads; `check_folder` checks it."""
    parser.add_argument(name, metavar=metavar, help=help)
    parser.set_defaults(reads_folder=name)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the folder of a run."""
    parser.add_argument(
        "dir", metavar="DIR", help="folder or URL of a run (OUT of onefold train, or the key onefold.report)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag for JSON output."""
    parser.add_argument("--json", action="store_true", help="print JSON")
