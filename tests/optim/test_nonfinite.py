"""Gradients that are infinite or NaN: said at once on all ranks, skipped or let through; losses without a scale."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, more, net, precision, rank, start, weights_of

import onefold
from onefold.config import ConfigError

TIERS: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme", "buffer_size": 2048}},
    "params": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def engine_of(stage: int, tier: str, folder: str, **extra: Any) -> onefold.Engine:
    zero = {key: {**section} for key, section in TIERS[tier].items()}
    if tier == "nvme":
        zero["offload_optimizer"]["nvme_path"] = str(Path(folder, f"rank{rank()}"))
    return start(net(), config(stage, zero_optimization=zero, **extra))


def one_step(engine: onefold.Engine, micro_batches: Any, factor: float = 1.0, *, bare: bool = False) -> None:
    """`factor` spoils the first micro-batch."""
    for number, (x, y) in enumerate(micro_batches):
        loss = engine(x, y) * (factor if number == 0 else 1.0)
        loss.backward() if bare else engine.backward(loss)
        engine.step()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def windows(num: int, accumulation: int) -> list[Any]:
    every = batches(num * accumulation)
    return [every[number * accumulation : (number + 1) * accumulation] for number in range(num)]


def stops(stage: int, tier: str, folder: str, factor: float, accumulation: int, clipping: float) -> str:
    """One rank's loss of one step is spoiled. The step raises, and what follows is as if that batch had not been."""
    settings = {"gradient_accumulation_steps": accumulation, "gradient_clipping": clipping}
    settings["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    first, bad, *rest = windows(4, accumulation)
    engine = engine_of(stage, tier, folder, **settings)
    one_step(engine, first)
    before, rate = weights_of(engine.module), engine.get_lr()
    with pytest.raises(FloatingPointError) as caught:
        one_step(engine, bad, factor if rank() == engine.world_size - 1 else 1.0)
    assert same(weights_of(engine.module), before)
    assert (engine.global_steps, engine.skipped_steps, engine.get_lr()) == (1, 0, rate)
    assert not engine.was_step_applied()
    for step in rest:
        one_step(engine, step)
    whole = weights_of(engine.module)
    assert engine.global_steps == 3

    other = engine_of(stage, tier, folder, **settings)
    for step in (first, *rest):
        one_step(other, step)
    assert same(whole, weights_of(other.module))
    assert all(tensor.isfinite().all() for tensor in whole.values())
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("stage", "tier", "factor", "accumulation", "clipping"),
    [
        (0, "", math.inf, 1, 0.0),
        (1, "", math.nan, 2, 0.0),
        (3, "", math.inf, 2, 0.5),
        (2, "cpu", math.inf, 1, 0.0),
        (3, "nvme", math.nan, 1, 0.0),
        more(2, "", math.nan, 2, 0.0),
        more(3, "params", math.inf, 2, 0.0),
        more(0, "", math.nan, 2, 1.0),
    ],
)
def test_a_loss_that_is_not_finite_stops_before_any_weight(
    on_ranks, tmp_path, world, stage, tier, factor, accumulation, clipping
):
    said = on_ranks(world, stops, stage, tier, str(tmp_path), factor, accumulation, clipping)
    assert len(set(said)) == 1
    assert "every unit (" in said[0]
    assert "onefold.nonfinite_gradients" in said[0]
    # Infinity times what one path through a model multiplies with may be NaN, the loss itself is what it was.
    assert f"the loss was {factor} on rank {world - 1}" in said[0]


def one_unit(stage: int, bare: bool) -> str:
    engine = engine_of(stage, "", "")
    if rank() == 1:
        engine.module.blocks[1].up.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError) as caught:
        one_step(engine, batches(1), bare=bare)
    return str(caught.value)


@covering(stage=(0, 1, 2, 3), bare=(False, True), strength=1)
def test_the_unit_is_named(on_ranks, stage, bare):
    first, second = on_ranks(2, one_unit, stage, bare)
    assert first == second
    assert "unit blocks.1 is not finite" in first
    assert ("backward was called on the loss directly" if bare else "finite on every rank") in first


