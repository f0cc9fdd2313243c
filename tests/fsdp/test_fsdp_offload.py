"""`onefold.fsdp.offload`: an FSDP2 model trains as without it, bit for bit, and its checkpoints are interchangeable."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Net, Trace, batches, first_difference, more
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import onefold
from onefold.comm import local_device
from onefold.fsdp import OffloadedOptimizer, offload
from onefold.fsdp.state_placement import choose_offloaded, ratio_that_fits

HYPER = {"lr": 1e-2, "weight_decay": 0.1}


class Lion(torch.optim.Optimizer):
    """The formula of Lion, as a class that names the rule that onefold computes it by."""

    onefold_rule = "lion"

    def __init__(self, parameters: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                update = average * beta1 + parameter.grad * (1 - beta1)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.sign(), alpha=-group["lr"])
                average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


# The constructors of optimizers whose step torch computes by the kernel that onefold uses.
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, **HYPER, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, **HYPER, fused=True, maximize=True),
    "AMSGrad": lambda parameters: torch.optim.AdamW(parameters, **HYPER, fused=True, amsgrad=True),
}
# Those of which torch has no such kernel for DTensors.
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW of several kernels": lambda parameters: torch.optim.AdamW(parameters, **HYPER),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
    "Lion": lambda parameters: Lion(parameters, **HYPER),
}
OPTIMIZERS = FUSED | OTHERS


def sharded_net(dtype: str = "fp32", width: int = 21, depth: int = 3) -> nn.Module:
    """A model under `fully_shard`: fp32, fp32 that computes in bf16 ("mixed"), or bf16."""
    torch.manual_seed(3)
    model = Net(width=width, depth=depth)
    model.to(local_device(), torch.bfloat16 if dtype == "bf16" else torch.float32)
    policy = MixedPrecisionPolicy()
    if dtype == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh(local_device().type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def local(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shards."""
    found = {name: p.detach() for name, p in model.named_parameters()}
    return {name: (p.to_local() if isinstance(p, DTensor) else p).cpu().clone() for name, p in found.items()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int = 4,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    scheduler: Any = None,
    seed: int = 0,
) -> Trace:
    losses, norms = [], []
    for number, (x, y) in enumerate(batches(num_steps * accumulation, seed=seed), 1):
        loss = model(x, y)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation:
            continue
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return Trace(losses, norms, local(model))


def both(kind: str, dtype: str = "fp32", how: dict[str, Any] | None = None, **training: Any) -> tuple[Trace, Trace]:
    """A run with offload and one without."""
    traces = []
    for offloaded in (True, False):
        model = sharded_net(dtype)
        optimizer = OPTIMIZERS[kind](model.parameters())
        if offloaded:
            optimizer = offload(model, optimizer, **{"ratio": 1.0, **(how or {})})
        traces.append(train(model, optimizer, **training))
    return traces[0], traces[1]


def compare(kind: str, dtype: str = "fp32", **training: Any) -> str | None:
    return first_difference(*both(kind, dtype, **training))


def assert_close(found: Trace, expected: Trace) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("world", [2, more(1), more(3)])
def test_training_is_bit_equal_to_the_fused_optimizer(on_ranks, kind, world):
    assert on_ranks(world, compare, kind) == [None] * world


@pytest.mark.parametrize("kind", OTHERS)
def test_training_equals_other_kernels_up_to_rounding(on_ranks, kind):
    for found, expected in on_ranks(2, both, kind):
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("dtype", "training"),
    [
        ("fp32", {"accumulation": 3}),
        ("mixed", {"accumulation": 2, "clip": 0.05}),
        more("fp32", {"clip": 0.05}),
        more("fp32", {"accumulation": 2, "clip": 0.05}),
        more("mixed", {"accumulation": 3}),
        more("mixed", {"clip": 0.05}),
    ],
)
def test_accumulation_and_clipping_are_bit_equal(on_ranks, dtype, training):
    assert on_ranks(2, compare, "AdamW", dtype, **training) == [None, None]


