"""Forecast memory, traffic and time of settings on a machine, from dry runs and the plan's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onefold.comm.mesh import ACROSS
from onefold.comm.nodes import Nodes
from onefold.config import Config, ConfigError, load_config
from onefold.offload.grad_offload import CHUNK as SUM_CHUNK
from onefold.offload.grad_offload import CHUNKS_IN_FLIGHT as SUMS_IN_FLIGHT
from onefold.offload.grad_offload import COPIES_IN_FLIGHT
from onefold.optim.gpu_stream import CHUNK_BYTES, IN_FLIGHT, IN_FLIGHT_IN_BACKWARD
from onefold.plan import FlatParamSpec, ModelBytes, OffloadTraffic, Plan, Tier, assign_tiers, count_bytes, make_plan
from onefold.plan.buffers import CACHED_GRADIENT, FLAT_GRADIENT, REDUCED_GRADIENT, stays_unsharded
from onefold.plan.device_cache import assign_device_cache, cached_bytes, filled_bytes
from onefold.plan.speculation import assign_second_states
from onefold.plan.traffic import count_offload_traffic, is_streamed
from onefold.tools.estimate.dry_run import DryRun, dry_run
from onefold.tools.estimate.machines import GB, Machine, PlanError
from onefold.tools.estimate.models import build_once
from onefold.tools.estimate.ops import ATTENTION, OpTimer
from onefold.tools.estimate.question import Question, Setting
from onefold.tools.estimate.trace import MemoryMoment, PassTrace

MIB = 1 << 20
# The workspace of cuBLAS, which is allocated at the first matrix product.
WORKSPACE = 8 * MIB + 128 * 1024
# Memory outside torch's allocator: the CUDA context with its loaded kernels, and the channels of NCCL.
CONTEXT, NCCL = 840 * MIB, 400 * MIB
# Blocks that the allocator holds and cannot use, as a share of the allocated bytes at the peak. Further reserved blocks
# depend on the order of allocations; torch frees them before it runs out of memory.
FRAGMENTATION = 0.05
# Host memory of a process before it has a model.
PROCESS = 600 * MIB
# The share of host memory that a job may use.
HOST_SHARE = 0.9
# A setting that leaves a smaller share of a GPU's memory is tight, because the allocator may reserve more than planned.
MARGIN = 0.05
# The limit of the search for the largest micro-batch.
LARGEST_BATCH = 1 << 16


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one GPU at its peak, by kind."""

    parameters: int
    """Stored parameters, with secondary shards."""
    gathered: int
    """Parameters that are unsharded temporarily."""
    gradients: int
    masters: int
    states: int
    activations: int
    """Activations and temporaries, without logits."""
    logits: int
    """Tensors as wide as the vocabulary."""
    workspace: int
    reserve: int
    """Bytes that the allocator holds and cannot use (`FRAGMENTATION`)."""
    context: int
    """The CUDA context and the buffers of NCCL."""

    @property
    def allocated(self) -> int:
        """The forecast of `torch.cuda.max_memory_allocated`."""
        return self.total - self.reserve - self.context

    @property
    def total(self) -> int:
        """The forecast of the memory that the driver reports."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Traffic:
    """Traffic of one step: bytes sent by a rank inside its node, bytes sent by a node to others, calls of a rank."""

    inside: int
    across: int
    calls: int


@dataclass(frozen=True)
class Shortage:
    """A resource of which a setting needs more than the machine has."""

    resource: str
    """GPU, host or NVMe."""
    lack: int
    needed: int
    """Bytes that the machine must have for the setting to fit; for the host, more than are used (`HOST_SHARE`)."""

    def __str__(self) -> str:
        return f"short by {self.amount}"

    @property
    def amount(self) -> str:
        """The missing amount of the resource, as text."""
        name = self.resource if self.resource == "NVMe" else f"{self.resource} memory"
        lack = f"{self.lack / GB:.1f} GB" if self.lack >= GB // 20 else f"{max(self.lack // 1_000_000, 1)} MB"
        return f"{lack} of {name}"


@dataclass(frozen=True)
class Forecast:
    """Memory, traffic and time of one setting."""

    setting: Setting
    device: DeviceBytes
    host: ModelBytes
    """Host memory of one rank."""
    host_node: int
    """Host memory of a node, with its processes."""
    nvme: int
    """NVMe bytes of a node."""
    traffic: Traffic | None
    offload_traffic: OffloadTraffic
    """Host-device and NVMe traffic of one rank in a step."""
    seconds: dict[str, float]
    """Seconds per step that each resource is busy; empty without a forward."""
    step: float | None
    micro_batch: int | None
    largest_batch: int | None
    """The largest micro-batch that fits, at most about `LARGEST_BATCH`; 0 if none fits; None without a forward."""
    shortages: tuple[Shortage, ...]
    spare: int
    """Free bytes of each GPU; negative if the setting does not fit."""
    is_tight: bool
    """Whether it fits, but leaves less than `MARGIN` of the GPU's memory."""

    @property
    def fits(self) -> bool:
        """Whether the machine has enough of every resource."""
        return not self.shortages

    @property
    def bound_by(self) -> str | None:
        """The resource that is busy longest."""
        return max(self.seconds, key=self.seconds.__getitem__) if self.seconds else None


