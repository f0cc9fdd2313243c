"""onefold beside plain torch on one CUDA device, world size 1: `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from benchmarks.launch import Outcome, run, run_all
from benchmarks.model import PRESETS
from benchmarks.systems import LIMITS, Workload, parse_systems
from benchmarks.table import describe_run, failure_notes, format_table, ratio

REFERENCE = "torch"
HEADER = [
    "system",
    "s/step",
    "min s",
    f"x {REFERENCE}",
    "peak GPU MB",
    f"x {REFERENCE}",
    "host RSS MB",
    "start-up s",
    "first loss",
    "last loss",
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="1.3b")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--sequence", type=int, help="tokens a sequence (default: the preset's)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the timed ones")
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of blocks for backward")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--systems", type=parse_systems, default="torch,onefold")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a run may take")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--report", type=Path, help="also write a dated report here")
    arguments = parser.parse_args()
    for name in ("batch", "steps", "warmup", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; `python -m benchmarks.compare` runs on the CPU")
    return arguments


def summary(outcome: Outcome) -> str:
    return f"{outcome.step_mean:.3f} s a step, {outcome.gpu_mb:.0f} MB, start-up {outcome.startup_seconds:.1f} s"


def best(rounds: list[Outcome]) -> Outcome | None:
    """The fastest round that ended well: on a device of one's own, noise only ever adds."""
    measured = [outcome for outcome in rounds if not outcome.error]
    return min(measured, key=lambda outcome: outcome.step_mean) if measured else None


def make_rows(outcomes: dict[str, list[Outcome]]) -> list[list[str]]:
    reference = best(outcomes.get(REFERENCE, []))
    rows = []
    for system, rounds in outcomes.items():
        outcome = best(rounds)
        if outcome is None:
            rows.append([system, *["-"] * (len(HEADER) - 1)])
            continue
        rows.append(
            [
                system,
                f"{outcome.step_mean:.4f}",
                f"{min(outcome.step_seconds):.4f}",
                ratio(outcome.step_mean, reference and reference.step_mean),
                f"{outcome.gpu_mb:.0f}",
                ratio(outcome.gpu_mb, reference and reference.gpu_mb),
                f"{outcome.resident_mb:.0f}",
                f"{outcome.startup_seconds:.1f}",
                f"{outcome.losses[0]:.4f}",
                f"{outcome.losses[-1]:.4f}",
            ]
        )
    return rows


def main() -> None:
    arguments = parse_arguments()
    workload = Workload(
        preset=arguments.preset,
        dtype=arguments.dtype,
        batch=arguments.batch,
        sequence=arguments.sequence or PRESETS[arguments.preset].max_sequence,
        num_steps=arguments.steps,
        num_warmup_steps=arguments.warmup,
        device="cuda",
        recompute=arguments.recompute,
    )
    outcomes = run_all(
        arguments.systems,
        arguments.rounds,
        lambda system: run(system, workload, 1, arguments.timeout),
        summary,
    )
    num_parameters = max(outcome.num_parameters for rounds in outcomes.values() for outcome in rounds)
    table = format_table(HEADER, make_rows(outcomes)) + failure_notes(outcomes)
    details = {
        "model": f"GPT {workload.preset}, {num_parameters / 1e9:.2f}B parameters, {workload.dtype}",
        "job": f"one device, world size 1, {workload.batch} x {workload.sequence} tokens a step; "
        f"{arguments.rounds} rounds of {workload.num_steps} timed steps after {workload.num_warmup_steps}",
    }
    if any(system.startswith("onefold-3") for system in outcomes):
        details["stage 3"] = LIMITS
    print("\n" + "\n".join(f"{name}: {value}" for name, value in details.items()) + f"\n\n{table}")
    if arguments.out:
        figures = {system: [dataclasses.asdict(each) for each in rounds] for system, rounds in outcomes.items()}
        arguments.out.write_text(json.dumps({"workload": dataclasses.asdict(workload), "runs": figures}, indent=1))
    if arguments.report:
        header = describe_run(f"One GPU: {workload.preset}, {workload.dtype}", "benchmarks.gpu", details)
        arguments.report.write_text(f"{header}\n{table}\n")


if __name__ == "__main__":
    main()
