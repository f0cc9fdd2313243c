"""`onefold bench`: measure this machine, to choose a config by its numbers."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.cli.export import fail

if TYPE_CHECKING:
    from onefold.report.tiers import Cost, Measured

EPILOG = """\
examples:
  onefold bench tiers                        bus, host memory and host Adam, in seconds
  onefold bench tiers --path /mnt/nvme0      and the drive that states would rest on

`onefold bench tiers --help` tells more.
"""

TIERS = """\
Measure what offloading depends on, and say what each setting would cost a step.

measured:
  host copy      host memory to host memory, on all threads
  host Adam      the step of what is offloaded: 16-bit gradients, fp32 masters and moments
  page-locking   making the memory that the GPU copies to and from
  bus            GPU to host, host to GPU, and both at once
  disk           reading, writing and both at once, with O_DIRECT, in each --path

The best of three counts. The numbers are kept by host in ~/.cache/onefold/tiers.json ($XDG_CACHE_HOME is respected).
Without --path the disk's numbers of an earlier run are used, if there are any.

The tables are for a model in bf16 with Adam, on one GPU, with one micro-step: bytes that rest in each tier, bytes that
move in a step, and the seconds that bus, host Adam and disk are busy. They work at the same time, beside the forward
and backward: a step takes at least as long as the slowest, which is named."""

TIERS_EXAMPLES = """\
examples:
  onefold bench tiers
  onefold bench tiers --path /mnt/nvme0 --path /mnt/nvme1    two drives, as "nvme_path" with two folders
  onefold bench tiers --parameters 7e9                       what a model of 7 billion parameters would cost
  onefold bench tiers --size 4                               larger and slower: for machines with large caches
  onefold bench tiers --json --no-save | jq .measured.bus
