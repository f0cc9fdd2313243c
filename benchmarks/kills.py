"""Kill the ranks of a small job at random moments, many times, and check its checkpoints after each kill.

    python -m benchmarks.kills --kills 100 --seed 3 --tally benchmarks/reports/kills.jsonl
    python -m benchmarks.kills --report --tally benchmarks/reports/kills.jsonl

Ranks are forked from this process, which has imported torch, so that a kill with its restart takes about a second. The
moments are uniform over two cycles of steps and save, and for one kill in eight over the start of the job. After each
kill, every published checkpoint is read and compared with its checksums, and the newest one must not be older than the
last save that was complete. The next ranks resume. At the end, the losses of all steps and the final weights and states
are compared bit by bit with those of a run without kills.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launch import ROOT
from benchmarks.soak_job import SABOTAGES, JobOptions, SoakJob
from benchmarks.soak_records import Records, verify_checkpoints
from benchmarks.table import format_table

# The jobs that are killed in turn: ranks and options.
JOBS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 3, "background": "alternate", "offload": True}),
    (2, {"stage": 2, "background": "never", "one_tag": True}),
    (1, {"stage": 2, "background": "always"}),
    (2, {"stage": 1, "background": "always", "one_tag": True}),
    (1, {"stage": 3, "background": "alternate", "offload": True, "one_tag": True}),
]
KILLS_PER_JOB = 50
# Time for a rank to start, to load or to end.
PATIENCE = 120.0


class Ranks:
    """The forked ranks of one start of a job."""

    def __init__(self, num_ranks: int, options: JobOptions, last_step: int | None = None) -> None:
        """With `last_step`, ranks train to this step, return a digest of their states, and end."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        self.started = time.monotonic()
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_run, args=(rank, num_ranks, port, there, options, last_step, here), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def receive(self, rank: int) -> Any:
        """Return the next message of a rank. Raise with its traceback if it failed."""
        if not self.pipes[rank].poll(PATIENCE):
            raise RuntimeError(f"rank {rank} sends nothing within {PATIENCE:.0f} s")
        try:
            message = self.pipes[rank].recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} has ended without a message") from None
        if isinstance(message, str) and message.startswith("Traceback"):
            raise RuntimeError(f"rank {rank} failed:\n{message}")
        return message

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self.processes[rank].pid is not None and self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill([*range(len(self.processes))])
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(PATIENCE)
            pipe.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def _run(
    rank: int, num_ranks: int, port: int, pipe: Any, options: JobOptions, last_step: int | None, parents: Any
) -> None:
    parents.close()  # so that the pipe ends with the parent
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    log = os.open(f"{options.folder}/log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        job = SoakJob(options)
        job.resume()
        pipe.send("resumed")
        began = time.monotonic()
        while last_step is None or job.engine.global_steps < last_step:
            job.step()
            if last_step is None:
                job.save_if_due()
                if job.engine.global_steps % options.save_every == 0:
                    pipe.send(time.monotonic() - began)
                    began = time.monotonic()
        pipe.send(job.digest())
        dist.barrier()
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


@dataclasses.dataclass
class Tally:
    """What one job has shown."""

    seed: int
    ranks: int
    job: dict[str, Any]
    kills: int = 0
    of_all_ranks: int = 0
    in_starts: int = 0
    interrupted_saves: int = 0
    """Kills that left data which no manifest names."""
    checkpoints_verified: int = 0
    steps: int = 0
    steps_repeated: int = 0
    seconds: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


def kill_job(folder: Path, seed: int, num_kills: int, *, sabotage: str = "", tell: Any = lambda tally: None) -> Tally:
    """Kill one job so many times, let it continue, and compare it with a job that was not killed."""
    draws = random.Random(seed)
    num_ranks, more = JOBS[seed % len(JOBS)]
    tally = Tally(seed, num_ranks, more)
    began = time.monotonic()
    paths = [folder / name for name in ("killed", "killed/saved", "whole", "whole/saved")]
    for path in paths:
        path.mkdir(parents=True)
    killed, saved, whole, _ = paths
    options = JobOptions(str(killed), str(saved), save_every=2, keep_last=2, sabotage=sabotage, **more)
    records = Records(killed, num_ranks)
    known: set[str] = set()
    cycle, start = 0.3, 1.0
    try:
        while tally.kills < num_kills:
            with Ranks(num_ranks, options) as ranks:
                if in_start := draws.random() < 1 / 8:
                    time.sleep(draws.random() * start)
                else:
                    for rank in range(num_ranks):
                        ranks.receive(rank)
                    start = 0.8 * start + 0.2 * (time.monotonic() - ranks.started)
                    time.sleep(draws.random() * 2 * cycle)
                first = draws.choice([[0], [num_ranks - 1], [*range(num_ranks)]])
                ranks.kill(first)
                if len(first) < num_ranks:  # the others find out, until their launcher ends them
                    time.sleep(draws.random() * 0.1)
                messages = []
                while ranks.pipes[0].poll():
                    try:
                        messages.append(ranks.receive(0))
                    except RuntimeError:  # it was killed, or has failed because another rank is gone
                        break
            cycles = [message for message in messages if isinstance(message, float)]
            cycle = cycles[-1] if cycles else cycle
            tally.kills += 1
            tally.in_starts += in_start
            tally.of_all_ranks += len(first) == num_ranks
            tally.problems += records.read()
            found = verify_checkpoints(saved)
            if found.newest_step < records.surely_published:
                tally.problems.append(
                    f"the newest checkpoint is of step {found.newest_step}, but the save of step "
                    f"{records.surely_published} was complete"
                )
            tally.checkpoints_verified += len(found.verified)
            tally.interrupted_saves += bool(found.unpublished - known)
            known |= found.unpublished
            tally.problems += found.problems
            tell(tally)
            if tally.problems:
                return tally
        last = max(records.newest_step, 0) + 3
        digests = []
        for run in (
            options,
            dataclasses.replace(options, folder=str(whole), save_dir=str(paths[3]), sabotage=""),
        ):
            with Ranks(num_ranks, run, last) as ranks:
                for rank in range(num_ranks):
                    ranks.receive(rank)
                digests.append([ranks.receive(rank) for rank in range(num_ranks)])
        reference = Records(whole, num_ranks)
        tally.problems += records.read() + reference.read() + records.compare(reference)
        if digests[0] != digests[1]:
            tally.problems.append("the weights or states of the last step differ from those of a job without kills")
    except RuntimeError as error:
        tally.problems.append(str(error))
    finally:
        tally.steps, tally.steps_repeated = records.newest_step, records.num_repeated
        tally.seconds = round(time.monotonic() - began, 1)
    return tally


def run(num_kills: int, seed: int, tally_file: Path | None, *, sabotage: str = "") -> bool:
    """Kill jobs until so many kills are reached, and append each job to the tally. Return whether no check failed."""
    done, began = 0, time.monotonic()

    def tell(tally: Tally) -> None:
        rate = (time.monotonic() - began) / (done + tally.kills)
        left = rate * (num_kills - done - tally.kills)
        if sys.stderr.isatty():
            text = (
                f"{done + tally.kills} of {num_kills} kills, {tally.steps_repeated} steps repeated, {left:.0f} s left"
            )
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    gc.freeze()
    while done < num_kills:
        with tempfile.TemporaryDirectory(prefix="onefold-kills-", ignore_cleanup_errors=True) as folder:
            tally = kill_job(Path(folder), seed, min(KILLS_PER_JOB, num_kills - done), sabotage=sabotage, tell=tell)
            done += tally.kills
            line = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": _commit(), **dataclasses.asdict(tally)}
            if tally_file is not None:
                with tally_file.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            print(f"job {seed}: {json.dumps(line)}", flush=True)
            if tally.problems:
                for path in sorted(Path(folder, "killed").glob("log.*")):
                    print(f"--- {path.name}\n{path.read_text()[-4000:]}", file=sys.stderr)
                return False
        seed += 1
    return True


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def report(tally_file: Path) -> str:
    """Return a table of the tally, with a row for each kind of job and their sum."""
    lines = [json.loads(line) for line in tally_file.read_text().splitlines()]
    names = [
        "kills",
        "of_all_ranks",
        "in_starts",
        "interrupted_saves",
        "checkpoints_verified",
        "steps",
        "steps_repeated",
    ]
    sums: dict[str, Counter[str]] = {}
    for line in lines:
        kind = f"{line['ranks']} ranks, " + ", ".join(f"{key} {value}" for key, value in line["job"].items())
        for row in (kind, "sum"):
            sums.setdefault(row, Counter()).update({name: line[name] for name in names})
            sums[row]["problems"] += len(line["problems"])
    sums["sum"] = sums.pop("sum")
    heads = ["job", *(name.replace("_", " ") for name in names), "problems"]
    rows = [[kind, *(str(counts[name]) for name in [*names, "problems"])] for kind, counts in sums.items()]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return f"{format_table(heads, rows)}\n\nCommits: {commits}."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="number of kills (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job; the others follow")
    parser.add_argument("--tally", type=Path, metavar="FILE", help="file to which a line is appended for each job")
    parser.add_argument("--sabotage", choices=SABOTAGES, default="", help="let the job do something wrong")
    parser.add_argument("--report", action="store_true", help="print the sums of the tally, and end")
    options = parser.parse_args()
    if options.report:
        print(report(options.tally))
        return
    sys.exit(0 if run(options.kills, options.seed, options.tally, sabotage=options.sabotage) else 1)


if __name__ == "__main__":
    main()
