"""Run `onefold compare`: run the same job in several settings, and recommend one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from onefold.config import load_config, solve_batch
from onefold.log import format_bytes
from onefold.tools.cli.terminal import fails_on, print_table, progress_bar
from onefold.tools.cli.trials import Trial, TrialJob, split_settings
from onefold.tools.cli.usage import CPU_RANKS, UsageError
from onefold.tools.pages.plots import new_figure
from onefold.tools.train.options import TrainOptions, check_inputs, prepare_config


@fails_on(OSError)
def compare(options: argparse.Namespace) -> int:
    """Run `onefold compare`."""
    check_inputs(train_options(options))
    settings = split_settings(options.stages, options.nvme_path)
    import torch

    if options.largest_batch and not torch.cuda.is_available():
        raise UsageError("--largest-batch needs GPUs, because it exhausts the memory. Leave it out on a CPU.")
    job, micro_batch = job_of(options)
    found: list[Trial] = []
    with progress_bar("compare", in_bytes=False, in_lines=True) as show_progress:
        # Rounds alternate between settings, so that other load on the machine affects all of them.
        total = len(settings) * options.rounds
        for place, setting in enumerate(settings):
            show_progress(f"{setting.name}, round 1 of {options.rounds}", place, total)
            if options.largest_batch:
                found.append(job.run_with_largest_batch(setting, micro_batch, options.max_batch))
            else:
                found.append(job.run(setting, micro_batch))
        for round in range(2, options.rounds + 1):
            for place, trial in enumerate(found):
                show_progress(
                    f"{trial.setting.name}, round {round} of {options.rounds}", (round - 1) * len(found) + place, total
                )
                if trial.outcome == "done":
                    found[place] = job.repeat(trial, round)
    facts = {"micro_batch": micro_batch, "steps": job.steps, "rounds": options.rounds}
    facts["settings"] = [_facts(each) for each in found]
    facts["recommendation"] = recommend(found)
    (job.folder / "compare.json").write_text(json.dumps(facts, indent=2) + "\n")
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        show(found)
        print(f"\n{facts['recommendation']}\n")
        plot = draw(found, job.folder)
        print(f"plot: {plot}" if plot else "no plot: install matplotlib (pip install 'onefold[plots]')")
        print(f"logs, records and compare.json in {job.folder}")
    return 0 if any(each.outcome == "done" for each in found) else 1


def job_of(options: argparse.Namespace) -> tuple[TrialJob, int]:
    """Return the job of all runs, and the micro-batch."""
    flags: list[str] = []
    for name in ("preset", "model", "lora", "sequence_length"):
        value = getattr(options, name)
        if value:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    import torch

    prepared = prepare_config(train_options(options), on_gpus=torch.cuda.is_available())
    settings = load_config(prepared.document)
    ranks = options.ranks or torch.cuda.device_count() or CPU_RANKS
    micro_batch = options.batch or solve_batch(settings, ranks).micro
    folder = Path(options.out or Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-trials"))
    return TrialJob(prepared.document, tuple(flags), options.ranks, options.steps, folder), micro_batch


def train_options(options: argparse.Namespace) -> TrainOptions:
    """Return the options for `onefold train`."""
    return TrainOptions(
        config=options.config,
        preset=options.preset or TrainOptions.preset,
        model=options.model,
        lora=options.lora or 0,
        sequence_length=options.sequence_length,
        out=options.out,
    )


def _facts(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {"setting": trial.setting.name, "outcome": trial.outcome, "message": trial.message}
    if trial.outcome == "done":
        found |= {
            "step_seconds": trial.step_seconds,
            "step_seconds_spread": list(trial.spread),
            "samples_per_second": trial.samples_per_second,
            "peak_bytes": trial.peak,
            "sent_bytes": trial.sent,
            "largest_batch": trial.largest_batch,
            "losses": [row.loss for row in trial.steps],
            "memory": [row.memory.device_allocated or row.memory.host_resident for row in trial.steps],
        }
    return found


def show(found: Sequence[Trial]) -> None:
    rows = []
    for trial in found:
        if trial.outcome != "done":
            rows.append((trial.setting.name, "-", "-", "-", "-", "-", "-", f"{trial.outcome}: {trial.message}"))
            continue
        low, high = trial.spread
        rows.append((
            trial.setting.name, f"{trial.step_seconds:.3f}", f"{low:.3f}..{high:.3f}",
            f"{trial.samples_per_second:.1f}",
            format_bytes(trial.peak), format_bytes(trial.sent) if trial.sent else "-",
            f"{trial.steps[-1].loss:.5f}" if trial.steps[-1].loss is not None else "-",
            f"largest micro-batch {trial.largest_batch}" if trial.largest_batch else "",
        ))  # fmt: skip
    heads = ("setting", ">s/step", ">min..max", ">samples/s", ">peak", ">sent/step", ">last loss", "result")
    rounds = max((len(trial.rounds) for trial in found), default=0)
    over = f"median and spread of {rounds} rounds" if rounds > 1 else "median and spread of the steps of one round"
    print_table(heads, rows, f"Measurements of rank 0 without the first steps: {over}")


def recommend(found: Sequence[Trial]) -> str:
    """Recommend the fastest setting; among those within the noise, the one with the least memory."""
    done = [trial for trial in found if trial.outcome == "done"]
    if not done:
        return f"No setting completed. {found[0].setting.name}: {found[0].outcome} ({found[0].message})"
    fastest = min(done, key=lambda trial: trial.step_seconds)
    close = [trial for trial in done if trial.spread[0] <= fastest.spread[1]]
    best = min(close, key=lambda trial: trial.peak)
    text = f"Use {best.setting.name}: {best.step_seconds:.3f} s/step and {format_bytes(best.peak)} at peak"
    if len(close) > 1:
        names = ", ".join(trial.setting.name for trial in close)
        text += f". The speeds of {names} do not differ beyond the noise; {best.setting.name} takes the least memory"
    others = [trial for trial in done if trial is not best]
    if others:
        smallest = min(others, key=lambda trial: trial.peak)
        if smallest.peak < best.peak * 0.97:
            less, longer = format_bytes(best.peak - smallest.peak), smallest.step_seconds / best.step_seconds
            text += f". To save memory, use {smallest.setting.name}: {less} less, {longer:.2f} times the step time"
    lost = [trial.setting.name for trial in found if trial.outcome == "out of memory"]
    if lost:
        text += f". Out of memory: {', '.join(lost)}"
    losses = {trial.steps[-1].loss for trial in done}
    if len(done) > 1:
        same = len(losses) == 1
        text += ". The last losses are equal" if same else ". The last losses differ, which no stage causes"
    return f"{text}."


def draw(found: Sequence[Trial], folder: Path) -> Path | None:
    """Plot memory over time and samples per second of all runs. Return None if matplotlib is not installed."""
    figure = new_figure(10, 4)
    if figure is None:
        return None
    done = [trial for trial in found if trial.outcome == "done"]
    memory, speed = figure.subplots(1, 2)
    for trial in done:
        held = [(row.memory.device_allocated or row.memory.host_resident) / 1e6 for row in trial.steps]
        memory.plot([row.step for row in trial.steps], held, label=trial.setting.name, linewidth=1.4)
    memory.set(title="memory at the step (MB)", xlabel="step", ylim=(0, None))
    memory.legend(frameon=False, fontsize="small")
    speed.bar([trial.setting.name for trial in done], [trial.samples_per_second for trial in done], color="#2f6fc1")
    speed.set(title="samples per second")
    for axes in (memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    path = folder / "compare.png"
    figure.savefig(path)
    return path
