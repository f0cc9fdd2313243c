"""Run `onefold watch`: show a running job in the terminal, from the record that it writes."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onefold.log import format_bytes
from onefold.report.run_file import RunFile, StepRow
from onefold.tools.cli.terminal import fails_on
from onefold.tools.cli.usage import UsageError
from onefold.tools.pages.page import duration, title_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 48
# Steps from which speed and remaining time are computed.
_LAST = 20
# Seconds between two lines if there is no terminal.
_LINE_SECONDS = 10.0
# Seconds, and multiples of a step, after which a record that does not grow is reported.
_SILENT_SECONDS, _SILENT_STEPS = 10.0, 5.0


@fails_on(OSError)
def watch_run(options: argparse.Namespace) -> int:
    """Run `onefold watch`."""
    run = RunFile(options.dir)
    if options.once:
        if not _update(run):
            raise UsageError(f"no run in {_shown(run.path.parent)}: {run.path.name} is missing or empty")
        print("\n".join(f"{name:<14} {value}" for name, value in rows_of(run, time.time())))
        return 0
    console = Console(highlight=False)
    if console.is_terminal:
        _watch_live(run, console, options.every)
    else:
        _watch_lines(run, options.every)
    return 0


def _watch_live(run: RunFile, console: Console, every: float) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            there = _update(run)
            live.update(_view(run, time.time()) if there else Text(_no_run(run), style="yellow"), refresh=True)
            if run.end is not None:
                return
            time.sleep(every)


def _watch_lines(run: RunFile, every: float) -> None:
    """Print a line when there are new steps, at most every `_LINE_SECONDS`."""
    printed, last_step, was_silent = -math.inf, -1, False
    if not _update(run):
        print(_no_run(run), flush=True)
    while True:
        if _update(run):
            now, ended = time.time(), run.end is not None
            step = run.steps[-1].step if run.steps else 0
            is_silent = silence(run, now) is not None
            if ended or (step != last_step and now - printed >= _LINE_SECONDS) or (is_silent and not was_silent):
                print(line_of_now(run, now), flush=True)
                printed, last_step = now, step
            was_silent = is_silent
            if ended:
                return
        time.sleep(every)


def _update(run: RunFile) -> bool:
    """Read new lines of the record, and return whether the run has started."""
    try:
        run.update()
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise UsageError(f"{_shown(run.path.parent)}: not a folder") from None
    return bool(run.facts)


def _no_run(run: RunFile) -> str:
    return f"no run in {_shown(run.path.parent)} yet: waiting for {run.path.name}"


# -- text ------------------------------------------------------------------------------------------------------------


def rows_of(run: RunFile, now: float) -> list[tuple[str, str]]:
    """Return names and values that describe the state of a run."""
    found = [("run", _shown(title_of(run))), ("state", _state(run, now))]
    if not run.steps:
        return found
    last = run.steps[-1]
    found.append(("step", _progress(run)))
    losses = [row.loss for row in run.steps if row.loss is not None]
    if losses:
        found.append(("loss", f"{losses[-1]:.4f}  {sparkline(losses)}"))
    found.append(("learning rate", ", ".join(f"{rate:.3g}" for rate in last.learning_rates)))
    if last.grad_norm is not None:
        found.append(("gradient norm", f"{last.grad_norm:.4g}"))
    if last.loss_scale is not None:
        found.append(("loss scale", f"{last.loss_scale:g}"))
    skipped = sum(row.skipped for row in run.steps)
    if skipped:
        found.append(("skipped", f"{skipped} steps"))
    seconds = f"{_seconds(run.steps) * 1000:,.4g} ms/step"
    found.append(("speed", f"{_speed(run.steps):,.4g} samples/s, {seconds}{_tokens(run, each=True)}"))
    found.append(("time", ", ".join(f"{_shown(name)} {value * 1000:.3g} ms" for name, value in last.phases.items())))
    found.append(("memory", _memory(last)))
    sent: dict[str, int] = {row.operation: last.bytes_of(row.operation) for row in last.traffic}
    if sent:
        found.append(("traffic", ", ".join(f"{_shown(name)} {format_bytes(value)}" for name, value in sent.items())))
    return found


def line_of_now(run: RunFile, now: float) -> str:
    """Describe the state of a run in one line."""
    if not run.steps:
        return f"{_shown(title_of(run))}: {_state(run, now)}"
    last = run.steps[-1]
    loss = "" if last.loss is None else f"  loss {last.loss:.4f}"
    norm = "" if last.grad_norm is None else f"  norm {last.grad_norm:.3g}"
    rate = f"  lr {last.learning_rates[0]:.3g}" if last.learning_rates else ""
    speed = f"  {_speed(run.steps):,.4g} samples/s{_tokens(run)}"
    return f"step {_progress(run)}{loss}{rate}{norm}{speed}  peak {format_bytes(last.memory.peak)}  {_state(run, now)}"


def sparkline(values: Sequence[float]) -> str:
    """Return a line of blocks for values, or for means of several. Values that are not finite are crosses."""
    size = max(1, math.ceil(len(values) / _SPARKS))
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return "×" * len(means)
    low, width = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / width * top)] if math.isfinite(v) else "×" for v in means)


def silence(run: RunFile, now: float) -> float | None:
    """Return the seconds since the last line, if they are more than the run's steps explain, otherwise None."""
    if run.end is not None:
        return None
    last = run.steps[-1].time if run.steps else float(run.facts["time"])
    limit = max(_SILENT_SECONDS, _SILENT_STEPS * _seconds(run.steps)) if run.steps else _SILENT_SECONDS
    return now - last if now - last > limit else None


