"""`torch.compile` under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onefold.compat.not_offered import NotOfferedError, explain

__all__ = ["compiled_autograd", "disable", "dummy_decorator", "enable", "is_compile_supported", "is_compiling"]


def is_compile_supported() -> bool:
    return True


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside of compiled graphs. The compiler is imported when the function is first called."""
    disabled: Callable[..., Any] = torch._disable_dynamo(func)  # type: ignore[attr-defined]
    return disabled


lazy_disable = disable


def enable(min_version: Any = None) -> Callable[..., Any]:
    """Let a function be compiled, as every function is. Used with or without parentheses."""
    return min_version if callable(min_version) else dummy_decorator


def dummy_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


def compiled_autograd(enabled: bool, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
    if enabled:
        raise NotOfferedError(explain("compiled_autograd", "a compiled backward (engine.compile compiles forwards)"))
    return nullcontext()
