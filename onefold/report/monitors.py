"""Live monitors under DeepSpeed's config sections and names: TensorBoard, CSV files, Weights & Biases, Comet.

`onefold.metrics_address` adds a server of metrics for Prometheus.

An event is (name, value, samples so far). Only the first rank writes. Packages are imported if a section is enabled.
`check_installed` raises for a missing package before the engine is built.
"""

from __future__ import annotations

import csv
import importlib.util
import os
from collections.abc import Iterable
from typing import Any, Protocol

import torch.distributed as dist

from onefold.config import ConfigError
from onefold.report.metrics_server import MetricsServer

Event = tuple[str, Any, int]

# The section of the config, the package that it needs, and the requirement that installs it.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41.0'"),
}


def check_installed(monitor_config: Any) -> None:
    """Raise if the package of an enabled section is not installed."""
    for section, (package, requirement) in _PACKAGES.items():
        if getattr(monitor_config, section).enabled and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{section}.enabled needs the package {package}, which is not installed. Run pip install "
                f"{requirement}, or set {section}.enabled to false."
            )


class EventWriter(Protocol):
    """A destination of events."""

    def write_events(self, event_list: Iterable[Event]) -> None: ...


class MonitorMaster:
    """All monitors that a config enables. `enabled` is the same on every rank, and only the first rank writes."""

    def __init__(self, monitor_config: Any) -> None:
        """Create the enabled monitors.

        `monitor_config` has the sections `tensorboard`, `csv_monitor`, `wandb` and `comet`.
        """
        self.monitor_config = monitor_config
        self.tb_monitor: TensorBoardMonitor | None = None
        self.wandb_monitor: WandbMonitor | None = None
        self.csv_monitor: CsvMonitor | None = None
        self.comet_monitor: CometMonitor | None = None
        self.metrics_server: MetricsServer | None = None
        self.enabled: bool = monitor_config.enabled
        if not self.enabled or not _is_first():
            return
        check_installed(monitor_config)
        if monitor_config.tensorboard.enabled:
            self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        if monitor_config.wandb.enabled:
            self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        if monitor_config.csv_monitor.enabled:
            self.csv_monitor = CsvMonitor(monitor_config.csv_monitor)
        if monitor_config.comet.enabled:
            self.comet_monitor = CometMonitor(monitor_config.comet)
        if (address := getattr(monitor_config, "metrics_address", None)) is not None:
            self.metrics_server = MetricsServer(address)

    @property
    def writers(self) -> list[EventWriter]:
        found = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor, self.metrics_server)
        return [writer for writer in found if writer is not None]

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events on the first rank. Do nothing on the others."""
        events = list(event_list)
        for writer in self.writers:
            writer.write_events(events)


class TensorBoardMonitor:
    """A writer of TensorBoard event files in `output_path/job_name`."""

    def __init__(self, tensorboard_config: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(tensorboard_config.output_path, tensorboard_config.job_name)
        os.makedirs(folder, exist_ok=True)
        self.enabled = tensorboard_config.enabled
        self.summary_writer = SummaryWriter(log_dir=folder)

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        for event in event_list:
            self.summary_writer.add_scalar(*event)
        if flush:
            self.flush()

    def flush(self) -> None:
        self.summary_writer.flush()


class CsvMonitor:
    """A writer of one file per metric in `output_path/job_name`.

    For example, `Train_Samples_lr.csv` has the columns step and lr.
    """

    def __init__(self, csv_config: Any) -> None:
        self.enabled = csv_config.enabled
        self.log_dir = os.path.join(csv_config.output_path, csv_config.job_name)
        os.makedirs(self.log_dir, exist_ok=True)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, samples in event_list:
            path = os.path.join(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])


class WandbMonitor:
    """A run of Weights & Biases."""

    def __init__(self, wandb_config: Any) -> None:
        import wandb

        self.enabled = wandb_config.enabled
        wandb.init(project=wandb_config.project, group=wandb_config.group, entity=wandb_config.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
        import wandb

        return wandb.log(data, step=step, commit=commit)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, samples in event_list:
            self.log({name: value}, step=samples)


class CometMonitor:
    """An experiment of Comet. Each metric is logged every `samples_log_interval` samples."""

    def __init__(self, comet_config: Any) -> None:
        import comet_ml

        self.enabled = comet_config.enabled
        self.samples_log_interval: int = comet_config.samples_log_interval
        self._logged: dict[str, int] = {}
        self.experiment = comet_ml.start(
            api_key=comet_config.api_key,
            project=comet_config.project,
            workspace=comet_config.workspace,
            experiment_key=comet_config.experiment_key,
            mode=comet_config.mode,
            online=comet_config.online,
        )
        if comet_config.experiment_name is not None:
            self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, samples in event_list:
            last = self._logged.get(name)
            if last is None or samples - last >= self.samples_log_interval:
                self._logged[name] = samples
                self.experiment.__internal_api__log_metric__(name=name, value=value, step=samples)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
