"""onefold beside its peers on CUDA devices: `python -m benchmarks.gpu`.

By itself on one device, world size 1, beside plain torch. With `--ranks 2,4` on so many NCCL ranks, beside DDP and
FSDP2; ranks beyond the number of GPUs share them ([Note: NCCL ranks on one GPU] in `launch.py`), and a table stands for
each preset and number of ranks. There a system is measured against the FSDP2 that reduces in the same type and
holds as much: stage 3, and FSDP2 with offload, against the one that reshards, all others against the one that keeps its
parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.launch import Outcome, mps, run, run_all, shares_devices
from benchmarks.model import PRESETS
from benchmarks.systems import LIMITS, REDUCING_IN_BF16, Workload, parse_systems
from benchmarks.table import describe_run, failure_notes, format_table, ratio
from benchmarks.worker import SNAPSHOT, SNAPSHOT_STEP

REFERENCE = "torch"
HEADER = [
    "system",
    "s/step",
    "min s",
    f"x {REFERENCE}",
    "tokens/s",
    "TFLOP/s",
    "peak GPU MiB",
    f"x {REFERENCE}",
    "host RSS MiB",
    "start-up s",
    "first loss",
    "last loss",
]
RANKS_HEADER = [
    "system",
    "reduces in",
    "s/step",
    "min s",
    "x FSDP2",
    "NCCL calls",
    "host exchanges",
    "MB sent",
    "peak GPU MiB",
    "x FSDP2",
    "start-up peak MiB",
    "first loss",
    "last loss",
]
RANKS_SYSTEMS = [
    "ddp",
    "fsdp2-keep",
    "fsdp2-reshard",
    "onefold-1",
    "onefold-2",
    "onefold-3",
    "onefold-3-ahead",
    *REDUCING_IN_BF16,
]
RANKS_COLUMNS = (
    "a step and rank: NCCL calls (a group that is started in one go is one) and host exchanges (between CPUs) of rank "
    "0; MB sent by the loopback's counter, headers and host exchanges with them; peak GPU MiB of the fullest rank "
    "after the first step, start-up peak until then; x FSDP2: the one that reduces in the same type, for stage 3 with "
    "reshard"
)
# Sequences a rank and step.
BATCHES = {"27m": 4, "109m": 4, "390m": 2}
BATCH = 8


@dataclass(frozen=True)
class Job:
    """All systems on one model and number of ranks."""

    workload: Workload
    num_ranks: int
    outcomes: dict[str, list[Outcome]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--preset", "--presets", type=parse_presets, default="1.3b", help="one, or several: 27m,109m")
    parser.add_argument("--ranks", type=parse_ranks, default=[], help="numbers of NCCL ranks: 2,4")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--batch", type=int, help=f"sequences a rank and step (default: {BATCHES}, else {BATCH})")
    parser.add_argument("--micro-steps", type=int, default=1, help="micro-steps a step, each of --batch sequences")
    parser.add_argument("--sequence", type=int, help="tokens a sequence (default: the preset's)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the timed ones")
    parser.add_argument("--device-memory", type=float, help="onefold.device_memory of offloaded systems, in GB")
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of blocks for backward")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--batch-chunks",
        type=parse_chunks,
        default=0,
        help="chunks in which blocks compute each batch, or auto; also computes the loss in tiles (only onefold)",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--systems", type=parse_systems, help="default: torch,onefold; with --ranks " + ",".join(RANKS_SYSTEMS)
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds a run may take")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--report", type=Path, help="also write a dated report here")
    parser.add_argument(
        "--snapshot", type=Path, help="a folder for rank 0's GPU memory in the third step (python -m benchmarks.peak)"
    )
    arguments = parser.parse_args()
    for name in ("batch", "micro_steps", "steps", "warmup", "rounds"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.snapshot and arguments.warmup <= SNAPSHOT_STEP:
        parser.error(f"--snapshot records step {SNAPSHOT_STEP + 1}, which must not be timed: --warmup is too small")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; `python -m benchmarks.compare` runs on the CPU")
    if arguments.batch_chunks and not all("onefold" in system for system in arguments.systems or [REFERENCE]):
        parser.error("--batch-chunks needs systems of onefold alone: --systems offload-onefold-3")
    arguments.systems = arguments.systems or (RANKS_SYSTEMS if arguments.ranks else parse_systems("torch,onefold"))
    return arguments


def parse_presets(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in PRESETS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown preset {unknown[0]!r}; known: {', '.join(PRESETS)}")
    return text.split(",")


def parse_chunks(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("a number of chunks is a whole number, or auto")
    return int(text)


def parse_ranks(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("a number of ranks is at least 1")
    return numbers


def summary(outcome: Outcome) -> str:
    text = f"{outcome.step_mean:.3f} s a step, {whole_peak(outcome):.0f} MiB, start-up {outcome.startup_seconds:.1f} s"
    if outcome.collectives:
        text += f", {outcome.collectives} calls, {outcome.host_exchanges} host exchanges, {sent(outcome)} MB sent"
    return text


def best(rounds: list[Outcome]) -> Outcome | None:
    """The fastest round that ended well: on a device of one's own, noise only ever adds."""
    measured = [outcome for outcome in rounds if not outcome.error]
    return min(measured, key=lambda outcome: outcome.step_mean) if measured else None


