"""Ranges in a profiler's timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a range with its name."""
    return torch.profiler.record_function(func.__qualname__)(func)
