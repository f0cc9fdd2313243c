"""Agreement with plain torch: DDP and torch's own optimizers, on the same data."""
# ruff: noqa: E501 - one optimizer a line

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import covering
from models import Net, batches, config, more, net, start, train_beside, weights_of
from torch.nn.parallel import DistributedDataParallel

from onefold.runtime import unsharded

STEPS = 5


def assert_all_close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, **tolerance, msg=lambda told, name=name: f"{name}: {told}")


def beside_ddp(
    stage: int, accumulation: int, clipping: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[Any]]:
    engine = start(
        net(),
        config(
            stage,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=clipping,
            **{"zero_optimization": {"overlap_comm": True}},
        ),
    )
    plain = Net()
    plain.load_state_dict(weights_of(engine.module))
    ddp = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for index, (x, y) in enumerate(batches(STEPS * accumulation)):
        mine = engine(x, y)
        engine.backward(mine)
        engine.step()
        theirs = ddp(x, y)
        (theirs / accumulation).backward()
        losses.append((mine.item(), theirs.item()))
        if (index + 1) % accumulation == 0:
            if clipping:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), clipping)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(engine.module), weights_of(plain), losses


@covering(stage=(0, 1, 2, 3), world=(2, 1, more(3)), accumulation=(1, 3), clipping=(0.0, 0.2), strength=1)
def test_training_equals_ddp_with_adamw(on_ranks, world, stage, accumulation, clipping):
    for mine, theirs, losses in on_ranks(world, beside_ddp, stage, accumulation, clipping):
        assert_all_close(mine, theirs, rtol=1e-4, atol=2e-5)
        for ours, ddp in losses:
            assert ours == pytest.approx(ddp, rel=1e-4)


OPTIMIZERS: list[tuple[str, dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "betas": [0.8, 0.9]}, torch.optim.AdamW, {"amsgrad": True, "betas": (0.8, 0.9), "weight_decay": 0}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {}, torch.optim.SGD, {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.01}, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.01}),
    ("RMSprop", {"momentum": 0.5}, torch.optim.RMSprop, {"momentum": 0.5}),
    ("NAdam", {}, torch.optim.NAdam, {}),
    ("Adamax", {}, torch.optim.Adamax, {}),
]  # fmt: skip


def beside_torch(index: int, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """fp32 throughout; gradients of both ranks are the same, so plain torch on one batch is the reference."""
    name, params, kind, same = OPTIMIZERS[index]
    engine = start(net(), config(stage, optimizer={"type": name, "params": {"lr": 5e-3, **params}}))
    plain = Net()
    plain.load_state_dict(weights_of(engine.module))
    return train_beside(engine, plain, kind(plain.parameters(), lr=5e-3, **same), STEPS)


@covering(index=range(len(OPTIMIZERS)), stage=(0, 2, 3), strength=1, always=[(1, 0), (1, 2), (1, 3), (3, 3), (6, 3)])
def test_named_optimizers_equal_torchs(on_ranks, index, stage):
    for mine, theirs in on_ranks(2, beside_torch, index, stage):
        assert_all_close(mine, theirs, rtol=1e-4, atol=1e-5)


def lion(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = torch.nn.Linear(8, 8, bias=False)
    engine = start(model, config(stage, optimizer={"type": "Lion", "params": {"lr": 0.1, "weight_decay": 0.5}}))
    expected = engine.module.weight.detach().clone()
    momentum = torch.zeros_like(expected)
    for step in range(3):
        gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        engine.backward((engine.module.weight * gradient).sum())
        engine.step()
        update = (0.9 * momentum + 0.1 * gradient).sign()
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * update
        momentum = 0.99 * momentum + 0.01 * gradient
    return engine.module.weight.detach().clone(), expected


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lion_follows_its_formula(on_ranks, stage):
    for mine, expected in on_ranks(2, lion, stage):
        torch.testing.assert_close(mine, expected)


def beside_torch_bf16() -> tuple[list[float], list[float]]:
    """bf16 compute with fp32 masters beside the same written out by hand."""
    engine = start(net(), config(1, bf16={"enabled": True}))
    plain = Net().bfloat16()
    plain.load_state_dict(weights_of(engine.module))
    masters = [parameter.detach().float().requires_grad_() for parameter in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1)
    mine, theirs = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randint(0, 31, (4, 7), generator=generator)
        loss = engine(x, x)
        engine.backward(loss)
        engine.step()
        mine.append(loss.item())
        loss = plain(x, x)
        loss.backward()
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
        theirs.append(loss.item())
    return mine, theirs


def test_bf16_equals_masters_by_hand(on_ranks):
    for mine, theirs in on_ranks(2, beside_torch_bf16):
        assert mine == pytest.approx(theirs, rel=1e-4)


def beside_autocast(stage: int) -> tuple[set[torch.dtype], set[torch.dtype], list[float], list[float], list[float]]:
    """Dtypes of parameters and of what a layer computes; losses, those of torch's own autocast, and of plain fp32."""
    engine = start(net(), config(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    computed: set[torch.dtype] = set()
    engine.module.blocks[0].up.register_forward_hook(lambda _module, _args, output: computed.add(output.dtype))
    plain, exact = Net(), Net()
    weights = weights_of(engine.module)
    losses: list[list[float]] = [[], [], []]
    data = [torch.randint(0, 31, (4, 7), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    for x in data:
        loss = engine(x, x)
        engine.backward(loss)
        engine.step()
        losses[0].append(loss.item())
    for number, (model, enabled) in enumerate(((plain, True), (exact, False)), 1):
        model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for x in data:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = model(x, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[number].append(loss.item())
    with unsharded(engine.module.parameters()):
        dtypes = {parameter.dtype for parameter in engine.module.parameters()}
    return dtypes, computed, *losses


def bf16_under_autocast(stage: int) -> tuple[float, float]:
    """The loss of a model in bf16 under autocast, and that of torch alone."""
    more_keys = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}
    engine = start(net(), config(stage, **more_keys))
    plain = net().to(torch.bfloat16)
    plain.load_state_dict(weights_of(engine.module))
    x = torch.randint(0, 31, (4, 7), generator=torch.Generator().manual_seed(0))
    loss = engine(x, x)
    engine.backward(loss)
    engine.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = plain(x, x)
    engine.close()
    return loss.item(), theirs.item()


@pytest.mark.parametrize("stage", [2, 3])
def test_torch_autocast_over_bf16_computes_as_torchs_own(on_ranks, stage):
    for mine, theirs in on_ranks(2, bf16_under_autocast, stage):
        assert mine == theirs


@covering(stage=(3, 0, more(2)))
def test_torch_autocast_trains_as_torchs_own(on_ranks, stage):
    for dtypes, computed, mine, theirs, exact in on_ranks(2, beside_autocast, stage):
        assert dtypes == {torch.float32}
        assert computed == {torch.bfloat16}
        assert mine == pytest.approx(theirs, rel=1e-4)
        assert mine != pytest.approx(exact, rel=1e-4)  # what a run without autocast would have