def assumptions(question: Question) -> list[str]:
    """Return the assumptions behind a forecast, as sentences for the user."""
    notes = [*question.model.notes]
    if question.model.loss_of is not None:
        notes += [ATTENTION, "data-dependent checks in forward (e.g. on masks) are assumed to pass"]
    notes.append(
        f"outside torch's allocator: {CONTEXT / GB:.1f} GB of CUDA"
        f"{f' and {NCCL / GB:.1f} GB of NCCL' if question.machine.world > 1 else ''} (as on an H200)"
    )
    return notes


def forecast(
    question: Question,
    settings: Sequence[Setting],
    show_progress: Callable[[str, int, int], None] = lambda now, done, of: None,
    *,
    uses_nccl: bool = True,
    finds_batch: bool = True,
    timer: OpTimer | None = None,
) -> list[Forecast]:
    """Return a forecast for each setting.

    Settings that differ only in the tier of their states share a dry run. With `finds_batch` the largest micro-batch
    that fits is searched, too. With a `timer` the ops are timed on this machine instead of estimated from its rates.
    """
    dry_runs: dict[str, DryRun] = {}
    found: list[Forecast] = []

    def dry_run_of(setting: Setting, micro_batch: int) -> DryRun:
        offloads = [name in setting.zero for name in ("offload_optimizer", "offload_param")]
        zero = {key: value for key, value in setting.zero.items() if not key.startswith("offload")}
        key = f"{zero} {offloads} {micro_batch}"
        if key not in dry_runs:
            show_progress(f"{setting.name}, micro-batch {micro_batch}", len(found), len(settings))
            dry_runs[key] = _dry_run(question, setting, micro_batch, uses_nccl=uses_nccl)
        return dry_runs[key]

    for setting in settings:
        each = _forecast(question, setting, dry_run_of(setting, question.micro_batch or 1), timer)
        if finds_batch and each.step is not None:
            largest = _largest_batch(question, each, lambda batch, of=setting: dry_run_of(of, batch))  # type: ignore[misc]
            each = replace(each, largest_batch=largest)
        found.append(each)
    show_progress("", len(settings), len(settings))
    return found


def _dry_run(question: Question, setting: Setting, micro_batch: int, *, uses_nccl: bool) -> DryRun:
    machine, source = question.machine, question.model
    config = load_config(question.document(setting, micro_batch))
    if config.fp8.enabled and not (config.fp8.emulate or machine.gpu.has_fp8):
        raise PlanError(f"fp8.enabled: {machine.name} has no FP8 matrix products. Set it to false.")
    if machine.is_cpu:  # the inputs of checkpoints are in host memory anyway
        checkpoints = replace(config.activation_checkpointing, cpu_checkpointing=False)
        config = replace(config, activation_checkpointing=checkpoints)
    loss_of = None
    if question.micro_batch is not None and question.sequence_length is not None and source.loss_of is not None:
        loss_of = source.loss_of(micro_batch, question.sequence_length)
    nodes = Nodes.of_size(machine.gpus, machine.world)
    model = build_once(source.name, source.build)
    try:
        return dry_run(model, config, nodes, loss_of, vocabulary=source.vocabulary, uses_nccl=uses_nccl)
    except (PlanError, ConfigError):
        raise
    except Exception as error:  # a user's model may raise anything
        raise PlanError(
            f"{source.name}: the dry run on meta tensors fails ({type(error).__name__}: "
            f"{' '.join(str(error).split())}). Its forward may depend on values of tensors. Give --params to "
            "plan model states only."
        ) from error