def sharded_as(kind: str) -> nn.Module:
    """A model under `fully_shard` in another way than `sharded_net`."""
    torch.manual_seed(3)
    model = Net(width=20).to(local_device())
    world, device = dist.get_world_size(), local_device().type
    mesh = dist.init_device_mesh(device, (world,))
    if kind == "HSDP":
        mesh = dist.init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh}
    if kind == "columns":
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1)
    if kind == "ignored parameters":
        options["ignored_params"] = set(model.embed.parameters())
    if kind == "grouped modules":
        fully_shard([model.blocks[0], model.blocks[1]], **options)
        fully_shard(model.blocks[2], **options)
    else:
        for block in model.blocks:
            fully_shard(block, **options, reshard_after_forward=kind != "no reshard")
    fully_shard(model, **options)
    return model


def compare_as(kind: str) -> str | None:
    traces = []
    for offloaded in (True, False):
        model = sharded_as(kind)
        optimizer = OTHERS["AdamW of several kernels"](model.parameters())
        if kind != "ignored parameters":  # torch's fused kernel takes DTensors or tensors, not both
            optimizer = FUSED["AdamW"](model.parameters())
        if offloaded:
            optimizer = offload(model, optimizer, 1.0)
            state = optimizer.state_dict()["state"]
            for parameter, values in zip(model.parameters(), state.values(), strict=True):
                same_kind = type(values["exp_avg"]) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
                assert same_kind
                assert values["exp_avg"].shape == parameter.shape
        losses = []
        for number, (x, y) in enumerate(batches(6), 1):
            model.set_requires_gradient_sync(number % 2 == 0)
            loss = model(x, y)
            loss.backward()
            losses.append(loss.item())
            if number % 2 == 0:
                for parameter in model.embed.parameters():
                    if not isinstance(parameter, DTensor):  # FSDP2 does not reduce what it ignores
                        dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
        traces.append(Trace(losses, [], local(model)))
    if kind == "ignored parameters":
        assert_close(*traces)
        return None
    return first_difference(*traces)


@pytest.mark.parametrize("kind", ["HSDP", "columns", "ignored parameters", "grouped modules", "no reshard"])
def test_every_kind_of_sharding_works(on_ranks, kind):
    """With accumulation that reduces only the last gradients."""
    world = 4 if kind == "HSDP" else 2
    assert on_ranks(world, compare_as, kind) == [None] * world


def bf16_weights_are_rounded_masters() -> list[str | None]:
    """Steps on bf16 parameters are steps on their fp32 values, with the same gradients."""
    model = sharded_net("bf16")
    optimizer = offload(model, FUSED["AdamW"](model.parameters()), ratio=1.0)
    shadows = {name: nn.Parameter(p.detach().to_local().float()) for name, p in model.named_parameters()}
    reference = FUSED["AdamW"](shadows.values())
    problems = []
    for x, y in batches(4):
        model(x, y).backward()
        for name, parameter in model.named_parameters():
            shadows[name].grad = parameter.grad.to_local().float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for name, weight in local(model).items():
            problems.append(first_difference(weight, shadows[name].detach().bfloat16().cpu(), name))
    masters = [values["master"].to_local() for values in optimizer.state_dict()["state"].values()]
    problems += [
        first_difference(master, shadow.detach().cpu())
        for master, shadow in zip(masters, shadows.values(), strict=True)
    ]
    return [each for each in problems if each is not None]


def test_bf16_parameters_have_fp32_masters(on_ranks):
    assert on_ranks(2, bf16_weights_are_rounded_masters) == [[], []]


def write_between_steps(dtype: str) -> list[str | None]:
    """Values that the program writes are stepped, and others keep the precision of their masters."""
    model = sharded_net(dtype)
    optimizer = offload(model, torch.optim.SGD(model.parameters(), lr=2.0**-12), ratio=1.0)
    problems = []
    x, y = batches(1)[0]
    for value in (3.0, 5.0):
        model(x, y).backward()
        for parameter in model.parameters():
            parameter.grad.to_local().fill_(1.0)
        with torch.no_grad():
            model.head.weight.to_local().fill_(value)
        optimizer.step()
        optimizer.zero_grad()
        master = optimizer.state_dict()["state"]
        index = [name for name, _ in model.named_parameters()].index("head.weight")
        found = master[index]["master"].to_local() if dtype == "bf16" else model.head.weight.detach().to_local()
        problems.append(first_difference(found, torch.full_like(found, value - 2.0**-12)))
    return [each for each in problems if each is not None]


