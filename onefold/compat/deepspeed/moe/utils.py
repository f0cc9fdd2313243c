"""Models of experts train under ZeRO as they are: no parameter belongs to a group of experts."""

from __future__ import annotations

from typing import Any

import torch


def is_moe_param(param: torch.Tensor) -> bool:
    return False


def has_moe_layers(module: torch.nn.Module) -> tuple[bool, int]:
    return False, 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return False


def split_params_into_shared_and_expert_params(params: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    return list(params), []


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> Any:
    return param_groups if isinstance(param_groups, list | tuple) else [param_groups]
