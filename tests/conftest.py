"""Shared fixtures: pools of ranks, kept for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool

# Ranks are forked from this process: no thread pool may exist here yet.
torch.set_num_threads(1)

_pools: dict[int, RankPool] = {}


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`on_ranks(world_size, case, *args)` runs a module-level function on real gloo ranks."""

    def run(world_size: int, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if world_size not in _pools:
            _pools[world_size] = RankPool(world_size)
        return _pools[world_size].run(case, *args, **kwargs)

    yield run
    for pool in _pools.values():
        pool.stop()
    _pools.clear()
