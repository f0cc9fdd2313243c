"""What a setting will hold, send and take, on a machine: out of the rehearsal of its step and the plan's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onefold.comm.exchange import ACROSS
from onefold.comm.nodes import Nodes
from onefold.config import Config, ConfigError, load_config
from onefold.estimate.machines import GB, Machine, PlanError
from onefold.estimate.models import ModelSource, build_once
from onefold.estimate.on_cuda import ATTENTION
from onefold.estimate.op_times import OpTimer
from onefold.estimate.rehearsal import Rehearsal, rehearse
from onefold.estimate.trace import MemoryMoment, PassTrace
from onefold.offload.offload_memory import COPIES_IN_FLIGHT
from onefold.optim.gpu_stream import CHUNK_BYTES, IN_FLIGHT
from onefold.plan import (
    Crossing,
    FlatParamSpec,
    ModelBytes,
    Placement,
    Plan,
    Tier,
    assign_tiers,
    count_bytes,
    count_crossing,
    make_plan,
)
from onefold.plan.memory import bytes_of_step, passes_device
from onefold.plan.table import TABLE

MIB = 1 << 20
# Of cuBLAS, which torch's allocator hands out on the first product.
WORKSPACE = 8 * MIB + 128 * 1024
# What lies outside torch's allocator: the CUDA context with the kernels that are loaded, and NCCL's channels.
CONTEXT, NCCL = 840 * MIB, 400 * MIB
# Blocks that the allocator keeps and cannot use, as a share of what is allocated at the peak. What it reserves beyond
# that depends on the order of allocations; torch gives it back before it runs out.
FRAGMENTATION = 0.05
# A process before there is a model, on its host.
PROCESS = 600 * MIB
# The host keeps some memory for itself.
HOST_SHARE = 0.9
# A setting that leaves less of a GPU's memory is tight: the allocator may reserve more than a dry run knows.
MARGIN = 0.05
# The search for the largest micro-batch ends here.
LARGEST_BATCH = 1 << 16


@dataclass(frozen=True)
class DeviceBytes:
    """One GPU at its fullest moment, by kind."""

    parameters: int
    """At rest, with their secondary shards,"""
    gathered: int
    """and unsharded for a while."""
    gradients: int
    masters: int
    states: int
    activations: int
    """With temporaries,"""
    logits: int
    """what is as wide as the vocabulary aside."""
    workspace: int
    reserve: int
    """What the allocator cannot use (`FRAGMENTATION`)."""
    context: int
    """CUDA's own, and NCCL's buffers."""

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` will say."""
        return self.total - self.reserve - self.context

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step: what one rank sends inside its node, what leaves a node, and messages of one rank."""

    inside: int
    across: int
    calls: int


@dataclass(frozen=True)
class Setting:
    """A choice of stage, offload and wires: what is written under `zero_optimization`."""

    name: str
    zero: dict[str, Any]

    @property
    def shards_parameters(self) -> bool:
        return TABLE[self.zero["stage"]][0] is Placement.SHARDED


@dataclass(frozen=True)
class Shortage:
    """A resource of which a setting needs more than the machine has."""

    resource: str
    """GPU, host or NVMe."""
    lack: int
    needed: int
    """Bytes that the machine would have to have for it to fit; of the host more than are used (`HOST_SHARE`)."""

    def __str__(self) -> str:
        return f"short by {self.amount}"

    @property
    def amount(self) -> str:
        name = self.resource if self.resource == "NVMe" else f"{self.resource} memory"
        lack = f"{self.lack / GB:.1f} GB" if self.lack >= GB // 20 else f"{max(self.lack // 1_000_000, 1)} MB"
        return f"{lack} of {name}"


@dataclass(frozen=True)
class Forecast:
    """What one setting needs and takes."""

    setting: Setting
    device: DeviceBytes
    host: ModelBytes
    """Of one rank; a node has as many times that,"""
    host_node: int
    """which is so much, processes with it."""
    nvme: int
    """Of a node."""
    traffic: Traffic | None
    crossing: Crossing
    seconds: dict[str, float]
    """What each resource is busy in a step; empty where there is no forward."""
    step: float | None
    micro_batch: int | None
    largest_batch: int | None
    """The largest that fits, or one of at least `LARGEST_BATCH`; 0: none does; None: there is no forward."""
    shortages: tuple[Shortage, ...]
    spare: int
    """Bytes of each GPU that are left; below 0 where it does not fit."""
    is_tight: bool
    """It fits, and leaves less than `MARGIN` of the GPU's memory."""

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def bound_by(self) -> str | None:
        return max(self.seconds, key=self.seconds.__getitem__) if self.seconds else None


