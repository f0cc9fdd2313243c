"""Shared fixtures: pools of ranks, kept for the whole run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.fixture
def own_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Ranks of their own: these tests break connections."""
    pools: list[RankPool] = []

    def start_and_run(world: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        pools.append(RankPool(world))
        return pools[-1].run(case, *args)

    yield start_and_run
    for pool in pools:
        pool.stop()


@pytest.fixture(scope="module")
def nccl() -> Iterator[RankPool]:
    """One rank on a GPU."""
    pool = RankPool(1, backend="nccl")
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def staged() -> Iterator[RankPool]:
    """Two ranks on one GPU, over the host."""
    pool = RankPool(2, backend="gloo")
    yield pool
    pool.stop()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`mounted(kind, options)` is the folder of a new file system, where mounting is allowed."""
    made: list[Path] = []

    def mount(kind: str, options: str = "rw") -> Path:
        folder = tmp_path / f"mount{len(made)}"
        folder.mkdir()
        command = ["mount", "-t", kind, "-o", options, kind, str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", str(folder)], check=True)
