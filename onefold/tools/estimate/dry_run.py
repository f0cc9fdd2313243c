"""Run a step of the engine dry: on one rank of a fake process group, with meta tensors.

The runtime is not modelled a second time. Units, prefetching, buckets, reductions in flight and the ledger's counts are
those of the real run, because the same code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold.comm import FakeGroup, Ledger
from onefold.comm.nodes import Nodes
from onefold.config import Config, solve_batch, with_expert_parallel_size
from onefold.engine import Engine
from onefold.moe import requested_parallel_size
from onefold.offload.activation_offload import HostCopies
from onefold.offload.torch_checkpoints import HostCheckpoints
from onefold.optim.choose import choose
from onefold.optim.pipeline import TILE, StepValues, num_tiles
from onefold.plan import FlatParamSpec, Placement, Plan, make_plan
from onefold.report.describe import planned_buffers
from onefold.tools.estimate.caching_allocator import CachingAllocator
from onefold.tools.estimate.ops import as_on_cuda
from onefold.tools.estimate.trace import AllocationMode, MemoryAccount, PassTrace, Tape, record_allocation

LossOf = Callable[[Callable[..., Any]], torch.Tensor]
"""A function that calls a model or an engine with a batch of the size in question, and returns the loss."""

META = torch.device("meta")
# The arguments of a step that computes nothing.
_NO_STEP = StepValues(0, 1.0, ())


@dataclass(frozen=True)
class DryRun:
    """One step of one rank: the memory and the ops of its passes, and its traffic."""

    plan: Plan
    units: list[list[FlatParamSpec]]
    trace: PassTrace | None
    """The last micro-step and the step after it; None if no batch was given."""
    traffic: Ledger | None
    """The traffic of a whole step; None if no batch was given."""
    pools: int = 0
    """Bytes that buffer pools keep from step to step on CPU ranks."""
    matrix_flops: float = 0.0
    """Floating-point operations of a whole-matrix optimizer in one step."""
    matrix_bytes: int = 0
    """Bytes that a whole-matrix optimizer keeps from step to step."""
    tape: Tape | None = None
    """The allocations behind `trace`."""
    host_inputs: int = 0
    """Bytes of the inputs of checkpoints on the host at their peak."""
    moved_inputs: int = 0
    """Bytes of these inputs that a step copies in each direction."""


def dry_run(
    model: nn.Module,
    config: Config,
    nodes: Nodes,
    loss_of: LossOf | None = None,
    *,
    vocabulary: int | None = None,
    uses_nccl: bool = True,
) -> DryRun:
    """Run two steps of a model on the meta device, and return what the second one allocates and sends.

    Offloaded states are only left out of the device's memory here. Their tier follows from the plan's arithmetic.
    """
    world = nodes.num_ranks
    config = with_expert_parallel_size(config, requested_parallel_size(model))
    settings = _on_device(config)
    plan = make_plan(settings, world)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = choose(None, plan.optimizer, trained, model) if trained else None
    group = FakeGroup.of(nodes, plan.num_replicas, as_nccl=uses_nccl)
    offloads = config.zero_optimization.offload_optimizer.device != "none"
    if offloads:
        plan = replace(plan, gradients=replace(plan.gradients, placement=make_plan(config, world).gradients.placement))
    if config.zero_optimization.offload_param.device != "none":
        plan = replace(plan, shards_on_one_rank=True)  # offloaded parameters are gathered on one rank too
    elif offloads and plan.num_shards == 1:
        # No master is on the device to cast from, so the only rank stores its parameters unsharded.
        plan = replace(plan, parameters=replace(plan.parameters, placement=Placement.REPLICATED))
    batch = solve_batch(settings, world)
    engine = Engine(model, plan, batch, chosen, group, META, config=settings.raw)
    try:
        units = [[param.spec for param in unit.params] for unit in engine.state.schedule.units]
        if loss_of is None:
            return DryRun(engine.plan, units, None, None)
        trace, traffic, tape, account = None, Ledger(), Tape(), MemoryAccount(CachingAllocator())
        for tensor in _stored_tensors(engine, with_states=not offloads):
            record_allocation(tape, account, "stored", tensor.nbytes, is_stored=True)
        copies = next((e.copies for e in engine.state.replacements if isinstance(e, HostCheckpoints)), HostCopies())
        for _ in range(2):  # the first step negotiates the order; the second is like all later ones
            before, moved = engine.ledger.copy(), copies.down
            trace = _step_with_passes(engine, loss_of, account, tape, vocabulary, offloads=offloads)
            traffic = engine.ledger.since(before)
        pools = planned_buffers(engine.state.schedule, engine.plan, engine.state.step, keeps=not uses_nccl).pools
        step = engine.state.step
        matrices = step.matrices if step is not None else None
        flops, kept = (matrices.flops(step.groups), matrices.planned_kept()) if step and matrices else (0.0, 0)
        inputs = copies.peak_bytes, copies.down - moved
        return DryRun(engine.plan, units, trace, traffic, pools, flops, kept, tape, *inputs)
    finally:
        engine.destroy()


def _on_device(config: Config) -> Config:
    """Return the config without offload, and without records and monitors: a dry run writes no files."""
    zero, defaults = config.zero_optimization, Config()
    return replace(
        config,
        zero_optimization=replace(
            zero,
            offload_optimizer=replace(zero.offload_optimizer, device="none"),
            offload_param=replace(zero.offload_param, device="none"),
        ),
        onefold=replace(config.onefold, report=None, trace=defaults.onefold.trace),
        tensorboard=defaults.tensorboard,
        csv_monitor=defaults.csv_monitor,
        wandb=defaults.wandb,
        comet=defaults.comet,
    )


def _stored_tensors(engine: Engine, *, with_states: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors that are stored on the device between steps."""
    for param in (param for unit in engine.state.schedule.units for param in unit.params):
        if param.stays_unsharded:
            yield param.full
        if with_states and param.trainable:
            held = [*param.store.own_master(), *(p for state in param.store.states.values() for p in state.parts)]
            if param.store.spec.weight_is_part_of_master and param.store.param is not None:
                held.append(param.store.param.values)
            yield from (part for part in held if isinstance(part, torch.Tensor))


