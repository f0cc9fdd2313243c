"""Terminal output of commands: tables, progress on stderr, one-line errors."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps

from rich import progress
from rich.console import Console
from rich.text import Text

from onefold.log import format_bytes

Run = Callable[[argparse.Namespace], int]
Progress = Callable[[str, int, int], None]
# The width of output to a pipe or a file, unless COLUMNS is set.
PIPE_WIDTH = 120
# Text in the last column of a table is wrapped if at least this many columns are left for it.
_WRAPPED = 24
# Seconds between two lines about the same part of the work, if stderr is not a terminal.
_LINE_SECONDS = 5.0


def fail(error: Exception) -> int:
    """Print one line about an error of the file system. Return 2 if an input is missing, otherwise 1."""
    if isinstance(error, BrokenPipeError):  # `main` handles a reader that ends early
        raise error
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"onefold: {text}", file=sys.stderr)
    return 2 if isinstance(error, FileNotFoundError) else 1


def fails_on(*kinds: type[Exception]) -> Callable[[Run], Run]:
    """Decorate a command: on these errors it prints one line and returns an exit code, see `fail`."""

    def decorate(work: Run) -> Run:
        @wraps(work)
        def run(options: argparse.Namespace) -> int:
            try:
                return work(options)
            except BrokenPipeError:
                raise
            except kinds as error:
                return fail(error)

        return run

    return decorate


@contextmanager
def progress_bar(title: str, *, in_bytes: bool = True, in_lines: bool = False) -> Iterator[Progress]:
    """Show progress on stderr, as a bar on a terminal and as lines otherwise.

    Yields a function of the current part of the work, the amount done and the total. With `in_lines` a line is printed
    for each part, for work whose parts take long.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, in_bytes=in_bytes, in_lines=in_lines)
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
    """Progress in lines, for logs and pipes: one for each part of the work, or one every few seconds."""

    def __init__(self, title: str, *, in_bytes: bool, in_lines: bool) -> None:
        self._title, self._in_bytes, self._in_lines = title, in_bytes, in_lines
        self._last, self._shown = "", time.monotonic()

    def __call__(self, now: str, done: int, total: int) -> None:
        waited = time.monotonic() - self._shown
        if (now == self._last or not self._in_lines) and waited < _LINE_SECONDS:
            return
        self._last, self._shown = now, time.monotonic()
        far = f"{format_bytes(done)} of {format_bytes(total)}" if self._in_bytes else f"{done} of {total} done"
        print(f"{self._title}: {now} ({far})", file=sys.stderr, flush=True)


def terminal_width() -> int:
    """Return the columns of the terminal, or of COLUMNS; `PIPE_WIDTH` for a pipe."""
    return max(shutil.get_terminal_size((PIPE_WIDTH, 24)).columns, 20)


def print_text(text: str, indent: str = "") -> None:
    """Print prose, wrapped at the terminal's width, with `indent` before all lines but the first."""
    wrapped = textwrap.wrap(
        text, terminal_width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    print("\n".join(wrapped))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None) -> None:
    """Print a table without cutting any cell. A head that begins with > aligns its column to the right.

    On a narrow terminal the gaps shrink, heads are broken, and finally the first cell of a row gets a separate line.
    """
    console = Console(highlight=False, soft_wrap=True)
    table = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if title is not None:
        console.print(Text("\n".join(textwrap.wrap(title, terminal_width(), break_on_hyphens=False)), "bold"))
    for line in lay_out(heads, table, terminal_width()):
        console.print(line)


def lay_out(heads: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Return the lines of a table for a terminal of this width."""
    if not heads:
        return []
    lines: list[Text] = []
    for gap, breaks, stacks in ((2, False, False), (1, True, False), (1, True, True)):
        lines = _lines_of(heads, rows, width, gap, breaks=breaks, stacks=stacks)
        if all(line.cell_len <= width for line in lines):
            break
    return lines


def _lines_of(
    heads: Sequence[str], rows: Sequence[Sequence[Text]], width: int, gap: int, *, breaks: bool, stacks: bool
) -> list[Text]:
    numbers = [head.startswith(">") for head in heads]
    titles = [head.removeprefix(">") for head in heads]
    tall = [title.split() if breaks else [title] for title in titles]
    height = max(map(len, tall))
    over = [[Text("")] * (height - len(title)) + [Text(part, "bold") for part in title] for title in tall]
    body = [list(row) for row in rows]
    widths = [
        max([cell.cell_len for cell in column] + [part.cell_len for part in over[place]])
        for place, column in enumerate(zip(*body, strict=True) if body else [()] * len(heads))
    ]
    first = 4 if stacks else widths[0]
    before_last = first + sum(gap + each for each in widths[1:-1]) + gap
    room = width - before_last
    wraps = len(heads) > 1 and not numbers[-1] and widths[-1] > room >= _WRAPPED

    def line(cells: Sequence[Text]) -> Text:
        found, at = Text(), 0
        for place, cell in enumerate(cells):
            wide = first if place == 0 else widths[place]
            left = wide - cell.cell_len if numbers[place] else 0
            found.append(" " * (at - found.cell_len + max(left, 0)) if cell.cell_len else "")
            found.append_text(cell)
            at += wide + gap
        return found

    lines = [Text(titles[0], "bold")] if stacks else []
    over[0] = [Text("")] * height if stacks else over[0]
    lines += [line([over[place][part] for place in range(len(heads))]) for part in range(height)]
    for row in body:
        if stacks:
            lines.append(row[0])
            row = [Text(""), *row[1:]]
        if not wraps:
            lines.append(line(row))
            continue
        parts = [Text(part, row[-1].style) for part in textwrap.wrap(row[-1].plain, room)] or [Text("")]
        lines += [line([*(row[:-1] if part is parts[0] else [Text("")] * (len(row) - 1)), part]) for part in parts]
    return lines
