"""Lay a model out by its plan: units with their schedule, and the optimizer step over their shards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onefold.comm import Group, Ledger, Wires, make_collective
from onefold.config import Batch
from onefold.engine.train_state import TrainState
from onefold.fp8 import convert_layers
from onefold.moe import check_division, describe_layers, expert_layers, expert_parameters, make_expert_parallel
from onefold.offload.torch_checkpoints import HostCheckpoints
from onefold.optim.chosen import ChosenOptimizer
from onefold.optim.decision import StepDecision
from onefold.optim.step import ShardedStep
from onefold.plan import Plan
from onefold.pool import Pool
from onefold.recovery.replica_check import ReplicaCheck
from onefold.runtime import Schedule, lay_out, unsharded_shape
from onefold.sequence import make_sequence_parallel
from onefold.tiled_loss import check_losses, tile_losses
from onefold.window import AccumulationWindow


def build_state(
    model: nn.Module,
    plan: Plan,
    batch: Batch,
    chosen: ChosenOptimizer | None,
    group: Group,
    device: torch.device,
    ledger: Ledger,
    *,
    config: dict[str, Any],
    shared: Collection[int],
) -> TrainState:
    """Build the train state of an engine. `shared`: ids of parameters that another engine stores."""
    if plan.activations.loss_tiles != 0:
        check_losses(model)
    window = AccumulationWindow(batch, managed=plan.loop.manages_accumulation)
    plan = replace(plan, node_size=group.node_size, accumulates=window.accumulates)
    collective = make_collective(plan.collective, group, ledger, device, Wires.of(plan), plan.node_sums)
    groups = chosen.group_of_each() if chosen is not None else {}
    states = chosen.states_of_groups() if chosen is not None else []
    fp8 = convert_layers(model, plan.fp8, device, unsharded_shape)
    layers = expert_layers(model)
    check_division(model, layers, plan.num_expert_parts)
    described = describe_layers(model, layers)
    units, memory = lay_out(
        model,
        plan,
        groups,
        states,
        group,
        ledger,
        device,
        shared,
        fp8.of_weights(model),
        expert_parameters(model, layers) if plan.num_expert_parts > 1 else {},
    )
    schedule = Schedule(units, plan, collective, ledger, Pool(device), memory)
    trained = {id(each) for param in schedule.trained_params() for each in param.parameters}
    left_alone = [p for p in model.parameters() if p.requires_grad and id(p) not in trained and id(p) not in shared]
    decision = StepDecision(plan, schedule)
    if plan.guards.replica_check_every is not None and group.size > 1:
        decision.replica_check = ReplicaCheck(schedule, model, plan.guards.replica_check_every)
    step = ShardedStep(chosen, plan, schedule, memory) if chosen is not None else None
    sequence = make_sequence_parallel(model, plan.sequence_size, group, ledger, device)
    experts = make_expert_parallel(model, layers, described, plan.num_expert_parts, group, ledger, device)
    state = TrainState(
        model, config, plan, group, device, schedule, window, decision, step, left_alone, sequence, experts, fp8
    )
    if plan.activations.loss_tiles != 0:
        state.replacements += tile_losses(model, plan.activations.loss_tiles)
    if plan.activations.host_checkpoints:
        state.replacements.append(HostCheckpoints(model))
    return state
