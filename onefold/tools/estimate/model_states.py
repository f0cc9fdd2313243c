"""DeepSpeed's estimators of model states, computed by onefold's plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from onefold.comm.nodes import Nodes
from onefold.config import load_config
from onefold.log import format_bytes
from onefold.plan import ModelBytes, Tier, assign_tiers, count_bytes, make_plan
from onefold.tools.estimate.dry_run import dry_run
from onefold.tools.estimate.models import ModelSource, from_number, from_shapes


def model_state_bytes(
    source: ModelSource, zero: dict[str, Any], gpus_per_node: int, nodes: int
) -> dict[Tier, ModelBytes]:
    """Return the planned bytes of one rank in each tier, for a bf16 model with Adam."""
    document = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam"},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
    }
    config, world = load_config(document), gpus_per_node * nodes
    found = dry_run(source.build(), config, Nodes.of_size(gpus_per_node, world))
    plan = make_plan(config, world)
    specs = assign_tiers([spec for unit in found.units for spec in unit], plan)
    return {tier: count_bytes(specs, plan, tier) for tier in Tier}


_CPU = {"device": "cpu"}
_ROWS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [("offload_optimizer=cpu ", {"stage": 2, "offload_optimizer": _CPU}), ("offload_optimizer=none", {"stage": 2})],
    3: [
        ("offload_param=cpu , offload_optimizer=cpu ", {"stage": 3, "offload_param": _CPU, "offload_optimizer": _CPU}),
        ("offload_param=none, offload_optimizer=cpu ", {"stage": 3, "offload_optimizer": _CPU}),
        ("offload_param=none, offload_optimizer=none", {"stage": 3}),
    ],
}


def _show(source: ModelSource, stage: int, gpus_per_node: int, nodes: int, total: int, factor: float) -> None:
    print(
        f"Model states of {total / 1e6:,.0f}M parameters in stage {stage}, bf16 with Adam, by onefold's plan, for\n"
        f"HW: setup with {nodes} node{'s' * (nodes > 1)}, {gpus_per_node} GPU{'s' * (gpus_per_node > 1)} per node. "
        "`onefold plan` adds activations, buffers and traffic."
    )
    print("  per CPU  |  per GPU |   Options")
    for name, zero in _ROWS[stage]:
        found = model_state_bytes(source, zero, gpus_per_node, nodes)
        host = found[Tier.HOST].total * gpus_per_node * factor
        print(f"  {format_bytes(host):>9} | {format_bytes(found[Tier.DEVICE].total):>9} | {name}")


def _of_module(model: nn.Module) -> ModelSource:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return from_shapes(type(model).__name__, shapes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what stages 1 and 2 hold of a model, on each GPU and on each node's host."""
    total = sum(parameter.numel() for parameter in model.parameters())
    _show(_of_module(model), 2, num_gpus_per_node, num_nodes, total, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what stages 1 and 2 hold of a number of parameters."""
    _show(from_number(total_params), 2, num_gpus_per_node, num_nodes, total_params, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what stage 3 holds of a model, on each GPU and on each node's host."""
    total = sum(parameter.numel() for parameter in model.parameters())
    _show(_of_module(model), 3, num_gpus_per_node, num_nodes, total, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what stage 3 holds of a number of parameters, and the memory of the largest layer while it is unsharded."""
    _show(from_number(total_params), 3, num_gpus_per_node, num_nodes, total_params, additional_buffer_factor)
    print(f"  the largest layer takes another {format_bytes(2 * largest_layer_params)} per GPU while it is unsharded")
