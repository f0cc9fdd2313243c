"""In which format gradients travel: the parameter's own, whatever autocast computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
"""What DeepSpeed puts on parameters whose gradients travel in autocast's format. onefold puts it on none."""


def has_comm_dtype(param: nn.Parameter) -> bool:
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def autocast_if_enabled(engine: Any) -> AbstractContextManager[Any]:
    """Return the autocast that the engine's own forward runs under. It is entered twice without harm."""
    if not engine.torch_autocast_enabled():
        return nullcontext()
    dtype = torch.float16 if engine.torch_autocast_dtype() == "fp16" else torch.bfloat16
    return torch.autocast(engine.device.type, dtype=dtype)
