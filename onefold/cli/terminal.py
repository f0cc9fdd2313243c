"""What commands print: tables, a progress bar on stderr, one line for an error of the file system."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Literal

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onefold.log import format_bytes

Run = Callable[[argparse.Namespace], int]
Tell = Callable[[str, int, int], None]


# Where stderr is no terminal, a line comes at most this often while the same thing is done.
_LINE_SECONDS = 10.0


def fail(error: Exception) -> int:
    """Print one line for what went wrong with files. Return 2 for an input that is not there, and 1 otherwise."""
    if isinstance(error, BrokenPipeError):  # the reader of the output has seen enough; `main` ends quietly
        raise error
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"onefold: {text}", file=sys.stderr)
    return 2 if isinstance(error, FileNotFoundError) else 1


def fails_on(*kinds: type[Exception]) -> Callable[[Run], Run]:
    """Let a command end with one line and an exit code for these errors, see `fail`."""

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
    """Show progress on stderr: a bar on a terminal, plain lines otherwise. Call what is yielded with what is done now,
    how much is done, and how much there is.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, in_bytes=in_bytes)
        return
    columns: list[progress.ProgressColumn] = [progress.TextColumn("[bold]{task.description}"), progress.BarColumn()]
    if in_bytes:
        columns += [progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn()]
    else:
        columns.append(progress.TimeElapsedColumn())
    columns.append(progress.TextColumn("{task.fields[now]}", markup=False))
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, now="")
        yield lambda now, done, total: bar.update(task, completed=done, total=total, now=now)


class _Lines:
    """Progress for logs and pipes: a line when something else is done, of work that is counted in bytes now and then.

    Work that is counted in bytes says nothing where it takes only seconds: it consists of thousands of parts.
    """

    def __init__(self, title: str, *, in_bytes: bool) -> None:
        self._title, self._in_bytes = title, in_bytes
        self._last, self._shown = "", time.monotonic()

    def __call__(self, now: str, done: int, total: int) -> None:
        waited = time.monotonic() - self._shown
        if (now == self._last or self._in_bytes) and waited < _LINE_SECONDS:
            return
        self._last, self._shown = now, time.monotonic()
        far = f"{format_bytes(done)} of {format_bytes(total)}" if self._in_bytes else f"{done} of {total} done"
        print(f"{self._title}: {now} ({far})", file=sys.stderr, flush=True)


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
