"""Load Triton kernels if its compiler works. Otherwise torch computes the same in more passes over memory."""

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
    """Kernels for meta tensors, which do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def kernels_of(module: str, purpose: str, advice: str = "") -> Callable[[torch.Tensor], Kernels | None]:
    """Return a function that returns the kernels of `module` for a tensor.

    It returns None for tensors on a host, and if the kernels cannot be imported or their `try_out` raises. The module
    is imported at the first call for a CUDA tensor.
    """

    @cache
    def load() -> Kernels | None:
        try:
            found = import_module(module)
            found.try_out()
        except Exception as error:  # compilers may raise any exception
            logger.warning(
                "%s: Triton kernels are not available (%s: %s). Slower torch operations are used instead%s",
                purpose, type(error).__name__, error, f" ({advice})" if advice else "",
            )  # fmt: skip
            return None
        return found

    def find(tensor: torch.Tensor) -> Kernels | None:
        return load() if tensor.is_cuda else _MetaKernels() if tensor.is_meta else None

    find.forget = load.cache_clear  # type: ignore[attr-defined]
    return find
