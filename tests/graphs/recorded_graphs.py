"""Graphs on a CPU: a recorder of torch's operations, which repeats them into the same tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.graphs import call_signature, captured_blocks, captured_call


def _addresses(tree: Any) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in tree_leaves(tree) if isinstance(value, torch.Tensor)}


class RecordedGraph(TorchDispatchMode):
    def __init__(self, of_pass: list[RecordedGraph]) -> None:
        super().__init__()
        self._of_pass = of_pass
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        # Tensors that were written in place, and copies of their values before.
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Memory that was allocated while this graph was recorded, by its address, and memory that existed before.
        self._allocated: dict[int, torch.UntypedStorage] = {}
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._written += [(value.data, value.clone()) for value in args[:1] if isinstance(value, torch.Tensor)]
        output = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, output))
        self._given.update(_addresses((args, kwargs)) - self._allocated.keys())
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in self._given:
                self._allocated[value.untyped_storage().data_ptr()] = value.untyped_storage()
        return output

    def spoil(self) -> None:
        """Write to the memory of this graph, as graphs may that were captured before: it may be their free memory."""
        for storage in self._allocated.values():
            storage.copy_(torch.full((storage.nbytes(),), 255, dtype=torch.uint8).untyped_storage())  # NaN

    def undo(self) -> None:
        """Restore what was written in place, because a capture runs nothing."""
        for tensor, before in reversed(self._written):
            tensor.copy_(before)
        self._written.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for graph in self._of_pass[self._of_pass.index(self) + 1 :]:
            graph.spoil()
        for func, args, kwargs, output in self.operations:
            used = tuple(value for value in tree_leaves((args, output)) if isinstance(value, torch.Tensor))
            with torch.autograd._unsafe_preserve_version_counter(used):
                again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.data.copy_(new)


class RecordedPass(captured_call.CapturedPass):
    """Calls that were recorded in one pass. Recording draws no random numbers, as capturing draws none."""

    @contextmanager
    def capture(self) -> Iterator[Any]:
        numbers = torch.get_rng_state()
        recorded = self.__dict__.setdefault("recorded", [])
        with RecordedGraph(recorded) as graph:
            yield graph
        graph.undo()
        recorded.append(graph)
        torch.set_rng_state(numbers)


@contextmanager
def recorded_graphs(monkeypatch: Any) -> Iterator[None]:
    """Record blocks of engines on a CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(captured_blocks, "CapturedPass", RecordedPass)
        patched.setattr(captured_call, "without_ownership", lambda tensor: tensor)
        patched.setattr(captured_blocks, "host_random_states", random.getstate)  # dropout draws from torch's
        patched.setattr(captured_blocks, "synchronizations", lambda: nullcontext([]))
        patched.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patched.setattr(torch.cuda, "Stream", lambda device: None)
        patched.setattr(torch.cuda, "empty_cache", lambda: None)
        for module in (call_signature, captured_blocks):
            patched.setattr(module, "HOST", "no device")
        yield