def settings_for(machine: Machine) -> list[Setting]:
    """Every stage, offload and ZeRO++ setting that this machine can have."""
    cpu = {"device": "cpu", "pin_memory": True}
    nvme = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
    found: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
    found |= {f"stage {stage} + optimizer cpu": {"stage": stage, "offload_optimizer": cpu} for stage in (2, 3)}
    whole: dict[str, Any] = {"stage": 3}
    found["stage 3 + optimizer, param cpu"] = {**whole, "offload_optimizer": cpu, "offload_param": cpu}
    if machine.nvme:
        found["stage 3 + optimizer nvme"] = {**whole, "offload_optimizer": nvme}
        found["stage 3 + optimizer nvme, param cpu"] = {**whole, "offload_optimizer": nvme, "offload_param": cpu}
        found["stage 3 + optimizer, param nvme"] = {**whole, "offload_optimizer": nvme, "offload_param": nvme}
    if machine.nodes > 1 and machine.gpus > 1:
        near = {"zero_hpz_partition_size": machine.gpus}
        wires = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        found |= {"stage 3 + hpZ": {**whole, **near}, "stage 3 + qwZ + qgZ": {**whole, **wires}}
        found["stage 3 + ZeRO++ (all three)"] = {**whole, **near, **wires}
    return [Setting(name, {**zero, "overlap_comm": True}) for name, zero in found.items()]


@dataclass(frozen=True)
class Question:
    """What is asked: a model on a machine, with a config as the base, a micro-batch and a length."""

    model: ModelSource
    machine: Machine
    config: dict[str, Any]
    micro_batch: int | None = None
    sequence_length: int | None = None

    def document(self, setting: Setting, micro_batch: int) -> dict[str, Any]:
        base = {key: value for key, value in self.config.items() if key not in _BATCH}
        zero = {key: value for key, value in base.get("zero_optimization", {}).items() if key not in _CHOSEN}
        accumulation = self.config.get("gradient_accumulation_steps", 1)
        return {
            **base,
            "zero_optimization": {**zero, **setting.zero},
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation if isinstance(accumulation, int) else 1,
        }


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CHOSEN = (
    "stage",
    "overlap_comm",
    "offload_optimizer",
    "offload_param",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
)
DEFAULT_CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}


def assumptions(question: Question) -> list[str]:
    """What was taken for granted, for people."""
    said = [*question.model.notes]
    if question.model.loss_of is not None:
        said += [ATTENTION, "data-dependent checks in forward (e.g. on masks) are assumed to pass"]
    said.append(
        f"outside torch's allocator: {CONTEXT / GB:.1f} GB of CUDA"
        f"{f' and {NCCL / GB:.1f} GB of NCCL' if question.machine.world > 1 else ''} (as on an H200)"
    )
    return said


def forecast(
    question: Question,
    settings: Sequence[Setting],
    tell: Callable[[str, int, int], None] = lambda now, done, of: None,
    *,
    uses_nccl: bool = True,
    finds_batch: bool = True,
    timer: OpTimer | None = None,
) -> list[Forecast]:
    """One for each setting; settings that differ in where states rest share a rehearsal. `finds_batch`: the largest
    micro-batch too. `timer`: ops are timed by it, and are not guessed from a machine's rates.
    """
    rehearsed: dict[str, Rehearsal] = {}
    found: list[Forecast] = []

    def rehearsal_of(setting: Setting, micro_batch: int) -> Rehearsal:
        offloads = [name in setting.zero for name in ("offload_optimizer", "offload_param")]
        zero = {key: value for key, value in setting.zero.items() if not key.startswith("offload")}
        key = f"{zero} {offloads} {micro_batch}"
        if key not in rehearsed:
            tell(f"{setting.name}, micro-batch {micro_batch}", len(found), len(settings))
            rehearsed[key] = _rehearse(question, setting, micro_batch, uses_nccl=uses_nccl)
        return rehearsed[key]

    for setting in settings:
        rehearsal = rehearsal_of(setting, question.micro_batch or 1)
        each = _forecast(question, setting, rehearsal, timer)
        if finds_batch and each.step is not None:
            largest = _largest_batch(question, each, lambda batch, of=setting: rehearsal_of(of, batch))  # type: ignore[misc]
            each = replace(each, largest_batch=largest)
        found.append(each)
    tell("", len(settings), len(settings))
    return found


