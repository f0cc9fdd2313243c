"""Masters, gradients and optimizer states of one parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from onefold.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    unreduced_gradient,
)
from onefold.utils import safe_get_full_grad as reduced_gradient

__all__ = [
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_model_grads", "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param",
    "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized",
]  # fmt: skip


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
