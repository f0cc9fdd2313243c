"""What an engine tells of every step, to the record of the run and to monitors: on the first rank, where that is asked.

[Note: what a step may wait for]
The host does not wait for the device to tell of a step. Losses are added up on the device, and the sum is copied to the
host beside the training, as the norm is. A step is told when both have arrived: at once where the host had to wait for
the norm anyway, otherwise after the next step, before which the device must have had them.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from onefold.checkpoint.format.manifest import without_secrets
from onefold.comm import Group, Ledger
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.optim.norm import HostCopy, StepNorm
from onefold.plan import Loop, ModelBytes, Tier
from onefold.report.describe import held_bytes, planned_bytes
from onefold.report.memory_usage import peak_resident_bytes, resident_bytes
from onefold.report.monitors import Event, MonitorMaster, check_installed
from onefold.report.plan_report import KINDS, HeldBytes, PlanReport, TrafficRow
from onefold.report.run_file import MemoryRow, StepRow, line_of, peaks_of, write_line
from onefold.report.run_record import RunRecord, check_folder
from onefold.version import __version__

if TYPE_CHECKING:
    from onefold.engine.core import Engine

_LONGEST_ERROR = 400


@dataclass(frozen=True)
class _StepToTell:
    """A step whose loss and norm may still be on their way."""

    row: StepRow
    loss: HostCopy | None
    norm: StepNorm | None
    rates_after: list[float]
    """Of each group once the scheduler has stepped,"""
    scale_after: float
    """and the loss scale of the next step: DeepSpeed's monitors show those."""

    @property
    def arrived(self) -> bool:
        return all(number.arrived for number in (self.loss, self.norm) if number is not None)

    def read(self) -> StepRow:
        loss = self.loss.read() if self.loss is not None else None
        return replace(self.row, loss=loss, grad_norm=self.norm.read() if self.norm is not None else None)


