"""Sections for logs, monitors and timers."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule requires.

from dataclasses import dataclass
from functools import partial

from onefold.config.keys import key, noticed, section

_if_enabled = partial(key, switch="enabled")
_COUNTED = "every call and byte is always counted; read engine.ledger"
_TIMER = "onefold does not synchronize the device for timing; set wall_clock_breakdown to time each phase"


@dataclass(frozen=True)
class CommsLogger:
    """Logger of collectives."""

    enabled: bool = noticed(False, "Log collectives.", _COUNTED)
    prof_all: bool = noticed(True, "Log all collectives.", _COUNTED)
    prof_ops: tuple[str, ...] = noticed((), "Collectives to log.", _COUNTED)
    verbose: bool = noticed(False, "Print each collective when it is launched.", _COUNTED)
    debug: bool = noticed(False, "Log the calling function.", _COUNTED)


@dataclass(frozen=True)
class FileMonitor:
    """Training events that rank 0 writes to files."""

    enabled: bool = key(False, "Write events: loss, learning rate, gradient norm, memory, traffic.")
    output_path: str = _if_enabled("", "Output folder. The default is the working directory.")
    job_name: str = _if_enabled("DeepSpeedJobName", "Subfolder of `output_path` for this job.")


@dataclass(frozen=True)
class Wandb:
    """Training events that rank 0 sends to Weights & Biases. Requires the package `wandb`."""

    enabled: bool = key(False, "Send events.")
    group: str | None = _if_enabled(None, "Group that the run belongs to.")
    team: str | None = _if_enabled(None, "Team that owns the run.")
    project: str = _if_enabled("deepspeed", "Project that the run belongs to.")


@dataclass(frozen=True)
class Comet:
    """Training events that rank 0 sends to Comet. Requires the package `comet_ml`."""

    enabled: bool = key(False, "Send events.")
    samples_log_interval: int = _if_enabled(
        100, "Minimum number of samples between two events of the same name.", minimum=0
    )
    project: str | None = _if_enabled(None, "Project that the run belongs to.")
    workspace: str | None = _if_enabled(None, "Workspace that the run belongs to.")
    api_key: str | None = _if_enabled(
        None, "API key of the account. The variable COMET_API_KEY keeps it out of the config.", secret=True
    )
    experiment_name: str | None = _if_enabled(None, "Name of the experiment.")
    experiment_key: str | None = _if_enabled(None, "Key of the experiment.")
    online: bool | None = _if_enabled(None, "Send events immediately. false: store them in a file.")
    mode: str | None = _if_enabled(None, "Whether to create an experiment or to continue an existing one.")


@dataclass(frozen=True)
class ThroughputTimer:
    """DeepSpeed's samples-per-second timer."""

    enabled: bool = noticed(True, "Time each step.", _TIMER)
    synchronized: bool = noticed(True, "Synchronize the device.", _TIMER)


@dataclass(frozen=True)
class Timers:
    """DeepSpeed's timers."""

    throughput: ThroughputTimer = section(ThroughputTimer)
