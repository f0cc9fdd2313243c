"""The comparison of replicas: a bit that flips on one rank is found, and its unit and rank are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, net, precision, rank, start
from torch import nn

import onefold
from onefold.recovery.refused_step import RefusedStepError, ReplicaError

TIERS: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "params": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def engine_of(
    stage: int, every: int = 1, model: nn.Module | None = None, tier: str = "", **more: Any
) -> onefold.Engine:
    # Units have two flat parameters. In stage 3 one is sharded.
    zero = {"stage3_param_persistence_threshold": 50, **TIERS[tier]}
    settings = config(stage, onefold={"replica_check_every": every}, zero_optimization=zero, **more)
    return start(model or net(), settings)


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit, without a version counter that shows it."""
    values = tensor.detach().reshape(-1)[1:2] if tensor.numel() > 1 else tensor.detach().reshape(-1)
    assert values.data_ptr() - tensor.data_ptr() in (0, tensor.element_size())
    values.view(torch.uint8).numpy()[0] ^= 4


def train(engine: onefold.Engine, num: int, *, flip_at: int = -1, tensor: torch.Tensor | None = None) -> None:
    for step, (x, y) in enumerate(batches(num)):
        engine.backward(engine(x, y))
        if step == flip_at:
            assert tensor is not None
            flip(tensor)
        engine.step()


def found(stage: int, name: str, dtype: str, world: int, tier: str) -> str:
    engine = engine_of(stage, tier=tier, **precision(dtype))
    train(engine, 2)
    assert engine.skipped_steps == 0
    tensor = engine.module.get_parameter(name) if name != "scale" else engine.module.scale
    steps = engine.global_steps
    with pytest.raises(ReplicaError) as caught:
        train(engine, 2, flip_at=0 if rank() == world - 1 else -1, tensor=tensor)
    assert isinstance(caught.value, RefusedStepError)
    assert engine.global_steps == steps
    return str(caught.value)


@covering(
    stage=(0, 1, 2, 3),
    name=("blocks.1.norm.weight", "blocks.1.up.weight", "head.weight", "scale"),
    dtype=("fp32", "bf16", "fp16"),
    world=(2, 3),
    strength=1,
    tier=("", "cpu", "params"),
    where=lambda stage, name, dtype, world, tier: (
        (stage < 3 or name in ("blocks.1.norm.weight", "scale"))
        and tier in {0: ("",), 3: ("", "cpu", "params")}.get(stage, ("", "cpu"))
    ),
)
def test_a_flipped_bit_is_found_and_named(on_ranks, stage, name, dtype, world, tier):
    texts = on_ranks(world, found, stage, name, dtype, world, tier)
    assert len(set(texts)) == 1
    place = {"scale": "buffer scale", "head.weight": "unit (root)"}.get(name, "unit blocks.1")
    either = " (from rank 0; either may be wrong)" if world == 2 and name != "scale" else ""
    assert texts[0].startswith(f"replicas differ before a step: {place} on rank {world - 1}{either}. These values")


class Normed(nn.Module):
    """Buffers that differ between ranks: of a batch norm, and of a forward; and a buffer that no forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 1)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rank() == 1:
            self.largest.copy_(x.abs().max())
        return self.out(self.norm(x) + self.table).square().mean()


def statistics_differ(flips: bool) -> str:
    engine = engine_of(1, every=2, model=Normed())
    generator = torch.Generator().manual_seed(rank())
    try:
        for step in range(7):
            engine.train(step < 4)  # in evaluation mode the statistics stay as they are, different on each rank
            engine.backward(engine(torch.randn(4, 6, generator=generator)))
            if step == 4 and flips and rank() == 1:
                flip(engine.module.table)
            engine.step()
    except ReplicaError as error:
        return str(error)
    assert engine.global_steps == 7
    return ""


def test_buffers_that_forwards_write_are_not_compared(on_ranks):
    assert on_ranks(2, statistics_differ, False) == ["", ""]


def test_a_buffer_next_to_them_is_compared(on_ranks):
    (text, _) = on_ranks(2, statistics_differ, True)
    assert "differ before a step: buffer table on rank 1" in text


def not_yet() -> list[int]:
    """Return the step before which a difference is found, for a comparison every three steps, and after a load."""
    engine = engine_of(0, every=3)
    train(engine, 3)
    if rank() == 1:
        flip(engine.module.scale)
    train(engine, 2)
    with pytest.raises(ReplicaError, match="buffer scale"):
        train(engine, 1)
    return [engine.global_steps]


def test_the_interval(on_ranks):
    assert on_ranks(2, not_yet) == [[5], [5]]


def loads(folder: str) -> None:
    """A load repairs the replicas, and buffers that it writes do not count as different."""
    engine = engine_of(0, every=1)
    train(engine, 2)
    engine.save_checkpoint(folder)
    if rank() == 1:
        flip(engine.module.head.weight)
    with pytest.raises(ReplicaError, match=r"unit \(root\) on rank 1"):
        train(engine, 1)
    engine.load_checkpoint(folder)
    train(engine, 3)
    assert engine.global_steps == 5


def test_a_load_repairs_the_replicas(on_ranks, tmp_path):
    on_ranks(2, loads, str(tmp_path))


def alone() -> None:
    engine = engine_of(0)
    train(engine, 2)
    assert engine.state.decision.replica_check is None


def test_one_rank_compares_nothing(on_ranks):
    on_ranks(1, alone)
