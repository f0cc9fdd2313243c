"""Steps that are refused: what a rollback restores, what it keeps, and when it raises; spikes of loss and gradients."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import VOCABULARY, batches, config, more, net, rank, start, weights_of

import onefold
from onefold.recovery.refused_step import GradNormSpikeError, LossSpikeError, NonFiniteError

TIERS: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "params": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
SCHEDULER = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}


def engine_of(stage: int, tier: str = "", own: dict[str, Any] | None = None, **extra: Any) -> onefold.Engine:
    own = {"nonfinite_gradients": "rollback"} if own is None else own
    return start(net(), config(stage, onefold=own, zero_optimization=TIERS[tier], scheduler=SCHEDULER, **extra))


def one_step(engine: onefold.Engine, micro_batches: Any, factor: float = 1.0) -> None:
    """Train on one window. `factor` spoils its first micro-batch."""
    for number, (x, y) in enumerate(micro_batches):
        engine.backward(engine(x, y) * (factor if number == 0 else 1.0))
        engine.step()


def windows(num: int, accumulation: int = 1) -> list[Any]:
    every = batches(num * accumulation)
    return [every[number * accumulation : (number + 1) * accumulation] for number in range(num)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@contextmanager
def messages() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("onefold").removeHandler(handler)


# -- rollback ----------------------------------------------------------------------------------------------------------


def rolls_back(stage: int, tier: str, folder: str, factor: float, accumulation: int) -> list[str]:
    """After a rollback the run continues as if the batches since the checkpoint had not existed."""
    settings = {"gradient_accumulation_steps": accumulation}
    first, second, lost, bad, *rest = windows(6, accumulation)
    engine = engine_of(stage, tier, **settings)
    one_step(engine, first)
    one_step(engine, second)
    engine.save_checkpoint(folder)
    saved, rate = weights_of(engine.module), engine.get_lr()
    one_step(engine, lost)
    with messages() as found:
        one_step(engine, bad, factor if rank() == engine.world_size - 1 else 1.0)
    assert same(weights_of(engine.module), saved)
    assert (engine.global_steps, engine.skipped_steps, engine.get_lr()) == (2, 0, rate)
    assert not engine.was_step_applied()
    for window in rest:
        one_step(engine, window)
    assert engine.global_steps == 4

    other = engine_of(stage, tier, **settings)
    for window in (first, second, *rest):
        one_step(other, window)
    assert same(weights_of(engine.module), weights_of(other.module))
    return found


@pytest.mark.parametrize("world", [2, more(1)])
@pytest.mark.parametrize(
    ("stage", "tier", "factor", "accumulation"),
    [
        (0, "", math.nan, 1),
        (2, "", math.inf, 2),
        (3, "params", math.inf, 1),
        more(1, "cpu", math.nan, 2),
        more(3, "", math.nan, 2),
    ],
)
def test_a_rollback_restores_the_checkpoint_and_continues(on_ranks, tmp_path, world, stage, tier, factor, accumulation):
    said, *others = on_ranks(world, rolls_back, stage, tier, str(tmp_path), factor, accumulation)
    (line,) = [text for text in said if "Rolled back" in text]
    assert line.startswith(f"the loss was {factor} on rank {world - 1}. Rolled back from step 3 to step 2")
    assert "global_step2" in line
    assert "rollback 1 of 3" in line
    assert not any("Rolled back" in text for other in others for text in other)


def gradient_alone(folder: str) -> None:
    """A gradient that is not finite under a finite loss, and a loss that is not under a finite gradient."""
    engine = engine_of(2)
    engine.save_checkpoint(folder)
    saved = weights_of(engine.module)
    (window,) = windows(1)
    handle = engine.module.head.weight.register_hook(lambda gradient: gradient * math.inf)
    one_step(engine, window)
    handle.remove()
    assert same(weights_of(engine.module), saved)
    (x, y), *_ = window
    engine.backward(engine(x, y) + math.nan)  # the gradient of the sum is finite
    engine.step()
    assert engine.global_steps == 0
    assert same(weights_of(engine.module), saved)
    one_step(engine, window)
    assert engine.global_steps == 1


def test_a_loss_or_a_gradient_rolls_back(on_ranks, tmp_path):
    on_ranks(2, gradient_alone, str(tmp_path))


def fails(folder: str) -> None:
    engine = engine_of(3, own={"nonfinite_gradients": "rollback", "max_rollbacks": 2})
    good, bad = windows(2)
    with pytest.raises(NonFiniteError, match=r"There is no checkpoint to roll back to") as caught:
        one_step(engine, bad, math.inf)
    assert isinstance(caught.value, FloatingPointError)
    one_step(engine, good)  # the engine is usable after the error
    engine.save_checkpoint(folder)
    for _ in range(2):
        one_step(engine, bad, math.inf)
    with pytest.raises(NonFiniteError, match=r"onefold\.max_rollbacks = 2 rollbacks have not brought the run further"):
        one_step(engine, bad, math.inf)
    assert engine.global_steps == 1
    one_step(engine, good)
    for _ in range(2):  # progress
        one_step(engine, bad, math.inf)
    assert engine.global_steps == 1


def test_a_rollback_that_is_not_possible_raises(on_ranks, tmp_path):
    on_ranks(2, fails, str(tmp_path))


def of_rank_0(folder: str) -> int:
    """Rank 0 saves alone, in the background. The other ranks know of no checkpoint."""
    engine = engine_of(2)
    good, bad = windows(2)
    one_step(engine, good)
    if rank() == 0:
        engine.save_checkpoint(folder, "mine", background=True)
    one_step(engine, good)
    one_step(engine, bad, math.nan)
    return engine.global_steps


def test_a_checkpoint_that_rank_0_saved_alone(on_ranks, tmp_path):
    assert on_ranks(2, of_rank_0, str(tmp_path)) == [1, 1]


def of_a_load(folder: str) -> None:
    """A checkpoint that the engine has loaded counts, but not one of which it has loaded only the weights."""
    good, bad = windows(2)
    engine = engine_of(1)
    one_step(engine, good)
    engine.save_checkpoint(folder)
    other = engine_of(1)
    other.load_checkpoint(folder, load_module_only=True)
    with pytest.raises(NonFiniteError, match="no checkpoint"):
        one_step(other, bad, math.inf)
    other.load_checkpoint(folder)
    one_step(other, good)
    one_step(other, bad, math.inf)
    assert other.global_steps == 1


def test_a_checkpoint_that_was_loaded(on_ranks, tmp_path):
    on_ranks(2, of_a_load, str(tmp_path))


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randint(VOCABULARY, (6,), generator=torch.Generator().manual_seed(index))


def position(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the samples that a run with a rollback reads, and those of an undisturbed run. Dropout draws numbers."""

    def read(spoiled: int) -> list[list[int]]:
        torch.manual_seed(0)
        settings = config(2, onefold={"nonfinite_gradients": "rollback"})
        engine = start(net(), settings, training_data=Samples())
        engine.save_checkpoint(folder)
        found = []
        for number, (index, x) in enumerate(engine.training_dataloader):
            found.append(index.tolist())
            loss = engine(x[:, :-1], x[:, 1:])
            engine.backward(loss * (math.nan if number == spoiled else 1.0))
            engine.step()
        return found

    return read(3), read(-1)