class StepReports:
    """What is told of one engine's steps, on the first rank. It holds no reference to the engine."""

    def __init__(self, engine: Engine, record: RunRecord | None) -> None:
        self._state, self._ledger, self._timeline = engine.state, engine.ledger, engine._timeline
        self._monitor: MonitorMaster | None = engine.monitor if engine.monitor.enabled else None
        self._record = record
        self._expected = expected(engine)
        self._start = self._before = engine.ledger.copy()
        self._memory = measure_memory(engine.state)
        self._loss: HostCopy | None = None
        self._rates: list[float] = []
        self._scale = 1.0
        self._to_tell: _StepToTell | None = None
        self._last_report: PlanReport | None = None
        self._since = time.perf_counter()
        self._num_steps = 0
        self._write("run", time=time.time(), **_facts(engine, self._expected))
        self._process = os.getpid()
        # Many programs never close their engine.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def note(self, **facts: Any) -> None:
        self._write("note", **facts)

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A backward has ended: what is held now is what the plan speaks of."""
        losses = [loss.reshape(()).double() for loss in self._state.decision.losses]
        self._loss = HostCopy(torch.stack(losses).sum()) if losses else None
        self._rates, self._scale = _rates(self._state), self._state.decision.loss_scale.value
        self._memory = measure_memory(self._state)

    def end_step(self) -> None:
        """The step is taken or skipped, and counted."""
        state, decision = self._state, self._state.decision
        now, ledger = time.perf_counter(), self._ledger.copy()
        seconds, phases = now - self._since, self._timeline.take_recorded()
        row = StepRow(
            step=state.global_steps,
            samples=state.global_samples,
            batch_samples=state.window.batch.train,
            time=time.time(),
            seconds=seconds,
            loss=None,
            learning_rates=tuple(self._rates),
            grad_norm=None,
            loss_scale=self._scale if decision.scales_loss else None,
            skipped=not decision.applied,
            phases={**phases, "outside": max(0.0, seconds - sum(phases.values()))},
            memory=self._memory,
            traffic=traffic_between(self._before, ledger),
        )
        self._since, self._before = now, ledger
        self._num_steps += 1
        self._tell()  # the step before: what it still waits for was queued before this one
        norm = decision.norm_to_read()
        self._to_tell = _StepToTell(row, self._loss, norm, _rates(state), decision.loss_scale.value)
        if self._to_tell.arrived:
            self._tell()

    def _tell(self) -> None:
        told, self._to_tell = self._to_tell, None
        if told is None:
            return
        row = told.read()
        if self._record is not None:
            self._record.write(line_of(row))
        if self._monitor is not None:
            try:
                self._monitor.write_events(_events(told, row, timed=self._state.plan.loop.times_phases))
            except Exception as error:  # of a disk or a service, on one rank alone: no reason to stop them all
                kind = type(error).__name__
                logger.warning("monitors: %s: %s. No more events are written; the training goes on", kind, error)
                self._monitor = None

    # -- plan against measurement, and the end --------------------------------------------------------------------

    def plan_report(self) -> PlanReport:
        """So far; of an engine that is closed, the last."""
        return self._last_report or replace(
            self._expected,
            planned=planned_of(self._state),
            held=self._memory.held,
            peaks=peaks_of(measure_memory(self._state)),
            traffic=traffic_between(self._start, self._before),
            num_steps=self._num_steps,
        )

    def close(self, *, at_exit: bool = False) -> None:
        """The last words. Whoever closes an engine goes on, whatever happens here."""
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process:  # a fork of the process that writes
            return
        record = self._record
        try:
            if not at_exit or (self._to_tell is not None and self._to_tell.arrived):
                self._tell()
            self._last_report = report = self.plan_report()
            if record is not None:
                self._write("end", time=time.time(), **_reason(at_exit=at_exit), report=asdict(report))
                logger.info("plan against measurement\n%s", report.text())
        except Exception as error:
            logger.warning("the record of the run has no last words: %s: %s", type(error).__name__, error)
        finally:
            if record is not None:
                record.close()
            self._record = self._monitor = None

    def _write(self, kind: str, **facts: Any) -> None:
        if self._record is not None:
            self._record.write(write_line(kind, **facts))


def _close_at_exit(reference: weakref.ref[StepReports]) -> None:
    reports = reference()
    if reports is not None:
        reports.close(at_exit=True)


def _reason(*, at_exit: bool) -> dict[str, str | None]:
    """Why a run ends, as far as this process knows."""
    error = getattr(sys, "last_value", None) if at_exit else sys.exc_info()[1]
    if error is not None:
        return {"reason": "error", "error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}
    return {"reason": "the process ended" if at_exit else "closed", "error": None}


# -- what an engine offers -------------------------------------------------------------------------------------------


def check_reports(loop: Loop) -> None:
    """Raise, before anything is built, where the record cannot be written or the package of a monitor is missing."""
    check_installed(loop.monitoring)
    if loop.record_folder is not None:
        check_folder(loop.record_folder)


def open_record(loop: Loop, group: Group) -> RunRecord | None:
    return RunRecord(loop.record_folder) if loop.record_folder is not None and group.rank == 0 else None


def open_reports(engine: Engine, record: RunRecord | None) -> StepReports | None:
    """None where nobody is told of steps, and on other ranks than the first."""
    asked = engine.plan.loop.reports_steps and engine.state.group.rank == 0
    return StepReports(engine, record) if asked else None


def plan_report(self: Engine) -> str:
    """Return planned and measured bytes as text: each tier and kind, buffers, the peak, traffic per step. Gradients are
    those at the end of a backward, because a step frees them; before the first step they are those held now.
    """
    if self._reports is not None:
        return self._reports.plan_report().text()
    memory = measure_memory(self.state)
    traffic = traffic_between(self._ledger_at_start, self.ledger.copy())
    held = {tier: {**kinds, **_gradients(self._gradients_held, tier)} for tier, kinds in memory.held.items()}
    found = replace(expected(self), held=held, peaks=peaks_of(memory), traffic=traffic)
    return replace(found, num_steps=self._num_steps).text()


def note_run(self: Engine, **facts: Any) -> None:
    """Add facts to the record of the run, where there is one: `steps` is how many there will be."""
    if self._reports is not None:
        self._reports.note(**facts)


# -- measuring -------------------------------------------------------------------------------------------------------


def expected(engine: Engine) -> PlanReport:
    """The plan of an engine, with nothing measured."""
    buffers, crossing = asdict(engine.planned_buffers()), asdict(engine.planned_crossing())
    return PlanReport(planned_of(engine.state), {}, buffers, crossing, peaks={}, traffic=(), num_steps=0)


def held_gradients(state: TrainState) -> dict[str, int]:
    """Count the bytes of the gradients that this rank holds now, by tier."""
    return {tier.value: sum(param.grad.num_bytes(tier) for param in state.schedule.trained_params()) for tier in Tier}


def _gradients(held: dict[str, int], tier: str) -> dict[str, int]:
    return {"gradients": held[tier]} if tier in held else {}


def planned_of(state: TrainState) -> HeldBytes:
    plan = replace(state.plan, accumulates=state.window.accumulates)
    return _by_kind({tier: planned_bytes(state.schedule.units, plan, tier) for tier in Tier})


def measure_memory(state: TrainState) -> MemoryRow:
    """Memory of this rank now. Nothing waits for the device."""
    held = _by_kind({tier: held_bytes(state.schedule, state.step, tier) for tier in Tier})
    on_device, on_host = (sum(held.get(tier.value, {}).values()) for tier in (Tier.DEVICE, Tier.HOST))
    resident, peak = resident_bytes(), peak_resident_bytes()
    if state.device.type != "cuda":
        return MemoryRow(held, max(0, resident - on_device - on_host), resident, peak)
    stats = torch.cuda.memory_stats(state.device)
    allocated, reserved = (stats.get(f"{what}_bytes.all.current", 0) for what in ("allocated", "reserved"))
    device_peak = stats.get("allocated_bytes.all.peak", 0)
    return MemoryRow(held, max(0, allocated - on_device), resident, peak, allocated, reserved, device_peak)


def _by_kind(sizes: dict[Tier, ModelBytes]) -> HeldBytes:
    return {
        tier.value: {kind: getattr(found, kind) for kind in KINDS}
        for tier, found in sizes.items()
        if found.total or tier is Tier.DEVICE
    }


def traffic_between(earlier: Ledger, later: Ledger) -> tuple[TrafficRow, ...]:
    """What was counted in between. A ledger that somebody has cleared meanwhile is counted from nothing."""
    before = {(row.operation, row.group): row for row in earlier.rows()}
    if any(later.calls(row.operation) < earlier.calls(row.operation) for row in before.values()):
        before = {}
    found = []
    for row in later.rows():
        old = before.get((row.operation, row.group))
        calls, num_bytes = (row.calls - old.calls, row.bytes - old.bytes) if old else (row.calls, row.bytes)
        if calls or num_bytes:
            found.append(TrafficRow(row.operation, row.group, calls, num_bytes))
    return tuple(found)


def _rates(state: TrainState) -> list[float]:
    return [float(group["lr"]) for group in state.step.groups] if state.step is not None else []


def _events(told: _StepToTell, row: StepRow, *, timed: bool) -> list[Event]:
    """DeepSpeed's names first, ours under `onefold/`."""
    values: dict[str, float | None] = {
        "Train/Samples/train_loss": row.loss,
        "Train/Samples/lr": told.rates_after[0] if told.rates_after else None,
        "Train/Samples/loss_scale": told.scale_after if row.loss_scale is not None else None,
    }
    if timed:
        values |= {
            f"Train/Samples/elapsed_time_ms_{phase}": row.phases.get(phase, 0.0) * 1000
            for phase in ("forward", "backward", "step")
        }
    memory = row.memory
    values |= {
        "onefold/grad_norm": row.grad_norm,
        "onefold/samples_per_second": row.samples_per_second,
        "onefold/memory/device_allocated": memory.device_allocated,
        "onefold/memory/device_peak": memory.device_peak,
        "onefold/memory/host_resident": memory.host_resident,
        **{f"onefold/memory/held_{tier}": value for tier, value in memory.by_tier().items() if value},
        **{f"onefold/traffic/{operation}": row.bytes_of(operation) for operation in _operations(row)},
    }
    return [(name, value, row.samples) for name, value in values.items() if value is not None]


