"""What others take off and put back around `generate`: the hooks that gather parameters.

onefold's hooks stay where they are: a parameter that `GatheredParameters` holds whole is used as it is, so the lists
of hooks to remove are empty.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class DeepSpeedZeRoOffload:
    """A model whose parameters rest as shards."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.module = _Module(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any, count: list[int] | None = None) -> None:
        """Do nothing, because the engine has installed its hooks."""

    def empty_partition_cache(self) -> None:
        """Do nothing: only what the plan keeps stays unsharded between two passes."""


class _Module:
    """The model, with the one method that DeepSpeed puts on modules: parameters of other modules that it uses."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """None beside the model's own: all modules that use them are inside."""
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