def whole_peak(outcome: Outcome) -> float:
    """Of start-up and training."""
    return max(outcome.gpu_mb, outcome.startup_gpu_mb)


def sent(outcome: Outcome) -> str:
    return "-" if outcome.sent_mb is None else f"{outcome.sent_mb:.1f}"


def reduces_in(system: str, dtype: str) -> str:
    return "bf16" if dtype == "bf16" and system in REDUCING_IN_BF16 else "fp32"


def reference_of(system: str, dtype: str) -> str:
    """The FSDP2 that reduces in the same type and holds as much."""
    reshards = {"3", "reshard"} & set(system.split("-")) or system.startswith("offload-fsdp2")
    name = "fsdp2-reshard" if reshards else "fsdp2-keep"
    return f"{name}-bf16" if reduces_in(system, dtype) == "bf16" else name


def make_rows(outcomes: dict[str, list[Outcome]], workload: Workload) -> list[list[str]]:
    """One row per system. A step takes 6 operations per parameter and token, as is usual without recomputation."""
    num_tokens = workload.batch * workload.micro_steps * workload.sequence
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
                f"{num_tokens / outcome.step_mean:,.0f}",
                f"{6e-12 * outcome.num_active_parameters * num_tokens / outcome.step_mean:.0f}",
                f"{whole_peak(outcome):.0f}",
                ratio(whole_peak(outcome), reference and whole_peak(reference)),
                f"{outcome.resident_mb:.0f}",
                f"{outcome.startup_seconds:.1f}",
                f"{outcome.losses[0]:.4f}",
                f"{outcome.losses[-1]:.4f}",
            ]
        )
    return rows


def make_ranks_rows(outcomes: dict[str, list[Outcome]], dtype: str) -> list[list[str]]:
    """Those that reduce in fp32 first, then those that reduce in bf16."""
    rows = []
    for system, rounds in sorted(outcomes.items(), key=lambda item: reduces_in(item[0], dtype), reverse=True):
        outcome = best(rounds)
        if outcome is None:
            rows.append([system, reduces_in(system, dtype), *["-"] * (len(RANKS_HEADER) - 2)])
            continue
        reference = best(outcomes.get(reference_of(system, dtype), []))
        rows.append(
            [
                system,
                reduces_in(system, dtype),
                f"{outcome.step_mean:.4f}",
                f"{min(outcome.step_seconds):.4f}",
                ratio(outcome.step_mean, reference and reference.step_mean),
                str(outcome.collectives),
                str(outcome.host_exchanges),
                sent(outcome),
                f"{outcome.gpu_mb:.0f}",
                ratio(outcome.gpu_mb, reference and reference.gpu_mb),
                f"{outcome.startup_gpu_mb:.0f}",
                f"{outcome.losses[0]:.4f}",
                f"{outcome.losses[-1]:.4f}",
            ]
        )
    return rows


def describe(job: Job, num_rounds: int) -> dict[str, str]:
    workload = job.workload
    num_parameters = max(outcome.num_parameters for rounds in job.outcomes.values() for outcome in rounds)
    size = f"{num_parameters / 1e9:.2f}B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.1f}M"
    where = "one device, world size 1" if job.num_ranks == 1 else f"{job.num_ranks} NCCL ranks"
    each = "a step" if job.num_ranks == 1 else "a rank and step"
    return {
        "model": f"GPT {workload.preset}, {size} parameters, {workload.dtype}",
        "job": f"{where}, {f'{workload.micro_steps} micro-steps of ' if workload.micro_steps > 1 else ''}"
        f"{workload.batch} x {workload.sequence} tokens {each}"
        f"{f', device_memory {workload.device_memory:g} GB' if workload.device_memory is not None else ''}"
        f"{f', in {workload.batch_chunks} batch chunks, loss in tiles' if workload.batch_chunks else ''}; "
        f"{num_rounds} rounds of {workload.num_steps} timed steps after {workload.num_warmup_steps}",
    }