def masters_after_a_write() -> str | None:
    """A state dict between a write and the next step has the written values."""
    model = sharded_net("bf16")
    optimizer = offload(model, FUSED["AdamW"](model.parameters()), ratio=1.0)
    train(model, optimizer, 2)
    with torch.no_grad():
        model.embed.weight.to_local().fill_(3.0)
    master = optimizer.state_dict()["state"][0]["master"].to_local()
    return first_difference(master, torch.full_like(master, 3.0))


def test_a_state_dict_has_the_values_that_were_written(on_ranks):
    assert on_ranks(2, masters_after_a_write) == [None, None]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_in_place_writes_to_parameters_are_kept(on_ranks, dtype):
    assert on_ranks(2, write_between_steps, dtype) == [[], []]


# -- schedulers, groups, scalers ---------------------------------------------------------------------------------------


def with_scheduler(made_for: str) -> tuple[str | None, list[str]]:
    """The scheduler of the returned optimizer, or of the given one before or after it is offloaded."""
    traces, messages = [], []
    for offloaded in (True, False):
        model = sharded_net()
        plain = FUSED["AdamW"](
            [{"params": list(model.blocks.parameters()), "lr": 3e-2}, {"params": list(model.head.parameters())}]
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = plain
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, 0.1) if made_for == "given before" else None
            if offloaded:
                optimizer = offload(model, plain, ratio=1.0)
            if scheduler is None:
                made_by = optimizer if made_for == "returned" else plain
                scheduler = torch.optim.lr_scheduler.StepLR(made_by, 2, 0.1)
            stepped = plain if made_for == "given after" else optimizer
            traces.append(train(model, stepped, 5, scheduler=scheduler))
        messages += [str(each.message) for each in caught if "scheduler" in str(each.message)]
    return first_difference(*traces), messages


@pytest.mark.parametrize("made_for", ["returned", "given before", more("given after")])
def test_schedulers_of_either_optimizer_change_the_rates(on_ranks, made_for):
    assert on_ranks(2, with_scheduler, made_for) == [(None, [])] * 2


def changing_groups() -> str | None:
    """A group is added, a parameter is frozen and unfrozen, and one has no gradient for a step."""
    traces = []
    for offloaded in (True, False):
        model = sharded_net()
        optimizer = FUSED["AdamW"](model.blocks.parameters())
        model.blocks[0].down.weight.requires_grad_(False)
        if offloaded:
            optimizer = offload(model, optimizer, ratio=1.0)
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 5e-2})
        model.blocks[0].down.weight.requires_grad_(True)
        train(model, optimizer, 1, seed=1)
        x, y = batches(1, seed=2)[0]
        model(x, y).backward()
        model.head.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        traces.append(train(model, optimizer, 1, seed=3))
    return first_difference(*traces)


def test_groups_and_frozen_parameters_may_change(on_ranks):
    assert on_ranks(2, changing_groups) == [None, None]


def momentum_later() -> tuple[Trace, Trace]:
    traces = []
    for offloaded in (True, False):
        model = sharded_net()
        optimizer = OTHERS["SGD"](model.parameters())
        if offloaded:
            optimizer = offload(model, optimizer, ratio=1.0)
        train(model, optimizer, 1)
        optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.param_groups[0]["dampening"] = 0.5
        traces.append(train(model, optimizer, 3, seed=1))
    return traces[0], traces[1]


def test_a_hyperparameter_may_require_a_state_later(on_ranks):
    for found, expected in on_ranks(2, momentum_later):
        assert_close(found, expected)


