"""What `onefold plan` predicts, beside what runs measure: `python -m benchmarks.foresight`.

Ten shapes of models (`shapes.py`) in several settings, on real ranks: on NCCL where there is a GPU, else on gloo.
Memory is the peak of the fullest rank after the first step, `max_memory_allocated` on a GPU and resident memory on a
CPU, without what the process held before it had a model. Traffic is the ledger's, of one step, without meetings.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launch import ROOT, _free_port, _place, mps, shares_devices, wait
from benchmarks.shapes import LENGTH, LENGTHS, SHAPES
from benchmarks.systems import Workload
from benchmarks.table import describe_run, format_table

CPU = {"device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2, "overlap_comm": True},
    "3": {"stage": 3},
    "2+cpu": {"stage": 2, "offload_optimizer": CPU},
    "3+cpu": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
STEPS, WARMUP = 10, 3


@dataclass(frozen=True)
class Case:
    """A shape in a setting."""

    shape: str
    setting: str
    ranks: int
    batch: int
    dtype: str = "bf16"
    tokens: int = LENGTH

    @property
    def length(self) -> int:
        return LENGTHS.get(self.shape, self.tokens)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient_clipping": 1.0,
            **({"bf16": {"enabled": True}} if self.dtype == "bf16" else {}),
            "zero_optimization": SETTINGS[self.setting],
            "log_level": "warning",
        }


def predict(case: Case, *, on_gpu: bool, here: bool = False) -> dict[str, Any]:
    """`here`: for this machine, as it was tuned, with ops timed on it; else for an H200 by its data sheet."""
    from onefold.tools.bench.offload_bench import load_measured
    from onefold.tools.estimate.forecast import forecast
    from onefold.tools.estimate.machines import adjust, cpu_ranks, find_machine, this_machine
    from onefold.tools.estimate.models import from_factory
    from onefold.tools.estimate.ops import OpTimer
    from onefold.tools.estimate.question import Question, Setting

    machine, timer = adjust(find_machine("H200"), gpus=case.ranks), None
    if here:
        measured = load_measured()
        assert measured is not None, "tune it first"
        machine = adjust(this_machine(), gpus=case.ranks) if on_gpu else cpu_ranks(case.ranks, measured)
        timer = _timers.setdefault(on_gpu, OpTimer(torch.device("cuda" if on_gpu else "cpu"), machine.gpu.bandwidth))
        if not on_gpu:
            torch.set_num_threads(_threads(case.ranks))
    source = from_factory(f"benchmarks.shapes:{case.shape}")
    question = Question(source, machine, case.config(), case.batch, case.length)
    setting = Setting(case.setting, SETTINGS[case.setting])
    (found,) = forecast(question, [setting], uses_nccl=on_gpu, finds_batch=False, timer=timer)
    assert found.traffic is not None
    reserved = found.device.total - found.device.context
    return {
        "bytes": found.device.allocated,
        "reserved": reserved,
        "sent": found.traffic.inside + found.traffic.across,
        "step": found.step,
        "seconds": found.seconds,
    }


_timers: dict[bool, Any] = {}


def measure(case: Case) -> dict[str, Any]:
    import onefold
    from onefold.comm import local_device
    from onefold.report.memory_usage import peak_resident_bytes, resident_bytes

    device = local_device()
    torch.manual_seed(1)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() if device.type == "cuda" else resident_bytes()
    model = SHAPES[case.shape]()
    inputs = [each.to(device) for each in model.example_inputs(case.batch, case.length)]  # type: ignore[operator]
    engine, *_ = onefold.initialize(model=model, config=case.config())
    seconds, sent = [], 0
    for number in range(WARMUP + STEPS):
        if number == 1 and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if number == 1 and device.type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, began = engine.ledger.copy(), time.perf_counter()
        engine.backward(engine(*inputs))
        engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        sent = sum(
            row.bytes for row in engine.ledger.since(before).rows() if row.operation in ("gather", "reduce-scatter")
        )
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident_bytes()
    found: dict[str, Any] = {"bytes": peak - base, "sent": sent, "step": statistics.median(seconds[WARMUP:])}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"reserved": torch.cuda.max_memory_reserved(), "used": total - free}
    engine.destroy()
    del engine, model, inputs
    return found


def _threads(ranks: int) -> int:
    return max(1, (os.cpu_count() or 1) // ranks)


def _load_libraries(case: Case) -> None:
    """A step of a small model in the same setting: what it loads and starts stays with the process."""
    import onefold

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    engine, *_ = onefold.initialize(model=model, config=case.config())
    engine.backward(engine(torch.zeros(1, 64)).sum())
    engine.step()
    engine.destroy()


def work(cases: list[Case], result: str) -> None:
    """One rank, all cases of one number of ranks."""
    from onefold.comm import init_distributed

    init_distributed()
    rows = []
    for case in cases:
        if not torch.cuda.is_available():
            _load_libraries(case)
        rows.append(measure(case))
        Path(result).write_text(json.dumps(rows))
    dist.destroy_process_group()


def run_ranks(cases: list[Case], environment: dict[str, str]) -> list[dict[str, Any]]:
    """The fullest and slowest rank of each case."""
    ranks, device = cases[0].ranks, "cuda" if torch.cuda.is_available() else "cpu"
    workload = Workload("", "bf16", 1, 1, 1, 1, device)
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        logs = [Path(folder, f"{rank}.log") for rank in range(ranks)]
        shared = {**os.environ, **environment, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        if device == "cpu":
            shared |= {"OMP_NUM_THREADS": str(_threads(ranks))}
        given = json.dumps([asdict(case) for case in cases])
        started = []
        for rank, (result, log) in enumerate(zip(results, logs, strict=True)):
            with log.open("wb") as output:
                command = [sys.executable, "-m", "benchmarks.foresight", "--work", given, str(result)]
                where = {"RANK": str(rank), **_place(rank, ranks, workload)}
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env={**shared, **where}, stdout=output, stderr=output)
                )
        problem = wait(started, 900)
        rows = [json.loads(result.read_text()) if result.exists() else [] for result in results]
        if problem is not None:
            print(f"rank {problem[0]} {problem[1]}\n{logs[problem[0]].read_text()[-2000:]}", file=sys.stderr)
    done = min(map(len, rows))
    return [{key: max(row[index][key] for row in rows) for key in rows[0][index]} for index in range(done)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foresight", description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="(default: all ten)")
    parser.add_argument("--settings", default="0,2,3,2+cpu", help=f"of {', '.join(SETTINGS)} (default: %(default)s)")
    parser.add_argument("--ranks", default="1,2", help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--here", action="store_true", help="predict for this machine as `onefold tune` measured it")
    parser.add_argument("--no-predictions", action="store_true", help="only measure; predict later from --out")
    parser.add_argument("--out", help="a JSON file for the figures")
    parser.add_argument("--report", help="a markdown file for the table")
    parser.add_argument("--measured", help="the --out of an earlier run, or of another machine: predict for that")
    parser.add_argument("--work", nargs=2, metavar=("CASES", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work([Case(**case) for case in json.loads(options.work[0])], options.work[1])
        return
    on_gpu = torch.cuda.is_available()
    found: list[tuple[Case, dict[str, Any], dict[str, Any]]] = []
    for case, _, result in json.loads(Path(options.measured).read_text()) if options.measured else ():
        found.append((Case(**case), predict(Case(**case), on_gpu="reserved" in result, here=options.here), result))
        print(_line(*found[-1]), flush=True)
    for ranks in map(int, options.ranks.split(",") if not options.measured else ()):
        cases = [
            Case(shape, setting, ranks, options.batch, options.dtype, options.length)
            for shape in options.shapes.split(",")
            for setting in options.settings.split(",")
        ]
        sharing = shares_devices(ranks, Workload("", "bf16", 1, 1, 1, 1, "cuda" if on_gpu else "cpu"))
        with mps() if sharing else nullcontext({}) as environment:
            # Memory that a process has given back is not always gone from it: on CPUs each case has its own.
            groups = [cases] if on_gpu else [[case] for case in cases]
            measured = [row for group in groups for row in run_ranks(group, environment)]
        for case, result in zip(cases, measured, strict=False):
            guess = {} if options.no_predictions else predict(case, on_gpu=on_gpu, here=options.here)
            found.append((case, guess, result))
            print(_line(*found[-1]), flush=True)
    header = [
        "shape",
        "setting",
        "ranks",
        "predicted MB",
        "measured MB",
        "off",
        "sent MB",
        "off",
        "predicted s",
        "measured s",
    ]
    table = format_table(header, [_row(*each) for each in found if each[1]])
    print(table)
    if options.out:
        Path(options.out).write_text(json.dumps([(asdict(case), guess, result) for case, guess, result in found]))
    if options.report:
        details = {
            "model": "ten shapes of benchmarks/shapes.py",
            "job": f"{options.dtype}, {options.batch} sequences of {options.length} a rank (images of 224, features "
            f"of 16 rows), {STEPS} timed steps after {WARMUP}",
        }
        head = describe_run("Predicted and measured", "benchmarks.foresight", details)
        Path(options.report).write_text(f"{head}\n{table}\n")


def _row(case: Case, guess: dict[str, Any], result: dict[str, Any]) -> list[str]:
    off = guess["bytes"] / result["bytes"] - 1
    missed = "exact" if guess["sent"] == result["sent"] else f"{guess['sent'] - result['sent']:+,} B"
    return [
        case.shape, case.setting, str(case.ranks), f"{guess['bytes'] / 1e6:.0f}", f"{result['bytes'] / 1e6:.0f}",
        f"{off:+.1%}", f"{result['sent'] / 1e6:.2f}", missed, f"{guess['step']:.4f}", f"{result['step']:.4f}",
    ]  # fmt: skip


def _line(case: Case, guess: dict[str, Any], result: dict[str, Any]) -> str:
    if not guess:
        return f"{case} {result}"
    extra = {key: f"{value / 1e6:.0f}" for key, value in result.items() if key in ("reserved", "used")}
    return " ".join([*_row(case, guess, result), str(extra)])


if __name__ == "__main__":
    main()