def _step_with_passes(
    engine: Engine,
    loss_of: LossOf,
    account: MemoryAccount,
    tape: Tape,
    vocabulary: int | None,
    *,
    offloads: bool,
) -> PassTrace:
    """Run all micro-steps of a step, and the step, and record them op by op."""
    schedule, window = engine.state.schedule, engine.state.window
    params = [param for unit in schedule.units for param in unit.params]
    sharded = [param for unit in schedule.sharded_units for param in unit.sharded_params]
    mode = AllocationMode(account, tape, params, sharded, lambda: schedule.in_flight.pool.num_bytes, vocabulary)
    with mode:
        for at in range(engine.batch.accumulation):
            with as_on_cuda(mode.work):
                engine.backward(loss_of(_divided(engine)))
            if at == 0:
                work = mode.work.copy()
            if window.at_boundary:
                _step(engine, offloads=offloads)
            window.micro_steps += 1
    return PassTrace(account.moments, work)


def _divided(engine: Engine) -> Callable[..., Any]:
    """Return a function that calls the engine with its rank's part of a batch."""
    if engine.plan.sequence_size == 1:
        return engine

    def call(*args: Any, **kwargs: Any) -> Any:
        split = engine.sequence_parallel.split
        return engine(*(split(args) if args else ()), **(split(kwargs) if kwargs else {}))

    return call


def _step(engine: Engine, *, offloads: bool) -> None:
    """Perform the communication and the allocations of a step without its arithmetic."""
    schedule = engine.state.schedule
    schedule.in_flight.finish_reductions()
    schedule.synchronize_for_step([] if schedule.alone else [0, 0, 0, 0])
    if not schedule.alone and engine.state.group.uses_nccl:
        schedule.in_flight.gather_numbers("gather of the norm", torch.zeros((), dtype=torch.float64, device=META))
    matrices = engine.state.step.matrices if engine.state.step is not None else None
    for batch, gradients in schedule.gradients_to_step():
        for store, gradient in gradients.items():
            if matrices is not None and store in matrices.matrices:
                matrices.step(store, gradient, _NO_STEP)
            elif not offloads:
                size = min(gradient.numel(), TILE["cuda"]) * num_tiles(store.spec.state_spec)
                torch.empty(size, dtype=torch.float32, device=META)
        list(matrices.end_batch(batch, _NO_STEP) if matrices is not None else ())
    list(matrices.end_step([]) if matrices is not None else ())
    if engine.plan.shards_states:
        schedule.gather_updated()
        schedule.wait_for_step()
    engine.zero_grad()
    engine.state.window.close()
    engine.state.decision.forget_losses()
