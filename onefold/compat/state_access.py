"""Gradients of whole models, and the devices of an engine's states.

The other `safe_get_*` and `safe_set_*` functions of DeepSpeed are those of `onefold.utils`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from onefold.engine.offloaded_states import OffloadStateTypeEnum
from onefold.utils import safe_get_full_grad as reduced_gradient
from onefold.utils import safe_set_full_grad, unreduced_gradient


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged gradient; inside `no_sync`, as in DeepSpeed, the gradient of this rank alone."""
    gradient = reduced_gradient(param)
    return unreduced_gradient(param) if gradient is None else gradient


def safe_get_full_model_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the averaged gradients of a model's parameters by name. All ranks call this together."""
    return {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the averaged gradient of each parameter by what a function makes of it. Called by all ranks together."""
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices that hold the states of one kind; none if there are no such states."""
    found: set[torch.device] = model.offloaded_states.devices_of(state)
    return found
