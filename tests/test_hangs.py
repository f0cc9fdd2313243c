"""Hangs around engines: each rank hears within seconds who waits where, also of calls of the program's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, rank, start
from ranks import RankPool
from test_alike import heard, layers
from torch import nn

import onefold

Heard = tuple[str, str, float, str]


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


def engine_of(stage: int, model: nn.Module | None = None) -> onefold.Engine:
    return start(model or layers(), config(stage, log_level="warning"))


def step(engine: onefold.Engine, model_input: torch.Tensor | None = None) -> None:
    x = torch.randn(4, 16) if model_input is None else model_input
    engine.backward(engine(x).pow(2).mean())
    engine.step()


def stuck(kind: str, stage: int) -> Heard:
    odd = rank() == 1

    def act() -> None:
        engine = engine_of(stage)
        step(engine)
        if kind == "engines" and not odd:
            engine_of(stage)
        elif kind == "barrier" and odd:
            dist.barrier()
        elif kind == "all_reduce" and odd:
            dist.all_reduce(torch.zeros(3))
        elif kind == "asynchronous" and odd:
            work = dist.all_reduce(torch.zeros(3), async_op=True)
            work.wait()
        elif kind == "another group":
            group = dist.new_group([0, 1])
            if odd:
                dist.barrier(group)
        elif kind == "evaluation":
            total = torch.zeros(())
            with torch.no_grad():
                for _ in range(3 - rank()):
                    total += engine(torch.randn(4, 16)).mean()
            dist.all_reduce(total)
        elif kind == "save" and odd:
            dist.barrier()
        elif kind == "save":
            engine.load_checkpoint("/nonexistent")
        step(engine)

    return heard(act)


@pytest.mark.parametrize(
    ("kind", "stage", "words"),
    [
        ("engines", 2, ["rank 0 at onefold.initialize, engine 2", "rank 1 at reduction of", "the same engines"]),
        ("engines", 3, ["rank 0 at onefold.initialize, engine 2", "rank 1 at the beginning of a pass"]),
        ("barrier", 2, ["rank 1 at its own torch.distributed.barrier()", "test_hangs.py:", "rank 0 at reduction of"]),
        ("barrier", 3, ["rank 1 at its own torch.distributed.barrier()", "rank 0 at the beginning of a pass"]),
        ("all_reduce", 3, ["rank 1 at its own torch.distributed.all_reduce()", "test_hangs.py:"]),
        ("asynchronous", 3, ["rank 1 at its own wait()", "test_hangs.py:"]),
        ("another group", 3, ["rank 1 at its own torch.distributed.barrier()", "rank 0 at the beginning of a pass"]),
        ("evaluation", 3, ["rank 1 at its own torch.distributed.all_reduce()", "rank 0 at", "as many batches"]),
        ("save", 3, ["rank 1 at its own torch.distributed.barrier()", "rank 0 at load_checkpoint"]),
    ],
)
def test_a_hang_is_named_on_every_rank(own_ranks, kind, stage, words):
    found = own_ranks(2, stuck, kind, stage)
    for name, text, seconds, said in found:
        assert name in ("Disagreement", "RuntimeError"), found  # a call of the program's own has the backend's error
        told = text if name == "Disagreement" else said
        assert [word for word in words if word not in told] == [], (name, text, said)
        assert seconds < 15  # on a busy machine; the thread finds it within 5
    assert "Disagreement" in {name for name, _, _, _ in found}, found
