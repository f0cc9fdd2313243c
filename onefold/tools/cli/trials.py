"""Run settings of a job briefly, in separate processes. A run that fails is a result, too."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onefold.report.run_file import RunFile, RunFileError, StepRow
from onefold.tools.cli.usage import UsageError, loading_torch

if TYPE_CHECKING:  # settings are checked before torch is loaded
    from onefold.tools.estimate.question import Setting

# Steps that are not timed: the first ones compile, allocate, and negotiate an order.
WARMUP = 2
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|HostShortage|MemoryError|SIGKILL", re.IGNORECASE)


def parse_setting(text: str, nvme_path: str | None = None) -> dict[str, Any]:
    """Parse a stage and its offload setting: 0, 2, 3+cpu, 3+cpu+param, 3+nvme."""
    stage, *extras = text.strip().split("+")
    if stage not in ("0", "1", "2", "3"):
        raise UsageError(
            f"--stages {text} is not a setting. Give a stage, 0 to 3, and offloading, as in 3+cpu or 3+nvme+param."
        )
    zero: dict[str, Any] = {"stage": int(stage)}
    device: dict[str, Any] | None = None
    for extra in extras:
        if extra == "cpu":
            device = {"device": "cpu"}
        elif extra == "nvme":
            if nvme_path is None:
                raise UsageError(f"--stages {text}: nvme needs a folder on an NVMe drive. Give --nvme-path.")
            device = {"device": "nvme", "nvme_path": nvme_path}
        elif extra != "param":
            raise UsageError(f"--stages {text}: {extra!r} is unknown. Use cpu, nvme or param.")
    if device is not None:
        zero["offload_optimizer"] = device
    if "param" in extras:
        if device is None or stage != "3":
            raise UsageError(f"--stages {text}: param needs stage 3 and cpu or nvme, as in 3+cpu+param")
        zero["offload_param"] = device
    return zero


@dataclass(frozen=True)
class Trial:
    """The result of one short run."""

    setting: Setting
    micro_batch: int
    outcome: Literal["done", "out of memory", "failed"]
    message: str = ""
    """The last line of a run that failed."""
    steps: tuple[StepRow, ...] = ()
    largest_batch: int | None = None
    rounds: tuple[float, ...] = ()
    """Seconds per step of each round, if the run was repeated."""

    @property
    def timed(self) -> list[float]:
        """Seconds of each step without the first ones."""
        return [row.seconds for row in self.steps[WARMUP:]] or [row.seconds for row in self.steps]

    @property
    def step_seconds(self) -> float:
        """The median of the rounds, or of the steps of a single round."""
        return statistics.median(self.rounds or self.timed)

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest round, or step of a single round."""
        seconds = self.rounds if len(self.rounds) > 1 else self.timed
        return min(seconds), max(seconds)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all ranks."""
        return self.steps[-1].batch_samples / self.step_seconds

    @property
    def peak(self) -> int:
        """Peak memory of the first rank, in bytes."""
        return max(row.memory.peak for row in self.steps)

    @property
    def sent(self) -> int:
        """Bytes that the first rank sent in the last step."""
        return sum(row.bytes for row in self.steps[-1].traffic if row.operation in ("gather", "reduce-scatter"))


@dataclass(frozen=True)
class TrialJob:
    """The job that all trials run: a base config, flags of `onefold train`, ranks, steps."""

    document: dict[str, Any]
    flags: tuple[str, ...]
    ranks: int | None
    steps: int
    folder: Path
    timeout: float = 1800.0
    resumes: bool = False
    """Whether to reuse the results of finished runs in the folder."""

    def folder_of(self, setting: Setting, micro_batch: int, round: int = 1) -> Path:
        """Return the folder of one run."""
        name = f"{re.sub(r'[^0-9A-Za-z_.+=-]+', '-', setting.name)}-batch{micro_batch}"
        return self.folder / (name if round == 1 else f"{name}-round{round}")

    def run(self, setting: Setting, micro_batch: int, round: int = 1) -> Trial:
        """Run `onefold train` once, in a separate folder that is kept."""
        folder = self.folder_of(setting, micro_batch, round)
        kept, config = folder / "trial.json", folder / "ds_config.json"
        document = json.dumps(self.config(setting, micro_batch), indent=2) + "\n"
        facts = {"config": json.loads(document), "flags": list(self.flags), "ranks": self.ranks, "steps": self.steps}
        if self.resumes and kept.exists():
            before = json.loads(kept.read_text())
            if before["job"] == facts:
                steps = tuple(RunFile.read(folder).steps) if before["outcome"] == "done" else ()
                return Trial(setting, micro_batch, before["outcome"], before["message"], steps)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (kept, folder / "run.jsonl"):
            old.unlink(missing_ok=True)
        config.write_text(document)
        found = self._run(setting, micro_batch, folder, config)
        kept.write_text(json.dumps({"job": facts, "outcome": found.outcome, "message": found.message}) + "\n")
        return found

    def _run(self, setting: Setting, micro_batch: int, folder: Path, config: Path) -> Trial:
        command = [sys.executable, "-m", "onefold.tools.cli.main", "train"]
        command += ["--config", str(config), "--out", str(folder), "--steps", str(self.steps), "--sample-length", "0"]
        command += ["--no-save", *self.flags]
        command += ["--ranks", str(self.ranks)] if self.ranks is not None else []
        log = folder / "log.txt"
        with log.open("wb") as output:
            try:
                code = subprocess.run(
                    command, stdout=output, stderr=output, timeout=self.timeout, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                return Trial(setting, micro_batch, "failed", f"did not end within {self.timeout:.0f} s; see {log}")
        if code == 0:
            try:
                return Trial(setting, micro_batch, "done", steps=tuple(RunFile.read(folder).steps))
            except RunFileError as error:
                return Trial(setting, micro_batch, "failed", str(error))
        text = log.read_text(errors="replace")
        kind: Literal["out of memory", "failed"] = "out of memory" if _OUT_OF_MEMORY.search(text) else "failed"
        return Trial(setting, micro_batch, kind, error_line(text) or f"exit code {code}; see {log}")

    def repeat(self, trial: Trial, rounds: int) -> Trial:
        """Run a trial once more, as round `rounds`. If it fails, so does the trial."""
        again = self.run(trial.setting, trial.micro_batch, rounds)
        if again.outcome != "done":
            return again
        seconds = (*(trial.rounds or (trial.step_seconds,)), again.step_seconds)
        return replace(again, largest_batch=trial.largest_batch, rounds=seconds)

    def config(self, setting: Setting, micro_batch: int) -> dict[str, Any]:
        """Return the base config with this setting and micro-batch in place of its own."""
        # A config with a global batch keeps it, and the accumulation follows from it.
        follows = "gradient_accumulation_steps" if self.document.get("train_batch_size") is not None else None
        kept = {key: value for key, value in self.document.items() if key != follows}
        zero = {
            key: value
            for key, value in kept.get("zero_optimization", {}).items()
            if key not in ("stage", "offload_optimizer", "offload_param")
        }
        return {**kept, "train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {**zero, **setting.zero}}

    def run_with_largest_batch(self, setting: Setting, micro_batch: int, most: int) -> Trial:
        """Run a trial, then double the micro-batch until a run fails. The trial has the largest one that ran."""
        trial = self.run(setting, micro_batch)
        if trial.outcome != "done":
            return trial
        largest = micro_batch
        short = replace(self, steps=WARMUP)
        while largest * 2 <= most and short.run(setting, largest * 2).outcome == "done":
            largest *= 2
        return replace(trial, largest_batch=largest)


def error_line(text: str) -> str:
    """Return the last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]:\s*)?[\w.]*(Error|Shortage|Exception)\b", line)]
    return (errors or lines or [""])[-1][:300]


def split_settings(text: str, nvme_path: str | None) -> Sequence[Setting]:
    """Parse the settings of `--stages`, before torch is loaded."""
    found = {each.strip(): parse_setting(each, nvme_path) for each in text.split(",") if each.strip()}
    if not found:
        raise UsageError("--stages is empty. Name at least one setting, as in 0,1,2,3,3+cpu.")
    with loading_torch():
        from onefold.tools.estimate.question import Setting
    return [Setting(name, zero) for name, zero in found.items()]