def after_another() -> str:
    """The loss of a backward that was dropped is forgotten."""
    engine = engine_of(2, "", "")
    (x, y), *_ = batches(1)
    engine.backward(engine(x, y) * math.inf)
    engine.zero_grad()
    engine.module.head.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(FloatingPointError) as caught:
        one_step(engine, batches(1))
    return str(caught.value)


def test_a_loss_that_was_dropped_is_not_named(on_ranks):
    assert "the loss was finite on every rank" in on_ranks(1, after_another)[0]


def with_policy(policy: str | None, dtype: str, stage: int) -> tuple[Any, ...]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    extra = {"onefold": {"nonfinite_gradients": policy}} if policy else {}
    engine = engine_of(stage, "", "", **precision(dtype), **extra)
    try:
        before = weights_of(engine.module)
        one_step(engine, batches(1), math.inf if rank() == 0 else 1.0)
        after = weights_of(engine.module)
    except FloatingPointError:
        return "raised", said
    finally:
        logging.getLogger("onefold").removeHandler(handler)
    outcome = "skipped" if same(before, after) else "let through"
    assert (engine.skipped_steps, engine.was_step_applied()) == ((1, False) if outcome == "skipped" else (0, True))
    if outcome == "let through":
        assert any(tensor.isnan().any() for tensor in after.values())
    return outcome, said


@pytest.mark.parametrize(
    ("policy", "dtype", "expected"),
    [
        (None, "fp32", "raised"),
        ("skip", "fp32", "skipped"),
        ("ignore", "fp32", "let through"),
        (None, "bf16", "skipped"),
        ("raise", "bf16", "raised"),
        (None, "fp16", "skipped"),
        ("skip", "fp16", "skipped"),
        more("ignore", "bf16", "let through"),
        more("raise", "fp32", "raised"),
    ],
)
def test_the_config_says_what_a_step_does(on_ranks, policy, dtype, expected):
    for number, (outcome, said) in enumerate(on_ranks(2, with_policy, policy, dtype, 2)):
        assert outcome == expected
        if expected == "skipped" and dtype != "fp16" and number == 0:
            assert any("step skipped: the gradient of every unit" in text and "inf on rank 0" in text for text in said)


def unchecked_bf16() -> bool:
    settings = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    engine = engine_of(1, "", "", **settings)
    one_step(engine, batches(1), math.inf)
    return engine.was_step_applied()


def test_bf16_that_asks_for_no_check_gets_none(on_ranks):
    assert on_ranks(1, unchecked_bf16) == [True]


def refused() -> None:
    for policy in ("raise", "ignore"):
        with pytest.raises(ConfigError, match=r"onefold\.nonfinite_gradients.*fp16"):
            engine_of(0, "", "", onefold={"nonfinite_gradients": policy}, **precision("fp16"))
    with pytest.raises(ConfigError, match="nonfinite_gradients"):
        engine_of(0, "", "", onefold={"nonfinite_gradients": "stop"})


def test_values_that_cannot_be_are_refused(on_ranks):
    on_ranks(1, refused)


# -- losses without a scale --------------------------------------------------------------------------------------------


def unscaled(stage: int) -> None:
    engine = engine_of(stage, "", "", **precision("fp16"))
    (x, y), *_ = batches(1)
    engine.scale(engine(x, y))  # never run backward
    with pytest.raises(RuntimeError, match=r"engine\.scale"):
        engine(x, y).backward()
    engine.scale(torch.ones((), requires_grad=True)).backward()  # reaches no parameter of the model
    with pytest.raises(RuntimeError, match=r"engine\.scale"):
        engine(x, y).backward()
    (engine.scale(engine(x, y)) / 2).backward()
    engine.step()
    assert engine.was_step_applied()
    with pytest.raises(RuntimeError, match=r"engine\.scale"):
        engine(x, y).backward()
    loss = engine.scale(engine(x, y))
    loss.backward()
    engine.step()
    assert engine.global_steps == 2


@covering(stage=(3, more(2)))
def test_a_scaled_loss_lets_no_other_pass(on_ranks, stage):
    on_ranks(2, unscaled, stage)
