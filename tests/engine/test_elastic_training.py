"""One elastic config on several numbers of ranks: the train batch and the samples of each step stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import VOCABULARY, config, net, start

import onefold
from onefold.config.elasticity import ElasticityIncompatibleWorldSize

STEPS = 4
ELASTIC = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "version": 0.1, "max_gpus": 6}


class Samples(torch.utils.data.Dataset):
    """Sequences that are determined by their index."""

    def __len__(self) -> int:
        return 12 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (7,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def elastic_config(stage: int, **elastic: Any) -> dict[str, Any]:
    found = config(stage, elasticity={**ELASTIC, **elastic})
    del found["train_micro_batch_size_per_gpu"]
    return found


def step_losses(engine: onefold.Engine, num_steps: int) -> list[float]:
    """Train, and return the mean loss of each step over all samples of this rank."""
    found = []
    batches = iter(engine.training_dataloader)
    for _ in range(num_steps):
        losses = []
        for _ in range(engine.batch.accumulation):
            x, y = next(batches)
            loss = engine(x, y)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        found.append(sum(losses) / len(losses))
    return found


def trained(stage: int) -> tuple[tuple[int, int, int], list[float], dict[str, torch.Tensor]]:
    engine = start(net(), elastic_config(stage), training_data=Samples())
    losses = step_losses(engine, STEPS)
    assert engine.global_samples == 12 * STEPS
    return (engine.batch.train, engine.batch.micro, engine.batch.accumulation), losses, engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(on_ranks, stage):
    """Check losses and weights of one and two ranks up to rounding: their sums are added in other orders."""
    ((batch, one, weights),) = on_ranks(1, trained, stage)
    both = on_ranks(2, trained, stage)
    assert batch == (12, 3, 4)
    assert [found[0] for found in both] == [(12, 3, 2)] * 2
    two = [sum(pair) / 2 for pair in zip(both[0][1], both[1][1], strict=True)]
    assert two == pytest.approx(one, rel=1e-5)
    assert one[0] != one[-1]
    for name, weight in weights.items():
        torch.testing.assert_close(both[0][2][name], weight, rtol=1e-4, atol=1e-5)


def half(folder: str, second: bool) -> list[float]:
    engine = start(net(), elastic_config(3), training_data=Samples())
    if second:
        assert engine.load_checkpoint(folder)[0] is not None
    losses = step_losses(engine, STEPS // 2)
    if not second:
        engine.save_checkpoint(folder)
    return losses


def test_a_job_continues_on_another_number_of_ranks(on_ranks, tmp_path):
    ((_, whole, _),) = on_ranks(1, trained, 3)
    (first,) = on_ranks(1, half, str(tmp_path), False)
    second = on_ranks(2, half, str(tmp_path), True)
    assert first == whole[: STEPS // 2]
    assert [sum(pair) / 2 for pair in zip(*second, strict=True)] == pytest.approx(whole[STEPS // 2 :], rel=1e-5)


def refused() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match="Valid numbers of ranks are 1, 2, 3, 6"):
        start(net(), elastic_config(0, max_train_batch_size=18, micro_batch_sizes=[3], max_gpus=6, min_gpus=1))


def test_a_number_of_ranks_that_does_not_fit_raises_with_the_list(on_ranks):
    on_ranks(4, refused)
