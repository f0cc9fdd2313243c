"""Steps that are decided on the device ([Note: deciding a step on the device] in decision.py), as on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Trace, batches, config, first_difference, net, precision, start, train
from test_nonfinite import stops

import onefold

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Lion": {"lr": 1e-3},
}


@contextmanager
def waits(engine: onefold.Engine) -> Iterator[list[int]]:
    """The steps that were queued each time the host waited for the device."""
    found: list[int] = []
    wait = torch.cuda.Event.synchronize

    def noted(event: torch.cuda.Event) -> None:
        found.append(engine.optimizer.sharded.num_steps)
        wait(event)

    torch.cuda.Event.synchronize = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]


def queued_at_the_wait(stage: int, hooked: bool, settings: dict[str, Any]) -> list[int]:
    engine = start(net(), config(stage, **settings))
    train(engine, 2)
    if hooked:
        engine.optimizer.register_step_pre_hook(lambda *_: None)
    (x, y), *_ = batches(1)
    engine.backward(engine(x, y))
    with waits(engine) as found:
        engine.step()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_is_queued_before_the_host_waits_for_the_norm(on_nccl_ranks, stage):
    clipped = {"gradient_clipping": 0.1, **precision("bf16")}
    assert on_nccl_ranks(2, queued_at_the_wait, stage, False, clipped) == [[3]] * 2
    assert on_nccl_ranks(2, queued_at_the_wait, stage, False, precision("fp16")) == [[3]] * 2


@pytest.mark.parametrize(
    ("hooked", "settings"), [(True, {}), (False, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}})]
)
def test_the_host_waits_first_where_a_step_cannot_be_left_out(on_nccl_ranks, hooked, settings):
    assert on_nccl_ranks(2, queued_at_the_wait, 2, hooked, settings) == [[2]] * 2


# Some steps of each number of ranks are clipped by this and some are not.
CLIPPING = {1: 1.24, 2: 0.845}


def trained(stage: int, dtype: str, optimizer: str, hooked: bool) -> Trace:
    chosen = {"type": optimizer, "params": OPTIMIZERS[optimizer]}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}  # the first steps overflow
    settings = fp16 if dtype == "fp16" else precision(dtype)
    clipping = CLIPPING[dist.get_world_size()]
    engine = start(net(), config(stage, gradient_clipping=clipping, optimizer=chosen, **settings))
    if hooked:
        engine.optimizer.register_step_pre_hook(lambda *_: None)
    trace = train(engine, 8)
    trace.losses.append(engine.skipped_steps)
    engine.destroy()
    return trace


@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer"),
    [(0, "fp32", "AdamW"), (1, "fp16", "AdamW"), (2, "bf16", "Adam"), (3, "fp32", "SGD"), (3, "fp16", "SGD")],
)
@pytest.mark.parametrize("world", [2, 1])
def test_device_and_host_decide_alike(on_nccl_ranks, world, stage, dtype, optimizer):
    by_device = on_nccl_ranks(world, trained, stage, dtype, optimizer, False)
    by_host = on_nccl_ranks(world, trained, stage, dtype, optimizer, True)
    assert first_difference(by_device, by_host) is None
    assert (by_device[0].losses[-1] > 0) == (dtype == "fp16")
    norms = [norm for norm in by_device[0].norms if norm is not None and math.isfinite(norm)]
    assert min(norms) < CLIPPING[world] < max(norms)


@pytest.mark.parametrize(
    ("stage", "factor", "accumulation", "clipping"),
    [(0, math.inf, 1, 0.0), (1, math.nan, 2, 0.0), (2, math.nan, 1, 0.5), (3, math.inf, 2, 0.5)],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_is_not_finite_changes_nothing(
    on_nccl_ranks, tmp_path, world, stage, factor, accumulation, clipping
):
    said = on_nccl_ranks(world, stops, stage, "", str(tmp_path), factor, accumulation, clipping)
    assert len(set(said)) == 1
    assert f"the loss was {factor} on rank {world - 1}" in said[0]
