"""The plan of an engine in words, with the bytes that one rank holds of each model state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onefold.config import Batch
from onefold.log import format_bytes
from onefold.optim.step import ShardedStep
from onefold.plan import (
    BufferBytes,
    FlatParamSpec,
    ModelBytes,
    OffloadTraffic,
    Plan,
    StatePlan,
    Tier,
    Wire,
    count_buffers,
    count_bytes,
    count_unit_in_use,
)
from onefold.plan.activations import Activations
from onefold.plan.buffers import CACHED_GRADIENT, CACHED_PARAMETER
from onefold.plan.device_cache import cached_bytes
from onefold.plan.speculation import second_bytes
from onefold.plan.traffic import is_stepped_early, is_streamed
from onefold.runtime import Schedule, Unit
from onefold.runtime.batch_chunks import ROWS_OF_CHUNK
from onefold.runtime.tiled_modules import TiledForward


def planned_bytes(units: Sequence[Unit], plan: Plan, tier: Tier, *, on_device: bool = False) -> ModelBytes:
    """Compute the planned bytes of model state in one tier. With `on_device`, as if nothing were offloaded."""
    specs = [param.spec for unit in units for param in unit.params]
    if on_device:
        specs = [s.on_device for s in specs]
    return count_bytes(specs, plan, tier)


def planned_buffers(schedule: Schedule, plan: Plan, step: ShardedStep | None, *, keeps: bool) -> BufferBytes:
    """Compute the planned bytes of buffers. `keeps` is True if pools retain freed buffers, as on a CPU."""
    reductions, refreshes = (
        [[param.spec for unit in batch for param in unit.trained_params] for batch in batches]
        for batches in (schedule.order.reduction_batches, schedule.order.step_batches)
    )
    units = [[param.spec for param in unit.params] for unit in schedule.units]
    pools = count_buffers(reductions, refreshes, plan) if keeps else 0
    matrices = 0
    if step is not None and step.matrices is not None:
        stores = [[p.store for unit in batch for p in unit.trained_params] for batch in schedule.order.step_batches]
        matrices = step.matrices.planned_bytes(stores)
    return BufferBytes(pools, count_unit_in_use(units, plan), matrices)


def held_bytes(schedule: Schedule, step: ShardedStep | None, tier: Tier) -> ModelBytes:
    """Count the allocated bytes of model state of this rank in one tier."""
    params = [param for unit in schedule.units for param in unit.params]
    return ModelBytes(
        parameters=sum(param.param_bytes(tier) for param in params),
        gradients=sum(param.grad.num_bytes(tier) for param in schedule.trained_params()),
        masters=step.master_bytes(tier) if step is not None else 0,
        states=step.states.state_bytes(tier) if step is not None else 0,
        largest_slot=schedule.in_flight.pool.num_bytes if tier is Tier.DEVICE else 0,
    )


def describe(
    units: Sequence[Unit],
    plan: Plan,
    sizes: Mapping[Tier, ModelBytes],
    buffers: BufferBytes,
    offload_traffic: OffloadTraffic,
    folders: Mapping[str, int],
    batch: Batch,
    optimizer: str | None,
    collective: str,
    fp8: str,
    experts: str,
) -> str:
    """Describe the placement of model state and the bytes of one rank.

    `folders` has the bytes in each swap folder, `fp8` describes the layers that multiply in FP8, `experts` those
    whose experts are divided.
    """
    params = [param for unit in units for param in unit.params]
    trained = sum(param.layout.numel for param in params if param.trainable)
    frozen = sum(param.layout.numel for param in params if not param.trainable)
    persistent = sum(param.layout.numel for param in params if param.spec.persistent)
    dtypes = ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params}))
    num_ranks = plan.num_shards * plan.num_replicas
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    model = f"{trained:,} trained parameters{f' and {frozen:,} frozen' if frozen else ''} in {len(units)} units"
    if optimizer is None:
        model = f"no optimizer: nothing will be trained ({trained + frozen:,} parameters in {len(units)} units)"
    lines = [
        f"ZeRO stage {plan.stage} on {ranks}, {optimizer or 'no optimizer'}, {dtypes}, {collective} collectives, "
        f"overlap {'on' if plan.overlap else 'off'}",
        f"model             {model}",
        *describe_placement(plan, persistent, trained + frozen),
    ]
    used = [tier for tier in Tier if sizes[tier].total or tier is Tier.DEVICE]
    for number, tier in enumerate(used):
        where = "" if used == [Tier.DEVICE] else f"{tier.value}: "
        kinds_of_state = ("parameters", "gradients", "masters", "states", "total")
        label = "bytes per rank" if number == 0 else ""
        lines.append(f"{label:<18}{where}{_spell(sizes[tier], kinds_of_state)}")
    if len(folders) > 1:
        total = sum(folders.values())
        shares = (f"{path} {format_bytes(size)} ({size / total:.0%})" for path, size in folders.items())
        lines.append(f"on NVMe           {', '.join(shares)}")
    slot = sizes[Tier.DEVICE].largest_slot
    if slot:
        lines.append(f"in backward       one more buffer per open unit, at most {format_bytes(slot)} each")
    in_use = f"largest unit in use {format_bytes(buffers.unit_in_use)}"
    pools = f"pools {format_bytes(buffers.pools)}, " if buffers.pools else ""
    matrices = f", whole matrices {format_bytes(buffers.matrices)}" if buffers.matrices else ""
    process = " and the process itself" if buffers.pools else ""  # on a CPU, Python and libraries share its memory
    lines.append(f"other buffers     {pools}{in_use}{matrices}; activations{process} come on top")
    if offloaded := [param for unit in units for param in unit.trained_params if param.store.is_offloaded]:
        on_gpu = [param for param in offloaded if param.store.device.type == "cuda"]
        by_gpu = sum(param.layout.numel for param in on_gpu if is_streamed(plan, param.spec))
        by_host = sum(param.layout.numel for param in offloaded) - by_gpu
        on_gpus = f", by the GPU {by_gpu:,}" if on_gpu else ""
        lines.append(f"offloaded step    by the host {by_host:,} parameters{on_gpus}")
    specs = [param.spec for param in params]
    gradients, parameters = (cached_bytes(specs, plan, [name]) for name in (CACHED_GRADIENT, CACHED_PARAMETER))
    if gradients or parameters:
        lines.append(f"device cache      gradients {format_bytes(gradients)}, parameters {format_bytes(parameters)}")
    if plan.steps_in_backward:
        lines.append("step in backward  " + _describe_early_step(specs, plan))
    if plan.sequence_size > 1:
        groups = f"{batch.world} group{'s' * (batch.world > 1)} of {plan.sequence_size} ranks"
        lines.append(f"sequences         {groups}, each of which computes one micro-batch in parts")
    if experts:
        lines.append(f"experts           {experts}")
    if fp8:
        lines.append(f"FP8               {fp8}")
    lines += _describe_activations(units, plan.activations)
    if offload_traffic.any:
        lines.append("bytes per step    " + _spell(offload_traffic, ("down", "up", "read", "written")))
    return "\n".join(lines)


def _describe_activations(units: Sequence[Unit], plan: Activations) -> list[str]:
    """Describe what is computed in chunks and tiles, and where the inputs of checkpoints are."""
    lines = []
    about = f"of about {ROWS_OF_CHUNK:,} tokens"
    if plan.batch_chunks != 0:
        blocks = [unit for unit in units if unit.is_block and not unit.encloses]
        chunks = f"{plan.batch_chunks} chunks" if plan.batch_chunks else f"chunks {about}"
        # The fp32 sums of a block, and the gradients of the chunk that is added to them.
        of_blocks = [sum(p.layout.numel * (4 + p.dtype.itemsize) for p in unit.trained_params) for unit in blocks]
        lines.append(f"batch chunks      {len(blocks)} blocks compute and recompute each micro-batch in {chunks};")
        lines.append(f"                  gradient sums of a block {format_bytes(max(of_blocks, default=0))}")
    if plan.loss_tiles != 0:
        tiles = f"{plan.loss_tiles} tiles" if plan.loss_tiles else "tiles of about 256 MiB of logits"
        lines.append(f"tiled loss        logits and loss in {tiles}, in training")
    if plan.mlp_tiles != 0:
        forwards = (module.forward for unit in units for module in unit.module.modules())
        tiled = {id(forward) for forward in forwards if isinstance(forward, TiledForward)}
        tiles = f"{plan.mlp_tiles} tiles" if plan.mlp_tiles else f"tiles {about}"
        lines.append(f"tiled MLPs        {len(tiled)} modules compute and recompute their tokens in {tiles}")
    if plan.cuda_graphs != "off":
        blocks = [unit for unit in units if unit.is_block and not unit.encloses]
        captured = {"model": "the model", "blocks": f"{len(blocks)} blocks"}.get(
            plan.cuda_graphs, "the model or blocks"
        )
        lines.append(f"CUDA graphs       forward and backward of {captured}, from the fourth call on")
    if plan.host_checkpoints:
        lines.append("checkpoints       inputs of recomputed functions in host memory")
    return lines


def _spell(sizes: ModelBytes | OffloadTraffic, names: Sequence[str]) -> str:
    """Format the sizes that are not zero, and the total."""
    found = {name: getattr(sizes, name) for name in names}
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in found.items() if size or name == "total")


def _describe_early_step(specs: Sequence[FlatParamSpec], plan: Plan) -> str:
    offloaded = sum(spec.layout.numel for spec in specs if spec.trainable and spec.residency.offloads_states)
    early = sum(spec.layout.numel for spec in specs if is_stepped_early(plan, spec))
    stepped = f"{early:,} of {offloaded:,} offloaded parameters"
    if not plan.speculates:
        return stepped
    return (
        f"{stepped}, speculatively; second masters and states {format_bytes(second_bytes(specs, plan))} in host memory"
    )


def describe_placement(plan: Plan, persistent: int = 0, num_parameters: int = 0) -> list[str]:
    """Describe the placement of parameters, gradients and optimizer states in one line each.

    `persistent` of `num_parameters` elements belong to persistent parameters, which stay unsharded.
    """
    if plan.num_shards == 1 and plan.num_replicas == 1:
        parameters = gradients = states = "not sharded (1 rank)"
    else:
        parameters, gradients, states = _placements(plan, persistent, num_parameters)
    if not plan.formats.are_plain:
        states += f", masters as {plan.formats.masters}, states as {plan.formats.states}"
    if plan.delays_host:
        states += ", stepped during the next forward and backward (INEXACT: delayed_host_step)"
    frozen = "" if plan.frozen_wire is plan.parameters.wire else f", frozen ones as {plan.frozen_wire.value}"
    return [
        f"parameters        {parameters}, {_stored(plan.parameters)}{frozen}",
        f"gradients         {gradients}, {_stored(plan.gradients)}",
        f"optimizer states  {states}, {_stored(plan.states)}",
    ]


def _placements(plan: Plan, persistent: int, num_parameters: int) -> tuple[str, str, str]:
    parameters = "replicated: every rank holds all of them"
    if plan.shards_parameters:
        over = f" over every {plan.num_shards} ranks" if plan.num_replicas > 1 else ""
        parameters = f"sharded{over}: unsharded only while they are used"
        if plan.node_shard_size > 1:
            parameters += f", a secondary shard among every {plan.node_shard_size} ranks"
        if 0 < persistent < num_parameters:
            parameters += f", but for {persistent:,} below the persistence threshold"
        elif persistent:
            parameters = "unsharded: all are below the persistence threshold, and every rank holds all of them"
    gradients = "sharded after every micro-step"
    if plan.keeps_unsharded_gradient:
        gradients = "unsharded until the accumulation boundary, then "
        gradients += "sharded" if plan.shards_states else "averaged"
    states = "replicated: every rank steps everything"
    if plan.shards_states:
        states = "sharded: every rank holds and steps its own part"
    return parameters, gradients, states


def _stored(part: StatePlan) -> str:
    place = {Tier.DEVICE: "on the device", Tier.HOST: "in host memory", Tier.NVME: "on NVMe"}[part.tier]
    return place if part.wire is Wire.NATIVE else f"{place}, communicated as {part.wire.value}"
