"""onefold beside DDP, FSDP2 and DeepSpeed on CPU ranks over gloo: `python -m benchmarks.compare`.

DeepSpeed joins where it is installed: `pip install wheel ninja`, then `DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install
--no-build-isolation deepspeed==0.19.8`, and set DS_ACCELERATOR=cpu for the run.

Ratios travel, absolute times do not. The step ratio is the median over rounds of the ratio to DDP in the same round,
since a shared machine drifts between rounds more than within one.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.launch import Outcome, run, run_all
from benchmarks.model import PRESETS
from benchmarks.systems import LIMITS, Workload, parse_systems
from benchmarks.table import describe_run, failure_notes, format_table, ratio

REFERENCE = "ddp"
HEADER = [
    "system",
    "step s",
    "min s",
    f"x {REFERENCE}",
    "RSS MiB",
    f"x {REFERENCE}",
    "at rest MiB",
    "start-up s",
    "loss",
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="25m")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--batch", type=int, default=1, help="sequences a rank and step (small, so that communication counts)"
    )
    parser.add_argument("--sequence", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=8, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of blocks for backward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", type=parse_systems, default="ddp,fsdp2,deepspeed,onefold")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take")
    parser.add_argument("--report", type=Path, help="also write a dated report here")
    arguments = parser.parse_args()
    for name in ("batch", "steps", "warmup", "rounds", "ranks"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    longest = PRESETS[arguments.preset].max_sequence
    if not 1 <= arguments.sequence <= longest:
        parser.error(f"--sequence must be 1 to {longest} for {arguments.preset}")
    return arguments


def summary(outcome: Outcome) -> str:
    return f"{outcome.step_mean:.3f} s a step, {outcome.resident_mb:.0f} MiB, loss {outcome.losses[-1]:.4f}"


def make_rows(outcomes: dict[str, list[Outcome]]) -> list[list[str]]:
    reference = outcomes.get(REFERENCE, [])
    measured_reference = [outcome.resident_mb for outcome in reference if not outcome.error]
    reference_rss = statistics.median(measured_reference) if measured_reference else None
    rows = []
    for system, rounds in outcomes.items():
        measured = [outcome for outcome in rounds if not outcome.error]
        if not measured:
            rows.append([system, *["-"] * (len(HEADER) - 1)])
            continue
        steps = [outcome.step_mean for outcome in measured]
        resident = statistics.median(outcome.resident_mb for outcome in measured)
        ratios = [
            mine.step_mean / theirs.step_mean
            for mine, theirs in zip(rounds, reference, strict=False)
            if not mine.error and not theirs.error
        ]
        rows.append(
            [
                system,
                f"{statistics.median(steps):.3f}",
                f"{min(steps):.3f}",
                f"{statistics.median(ratios):.2f}" if ratios else "-",
                f"{resident:.0f}",
                ratio(resident, reference_rss),
                f"{statistics.median(outcome.rest_mb for outcome in measured):.0f}",
                f"{statistics.median(outcome.startup_seconds for outcome in measured):.1f}",
                f"{measured[-1].losses[-1]:.5f}",
            ]
        )
    return rows


def main() -> None:
    arguments = parse_arguments()
    workload = Workload(
        preset=arguments.preset,
        dtype=arguments.dtype,
        batch=arguments.batch,
        sequence=arguments.sequence,
        num_steps=arguments.steps,
        num_warmup_steps=arguments.warmup,
        device="cpu",
        recompute=arguments.recompute,
    )
    outcomes = run_all(
        arguments.systems,
        arguments.rounds,
        lambda system: run(system, workload, arguments.ranks, arguments.timeout),
        summary,
    )
    num_parameters = max(outcome.num_parameters for rounds in outcomes.values() for outcome in rounds)
    table = format_table(HEADER, make_rows(outcomes)) + failure_notes(outcomes)
    details = {
        "model": f"GPT {arguments.preset}, {num_parameters / 1e6:.1f}M parameters, {arguments.dtype}",
        "job": f"{arguments.ranks} gloo ranks, one thread each, {arguments.batch} x {arguments.sequence} tokens a rank "
        f"and step; {arguments.rounds} rounds of {arguments.steps} timed steps after {arguments.warmup}",
    }
    if any(system.startswith("onefold-3") for system in outcomes):
        details["stage 3"] = LIMITS
    print("\n" + "\n".join(f"{name}: {value}" for name, value in details.items()) + f"\n\n{table}")
    if arguments.report:
        header = describe_run(
            f"Peers on CPU ranks: {arguments.preset}, {arguments.dtype}", "benchmarks.compare", details
        )
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(f"{header}\n{table}\n")
        print(f"\nwritten: {arguments.report}")


if __name__ == "__main__":
    main()