def test_the_data_continues_with_the_next_batch(on_ranks, tmp_path):
    for spoiled, whole in on_ranks(2, position, str(tmp_path)):
        assert spoiled == whole
        assert len({sample for batch in whole for sample in batch}) == 32


# -- spikes ------------------------------------------------------------------------------------------------------------

WINDOW = 6


SPIKES = {"loss_spike": LossSpikeError, "grad_norm_spike": GradNormSpikeError}


def spike(action: str, key: str = "loss_spike", **more: Any) -> dict[str, Any]:
    return {key: {"factor": 8, "window": WINDOW, "action": action}, **more}


def spiked(action: str, key: str, stage: int, folder: str) -> tuple[str, int, int, bool, list[str]]:
    """Multiply the loss of one rank by 50, at the step after the window is full."""
    engine = engine_of(stage, own=spike(action, key))
    *before, bad, after = windows(WINDOW + 2)
    for number, window in enumerate(before):
        one_step(engine, window)
        if number == 3:
            engine.save_checkpoint(folder)
    weights, error = weights_of(engine.module), ""
    with messages() as found:
        try:
            one_step(engine, bad, 50.0 if rank() == engine.world_size - 1 else 1.0)
        except SPIKES[key] as caught:
            error = str(caught)
    unchanged = same(weights_of(engine.module), weights)
    steps, skipped = engine.global_steps, engine.skipped_steps
    one_step(engine, after)
    assert engine.global_steps == steps + 1
    return error, steps, skipped, unchanged, found