def _operations(row: StepRow) -> Iterator[str]:
    yield from dict.fromkeys(sent.operation for sent in row.traffic)


def _facts(engine: Engine, planned: PlanReport) -> dict[str, Any]:
    state, group = engine.state, engine.state.group
    units, device = state.schedule.units, engine.device
    trained = sum(param.layout.numel for unit in units for param in unit.trained)
    frozen = sum(param.layout.numel for unit in units for param in unit.params if not param.trainable)
    on_gpu = device.type == "cuda"
    versions = {"onefold": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if on_gpu:
        versions["cuda"] = str(torch.version.cuda)
    return {
        "model": {
            "class": type(state.model).__name__,
            "parameters_trained": trained,
            "parameters_frozen": frozen,
            "units": {unit.name: sum(param.layout.numel for param in unit.params) for unit in units},
        },
        "plan": engine.describe(),
        "stage": engine.plan.stage,
        "optimizer": engine.optimizer.name if engine.optimizer is not None else None,
        "config": without_secrets(state.config),
        "world_size": group.size,
        "nodes": list(group.nodes.sizes),
        "batch": asdict(engine.batch),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "versions": versions,
        "planned": planned.planned,
        "planned_buffers": planned.buffers,
        "planned_crossing": planned.crossing,
        "traffic": [asdict(row) for row in traffic_between(Ledger(), engine.ledger.copy())],
        "waits_for_device": engine.plan.loop.times_phases,
    }