def _rehearse(question: Question, setting: Setting, micro_batch: int, *, uses_nccl: bool) -> Rehearsal:
    machine, source = question.machine, question.model
    config = load_config(question.document(setting, micro_batch))
    loss_of = None
    if question.micro_batch is not None and question.sequence_length is not None and source.loss_of is not None:
        loss_of = source.loss_of(micro_batch, question.sequence_length)
    nodes = Nodes.of_size(machine.gpus, machine.world)
    model = build_once(source.name, source.build)
    try:
        return rehearse(model, config, nodes, loss_of, vocabulary=source.vocabulary, uses_nccl=uses_nccl)
    except (PlanError, ConfigError):
        raise
    except Exception as error:  # whatever a model of the user's may raise
        raise PlanError(
            f"{source.name}: its step does not run on tensors without values ({type(error).__name__}: "
            f"{' '.join(str(error).split())}). A forward that looks at values cannot be planned; --params plans model "
            "states alone."
        ) from error


def _forecast(question: Question, setting: Setting, found: Rehearsal, timer: OpTimer | None = None) -> Forecast:
    machine, micro_batch = question.machine, question.micro_batch or 1
    config = load_config(question.document(setting, micro_batch))
    plan, specs = _place(question, config, found)
    host_room = int(machine.host_memory * HOST_SHARE)
    device = _device_bytes(question, found, plan, specs)
    on_host, on_disk = (count_bytes(specs, plan, tier) for tier in (Tier.HOST, Tier.NVME))
    host_node = machine.gpus * (on_host.total + PROCESS)
    nvme = machine.gpus * on_disk.total
    micro_steps = config.gradient_accumulation_steps or 1
    crossing = count_crossing(specs, plan, micro_steps, device_casts=True)
    traffic = _traffic(found, machine)
    seconds, step = _times(question, found, plan, specs, crossing, traffic, micro_steps, timer)
    shortages = tuple(
        Shortage(resource, used - has, math.ceil(used / share))
        for resource, used, has, share in (
            ("GPU", device.total, machine.gpu.memory, 1.0),
            ("host", host_node, host_room, HOST_SHARE),
            ("NVMe", nvme, machine.nvme, 1.0),
        )
        if used > has
    )
    shown = question.micro_batch if found.trace is not None else None
    spare = machine.gpu.memory - device.total
    is_tight = not shortages and spare < MARGIN * machine.gpu.memory
    held = (device, on_host, host_node, nvme)
    return Forecast(setting, *held, traffic, crossing, seconds, step, shown, None, shortages, spare, is_tight)


