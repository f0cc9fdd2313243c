"""Gradients that wait for a common copy into their slots: which wait, how many copies there are, and the values."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, first_difference, net, precision, start, train, weights_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from onefold.runtime import flat_grad
from onefold.utils import safe_get_full_grad

WIDTH = 8
COPIES = {"aten::copy_", "aten::_foreach_copy_", "aten::add_", "aten::_foreach_add_"}


class Copies(TorchDispatchMode):
    """Counts operations that copy or add in place, and the tensors that each of them writes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in COPIES:
            self.calls[name] += 1
            self.written += len(args[0]) if isinstance(args[0], list) else 1
        return func(*args, **(kwargs or {}))


def copies_of_a_backward(stage: int, limit: int) -> tuple[int, int, int]:
    """Return the foreach copies of a second backward, the tensors they wrote, and the number of parameters."""
    before, flat_grad.MAX_WAITING_BYTES = flat_grad.MAX_WAITING_BYTES, limit
    try:
        engine = start(net(), config(stage))
        (x, y), (x2, y2) = batches(2)
        engine.backward(engine(x, y))
        engine.step()
        loss = engine(x2, y2)
        with Copies() as copies:
            engine.backward(loss)
        engine.step()
        return copies.calls["aten::_foreach_copy_"], copies.written, len(list(engine.module.parameters()))
    finally:
        flat_grad.MAX_WAITING_BYTES = before


@pytest.mark.parametrize("stage", [2, 3])
def test_small_gradients_are_copied_together(on_ranks, stage):
    ((together, written, parameters),) = on_ranks(1, copies_of_a_backward, stage, 1 << 20)
    ((apart, _, _),) = on_ranks(1, copies_of_a_backward, stage, 0)
    assert written >= parameters > 8
    assert together <= 3
    assert apart == parameters


def trained(stage: int, dtype: str, limit: int) -> Any:
    before, flat_grad.MAX_WAITING_BYTES = flat_grad.MAX_WAITING_BYTES, limit
    try:
        settings = config(stage, **precision(dtype), gradient_accumulation_steps=2, gradient_clipping=0.5)
        return train(start(net(tied=True), settings))
    finally:
        flat_grad.MAX_WAITING_BYTES = before


def differences(stage: int, dtype: str) -> list[str | None]:
    reference = trained(stage, dtype, 0)
    return [first_difference(trained(stage, dtype, limit), reference) for limit in (3_000, 8 << 20)]


@covering(stage=(0, 1, 2, 3), dtype=("fp32", "bf16"), world=(1, 2), strength=1)
def test_values_do_not_depend_on_what_waits(on_ranks, stage, dtype, world):
    """Compare limits that copy each gradient at once, a few together, and all together."""
    for found in on_ranks(world, differences, stage, dtype):
        assert found == [None, None]


class DoublesInPlace(torch.autograd.Function):
    """Writes to the gradient that it is given, as some fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.mul_(2)


class SharesGradient(nn.Module):
    """The gradient of `bias` is a view of one that a later node of the backward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(2, WIDTH // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((DoublesInPlace.apply(self.inner(x)) + self.bias.view(-1)) * torch.ones(WIDTH)).sum()


def gradient_of_a_shared_one(stage: int) -> Any:
    model = SharesGradient()
    engine = start(model, config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    engine.backward(engine(torch.ones(WIDTH)))
    return safe_get_full_grad(model.bias).tolist()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_whose_memory_is_shared_does_not_wait(on_ranks, stage):
    plain = SharesGradient()
    plain(torch.ones(WIDTH)).backward()
    assert plain.bias.grad is not None
    assert (plain.bias.grad == 2).all(), "torch has written to the memory of this gradient"
    for found in on_ranks(1, gradient_of_a_shared_one, stage):
        assert found == torch.ones_like(plain.bias).tolist()


class Neighbours(nn.Module):
    """Two parameters whose gradients are one tensor for autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(WIDTH))
        self.other = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.one + self.other) * x).sum()


def gradients_with_hooks(stage: int) -> list[list[float]]:
    """Let hooks of the user write to gradients before and after the engine takes them."""
    model = Neighbours()

    def double(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    model.one.register_post_accumulate_grad_hook(double)
    engine = start(model, config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    model.other.register_post_accumulate_grad_hook(double)
    engine.backward(engine(torch.ones(WIDTH)))
    return [safe_get_full_grad(parameter).tolist() for parameter in (model.one, model.other)]


@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_of_the_user_change_one_gradient_only(on_ranks, stage):
    assert on_ranks(1, gradients_with_hooks, stage) == [[[2.0] * WIDTH] * 2]


def gradient_of_a_recorded_backward(stage: int) -> list[Any]:
    """Accumulate the gradient of a penalty on gradients, whose backward is recorded, and drop the recorded ones."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    engine = start(model, config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    loss = engine(torch.ones(2, WIDTH)).square().sum()
    loss.backward(create_graph=True)
    return [(p.grad.requires_grad, safe_get_full_grad(p) is not None) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_a_recorded_backward_are_copied_without_their_graph(on_ranks, stage):
    (found,) = on_ranks(1, gradient_of_a_recorded_backward, stage)
    assert found == [(False, True)] * 4


class RunsTwice(nn.Module):
    """Each run of the block has a backward inside the backward, so its parameters get two gradients.

    `first` gets its gradients after them, so that both wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x.square().sum()


def a_step_of_two_runs(stage: int) -> list[str | None]:
    torch.manual_seed(3)
    model = RunsTwice()
    plain = copy.deepcopy(model)
    x = torch.ones(2, WIDTH)
    plain(x).backward()
    torch.optim.SGD(plain.parameters(), 0.5).step()
    engine = start(model, config(stage, optimizer={"type": "SGD", "params": {"lr": 0.5}}))
    engine.backward(engine(x))
    engine.step()
    return [first_difference(weights_of(model), weights_of(plain))]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_that_gets_a_gradient_twice_is_stepped_with_both(on_ranks, stage):
    assert on_ranks(1, a_step_of_two_runs, stage) == [[None]]