"""

# GB: seconds on a laptop, and far more than caches hold.
DEFAULT_SIZE = 0.5


class BenchError(ValueError):
    """What was typed cannot be measured; the message says why."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine: what would offloading cost?",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def show_help(options: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(run=show_help)
    what = parser.add_subparsers(title="what to measure", metavar="WHAT")
    tiers = what.add_parser(
        "tiers",
        help="bus, host Adam and disk, and what each offload setting would cost",
        description=TIERS,
        epilog=TIERS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = tiers.add_argument
    add("--path", metavar="DIR", action="append", default=[],
        help="measure the drive of this folder; repeat it for several drives (default: no disk)")  # fmt: skip
    add("--size", metavar="GB", type=float, default=DEFAULT_SIZE,
        help=f"memory, and disk space, that each part works on (default: {DEFAULT_SIZE})")  # fmt: skip
    add("--parameters", metavar="N", type=float, default=1e9, help="of the model in the tables (default: 1e9)")
    add("--no-save", action="store_true", help="do not keep the numbers")
    add("--json", action="store_true", help="print JSON")
    tiers.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    # Only now: importing torch takes seconds, and `--help` should not wait for it.
    from onefold.offload.host_memory import HostShortage
    from onefold.report.tiers import SETTINGS, cost_of, load_measured, measure, save_measured

    paths = _check(options)
    try:
        with _bar() as tell:
            measured = measure(round(options.size * 1e9), paths, tell)
    except OSError as error:
        return fail(error)
    except HostShortage as error:
        raise BenchError(f"--size {options.size:g}: {error}") from error
    if measured.disk is None:
        kept = load_measured()
        measured = replace(measured, disk=kept.disk if kept is not None else None)
    costs = [cost_of(setting, options.parameters, measured) for setting in SETTINGS]
    file, problem = None, None
    if not options.no_save:
        try:
            file = save_measured(measured)
        except OSError as error:
            problem = error
    if options.json:
        rows = [{**asdict(cost), "bound_by": cost.bound_by} for cost in costs]
        facts = {"measured": asdict(measured), "parameters": options.parameters, "settings": rows}
        print(json.dumps({**facts, "kept_in": file and str(file)}, indent=2))
    else:
        _show_measured(measured, is_fresh=bool(paths))
        _show_costs(costs, measured, options.parameters)
        if file is not None:
            print(f"\nkept in {file}")
    return fail(problem) if problem is not None else 0


def _check(options: argparse.Namespace) -> list[str]:
    """Everything that can be refused is refused before anything is measured."""
    from onefold.offload.host_memory import available_bytes

    for name, value in (("--size", options.size), ("--parameters", options.parameters)):
        if not (math.isfinite(value) and value > 0):
            raise BenchError(f"{name} {value:g}: must be above 0")
    free = available_bytes() / 1e9
    if options.size > free / 2:
        raise BenchError(f"--size {options.size:g}: {free:.1f} GB of host memory are available; ask for half of that")
    for path in options.path:
        if not Path(path).is_dir():
            raise BenchError(f"--path {path}: there is no such folder")
        if not os.access(path, os.W_OK | os.X_OK):
            raise BenchError(f"--path {path}: this user cannot write there")
    return list(dict.fromkeys(os.path.realpath(path) for path in options.path))


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, if that is a terminal: what is measured now."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("[bold]bench tiers"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)
    with bar:
        yield lambda now, done, total: bar.update(task, description=now, completed=done, total=total)


def _show_measured(measured: Measured, *, is_fresh: bool) -> None:
    for name, text in _lines(measured, is_fresh):
        print(f"{name:<14}{text}")


def _lines(measured: Measured, is_fresh: bool) -> Iterator[tuple[str, str]]:
    yield "host", f"{measured.host}, {measured.host_free_bytes / 1e9:.1f} GB of memory available"
    yield "host copy", f"{measured.host_copy:.1f} GB/s"
    yield "host Adam", f"{measured.adam / 1e9:.3f} billion parameters/s on {measured.num_threads} thread(s)"
    bus, disk = measured.bus, measured.disk
    if bus is None:
        yield "bus", "torch sees no GPU here, so neither bus nor page-locking is measured"
    else:
        yield "device", f"{measured.device}, {(measured.device_bytes or 0) / 1e9:.1f} GB"
        yield "page-locking", f"{measured.page_lock:.1f} GB/s"
        yield "bus", f"{bus.down:.1f} GB/s down, {bus.up:.1f} up, {bus.both:.1f} both at once"
    if disk is None:
        yield "disk", "not measured: ask for it with --path DIR, a folder on the drive"
        return
    yield "disk", f"{disk.read:.2f} GB/s read, {disk.write:.2f} written, {disk.both:.2f} both at once"
    yield "", f"{', '.join(disk.paths)}: {disk.free_bytes / 1e9:.1f} GB free"
    if not is_fresh:
        yield "", f"kept from {disk.when}: --path measures it again"
    if not disk.direct:
        yield "", "NOT the drive: there is no O_DIRECT there, and these are rates of the page cache"


def _show_costs(costs: Sequence[Cost], measured: Measured, num_parameters: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from onefold.report.tiers import shortages

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # whoever reads a pipe wants whole lines

    def table(title: str, heads: Sequence[str]) -> Table:
        made = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
        made.add_column("")
        for head in heads:
            made.add_column(head, justify="left" if head == "bound by" else "right")
        return made

    model = f"{num_parameters / 1e9:g} billion parameters in bf16"
    moved = table(
        f"{model}: GB at rest, and GB that move in a step", ["device", "host", "disk", "down", "up", "read", "written"]
    )
    for cost in costs:
        crossing = cost.crossing
        rest = cost.device_bytes, cost.host_bytes, cost.disk_bytes
        ways = crossing.down, crossing.up, crossing.read, crossing.written
        moved.add_row(cost.setting, *(f"{value / 1e9:.1f}" if value else "-" for value in (*rest, *ways)))
    busy = table("seconds a step, at least", [*costs[0].seconds, "bound by"])
    for cost in costs:
        cells = [
            Text("?" if value is None else f"{value:.2f}" if value else "-", "bold" if name == cost.bound_by else "")
            for name, value in cost.seconds.items()
        ]
        busy.add_row(cost.setting, *cells, cost.bound_by or "the device alone")
    for made in (moved, busy):
        print()
        console.print(made)
    unknown = {name for cost in costs for name, value in cost.seconds.items() if value is None}
    print("\nOpen units, activations and the buffers of disk transfers come on top of what rests.")
    if unknown:
        print(f"?: {' and '.join(sorted(unknown))} not measured; it may be what bounds such a row instead.")
    for line in (line for cost in costs for line in shortages(cost, measured)):
        print(f"too little: {line}")
