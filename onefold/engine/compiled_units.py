"""Compile the forwards of units with `torch.compile`, and restore them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from onefold.runtime import Hooks, Unit
from onefold.runtime.batch_chunks import ChunkedForward
from onefold.runtime.hooks import COMPILED_AND_CAPTURED
from onefold.runtime.torch_internals import expect_compiler


class CompiledUnits:
    """The units of one engine whose forwards are compiled."""

    def __init__(self) -> None:
        self._forwards: list[tuple[nn.Module, Any]] = []

    def compile(self, units: Iterable[Unit], hooks: Hooks, backend: Any, options: dict[str, Any]) -> None:
        """Compile the forward of each unit that encloses no others."""
        if hooks.graphs is not None:
            raise RuntimeError(f"engine.compile() with onefold.cuda_graphs: {COMPILED_AND_CAPTURED}")
        expect_compiler()
        for unit in (unit for unit in units if not unit.encloses):
            hooks.stop_watching(unit.module)
            forward = unit.module.forward
            if isinstance(forward, ChunkedForward):
                forward.compile(backend, options)  # the forward of one chunk
                continue
            compiled = torch.compile(forward, backend=backend, **options)
            # A module may have a forward that was set on the instance: `restore` sets it again.
            self._forwards.append((unit.module, unit.module.__dict__.get("forward")))
            unit.module.forward = compiled  # type: ignore[method-assign]

    def restore(self) -> None:
        """Set the forwards of before."""
        while self._forwards:
            module, forward = self._forwards.pop()
            module.__dict__.pop("forward", None)
            module.__dict__.update({"forward": forward} if forward is not None else {})
