"""The table: a config becomes placements, tiers and wires. Above this file nobody knows a stage number."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from onefold.config import Config
from onefold.plan.program import Limits


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
    """The dtypes of a run. `compute` None: every parameter keeps the dtype it came with."""

    compute: torch.dtype | None
    accumulate: torch.dtype
    communicate: torch.dtype | None

    def of_parameter(self, dtype: torch.dtype) -> torch.dtype:
        return self.compute or dtype

    def of_gradient(self, dtype: torch.dtype, num_micro_steps: int) -> torch.dtype:
        """The dtype in which a whole gradient waits for its reduction."""
        return dtype if num_micro_steps == 1 else self._accumulate(dtype)

    def of_reduced(self, dtype: torch.dtype, num_micro_steps: int, world_size: int) -> torch.dtype:
        """The narrowest dtype that holds a reduced gradient exactly (contract point 3)."""
        if num_micro_steps == 1 and world_size == 1:
            return dtype
        return self._accumulate(dtype)

    def of_wire(self, dtype: torch.dtype) -> torch.dtype:
        """Gradients travel as the parameters compute unless `communication_data_type` says otherwise."""
        return self.communicate or dtype

    def _accumulate(self, dtype: torch.dtype) -> torch.dtype:
        # fp64 parameters keep fp64 gradients: narrowing them would lose what the user asked for.
        return dtype if dtype == torch.float64 else self.accumulate


@dataclass(frozen=True)
class Plan:
    """Placement, tier and wire of parameters, gradients and states.

    Gradients "replicated" means that every rank keeps its own whole partial gradient until the accumulation
    boundary and only then reduces it; "sharded" means that each micro-step reduces into the shard.
    """

    parameters: Part
    gradients: Part
    states: Part
    node_shard_size: int = 1
    """Neighbouring ranks that hold a second shard of the parameters between them, for all gathers of a step but the
    first; 1: none.
    """
    frozen_wire: Wire = Wire.NATIVE
    part_size: int | None = None
    """Neighbouring ranks that hold one whole model state between them; None: all ranks."""
    makes_up: bool = False
    """What quantized gradients lose is kept and added to the next ones."""
    overlap: bool = False
    honours_writes: bool = True
    """The step looks for writes to unsharded parameters and takes them over into masters."""
    delays_host: bool = False
    """The host's step may last until the next one begins; devices compute with weights one step old meanwhile."""
    reduce_bucket: int = 500_000_000
    gather_bucket: int = 500_000_000
    limits: Limits = field(default_factory=Limits)

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

    def for_world(self, size: int) -> Plan:
        """One rank's shard is the whole: nothing travels, and nothing is gained by reducing a gradient to it before the
        boundary, unless it goes to the host then.
        """
        if size > 1:
            return self
        parameters, gradients = (replace(part, wire=Wire.NATIVE) for part in (self.parameters, self.gradients))
        if gradients.tier is Tier.DEVICE:
            gradients = replace(gradients, placement=Placement.REPLICATED)
        return replace(self, parameters=parameters, gradients=gradients, frozen_wire=Wire.NATIVE, makes_up=False)

    def words(self) -> list[str]:
        """The plan as three sentences, for people."""
        if self.shards_parameters:
            over = f" over every {self.part_size} ranks" if self.part_size is not None else ""
            parameters = f"sharded{over}: whole only while they are used"
            if self.node_shard_size > 1:
                parameters += f", a second shard among every {self.node_shard_size} ranks"
        else:
            parameters = "replicated: every rank holds all of them"
        if self.keeps_whole_gradient:
            gradients = "whole until the accumulation boundary, then sharded"
        else:
            gradients = "sharded after every micro-step"
        if self.shards_states:
            states = "sharded: every rank holds and steps its own part"
        else:
            states = "replicated: every rank steps everything"
        if self.delays_host:
            states += ", stepped beside the next forward and backward (INEXACT: delayed_host_step)"
        frozen = "" if self.frozen_wire is self.parameters.wire else f", frozen ones as {self.frozen_wire.value}"
        return [
            f"parameters        {parameters}, {_rest(self.parameters)}{frozen}",
            f"gradients         {gradients}, {_rest(self.gradients)}",
            f"optimizer states  {states}, {_rest(self.states)}",
        ]


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

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_plan(config: Config) -> Plan:
    """A row of the table, with the columns that offload and quantized wires change."""
    zero = config.zero_optimization
    parameters, gradients, states = (Part(placement) for placement in TABLE[zero.stage])
    sharded = parameters.placement is Placement.SHARDED
    frozen_wire = Wire.NATIVE
    if sharded and (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights):
        frozen_wire = Wire.INT8
    if sharded and zero.zero_quantized_weights:
        parameters = replace(parameters, wire=Wire.INT8)
    if zero.zero_quantized_gradients:
        gradients = replace(gradients, wire=Wire.INT4)
    optimizer_tier = TIERS[zero.offload_optimizer.device]
    # Whole parameters are on the device all the time.
    parameter_tier = TIERS[zero.offload_param.device] if sharded else Tier.DEVICE
    if optimizer_tier is not Tier.DEVICE:
        # The host adds micro-steps up, so that no accumulator fills the device: what is reduced leaves it at once.
        gradients = replace(gradients, placement=Placement.SHARDED, tier=Tier.HOST)
    overlap = sharded if zero.overlap_comm is None else zero.overlap_comm
    return Plan(
        parameters=replace(parameters, tier=parameter_tier),
        gradients=gradients,
        states=replace(states, tier=optimizer_tier),
        node_shard_size=zero.zero_hpz_partition_size if sharded else 1,
        part_size=zero.mics_shard_size if sharded and zero.mics_shard_size > 0 else None,
        frozen_wire=frozen_wire,
        makes_up=zero.zero_quantized_gradients and zero.zeropp_loco_param is not None,
        overlap=overlap,
        honours_writes=config.onefold.honour_writes,
        delays_host=config.onefold.delayed_host_step and optimizer_tier is not Tier.DEVICE,
        reduce_bucket=zero.reduce_bucket_size,
        gather_bucket=zero.allgather_bucket_size,
        limits=Limits(
            prefetch=zero.stage3_prefetch_bucket_size if overlap else 0,
            live=zero.stage3_max_live_parameters,
            reuse=zero.stage3_max_reuse_distance,
        ),
    )


def every_stage(config: Config) -> dict[str, Plan]:
    """The plan that each stage would have made of the same config."""
    zero = config.zero_optimization
    return {
        f"stage {stage}": make_plan(replace(config, zero_optimization=replace(zero, stage=stage))) for stage in TABLE
    }


def make_precision(config: Config) -> Precision:
    compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    accumulate, communicate = config.data_types.grad_accum_dtype, config.communication_data_type
    return Precision(
        compute=compute,
        accumulate=DTYPES[accumulate] if accumulate else torch.float32,
        communicate=DTYPES[communicate] if communicate else None,
    )


def gradient_factors(config: Config, world_size: int) -> tuple[float, float]:
    """What gradients are multiplied by before and after they are added over ranks."""
    if config.gradient_allreduce_op == "sum":
        return 1.0, 1.0
    before = 1.0 / world_size if config.prescale_gradients else 1.0 / config.gradient_predivide_factor
    return before, 1.0 / (world_size * before)