def _place(question: Question, config: Config, found: Rehearsal) -> tuple[Plan, list[FlatParamSpec]]:
    """Return the plan of a setting and where its shards are stored."""
    machine = question.machine
    plan = replace(make_plan(config, machine.world), accumulates=found.plan.accumulates, node_size=machine.gpus)
    flat = [spec for unit in found.units for spec in unit]
    return plan, assign_tiers(flat, plan, host_bytes=int(machine.host_memory * HOST_SHARE) // machine.gpus)


def _device_bytes(question: Question, found: Rehearsal, plan: Plan, specs: Sequence[FlatParamSpec]) -> DeviceBytes:
    rest = count_bytes(specs, plan)
    on_device = plan.gradients.tier is Tier.DEVICE
    # Reduced gradients that leave for the host are on the device only while they are on their way.
    largest = max((spec.layout.total * spec.dtype.itemsize for spec in specs if spec.trainable), default=0)
    # On one rank a micro-step's gradient is the sum.
    apart = plan.num_shards > 1 or plan.accumulates
    reduced = max((spec.layout.shard_size * 4 for spec in specs if spec.trainable and apart), default=0)
    in_flight = (COPIES_IN_FLIGHT + 1) * largest + COPIES_IN_FLIGHT * reduced

    def gradients_of(moment: MemoryMoment) -> int:
        if question.machine.is_cpu:  # pools keep what a GPU's allocator has for other uses
            return rest.gradients + found.pools
        return moment.gradients if on_device else min(moment.gradients, in_flight)

    if found.trace is None or not found.trace.moments:
        fullest = MemoryMoment(0, 0, 0, 0, 0)
        gradients, activations = rest.gradients + rest.largest_slot, 0
    else:
        fullest = max(found.trace.moments, key=lambda moment: moment.total - moment.gradients + gradients_of(moment))
        gradients = gradients_of(fullest)
        activations = fullest.live - fullest.gradients - fullest.logits + fullest.unsplit
    kinds = {
        "parameters": rest.parameters,
        "gathered": fullest.gathered,
        "gradients": gradients,
        "masters": rest.masters,
        "states": rest.states + found.matrix_bytes,
        "activations": activations,
        "logits": fullest.logits,
        "workspace": (WORKSPACE if found.trace is not None else 0) + _passing_through(question.machine, plan, specs),
    }
    reserve = int(sum(kinds.values()) * FRAGMENTATION)
    return DeviceBytes(**kinds, reserve=reserve, context=CONTEXT + (NCCL if question.machine.world > 1 else 0))


def _passing_through(machine: Machine, plan: Plan, specs: Sequence[FlatParamSpec]) -> int:
    """Chunks of states on the device, where these rest below it and the device steps them: those of the host, and those
    of a disk, have memory of their own.
    """
    largest = {Tier.HOST: 0, Tier.NVME: 0}
    for spec in specs:
        if spec.trainable and spec.residency.offloads_states and not machine.is_cpu and passes_device(plan, spec):
            gradient = plan.precision.of_reduced(spec.dtype, plan.num_micro_steps, spec.layout.num_shards).itemsize
            needed, tier = bytes_of_step(spec) + spec.layout.shard_size * gradient, spec.residency.states
            largest[tier] = max(largest[tier], needed)
    return IN_FLIGHT * sum(min(each, CHUNK_BYTES) for each in largest.values())


def _traffic(found: Rehearsal, machine: Machine) -> Traffic | None:
    if found.traffic is None:
        return None
    rows = [row for row in found.traffic.rows() if row.operation != "meet"]
    across = sum(row.bytes for row in rows if row.group == ACROSS)
    inside = sum(row.bytes for row in rows if row.group != ACROSS)
    return Traffic(inside, across * machine.gpus, sum(row.calls for row in rows))


def _times(
    question: Question,
    found: Rehearsal,
    plan: Plan,
    specs: Sequence[FlatParamSpec],
    crossing: Crossing,
    traffic: Traffic | None,
    micro_steps: int,
    timer: OpTimer | None,
) -> tuple[dict[str, float], float | None]:
    if found.trace is None or traffic is None:
        return {}, None
    machine, gpu, work = question.machine, question.machine.gpu, found.trace.work
    passes = work.flops / (gpu.flops * machine.efficiency) + work.moved_bytes / (0.8 * gpu.bandwidth)
    if timer is not None:
        passes = timer.seconds_of(work.calls) * machine.contention
    passes = max(passes, work.num_ops * machine.launch) * micro_steps
    passes += sum(spec.trainable for spec in specs) * machine.boundary
    passes += found.matrix_flops / (gpu.flops * machine.efficiency)
    stepped, through = {True: 0, False: 0}, {Tier.HOST: 0, Tier.NVME: 0}
    for spec in specs:
        if spec.trainable and spec.residency.offloads_states and not machine.is_cpu and passes_device(plan, spec):
            through[spec.residency.states] += bytes_of_step(spec)
        elif spec.trainable:
            slower = _HOST_OVER_BYTES if spec.kept.forms and spec.residency.offloads_states else 1
            stepped[spec.residency.offloads_states] += slower * (
                spec.layout.shard_size if plan.shards_states else spec.layout.total
            )
    device_step = stepped[False] * _STEP_BYTES / (0.8 * gpu.bandwidth)
    if machine.is_cpu:
        device_step = stepped[False] * machine.gpus / machine.adam
    host_step = stepped[True] * machine.gpus / machine.adam
    seconds = {
        "computation": passes + device_step,
        "links inside": traffic.inside / (0.8 * gpu.link) + traffic.calls * machine.call if machine.gpus > 1 else 0.0,
        "links across": traffic.across / (0.8 * machine.across) if machine.nodes > 1 else 0.0,
        "bus": (max(crossing.down, crossing.up) - sum(through.values())) / gpu.bus,
        "states over the bus": sum(through.values()) / gpu.bus,
        "host's step": host_step,
        "disk": (crossing.read + crossing.written) * machine.gpus / machine.disk,
    }
    seconds = {name: value for name, value in seconds.items() if value}
    beside = [value for name, value in seconds.items() if name not in ("states over the bus", "host's step", "disk")]
    # The host's thread also sees to what comes from a disk and passes through the device.
    by_thread = host_step + through[Tier.NVME] / gpu.bus
    after = max(sum(through.values()) / gpu.bus, by_thread, seconds.get("disk", 0.0))
    if (not plan.overlap and machine.world > 1) or machine.is_cpu:  # cores do not exchange while they compute
        return seconds, sum(beside) + after
    return seconds, max(beside) + after


LABELS = {
    "computation": "computation",
    "links inside": "GPU links",
    "links across": "node links",
    "bus": "host bus",
    "states over the bus": "state transfer",
    "host's step": "CPU step",
    "disk": "disk",
}
"""The keys of `Forecast.seconds`, for people."""
# A host steps states in fewer bytes so many times slower than fp32 (`python -m benchmarks.host_step --forms-only`).
_HOST_OVER_BYTES = 5
# Bytes that an element's update reads and writes on a device.
_STEP_BYTES = 4 * (2 + 2 * 2) + 4 + 2


def _largest_batch(question: Question, each: Forecast, rehearsal_of: Callable[[int], Rehearsal]) -> int:
    """Return the largest micro-batch that fits: with one more sequence it does not (see [Note: another batch without
    another dry run]).
    """
    given, memory = question.micro_batch or 1, question.machine.gpu.memory
    if any(shortage.resource != "GPU" for shortage in each.shortages):
        return 0  # the micro-batch changes the memory of a GPU alone
    device = each.device
    if device.total - device.activations - device.logits - device.gradients - device.gathered > memory:
        return 0
    config = load_config(question.document(each.setting, given))
    plan, specs = _place(question, config, rehearsal_of(given))
    known = {given: device.total}

    def needed(batch: int) -> int:
        if batch not in known:
            found = _rehearsal_at(batch, given, rehearsal_of)
            known[batch] = _device_bytes(question, found, plan, specs).total
        return known[batch]

    if each.fits:
        fits, too_large = given, 2 * given
        while needed(too_large) <= memory:
            fits, too_large = too_large, 2 * too_large
            if fits >= LARGEST_BATCH:
                return fits
    elif given == 1 or needed(1) > memory:
        return 0
    else:
        fits, too_large = 1, given
    halves = False
    while too_large - fits > 1:
        # Memory grows nearly in proportion, so a line through both ends leads close; a half makes sure of an end.
        share = 0.5 if halves else (memory - needed(fits)) / (needed(too_large) - needed(fits))
        middle = min(max(fits + int((too_large - fits) * share), fits + 1), too_large - 1)
        before = too_large - fits
        fits, too_large = (middle, too_large) if needed(middle) <= memory else (fits, middle)
        halves = not halves and too_large - fits > before // 2
    return fits


def _rehearsal_at(batch: int, given: int, rehearsal_of: Callable[[int], Rehearsal]) -> Rehearsal:
    """Return what a dry run of another micro-batch would find, without it where two others say enough."""
    bases = [(given, 2 * given)] if batch > 1 else []
    bases += [(2, 3)] if given == 1 and batch > 1 else []
    for one, two in bases:
        low, high = rehearsal_of(one), rehearsal_of(two)
        if batch in (one, two):
            return low if batch == one else high
        assert low.tape is not None
        assert high.tape is not None
        sizes = low.tape.sizes_at(one, high.tape, two, batch)
        if sizes is not None:
            assert low.trace is not None
            replayed = low.tape.replay(sizes)
            return replace(low, trace=PassTrace(replayed, low.trace.work))
    return rehearsal_of(batch)
