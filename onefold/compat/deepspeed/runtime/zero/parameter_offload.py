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
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """The hooks are there."""

    def empty_partition_cache(self) -> None:
        """Nothing is kept between two passes but what the plan says."""
