"""A step before it is run: the engine itself, on one imagined rank of a job of any size, with tensors without memory.

Nothing of the runtime is described a second time. Units, prefetch, buckets, reductions in flight and what the ledger
counts are those of the run, because they are its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold.comm import ImaginedGroup, Ledger
from onefold.comm.nodes import Nodes
from onefold.config import Config, solve_batch
from onefold.engine import Engine
from onefold.estimate.caching_allocator import CachingAllocator
from onefold.estimate.on_cuda import as_on_cuda
from onefold.estimate.trace import AllocationMode, MemoryAccount, PassTrace, Tape, record_allocation
from onefold.optim.choose import choose
from onefold.optim.tiles import TILE, Step, num_tiles
from onefold.plan import FlatParamSpec, Placement, Plan, make_plan
from onefold.report.describe import planned_buffers

LossOf = Callable[[Callable[..., Any]], torch.Tensor]
"""Calls a model, or an engine in its place, with a batch of the size in question: the loss."""

META = torch.device("meta")
# Nothing is computed.
_NO_STEP = Step(0, 1.0, ())


@dataclass(frozen=True)
class Rehearsal:
    """One step of one rank: what its passes allocate and compute, and what it sends."""

    plan: Plan
    units: list[list[FlatParamSpec]]
    trace: PassTrace | None
    """Of a micro-step that a step follows; None where no batch was given."""
    traffic: Ledger | None
    """Of a whole step."""
    pools: int = 0
    """What pools keep from step to step where ranks are CPUs."""
    matrix_flops: float = 0.0
    """Of an optimizer that works on whole matrices, in a step;"""
    matrix_bytes: int = 0
    """and what it keeps of them from step to step."""
    tape: Tape | None = None
    """The allocations behind `trace`."""


def rehearse(
    model: nn.Module,
    config: Config,
    nodes: Nodes,
    loss_of: LossOf | None = None,
    *,
    vocabulary: int | None = None,
    uses_nccl: bool = True,
) -> Rehearsal:
    """Take a model on the meta device through a step. States that the config offloads are taken to be anywhere but on
    the device: where they rest follows from the plan, and is no part of this.
    """
    world = nodes.num_ranks
    settings = _on_device(config)
    plan = make_plan(settings, world)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = choose(None, settings.optimizer, trained, model) if trained and settings.optimizer is not None else None
    group = ImaginedGroup.of(nodes, plan.num_replicas, as_nccl=uses_nccl)
    offloads = config.zero_optimization.offload_optimizer.device != "none"
    if offloads:
        plan = replace(plan, gradients=replace(plan.gradients, placement=make_plan(config, world).gradients.placement))
    if config.zero_optimization.offload_param.device != "none":
        plan = replace(plan, shards_on_one_rank=True)  # what rests on the host is gathered from there, whoever is alone
    elif offloads and plan.num_shards == 1:
        # There is no master on the device to cast from, so the only rank holds its parameters as they are.
        plan = replace(plan, parameters=replace(plan.parameters, placement=Placement.REPLICATED))
    batch = solve_batch(settings, world)
    engine = Engine(model, plan, batch, chosen, group, META, config=settings.raw)
    try:
        units = [[param.spec for param in unit.params] for unit in engine.state.schedule.units]
        if loss_of is None:
            return Rehearsal(engine.plan, units, None, None)
        trace, traffic, tape, account = None, Ledger(), Tape(), MemoryAccount(CachingAllocator())
        for tensor in _at_rest(engine, with_states=not offloads):
            record_allocation(tape, account, "rest", tensor.nbytes, is_resting=True)
        for _ in range(2):  # the first pass is negotiated; the second is as all later ones
            before = engine.ledger.copy()
            trace = _step_with_passes(engine, loss_of, account, tape, vocabulary, offloads=offloads)
            traffic = engine.ledger.since(before)
        pools = planned_buffers(engine.state.schedule, engine.plan, engine.state.step, keeps=not uses_nccl).pools
        step = engine.state.step
        matrices = step.matrices if step is not None else None
        flops, kept = (matrices.flops(step.groups), matrices.planned_kept()) if step and matrices else (0.0, 0)
        return Rehearsal(engine.plan, units, trace, traffic, pools, flops, kept, tape)
    finally:
        engine.destroy()


def _on_device(config: Config) -> Config:
    """With everything on the device, and without records and monitors: nobody is to hear of what is not run."""
    zero, nobody = config.zero_optimization, Config()
    return replace(
        config,
        zero_optimization=replace(
            zero,
            offload_optimizer=replace(zero.offload_optimizer, device="none"),
            offload_param=replace(zero.offload_param, device="none"),
        ),
        onefold=replace(config.onefold, report=None, trace=nobody.onefold.trace),
        tensorboard=nobody.tensorboard,
        csv_monitor=nobody.csv_monitor,
        wandb=nobody.wandb,
        comet=nobody.comet,
    )


def _at_rest(engine: Engine, *, with_states: bool) -> Iterator[torch.Tensor]:
    """What lies on the device between steps."""
    for param in (param for unit in engine.state.schedule.units for param in unit.params):
        if param.stays_unsharded:
            yield param.full
        if with_states and param.trainable:
            held = [*param.store.own_master(), *(p for state in param.store.states.values() for p in state.parts)]
            if param.store.spec.weight_is_master and param.store.param is not None:
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
    """All micro-steps of a step, and the step, looked at op by op."""
    schedule, window = engine.state.schedule, engine.state.window
    params = [param for unit in schedule.units for param in unit.params]
    sharded = [param for unit in schedule.sharded for param in unit.sharded]
    mode = AllocationMode(account, tape, params, sharded, lambda: schedule.in_flight.pool.num_bytes, vocabulary)
    with mode:
        for at in range(engine.batch.accumulation):
            with as_on_cuda(mode.work):
                engine.backward(loss_of(engine))
            if at == 0:
                work = mode.work.copy()
            if window.at_boundary:
                _step(engine, offloads=offloads)
            window.micro_steps += 1
    return PassTrace(account.moments, work)


def _step(engine: Engine, *, offloads: bool) -> None:
    """What a step sends and allocates, and nothing of what it computes."""
    schedule = engine.state.schedule
    schedule.in_flight.finish_reductions()
    schedule.meet_for_step([] if schedule.alone else [0, 0, 0, 0])
    if not schedule.alone and engine.state.group.uses_nccl:
        schedule.in_flight.gather_scalar("gather of the norm", torch.zeros((), dtype=torch.float64, device=META))
    matrices = engine.state.step.matrices if engine.state.step is not None else None
    for batch, gradients in schedule.gradients_to_step():
        for store, gradient in gradients.items():
            if matrices is not None and store in matrices.matrices:
                matrices.step(store, gradient, _NO_STEP)
            elif not offloads:
                size = min(gradient.numel(), TILE["cuda"]) * num_tiles(store.spec.kept)
                torch.empty(size, dtype=torch.float32, device=META)
        list(matrices.end_batch(batch, _NO_STEP) if matrices is not None else ())
    list(matrices.end_step([]) if matrices is not None else ())
    if engine.plan.shards_states:
        schedule.start_refreshes()
        schedule.wait_for_step()
    engine.zero_grad()
    engine.state.window.close()
    engine.state.decision.losses.clear()