def _forecast(question: Question, setting: Setting, found: DryRun, timer: OpTimer | None = None) -> Forecast:
    machine, micro_batch = question.machine, question.micro_batch or 1
    config = load_config(question.document(setting, micro_batch))
    plan, specs = _place(question, config, found)
    host_room = int(machine.host_memory * HOST_SHARE)
    device = _device_bytes(question, found, plan, specs)
    if plan.offload.cache_bytes is None and found.trace is not None and not machine.is_cpu:
        # The engine fills the memory that is left. This is no need: it frees copies if memory is short.
        room = filled_bytes(machine.gpu.memory, plan.offload.device_bytes) - device.total
        specs = assign_device_cache(specs, plan, room)
    on_host, on_disk = (count_bytes(specs, plan, tier) for tier in (Tier.HOST, Tier.NVME))
    host_node = machine.gpus * (on_host.total + found.host_inputs + PROCESS)
    nvme = machine.gpus * on_disk.total
    micro_steps = config.gradient_accumulation_steps or 1
    offload = count_offload_traffic(specs, plan, micro_steps, device_casts=True)
    moved = found.moved_inputs
    offload = replace(offload, down=offload.down + moved, up=offload.up + moved)
    traffic = _traffic(found, machine)
    seconds, step = _times(question, found, plan, specs, offload, traffic, micro_steps, timer)
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
    return Forecast(setting, *held, traffic, offload, seconds, step, shown, None, shortages, spare, is_tight)