@covering(action=("warn", "raise", "skip", "rollback"), key=SPIKES, stage=(0, 2, 3), world=(1, 2), strength=1)
def test_a_spike_is_found_on_all_ranks(on_ranks, tmp_path, action, key, stage, world):
    results = on_ranks(world, spiked, action, key, stage, str(tmp_path))
    assert len({found[:4] for found in results}) == 1
    error, steps, skipped, unchanged, said = results[0]
    assert steps == {"warn": WINDOW + 1, "raise": WINDOW, "skip": WINDOW + 1, "rollback": 4}[action]
    assert skipped == (action == "skip")
    assert unchanged == (action in ("raise", "skip"))
    assert ("is a spike: it is above" in error) == (action == "raise")
    if action != "raise":
        assert any("is a spike: it is above" in text for text in said)


def resumed(folder: str, key: str) -> list[int]:
    """Return the skipped steps of a run, and of one that is resumed from its checkpoint before the spike."""
    settings = spike("skip", key)
    *before, bad = windows(WINDOW + 1)
    engine = engine_of(1, own=settings)
    for window in before:
        one_step(engine, window)
    engine.save_checkpoint(folder)
    other = engine_of(1, own=settings)
    other.load_checkpoint(folder)
    for each in (engine, other):
        one_step(each, bad, 50.0)
    assert same(weights_of(engine.module), weights_of(other.module))
    return [engine.skipped_steps, other.skipped_steps]


@pytest.mark.parametrize("key", SPIKES)
def test_a_resumed_run_compares_with_the_values_of_the_checkpoint(on_ranks, tmp_path, key):
    assert on_ranks(2, resumed, str(tmp_path), key) == [[1, 1], [1, 1]]


def spread() -> tuple[list[float], list[float], int]:
    """Return the norms of the window and those of the steps. One step has a gradient that is not finite."""
    own = spike("skip", "grad_norm_spike", nonfinite_gradients="skip")
    engine, norms = engine_of(2, own=own, gradient_clipping=0.01), []
    for number, window in enumerate(windows(5)):
        one_step(engine, window, math.inf if number == 2 else 1.0)
        if number != 2:
            norms.append(engine.get_global_grad_norm())
    return engine.state.decision.norm_guard.state_dict(), norms, engine.skipped_steps


def test_the_window_has_the_finite_norms_before_clipping(on_ranks):
    for window, norms, skipped in on_ranks(2, spread):
        assert window == norms
        assert min(window) > 0.1
        assert skipped == 1


def sent(own: dict[str, Any]) -> list[int]:
    engine = engine_of(2, own=own)
    for window in windows(4):
        one_step(engine, window)
    return [engine.ledger.calls("synchronize"), engine.ledger.bytes("synchronize")]


def test_losses_are_exchanged_without_another_collective(on_ranks):
    without = on_ranks(2, sent, {})
    assert on_ranks(2, sent, spike("warn")) == without
    assert on_ranks(2, sent, spike("warn", "grad_norm_spike")) == without
    assert on_ranks(2, sent, {"nonfinite_gradients": "rollback"}) == without


def bare() -> list[str]:
    """A loss that the engine does not see is not checked, and this is said once."""
    engine = engine_of(2, own=spike("raise"))
    with messages() as found:
        for (x, y), *_ in windows(WINDOW + 2):
            (engine(x, y) * (50.0 if engine.global_steps == WINDOW else 1.0)).backward()
            engine.step()
    return found


def test_losses_of_bare_backwards_are_not_checked(on_ranks):
    first, second = on_ranks(2, bare)
    assert len([text for text in first if "Call engine.backward(loss)" in text]) == 1
    assert second == []


def relative(folder: str) -> None:
    """The program changes its working directory after the save."""
    here = os.getcwd()
    good, bad = windows(2)
    try:
        os.chdir(folder)
        Path("elsewhere").mkdir()
        engine = engine_of(0)
        engine.save_checkpoint("checkpoints")
        os.chdir("elsewhere")
        one_step(engine, good)
        one_step(engine, bad, math.inf)
        assert engine.global_steps == 0
    finally:
        os.chdir(here)


def test_a_relative_folder_is_found_from_another_directory(on_ranks, tmp_path):
    on_ranks(1, relative, str(tmp_path))
