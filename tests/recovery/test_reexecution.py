"""Suspicious steps are executed again: a bit flip is found, named and repaired, and a bug is told from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from covering import covering
from models import VOCABULARY, batches, config, more, precision, rank, start, weights_of
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.config import ConfigError, load_config
from onefold.plan import make_plan
from onefold.recovery.executions import (
    BitFlipError,
    Difference,
    Execution,
    Finding,
    Kind,
    decide,
    describe_differences,
    first_difference,
)
from onefold.recovery.refused_step import NonFiniteError, RefusedStepError

TIERS: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "params": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


class Noisy(nn.Module):
    """Dropout, a batch norm, and parameters of which some have another optimizer group."""

    def __init__(self, returns_loss: bool = True) -> None:
        super().__init__()
        self.returns_loss = returns_loss
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.BatchNorm1d(16)) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).flatten(0, 1)
        for block in self.blocks:
            h = h + block(h)
        logits = self.head(h)
        return F.cross_entropy(logits.float(), y.flatten()) if self.returns_loss else logits


def engine_of(
    stage: int, tier: str = "", *, reexecutes: bool = True, returns_loss: bool = True, own: Any = None, **extra: Any
) -> onefold.Engine:
    torch.manual_seed(7)
    own = {"reexecute_steps": reexecutes, **(own or {})}
    return start(Noisy(returns_loss), config(stage, onefold=own, zero_optimization=TIERS[tier], **extra))


def loss_of(engine: onefold.Engine, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = engine(x, y)
    return output if engine.module.returns_loss else F.cross_entropy(output.float(), y.flatten()) * 1.5


def train(
    engine: onefold.Engine, steps: int, before: Callable[[int], None] = lambda step: None, first: int = 0
) -> list[float]:
    losses = []
    accumulation = engine.batch.accumulation
    for number, (x, y) in enumerate(batches((first + steps) * accumulation)):
        step = number // accumulation
        if step < first:
            continue
        before(number)
        loss = loss_of(engine, x, y)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


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


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Compare to the bit, also values that are not a number."""
    return all(torch.equal(*(each[name].reshape(-1).view(torch.uint8) for each in (one, other))) for name in other)


# -- an undisturbed run ------------------------------------------------------------------------------------------------


def undisturbed(stage: int, tier: str, dtype: str, accumulation: int) -> list[str]:
    settings = {**precision(dtype), "gradient_accumulation_steps": accumulation}
    runs = []
    for reexecutes in (False, True):
        torch.manual_seed(100 + rank())
        # With several micro-steps the program computes the loss, otherwise the model.
        engine = engine_of(stage, tier, reexecutes=reexecutes, returns_loss=accumulation == 1, **settings)
        with messages() as said:
            losses = train(engine, 4)
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        runs.append((losses, weights_of(engine.module), buffers, torch.get_rng_state()))
        if said:
            return said
        described = engine.describe()
        engine.destroy()
        if ("re-execution" in described) != reexecutes:
            return [described]
    (losses, weights, buffers, state), (other_losses, other_weights, other_buffers, other_state) = runs
    wrong = [] if losses == other_losses else ["losses"]
    wrong += [] if same(weights, other_weights) else ["weights"]
    wrong += [] if same(buffers, other_buffers) else ["buffers"]
    return wrong + ([] if torch.equal(state, other_state) else ["random state"])


@covering(
    stage=(0, 1, 2, 3),
    tier=("", "cpu", more("params")),
    dtype=("fp32", "bf16", more("fp16")),
    accumulation=(1, 2),
    world=(2, more(1)),
    strength=1,
    where=lambda stage, tier, dtype, accumulation, world: tier == "" or stage == 3,
)
def test_an_undisturbed_run_has_the_same_bits(on_ranks, stage, tier, dtype, accumulation, world):
    assert on_ranks(world, undisturbed, stage, tier, dtype, accumulation) == [[]] * world


# -- bit flips ---------------------------------------------------------------------------------------------------------


