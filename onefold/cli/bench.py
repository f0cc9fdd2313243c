"""What `onefold bench tiers` does: measure this machine, keep the numbers, show the cost of each offload setting."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.text import Text

from onefold.cli.commands import UsageError
from onefold.cli.terminal import fail, fails_on, print_table, progress_bar
from onefold.offload.host_memory import HostShortage, available_bytes
from onefold.report import offload_bench
from onefold.report.offload_bench import SETTINGS, Cost, Measured, cost_of, shortages


@fails_on(OSError)
def bench_tiers(options: argparse.Namespace) -> int:
    paths = _check(options)
    try:
        with progress_bar("bench tiers", in_bytes=False) as tell:
            measured = offload_bench.measure(round(options.size * 1e9), paths, tell)
    except HostShortage as error:
        raise UsageError(f"--size {options.size:g}: {error}") from error
    if measured.disk is None and (kept := offload_bench.load_measured()) is not None:
        measured = replace(measured, disk=kept.disk)
    costs = [cost_of(setting, options.parameters, measured) for setting in SETTINGS]
    file, problem = None, None
    if not options.no_save:
        try:
            file = offload_bench.save_measured(measured)
        except OSError as error:
            problem = error
    if options.json:
        rows = [{**asdict(cost), "bound_by": cost.bound_by} for cost in costs]
        facts = {"measured": asdict(measured), "parameters": options.parameters, "settings": rows}
        print(json.dumps({**facts, "kept_in": file and str(file)}, indent=2))
    else:
        for name, text in _lines(measured, is_fresh=bool(paths)):
            print(f"{name:<14}{text}")
        _show_costs(costs, measured, options.parameters)
        if file is not None:
            print(f"\nkept in {file}")
    return fail(problem) if problem is not None else 0


def _check(options: argparse.Namespace) -> list[str]:
    """Everything that can be refused is refused before anything is measured."""
    for name, value in (("--size", options.size), ("--parameters", options.parameters)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} {value:g}: must be above 0")
    free = available_bytes() / 1e9
    if options.size > free / 2:
        raise UsageError(f"--size {options.size:g}: {free:.1f} GB of host memory are available; ask for half of that")
    for path in options.path:
        if not Path(path).is_dir():
            raise UsageError(f"--path {path}: there is no such folder")
        if not os.access(path, os.W_OK | os.X_OK):
            raise UsageError(f"--path {path}: this user cannot write there")
    return list(dict.fromkeys(os.path.realpath(path) for path in options.path))


def _lines(measured: Measured, *, is_fresh: bool) -> Iterator[tuple[str, str]]:
    yield "host", f"{measured.host}, {measured.host_free_bytes / 1e9:.1f} GB of memory available"
    yield "host copy", f"{measured.host_copy:.1f} GB/s"
    yield "host Adam", f"{measured.adam / 1e9:.3f} billion parameters/s on {measured.num_threads} thread(s)"
    if measured.products is not None and measured.launch is not None:
        yield "products", f"{measured.products / 1e12:.2f} TFLOP/s"
        yield "launch", f"{measured.launch * 1e6:.1f} us of the host for an op"
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
    def moved(cost: Cost) -> Iterator[str]:
        ways = cost.crossing.down, cost.crossing.up, cost.crossing.read, cost.crossing.written
        values = cost.device_bytes, cost.host_bytes, cost.disk_bytes, *ways
        return (f"{value / 1e9:.1f}" if value else "-" for value in values)

    def busy(cost: Cost) -> Iterator[Text]:
        for name, value in cost.seconds.items():
            text = "?" if value is None else f"{value:.2f}" if value else "-"
            yield Text(text, "bold" if name == cost.bound_by else "")

    print()
    print_table(
        ("", *(f">{head}" for head in ("device", "host", "disk", "down", "up", "read", "written"))),
        [(cost.setting, *moved(cost)) for cost in costs],
        f"{num_parameters / 1e9:g} billion parameters in bf16: GB at rest, and GB that move in a step",
    )
    print()
    print_table(
        ("", *(f">{name}" for name in costs[0].seconds), "bound by"),
        [(cost.setting, *busy(cost), cost.bound_by or "the device alone") for cost in costs],
        "seconds a step, at least",
    )
    print("\nOpen units, activations and the buffers of disk transfers come on top of what rests.")
    unknown = {name for cost in costs for name, value in cost.seconds.items() if value is None}
    if unknown:
        print(f"?: {' and '.join(sorted(unknown))} not measured; it may be what bounds such a row instead.")
    for line in (line for cost in costs for line in shortages(cost, measured)):
        print(f"too little: {line}")
