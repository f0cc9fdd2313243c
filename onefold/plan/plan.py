"""The plan: all decisions that follow from config and number of ranks. Code above it does not read the config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

import torch

from onefold.config import Config, ConfigError, num_replicas
from onefold.config.precision import Fp16
from onefold.config.schema import Aio
from onefold.config.zero_optimization import LeafModule, OffloadOptimizer, OffloadParam
from onefold.plan.activations import Activations, make_activations
from onefold.plan.fp8_plan import Fp8Plan, make_fp8_plan
from onefold.plan.guards import Guards, make_guards
from onefold.plan.loop_options import Loop, Monitoring
from onefold.plan.optimizer_spec import OptimizerSpec, SchedulerSpec, make_optimizer_spec, make_scheduler_spec
from onefold.plan.program import Limits
from onefold.plan.state_formats import StateFormats


class Placement(Enum):
    """The distribution of one kind of model state over the ranks."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(Enum):
    """The memory that stores model state between uses."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Wire(Enum):
    """The format in which collectives send data."""

    NATIVE = "native"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True)
class StatePlan:
    """The placement, tier and wire format of one kind of model state."""

    placement: Placement
    tier: Tier = Tier.DEVICE
    wire: Wire = Wire.NATIVE


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters, gradients and buffers."""

    compute: torch.dtype | None = None
    """The dtype of model weights. None leaves the dtype of each parameter unchanged."""
    accumulate: torch.dtype = torch.float32
    """The dtype in which gradients are accumulated."""
    communicate: torch.dtype | None = None
    """The dtype in which gradients are reduced. None is the dtype of the model weight."""
    buffers: torch.dtype | None = None
    """The dtype of floating-point buffers. None casts only the buffers of torch's layers, to the compute dtype."""
    fp32_buffers: tuple[str, ...] = ()
    """Name patterns of buffers that are always fp32."""
    autocast: torch.dtype | None = None
    """The dtype of `torch.autocast` around the forward. None disables autocast."""
    casts_inputs: bool = False
    """Floating-point inputs of the model are cast to the compute dtype."""

    def of_parameter(self, dtype: torch.dtype) -> torch.dtype:
        return self.compute or dtype

    def of_gradient(self, dtype: torch.dtype, num_micro_steps: int) -> torch.dtype:
        """Return the dtype of an unsharded gradient before its reduction."""
        return dtype if num_micro_steps == 1 else self._accumulate(dtype)

    def of_reduced(self, dtype: torch.dtype, num_micro_steps: int, num_ranks: int) -> torch.dtype:
        """Return the narrowest dtype that stores a reduced gradient exactly."""
        return dtype if num_micro_steps == 1 and num_ranks == 1 else self._accumulate(dtype)

    def of_wire(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are reduced."""
        return self.communicate or dtype

    def _accumulate(self, dtype: torch.dtype) -> torch.dtype:
        # fp64 parameters have fp64 gradients, because users of fp64 expect its precision.
        return dtype if dtype == torch.float64 else self.accumulate


@dataclass(frozen=True)
class Cut:
    """The rules that split a model into units, and the limits of persistent parameters."""

    units: tuple[str, ...] = ()
    leaves: LeafModule = field(default_factory=LeafModule)
    persistence_threshold: int = 0
    """The largest size, in elements, of a persistent parameter, which stays unsharded."""
    persistence_in_all: int = 0
    """The largest number of elements of all persistent parameters together."""


@dataclass(frozen=True)
class Feedback:
    """Error feedback of quantized gradients: a moving average of the rounding errors, which is reset periodically."""

    beta: float
    reset_every: int


@dataclass(frozen=True)
class Scaling:
    """The factors of gradients and losses, and clipping."""

    prescale: float = 1.0
    """The factor of gradients before they are summed over ranks."""
    postscale: float = 1.0
    """The factor of gradients after they are summed over ranks."""
    loss_scale: Fp16 = field(default_factory=Fp16)
    """The loss scaling. It is also enabled for autocast to fp16."""
    clipping: float = 0.0


@dataclass(frozen=True)
class Offload:
    """The offload sections of the config, and the limits of device and host memory."""

    optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    param: OffloadParam = field(default_factory=OffloadParam)
    aio: Aio = field(default_factory=Aio)
    device_bytes: int | None = None
    host_bytes: int | None = None
    cache_bytes: int | None = None
    """Device memory for copies of offloaded state. None: it is measured after the first two steps."""

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is page-locked. States and parameters share one allocation."""
        return self.optimizer.pin_memory and self.param.pin_memory


@dataclass(frozen=True)
class Plan:
    """Placement, tier and wire format of parameters, gradients and optimizer states, and all other decisions.

    With replicated gradients every rank accumulates its unsharded local gradient and reduces it at the accumulation
    boundary. With sharded gradients each micro-step reduces into the gradient shard.
    """

    parameters: StatePlan
    gradients: StatePlan
    states: StatePlan
    stage: int = 0
    """The ZeRO stage, for reports only."""
    precision: Precision = field(default_factory=Precision)
    formats: StateFormats = field(default_factory=StateFormats)
    fp8: Fp8Plan | None = None
    cut: Cut = field(default_factory=Cut)
    scaling: Scaling = field(default_factory=Scaling)
    guards: Guards = field(default_factory=Guards)
    offload: Offload = field(default_factory=Offload)
    loop: Loop = field(default_factory=Loop)
    optimizer: OptimizerSpec | None = None
    scheduler: SchedulerSpec | None = None
    allows_untested_optimizer: bool = False
    """Optimizers of unknown classes may step shards."""
    collective: Literal["auto", "native", "exchange"] = "auto"
    num_shards: int = 1
    """The number of neighbouring ranks that together store one copy of the model state."""
    num_replicas: int = 1
    """The number of copies of the model state. It is more than one with MiCS."""
    shards_on_one_rank: bool = False
    """Parameters are resharded between uses on a single rank too, although that saves no memory."""
    node_size: int | None = None
    """The number of ranks per node. None uses the value of the launcher."""
    node_sums: torch.dtype = torch.float32
    """The dtype in which the gradient sums of a node are sent to other nodes."""
    node_shard_size: int = 1
    """The number of neighbouring ranks that together store a secondary copy of the parameters (hpZ). All all-gathers of
    a step except the first use it. 1 disables secondary shards."""
    frozen_wire: Wire = Wire.NATIVE
    """The wire format of frozen parameters."""
    feedback: Feedback | None = None
    """The error feedback of quantized gradients. None disables it."""
    accumulates: bool = False
    """A step has several micro-steps."""
    overlap: bool = False
    honours_writes: bool = True
    """The step copies in-place writes to model weights into the masters."""
    offloaded_step: Literal["auto", "host", "device", "both"] = "auto"
    """The processor that steps offloaded states."""
    delays_host: bool = False
    """The host's step overlaps the next forward and backward, which compute with weights that are one step old."""
    steps_in_backward: bool = False
    """Offloaded shards are stepped as soon as their gradients are reduced ([Note: the step under the backward])."""
    speculates: bool = False
    """The step under the backward is discarded if gradients are clipped or not finite ([Note: speculative steps])."""
    reduce_bucket: int = 500_000_000
    gather_bucket: int = 500_000_000
    limits: Limits = field(default_factory=Limits)
    sequence_size: int = 1
    """The number of neighbouring ranks that compute parts of the same sequences."""
    num_expert_parts: int = 1
    """The number of parts into which experts are divided over ranks."""
    activations: Activations = field(default_factory=Activations)

    @property
    def num_micro_steps(self) -> int:
        """The number of micro-steps that matters for dtypes and buffers: 1, or 2 for any larger number."""
        return 2 if self.accumulates else 1

    @property
    def shards_parameters(self) -> bool:
        return self.parameters.placement is Placement.SHARDED

    @property
    def keeps_unsharded_gradient(self) -> bool:
        return self.gradients.placement is Placement.REPLICATED

    @property
    def shards_states(self) -> bool:
        return self.states.placement is Placement.SHARDED

    def wire_of(self, *, trainable: bool) -> Wire:
        """Return the wire format in which trainable or frozen parameters are gathered."""
        return self.parameters.wire if trainable else self.frozen_wire


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
    """Compute the plan: the row of the stage in `TABLE`, changed by offload and quantized communication."""
    zero = config.zero_optimization
    parameters, gradients, states = (StatePlan(placement) for placement in TABLE[zero.stage])
    sharded = parameters.placement is Placement.SHARDED
    # A single rank sends nothing.
    communicates = world_size > 1
    frozen_wire = Wire.NATIVE
    if sharded and communicates and (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights):
        frozen_wire = Wire.INT8
    if sharded and communicates and zero.zero_quantized_weights:
        parameters = replace(parameters, wire=Wire.INT8)
    if zero.zero_quantized_gradients and communicates:
        gradients = replace(gradients, wire=Wire.INT4)
    optimizer_tier = TIERS[zero.offload_optimizer.device]
    # Unsharded parameters are always on the device.
    parameter_tier = TIERS[zero.offload_param.device] if sharded else Tier.DEVICE
    if optimizer_tier is not Tier.DEVICE:
        # The host accumulates micro-steps, so gradients are copied to it as soon as they are reduced.
        gradients = replace(gradients, placement=Placement.SHARDED, tier=Tier.HOST)
    elif not communicates:
        # With a single shard a reduction before the accumulation boundary saves nothing.
        gradients = replace(gradients, placement=Placement.REPLICATED)
    loco = zero.zeropp_loco_param if zero.zero_quantized_gradients and communicates else None
    overlap = sharded if zero.overlap_comm is None else zero.overlap_comm
    own, replicas = config.onefold, num_replicas(config, world_size)
    return Plan(
        parameters=replace(parameters, tier=parameter_tier),
        gradients=gradients,
        states=replace(states, tier=optimizer_tier),
        stage=zero.stage,
        precision=make_precision(config),
        formats=_formats(config),
        fp8=make_fp8_plan(config, world_size // replicas),
        cut=Cut(
            own.units,
            zero.leaf_module,
            zero.stage3_param_persistence_threshold,
            zero.stage3_model_persistence_threshold,
        ),
        scaling=_scaling(config, world_size),
        guards=make_guards(config),
        offload=Offload(
            zero.offload_optimizer,
            zero.offload_param,
            config.aio,
            device_bytes=int(own.device_memory * GB) if own.device_memory is not None else None,
            host_bytes=int(own.host_memory * GB) if own.host_memory is not None else None,
            cache_bytes=int(own.device_cache * GB) if own.device_cache is not None else None,
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
            stop=own.stop,
            stall=own.stall,
            peer_copies=own.peer_copies,
            record_folder=own.report,
            monitoring=Monitoring(
                config.tensorboard, config.csv_monitor, config.wandb, config.comet, own.metrics_address
            ),
        ),
        optimizer=make_optimizer_spec(config),
        scheduler=make_scheduler_spec(config),
        allows_untested_optimizer=config.zero_allow_untested_optimizer,
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
        steps_in_backward=_steps_in_backward(config),
        speculates=_steps_in_backward(config) and _depends_on_all_gradients(config),
        reduce_bucket=zero.reduce_bucket_size,
        gather_bucket=max(1, zero.allgather_bucket_size),
        limits=Limits(
            prefetch=zero.stage3_prefetch_bucket_size if overlap else 0,
            unsharded=zero.stage3_max_live_parameters,
            reuse=zero.stage3_max_reuse_distance,
        ),
        sequence_size=config.sequence_parallel_size,
        num_expert_parts=config.expert_parallel_size,
        activations=make_activations(config),
    )


def plan_every_stage(config: Config, world_size: int) -> dict[str, Plan]:
    """Compute the plan of each stage for the same config without offload."""
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
    """Compute plans that store less on the device, keyed by the config change that selects them.

    `takes_formats` is True if the optimizer supports quantized states and split masters.
    """
    zero = config.zero_optimization
    section = "zero_optimization"
    changes = {f"{section}.stage {stage}": replace(zero, stage=stage) for stage in TABLE if stage > zero.stage}
    offloads = zero.offload_optimizer.device != "none"
    offload = replace(zero.offload_optimizer, device="cpu") if not offloads else zero.offload_optimizer
    if not offloads:
        needs_stage = "" if zero.stage else f" with {section}.stage 1"
        name = f"{section}.offload_optimizer.device cpu{needs_stage}"
        changes[name] = replace(zero, stage=max(zero.stage, 1), offload_optimizer=offload)
    if zero.offload_param.device == "none":
        param = replace(zero.offload_param, device="cpu")
        parts = [f"{section}.offload_param.device cpu"]
        parts += [] if offloads else ["offload_optimizer.device cpu"]
        parts += [] if zero.stage == max(TABLE) else [f"stage {max(TABLE)}"]
        name = " with ".join([parts[0], " and ".join(parts[1:])]) if parts[1:] else parts[0]
        changes[name] = replace(zero, stage=max(TABLE), offload_optimizer=offload, offload_param=param)
    settings = {change: replace(config, zero_optimization=zero) for change, zero in changes.items()}
    formats = _formats(config)
    if takes_formats and formats.states == "fp32":
        settings["onefold.state_dtype int8"] = replace(config, onefold=replace(config.onefold, state_dtype="int8"))
    if takes_formats and formats.masters == "fp32" and config.bf16.enabled:
        split = replace(config.onefold, master_dtype="bf16_int16")
        settings["onefold.master_dtype bf16_int16"] = replace(config, onefold=split)
    return {change: make_plan(other, world_size) for change, other in settings.items()}


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
    """Return the formats selected by DeepSpeed's bf16 section, the name of the optimizer, or the onefold section."""
    own, bf16 = config.onefold, config.bf16
    return StateFormats(
        states=config.state_dtype,
        masters="bf16" if bf16.enabled and bf16.bf16_master_weights_and_grads else own.master_dtype,
        min_numel=own.int8_min_numel,
        fp32_names=own.fp32_state_names,
    )


def _scaling(config: Config, world_size: int) -> Scaling:
    scales_loss = config.fp16.enabled or (config.torch_autocast.enabled and config.autocast_dtype == "fp16")
    before = 1.0
    # The gradients of the ranks of a sequence add up to a multiple of the sum over sequences.
    after = 1.0 / config.sequence_parallel_size
    if config.gradient_allreduce_op != "sum":
        before = 1.0 / world_size if config.prescale_gradients else 1.0 / config.gradient_predivide_factor
        after = 1.0 / (world_size * before)
    return Scaling(
        prescale=before,
        postscale=after,
        loss_scale=replace(config.fp16, enabled=scales_loss),
        clipping=config.gradient_clipping,
    )


def _steps_in_backward(config: Config) -> bool:
    """Return whether offloaded shards are stepped under the backward. Raise if another key makes that impossible."""
    if not config.onefold.step_in_backward:
        return False
    if config.onefold.delayed_host_step:
        raise ConfigError(
            "onefold.step_in_backward is not possible with onefold.delayed_host_step, which steps during the next "
            "forward and backward. Change one of the two"
        )
    return config.zero_optimization.offload_optimizer.device != "none"


def _depends_on_all_gradients(config: Config) -> bool:
    """Return whether a step may be clipped or refused, which is known only after the last gradient."""
    return config.gradient_clipping > 0 or make_guards(config).may_refuse
