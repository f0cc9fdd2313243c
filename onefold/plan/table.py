"""The plan: a config and a number of ranks become every decision of a run. Above this package nobody reads a config or
compares a stage number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

import torch

from onefold.config import Config, ConfigError, num_replicas
from onefold.config.monitoring import Comet, FileMonitor, Wandb
from onefold.config.onefold_section import TraceSection
from onefold.config.precision import Fp16
from onefold.config.schema import Aio, CheckpointSection
from onefold.config.zero_optimization import LeafModule, OffloadOptimizer, OffloadParam
from onefold.plan.program import Limits
from onefold.plan.state_formats import StateFormats


class Placement(Enum):
    """Where the bytes of one kind of state are, over the ranks of the group."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(Enum):
    """Where bytes rest between uses."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Wire(Enum):
    """The form in which bytes travel."""

    NATIVE = "native"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True)
class Part:
    """The decision for one kind of state."""

    placement: Placement
    tier: Tier = Tier.DEVICE
    wire: Wire = Wire.NATIVE


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters and gradients. `compute` None: every parameter keeps the dtype it came with."""

    compute: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    communicate: torch.dtype | None = None
    buffers: torch.dtype | None = None
    """To which floating-point buffers are cast; None: those of torch's own layers follow the parameters."""
    fp32_buffers: tuple[str, ...] = ()
    """Patterns of names of buffers that are fp32 whatever `compute` and `buffers` say."""
    autocast: torch.dtype | None = None
    """Of `torch.autocast` around the forward; None: without it."""
    casts_inputs: bool = False
    """Floating-point inputs of the model are cast to the compute dtype."""

    def of_parameter(self, dtype: torch.dtype) -> torch.dtype:
        return self.compute or dtype

    def of_gradient(self, dtype: torch.dtype, num_micro_steps: int) -> torch.dtype:
        """The dtype in which a whole gradient waits for its reduction."""
        return dtype if num_micro_steps == 1 else self._accumulate(dtype)

    def of_reduced(self, dtype: torch.dtype, num_micro_steps: int, num_ranks: int) -> torch.dtype:
        """The narrowest dtype that holds a reduced gradient exactly (contract point 3)."""
        return dtype if num_micro_steps == 1 and num_ranks == 1 else self._accumulate(dtype)

    def of_wire(self, dtype: torch.dtype) -> torch.dtype:
        """Gradients travel as the parameters compute unless `communication_data_type` says otherwise."""
        return self.communicate or dtype

    def _accumulate(self, dtype: torch.dtype) -> torch.dtype:
        # fp64 parameters keep fp64 gradients: narrowing them would lose what the user asked for.
        return dtype if dtype == torch.float64 else self.accumulate


@dataclass(frozen=True)
class Cut:
    """Where a model is cut into units, and which parameters stay unsharded."""

    units: tuple[str, ...] = ()
    leaves: LeafModule = field(default_factory=LeafModule)
    persistence_threshold: int = 0
    """Parameters of at most so many elements are persistent,"""
    persistence_in_all: int = 0
    """as long as they come to no more than so many."""


@dataclass(frozen=True)
class Feedback:
    """Error feedback of quantized gradients: a moving average of what was lost, given up now and then."""

    beta: float
    reset_every: int


@dataclass(frozen=True)
class Scaling:
    """What gradients and losses are multiplied by, and when a step is not taken."""

    prescale: float = 1.0
    """Of gradients, before they are added over ranks."""
    postscale: float = 1.0
    """And after."""
    loss_scale: Fp16 = field(default_factory=Fp16)
    """Enabled where the loss is scaled, which autocast to fp16 needs too."""
    clipping: float = 0.0
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"


