"""Reports of an engine: progress lines, the report of each step to the run record and monitors, and the plan report.

[Note: step reports do not wait for the device]
Losses are added up on the device. The sum and the gradient norm are copied to the host while training continues. A step
is reported when both copies have completed: immediately if the host had to wait for the norm anyway, otherwise after
the next step, whose launch the device reaches only after these copies.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
import weakref
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from onefold.checkpoint.format.manifest import without_secrets
from onefold.comm import Group, Ledger
from onefold.engine.model_memory import ModelMemory
from onefold.engine.token_counter import TokenCounter
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.optim.norm import HostCopy, StepNorm
from onefold.plan import Loop, ModelBytes, Tier
from onefold.report.device_peaks import peak_flops
from onefold.report.memory_usage import peak_resident_bytes, resident_bytes
from onefold.report.monitors import Event, MonitorMaster, check_installed
from onefold.report.plan_report import KINDS, HeldBytes, PlanReport, TrafficRow
from onefold.report.run_file import MemoryRow, StepRow, line_of, peaks_of, write_line
from onefold.report.run_record import RunRecord, check_folder
from onefold.report.timeline import Timeline
from onefold.storage.before_exit import before_exit
from onefold.storage.object_path import ObjectPath
from onefold.version import __version__

_LONGEST_ERROR = 400
# Steps at which the plan report measures gradients: the first one, and the second one, after which pools are filled.
_MEASURED_STEPS = 2


@dataclass(frozen=True)
class _PendingReport:
    """The report of a step whose loss and norm may still be copied to the host."""

    row: StepRow
    loss: HostCopy | None
    norm: StepNorm | None
    tokens: tuple[HostCopy, HostCopy | None] | None
    """The tokens of this rank, and their FLOPs."""
    rates_after: list[float]
    """The learning rate of each group after the scheduler's step, as DeepSpeed's monitors show it."""
    scale_after: float
    """The loss scale of the next step, as DeepSpeed's monitors show it."""

    @property
    def is_complete(self) -> bool:
        """Whether loss and norm are on the host."""
        numbers = self.loss, self.norm, *(self.tokens or ())
        return all(number.arrived for number in numbers if number is not None)

    def read(self, world_size: int) -> StepRow:
        """Return the row with loss, norm and tokens of all ranks. Wait for them if necessary."""
        loss = self.loss.read() if self.loss is not None else None
        tokens, flops = self.tokens or (None, None)
        return replace(
            self.row,
            loss=loss,
            grad_norm=self.norm.read() if self.norm is not None else None,
            tokens=round(tokens.read()) * world_size if tokens is not None else None,
            flops=flops.read() * world_size if flops is not None else None,
        )


