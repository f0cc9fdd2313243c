"""What `onefold plan` does: rehearse a step in every setting, and show what fits."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from onefold.cli.commands import UsageError
from onefold.cli.terminal import fails_on, print_table, progress_bar
from onefold.config import load_config, solve_batch
from onefold.estimate.advice import Advice, advise
from onefold.estimate.forecast import (
    DEFAULT_CONFIG,
    Forecast,
    Question,
    assumptions,
    forecast,
    settings_for,
)
from onefold.estimate.machines import GB, Machine, adjust, find_machine, this_machine
from onefold.estimate.models import ModelSource, find_model, from_number
from onefold.estimate.op_times import OpTimer
from onefold.estimate.textbook import MOMENTS, MOMENTS_AND_MASTER, count_as_textbook
from onefold.log import set_up_logging

SEQUENCE_LENGTH = 2048


@fails_on(OSError)
def plan(options: argparse.Namespace) -> int:
    set_up_logging("warning", speaks=True)
    question = ask(options)
    with progress_bar("plan", in_bytes=False) as tell:
        found = forecast(question, settings_for(question.machine), tell, timer=_timer(question.machine))
    advice = advise(question, found)
    if options.json:
        print(json.dumps(facts_of(question, found, advice), indent=2))
    else:
        show(question, found, advice, options)
    if options.write:
        if advice.setting is None:
            raise UsageError(f"--write {options.write}: nothing fits, so there is no config to write")
        best = next(each for each in found if each.setting.name == advice.setting)
        document = question.document(best.setting, question.micro_batch or 1)
        Path(options.write).write_text(json.dumps(document, indent=2) + "\n")
        if not options.json:
            print(f"\nwritten: {options.write}")
    return 0


def _timer(machine: Machine) -> OpTimer | None:
    """Ops are timed here where this is the machine that is asked about, and `onefold tune` has measured the rest."""
    if not (machine.measured and torch.cuda.is_available()):
        return None
    return OpTimer(torch.device("cuda"), machine.gpu.bandwidth)


def ask(options: argparse.Namespace) -> Question:
    """What was typed, checked."""
    for name in ("params", "batch", "seq", "gpus", "nodes", "gpu_memory", "host_memory", "bus", "link"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    document = dict(DEFAULT_CONFIG)
    if options.config:
        document = {**load_config(options.config).raw}
        document.setdefault("optimizer", DEFAULT_CONFIG["optimizer"])
    settings = load_config(document)
    source, machine = _source(options), _machine(options)
    micro_batch = length = None
    if source.loss_of is not None:
        micro_batch = options.batch or (solve_batch(settings, machine.world).micro if _has_batch(settings) else 1)
        length = options.seq or min(source.sequence_length or SEQUENCE_LENGTH, SEQUENCE_LENGTH)
        if source.sequence_length is not None and length > source.sequence_length:
            raise UsageError(f"--seq {length}: {source.name} knows {source.sequence_length} positions")
    elif options.batch or options.seq:
        raise UsageError("--batch and --seq are about activations, which need a shape: give --model with a forward")
    if settings.train_batch_size is not None:
        # The whole batch stays as the config has it, and the accumulation follows from it.
        together = (micro_batch or 1) * machine.world
        if settings.train_batch_size % together:
            raise UsageError(
                f"--config {options.config}: train_batch_size {settings.train_batch_size} is no multiple of a "
                f"micro-batch of {micro_batch or 1} on {machine.world} GPUs ({together}); give another --batch"
            )
        document["gradient_accumulation_steps"] = settings.train_batch_size // together
    return Question(source, machine, document, micro_batch, length)


def _has_batch(settings: Any) -> bool:
    return settings.train_batch_size is not None or settings.train_micro_batch_size_per_gpu is not None


def _source(options: argparse.Namespace) -> ModelSource:
    if options.params is not None:
        if options.lora or options.recompute:
            raise UsageError("--lora and --recompute go with --model")
        return from_number(round(options.params))
    return find_model(options.model, lora=options.lora, recompute=options.recompute)


def _machine(options: argparse.Namespace) -> Machine:
    if options.machine is None and not torch.cuda.is_available() and options.gpu_memory is None:
        raise UsageError("torch sees no GPU here: name a machine (--machine 8xH100), or give --gpu-memory")
    machine = find_machine(options.machine) if options.machine else this_machine()

    def in_bytes(value: float | None) -> float | None:
        return None if value is None else value * GB

    whole = {name: in_bytes(getattr(options, name)) for name in ("gpu_memory", "host_memory", "nvme", "bus", "link")}
    return adjust(
        machine,
        gpus=options.gpus,
        nodes=options.nodes,
        memory=None if whole["gpu_memory"] is None else int(whole["gpu_memory"]),
        host_memory=None if whole["host_memory"] is None else int(whole["host_memory"]),
        nvme=None if whole["nvme"] is None else int(whole["nvme"]),
        bus=whole["bus"],
        across=whole["link"],
    )


def facts_of(question: Question, found: list[Forecast], advice: Advice) -> dict[str, Any]:
    """The same for programs."""
    rows = []
    for each in found:
        row = asdict(each)
        row["device"] |= {"allocated": each.device.allocated, "total": each.device.total}
        rows.append({**row, "fits": each.fits, "bound_by": each.bound_by})
    return {
        "model": question.model.name,
        "machine": asdict(question.machine),
        "micro_batch": question.micro_batch,
        "sequence_length": question.sequence_length,
        "assumptions": assumptions(question),
        "settings": rows,
        "advice": asdict(advice),
    }


def show(question: Question, found: list[Forecast], advice: Advice, options: argparse.Namespace) -> None:
    machine = question.machine
    batch = ""
    if question.micro_batch is not None:
        batch = f", micro-batch {question.micro_batch} x {question.sequence_length} tokens a GPU"
    print(f"{question.model.name}{batch}\n{machine.describe()}\n")
    _show_memory(found, machine)
    if found[0].traffic is not None:
        print()
        _show_costs(found)
    if options.params is not None:
        print()
        _show_textbook(options.params, machine)
    print()
    for said in assumptions(question):
        print(f"* {said}")
    head = f"take {advice.setting}: " if advice.setting else ""
    print(f"\n{head}{advice.reason}")


def _show_memory(found: list[Forecast], machine: Machine) -> None:
    def gigabytes(value: int) -> str:
        return f"{value / GB:.1f}" if value else "-"

    kinds = ("parameters", "gathered", "gradients", "masters", "states", "activations", "logits")
    rows: list[Sequence[str | Text]] = []
    for each in found:
        device = each.device
        beside = device.workspace + device.reserve + device.context
        verdict = Text("fits", "green") if each.fits else Text(each.shortages[0], "red")
        rows.append((
            each.setting.name, *(gigabytes(getattr(device, kind)) for kind in kinds), gigabytes(beside),
            Text(gigabytes(device.total), "bold"), gigabytes(each.host_node), gigabytes(each.nvme),
            str(each.largest_batch) if each.largest_batch is not None else "-", verdict,
        ))  # fmt: skip
    heads = (
        "params",
        "gathered",
        "grads",
        "masters",
        "moments",
        "activations",
        "logits",
        "beside",
        "GPU",
        "host",
        "nvme",
    )
    title = f"GB of one GPU of {machine.gpu.memory / GB:.0f} at its fullest moment; of a node's host and NVMe"
    _print_filled(("", *(f">{head}" for head in heads), ">largest batch", ""), rows, title)


def _show_costs(found: list[Forecast]) -> None:
    names = list(dict.fromkeys(name for each in found for name in each.seconds))
    rows: list[Sequence[str | Text]] = []
    for each in found:
        assert each.traffic is not None
        assert each.step is not None
        moved = each.traffic.inside, each.traffic.across, each.crossing.down + each.crossing.up
        busy = [
            Text(f"{each.seconds[name]:.3f}" if name in each.seconds else "-", "bold" if name == each.bound_by else "")
            for name in names
        ]
        rows.append((
            each.setting.name, *(f"{value / GB:.2f}" if value else "-" for value in moved), f"{each.traffic.calls}",
            *busy, Text(f"{each.step:.3f}", "bold"),
        ))  # fmt: skip
    heads = (
        "",
        ">sent inside",
        ">leaves a node",
        ">over the bus",
        ">calls",
        *(f">{name}" for name in names),
        ">a step",
    )
    _print_filled(heads, rows, "GB and seconds of a step: estimates; what is busiest bounds it")


def _print_filled(heads: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str) -> None:
    """Without the columns in which no row has anything."""
    filled = [place for place in range(len(heads)) if any(str(row[place]) != "-" for row in rows)]
    print_table([heads[place] for place in filled], [[row[place] for place in filled] for row in rows], title)


def _show_textbook(num_parameters: float, machine: Machine) -> None:
    rows = []
    for stage in range(4):
        counted = [
            count_as_textbook(num_parameters, machine.world, stage, width) for width in (MOMENTS, MOMENTS_AND_MASTER)
        ]
        rows.append((f"stage {stage}", *(f"{each.total / GB:.1f}" for each in counted)))
    title = f"as tutorials count, GB a GPU on {machine.world}: 2 bytes of parameters, 2 of gradients, and of states"
    print_table(("", ">8 (moments)", ">12 (and masters)"), rows, title)