def _place(question: Question, config: Config, found: DryRun) -> tuple[Plan, list[FlatParamSpec]]:
    """Return the plan of a setting, and its flat parameters with their tiers."""
    machine = question.machine
    plan = replace(make_plan(config, machine.world), accumulates=found.plan.accumulates, node_size=machine.gpus)
    flat = [spec for unit in found.units for spec in unit]
    host_bytes = int(machine.host_memory * HOST_SHARE) // machine.gpus
    limit = plan.offload.host_bytes
    for_second = host_bytes - PROCESS if limit is None else min(host_bytes - PROCESS, limit // machine.gpus)
    assigned = assign_second_states(
        assign_tiers(flat, plan, host_bytes=host_bytes),
        plan,
        for_second,
        keeps_half_free=limit is None,
        device_is_host=machine.is_cpu,
    )
    return plan, assign_device_cache(assigned, plan, plan.offload.cache_bytes or 0)


def _device_bytes(question: Question, found: DryRun, plan: Plan, specs: Sequence[FlatParamSpec]) -> DeviceBytes:
    stored = count_bytes(specs, plan)
    on_device = plan.gradients.tier is Tier.DEVICE
    # Offloaded gradients are on the device only until they are copied to the host.
    flat, reduced = (
        max((buffer.num_bytes for spec in specs for buffer in spec.buffers(plan) if buffer.name == name), default=0)
        for name in (FLAT_GRADIENT, REDUCED_GRADIENT)
    )
    cached = cached_bytes(specs, plan, [CACHED_GRADIENT])
    # On one rank without accumulation the gradient needs no separate sum.
    apart = plan.num_shards > 1 or plan.accumulates
    in_flight = (COPIES_IN_FLIGHT + 1) * flat + (COPIES_IN_FLIGHT * reduced if apart else 0)

    def gradients_of(moment: MemoryMoment) -> int:
        if question.machine.is_cpu:  # CPU ranks keep gradient buffers in pools
            return stored.gradients + found.pools
        return moment.gradients if on_device else min(moment.gradients, in_flight)

    if found.trace is None or not found.trace.moments:
        peak = MemoryMoment(0, 0, 0, 0, 0)
        gradients, activations = stored.gradients + stored.largest_slot, 0
    else:
        peak = max(found.trace.moments, key=lambda moment: moment.total - moment.gradients + gradients_of(moment))
        gradients = gradients_of(peak)
        activations = peak.live - peak.gradients - peak.logits + peak.unsplit
    kinds = {
        "parameters": stored.parameters,
        "gathered": peak.gathered,
        "gradients": gradients + (0 if on_device or question.machine.is_cpu else cached),
        "masters": stored.masters,
        "states": stored.states + found.matrix_bytes,
        "activations": activations,
        "logits": peak.logits,
        "workspace": (WORKSPACE if found.trace is not None else 0) + _streamed_chunks(question.machine, plan, specs),
    }
    reserve = int(sum(kinds.values()) * FRAGMENTATION)
    return DeviceBytes(**kinds, reserve=reserve, context=CONTEXT + (NCCL if question.machine.world > 1 else 0))


def _streamed_chunks(machine: Machine, plan: Plan, specs: Sequence[FlatParamSpec]) -> int:
    """Return the device memory for chunks of offloaded states and gradient sums that are streamed through the GPU.

    States from the host and states from NVMe have separate chunks.
    """
    largest = {Tier.HOST: 0, Tier.NVME: 0}
    sums = 0
    for spec in specs:
        if _is_streamed(machine, plan, spec):
            of_step = [each for each in spec.buffers(plan) if each.is_stepped or each.name == REDUCED_GRADIENT]
            needed, tier = sum(buffer.num_bytes for buffer in of_step), spec.residency.states
            largest[tier] = max(largest[tier], needed)
        if plan.accumulates and spec.trainable and spec.residency.offloads_states and not machine.is_cpu:
            sums = max(sums, min(spec.layout.shard_size, SUM_CHUNK) * 4)
    in_flight = {Tier.HOST: IN_FLIGHT_IN_BACKWARD if plan.steps_in_backward else IN_FLIGHT, Tier.NVME: IN_FLIGHT}
    return sum(in_flight[tier] * min(each, CHUNK_BYTES) for tier, each in largest.items()) + SUMS_IN_FLIGHT * sums


def _is_streamed(machine: Machine, plan: Plan, spec: FlatParamSpec) -> bool:
    offloads = spec.trainable and spec.residency.offloads_states
    return offloads and not machine.is_cpu and is_streamed(plan, spec)


def _traffic(found: DryRun, machine: Machine) -> Traffic | None:
    if found.traffic is None:
        return None
    rows = [row for row in found.traffic.rows() if row.operation != "synchronize"]
    across = sum(row.bytes for row in rows if row.group == ACROSS)
    inside = sum(row.bytes for row in rows if row.group != ACROSS)
    return Traffic(inside, across * machine.gpus, sum(row.calls for row in rows))


def _times(
    question: Question,
    found: DryRun,
    plan: Plan,
    specs: Sequence[FlatParamSpec],
    offload: OffloadTraffic,
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
    num_sharded = sum(not stays_unsharded(plan, spec) for spec in specs)
    sharding = num_sharded * machine.sharding * micro_steps
    boundary = sum(spec.trainable for spec in specs) * machine.boundary
    launches = work.num_ops * machine.launch * micro_steps
    if machine.is_cpu:  # the host runs the ops as well
        passes = max(passes * micro_steps, launches) + sharding + boundary
    else:
        passes = max(passes * micro_steps, launches + sharding + boundary)
    passes += found.matrix_flops / (gpu.flops * machine.efficiency)
    stepped, through = {True: 0, False: 0}, {Tier.HOST: 0, Tier.NVME: 0}
    for spec in specs:
        of_step = [buffer for buffer in spec.buffers(plan) if buffer.is_stepped]
        if _is_streamed(machine, plan, spec):
            through[spec.residency.states] += sum(buffer.num_bytes for buffer in of_step)
        elif spec.trainable:
            slower = _QUANTIZED_SLOWDOWN if spec.state_spec.formats and spec.residency.offloads_states else 1
            stepped[spec.residency.offloads_states] += slower * of_step[0].numel
    device_step = stepped[False] * _STEP_BYTES / (0.8 * gpu.bandwidth)
    if machine.is_cpu:
        device_step = stepped[False] * machine.gpus / machine.adam
    host_step = stepped[True] * machine.gpus / machine.adam
    seconds = {
        "computation": passes + device_step,
        "GPU links": traffic.inside / (0.8 * gpu.link) + traffic.calls * machine.call if machine.gpus > 1 else 0.0,
        "node links": traffic.across / (0.8 * machine.across) if machine.nodes > 1 else 0.0,
        "host bus": (max(offload.down, offload.up) - sum(through.values())) / gpu.bus,
        "state transfer": sum(through.values()) / gpu.bus,
        "CPU step": host_step,
        "disk": (offload.read + offload.written) * machine.gpus / machine.disk,
    }
    seconds = {name: value for name, value in seconds.items() if value}
    in_passes = [value for name, value in seconds.items() if name not in ("state transfer", "CPU step", "disk")]
    # The thread of the host step also streams states from NVMe through the GPU.
    by_thread = host_step + through[Tier.NVME] / gpu.bus
    after = max(sum(through.values()) / gpu.bus, by_thread, seconds.get("disk", 0.0))
    if (not plan.overlap and machine.world > 1) or machine.is_cpu:  # CPU ranks do not overlap communication
        return seconds, sum(in_passes) + after
    return seconds, max(in_passes) + after


# How many times slower the host steps quantized states than fp32 (`python -m benchmarks.host_step --forms-only`).
_QUANTIZED_SLOWDOWN = 5
# Bytes per element that an update on the device reads and writes.
_STEP_BYTES = 4 * (2 + 2 * 2) + 4 + 2


def _largest_batch(question: Question, each: Forecast, dry_run_of: Callable[[int], DryRun]) -> int:
    """Return the largest micro-batch that fits, see [Note: another batch without another dry run]."""
    given, memory = question.micro_batch or 1, question.machine.gpu.memory
    # A smaller micro-batch frees GPU memory, and host memory of the inputs of checkpoints.
    ranks, host_room = question.machine.gpus, int(question.machine.host_memory * HOST_SHARE)
    host_fixed = each.host_node - ranks * dry_run_of(given).host_inputs
    if host_fixed > host_room or any(shortage.resource == "NVMe" for shortage in each.shortages):
        return 0
    device = each.device
    if device.total - device.activations - device.logits - device.gradients - device.gathered > memory:
        return 0
    config = load_config(question.document(each.setting, given))
    plan, specs = _place(question, config, dry_run_of(given))
    known: dict[int, int] = {}

    def needed(batch: int) -> int:
        """Return the bytes of the GPU, or as many as they are a share of it if the host has the larger share."""
        if batch not in known:
            found = _dry_run_at(batch, given, dry_run_of)
            total = device.total if batch == given else _device_bytes(question, found, plan, specs).total
            of_host = (ranks * found.host_inputs) * memory // max(1, host_room - host_fixed)
            known[batch] = max(total, of_host if found.host_inputs else 0)
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
        # Memory grows almost linearly, so interpolation comes close; bisection guarantees that the search ends.
        share = 0.5 if halves else (memory - needed(fits)) / (needed(too_large) - needed(fits))
        middle = min(max(fits + int((too_large - fits) * share), fits + 1), too_large - 1)
        before = too_large - fits
        fits, too_large = (middle, too_large) if needed(middle) <= memory else (fits, middle)
        halves = not halves and too_large - fits > before // 2
    return fits


def _dry_run_at(batch: int, given: int, dry_run_of: Callable[[int], DryRun]) -> DryRun:
    """Return the dry run of another micro-batch, derived from two others where possible."""
    bases = [(given, 2 * given)] if batch > 1 else []
    bases += [(2, 3)] if given == 1 and batch > 1 else []
    for one, two in bases:
        low, high = dry_run_of(one), dry_run_of(two)
        if batch in (one, two):
            return low if batch == one else high
        assert low.tape is not None
        assert high.tape is not None
        sizes = low.tape.sizes_at(one, high.tape, two, batch)
        if sizes is not None:
            assert low.trace is not None
            replayed = low.tape.replay(sizes)
            growth = (high.host_inputs - low.host_inputs) * (batch - one) // (two - one)
            on_host = low.host_inputs + growth
            return replace(low, trace=PassTrace(replayed, low.trace.work), host_inputs=on_host)
    return dry_run_of(batch)
