"""Shared fixtures: pools of ranks, kept for the whole run."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from object_store import ObjectStore
from parts import files_of
from ranks import RankPool, start_mps, stop_mps

# Test files lie in folders by package, and some share cases by name: the name of each is unique.
sys.path.extend(str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir())

# Ranks are forked from this process: no thread pool may exist here yet.
torch.set_num_threads(1)

# How long a case takes is no assertion.
settings.register_profile("onefold", deadline=None)
settings.load_profile("onefold")

_pools: dict[int, RankPool] = {}

CHECK = Path(__file__).with_name("check.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice", help="run only some of the chosen tests, as 3/10: the third tenth; 1/10 to 10/10 make all of them"
    )
    parser.addoption("--part", help="of the tests that need a GPU only a part, as 2/3: whole files (tests/parts.py)")
    parser.addoption(
        "--first-cases", action="store_true", help="run only the first case of each test in tests/check.txt"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which nothing would run: their imports take time, and may need packages that are not there."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption("--first-cases"):
        return collection_path.name not in {name.partition("::")[0] for name in CHECK.read_text().split()} or None
    if config.getoption("markexpr") == "gpu":
        return "pytest.mark.gpu" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen_slice, part, first_cases = (config.getoption(name) for name in ("--slice", "--part", "--first-cases"))
    if chosen_slice is not None:
        which, _, of = chosen_slice.partition("/")
        if not (which.isdigit() and of.isdigit() and int(of)):
            raise pytest.UsageError(f"--slice {chosen_slice}: expected a number and how many there are, as in 3/10")
        _keep(config, items, [item for item in items if _number(item) % int(of) == int(which) % int(of)])
    if part is not None:
        on_gpu = {item.path.name for item in items if item.get_closest_marker("gpu") is not None}
        try:
            chosen = files_of(part, on_gpu)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        _keep(config, items, [item for item in items if item.path.name in chosen])
    if first_cases:
        wanted = set(CHECK.read_text().split())
        quick = [item for item in items if item.get_closest_marker("slow") is None and _function(item) in wanted]
        first = {_function(item): item for item in reversed(quick)}
        _keep(config, items, [item for item in items if first.get(_function(item)) is item])


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, here and in the ranks that are forked: it is never freed."""
    gc.collect()
    gc.freeze()


def _number(item: pytest.Item) -> int:
    """The same for a test in every run, whatever else there is."""
    return int.from_bytes(hashlib.blake2b(item.nodeid.encode(), digest_size=4).digest())


def _function(item: pytest.Item) -> str:
    return f"{item.path.name}::{item.name.partition('[')[0]}"


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


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


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A local S3 server. Clients are cached by process, so there is one server for all tests."""
    store = ObjectStore(tmp_path_factory.mktemp("s3"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in store.environment.items():
                patch.setenv(name, value)
            yield store
    finally:
        store.stop()


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


@pytest.fixture
def side_by_side() -> Iterator[Callable[..., list[list[Any]]]]:
    """`side_by_side(world_size, case, arguments)` runs a case once per tuple of arguments, each on ranks of its own.

    For cases that break connections and spend their time waiting.
    """
    pools: list[RankPool] = []

    def start_and_run(world: int, case: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        # All ranks are forked before the first thread starts.
        for _ in arguments:
            pools.append(RankPool(world))
            pools[-1].start()
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda pool, args: pool.run(case, *args), pools, arguments))

    yield start_and_run
    for pool in pools:
        pool.stop()


@pytest.fixture(scope="module")
def nccl() -> Iterator[RankPool]:
    """One rank on a GPU."""
    pool = RankPool(1, backend="nccl")
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def on_nccl_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`on_nccl_ranks(world_size, case, *args, node_size=n)` runs a function on NCCL ranks that share one GPU."""
    with_mps = start_mps()
    pools: dict[tuple[int, int | None], RankPool] = {}

    def run(world_size: int, case: Callable[..., Any], *args: Any, node_size: int | None = None) -> list[Any]:
        key = (world_size, node_size)
        if key not in pools:
            for other in list(pools):  # one at a time: their memory would add up
                pools.pop(other).stop()
            pools[key] = RankPool(world_size, "nccl", node_size)
        return pools[key].run(case, *args)

    yield run
    for pool in pools.values():
        pool.stop()
    if with_mps:
        stop_mps()


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
