"""In which format gradients travel: the parameter's own, whatever autocast computes in."""

from __future__ import annotations

import torch
from torch import nn

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
"""What DeepSpeed puts on parameters whose gradients travel in autocast's format. onefold puts it on none."""


def has_comm_dtype(param: nn.Parameter) -> bool:
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found