@dataclass(frozen=True)
class Offload:
    """How much goes below the device, and how it moves there: the config's sections, and what memory they may take."""

    optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    param: OffloadParam = field(default_factory=OffloadParam)
    aio: Aio = field(default_factory=Aio)
    device_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is page-locked: it is one piece, for states and for parameters."""
        return self.optimizer.pin_memory and self.param.pin_memory


@dataclass(frozen=True)
class Monitoring:
    """Where events of training go: the config's sections."""

    tensorboard: FileMonitor = field(default_factory=FileMonitor)
    csv_monitor: FileMonitor = field(default_factory=FileMonitor)
    wandb: Wandb = field(default_factory=Wandb)
    comet: Comet = field(default_factory=Comet)

    @property
    def enabled(self) -> bool:
        return any(section.enabled for section in (self.tensorboard, self.csv_monitor, self.wandb, self.comet))


@dataclass(frozen=True)
class Loop:
    """What the training loop prints, counts, reports and saves."""

    manages_accumulation: bool = True
    steps_per_print: int | None = None
    times_phases: bool = False
    reports_memory: bool = False
    drops_last_batch: bool = False
    pauses_collector: bool = False
    """Python's garbage collector is off while the engine is open."""
    gathers_weights_on_save: bool = False
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    trace: TraceSection = field(default_factory=TraceSection)
    record_folder: str | None = None
    """Where the record of the run is written."""
    monitoring: Monitoring = field(default_factory=Monitoring)

    @property
    def reports_steps(self) -> bool:
        """Whether anybody is told of every step."""
        return self.record_folder is not None or self.monitoring.enabled


@dataclass(frozen=True)
class Plan:
    """Placement, tier and wire of parameters, gradients and states, and every other decision.

    Gradients "replicated" means that every rank keeps its own unsharded partial gradient until the accumulation
    boundary and only then reduces it; "sharded" means that each micro-step reduces into the shard.
    """

    parameters: Part
    gradients: Part
    states: Part
    stage: int = 0
    """Only to be told."""
    precision: Precision = field(default_factory=Precision)
    formats: StateFormats = field(default_factory=StateFormats)
    cut: Cut = field(default_factory=Cut)
    scaling: Scaling = field(default_factory=Scaling)
    offload: Offload = field(default_factory=Offload)
    loop: Loop = field(default_factory=Loop)
    collective: Literal["auto", "native", "exchange"] = "auto"
    num_shards: int = 1
    """Neighbouring ranks that hold one whole model state between them,"""
    num_replicas: int = 1
    """and groups of them: more than one with MiCS."""
    shards_on_one_rank: bool = False
    """Parameters are placeholders between uses on a single rank too, although that saves nothing."""
    node_size: int | None = None
    """Ranks of one node; None: as many as the launcher says."""
    node_sums: torch.dtype = torch.float32
    """In what sums of a node's gradients cross to other nodes."""
    node_shard_size: int = 1
    """Neighbouring ranks that hold secondary shards of the parameters between them, for all gathers of a step but the
    first (hpZ); 1: none.
    """
    frozen_wire: Wire = Wire.NATIVE
    feedback: Feedback | None = None
    """What quantized gradients lose is kept and added to the next ones."""
    accumulates: bool = False
    """A step takes several micro-steps."""
    overlap: bool = False
    honours_writes: bool = True
    """The step looks for writes to unsharded parameters and takes them over into masters."""
    offloaded_step: Literal["auto", "host", "device", "both"] = "auto"
    """Who steps what rests below a GPU."""
    delays_host: bool = False
    """The host's step may last until the next one begins; devices compute with weights one step old meanwhile."""
    reduce_bucket: int = 500_000_000
    gather_bucket: int = 500_000_000
    limits: Limits = field(default_factory=Limits)

    @property
    def num_micro_steps(self) -> int:
        """1, or 2 for any larger number."""
        return 2 if self.accumulates else 1

    @property
    def shards_parameters(self) -> bool:
        return self.parameters.placement is Placement.SHARDED

    @property
    def keeps_whole_gradient(self) -> bool:
        return self.gradients.placement is Placement.REPLICATED

    @property
    def shards_states(self) -> bool:
        return self.states.placement is Placement.SHARDED

    def wire_of(self, *, trainable: bool) -> Wire:
        """In which parameters of a run are gathered."""
        return self.parameters.wire if trainable else self.frozen_wire

    def words(self, persistent: int = 0, num_parameters: int = 0) -> list[str]:
        """Describe the plan in a line each for parameters, gradients and optimizer states.

        `persistent` of `num_parameters` are below the persistence threshold, so they stay unsharded.
        """
        if self.num_shards == 1 and self.num_replicas == 1:
            parameters = gradients = states = "not sharded: there is 1 rank"
        else:
            parameters, gradients, states = self._placements(persistent, num_parameters)
        if not self.formats.are_plain:
            states += f", masters as {self.formats.masters}, states as {self.formats.states}"
        if self.delays_host:
            states += ", stepped beside the next forward and backward (INEXACT: delayed_host_step)"
        frozen = "" if self.frozen_wire is self.parameters.wire else f", frozen ones as {self.frozen_wire.value}"
        return [
            f"parameters        {parameters}, {_rest(self.parameters)}{frozen}",
            f"gradients         {gradients}, {_rest(self.gradients)}",
            f"optimizer states  {states}, {_rest(self.states)}",
        ]

    def _placements(self, persistent: int, num_parameters: int) -> tuple[str, str, str]:
        parameters = "replicated: every rank holds all of them"
        if self.shards_parameters:
            over = f" over every {self.num_shards} ranks" if self.num_replicas > 1 else ""
            parameters = f"sharded{over}: whole only while they are used"
            if self.node_shard_size > 1:
                parameters += f", a secondary shard among every {self.node_shard_size} ranks"
            if 0 < persistent < num_parameters:
                parameters += f", but for {persistent:,} below the persistence threshold"
            elif persistent:
                parameters = "unsharded: all are below the persistence threshold, and every rank holds all of them"
        gradients = "sharded after every micro-step"
        if self.keeps_whole_gradient:
            gradients = "whole until the accumulation boundary, then "
            gradients += "sharded" if self.shards_states else "averaged"
        states = "replicated: every rank steps everything"
        if self.shards_states:
            states = "sharded: every rank holds and steps its own part"
        return parameters, gradients, states


