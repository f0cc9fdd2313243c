"""What commands print: tables, a progress bar on stderr, one line for an error of the file system."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Literal

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

Run = Callable[[argparse.Namespace], int]
Tell = Callable[[str, int, int], None]


def fail(error: Exception) -> int:
    """One line for what went wrong with files, as opposed to what was typed."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"onefold: {text}", file=sys.stderr)
    return 1


def fails_on(*kinds: type[Exception]) -> Callable[[Run], Run]:
    """A command that ends with one line and exit code 1 for these errors."""

    def decorate(work: Run) -> Run:
        @wraps(work)
        def run(options: argparse.Namespace) -> int:
            try:
                return work(options)
            except kinds as error:
                return fail(error)

        return run

    return decorate


@contextmanager
def progress_bar(title: str, *, in_bytes: bool = True) -> Iterator[Tell]:
    """A bar on stderr, if that is a terminal: told what is done now, how much is done and how much there is."""
    console = Console(stderr=True)
    columns: list[progress.ProgressColumn] = [progress.TextColumn("[bold]{task.description}"), progress.BarColumn()]
    if in_bytes:
        columns += [progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn()]
    else:
        columns.append(progress.TimeElapsedColumn())
    columns.append(progress.TextColumn("{task.fields[now]}", markup=False))
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, now="")
        yield lambda now, done, total: bar.update(task, completed=done, total=total, now=now)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None) -> None:
    """A head that begins with > is over numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        justify: Literal["left", "right"] = "right" if head.startswith(">") else "left"
        no_wrap = justify == "right" or head == "saved"
        table.add_column(head.removeprefix(">"), justify=justify, no_wrap=no_wrap, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # whoever reads a pipe wants whole lines
    if title is not None:  # not the table's own, which would be as narrow as the table
        console.print(Text(title, "bold"))
    console.print(table)
