"""What a call does besides launching kernels, which a graph would not repeat."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the tables of hooks that run when a module is called."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def num_hooks(parameter: nn.Parameter) -> int:
    """Return the number of hooks on a parameter."""
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return len(parameter._backward_hooks or ()) + len(after or ())


def host_random_states() -> list[Any]:
    """Return the states of the random number generators of the host."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    return [random.getstate(), torch.get_rng_state().tolist(), [str(part) for part in state]]


@contextmanager
def synchronizations() -> Iterator[list[str]]:
    """Collect the operations on this device that make the host wait for the GPU."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for item in caught:
        if "synchronizing CUDA" in str(item.message):
            found.append(f"{item.filename}:{item.lineno}")
        else:
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
