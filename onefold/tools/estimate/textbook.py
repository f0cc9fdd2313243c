"""Model states as tutorials and the ZeRO paper count them, and the names that DeepSpeed has for it.

Tutorials count 2 bytes of parameters and 2 of gradients, in 16 bits, and for Adam either the two moments in fp32 (8
bytes) or those and an fp32 master (12). onefold's own bytes are the plan's: gradients are added up in fp32 where
several ranks or micro-steps add to them, and padding counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from onefold.comm.nodes import Nodes
from onefold.config import load_config
from onefold.log import format_bytes
from onefold.plan import ModelBytes, Placement, Tier, assign_tiers, count_bytes, make_plan
from onefold.plan.table import TABLE
from onefold.tools.estimate.dry_run import dry_run
from onefold.tools.estimate.models import ModelSource, from_number

MOMENTS, MOMENTS_AND_MASTER = 8, 12


@dataclass(frozen=True)
class TextbookBytes:
    """Of one GPU."""

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.states


def count_as_textbook(
    num_parameters: float, num_gpus: int, stage: int, state_bytes: int = MOMENTS_AND_MASTER
) -> TextbookBytes:
    """2 bytes of parameters, 2 of gradients and `state_bytes` of states, each whole or sharded as the stage says. The
    tables keep whole gradients in stage 1 as they are in backward.
    """
    shares = [num_gpus if placement is Placement.SHARDED else 1 for placement in TABLE[stage]]
    parameters, gradients, states = (
        num_parameters * width / share for width, share in zip((2, 2, state_bytes), shares, strict=True)
    )
    return TextbookBytes(parameters, gradients, states)


# -- DeepSpeed's names -------------------------------------------------------------------------------------------------


def model_state_bytes(
    source: ModelSource, zero: dict[str, Any], gpus_per_node: int, nodes: int
) -> dict[Tier, ModelBytes]:
    """The plan's bytes of one rank in each tier, for a model in bf16 with Adam."""
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
    from onefold.tools.estimate.models import from_shapes

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
    """The same of a number of parameters."""
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
    """The same of a number of parameters. The largest layer is no part of what rests, and comes on top while it is in
    use.
    """
    _show(from_number(total_params), 3, num_gpus_per_node, num_nodes, total_params, additional_buffer_factor)
    print(f"  while it is in use, the largest layer takes {format_bytes(2 * largest_layer_params)} more on a GPU")