class StepReports:
    """Reports of each step to the run record and to monitors, on rank 0. It holds no reference to the engine."""

    def __init__(
        self,
        state: TrainState,
        memory: ModelMemory,
        ledger: Ledger,
        timeline: Timeline,
        monitor: MonitorMaster | None,
        record: RunRecord | None,
    ) -> None:
        self._state, self._model_memory = state, memory
        self._ledger, self._timeline = ledger, timeline
        self._monitor, self._record = monitor, record
        self._expected = expected(memory)
        self._start = self._before = ledger.copy()
        self._memory = measure_memory(state, memory)
        self._loss: HostCopy | None = None
        self.counter = TokenCounter(state)
        self._tokens: tuple[HostCopy, HostCopy | None] | None = None
        self._rates: list[float] = []
        self._scale = 1.0
        self._pending: _PendingReport | None = None
        self._last_report: PlanReport | None = None
        self._since = time.perf_counter()
        self._num_steps = 0
        # FLOP/s of all devices.
        peak = peak_flops(torch.cuda.get_device_name(state.device)) if state.device.type == "cuda" else None
        self._peak = peak * state.group.size if peak is not None else None
        self._write("run", time=time.time(), peak_flops=self._peak, **_facts(state, memory, ledger, self._expected))
        self._process = os.getpid()
        # Many programs don't close their engine.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        if record is not None and isinstance(record.path, ObjectPath):
            before_exit(self._at_exit)

    def note(self, **facts: Any) -> None:
        """Add facts to the record of the run."""
        self._write("note", **facts)

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Measure memory, losses and rates after the last backward and before the optimizer step."""
        losses = [loss.reshape(()).double() for loss in self._state.decision.losses]
        self._loss = HostCopy(torch.stack(losses).sum()) if losses else None
        self._tokens = self.counter.take()
        self._rates, self._scale = learning_rates(self._state), self._state.decision.loss_scale.value
        self._memory = measure_memory(self._state, self._model_memory)

    def end_step(self) -> None:
        """Report a step that was taken or skipped."""
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
        self._write_pending()  # of the step before, whose copies were launched before this step
        norm = decision.norm_to_read()
        self._pending = _PendingReport(
            row, self._loss, norm, self._tokens, learning_rates(state), decision.loss_scale.value
        )
        if self._pending.is_complete:
            self._write_pending()

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        row = pending.read(self._state.group.size)
        if self._record is not None:
            self._record.write(line_of(row))
        if self._monitor is not None:
            try:
                self._monitor.write_events(_events(pending, row, self._peak, timed=self._state.plan.loop.times_phases))
            except Exception as error:  # of a disk or a service on one rank: training continues on all
                kind = type(error).__name__
                logger.warning("monitors: %s: %s. The monitor is disabled and training continues", kind, error)
                self._monitor = None

    # -- plan against measurement, and the end --------------------------------------------------------------------

    def plan_report(self) -> PlanReport:
        """Return planned and measured bytes so far; of a closed engine those at its end."""
        return self._last_report or replace(
            self._expected,
            planned=planned_of(self._model_memory),
            held=self._memory.held,
            peaks=peaks_of(measure_memory(self._state, self._model_memory)),
            traffic=traffic_between(self._start, self._before),
            num_steps=self._num_steps,
        )

    def close(self, *, at_exit: bool = False) -> None:
        """Write the end of the record. Log errors instead of raising them."""
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process:  # a fork of the process that writes
            return
        record = self._record
        try:
            if not at_exit or (self._pending is not None and self._pending.is_complete):
                self._write_pending()
            self._last_report = report = self.plan_report()
            if record is not None:
                self._write("end", time=time.time(), **_reason(at_exit=at_exit), report=asdict(report))
                logger.info("planned and measured bytes\n%s", report.text())
        except Exception as error:
            logger.warning("the last line of the run record cannot be written: %s: %s", type(error).__name__, error)
        finally:
            if record is not None:
                record.close()
            self._record = self._monitor = None

    def _write(self, kind: str, **facts: Any) -> None:
        """Write a line to the record, if there is one."""
        if self._record is not None:
            self._record.write(write_line(kind, **facts))


def _close_at_exit(reference: weakref.ref[StepReports]) -> None:
    """Close the reports of an engine that the process ends with."""
    reports = reference()
    if reports is not None:
        reports.close(at_exit=True)


def _reason(*, at_exit: bool) -> dict[str, str | None]:
    """Return why the run ends, as far as this process knows."""
    error = getattr(sys, "last_value", None) if at_exit else sys.exc_info()[1]
    if error is not None:
        return {"reason": "error", "error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}
    return {"reason": "the process ended" if at_exit else "closed", "error": None}


class EngineReports:
    """All reports of one engine."""

    def __init__(
        self,
        state: TrainState,
        memory: ModelMemory,
        ledger: Ledger,
        timeline: Timeline,
        monitor: MonitorMaster,
        record: RunRecord | None,
    ) -> None:
        self._state, self._memory = state, memory
        self._ledger, self._timeline = ledger, timeline
        self._ledger_at_start = ledger.copy()
        self._gradients_held: dict[str, int] = {}
        self._num_steps = 0
        self.steps: StepReports | None = None
        """Reports of each step: on rank 0, if the config has a run record or a monitor."""
        if state.plan.loop.reports_steps and state.group.rank == 0:
            self.steps = StepReports(state, memory, ledger, timeline, monitor if monitor.enabled else None, record)

    def begin_step(self) -> None:
        """Measure what the optimizer step changes or frees."""
        if self._num_steps == 0:
            self._state.fp8.warn_of_unused()
        if self.steps is not None:
            self.steps.begin_step()
        elif self._num_steps < _MEASURED_STEPS:
            self._gradients_held = held_gradients(self._state)

    def end_step(self) -> None:
        """Report a step that was taken or skipped."""
        self._num_steps += 1
        self._print_progress()
        if self.steps is not None:
            self.steps.end_step()

    def _print_progress(self) -> None:
        """Log the step, the learning rates, the gradient norm and the times of phases every `steps_per_print` steps."""
        state, every = self._state, self._state.plan.loop.steps_per_print
        if not every or state.global_steps % every:
            return
        times = self._timeline.take()
        if state.group.rank == 0:
            rates = ", ".join(f"{rate:.6g}" for rate in learning_rates(state))
            spent = "".join(f", {phase} {seconds * 1000 / every:.1f} ms" for phase, seconds in times.items())
            logger.info(
                "step %d, skipped %d, lr [%s], grad norm %.4g%s",
                state.global_steps, state.skipped_steps, rates, state.decision.norm or 0.0, spent,
            )  # fmt: skip

    def plan_report(self) -> str:
        """Return planned and measured bytes as text. See `Engine.plan_report`."""
        if self.steps is not None:
            return self.steps.plan_report().text()
        memory = measure_memory(self._state, self._memory)
        traffic = traffic_between(self._ledger_at_start, self._ledger.copy())
        held = {tier: {**kinds, **_gradients(self._gradients_held, tier)} for tier, kinds in memory.held.items()}
        found = replace(expected(self._memory), held=held, peaks=peaks_of(memory), traffic=traffic)
        return replace(found, num_steps=self._num_steps).text()

    def see_inputs(self, kwargs: dict[str, Any]) -> None:
        """Count the tokens of a forward, if steps are reported."""
        if self.steps is not None and self._state.model.training:
            self.steps.counter.see(kwargs)

    def count_tokens(self, tokens: int, row_length: int) -> None:
        """Count tokens that the caller names, if steps are reported."""
        if self.steps is not None:
            self.steps.counter.add(tokens, row_length)

    def note(self, **facts: Any) -> None:
        """Add facts to the record of the run, if there is one."""
        if self.steps is not None:
            self.steps.note(**facts)

    def close(self) -> None:
        """Write the end of the run record."""
        if self.steps is not None:
            self.steps.close()


def check_reports(loop: Loop) -> None:
    """Raise if the run record cannot be written or the package of a monitor is missing."""
    check_installed(loop.monitoring)
    if loop.record_folder is not None:
        check_folder(loop.record_folder)


def open_record(loop: Loop, group: Group) -> RunRecord | None:
    """Open the run record on rank 0. Return None elsewhere, and if the config has none."""
    return RunRecord(loop.record_folder) if loop.record_folder is not None and group.rank == 0 else None


# -- measuring -------------------------------------------------------------------------------------------------------


def expected(memory: ModelMemory) -> PlanReport:
    """Return the plan of an engine, without measurements."""
    buffers, crossing = asdict(memory.planned_buffers()), asdict(memory.planned_offload_traffic())
    return PlanReport(planned_of(memory), {}, buffers, crossing, peaks={}, traffic=(), num_steps=0)


def held_gradients(state: TrainState) -> dict[str, int]:
    """Count the bytes of the gradients that this rank holds now, by tier."""
    return {tier.value: sum(param.grad.num_bytes(tier) for param in state.schedule.trained_params()) for tier in Tier}


def _gradients(held: dict[str, int], tier: str) -> dict[str, int]:
    """Return the bytes of gradients in one tier as a kind of model state."""
    return {"gradients": held[tier]} if tier in held else {}


def planned_of(memory: ModelMemory) -> HeldBytes:
    """Return the planned bytes of model state, by tier and kind."""
    return _by_kind({tier: memory.planned_bytes(tier) for tier in Tier})


def measure_memory(state: TrainState, memory: ModelMemory) -> MemoryRow:
    """Measure the memory of this rank without waiting for the device."""
    held = _by_kind({tier: memory.held_bytes(tier) for tier in Tier})
    on_device, on_host = (sum(held.get(tier.value, {}).values()) for tier in (Tier.DEVICE, Tier.HOST))
    resident, peak = resident_bytes(), peak_resident_bytes()
    if state.device.type != "cuda":
        return MemoryRow(held, max(0, resident - on_device - on_host), resident, peak)
    stats = torch.cuda.memory_stats(state.device)
    allocated, reserved = (stats.get(f"{what}_bytes.all.current", 0) for what in ("allocated", "reserved"))
    device_peak = stats.get("allocated_bytes.all.peak", 0)
    return MemoryRow(held, max(0, allocated - on_device), resident, peak, allocated, reserved, device_peak)


def _by_kind(sizes: dict[Tier, ModelBytes]) -> HeldBytes:
    """Return bytes by tier and kind of state, without empty tiers other than the device."""
    return {
        tier.value: {kind: getattr(found, kind) for kind in KINDS}
        for tier, found in sizes.items()
        if found.total or tier is Tier.DEVICE
    }


def traffic_between(earlier: Ledger, later: Ledger) -> tuple[TrafficRow, ...]:
    """Return the traffic between two copies of a ledger. If the ledger was cleared in between, count from zero."""
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


def learning_rates(state: TrainState) -> list[float]:
    """Return the learning rate of each optimizer group."""
    return [float(group["lr"]) for group in state.step.groups] if state.step is not None else []


def _events(pending: _PendingReport, row: StepRow, peak: float | None, *, timed: bool) -> list[Event]:
    """Return the monitor events of a step: first those with DeepSpeed's names, then those below `onefold/`."""
    values: dict[str, float | None] = {
        "Train/Samples/train_loss": row.loss,
        "Train/Samples/lr": pending.rates_after[0] if pending.rates_after else None,
        "Train/Samples/loss_scale": pending.scale_after if row.loss_scale is not None else None,
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
        "onefold/tokens_per_second": row.tokens_per_second,
        "onefold/mfu": row.utilization(peak),
        "onefold/memory/device_allocated": memory.device_allocated,
        "onefold/memory/device_peak": memory.device_peak,
        "onefold/memory/host_resident": memory.host_resident,
        **{f"onefold/memory/held_{tier}": value for tier, value in memory.by_tier().items() if value},
        **{f"onefold/traffic/{sent.operation}": row.bytes_of(sent.operation) for sent in row.traffic},
    }
    return [(name, value, row.samples) for name, value in values.items() if value is not None]


def _facts(state: TrainState, memory: ModelMemory, ledger: Ledger, planned: PlanReport) -> dict[str, Any]:
    """Return the facts of a run at the head of its record."""
    plan, group, units, device = state.plan, state.group, state.schedule.units, state.device
    trained = sum(param.layout.numel for unit in units for param in unit.trained_params)
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
        "plan": memory.describe(),
        "stage": plan.stage,
        "optimizer": state.step.name if state.step is not None else None,
        "config": without_secrets(state.config),
        "world_size": group.size,
        "nodes": list(group.nodes.sizes),
        "batch": asdict(state.window.batch),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "versions": versions,
        "planned": planned.planned,
        "planned_buffers": planned.buffers,
        "planned_crossing": planned.crossing,
        "traffic": [asdict(row) for row in traffic_between(Ledger(), ledger.copy())],
        "waits_for_device": plan.loop.times_phases,
    }