def flip_exponent(values: torch.Tensor) -> torch.Tensor:
    """Flip one bit of one value in [1, 2), which makes it infinite."""
    flipped = values.detach().clone()
    flat = flipped.view(-1)
    (index, *_) = ((flat >= 1) & (flat < 2)).nonzero().flatten().tolist()
    flat.view(torch.int32)[index] ^= 1 << 30
    assert not math.isfinite(flat[index].item())
    return flipped


def run_with_flip(
    stage: int, tier: str, accumulation: int, culprit: int
) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Train while a bit flips in a gradient of the culprit, in the last micro-step of the third step. -1: no flip."""
    scale = 200.0  # so that gradients have values in [1, 2)
    torch.manual_seed(100 + rank())
    engine = engine_of(stage, tier, returns_loss=accumulation == 1, gradient_accumulation_steps=accumulation)
    armed: list[int] = []
    fired: list[int] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if fired or not armed:
            return gradient
        fired.append(1)
        return flip_exponent(gradient * scale) / scale

    def before(number: int) -> None:
        if rank() == culprit and number == 3 * accumulation - 1:
            armed.append(1)

    engine.module.blocks[1][0].weight.register_hook(hook)
    with messages() as said:
        losses = train(engine, 4, before)
    assert bool(fired) == (rank() == culprit)
    weights = weights_of(engine.module)
    engine.destroy()
    return losses, weights, said


def flips(stage: int, tier: str, accumulation: int, culprit: int) -> list[str]:
    """A bit flips in a gradient of one rank. The run then equals the undisturbed one."""
    runs = [run_with_flip(stage, tier, accumulation, each) for each in (-1, culprit)]
    (losses, weights, _), (other_losses, other_weights, said) = runs
    wrong = [] if losses == other_losses and same(weights, other_weights) else ["the run differs"]
    if rank() == 0:
        text = said[0] if said else "nothing was said"
        expected = (
            "a bit has flipped: ",
            f"rank {culprit} first differs in the gradient of unit blocks.1",
            "(parameter group 0)",
            f"in micro-step {accumulation}",
            "(a gradient is not finite)",
            "the step continues with their gradients",
        )
        wrong += [text] if len(said) != 1 or any(part not in text for part in expected) else []
    return wrong


@covering(
    stage=(0, 1, 2, 3),
    tier=("", "cpu", more("params")),
    accumulation=(1, 2),
    culprit=(0, 1),
    strength=1,
    where=lambda stage, tier, accumulation, culprit: tier == "" or stage == 3,
)
def test_a_flipped_bit_of_a_gradient_is_named_and_repaired(on_ranks, stage, tier, accumulation, culprit):
    assert on_ranks(2, flips, stage, tier, accumulation, culprit) == [[], []]


def flips_forward(stage: int, returns_loss: bool) -> list[str]:
    """A bit flips in a forward of rank 1, which makes its loss infinite or not a number."""
    torch.manual_seed(100 + rank())
    engine = engine_of(stage, returns_loss=returns_loss, own={"nonfinite_gradients": "rollback"})
    fired: list[int] = []

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if fired or not armed:
            return output
        fired.append(1)
        return output * flip_exponent(torch.ones(1))

    armed: list[int] = []
    engine.module.blocks[0][0].register_forward_hook(hook)
    train(engine, 1)

    def before(number: int) -> None:
        if rank() == 1:
            armed.append(1)

    with messages() as said:
        if returns_loss:
            train(engine, 1, before, first=1)
            return said if engine.global_steps == 2 else ["the step was refused"]
        with pytest.raises(BitFlipError, match="There is no checkpoint to roll back to") as caught:
            train(engine, 1, before, first=1)
    assert isinstance(caught.value, RefusedStepError)
    assert engine.global_steps == 1
    return [str(caught.value)]


@pytest.mark.parametrize("stage", [2, more(3)])
def test_a_flipped_bit_of_a_forward_is_repaired_if_the_model_returns_its_loss(on_ranks, stage):
    (said,), nothing = on_ranks(2, flips_forward, stage, True)
    assert "rank 1 first differs in output 0 of the forward, in micro-step 1" in said
    assert nothing == []


@pytest.mark.parametrize("stage", [3, more(0)])
def test_a_step_is_refused_if_its_loss_may_be_wrong(on_ranks, stage):
    (text,), (other,) = on_ranks(2, flips_forward, stage, False)
    assert text == other
    assert "rank 1 first differs in output 0 of the forward" in text
    assert "The loss is computed outside of the model, from outputs that differ" in text


# -- bugs, and what cannot be re-executed ------------------------------------------------------------------------------


def has_bug(stage: int) -> list[str]:
    """A gradient that is never finite is a bug: the configured action follows."""
    engine = engine_of(stage)
    train(engine, 1)
    engine.module.head.weight.register_hook(lambda gradient: gradient * math.inf if rank() == 1 else gradient)
    with messages() as said, pytest.raises(NonFiniteError):
        train(engine, 1, first=1)
    assert engine.global_steps == 1
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_a_bug_is_told_from_a_bit_flip(on_ranks, stage):
    (said,), nothing = on_ranks(2, has_bug, stage)
    assert said.startswith("a gradient is not finite. The step was re-executed with the same bits on all ranks")
    assert nothing == []


def spikes(key: str) -> tuple[list[str], int]:
    engine = engine_of(2, own={key: {"factor": 20, "window": 2, "action": "skip"}})
    with messages() as said:
        for number, (x, y) in enumerate(batches(4)):
            engine.backward(engine(x, y) * (100.0 if number == 3 else 1.0))
            engine.step()
    return said, engine.skipped_steps


@pytest.mark.parametrize(("key", "value"), [("loss_spike", "loss"), ("grad_norm_spike", "gradient norm")])
def test_a_spike_is_re_executed(on_ranks, key, value):
    (said, skipped), (others, _) = on_ranks(2, spikes, key)
    assert "is a spike" in said[0]
    assert "re-executed with the same bits" in said[0]
    assert said[1].startswith(f"step skipped: the {value}")
    assert (others, skipped) == ([], 1)


class Counting(nn.Module):
    """A model whose output depends on a number that is not in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x).square().mean() * self.calls