def hooks_and_closures() -> list[str]:
    model = sharded_net()
    plain = FUSED["AdamW"](model.parameters())
    called = []
    plain.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer = offload(model, plain, ratio=1.0)
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    x, y = batches(1)[0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        called.append("closure")
        return loss

    first = optimizer.step(closure)
    second = plain.step(closure)
    assert second < first
    return called


def test_step_hooks_and_closures_are_called(on_ranks):
    assert on_ranks(2, hooks_and_closures) == [["pre", "closure", "post"] * 2] * 2


def with_names() -> tuple[str | None, bool]:
    """An optimizer that was made of named parameters has their names in its groups."""
    traces, names = [], []
    for offloaded in (True, False):
        model = sharded_net()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.named_parameters(), **HYPER, fused=True)
        if offloaded:
            optimizer = offload(model, optimizer, 1.0)
            optimizer.load_state_dict(optimizer.state_dict())
        traces.append(train(model, optimizer, 2))
        names.append(optimizer.state_dict()["param_groups"][0]["param_names"])
    return first_difference(*traces), names[0] == names[1] == [name for name, _ in model.named_parameters()]


def test_named_parameters_keep_their_names(on_ranks):
    assert on_ranks(2, with_names) == [(None, True)] * 2


def with_scaler() -> tuple[str | None, list[float]]:
    """A gradient scaler unscales the gradients, and skips the step whose gradients are infinite."""
    traces, scales = [], []
    for offloaded in (True, False):
        model = sharded_net()
        optimizer = FUSED["AdamW"](model.parameters())
        if offloaded:
            optimizer = offload(model, optimizer, ratio=1.0)
        scaler = torch.amp.GradScaler(local_device().type, init_scale=2.0**8)
        losses = []
        for number, (x, y) in enumerate(batches(4)):
            loss = model(x, y)
            scaler.scale(loss * (torch.inf if number == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        traces.append(Trace(losses, [], local(model)))
        scales.append(scaler.get_scale())
    return first_difference(*traces), scales


def with_scaler_of_given() -> str | None:
    """The difference between steps of a scaler through the given optimizer and through the returned one."""
    found = []
    for is_given in (False, True):
        model = sharded_net(width=64)
        given = FUSED["AdamW"](model.parameters())
        optimizer = offload(model, given, ratio=1.0)
        scaler = torch.amp.GradScaler(local_device().type, init_scale=2.0**8)
        x, y = batches(1)[0]
        scaler.scale(model(x, y)).backward()
        scaler.step(given if is_given else optimizer)
        found.append(local(model))
    return first_difference(*found)


def test_a_gradient_scaler_works_with_the_given_optimizer(on_ranks):
    assert on_ranks(2, with_scaler_of_given) == [None] * 2


def load_from_before_the_first_step() -> str | None:
    """Loading the state of an optimizer without states resets all states, as in torch."""
    found = []
    for steps_before in (0, 2):
        model = sharded_net(width=64)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), ratio=1.0)
        train(model, optimizer, steps_before)
        model.load_state_dict(weights)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        found.append(train(model, optimizer, 2, seed=1))
    return first_difference(*found)


def test_states_that_a_state_dict_lacks_are_reset(on_ranks):
    assert on_ranks(1, load_from_before_the_first_step) == [None]


def test_a_gradient_scaler_works(on_ranks):
    assert on_ranks(2, with_scaler) == [(None, [2.0**7] * 2)] * 2


# -- state dicts and checkpoints ---------------------------------------------------------------------------------------


def resume_from_state_dict(kind: str, dtype: str, states: str) -> str | None:
    """A run that continues from `optimizer.state_dict()` equals one that was not interrupted."""
    how: dict[str, Any] = {"ratio": 1.0, "states": states}
    model = sharded_net(dtype, width=64)
    optimizer = offload(model, OPTIMIZERS[kind](model.parameters()), **how)
    train(model, optimizer, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    saved["state"] = {
        index: {key: value.clone() for key, value in values.items()} for index, values in saved["state"].items()
    }
    expected = train(model, optimizer, 3, seed=1)
    again = sharded_net(dtype, width=64)
    again.load_state_dict(weights)
    resumed = offload(again, OPTIMIZERS[kind](again.parameters()), **how)
    resumed.load_state_dict(saved)
    return first_difference(train(again, resumed, 3, seed=1), expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "states"),
    [
        ("AdamW", "fp32", "fp32"), more("AdamW", "bf16", "fp32"), more("AdamW", "fp32", "int8"),
        ("AdamW", "bf16", "int8"),
        ("momentum", "fp32", "fp32"), more("Adagrad", "fp32", "fp32"), more("SGD", "fp32", "fp32"),
    ],
)  # fmt: skip
def test_a_run_resumes_bit_exactly_from_a_state_dict(on_ranks, kind, dtype, states):
    assert on_ranks(2, resume_from_state_dict, kind, dtype, states) == [None, None]


