"""Two revisions of onefold in turns on one GPU: `python -m benchmarks.revisions --before FOLDER`.

FOLDER contains another revision's `onefold` and `benchmarks` (`git archive REVISION onefold benchmarks | tar -x -C
FOLDER`). One process per revision stays alive, and both run each system in turns, so that a machine that becomes slower
or faster affects both. With `--ranks 2,4` the systems of several NCCL ranks run as well, each in new processes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, cast

COMPILED = "compiled-"
SYSTEMS = [
    "onefold-2",
    "onefold-3",
    "offload-onefold-2",
    "offload-onefold-3",
    "8bit-onefold-2",
    "offload-onefold-2-8bit",
    "muon-onefold-2",
    "offload-onefold-disk",
    COMPILED + "onefold-2",
    COMPILED + "onefold-3",
]
RANKS_SYSTEMS = ["onefold-2", "onefold-3"]
# The systems that write all states to a disk take seconds for each step, and need few steps.
SLOW = "disk"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("--before", type=Path, help="the folder of the other revision")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="prefix a system with compiled- to compile it")
    parser.add_argument("--preset", default="1.3b", help="model of the systems on one rank (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each system (default: %(default)s)")
    parser.add_argument("--ranks", default="", help="also on so many NCCL ranks, with 109m: 2,4")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


class Revision:
    """A process that measures systems of the tree in `folder`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, __file__, "--serve", str(port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=folder, env=self._environment, **cast(Any, pipes))

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds per step and the peak MiB of one system."""
        stdin, stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return cast(dict[str, Any], json.loads(stdout.readline()))

    def measure_on_ranks(self, num_ranks: str, num_steps: int) -> dict[str, dict[str, Any]]:
        """Return the same for each system on several NCCL ranks."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "figures.json")
            command = [sys.executable, "-m", "benchmarks.gpu", "--preset", "109m", "--ranks", num_ranks]
            command += ["--systems", ",".join(RANKS_SYSTEMS), "--steps", str(num_steps), "--out", str(out)]
            subprocess.run(command, cwd=self.folder, env=self._environment, check=True, stdout=subprocess.DEVNULL)
            return {name: _best_of(rounds) for name, rounds in _outcomes(json.loads(out.read_text())).items()}

    def close(self) -> None:
        """End the process."""
        cast(IO[str], self._process.stdin).close()
        self._process.wait()


def _outcomes(figures: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the rounds of each system in the JSON of `benchmarks.gpu`."""
    job = figures[0] if isinstance(figures, list) else figures
    return cast(dict[str, list[dict[str, Any]]], job["runs"])


def _best_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    means = [sum(each["step_seconds"]) / len(each["step_seconds"]) for each in rounds]
    return {"seconds": min(means), "peak": max(each["gpu_mb"] for each in rounds)}


def serve(port: int) -> None:
    """Measure the systems that stdin names, with the tree of the current folder."""
    import torch
    import torch.distributed as dist

    sys.path.pop(0)  # this file's folder
    answers, sys.stdout = sys.stdout, sys.stderr
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            measured = _measure(request, device)
        except Exception as error:
            measured = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps(measured), file=answers, flush=True)
    dist.destroy_process_group()


def _measure(request: dict[str, Any], device: Any) -> dict[str, Any]:
    import torch

    from benchmarks import systems
    from benchmarks.model import GPT, PRESETS, make_batch

    shape, steps = PRESETS[request["preset"]], request["steps"]
    workload = systems.Workload(request["preset"], "bf16", request["batch"], shape.max_sequence, steps, 3, "cuda")
    torch.manual_seed(workload.seed)
    name, loop = request["system"], systems._engine_loop

    def construct() -> Any:
        with device:
            return GPT(shape)

    def engine_loop(engine: Any) -> Any:
        if name.startswith(COMPILED):
            engine.compile()
        return loop(engine)

    systems._engine_loop = engine_loop
    try:
        step = systems.SYSTEMS[name.removeprefix(COMPILED)](construct, workload)
    finally:
        systems._engine_loop = loop
    events = []
    for index in range(workload.num_warmup_steps + steps):
        step(*make_batch(shape, workload.batch, workload.sequence, 1000 * index, device))
        if index == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if index >= workload.num_warmup_steps - 1:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
    torch.cuda.synchronize()
    seconds = [first.elapsed_time(second) / 1000 for first, second in itertools.pairwise(events)]
    peak = torch.cuda.max_memory_allocated() / 2**20
    return {"seconds": sum(seconds) / len(seconds), "least": min(seconds), "peak": peak}


def show(name: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Print a row: the fastest round of both revisions, and peaks."""
    errors = [each["error"] for each in (*before, *after) if "error" in each]
    if errors:
        print(f"| {name} | {errors[0]} |", flush=True)
        return
    seconds = [min(each["seconds"] for each in rounds) for rounds in (before, after)]
    peaks = [max(each["peak"] for each in rounds) for rounds in (before, after)]
    rounds = "; ".join(" ".join(f"{each['seconds']:.4f}" for each in some) for some in (before, after))
    print(
        f"| {name} | {seconds[0]:.4f} | {seconds[1]:.4f} | {seconds[1] / seconds[0]:.3f} | {peaks[0]:.0f} | "
        f"{peaks[1]:.0f} | {rounds} |",
        flush=True,
    )


def main() -> None:
    """Measure both revisions in turns and print a table."""
    arguments = parse_arguments()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    revisions = [Revision(arguments.before.resolve(), 29611), Revision(Path.cwd(), 29612)]
    print("| system | s/step before | after | ratio | peak MiB before | after | rounds |")
    print("|---|---|---|---|---|---|---|")
    for name in filter(None, arguments.systems.split(",")):
        steps = 3 if SLOW in name else arguments.steps
        request = {"system": name, "preset": arguments.preset, "batch": arguments.batch, "steps": steps}
        found: list[list[dict[str, Any]]] = [[], []]
        for number in range(1 if SLOW in name else arguments.rounds):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                found[index].append(revisions[index].measure(request))
        show(name, *found)
    for revision in revisions:
        revision.close()
    for num_ranks in filter(None, arguments.ranks.split(",")):
        on_ranks = [
            [r.measure_on_ranks(num_ranks, arguments.steps) for r in revisions] for _ in range(arguments.rounds)
        ]
        for name in RANKS_SYSTEMS:
            show(f"{name}, {num_ranks} ranks, 109m", *([each[index][name] for each in on_ranks] for index in (0, 1)))


if __name__ == "__main__":
    main()