def _rest(part: Part) -> str:
    place = {Tier.DEVICE: "on the device", Tier.HOST: "in host memory", Tier.NVME: "on NVMe"}[part.tier]
    return place if part.wire is Wire.NATIVE else f"{place}, travelling as {part.wire.value}"


# stage -> (parameters, gradients, states)
TABLE: dict[int, tuple[Placement, Placement, Placement]] = {
    0: (Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
    1: (Placement.REPLICATED, Placement.REPLICATED, Placement.SHARDED),
    2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}

GB = 1_000_000_000

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_plan(config: Config, world_size: int) -> Plan:
    """A row of the table, with the columns that offload and quantized wires change."""
    zero = config.zero_optimization
    parameters, gradients, states = (Part(placement) for placement in TABLE[zero.stage])
    sharded = parameters.placement is Placement.SHARDED
    # One rank's shard is everything: nothing travels.
    travels = world_size > 1
    frozen_wire = Wire.NATIVE
    if sharded and travels and (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights):
        frozen_wire = Wire.INT8
    if sharded and travels and zero.zero_quantized_weights:
        parameters = replace(parameters, wire=Wire.INT8)
    if zero.zero_quantized_gradients and travels:
        gradients = replace(gradients, wire=Wire.INT4)
    optimizer_tier = TIERS[zero.offload_optimizer.device]
    # Unsharded parameters are on the device all the time.
    parameter_tier = TIERS[zero.offload_param.device] if sharded else Tier.DEVICE
    if optimizer_tier is not Tier.DEVICE:
        # The host adds micro-steps up, so that no accumulator fills the device: what is reduced leaves it at once.
        gradients = replace(gradients, placement=Placement.SHARDED, tier=Tier.HOST)
    elif not travels:
        # Nothing is gained by reducing a gradient to the only shard before the boundary.
        gradients = replace(gradients, placement=Placement.REPLICATED)
    loco = zero.zeropp_loco_param if zero.zero_quantized_gradients and travels else None
    overlap = sharded if zero.overlap_comm is None else zero.overlap_comm
    own, replicas = config.onefold, num_replicas(config, world_size)
    return Plan(
        parameters=replace(parameters, tier=parameter_tier),
        gradients=gradients,
        states=replace(states, tier=optimizer_tier),
        stage=zero.stage,
        precision=make_precision(config),
        formats=_formats(config),
        cut=Cut(
            own.units,
            zero.leaf_module,
            zero.stage3_param_persistence_threshold,
            zero.stage3_model_persistence_threshold,
        ),
        scaling=_scaling(config, world_size),
        offload=Offload(
            zero.offload_optimizer,
            zero.offload_param,
            config.aio,
            device_bytes=int(own.device_memory * GB) if own.device_memory is not None else None,
            host_bytes=int(own.host_memory * GB) if own.host_memory is not None else None,
        ),
        loop=Loop(
            manages_accumulation=config.managed_gradient_accumulation,
            steps_per_print=config.steps_per_print or (10 if config.wall_clock_breakdown else None),
            times_phases=config.wall_clock_breakdown,
            reports_memory=config.memory_breakdown,
            drops_last_batch=config.dataloader_drop_last,
            pauses_collector=config.disable_python_gc,
            gathers_weights_on_save=zero.stage3_gather_16bit_weights_on_model_save,
            checkpoint=config.checkpoint,
            trace=own.trace,
            record_folder=own.report,
            monitoring=Monitoring(config.tensorboard, config.csv_monitor, config.wandb, config.comet),
        ),
        collective=own.collective,
        num_shards=world_size // replicas,
        num_replicas=replicas,
        node_size=own.node_size,
        node_sums=DTYPES[own.node_sums_dtype],
        node_shard_size=max(1, zero.zero_hpz_partition_size) if sharded else 1,
        frozen_wire=frozen_wire,
        feedback=Feedback(loco.err_beta, loco.reset_T) if loco is not None else None,
        overlap=overlap,
        honours_writes=own.honour_writes,
        offloaded_step=own.offloaded_step,
        delays_host=own.delayed_host_step and optimizer_tier is not Tier.DEVICE,
        reduce_bucket=zero.reduce_bucket_size,
        gather_bucket=max(1, zero.allgather_bucket_size),
        limits=Limits(
            prefetch=zero.stage3_prefetch_bucket_size if overlap else 0,
            live=zero.stage3_max_live_parameters,
            reuse=zero.stage3_max_reuse_distance,
        ),
    )


def plan_every_stage(config: Config, world_size: int) -> dict[str, Plan]:
    """The plan that each stage would have made of the same config, with nothing offloaded."""
    zero = config.zero_optimization
    zero = replace(
        zero,
        offload_optimizer=replace(zero.offload_optimizer, device="none"),
        offload_param=replace(zero.offload_param, device="none"),
    )
    return {
        f"stage {stage}": make_plan(replace(config, zero_optimization=replace(zero, stage=stage)), world_size)
        for stage in TABLE
    }


def plan_with_less(config: Config, world_size: int, *, takes_formats: bool = False) -> dict[str, Plan]:
    """Plans of the same config that hold less on the device, by the keys that make them. `takes_formats`: the optimizer
    can have states and masters in fewer bytes.
    """
    zero = config.zero_optimization
    section = "zero_optimization"
    ways = {f"{section}.stage {stage}": replace(zero, stage=stage) for stage in TABLE if stage > zero.stage}
    offloads = zero.offload_optimizer.device != "none"
    if not offloads:
        below = replace(zero, stage=max(zero.stage, 1), offload_optimizer=replace(zero.offload_optimizer, device="cpu"))
        needs_stage = "" if zero.stage else f" with {section}.stage 1"
        ways[f"{section}.offload_optimizer.device cpu{needs_stage}"] = below
    if zero.offload_param.device == "none":
        offload = replace(zero.offload_optimizer, device="cpu") if not offloads else zero.offload_optimizer
        param = replace(zero.offload_param, device="cpu")
        parts = [f"{section}.offload_param.device cpu"]
        parts += [] if offloads else ["offload_optimizer.device cpu"]
        parts += [] if zero.stage == max(TABLE) else [f"stage {max(TABLE)}"]
        below = replace(zero, stage=max(TABLE), offload_optimizer=offload, offload_param=param)
        ways[" with ".join([parts[0], " and ".join(parts[1:])]) if parts[1:] else parts[0]] = below
    settings = {way: replace(config, zero_optimization=zero) for way, zero in ways.items()}
    formats = _formats(config)
    if takes_formats and formats.states == "fp32":
        settings["onefold.state_dtype int8"] = replace(config, onefold=replace(config.onefold, state_dtype="int8"))
    if takes_formats and formats.masters == "fp32" and config.bf16.enabled:
        rest = replace(config.onefold, master_dtype="bf16_int16")
        settings["onefold.master_dtype bf16_int16"] = replace(config, onefold=rest)
    return {way: make_plan(other, world_size) for way, other in settings.items()}


def make_precision(config: Config) -> Precision:
    compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    accumulate, communicate = config.data_types.grad_accum_dtype, config.communication_data_type
    if accumulate is None and config.bf16.enabled and config.bf16.bf16_master_weights_and_grads:
        accumulate = "bf16"
    buffers, autocast = config.data_types.buffer_dtype, config.torch_autocast
    return Precision(
        compute=compute,
        accumulate=DTYPES[accumulate] if accumulate else torch.float32,
        communicate=DTYPES[communicate] if communicate else None,
        buffers=DTYPES[buffers] if buffers else None,
        fp32_buffers=config.data_types.keep_in_fp32_modules,
        autocast=DTYPES[config.autocast_dtype] if autocast.enabled else None,
        casts_inputs=config.fp16.enabled and config.fp16.auto_cast,
    )


def _formats(config: Config) -> StateFormats:
    """DeepSpeed's switches of its bf16 section, an optimizer's name, or keys of ours."""
    own, bf16 = config.onefold, config.bf16
    return StateFormats(
        states=config.state_dtype,
        masters="bf16" if bf16.enabled and bf16.bf16_master_weights_and_grads else own.master_dtype,
        min_numel=own.int8_min_numel,
        fp32_names=own.fp32_state_names,
    )


def _scaling(config: Config, world_size: int) -> Scaling:
    scales_loss = config.fp16.enabled or (config.torch_autocast.enabled and config.autocast_dtype == "fp16")
    before = after = 1.0
    if config.gradient_allreduce_op != "sum":
        before = 1.0 / world_size if config.prescale_gradients else 1.0 / config.gradient_predivide_factor
        after = 1.0 / (world_size * before)
    return Scaling(
        prescale=before,
        postscale=after,
        loss_scale=replace(config.fp16, enabled=scales_loss),
        clipping=config.gradient_clipping,
        nonfinite=_nonfinite(config, scales_loss=scales_loss),
    )


def _nonfinite(config: Config, *, scales_loss: bool) -> Literal["raise", "skip", "ignore"]:
    """fp16 and bf16 do as DeepSpeed does; otherwise such a step would make every weight NaN, and raises."""
    asked = config.onefold.nonfinite_gradients
    if scales_loss:
        if asked not in ("auto", "skip"):
            raise ConfigError(
                f"onefold.nonfinite_gradients is {asked!r} with fp16: the loss scale is found by gradients that "
                'overflow, and such steps are always skipped. Leave it out or write "skip"'
            )
        return "skip"
    if asked != "auto":
        return asked
    if config.bf16.enabled:
        return "skip" if config.bf16.check_grad_overflow else "ignore"
    return "raise"
