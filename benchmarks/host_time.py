"""Measure the host time of a step: `python -m benchmarks.host_time`.

Small models on fast GPUs are bound by the host: by the time that Python and torch need to launch a step. This benchmark
trains a GPT whose tensors are so small that computing them takes almost no time. It prints the microseconds of the host
and the calls of onefold's Python functions, per block and phase, next to plain torch. The embedding and the head are
spread over the blocks. On a GPU, launches are timed without waiting for the device. On a CPU, the processor time of the
process is measured. In fp32, stage 3 shards nothing on one rank, because the flat parameter is the master weight.

Systems take turns, and the table shows medians, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onefold
from benchmarks.model import GPT, ModelShape, make_batch
from benchmarks.systems import NOTHING_KEPT, adamw
from benchmarks.table import format_table
from onefold.zero import Init

# A GPU's driver has threads of its own, whose processor time does not count.
clock = time.perf_counter if torch.cuda.is_available() else time.process_time
PHASES = ("forward", "backward", "step")
PACKAGE = str(Path(onefold.__file__).parent)
PLAIN = "torch"
SYSTEMS = (PLAIN, "onefold-1", "onefold-2", "onefold-3", "onefold-3-nothing-kept")


@dataclass(frozen=True)
class Phases:
    """The three phases of a step, as functions."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]


@dataclass
class Figures:
    """Seconds of each timed phase, and the calls of one step by phase and function."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    calls: dict[str, Counter[str]] = field(default_factory=dict)


def build(
    system: str, shape: ModelShape, batch: int, sequence: int, device: torch.device, dtype: torch.dtype
) -> Phases:
    """Build a model, its optimizer and its batch."""
    torch.manual_seed(0)
    tokens, targets = make_batch(shape, batch, sequence, seed=0, device=device)
    if system == PLAIN:
        model = GPT(shape).to(device, dtype)
        optimizer = adamw(model)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return Phases(lambda: model(tokens, targets), lambda loss: loss.backward(), step)
    stage = int(system.split("-")[1])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **(NOTHING_KEPT if system.endswith("nothing-kept") else {})},
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    with Init(config_dict_or_path=config, enabled=stage == 3):
        sharded = GPT(shape)
    engine, *_ = onefold.initialize(model=sharded, model_parameters=sharded.parameters(), config=config)
    return Phases(lambda: engine(tokens, targets), engine.backward, engine.step)


def run_phases(phases: Phases, figures: Figures, *, counts: bool = False) -> None:
    """Run one step, and time its phases or count their calls."""
    loss: list[torch.Tensor] = []
    for phase, work in (
        ("forward", lambda: loss.append(phases.forward())),
        ("backward", lambda: phases.backward(loss[0])),
        ("step", phases.step),
    ):
        if counts:
            with count_functions() as found:
                work()
            figures.calls[phase] = found
        else:
            start = clock()
            work()
            figures.seconds[phase].append(clock() - start)


@contextmanager
def count_functions() -> Iterator[Counter[str]]:
    """Count the calls of onefold's Python functions on all threads that start inside, and on this one."""
    found: Counter[str] = Counter()

    def see(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"] += 1

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)


def measure(arguments: argparse.Namespace) -> dict[str, Figures]:
    """Run all systems in turns."""
    shape = ModelShape(arguments.blocks, arguments.width, 2, 64, arguments.sequence)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    running = {
        name: build(name, shape, arguments.batch, arguments.sequence, device, dtype)
        for name in arguments.systems.split(",")
    }
    figures = {name: Figures() for name in running}
    for _ in range(arguments.warmup):
        for phases in running.values():
            run_phases(phases, Figures())
    for _ in range(arguments.steps):
        for name, phases in running.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            run_phases(phases, figures[name])
    for name, phases in running.items():
        run_phases(phases, figures[name], counts=True)
    return figures


def print_table(figures: dict[str, Figures], num_blocks: int, num_functions: int) -> None:
    """Print microseconds and calls per block."""
    plain = figures.get(PLAIN)
    header = ["system", *(f"{phase} us" for phase in PHASES), "sum us", f"x {PLAIN}", *(f"{p} calls" for p in PHASES)]
    rows = []
    for name, found in figures.items():
        medians = [statistics.median(found.seconds[phase]) * 1e6 / num_blocks for phase in PHASES]
        whole = _sum_of_medians(found)
        rows.append(
            [
                name,
                *(f"{each:.0f}" for each in medians),
                f"{whole * 1e6 / num_blocks:.0f}",
                f"{whole / _sum_of_medians(plain):.2f}" if plain else "-",
                *(f"{found.calls[phase].total() / num_blocks:.1f}" for phase in PHASES),
            ]
        )
    print(format_table(header, rows))
    for name, found in figures.items() if num_functions else ():
        total = sum(found.calls.values(), Counter())
        print(f"\n{name}: calls per block")
        for function, number in total.most_common(num_functions):
            print(f"  {number / num_blocks:6.1f}  {function}")


def _sum_of_medians(figures: Figures) -> float:
    return sum(statistics.median(figures.seconds[phase]) for phase in PHASES)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=24, help="blocks of the model; each is a unit (default: 24)")
    parser.add_argument("--width", type=int, default=16, help="width of the model (default: 16)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step (default: 1)")
    parser.add_argument("--sequence", type=int, default=4, help="tokens per sequence (default: 4)")
    parser.add_argument("--steps", type=int, default=40, help="timed steps (default: 40)")
    parser.add_argument("--warmup", type=int, default=8, help="steps before (default: 8)")
    parser.add_argument("--functions", type=int, default=0, help="also list the functions that are called most")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse_arguments()
    figures = measure(arguments)
    print_table(figures, arguments.blocks, arguments.functions)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
