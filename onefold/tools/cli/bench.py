"""Run `onefold bench tiers`: measure this machine, store the rates, and show the cost of each offload setting."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from onefold.log import parse_bytes, parse_count
from onefold.tools.cli.terminal import fail, fails_on, print_table, print_text, progress_bar
from onefold.tools.cli.usage import UsageError, read_number

if TYPE_CHECKING:
    from onefold.tools.bench.offload_bench import Cost, Measured

# Larger numbers are refused as typing errors.
_MOST_PARAMETERS, _MOST_BYTES = 1e15, 1e18


@fails_on(OSError)
def bench_tiers(options: argparse.Namespace) -> int:
    """Run `onefold bench tiers`."""
    size = options.size
    paths = _check(options)
    from onefold.offload.host_memory import HostShortage, available_bytes
    from onefold.tools.bench import offload_bench
    from onefold.tools.bench.offload_bench import SETTINGS, cost_of

    free = available_bytes()
    if options.size > free / 2:
        raise UsageError(f"--size {size}: {free / 1e9:.1f} GB of host memory are available. Give at most half of it.")
    try:
        with progress_bar("bench tiers", in_bytes=False, in_lines=True) as show_progress:
            measured = offload_bench.measure(options.size, paths, show_progress)
    except HostShortage as error:
        raise UsageError(f"--size {size}: {error}") from error
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
            print_text(f"{name:<14}{text}", " " * 14)
        _show_costs(costs, measured, options.parameters)
        if file is not None:
            print(f"\nstored in {file}")
    return fail(problem) if problem is not None else 0


def _check(options: argparse.Namespace) -> list[str]:
    """Check the arguments before torch is imported, replace texts by numbers, and return the paths."""
    options.size = read_number(options, "size", parse_bytes, "500MB", _MOST_BYTES)
    options.parameters = read_number(options, "parameters", parse_count, "7B", _MOST_PARAMETERS)
    for path in options.path:
        if not Path(path).is_dir():
            raise UsageError(f"--path {path}: no such folder")
        if not os.access(path, os.W_OK | os.X_OK):
            raise UsageError(f"--path {path}: this user cannot write there")
    return list(dict.fromkeys(os.path.realpath(path) for path in options.path))


def _lines(measured: Measured, *, is_fresh: bool) -> Iterator[tuple[str, str]]:
    threads = measured.num_threads
    yield "host", f"{measured.host}, {measured.host_free_bytes / 1e9:.1f} GB of memory available"
    yield "host copy", f"{measured.host_copy:.1f} GB/s"
    yield "host Adam", f"{measured.adam / 1e9:.3f} billion parameters/s on {threads} thread{'s' * (threads > 1)}"
    if measured.products is not None and measured.launch is not None:
        yield "matmul", f"{measured.products / 1e12:.2f} TFLOP/s"
        yield "op launch", f"{measured.launch * 1e6:.1f} us of overhead"
    bus, disk = measured.bus, measured.disk
    if bus is None:
        yield "bus", "not measured: no GPU is available"
    else:
        yield "device", f"{measured.device}, {(measured.device_bytes or 0) / 1e9:.1f} GB"
        yield "page-locking", f"{measured.page_lock:.1f} GB/s"
        yield "bus", f"{bus.down:.1f} GB/s down, {bus.up:.1f} up, {bus.both:.1f} both at once"
    if disk is None:
        yield "disk", "not measured: give --path DIR, a folder on the drive"
        return
    yield "disk", f"{disk.read:.2f} GB/s read, {disk.write:.2f} written, {disk.both:.2f} both at once"
    yield "", f"{', '.join(disk.paths)}: {disk.free_bytes / 1e9:.1f} GB free"
    if not is_fresh:
        yield "", f"measured {disk.when}; --path measures it again"
    if not disk.direct:
        yield "", "rates of the page cache, not of the drive: this folder does not support O_DIRECT"


def _show_costs(costs: Sequence[Cost], measured: Measured, num_parameters: float) -> None:
    from onefold.tools.bench.offload_bench import shortages

    def moved(cost: Cost) -> Iterator[str]:
        traffic = cost.offload_traffic
        values = (
            *(cost.device_bytes, cost.host_bytes, cost.disk_bytes),
            *(traffic.down, traffic.up, traffic.read, traffic.written),
        )
        return (f"{value / 1e9:.1f}" if value else "-" for value in values)

    def busy(cost: Cost) -> Iterator[Text]:
        for name, value in cost.seconds.items():
            text = "?" if value is None else f"{value:.2f}" if value else "-"
            yield Text(text, "bold" if name == cost.bound_by else "")

    print()
    print_table(
        ("setting", *(f">{head}" for head in ("GPU", "host", "disk", "to host", "to GPU", "read", "written"))),
        [(cost.setting, *moved(cost)) for cost in costs],
        f"{num_parameters / 1e9:g} billion parameters in bf16: GB stored in each tier and GB moved per step",
    )
    print()
    print_table(
        ("setting", *(f">{name}" for name in costs[0].seconds), "bottleneck"),
        [(cost.setting, *busy(cost), cost.bound_by or "GPU") for cost in costs],
        "Minimum seconds per step of each resource",
    )
    print()
    print_text("Gathered parameters, activations and the buffers of disk transfers are not included.")
    print_text("The GPU updates 60% of the offloaded optimizer states, except in settings that use the host only.")
    unknown = sorted({name for cost in costs for name, value in cost.seconds.items() if value is None})
    if unknown:
        several = len(unknown) > 1
        text = f"{' and '.join(unknown)} {'are' if several else 'is'} not measured"
        print_text(f"?: {text} and may be the bottleneck of the setting.")
    for line in (line for cost in costs for line in shortages(cost, measured)):
        print_text(f"does not fit: {line}", "  ")