def rates_after_load() -> list[float]:
    """The rates that a scheduler sets after its optimizer has loaded a state dict, and those that a step uses."""
    model = sharded_net()
    plain = FUSED["AdamW"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = offload(model, plain, 1.0)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert plain.param_groups is optimizer.param_groups
    train(model, optimizer, 1, scheduler=scheduler)
    return [group["lr"] for group in (*plain.param_groups, *optimizer.param_groups)]


def test_groups_stay_the_same_objects_after_a_load(on_ranks):
    assert on_ranks(2, rates_after_load) == [[0.125] * 2] * 2


def exchange_state_dicts(kind: str) -> list[tuple[Trace, Trace]]:
    """Take over the states of the plain optimizer, and load them back. Returns runs and what they should be."""
    model, other = sharded_net(), sharded_net()
    plain, reference = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](other.parameters())
    train(model, plain, 2)
    train(other, reference, 2)
    optimizer = offload(model, plain, ratio=1.0)  # keeps the states of the first two steps
    traces = [(train(model, optimizer, 2, seed=1), train(other, reference, 2, seed=1))]
    back = OPTIMIZERS[kind](model.parameters())
    back.load_state_dict(optimizer.state_dict())
    traces.append((train(model, back, 2, seed=2), train(other, reference, 2, seed=2)))
    return traces


@pytest.mark.parametrize("kind", ["AdamW", more("AMSGrad"), more("momentum"), more("Lion")])
def test_states_are_exchanged_with_the_plain_optimizer(on_ranks, kind):
    for traces in on_ranks(2, exchange_state_dicts, kind):
        for found, expected in traces:
            if kind in FUSED:
                assert first_difference(found, expected) is None
            else:
                assert_close(found, expected)


def save(folder: str, dtype: str, how: dict[str, Any] | None, num_steps: int) -> list[float]:
    """Train, save with DCP, and return the losses of more steps. Without `how` nothing is offloaded."""
    model = sharded_net(dtype, width=64)
    optimizer = FUSED["AdamW"](model.parameters())
    if how is not None:
        optimizer = offload(model, optimizer, **how)
    train(model, optimizer, num_steps)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return same_batches(model, optimizer)