def _state(run: RunFile, now: float) -> str:
    if run.end is not None:
        failed = run.end.get("reason") == "error"
        return f"ended by an error: {_shown(run.end.get('error'))}" if failed else "ended"
    quiet = silence(run, now)
    return "running" if quiet is None else f"no new line for {quiet:.0f} s"


def _progress(run: RunFile) -> str:
    step, total = run.steps[-1].step, run.facts.get("steps")
    if not isinstance(total, int):
        return f"{step:,}"
    left = f", {duration((total - step) * _seconds(run.steps))} left" if run.end is None and step < total else ""
    return f"{step:,} of {total:,}{left}"


def _seconds(steps: Sequence[StepRow]) -> float:
    return statistics.median(row.seconds for row in steps[-_LAST:])


def _speed(steps: Sequence[StepRow]) -> float:
    seconds = _seconds(steps)
    return steps[-1].batch_samples / seconds if seconds > 0 else 0.0


def _tokens(run: RunFile, *, each: bool = False) -> str:
    """Describe tokens per second and MFU, if the record has them. `each`: of each rank, too."""
    rows = run.steps[-_LAST:]
    speeds = [row.tokens_per_second for row in rows if row.tokens_per_second is not None]
    shares = [share for row in rows if (share := row.utilization(run.peak_flops)) is not None]
    if not speeds:
        return ""
    speed, ranks = statistics.median(speeds), run.facts.get("world_size")
    own = f" ({speed / ranks:,.4g} per rank)" if each and isinstance(ranks, int) and ranks > 1 else ""
    return f", {speed:,.4g} tokens/s{own}" + (f", MFU {statistics.median(shares):.1%}" if shares else "")


def _memory(row: StepRow) -> str:
    memory = row.memory
    held = ", ".join(f"{tier} {format_bytes(value)}" for tier, value in memory.by_tier().items() if value)
    whole = memory.host_resident if memory.device_allocated is None else memory.device_allocated
    return f"model state: {held}; total {format_bytes(whole)}, peak {format_bytes(memory.peak)}"


def _shown(value: object) -> str:
    """Return text of a file for the terminal, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


# -- the terminal ----------------------------------------------------------------------------------------------------


def _view(run: RunFile, now: float) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows_of(run, now):
        style = "yellow" if name == "state" and value.startswith("no new line") else ""
        table.add_row(name, Text(value, style="red" if value.startswith("ended by an error") else style))
        total = run.facts.get("steps")
        if name == "step" and isinstance(total, int) and total > 0:
            table.add_row("", ProgressBar(total=total, completed=min(run.steps[-1].step, total), width=_SPARKS))
    return table