def make_table(job: Job, with_ranks: bool) -> str:
    notes = failure_notes(job.outcomes)
    if with_ranks:
        return format_table(RANKS_HEADER, make_ranks_rows(job.outcomes, job.workload.dtype)) + notes
    return format_table(HEADER, make_rows(job.outcomes, job.workload)) + notes


def make_report(jobs: list[Job], arguments: argparse.Namespace, details: dict[str, str]) -> str:
    presets, dtype = ", ".join(arguments.preset), arguments.dtype
    if len(jobs) == 1 and not arguments.ranks:
        header = describe_run(
            f"One GPU: {presets}, {dtype}", "benchmarks.gpu", {**describe(jobs[0], arguments.rounds), **details}
        )
        return f"{header}\n{make_table(jobs[0], with_ranks=False)}\n"
    title = f"NCCL ranks: {presets}, {dtype}" if arguments.ranks else f"One GPU: {presets}, {dtype}"
    sections = [describe_run(title, "benchmarks.gpu", details)]
    for job in jobs:
        ranks = f", {job.num_ranks} ranks" if arguments.ranks else ""
        facts = "\n".join(f"* {name}: {value}" for name, value in describe(job, arguments.rounds).items())
        table = make_table(job, bool(arguments.ranks))
        sections.append(f"## {job.workload.preset}{ranks}\n\n{facts}\n\n{table}\n")
    return "\n".join(sections)


def make_figures(jobs: list[Job], with_ranks: bool) -> str:
    figures = [
        {
            "workload": dataclasses.asdict(job.workload),
            "ranks": job.num_ranks,
            "runs": {system: [dataclasses.asdict(each) for each in rounds] for system, rounds in job.outcomes.items()},
        }
        for job in jobs
    ]
    return json.dumps(figures if with_ranks or len(jobs) > 1 else figures[0], indent=1)


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ranks and daemon end with us
    details = {}
    if any(system.startswith("onefold-3") for system in arguments.systems):
        details["stage 3"] = LIMITS
    if not arguments.ranks:
        run_jobs(arguments, details, {})
        return
    num_gpus = torch.cuda.device_count()
    with mps() if max(arguments.ranks) > num_gpus else nullcontext({}) as environment:
        details["GPUs"] = f"{num_gpus}; ranks beyond that share them, MPS {'on' if environment else 'off'}"
        details["columns"] = RANKS_COLUMNS
        run_jobs(arguments, details, environment)


def run_jobs(arguments: argparse.Namespace, details: dict[str, str], environment: dict[str, str]) -> None:
    """One after the other; what is written to files is complete after each."""
    jobs: list[Job] = []
    for num_ranks in arguments.ranks or [1]:
        for preset in arguments.preset:
            workload = Workload(
                preset=preset,
                dtype=arguments.dtype,
                batch=arguments.batch or BATCHES.get(preset, BATCH),
                sequence=arguments.sequence or PRESETS[preset].max_sequence,
                num_steps=arguments.steps,
                num_warmup_steps=arguments.warmup,
                device="cuda",
                recompute=arguments.recompute,
                compiled=arguments.compile,
                micro_steps=arguments.micro_steps,
                device_memory=arguments.device_memory,
                batch_chunks=arguments.batch_chunks,
            )
            jobs.append(run_job(workload, num_ranks, arguments, environment))
            facts = {**describe(jobs[-1], arguments.rounds), **details}
            lines = "\n".join(f"{name}: {value}" for name, value in facts.items())
            print(f"\n{lines}\n\n{make_table(jobs[-1], bool(arguments.ranks))}\n", flush=True)
            if arguments.out:
                arguments.out.write_text(make_figures(jobs, bool(arguments.ranks)))
            if arguments.report:
                arguments.report.write_text(make_report(jobs, arguments, details))


def run_job(workload: Workload, num_ranks: int, arguments: argparse.Namespace, environment: dict[str, str]) -> Job:
    if not shares_devices(num_ranks, workload):
        environment = {}

    def run_one(system: str) -> Outcome:
        extra = {}
        if arguments.snapshot:
            arguments.snapshot.mkdir(parents=True, exist_ok=True)
            path = arguments.snapshot.resolve() / f"{workload.preset}-{num_ranks}-{system}.pickle"
            extra = {SNAPSHOT: str(path)}
        return run(system, workload, num_ranks, arguments.timeout, {**environment, **extra})

    return Job(workload, num_ranks, run_all(arguments.systems, arguments.rounds, run_one, summary))


if __name__ == "__main__":
    main()
