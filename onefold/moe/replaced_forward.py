"""Forwards of modules that are replaced while an engine manages the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from onefold.runtime.torch_internals import outside_compiler


class ReplacedForward:
    """A forward in the place of that of a module. `make` returns it from the original one."""

    def __init__(self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._module, self._was_set_on_module = module, "forward" in module.__dict__
        self._original: Callable[..., Any] = module.forward
        self._compute = make(self._original)
        functools.update_wrapper(self, self._original, updated=())
        module.forward = self  # type: ignore[method-assign]

    def restore(self) -> None:
        """Restore the original forward of the module, unless the program has replaced this one."""
        if self._module.__dict__.get("forward") is self:
            if self._was_set_on_module:
                self._module.forward = self._original  # type: ignore[method-assign]
            else:
                del self._module.forward

    def __reduce__(self) -> Any:
        """Copy and pickle as the original forward, because no engine manages the copy of a model."""
        return _original_forward, (self._original,)

    @outside_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


class TracedForward(ReplacedForward):
    """A replaced forward into which the compiler may trace."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


def _original_forward(forward: Any) -> Any:
    return forward
