"""Kernels in Triton, where its compiler works; without it torch does the same in more passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from onefold.log import logger

Kernels = Any
"""A module of kernels."""


class _MetaKernels:
    """Kernels for tensors without memory: there is nothing to do."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def kernels_of(module: str, purpose: str, advice: str = "") -> Callable[[torch.Tensor], Kernels | None]:
    """What gives this module of kernels for a tensor, imported when it is first asked for: None for tensors on a host,
    and where its `try_out` raises.
    """

    @cache
    def load() -> Kernels | None:
        try:
            found = import_module(module)
            found.try_out()
        except Exception as error:  # whatever a compiler may raise
            logger.warning(
                "%s: Triton's kernels cannot be used (%s: %s); torch does it, in more passes over memory%s",
                purpose, type(error).__name__, error, f" ({advice})" if advice else "",
            )  # fmt: skip
            return None
        return found

    def find(tensor: torch.Tensor) -> Kernels | None:
        return load() if tensor.is_cuda else _MetaKernels() if tensor.is_meta else None

    find.forget = load.cache_clear  # type: ignore[attr-defined]
    return find
