"""Run `onefold plan`: run a step of every setting dry, and show what fits.

Arguments are checked before torch is imported, so that mistakes are reported at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from onefold.config import load_config
from onefold.log import parse_bytes, parse_count, parse_rate, set_up_logging
from onefold.tools.cli.terminal import fails_on, print_table, print_text, progress_bar
from onefold.tools.cli.usage import UsageError, read_number
from onefold.tools.estimate.machines import GB, MAX_GPUS, Machine, adjust, find_machine
from onefold.tools.estimate.shapes import classify_model

if TYPE_CHECKING:
    from onefold.tools.estimate.advice import Advice
    from onefold.tools.estimate.forecast import Forecast
    from onefold.tools.estimate.models import ModelSource
    from onefold.tools.estimate.ops import OpTimer
    from onefold.tools.estimate.question import Question

SEQUENCE_LENGTH = 2048
MB = 1_000_000
# Larger numbers are refused as typing errors.
_MOST_PARAMETERS, _MOST_BYTES = 1e15, 1e18
_MOST_BATCH, _MOST_LENGTH, _MOST_RANK = 1 << 20, 1 << 24, 1 << 16


@fails_on(OSError)
def plan(options: argparse.Namespace) -> int:
    """Run `onefold plan`."""
    set_up_logging("warning", speaks=True)
    name = options.model or f"{options.params} parameters"
    check(options)
    print(f"planning {name} ...", file=sys.stderr, flush=True)
    from onefold.tools.estimate.advice import advise
    from onefold.tools.estimate.expert_advice import possible_settings
    from onefold.tools.estimate.forecast import forecast

    question = ask(options)
    timer = _timer(question.machine)
    with progress_bar("plan", in_bytes=False) as show_progress:
        found = forecast(question, possible_settings(question), show_progress, timer=timer)
    advice = advise(question, found, timer)
    if options.json:
        print(json.dumps(facts_of(question, found, advice), indent=2))
    else:
        show(question, found, advice, options)
    if advice.setting is None:
        if options.write:
            print(f"onefold: --write {options.write}: no setting fits, so no config is written", file=sys.stderr)
        return 1
    if options.write:
        best = next(each for each in found if each.setting.name == advice.setting)
        document = question.document(best.setting, question.micro_batch or 1)
        Path(options.write).write_text(json.dumps(document, indent=2) + "\n")
        if not options.json:
            print(f"\nwritten: {options.write}")
    return 0


def _timer(machine: Machine) -> OpTimer | None:
    """Return a timer of ops if the forecast is for this machine and `onefold tune` has measured it."""
    import torch

    from onefold.tools.estimate.ops import OpTimer

    if not (machine.measured and torch.cuda.is_available()):
        return None
    return OpTimer(torch.device("cuda"), machine.gpu.bandwidth)


def check(options: argparse.Namespace) -> None:
    """Check the arguments as far as possible without torch, and replace texts by numbers."""
    options.params = read_number(options, "params", parse_count, "7B", _MOST_PARAMETERS)
    for name, example, most in (
        ("batch", "4", _MOST_BATCH),
        ("seq", "2048", _MOST_LENGTH),
        ("lora", "16", _MOST_RANK),
        ("gpus", "8", MAX_GPUS),
        ("nodes", "4", MAX_GPUS),
    ):
        read_number(options, name, int, example, most)
    for name, example, least in (("gpu_memory", "80GB", 1), ("host_memory", "1TB", 1), ("nvme", "8TB", 0)):
        setattr(options, name, read_number(options, name, parse_bytes, example, _MOST_BYTES, least))
    for name in ("bus", "link"):
        setattr(options, name, read_number(options, name, parse_rate, "50GB/s", _MOST_BYTES))
    if options.params is not None:
        if options.lora or options.recompute:
            raise UsageError("--lora and --recompute need --model")
        if options.batch or options.seq:
            raise UsageError("--batch and --seq need a model with a forward. Give --model.")
    else:
        classify_model(options.model)
    machine = find_machine(options.machine) if options.machine is not None else None
    gpus = options.gpus or (machine.gpus if machine else 1)
    if gpus * options.nodes > MAX_GPUS:
        raise UsageError(f"{gpus * options.nodes:,} GPUs exceed the limit. Give at most {MAX_GPUS:,}.")
    if options.config:
        load_config(options.config)
    if options.write:
        folder = Path(options.write).parent
        if Path(options.write).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError(f"--write {options.write}: the file cannot be written")


def ask(options: argparse.Namespace) -> Question:
    """Return the question that the arguments ask, checked against the model and the machine."""
    from onefold.config import solve_batch
    from onefold.tools.estimate.expert_advice import with_requested_experts
    from onefold.tools.estimate.question import DEFAULT_CONFIG, Question

    document = dict(DEFAULT_CONFIG)
    if options.config:
        document = {**load_config(options.config).raw}
        document.setdefault("optimizer", DEFAULT_CONFIG["optimizer"])
    settings = load_config(document)
    source, machine = _source(options), _machine(options)
    micro_batch = length = None
    if source.loss_of is not None:
        has_batch = settings.train_batch_size is not None or settings.train_micro_batch_size_per_gpu is not None
        micro_batch = options.batch or (solve_batch(settings, machine.world).micro if has_batch else 1)
        length = options.seq or min(source.sequence_length or SEQUENCE_LENGTH, SEQUENCE_LENGTH)
        if source.sequence_length is not None and length > source.sequence_length:
            raise UsageError(f"--seq {length}: {source.name} has {source.sequence_length} positions")
    elif options.batch or options.seq:
        raise UsageError("--batch and --seq need a model with a forward. Give --model.")
    if settings.train_batch_size is not None:
        # The global batch of the config is kept, and the accumulation follows from it.
        together = (micro_batch or 1) * machine.world
        if settings.train_batch_size % together:
            raise UsageError(
                f"--config {options.config}: train_batch_size {settings.train_batch_size} is not a multiple of a "
                f"micro-batch of {micro_batch or 1} on {machine.world} GPUs ({together}). Give another --batch."
            )
        document["gradient_accumulation_steps"] = settings.train_batch_size // together
    return with_requested_experts(Question(source, machine, document, micro_batch, length))


def _source(options: argparse.Namespace) -> ModelSource:
    from onefold.tools.estimate.models import find_model, from_number

    if options.params is not None:
        return from_number(options.params)
    return find_model(options.model, lora=options.lora or 0, recompute=options.recompute)


def _machine(options: argparse.Namespace) -> Machine:
    from onefold.tools.estimate.machines import this_machine

    if options.machine is not None:
        machine = find_machine(options.machine)
    else:
        import torch

        if not torch.cuda.is_available() and options.gpu_memory is None:
            raise UsageError("No GPU is available. Name a machine (--machine 8xH100), or give --gpu-memory.")
        machine = this_machine()
    return adjust(
        machine,
        gpus=options.gpus,
        nodes=options.nodes,
        memory=options.gpu_memory,
        host_memory=options.host_memory,
        nvme=options.nvme,
        bus=options.bus,
        across=options.link,
    )


def facts_of(question: Question, found: list[Forecast], advice: Advice) -> dict[str, Any]:
    """Return the results for JSON output."""
    from onefold.tools.estimate.expert_advice import expert_notes
    from onefold.tools.estimate.forecast import assumptions

    rows = []
    for each in found:
        row = asdict(each)
        row["device"] |= {"allocated": each.device.allocated, "total": each.device.total}
        row["shortages"] = [str(shortage) for shortage in each.shortages]
        rows.append({**row, "fits": each.fits, "bound_by": each.bound_by})
    return {
        "model": question.model.name,
        "machine": asdict(question.machine),
        "micro_batch": question.micro_batch,
        "sequence_length": question.sequence_length,
        "assumptions": [*expert_notes(question), *assumptions(question)],
        "settings": rows,
        "advice": asdict(advice),
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def show(question: Question, found: list[Forecast], advice: Advice, options: argparse.Namespace) -> None:
    """Print the tables and the recommendation."""
    from onefold.tools.estimate.expert_advice import expert_notes
    from onefold.tools.estimate.forecast import assumptions

    machine = question.machine
    print_text(question.model.name)
    if question.micro_batch is not None:
        print_text(f"micro-batch {question.micro_batch} x {question.sequence_length} tokens per GPU")
    for part in machine.describe().split("; "):
        print_text(part, "  ")
    print()
    _show_settings(found, machine)
    if options.wide:
        print()
        _show_memory(found, machine)
        if found[0].traffic is not None:
            print()
            _show_traffic(found)
            print()
            _show_seconds(found)
    if options.params is not None:
        print()
        _show_textbook(options.params, machine)
    print()
    for note in (*expert_notes(question), *_same_rows(found, machine), *assumptions(question)):
        print_text(f"* {note}", "  ")
    if not options.wide:
        print_text("* --wide also prints memory by kind, traffic, and seconds by resource", "  ")
    print()
    print_text(f"take {advice.setting}: {advice.reason}" if advice.setting else advice.reason)


def _show_settings(found: list[Forecast], machine: Machine) -> None:
    """Print the main table, in 80 columns."""
    from onefold.tools.estimate.forecast import LARGEST_BATCH

    unit = _unit([value for each in found for value in (each.device.total, each.host_node, each.nvme)])
    in_ms = all(each.step is not None and each.step < 0.1 for each in found)
    rows: list[Sequence[str | Text]] = []
    for each in found:
        color = "yellow" if each.is_tight else "green" if each.fits else "red"
        time = "-" if each.step is None else _seconds(each.step * 1000 if in_ms else each.step)
        largest = str(each.largest_batch or "-") + "+" * ((each.largest_batch or 0) >= LARGEST_BATCH)
        rows.append((
            each.setting.name, Text(_amount(each.device.total, unit), "bold"), _amount(each.host_node, unit),
            _amount(each.nvme, unit), time, largest, Text(_verdict(each), color),
        ))  # fmt: skip
    name = "GB" if unit == GB else "MB"
    title = f"Peak {name} per GPU (of {machine.gpu.memory / unit:.0f}), and host and NVMe {name} per node"
    heads = ("setting", ">GPU", ">host", ">NVMe", f">{'ms' if in_ms else 's'}/step", ">max batch", "verdict")
    _print_filled(heads, rows, title)


def _verdict(each: Forecast) -> str:
    if each.fits:
        return "tight" if each.is_tight else "fits"
    return f"no: {', '.join(shortage.resource for shortage in each.shortages)}"


def _show_memory(found: list[Forecast], machine: Machine) -> None:
    kinds = ("parameters", "gathered", "gradients", "masters", "states", "activations", "logits")
    unit = _unit([getattr(each.device, kind) for each in found for kind in kinds])
    rows: list[Sequence[str | Text]] = []
    for each in found:
        device = each.device
        overhead = device.workspace + device.reserve + device.context
        rows.append((
            each.setting.name, *(_amount(getattr(device, kind), unit) for kind in kinds), _amount(overhead, unit),
            Text(_amount(device.total, unit), "bold"),
        ))  # fmt: skip
    heads = ("params", "gathered", "grads", "masters", "moments", "activations", "logits", "overhead", "total")
    name = "GB" if unit == GB else "MB"
    title = f"Peak memory of one GPU by kind, in {name} (of {machine.gpu.memory / unit:.0f})"
    _print_filled(("setting", *(f">{head}" for head in heads)), rows, title)


def _show_traffic(found: list[Forecast]) -> None:
    traffic = [(each.traffic, each.offload_traffic) for each in found if each.traffic is not None]
    moved = [(sent.inside, sent.across, bus.down + bus.up, bus.read, bus.written) for sent, bus in traffic]
    unit = _unit([value for values in moved for value in values])
    rows = [
        (each.setting.name, *(_amount(value, unit, 2) for value in values), str(sent.calls))
        for each, (sent, _), values in zip(found, traffic, moved, strict=True)
    ]
    heads = ("setting", ">inside node", ">between nodes", ">host bus", ">disk read", ">disk written", ">collectives")
    _print_filled(heads, rows, f"Traffic per step, in {'GB' if unit == GB else 'MB'}; between nodes: of all its GPUs")


def _show_seconds(found: list[Forecast]) -> None:
    names = list(dict.fromkeys(name for each in found for name in each.seconds))
    rows: list[Sequence[str | Text]] = []
    for each in found:
        assert each.step is not None
        busy = [
            Text(_seconds(each.seconds[name]) if name in each.seconds else "-", "bold" if name == each.bound_by else "")
            for name in names
        ]
        rows.append((each.setting.name, *busy, Text(_seconds(each.step), "bold"), str(each.bound_by)))
    heads = ("setting", *(f">{name}" for name in names), ">step", "bottleneck")
    _print_filled(heads, rows, "Estimated busy seconds per step of each resource")


def _unit(values: Sequence[int]) -> int:
    """Return the unit of a table: MB if some values would be 0.0 GB."""
    return MB if max(values) < 10 * GB and any(0 < value < GB // 20 for value in values) else GB


def _amount(value: int, unit: int, digits: int = 1) -> str:
    if not value:
        return "-"
    if unit == MB:
        return f"{value / MB:.0f}" if value >= MB / 2 else "<1"
    return f"{value / GB:.{digits}f}" if value / GB >= 0.5 / 10**digits else f"<{1 / 10**digits:g}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1g}"


def _print_filled(heads: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str) -> None:
    """Print a table without its empty columns."""
    filled = [place for place in range(len(heads)) if any(str(row[place]) != "-" for row in rows)]
    print_table([heads[place] for place in filled], [[row[place] for place in filled] for row in rows], title)


def _same_rows(found: list[Forecast], machine: Machine) -> list[str]:
    """Explain rows that are equal."""
    groups: dict[Any, list[Forecast]] = {}
    for each in found:
        facts = (each.device, each.host, each.host_node, each.nvme, each.traffic, each.offload_traffic, each.step)
        groups.setdefault(facts, []).append(each)
    notes = []
    for same in (group for group in groups.values() if len(group) > 1):
        names = f"{', '.join(each.setting.name for each in same[:-1])} and {same[-1].setting.name} are equal"
        if any("offload_param" in each.setting.zero for each in same):
            notes.append(f"{names}: parameters fill host memory first, up to max_in_cpu (1e9 elements per rank)")
        elif machine.world == 1:
            notes.append(f"{names}: nothing is sharded on one GPU")
        else:
            notes.append(f"{names}: one micro-batch per step accumulates no gradients")
    return notes


def _show_textbook(num_parameters: float, machine: Machine) -> None:
    from onefold.tools.estimate.textbook import MOMENTS, MOMENTS_AND_MASTER, count_as_textbook

    rows = []
    for stage in range(4):
        counted = [
            count_as_textbook(num_parameters, machine.world, stage, width) for width in (MOMENTS, MOMENTS_AND_MASTER)
        ]
        rows.append((f"stage {stage}", *(f"{each.total / GB:.1f}" for each in counted)))
    title = (
        f"Rule of thumb, GB per GPU on {machine.world} GPU{'s' * (machine.world > 1)}: 2 B parameters + 2 B gradients "
        "+ 8 B (moments) or 12 B (moments and masters)"
    )
    print_table(("setting", ">8 B", ">12 B"), rows, title)
