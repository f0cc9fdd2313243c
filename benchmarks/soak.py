"""Train a small model while faults are injected, and compare it bit by bit with a run without faults.

    make soak                                     # one hour
    make soak ARGS="--minutes 2 --every 8 --seed 7 --report soak.md"
    make soak ARGS="--reshape"                    # the number of ranks changes, too

The job runs under `onefold launch` on two nodes, which are network namespaces (or on this node, where there can be
none), with its checkpoints on a small disk. About every half minute a fault is drawn. The next one waits until the job
has passed its furthest step again. A launcher that ends is started again, as a scheduler would do. At the end, the
losses of all steps, and the weights and optimizer states, are compared with those of a run without faults. With
`--reshape`, this run changes its number of ranks after the same steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak_cluster import Cluster, cluster, why_no_disk, why_no_nodes
from benchmarks.soak_faults import FAULTS, OF_DISK, OF_NETWORK, RESHAPING, Run
from benchmarks.soak_job import SABOTAGES, JobOptions
from benchmarks.soak_records import Records, verify_checkpoints
from benchmarks.table import describe_run, format_table
from onefold.tools.cli.terminal import progress_bar

# The time within which the job must have passed its furthest step, after the end of a fault.
PATIENCE = 240.0
TICK = 0.1


class SoakError(RuntimeError):
    """The job does not continue, or does not continue exactly."""


@dataclass(frozen=True)
class Injected:
    """One fault and its cost."""

    kind: str
    next_step_seconds: float | None
    """Time until a new start has completed a step. None if the processes survived."""
    lost_seconds: float
    """Time until the furthest step was passed, without that of the steps that were new."""
    steps_repeated: int
    launches: int
    """Launchers that had to be started again."""


@dataclass
class Soak:
    """One run with faults."""

    run: Run
    kinds: list[str]
    every: float
    injected: list[Injected] = field(default_factory=list)
    num_verified: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    _verified: set[str] = field(default_factory=set)
    _num_starts: int = 0
    _step_seconds: float = 0.1
    _checked_at: float = 0.0

    @property
    def records(self) -> Records:
        return self.run.cluster.records

    # -- watching ------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Start launchers that have ended, read the records, and check what is new in them."""
        time.sleep(TICK)
        if self.run.cluster.poll():
            raise SoakError("the job has ended before its last step")
        self.check_records()
        if time.monotonic() - self._checked_at > 0.4:
            self.check_checkpoints()
            self._checked_at = time.monotonic()

    def check_records(self) -> None:
        if problems := self.records.read():
            raise SoakError("; ".join(problems[:4]))
        for start in self.records.starts[self._num_starts :]:
            expected, self.run.expected_start = self.run.expected_start, None
            if expected is not None:
                if start["step"] != expected:
                    raise SoakError(
                        f"the newest checkpoint was damaged, and the job has resumed from step {start['step']} "
                        f"instead of {expected}"
                    )
                self.num_refused += 1
        self._num_starts = len(self.records.starts)

    def check_checkpoints(self) -> None:
        """Verify checkpoints that were not verified before. Damage counts if it is still there after a second."""
        found = verify_checkpoints(self.run.cluster.save_dir, {*self.run.damaged, *self._verified})
        if found.problems:
            time.sleep(1)
            again = verify_checkpoints(self.run.cluster.save_dir, self.run.damaged)
            if lasting := set(found.problems) & set(again.problems):
                raise SoakError("; ".join(sorted(lasting)))
        self.num_verified += len(found.verified - self._verified)
        self._verified |= found.verified

    def wait(self, until: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                raise SoakError(f"{what} within {seconds:.0f} s")
            self.watch()

    def has_passed(self, step: int) -> bool:
        """Return whether all ranks of the newest start have recorded a later step."""
        start = self.records.starts[-1] if self.records.starts else None
        if start is None:
            return False
        places = [self.records.position.get(rank, (0, 0)) for rank in range(start["world"])]
        return all(at == start["start"] and reached > step for at, reached in places)

    # -- faults ------------------------------------------------------------------------------------------------------

    def inject(self, kind: str) -> None:
        """Inject a fault, and wait until the job has passed its furthest step."""
        records, cluster = self.records, self.run.cluster
        furthest, repeated, launches = records.newest_step, records.num_repeated, cluster.num_launches
        start, began = records.starts[-1]["start"], time.monotonic()
        next_step: float | None = None

        def note_next_step() -> None:
            nonlocal next_step
            if next_step is None and self.records.position[0][0] != start:
                next_step = time.monotonic() - began

        for pause in FAULTS[kind](self.run):
            ends = time.monotonic() + pause
            while time.monotonic() < ends:
                self.watch()
                note_next_step()

        def recovered() -> bool:
            note_next_step()
            return self.has_passed(furthest + 1)

        self.wait(recovered, PATIENCE, f"after `{kind}`, the job has not passed step {furthest}")
        new = records.newest_step - furthest
        lost = time.monotonic() - began - new * self._step_seconds
        launched = cluster.num_launches - launches
        self.injected.append(Injected(kind, next_step, max(0.0, lost), records.num_repeated - repeated, launched))

    def soak(self, seconds: float, tell: Callable[[str], None]) -> int:
        """Inject faults for this time. Return the step after which the job is to end."""
        began = time.monotonic()
        self.wait(lambda: self.has_passed(3), PATIENCE, "the job has not started")
        measured, step = time.monotonic(), self.records.newest_step
        self.wait(lambda: self.has_passed(step + 20), PATIENCE, "the job has not continued")
        self._step_seconds = (time.monotonic() - measured) / (self.records.newest_step - step)
        kinds = self._draw_kinds()
        next_at = time.monotonic()
        while time.monotonic() - began < seconds:
            if time.monotonic() < next_at:
                self.watch()
                tell(f"step {self.records.newest_step}, {len(self.injected)} faults")
                continue
            kind = next(kinds)
            tell(f"step {self.records.newest_step}, {kind}")
            fault_at = time.monotonic()
            self.inject(kind)
            next_at = max(fault_at + self.run.draws.uniform(0.5, 1.5) * self.every, time.monotonic() + 1)
        self.check_checkpoints()
        self.seconds = time.monotonic() - began
        return self.records.newest_step + 30

    def _draw_kinds(self) -> Iterator[str]:
        """Yield all kinds in a random order, again and again."""
        while True:
            yield from self.run.draws.sample(self.kinds, len(self.kinds))


def run_to_end(job: Cluster, step: int, tell: Callable[[str], None]) -> None:
    """Let a job end after this step."""
    job.finish_at(step)
    seconds = PATIENCE + 0.5 * (step - job.records.newest_step)
    deadline = time.monotonic() + seconds
    while not job.poll():
        if time.monotonic() > deadline:
            raise SoakError(f"the job does not end after step {step} within {seconds:.0f} s")
        if problems := job.records.read():
            raise SoakError("; ".join(problems[:4]))
        tell(f"step {job.records.newest_step} of {step}")
        time.sleep(TICK)
    job.records.read()


def run_without_faults(folder: Path, soaked: Cluster, last: int, tell: Callable[[str], None]) -> Records:
    """Train to the last step without faults, with the same changes of the number of ranks. Return the records."""
    segments = soaked.records.segments
    options = dataclasses.replace(soaked.options, step_seconds=0.0, sabotage="")
    ends = [first for first, _ in segments[1:]] + [last]
    most = max(world for _, world in segments)
    with cluster(folder, options, soaked.num_nodes, segments[0][1], most, small_disk=False) as job:
        for (_, world), end in zip(segments, ends, strict=True):
            job.start_again_on(world)
            run_to_end(job, end, tell)
        if job.ends:
            raise SoakError(f"the run without faults has failed: {job.ends}\n{job.last_words()}")
        return job.records


@dataclass(frozen=True)
class Result:
    """What the soak has shown."""

    soak: Soak
    last_step: int
    curve_steps: int
    skipped: dict[str, str]
    """Faults that this machine cannot have, with the reason."""


def run(folder: Path, options: argparse.Namespace, tell: Callable[[str], None]) -> Result:
    """Run the job with faults and without. Raise SoakError if they differ or the job stops."""
    no_nodes = "the number of ranks changes on one node" if options.reshape else why_no_nodes()
    if options.nodes == 1:
        no_nodes = no_nodes or "--nodes 1"
    no_disk = why_no_disk(folder)
    skipped = dict.fromkeys(OF_NETWORK, no_nodes) if no_nodes else {}
    skipped |= dict.fromkeys(OF_DISK, no_disk) if no_disk else {}
    num_nodes = 1 if no_nodes else 2
    if options.ranks % num_nodes:
        raise SystemExit(f"--ranks {options.ranks} does not divide into {num_nodes} nodes. Give --nodes 1.")
    kinds = [kind for kind in options.faults if kind not in skipped and (options.reshape or kind not in RESHAPING)]
    if not kinds:
        raise SystemExit(f"none of these faults can be injected: {', '.join(options.faults)}")
    pace = {"save_every": 5, "step_seconds": options.step_seconds}
    job = JobOptions("", "", options.stage, options.offload, sabotage=options.sabotage, **pace)
    with cluster(folder / "soak", job, num_nodes, options.ranks, max(4, options.ranks), not no_disk) as soaked:
        soak = Soak(Run(soaked, random.Random(options.seed)), kinds, options.every)
        try:
            last = soak.soak(60 * options.minutes, tell)
            run_to_end(soaked, last, tell)
            soak.check_records()
            soak.check_checkpoints()
        except SoakError as error:
            raise SoakError(f"{error}\n{soaked.last_words()}") from None
    reference = run_without_faults(folder / "whole", soaked, last, tell)
    if problems := soaked.records.compare(reference):
        raise SoakError("; ".join(problems))
    if soaked.records.digests != reference.digests:
        raise SoakError("the weights or states after the last step differ from those without faults")
    return Result(soak, last, len(reference.curve()), skipped)


# -- the report --------------------------------------------------------------------------------------------------------


def report(result: Result, options: argparse.Namespace) -> str:
    """Return the report as markdown."""
    soak, records = result.soak, result.soak.records
    cluster = soak.run.cluster
    details = {
        "job": f"GPT of two blocks, stage {options.stage}, {options.ranks} ranks on {cluster.num_nodes} nodes, "
        f"optimizer states {'in host memory' if options.offload else 'on the device'}, a checkpoint every "
        f"{cluster.options.save_every} steps, half of them in the background, steps of at least "
        f"{cluster.options.step_seconds} s",
        "seed": str(options.seed),
        **({"note": options.note} if options.note else {}),
    }
    text = describe_run(
        "Soak" + (" with changes of the number of ranks" if options.reshape else ""), "benchmarks.soak", details
    )
    lost = sum(each.lost_seconds for each in soak.injected)
    facts = {
        "seconds": f"{soak.seconds:.0f}",
        "faults": str(len(soak.injected)),
        "seconds lost": f"{lost:.0f}",
        "steps of the curve": str(result.last_step),
        "steps repeated": str(records.num_repeated),
        "starts of the ranks": str(len(records.starts)),
        "launchers started again": str(len(cluster.ends)),
        "numbers of ranks": ", ".join(f"{world} from step {first}" for first, world in records.segments),
        "checkpoints verified": str(soak.num_verified),
        "checkpoints damaged on purpose / refused by the loader": f"{soak.run.num_damaged} / {soak.num_refused}",
        "saves that failed, and the run continued": str(records.events["save failed"]),
    }
    rows = []
    for kind in soak.kinds:
        each = [one for one in soak.injected if one.kind == kind]
        next_steps = [one.next_step_seconds for one in each if one.next_step_seconds is not None]
        rows.append(
            [
                kind,
                str(len(each)),
                str(len(next_steps)),
                f"{statistics.median(next_steps):.1f}" if next_steps else "-",
                f"{max(next_steps):.1f}" if next_steps else "-",
                f"{sum(one.lost_seconds for one in each):.0f}",
                str(sum(one.steps_repeated for one in each)),
                str(sum(one.launches for one in each)),
            ]
        )
    heads = ["fault", "faults", "restarts", "next step s, median", "longest", "s lost", "steps repeated", "launches"]
    parts = [
        text,
        "The losses of all steps on all ranks, and the weights and optimizer states after the last step, are bit-equal "
        "to those of the run without faults.",
        format_table(["total", ""], [[name, value] for name, value in facts.items()]),
        format_table(heads, rows),
        "Restarts: faults after which the ranks were started again. Next step: time from the fault to the first step "
        "of the new ranks. Lost: time until the furthest step was passed, without the time that its new steps take "
        "otherwise; it includes the duration of faults such as a full disk.",
    ]
    if result.skipped:
        parts.append("\n".join(f"* Not injected: {kind}, because {reason}." for kind, reason in result.skipped.items()))
    return "\n\n".join(parts) + "\n"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time in which faults are injected (default: 60)")
    parser.add_argument("--every", type=float, default=30.0, help="mean seconds between two faults (default: 30)")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="shortest time of a step (default: 0.2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: 3)")
    parser.add_argument("--offload", action="store_true", help="keep the optimizer states in host memory")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--nodes", type=int, default=2, choices=(1, 2), help="nodes, as network namespaces (default: 2)"
    )
    parser.add_argument("--reshape", action="store_true", help="change the number of ranks, on one node")
    parser.add_argument("--faults", help=f"faults to draw from, separated by commas: {', '.join(FAULTS)}")
    parser.add_argument("--sabotage", choices=SABOTAGES, default="", help="let the job do something wrong")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a report")
    parser.add_argument("--note", help="a remark for the report")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="folder for records and logs, which is kept")
    options = parser.parse_args(arguments)
    options.faults = options.faults.split(",") if options.faults else list(FAULTS)
    if unknown := [kind for kind in options.faults if kind not in FAULTS]:
        parser.error(f"--faults {unknown[0]}: no such fault. Choose from {', '.join(FAULTS)}.")
    return options


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nodes and disk are removed
    began = time.monotonic()
    with ExitStack() as stack:
        if options.keep is None:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="onefold-soak-", ignore_cleanup_errors=True))
            )
        else:
            options.keep.mkdir(parents=True)
            folder = options.keep.absolute()
        update = stack.enter_context(progress_bar("soak", in_bytes=False))

        def tell(now: str) -> None:
            seconds = round(time.monotonic() - began)
            update(now, seconds, max(seconds, round(60 * options.minutes)))

        try:
            result = run(folder, options, tell)
        except SoakError as error:
            stack.close()
            print(f"soak: {error}", file=sys.stderr)
            sys.exit(1)
    text = report(result, options)
    print(text)
    if options.report is not None:
        options.report.write_text(text)


if __name__ == "__main__":
    main()