def load(folder: str, dtype: str, how: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
    """Load with DCP. Return the losses of more steps, and the states as they were loaded, unsharded."""
    model = sharded_net(dtype, width=64)
    optimizer = FUSED["AdamW"](model.parameters())
    if how is not None:
        optimizer = offload(model, optimizer, **how)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    found = {
        f"{name} {key}": (value.to(local_device()).full_tensor() if isinstance(value, DTensor) else value).cpu().clone()
        for name, values in get_optimizer_state_dict(model, optimizer)["state"].items()
        for key, value in values.items()
    }
    return same_batches(model, optimizer), found


def same_batches(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses on batches that are the same on every rank, so that they do not depend on the number of ranks."""
    losses = []
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        x = torch.randint(0, 31, (4, 7), generator=generator).to(local_device())
        loss = model(x, x.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("dtype", "states"), [more("fp32", "fp32"), ("bf16", "fp32"), more("fp32", "int8")])
def test_a_dcp_checkpoint_resumes_on_other_numbers_of_ranks(on_ranks, tmp_path, dtype, states):
    """On the same number bit by bit. On others the weights and states are the same, and losses up to rounding."""
    folder, how = str(tmp_path / "two"), {"ratio": 1.0, "states": states}
    expected = on_ranks(2, save, folder, dtype, how, 3)
    (losses, states_of_two), _ = found = on_ranks(2, load, folder, dtype, how)
    assert [each for each, _ in found] == expected
    rounding = 1e-5 if dtype == "fp32" and states == "fp32" else 2e-2
    for world in (1, 4):
        (other, states_of_other), *_ = on_ranks(world, load, folder, dtype, how)
        assert other == pytest.approx(losses, rel=rounding)
        if states == "fp32":  # blocks of int8 values begin at other elements
            assert first_difference(states_of_other, states_of_two) is None


def test_checkpoints_are_exchanged_with_fsdp2_without_offload(on_ranks, tmp_path):
    for first, second in ((None, {"ratio": 1.0}), ({"ratio": 1.0}, None)):
        folder = str(tmp_path / ("offloaded" if first else "plain"))
        expected = on_ranks(2, save, folder, "fp32", first, 2)
        assert [losses for losses, _ in on_ranks(2, load, folder, "fp32", second)] == expected


def empty_shards() -> tuple[list[int], str | None]:
    """A parameter with fewer rows than ranks: its steps, and what differs after a resume."""
    traces: list[Any] = []
    saved: dict[str, Any] = {}
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)).to(local_device())
        fully_shard(model, mesh=dist.init_device_mesh(local_device().type, (dist.get_world_size(),)))
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), 1.0)
        for step in range(3):
            if resumes and step == 1:
                optimizer.load_state_dict(saved)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(local_device())
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and not resumes:
                saved = copy.deepcopy(optimizer.state_dict())
        traces.append(local(model))
    steps = [int(values["step"]) for values in optimizer.state_dict()["state"].values()]
    return steps, first_difference(*traces)


def test_empty_shards_count_steps(on_ranks):
    assert on_ranks(2, empty_shards) == [([3] * 4, None)] * 2


def freed() -> int:
    """Optimizers that are still alive after the last reference to them is gone, without a garbage collection."""
    gc.disable()
    try:
        model = sharded_net()
        optimizer = FUSED["AdamW"](model.parameters())
        alive = weakref.ref(offload(model, optimizer, 1.0))
        train(model, optimizer, 1)
        assert alive() is not None, "the given optimizer keeps it"
        del optimizer
        return int(alive() is not None)
    finally:
        gc.enable()


def test_states_are_freed_with_the_optimizer(on_ranks):
    assert on_ranks(2, freed) == [0, 0]


def flattened(folder: str) -> tuple[str | None, list[str]]:
    """A checkpoint with flat keys, as torchtitan writes it. The optimizer that loads has not stepped."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = sharded_net("bf16")
    optimizer = offload(model, FUSED["AdamW"](model.parameters()))
    train(model, optimizer, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=folder)
    expected = train(model, optimizer, 2, seed=1)
    again = sharded_net("bf16")
    again.load_state_dict(weights)
    resumed = offload(again, FUSED["AdamW"](again.parameters()))
    state = {"optimizer": get_optimizer_state_dict(again, resumed, options=options)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(again, resumed, state["optimizer"], options=options)
    return first_difference(train(again, resumed, 2, seed=1), expected), list(resumed.state[again.head.weight])


def test_flattened_state_dicts_are_loaded(on_ranks, tmp_path):
    names = ["step", "master", "exp_avg", "exp_avg_sq"]
    assert on_ranks(2, flattened, str(tmp_path)) == [(None, names)] * 2


def live_states(kind: str) -> tuple[int, list[str | None]]:
    """`optimizer.state` has the values of the state dict."""
    model = sharded_net()
    optimizer = offload(model, OPTIMIZERS[kind](model.parameters()), 1.0)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()["state"]
    pairs = zip(saved.values(), (optimizer.state[p] for p in model.parameters()), strict=True)
    unsharded = [
        [{key: (v.to_local() if isinstance(v, DTensor) else v) for key, v in each.items()} for each in pair]
        for pair in pairs
    ]
    return len(saved[0]), [found for one, other in unsharded if (found := first_difference(one, other)) is not None]


@pytest.mark.parametrize(("kind", "num_states"), [("AdamW", 3), ("momentum", 1), ("SGD", 0)])
def test_the_state_of_a_parameter_can_be_read(on_ranks, kind, num_states):
    assert on_ranks(2, live_states, kind) == [(num_states, [])] * 2


def load_without_masters(folder: str) -> list[str | None]:
    """Load what the plain optimizer wrote of bf16 parameters: moments are loaded, and masters are the parameters."""
    model = sharded_net("bf16")
    plain = FUSED["AdamW"](model.parameters())
    train(model, plain, 2)
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, plain)},
        checkpoint_id=folder,
    )
    again = sharded_net("bf16")
    optimizer = offload(again, FUSED["AdamW"](again.parameters()), 1.0)
    state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, optimizer)}
    dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, optimizer, state["optimizer"])
    problems = []
    for parameter, saved in zip(model.parameters(), again.parameters(), strict=True):
        found, expected = optimizer.state[saved], plain.state[parameter]
        problems.append(first_difference(found["master"].to_local(), parameter.detach().to_local().float().cpu()))
        for key in ("exp_avg", "exp_avg_sq"):
            problems.append(first_difference(found[key].to_local(), expected[key].to_local().float().cpu(), key))
    return [each for each in problems if each is not None]


