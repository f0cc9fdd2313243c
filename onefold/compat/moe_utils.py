"""DeepSpeed's `moe.utils`: parameters of experts, and optimizer groups of their own.

onefold needs no such groups: an expert may be in any group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from onefold.compat.moe_layer import MoE


def is_moe_param(param: torch.Tensor) -> bool:
    """Return whether a parameter belongs to an expert of `MoE`."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a `MoE`, and the number of experts of the first."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, first.num_experts if first is not None else 0


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters outside of experts, and those of experts."""
    found = list(params)
    return [each for each in found if not is_moe_param(each)], [each for each in found if is_moe_param(each)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients outside of experts, and those of experts."""
    shared, of_experts = split_params_into_shared_and_expert_params(group)
    return tuple([each.grad for each in some if each.grad is not None] for some in (shared, of_experts))  # type: ignore[return-value]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the groups without experts, and then a group of the experts of each, with `moe` set to True.

    Groups are not split by `max_group_size`, because their size does not matter here.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    of_experts: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        shared, found = split_params_into_shared_and_expert_params(group["params"])
        rest.append({**options, "params": shared})
        by_name: dict[str, list[torch.Tensor]] = {}
        for parameter in found:
            by_name.setdefault(parameter.group_name, []).append(parameter)  # type: ignore[attr-defined]
        of_experts += [{**options, "params": some, "name": name, "moe": True} for name, some in by_name.items()]
    return rest + of_experts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return optimizer groups with separate groups of experts, from parameters or groups.

    Groups that have been split already are returned unchanged.
    """
    if any(isinstance(group, dict) and "moe" in group for group in model_parameters):
        return model_parameters
    groups = (
        model_parameters
        if isinstance(model_parameters[0], dict)
        else [{"params": model_parameters, "name": "dense-params"}]
    )
    return split_params_into_different_moe_groups_for_optimizer(groups)
