"""Kernels in Triton, where its compiler works; without it torch does the same in more passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

from onefold.log import logger


def kernels_of(module: str, purpose: str, advice: str = "") -> Callable[[], ModuleType | None]:
    """What gives this module of kernels, imported when it is first asked for, or None where its `try_out` raises."""

    @cache
    def load() -> ModuleType | None:
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

    return load