def test_a_checkpoint_without_masters_is_loaded(on_ranks, tmp_path):
    assert on_ranks(2, load_without_masters, str(tmp_path)) == [[], []]


def full_state_dict(dtype: str) -> str | None:
    """A full optimizer state dict of rank 0 is broadcast and loaded."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded_net(dtype)
    optimizer = offload(model, FUSED["AdamW"](model.parameters()), ratio=1.0)
    train(model, optimizer, 2)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(model, optimizer, 2, seed=1)
    again = sharded_net(dtype)
    again.load_state_dict(weights)
    resumed = offload(again, FUSED["AdamW"](again.parameters()), ratio=1.0)
    set_optimizer_state_dict(again, resumed, full if dist.get_rank() == 0 else {}, options=options)
    return first_difference(train(again, resumed, 2, seed=1), expected)


@pytest.mark.parametrize("dtype", ["bf16", more("fp32")])
def test_full_state_dicts_are_loaded(on_ranks, dtype):
    assert on_ranks(2, full_state_dict, dtype) == [None, None]


# -- int8 states and bytes ---------------------------------------------------------------------------------------------


def int8_training() -> tuple[list[float], list[float], int, int]:
    losses, num_bytes = [], []
    for states in ("int8", "fp32"):
        model = sharded_net(width=64)
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), 1.0, states)
        losses.append(train(model, optimizer, 30).losses)
        num_bytes.append(optimizer.host_bytes)
    return losses[0], losses[1], num_bytes[0], num_bytes[1]


def test_int8_states_train_like_fp32_states_in_a_quarter_of_the_bytes(on_ranks):
    elements = sum(p.numel() for p in Net(width=64).parameters())
    small = sum(p.numel() for p in Net(width=64).parameters() if p.numel() < 4096)
    found = on_ranks(2, int8_training)
    for coded, plain, _, _ in found:
        assert coded != plain
        assert coded == pytest.approx(plain, rel=2e-2)
    assert sum(num_bytes for *_, num_bytes in found) == 8 * elements
    # Two bytes and two scales of 4 bytes per 256 elements; shards are whole blocks here but for the head's.
    expected = 8 * small + (elements - small) * (2 + 8 / 256)
    assert sum(num_bytes for *_, num_bytes, _ in found) == pytest.approx(expected, rel=1e-3)


def host_bytes(dtype: str) -> int:
    model = sharded_net(dtype)
    optimizer = offload(model, FUSED["AdamW"](model.parameters()))
    assert optimizer.ratio is None
    assert optimizer.host_bytes == 0
    train(model, optimizer, 1)
    assert optimizer.ratio == 1.0, "the memory of a CPU rank is host memory"
    assert optimizer.device_bytes == 0
    return optimizer.host_bytes


@pytest.mark.parametrize(("dtype", "per_element"), [("fp32", 8), ("mixed", 8), ("bf16", 12)])
def test_host_memory_has_the_documented_bytes(on_ranks, dtype, per_element):
    """fp32 parameters are their own masters."""
    elements = sum(p.numel() for p in Net().parameters())
    assert sum(on_ranks(2, host_bytes, dtype)) == per_element * elements


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(1.0, [True, False, True, True]), (0.0, [False] * 4), (0.5, [False, False, True, True])],
)
def test_the_last_parameters_are_offloaded(ratio, expected):
    assert choose_offloaded([400, 1, 400, 399], ratio, min_numel=2) == expected


def test_auto_offloads_what_does_not_fit():
    assert ratio_that_fits(100, usable=1000, peak=800, reserved=50) == 0.0
    assert ratio_that_fits(100, usable=1000, peak=825, reserved=50) == pytest.approx(0.75)
    assert ratio_that_fits(100, usable=1000, peak=900, reserved=50) == 1.0
    assert ratio_that_fits(0, usable=1000, peak=900, reserved=50) == 0.0


# -- errors ------------------------------------------------------------------------------------------------------------


class OtherAdamW(torch.optim.AdamW):
    """A subclass may override the step."""


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def refused(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (TypeError, ValueError) as error:
            found[name] = str(error)
        else:
            found[name] = "accepted"

    model = sharded_net()
    optimizer = FUSED["AdamW"](model.parameters())
    plain = Net().to(local_device())
    before = Net().to(local_device())
    too_early = FUSED["AdamW"](before.parameters())
    fully_shard(before, mesh=dist.init_device_mesh(local_device().type, (dist.get_world_size(),)))
    refused("plain", lambda: offload(plain, FUSED["AdamW"](plain.parameters())))
    refused("too early", lambda: offload(before, too_early))
    refused("subclass", lambda: offload(model, OtherAdamW(model.parameters())))
    refused("muon", lambda: offload(model, torch.optim.Muon([model.head.weight])))
    refused("no optimizer", lambda: offload(model, model))
    refused("ratio", lambda: offload(model, optimizer, 1.5))
    refused("ratio text", lambda: offload(model, optimizer, "half"))
    refused("states", lambda: offload(model, optimizer, 1.0, "int4"))
    refused("limit", lambda: offload(model, optimizer, 1.0, device_memory=3.0))
    refused("negative limit", lambda: offload(model, optimizer, device_memory=-1.0))
    meta = Net().to("meta")
    fully_shard(meta, mesh=dist.init_device_mesh(local_device().type, (dist.get_world_size(),)))
    refused("meta", lambda: offload(meta, FUSED["AdamW"](meta.parameters())))
    offload(model, optimizer, 1.0)
    refused("twice", lambda: offload(model, optimizer, 1.0))
    other = OTHERS["SGD"](model.parameters())
    wrong = optimizer.state_dict()
    wrong["state"][0]["exp_avg"] = torch.zeros(31, 21)
    refused("unsharded state", lambda: optimizer.load_state_dict(wrong))
    refused("states of another", lambda: offload(model, other, 1.0).load_state_dict(optimizer.state_dict()))
    return found


def test_errors_name_what_is_wrong(on_ranks):
    (found, *_) = on_ranks(2, refusals)
    expected = {
        "plain": "Net has no FSDP2 module. Apply torch.distributed.fsdp.fully_shard",
        "too early": "Create the optimizer after fully_shard",
        "subclass": "does not support the optimizer OtherAdamW",
        "muon": "does not support the optimizer Muon, which orthogonalises whole matrices",
        "no optimizer": "needs a torch optimizer, not FSDPNet",
        "ratio": "ratio = 1.5 is out of range",
        "ratio text": "ratio = 'half' is out of range",
        "states": "states = 'int4' is not known",
        "limit": "device_memory has no effect with ratio = 1.0",
        "negative limit": "device_memory = -1.0 is out of range",
        "meta": "parameter embed.weight is on the meta device",
        "twice": "offloaded already",
        "unsharded state": "the state exp_avg of embed.weight is sharded differently",
        "states of another": "the state of embed.weight has exp_avg, exp_avg_sq, which this optimizer does not have",
    }
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert text in found[name], name


@pytest.mark.program
@pytest.mark.slow
def test_the_example_runs(tmp_path):
    """It trains, saves, and resumes on another number of ranks."""
    for world, expected in ((2, "step 20: loss"), (1, "resumed at step 20")):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        script = Path(__file__).parents[2] / "examples" / "fsdp2_offload.py"
        done = subprocess.run(
            [*command, str(script), str(tmp_path / "checkpoint")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_offload_is_public():
    assert onefold.fsdp.offload is offload
    assert issubclass(OffloadedOptimizer, torch.optim.Optimizer)
    assert Path(onefold.fsdp.__file__).name == "__init__.py"
