"""Run `onefold tune`: measure this machine, run settings briefly, and write the config of the fastest.

[Note: what is tried]
First every setting runs with the given micro-batch; on GPUs, the micro-batch is then doubled until a run fails. For the
setting with the most samples per second, the keys that change the schedule are tried one after the other, starting from
the best values so far: bucket sizes, prefetching, and for offloaded states the share that stays on the device. Each run
is stored in the folder, so that a search can be resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.config import load_config
from onefold.log import format_bytes
from onefold.report.run_file import RunFile
from onefold.tools.cli.compare import job_of, train_options
from onefold.tools.cli.terminal import fails_on, print_table, progress_bar
from onefold.tools.cli.trials import Trial, TrialJob, split_settings
from onefold.tools.cli.usage import CPU_RANKS, UsageError
from onefold.tools.train.options import check_inputs

if TYPE_CHECKING:  # arguments are checked before torch is loaded
    from onefold.tools.estimate.question import Setting

# The gain at which a change is kept; smaller ones are noise.
_GAIN = 1.02


@dataclass(frozen=True)
class Knob:
    """A key of `zero_optimization`, and the values to try."""

    key: str
    values: tuple[Any, ...]

    def applied_to(self, setting: Setting, value: Any) -> Setting:
        """Return a setting with this key changed."""
        zero = dict(setting.zero)
        if self.key == "ratio":
            zero["offload_optimizer"] = {**zero["offload_optimizer"], "ratio": value}
        else:
            zero[self.key] = value
        return replace(setting, name=f"{setting.name} {self.key}={value:g}", zero=zero)


# Values to try for keys that count parameters.
_BUCKETS = {"reduce_bucket_size": (5e7, 2e8)}
_STAGE3_BUCKETS = {"stage3_prefetch_bucket_size": (0, 2e8), "stage3_max_live_parameters": (1e8, 3e9)}


def knobs_of(setting: Setting, zero: Mapping[str, Any], trained: int, frozen: int = 0) -> Iterator[Knob]:
    """Yield the keys that this setting reads, with values that make a difference.

    `zero` has the current values, `trained` and `frozen` count the model's parameters. All buckets that hold the whole
    model are equivalent.
    """
    for key, values in (_BUCKETS | (_STAGE3_BUCKETS if setting.shards_parameters else {})).items():
        num_parameters = trained if key in _BUCKETS else trained + frozen
        sizes = {min(value, num_parameters): value for value in reversed(values)}
        sizes.pop(min(zero[key], num_parameters), None)
        if sizes:
            yield Knob(key, tuple(reversed(sizes.values())))
    if "offload_optimizer" in setting.zero:
        yield Knob("ratio", (0.7, 0.4))


@fails_on(OSError)
def tune(options: argparse.Namespace) -> int:
    """Run `onefold tune`."""
    if options.steps < 4:
        raise UsageError(f"--steps {options.steps}: too few. Give at least 4, of which the first two are not timed.")
    check_inputs(train_options(options))
    settings = split_settings(options.stages, options.nvme_path)
    from onefold.tools.bench.link_bench import LinkError
    from onefold.tools.estimate.step_bench import StepBenchError

    return fails_on(LinkError, StepBenchError)(lambda options: _search(options, settings))(options)


def _search(options: argparse.Namespace, settings: Sequence[Setting]) -> int:
    import torch

    from onefold.offload.host_memory import available_bytes
    from onefold.tools.bench import offload_bench
    from onefold.tools.estimate.step_bench import measure_contention, measure_host

    job, micro_batch = job_of(options)
    job = replace(job, resumes=True)
    with progress_bar("tune", in_bytes=False, in_lines=True) as show_progress:
        paths = [options.nvme_path] if options.nvme_path else []
        ranks = options.ranks or torch.cuda.device_count() or CPU_RANKS
        host = measure_host()
        # Exceeds caches, and is a small part of host memory.
        size = min(1 << 30, available_bytes() // 8)
        measured = offload_bench.measure(size, paths, show_progress, ranks)
        contention = measure_contention(ranks) if not torch.cuda.is_available() else None
        measured = replace(measured, **asdict(host), contention=contention)
        offload_bench.save_measured(measured)
        found = _try_settings(job, list(settings), micro_batch, options.max_batch, show_progress)
        done = [trial for trial in found if trial.outcome == "done"]
        best = max(done, key=lambda trial: trial.samples_per_second, default=None)
        if best is not None and not options.no_knobs:
            best = _tune_knobs(job, best, found, show_progress)
    rows = [_facts(trial) for trial in found]
    if best is None:
        if options.json:
            print(json.dumps({"best": None, "trials": rows, "written": None}, indent=2))
        else:
            show(found)
        print(f"\nno setting completed: {found[0].message}; the logs are in {job.folder}", file=sys.stderr)
        return 1
    written = Path(options.write or job.folder / "ds_config.json")
    written.write_text(json.dumps(job.config(best.setting, best.micro_batch), indent=2) + "\n")
    (job.folder / "tune.json").write_text(json.dumps({"best": _facts(best), "trials": rows}, indent=2) + "\n")
    if options.json:
        print(json.dumps({"best": _facts(best), "trials": rows, "written": str(written)}, indent=2))
        return 0
    show(found)
    print(
        f"\nbest: {best.setting.name}, micro-batch {best.micro_batch}, {best.steps[-1].batch_samples} samples per "
        f"step: {best.samples_per_second:.1f} samples/s, {format_bytes(best.peak)} at the peak\nwritten: {written}\n"
        f"trials in {job.folder}; this machine's rates are stored in {offload_bench.cache_file()} for `onefold plan`"
    )
    return 0


def _try_settings(
    job: TrialJob, settings: list[Setting], micro_batch: int, most: int, show_progress: Any
) -> list[Trial]:
    import torch

    found: list[Trial] = []
    for place, setting in enumerate(settings):
        show_progress(f"{setting.name}, micro-batch {micro_batch}", place, len(settings))
        trial = job.run(setting, micro_batch)
        found.append(trial)
        while torch.cuda.is_available() and trial.outcome == "done" and trial.micro_batch * 2 <= most:
            show_progress(f"{setting.name}, micro-batch {trial.micro_batch * 2}", place, len(settings))
            trial = job.run(setting, trial.micro_batch * 2)
            found.append(trial)
    return found


def _tune_knobs(job: TrialJob, best: Trial, found: list[Trial], show_progress: Any) -> Trial:
    """Try each key in turn, starting from the best setting so far."""
    model = RunFile.read(job.folder_of(best.setting, best.micro_batch)).facts["model"]
    zero = load_config(job.config(best.setting, best.micro_batch)).zero_optimization
    knobs = list(knobs_of(best.setting, vars(zero), model["parameters_trained"], model["parameters_frozen"]))
    for place, knob in enumerate(knobs):
        for value in knob.values:
            show_progress(f"{knob.key} {value:g}", place, len(knobs))
            trial = job.run(knob.applied_to(best.setting, value), best.micro_batch)
            found.append(trial)
            if trial.outcome == "done" and trial.samples_per_second > best.samples_per_second * _GAIN:
                best = trial
    return best


def _facts(trial: Trial) -> dict[str, Any]:
    facts: dict[str, Any] = {"setting": trial.setting.name, "zero_optimization": trial.setting.zero}
    facts |= {"micro_batch": trial.micro_batch, "outcome": trial.outcome, "message": trial.message}
    if trial.outcome == "done":
        facts |= {
            "samples_per_second": trial.samples_per_second,
            "step_seconds": trial.step_seconds,
            "peak": trial.peak,
        }
    return facts


def show(found: list[Trial]) -> None:
    """Print a table of all runs."""
    rows = []
    for trial in found:
        if trial.outcome == "done":
            numbers = f"{trial.step_seconds:.3f}", f"{trial.samples_per_second:.1f}", format_bytes(trial.peak), ""
        else:
            numbers = "-", "-", "-", f"{trial.outcome}: {trial.message}"
        rows.append((trial.setting.name, str(trial.micro_batch), *numbers))
    print_table(("setting", ">micro-batch", ">s/step", ">samples/s", ">peak", "result"), rows, "Runs on this machine")
