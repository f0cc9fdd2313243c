"""Weights on NVMe that a step has left in host memory: they are used as long as they are there, and never longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, first_difference, more, net, precision, start, weights_of
from test_offload import CPU, nvme

import onefold
from onefold.offload.disk_shard import DiskShard

NOTHING_KEPT = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def on_disk(folder: str, states: str, **settings: Any) -> onefold.Engine:
    few = nvme(folder, buffer_count=2, buffer_size=2048)
    keys = {"offload_optimizer": few if states == "disk" else CPU, "offload_param": few, **NOTHING_KEPT}
    return start(net(), config(3, zero_optimization=keys, **settings))


def shards(engine: onefold.Engine) -> list[DiskShard]:
    found = [param.store.param for unit in engine.state.schedule.units for param in unit.trained_params]
    return [shard for shard in found if isinstance(shard, DiskShard)]


def read(engine: onefold.Engine, work: Callable[[], Any]) -> int:
    before = engine.ledger.copy()
    work()
    return int(engine.ledger.since(before).bytes("read"))


def reads_by_call(folder: str, states: str, dtype: str) -> tuple[list[int], int]:
    """The bytes read by each forward and each backward of the second step, and those of all parameters."""
    engine = on_disk(folder, states, gradient_accumulation_steps=3, **precision(dtype))
    found = []
    for number in range(2):
        for x, y in batches(3, seed=number):
            losses: list[torch.Tensor] = []
            found.append(read(engine, lambda x=x, y=y, losses=losses: losses.append(engine(x, y))))
            found.append(read(engine, lambda losses=losses: engine.backward(losses[0])))
            engine.step()
        engine.wait_for_step()
    size = sum(shard.values.nbytes for shard in shards(engine))
    engine.destroy()
    return found[6:], size


@covering(states=("disk", "cpu"), dtype=("bf16", "fp16"), world=(1, 2), strength=1)
def test_the_first_forward_and_backward_after_a_step_read_no_file(on_ranks, tmp_path, world, states, dtype):
    for found, size in on_ranks(world, reads_by_call, str(tmp_path), states, dtype):
        assert size
        assert found[:2] == [0, 0]
        # A forward reads ahead for its backward.
        assert [found[2] + found[3], found[4] + found[5]] == [2 * size, 2 * size]


def dropping(folder: str, states: str) -> list[str | None]:
    """A gradient that is dropped has overwritten the memory. The next forward reads the file, as without offload."""
    results = []
    for offloads in (False, True):
        settings = {"gradient_clipping": 0.3, **precision("bf16")}
        engine = on_disk(folder, states, **settings) if offloads else start(net(), config(3, **settings))
        losses = []
        for number, (x, y) in enumerate(batches(4)):
            loss = engine(x, y)
            engine.backward(loss)
            losses.append(loss.item())
            if number == 1:
                engine.optimizer.zero_grad()
            else:
                engine.step()
        results.append((losses, weights_of(engine.module)))
        engine.destroy()
    (losses, weights), (theirs, others) = results
    return [None if losses == theirs else f"{losses} and {theirs}", first_difference(others, weights)]


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("states", ["disk", more("cpu")])
def test_a_dropped_gradient_ends_the_use_of_the_memory(on_ranks, tmp_path, world, states):
    for told in on_ranks(world, dropping, str(tmp_path), states):
        assert told == [None, None]