def not_reproducible() -> tuple[list[str], int]:
    settings = config(0, onefold={"reexecute_steps": True})
    engine = start(Counting(), settings)
    with messages() as said:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)))
            engine.step()
    return said, engine.module.calls


def test_a_model_that_cannot_be_reproduced_is_named_once(on_ranks):
    (said, calls), _ = on_ranks(2, not_reproducible)
    assert len(said) == 1
    assert "steps are not re-executed, because the first one has other bits each time" in said[0]
    assert calls == 3 + 2, "only the first step was executed again"


def cannot(what: str) -> list[str]:
    engine = engine_of(0)
    with messages() as said:
        for x, y in batches(2):
            x = x.clone()
            loss = engine(x, y)
            if what == "bare":
                loss.backward()
            else:
                engine.backward(loss)
                x.zero_()
            engine.step()
    return said


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("bare", "backward was called on the loss directly"),
        ("inputs", "the program has changed the inputs of a forward"),
    ],
)
def test_steps_that_cannot_be_re_executed_are_named_once(on_ranks, what, reason):
    for number, said in enumerate(on_ranks(2, cannot, what)):
        assert len(said) == 1
        assert said[0].startswith(f"onefold.reexecute_steps: rank {number} cannot re-execute steps: {reason}")


class LossAndLogits(Noisy):
    """A model that returns its loss and what it is computed from, as those of transformers do."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = Noisy.forward(self, x, y)
        return {"loss": F.cross_entropy(logits.float(), y.flatten()), "logits": logits}


def returns_both(stage: int) -> tuple[list[str], int]:
    runs = []
    for reexecutes in (False, True):
        torch.manual_seed(100 + rank())
        own = {"reexecute_steps": reexecutes}
        model = LossAndLogits(returns_loss=False)
        engine = start(model, config(stage, onefold=own, gradient_accumulation_steps=2))
        with messages() as said:
            for x, y in batches(6):
                engine.backward(engine(x, y)["loss"] * 0.5)
                engine.step()
        runs.append((said, weights_of(engine.module), engine._replay._kept_bytes))
        engine.destroy()
    return runs[1][0] + ([] if same(runs[0][1], runs[1][1]) else ["weights"]), runs[1][2]


def test_the_gradients_of_logits_are_not_kept(on_ranks):
    wrong, kept_bytes = on_ranks(2, returns_both, 2)[0]
    assert wrong == []
    inputs, logits = 2 * 2 * 8 * 4 * 7, 4 * 4 * 7 * VOCABULARY
    assert inputs < kept_bytes < inputs + logits


def kept() -> str:
    engine = engine_of(1)
    assert (
        "re-execution      inputs, buffers and gradients of outputs of each step: not known before" in engine.describe()
    )
    train(engine, 1)
    inputs = sum(each.nbytes for each in batches(1)[0])
    buffers = sum(each.nbytes for each in engine.module.buffers())
    line = engine.describe().splitlines()[-1]
    assert engine._replay._kept_bytes == inputs + buffers + 4, (inputs, buffers)  # and the gradient of the loss
    return line


def test_the_memory_of_what_is_kept_is_counted(on_ranks):
    for line in on_ranks(2, kept):
        assert line.startswith("re-execution      inputs, buffers and gradients of outputs of each step: ")
        assert line.endswith(" kB")


# -- rules -------------------------------------------------------------------------------------------------------------


def test_two_of_three_decide():
    assert decide(True, False, False) is Finding.SAME
    assert decide(False, False, True) is Finding.FIRST_DIFFERS
    assert decide(False, True, False) is Finding.SECOND_DIFFERS
    assert decide(False, False, False) is Finding.ALL_DIFFER


def executed(*values: float, places: str = "abc") -> Execution:
    found = Execution()
    for place, value in zip(places, values, strict=False):
        found.add(Kind.GRADIENT, place, torch.tensor([1.0, value]))
    return found


def test_the_first_difference_is_found():
    assert not first_difference(executed(1, 2, 3), executed(1, 2, 3), 0).is_any
    assert first_difference(executed(1, 2, 3), executed(1, 5, 6), 4) == Difference(4, 1, Kind.GRADIENT)
    assert first_difference(executed(1, 2), executed(1, 2, 3), 0).index == 2
    assert first_difference(executed(1, places="a"), executed(1, places="b"), 0).index == 0
    assert not first_difference(executed(math.nan), executed(math.nan), 0).is_any


def test_padding_is_not_compared():
    one, other = Execution(), Execution()
    one.add(Kind.REDUCED, "a", torch.tensor([1.0, 2.0, 3.0, 4.0]), [(1, 2), (3, 4)])
    other.add(Kind.REDUCED, "a", torch.tensor([1.0, -7.0, 3.0, 9.0]), [(1, 2), (3, 4)])
    assert not first_difference(one, other, 0).is_any


def test_a_difference_after_the_reduction_only_is_one_of_the_reduction():
    reduced = [Difference(0), Difference(1, 1, Kind.REDUCED)]
    assert describe_differences(reduced, ["a", "b"]) == "b differs after its reduction, but on no rank before it"
    local = [Difference(0, 1, Kind.REDUCED), Difference(1, 0, Kind.GRADIENT)]
    assert describe_differences(local, ["a", "b"]) == "rank 1 first differs in a"


def test_the_key_reaches_the_plan():
    assert make_plan(load_config({"onefold": {"reexecute_steps": True}}), 2).guards.reexecutes
    assert not make_plan(load_config({}), 2).guards.reexecutes
    own = {"reexecute_steps": True, "step_in_backward": True}
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=r"reexecute_steps is not possible with onefold\.step_in_backward"):
        make_plan(load_config({"onefold": own, "zero_optimization": offload}), 2)
