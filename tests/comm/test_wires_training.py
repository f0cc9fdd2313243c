"""A small GPT over two hosts of two ranks: wires end where stage 3 ends, and a second shard moves no bit on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import config, more, rank, start

from onefold.tools.train.gpt import GPT, GPTConfig

STEPS = 300
LAST = 20
SHAPE = GPTConfig(num_layers=1, num_heads=2, dim=32, sequence_length=16, vocab_size=160)
NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
HPZ = {"zero_hpz_partition_size": 2}
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 64}}
KEYS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "hpZ": HPZ,
    "qwZ": QWZ,
    "qgZ": QGZ,
    "LoCo": {**QGZ, **LOCO},
    "all": {**HPZ, **QWZ, **QGZ},
    "all and LoCo": {**HPZ, **QWZ, **QGZ, **LOCO},
}


def batch(number: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token has four that may follow it, all as likely: the loss can fall to log 4 and no further."""
    generator = torch.Generator().manual_seed(4 * number + rank())
    line = [torch.randint(0, SHAPE.vocab_size, (size,), generator=generator)]
    for _ in range(SHAPE.sequence_length):
        way = torch.randint(0, 4, (size,), generator=generator)
        line.append((3 * line[-1] + 7 + 5 * way) % SHAPE.vocab_size)
    tokens = torch.stack(line, 1)
    return tokens[:, :-1], tokens[:, 1:]


def train(name: str) -> list[float]:
    """The loss of this rank at every step."""
    torch.manual_seed(0)
    settings = config(
        3,
        train_micro_batch_size_per_gpu=4,
        gradient_clipping=1.0,
        optimizer={"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.01}},
        zero_optimization={**KEYS[name], **NOTHING_KEPT},
        onefold={"node_size": 2},
    )
    engine = start(GPT(SHAPE), settings)
    losses = []
    for number in range(STEPS):
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.fixture(scope="module")
def trained(on_ranks):
    """Losses of all ranks, of each run once."""
    kept: dict[str, list[list[float]]] = {}

    def get(name: str) -> list[list[float]]:
        if name not in kept:
            kept[name] = on_ranks(4, train, name)
        return kept[name]

    return get


def end(losses: list[list[float]]) -> float:
    """The mean of the last steps, over all ranks."""
    return sum(sum(each[-LAST:]) for each in losses) / (LAST * len(losses))


@pytest.mark.slow
def test_the_job_learns(trained):
    losses = trained("stage 3")
    assert min(each[0] for each in losses) > 4.9
    assert end(losses) < 2


@pytest.mark.slow
def test_a_second_shard_is_bit_equal_at_every_step(trained):
    assert trained("hpZ") == trained("stage 3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", more("qwZ"), more("qgZ"), more("LoCo"), more("all and LoCo")])
def test_wires_end_within_a_hundredth_of_stage_3(trained, name):
    assert trained(name) != trained("stage 3")
    assert end(trained(name)) == pytest.approx(end(trained("stage 3")), rel=0.01)
