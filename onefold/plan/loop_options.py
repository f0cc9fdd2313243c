"""The options of the training loop, as sections of the config."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onefold.config.monitoring import Comet, FileMonitor, Wandb
from onefold.config.onefold_section import PeerCopiesSection, StallSection, StopSection, TraceSection
from onefold.config.schema import CheckpointSection
from onefold.storage.place import place


@dataclass(frozen=True)
class Monitoring:
    """The monitoring sections of the config."""

    tensorboard: FileMonitor = field(default_factory=FileMonitor)
    csv_monitor: FileMonitor = field(default_factory=FileMonitor)
    wandb: Wandb = field(default_factory=Wandb)
    comet: Comet = field(default_factory=Comet)
    metrics_address: str | None = None
    """The address at which the first rank serves metrics."""

    @property
    def enabled(self) -> bool:
        sections = (self.tensorboard, self.csv_monitor, self.wandb, self.comet)
        return self.metrics_address is not None or any(section.enabled for section in sections)


@dataclass(frozen=True)
class Loop:
    """The options of the training loop: printing, reports, tracing and checkpoints."""

    manages_accumulation: bool = True
    steps_per_print: int | None = None
    times_phases: bool = False
    reports_memory: bool = False
    drops_last_batch: bool = False
    pauses_collector: bool = False
    """Python's garbage collector is disabled while the engine is open."""
    gathers_weights_on_save: bool = False
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    trace: TraceSection = field(default_factory=TraceSection)
    stop: StopSection = field(default_factory=StopSection)
    stall: StallSection = field(default_factory=StallSection)
    peer_copies: PeerCopiesSection = field(default_factory=PeerCopiesSection)
    record_folder: str | None = None
    """The folder or the URL that the record of the run is written to."""
    monitoring: Monitoring = field(default_factory=Monitoring)

    @property
    def stall_folder(self) -> str:
        """The folder of the files of the stall watch. They are replaced once a second, so it is never a URL."""
        if self.stall.folder is None and self.record_folder is not None and isinstance(place(self.record_folder), Path):
            return self.record_folder
        return self.stall.folder or "stall"

    @property
    def reports_steps(self) -> bool:
        """Whether every step is reported to a record or a monitor."""
        return self.record_folder is not None or self.monitoring.enabled
