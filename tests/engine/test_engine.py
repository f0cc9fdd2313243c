"""What a training loop calls: every method and switch of the engine, on real ranks."""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from models import (
    Net,
    Trace,
    batches,
    config,
    first_difference,
    more,
    net,
    precision,
    rank,
    start,
    train,
    weights_of,
)
from onefold.compat.deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold import ConfigError
from onefold.compat import deepspeed
from onefold.compat.engine_getters import EngineGetters
from onefold.runtime import handle_of
from onefold.utils import (
    memory_status,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    see_memory_usage,
)

# The others run in `make test-slow`.
STAGES = (0, 1, 2, 3)
FIRST_STAGES = (3, 1, more(0), more(2))
Weights = dict[str, torch.Tensor]


def equal(mine: Weights, other: Weights) -> bool:
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What the library's logger says, at its own level."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, values: torch.Tensor | float) -> torch.Tensor:
        return (self.weight * values).sum()


def tiny(stage: int, **more: Any) -> onefold.Engine:
    """One weight whose gradient the caller chooses: the values it is multiplied by."""
    return start(Weight(), config(stage, **more))


def deepspeed_engine(stage: int, **more: Any) -> DeepSpeedEngine:
    """`tiny`, with the getters of DeepSpeed's engine."""
    return deepspeed.initialize(model=Weight(), config={"log_level": "warning", **config(stage, **more)})[0]


def weight_of(engine: onefold.Engine) -> torch.Tensor:
    return weights_of(engine.module)["weight"]


def sgd(lr: float = 1.0, **params: Any) -> dict[str, Any]:
    return {"type": "SGD", "params": {"lr": lr, **params}}


# -- initialize --------------------------------------------------------------------------------------------------------


def returned(path: str) -> dict[str, Any]:
    model = net()
    settings = config(1, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, log_level="warning")
    data = TensorDataset(torch.arange(10))
    engine, optimizer, loader, scheduler = onefold.initialize(model=model, config=settings, training_data=data)
    assert engine.module is model
    assert isinstance(engine, onefold.Engine)
    assert isinstance(engine, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert engine.optimizer is optimizer
    assert engine.training_dataloader is loader
    assert engine.lr_scheduler is scheduler
    assert scheduler is not None
    assert loader is not None
    assert engine.config == settings
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]

    bare = onefold.initialize(model=net(), config={"train_batch_size": 4, "log_level": "warning"})
    assert bare[1:] == (None, None, None)

    parser = onefold.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", path, "--local_rank", "0"])
    assert args.deepspeed
    from_args = onefold.initialize(args=args, model=net())[0]
    with pytest.raises(ConfigError, match="two configs"):
        onefold.initialize(args=args, model=net(), config=settings)
    with pytest.raises(ConfigError, match="no config"):
        onefold.initialize(model=net())
    by_path = onefold.initialize(model=net(), config=path)[0]
    old = onefold.initialize(model=net(), config_params=path)[0]
    return {"stages": [e.plan.stage for e in (from_args, by_path, old)]}


def test_initialize_and_its_sources(on_ranks, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "log_level": "warning", // a comment\n'
                    '"zero_optimization": {"stage": 2}}')  # fmt: skip
    for found in on_ranks(2, returned, str(path)):
        assert found == {"stages": [2, 2, 2]}


def refusals() -> None:
    with pytest.raises(ValueError, match="model"):
        onefold.initialize(config=config(0))
    with pytest.raises(ValueError, match="mpu"):
        onefold.initialize(model=net(), config=config(0), mpu=object())
    with pytest.raises(TypeError, match="optimizer"):
        start(net(), config(0), optimizer="AdamW")
    with pytest.raises(TypeError, match="model_parameters"):
        start(net(), config(0), model_parameters=["weight"])
    with pytest.raises(ConfigError):
        start(net(), config(0, optimizer={"type": "AdamX", "params": {}}))
    with pytest.raises(ConfigError, match=r"learning_rate.*did you mean optimizer.params.lr"):
        start(net(), config(0, optimizer={"type": "AdamW", "params": {"learning_rate": 1.0}}))
    stepped = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    for group in stepped.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    stepped.step()
    with pytest.raises(ValueError, match="already has states"):
        start(net(), config(0), optimizer=stepped)
    engine = tiny(0)
    with pytest.raises(ValueError, match=r"scalar.*\(8, 8\)"):
        engine.backward(engine.module.weight * 1)
    with pytest.raises(ValueError, match="scalar"):
        engine.backward(3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="require grad"):
        engine.backward(torch.ones(()))
    with torch.no_grad():
        loss = engine(1.0)
    with pytest.raises(ValueError, match="require grad"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match="without a backward"):
        engine.step()
    with pytest.raises(RuntimeError, match=r"engine\.step"):
        engine.optimizer.step()
    with pytest.raises(RuntimeError, match="groups"):
        engine.optimizer.add_param_group({"params": []})
    # None of this spoiled the engine.
    engine.backward(engine(1.0))
    engine.step()
    assert engine.global_steps == 1
    with pytest.raises(RuntimeError, match="without a backward"):
        engine.step()


def test_bad_inputs_are_refused_with_a_reason(on_ranks):
    on_ranks(2, refusals)


def without_optimizer(dtype: str) -> tuple[float, float]:
    engine = start(net(), {"train_batch_size": 4, **precision(dtype)})
    x, y = batches(1)[0]
    plain = Net().to(next(engine.module.parameters()).dtype)
    plain.load_state_dict(weights_of(engine.module))
    with torch.no_grad():
        mine = engine.eval()(x, y).item()
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.step()
    assert engine.get_lr() == []
    with torch.no_grad():
        return mine, plain(x, y).item()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_without_an_optimizer_evaluates(on_ranks, dtype):
    for mine, theirs in on_ranks(2, without_optimizer, dtype):
        assert mine == theirs


def looks_like_its_module() -> None:
    model = net()
    model.note = "kept"
    engine = start(model, config(1))
    assert engine.train() is engine
    assert model.training
    assert engine.eval() is engine
    assert not model.training
    assert engine.note == "kept"
    assert engine.head is model.head
    x, _ = batches(1)[0]
    assert torch.equal(engine.logits(x), model.logits(x))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        engine.nothing_of_the_kind  # noqa: B018
    assert {id(p) for p in engine.parameters()} == {id(p) for p in model.parameters()}
    assert engine.world_size == dist.get_world_size()
    assert engine.global_rank == engine.local_rank == rank()
    assert engine.device == torch.device("cpu")
    assert "sharded" in engine.describe()


def test_the_engine_looks_like_its_module(on_ranks):
    on_ranks(2, looks_like_its_module)


def answers_as_deepspeeds() -> None:
    """DeepSpeed's getters are those of the engine that comes through its name, and of no other."""
    engine = deepspeed.initialize(model=net(), config={"log_level": "warning", **config(1)})[0]
    assert engine.world_size == engine.dp_world_size == dist.get_world_size()
    assert engine.global_rank == engine.get_data_parallel_rank() == engine.local_rank == rank()
    assert dist.get_world_size(engine.data_parallel_group) == engine.world_size
    assert engine.gradient_clipping() == 0.0
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert engine.loss_scale() == 1.0
    assert engine.micro_steps == 0
    assert engine.zero_optimization_stage() == 1
    assert not engine.zero_optimization_partition_weights()
    other = start(net(), config(1))
    getters = [name for name in vars(EngineGetters) if not name.startswith("__")]
    assert [name for name in getters if hasattr(other, name)] == []


def test_getters_of_deepspeed_belong_to_its_engine(on_ranks):
    on_ranks(2, answers_as_deepspeeds)


def described(stage: int, **zero: Any) -> str:
    engine = start(net(), config(stage, zero_optimization=zero))
    text = engine.describe()
    engine.destroy()
    return text


def test_the_description_names_the_stage_and_what_stays_unsharded(on_ranks):
    def lines(world: int, stage: int, **zero: Any) -> dict[str, str]:
        first, *others = on_ranks(world, described, stage, **zero)[0].splitlines()
        assert first.startswith(f"ZeRO stage {stage} on {world} rank{'s' * (world > 1)}, ")
        # A label of 18 columns, and what it is about.
        assert all(line[17] == " " != line[18] for line in others)
        return {line[:18].strip(): line[18:] for line in others}

    two = lines(2, 2)
    assert two["parameters"].startswith("replicated")
    assert "masters" not in two["bytes per rank"], "what is not held is not listed"
    small = lines(2, 3, stage3_param_persistence_threshold=10**6)["parameters"]
    assert small.startswith("unsharded: all are below the persistence threshold")
    assert lines(2, 3, stage3_param_persistence_threshold=0)["parameters"].startswith("sharded: unsharded only while")
    assert "but for " in lines(2, 3, stage3_param_persistence_threshold=100)["parameters"]
    assert lines(1, 2)["gradients"].startswith("not sharded (1 rank)")
    offloaded = lines(2, 2, offload_optimizer={"device": "cpu"})
    assert offloaded["bytes per rank"].startswith("device: parameters")
    assert offloaded[""].startswith("host: ")


# -- backward and step -------------------------------------------------------------------------------------------------


def protocol(stage: int, kind: str, accumulation: int, overlap: bool = False) -> Trace:
    """The same training, asked for in different ways."""
    settings = config(
        stage,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.3,
        zero_optimization={"overlap_comm": overlap},
    )
    engine = start(net(), settings)
    losses, norms = [], []
    data = batches(3 * accumulation)
    for index, (x, y) in enumerate(data):
        last = (index + 1) % accumulation == 0
        if kind == "counted":
            assert engine.is_gradient_accumulation_boundary() == last
            engine.backward(engine(x, y))
            engine.step()
        elif kind == "bare":
            engine(x, y).backward()
            engine.step()
        elif kind == "explicit":
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() == last
            engine.backward(engine(x, y))
            if last:
                engine.step()
        elif kind == "explicit, stepping always":
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(engine(x, y))
            engine.step()
        elif kind == "divided by the caller":
            engine.backward(engine(x, y) / accumulation, scale_wrt_gas=False)
            engine.step()
        if last:
            losses.append(float(engine.global_steps))
            norms.append(engine.get_global_grad_norm())
    return Trace(losses, norms, weights_of(engine.module))


def protocols(stage: int, accumulation: int) -> dict[str, str | None]:
    expected = protocol(stage, "counted", accumulation)
    kinds = ["bare", "explicit", "explicit, stepping always", "divided by the caller"]
    found = {kind: first_difference(protocol(stage, kind, accumulation), expected) for kind in kinds}
    for kind in kinds[:2]:
        found[f"{kind}, overlapped"] = first_difference(protocol(stage, kind, accumulation, True), expected)
    return found


@covering(stage=FIRST_STAGES, accumulation=(1, 2), strength=1)
def test_every_way_to_ask_for_a_step_is_bit_equal(on_ranks, stage, accumulation):
    for found in on_ranks(2, protocols, stage, accumulation):
        assert found == dict.fromkeys(found)


def explicit_count(stage: int) -> str | None:
    """A window longer than the config's count, as Hugging Face drives it: the caller divides."""
    expected = protocol(stage, "counted", 3)
    engine = start(net(), config(stage, gradient_clipping=0.3))
    steps, norms = [], []
    for index, (x, y) in enumerate(batches(9)):
        last = index % 3 == 2
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(engine(x, y) / 3, scale_wrt_gas=False)
        if last:
            engine.step()
            steps.append(float(engine.global_steps))
            norms.append(engine.get_global_grad_norm())
    assert steps == [1.0, 2.0, 3.0]
    return first_difference(Trace(steps, norms, weights_of(engine.module)), expected)


@covering(stage=FIRST_STAGES)
def test_an_explicit_boundary_needs_no_count_in_the_config(on_ranks, stage):
    assert on_ranks(2, explicit_count, stage) == [None, None]


def under_no_sync(stage: int, bare: bool, overlap: bool) -> str | None:
    """Micro-steps but the last of a window inside no_sync, with a count of 1, beside a config that accumulates."""
    more = {"zero_optimization": {"overlap_comm": overlap}}
    counted = start(net(), config(stage, gradient_accumulation_steps=3, **more))
    for x, y in batches(6):
        counted.backward(counted(x, y))
        counted.step()
    engine = start(net(), config(stage, **more))
    for index, (x, y) in enumerate(batches(6)):

        def backward(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = engine(x, y) / 3
            loss.backward() if bare else engine.backward(loss)

        if index % 3 < 2:
            with engine.no_sync():
                backward()
                with pytest.raises(RuntimeError, match="no_sync"):
                    engine.step()
                with pytest.raises(RuntimeError, match="already active"), engine.no_sync():
                    pass
        else:
            backward()
            engine.step()
    assert engine.global_steps == 2
    return first_difference(weights_of(engine.module), weights_of(counted.module))


@covering(stage=STAGES, bare=(False, True), overlap=(True, False), strength=1)
def test_no_sync_accumulates(on_ranks, stage, bare, overlap):
    assert on_ranks(2, under_no_sync, stage, bare, overlap) == [None, None]


def unmanaged(stage: int) -> tuple[str | None, int]:
    """managed_gradient_accumulation false: each step() is a boundary, whatever was backwarded before it."""
    settings = config(stage, gradient_accumulation_steps=3, managed_gradient_accumulation=False)
    engine = start(net(), settings)
    counted = start(net(), config(stage, gradient_accumulation_steps=3))
    for index, (x, y) in enumerate(batches(6)):
        assert engine.is_gradient_accumulation_boundary()
        engine.backward(engine(x, y))
        if index % 3 == 2:
            engine.step()
        counted.backward(counted(x, y))
        counted.step()
    return first_difference(weights_of(engine.module), weights_of(counted.module)), engine.global_steps


@covering(stage=FIRST_STAGES)
def test_unmanaged_accumulation(on_ranks, stage):
    assert on_ranks(2, unmanaged, stage) == [(None, 2)] * 2


def mixed_kinds(stage: int) -> None:
    engine = start(net(), config(stage, gradient_accumulation_steps=2))
    (x, y), (u, v) = batches(2)
    engine.backward(engine(x, y))
    engine.step()
    with pytest.raises(RuntimeError, match="Use one of them"):
        engine(u, v).backward()
    engine.zero_grad()
    other = start(net(), config(stage, gradient_accumulation_steps=2))
    other(x, y).backward()
    other.step()
    with pytest.raises(RuntimeError, match="Use one of them"):
        other.backward(other(u, v))
    # The optimizer's zero_grad empties the window as the engine's does.
    third = start(net(), config(stage, gradient_accumulation_steps=2))
    third.backward(third(x, y))
    third.optimizer.zero_grad()
    third(x, y).backward()


@covering(stage=FIRST_STAGES)
def test_both_kinds_of_backward_in_one_window_raise(on_ranks, stage):
    on_ranks(2, mixed_kinds, stage)


def zeroed(stage: int, who: str) -> tuple[str | None, bool]:
    """Gradients that were thrown away leave no trace."""
    engine, other = start(net(), config(stage)), start(net(), config(stage))
    for index, (x, y) in enumerate(batches(4)):
        engine.backward(engine(x, y))
        if index % 2:
            engine.step()
            other.backward(other(x, y))
            other.step()
        else:
            (engine if who == "engine" else engine.optimizer).zero_grad()
    nothing = all(p.grad is None for p in engine.module.parameters())
    return first_difference(weights_of(engine.module), weights_of(other.module)), nothing


@covering(stage=FIRST_STAGES, who=("engine", "optimizer"), strength=1)
def test_zero_grad_forgets(on_ranks, stage, who):
    assert on_ranks(2, zeroed, stage, who) == [(None, True)] * 2


def half_bare(stage: int, accumulation: int) -> bool:
    settings = config(stage, gradient_accumulation_steps=accumulation, **precision("fp16"))
    engine, scaled = start(net(), settings), start(net(), settings)
    x, y = batches(1)[0]
    with pytest.raises(RuntimeError, match=r"engine\.scale"):
        scaled(x, y).backward()
    for x, y in batches(3 * accumulation):
        engine.backward(engine(x, y))
        engine.step()
        scaled.scale(scaled(x, y)).backward()
        scaled.step()
    with pytest.raises(RuntimeError, match=r"engine\.scale"):
        scaled(x, y).backward()
    assert scaled.skipped_steps == 0
    assert scaled.global_steps == 3
    if accumulation == 1:
        return equal(weights_of(engine.module), weights_of(scaled.module))
    # Here the division comes after fp16 rounding, there before.
    pairs = zip(weights_of(engine.module).values(), weights_of(scaled.module).values(), strict=True)
    return all(torch.allclose(mine.float(), other.float(), atol=2e-2) for mine, other in pairs)


@covering(stage=FIRST_STAGES, accumulation=(1, 2), strength=1)
def test_fp16_needs_a_scaled_loss(on_ranks, stage, accumulation):
    assert on_ranks(2, half_bare, stage, accumulation) == [True, True]


def returned_loss() -> list[float]:
    engine = start(net(), config(0, gradient_accumulation_steps=4, **precision("fp16")))
    x, y = batches(1)[0]
    loss = engine(x, y)
    scaled = engine.backward(loss)
    assert not scaled.requires_grad
    again = engine.backward(engine(x, y), scale_wrt_gas=False)
    return [loss.item(), scaled.item() * 4, again.item()]


def test_backward_returns_the_divided_loss(on_ranks):
    for found in on_ranks(2, returned_loss):
        assert found == pytest.approx([found[0]] * 3, rel=1e-3)


# -- sizes and information ---------------------------------------------------------------------------------------------


def sizes() -> None:
    world = dist.get_world_size()
    settings = {"log_level": "warning", **config(1, gradient_accumulation_steps=2)}
    engine = deepspeed.initialize(model=net(), config=settings)[0]
    assert engine.get_batch_info() == (8 * world, 4, 2)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8 * world, 4)
    engine.set_train_batch_size(12 * world)
    assert engine.get_batch_info() == (12 * world, 4, 3)
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (6 * world, 2, 3)
    engine.set_gradient_accumulation_steps(1)
    assert engine.get_batch_info() == (2 * world, 2, 1)
    with pytest.raises(ValueError, match="multiple"):
        engine.set_train_batch_size(2 * world + 1)
    with pytest.raises(ValueError, match="multiple"):
        engine.set_train_batch_size(0)
    for setter in (engine.set_train_micro_batch_size, engine.set_gradient_accumulation_steps):
        with pytest.raises(ValueError, match="at least 1"):
            setter(0)
    engine.set_gradient_accumulation_steps(2)
    x, y = batches(1)[0]
    for kind in ("before the step", "between micro-steps"):
        engine.backward(engine(x, y))
        if kind == "between micro-steps":
            engine.step()
        with pytest.raises(RuntimeError, match="cannot change inside a window"):
            engine.set_gradient_accumulation_steps(3)
        engine.zero_grad()
    assert engine.get_batch_info() == (4 * world, 2, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_batch_sizes_can_be_read_and_set(on_ranks, world):
    on_ranks(world, sizes)


def counts(explicit: bool) -> list[tuple[int, int]]:
    """Samples are counted in whole steps, through a change of the count."""
    world = dist.get_world_size()
    engine = start(net(), config(1, gradient_accumulation_steps=2))
    found = []
    for count in (2, 3, 1):
        engine.set_train_batch_size(4 * world * count)
        for index, (x, y) in enumerate(batches(2 * count)):
            last = (index + 1) % count == 0
            if explicit:
                engine.set_gradient_accumulation_boundary(last)
            engine.backward(engine(x, y))
            if last or not explicit:
                engine.step()
        found.append((engine.global_steps, engine.global_samples // (4 * world)))
    return found


@pytest.mark.parametrize("explicit", [False, True])
def test_steps_and_samples_are_counted(on_ranks, explicit):
    for found in on_ranks(2, counts, explicit):
        assert found == [(2, 4), (4, 10), (6, 12)]


def information(stage: int) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}}
    engine = deepspeed_engine(stage, optimizer=optimizer, gradient_clipping=0.5)
    assert engine.get_global_grad_norm() is None
    assert not engine.was_step_applied()
    assert engine.get_lr() == [0.1]
    assert engine.get_mom() == [(0.8, 0.9)]
    assert deepspeed_engine(stage, optimizer=sgd(momentum=0.7)).get_mom() == [0.7]
    engine.backward(engine(1 + rank()))
    engine.step()
    # All 64 gradients are the average of 1 and 2; the norm is that before clipping.
    assert engine.get_global_grad_norm() == pytest.approx(8 * 1.5)
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (1, 0, 1)
    assert engine.loss_scale() == 1.0
    assert engine.zero_optimization_stage() == stage


@covering(stage=FIRST_STAGES)
def test_information(on_ranks, stage):
    on_ranks(2, information, stage)


def clipped(stage: int) -> tuple[float, float]:
    engine = tiny(stage, optimizer=sgd(), gradient_clipping=0.5)
    before = weight_of(engine)
    engine.backward(engine(1 + rank()))
    engine.step()
    return (weight_of(engine) - before).norm().item(), engine.get_global_grad_norm()


@covering(stage=FIRST_STAGES)
def test_clipping_is_by_the_global_norm(on_ranks, stage):
    for moved, norm in on_ranks(2, clipped, stage):
        assert moved == pytest.approx(0.5, rel=1e-5)
        assert norm == pytest.approx(12)


def moving_scale(stage: int) -> tuple[list[float], list[float | None], list[float | None]]:
    """Scales after each step, and norms beside those with a scale that never moves."""
    traces = []
    for fp16 in ({"initial_scale_power": 6, "loss_scale_window": 1}, {"loss_scale": 64}):
        engine = start(net(), config(stage, fp16={"enabled": True, **fp16}, gradient_clipping=0.3))
        norms, scales = [], []
        for x, y in batches(4):
            engine.backward(engine(x, y))
            engine.step()
            scales.append(engine.optimizer.loss_scale)
            norms.append(engine.get_global_grad_norm())
        traces.append((scales, norms))
    return traces[0][0], traces[0][1], traces[1][1]


@covering(stage=FIRST_STAGES)
def test_the_norm_stays_what_it_was_when_the_loss_scale_moves(on_ranks, stage):
    """It is divided by the scale that its gradient was computed with, not by the one that the step leaves."""
    for scales, norms, expected in on_ranks(2, moving_scale, stage):
        assert scales == [64.0, 128.0, 256.0, 512.0]
        assert norms == pytest.approx(expected, rel=1e-2)


# -- schedulers --------------------------------------------------------------------------------------------------------


def scheduled(kind: str) -> tuple[list[float], list[float]]:
    """Rates in force at each step, beside the same scheduler on a plain optimizer."""
    model = Weight()
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs: Any = torch.optim.lr_scheduler.StepLR(plain, step_size=2, gamma=0.5)
    given: dict[str, Any] = {}
    settings = config(1, gradient_accumulation_steps=2, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    if kind == "config":
        settings["scheduler"] = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    elif kind == "DeepSpeed's":
        settings["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        }
        theirs = None
    elif kind == "instance":
        del settings["optimizer"]
        given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        given["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(given["optimizer"], step_size=2, gamma=0.5)
    elif kind == "callable":
        given["lr_scheduler"] = build_step_lr
    elif kind == "afterwards":
        pass
    engine = start(model, settings, **given)
    after = build_step_lr(engine.optimizer) if kind == "afterwards" else None
    mine, expected = [], []
    for step in range(6):
        mine.append(engine.get_lr()[0])
        expected.append(plain.param_groups[0]["lr"] if theirs else min(1.0, max(step - 1, 0) / 4) * 0.1)
        before = weight_of(engine)
        for _ in range(2):
            engine.backward(engine(1.0))
            engine.step()
        if step == 0 and kind != "DeepSpeed's":
            # Adam's first step is the rate itself.
            moved = (before - weight_of(engine)).max().item()
            assert moved == pytest.approx(mine[0], rel=1e-3)
        plain.step()
        if theirs:
            theirs.step()
        if after is not None:
            after.step()
    return mine, expected


def build_step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


@pytest.mark.parametrize("kind", ["config", "DeepSpeed's", "instance", "callable", "afterwards"])
def test_schedulers_move_the_rate(on_ranks, kind):
    for mine, theirs in on_ranks(2, scheduled, kind):
        assert mine == pytest.approx(theirs)


def skipping(stage: int) -> tuple[list[float], int]:
    """An overflow leaves rate, weights and optimizer states alone."""
    model = nn.Linear(8, 8, bias=False)
    engine = start(
        model,
        config(
            stage,
            optimizer={"type": "AdamW", "params": {"lr": 0.1}},
            scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
            fp16={"enabled": True, "initial_scale_power": 4},
        ),
    )
    rates = []
    for step in range(4):
        before = weights_of(engine.module)
        factor = float("inf") if step == 1 and rank() == 0 else 1.0
        engine.backward(engine(torch.ones(2, 8).half()).float().sum() * factor)
        engine.step()
        assert engine.was_step_applied() == (step != 1)
        assert equal(before, weights_of(engine.module)) == (step == 1)
        rates.append(engine.get_lr()[0])
    return rates, engine.skipped_steps


@covering(stage=FIRST_STAGES)
def test_a_skipped_step_does_not_advance_the_scheduler(on_ranks, stage):
    for rates, skipped in on_ranks(2, skipping, stage):
        assert rates == pytest.approx([0.05, 0.05, 0.025, 0.0125])
        assert skipped == 1


# -- optimizers --------------------------------------------------------------------------------------------------------


class Signed(torch.optim.Optimizer):
    """A user's own elementwise optimizer with a state and a counter."""

    def __init__(self, params: Any, lr: float = 0.1, keep: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].mul_(group["keep"]).add_(parameter.grad)
                parameter.add_(torch.tanh(state["mean"]), alpha=-group["lr"])


class Lamb(Signed):
    """Not elementwise by its name."""


def build_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, betas=(0.7, 0.9))


def build_signed(parameters: Any) -> torch.optim.Optimizer:
    return Signed([{"params": list(parameters), "keep": 0.3}], lr=0.05)


def build_rprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters, lr=0.01)


def build_adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


def build_muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.05)


def build_lamb(parameters: Any) -> torch.optim.Optimizer:
    return Lamb(parameters)


class Matrices(nn.Module):
    """Two-dimensional parameters only, as Muon asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def beside_own_optimizer(
    stage: int, build: Callable[..., Any], how: str, dtype: str, clipping: float = 0.0
) -> tuple[Weights, Weights]:
    """Weights, masters and states of an engine, and of plain torch."""
    torch.manual_seed(3 + rank())
    model = Matrices()
    optimizer = build if how == "callable" else build(model.parameters())
    settings = config(stage, zero_allow_untested_optimizer=True, gradient_clipping=clipping, **precision(dtype))
    del settings["optimizer"]
    engine = start(model, settings, optimizer=optimizer)
    plain = Matrices().to(model.layers[0].weight.dtype)
    plain.load_state_dict(weights_of(engine.module))
    masters = [parameter.detach().float() for parameter in plain.parameters()]
    theirs = build(masters)
    cast = model.layers[0].weight.dtype
    for step in range(4):
        # The same data on every rank: the average is each one's own gradient.
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step)).to(cast)
        engine.backward(engine(x).float())
        engine.step()
        plain(x).float().backward()
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        if clipping:
            norm = nn.utils.clip_grad_norm_(masters, clipping)
            assert step > 0 or norm > clipping, "nothing is clipped"
        theirs.step()
        with torch.no_grad():
            for parameter, master in zip(plain.parameters(), masters, strict=True):
                parameter.copy_(master)
    found, expected = weights_of(engine.module), weights_of(plain)
    for (name, parameter), master in zip(model.named_parameters(), masters, strict=True):
        found[f"{name} in fp32"], expected[f"{name} in fp32"] = safe_get_full_fp32_param(parameter), master
        for key, state in theirs.state[master].items():
            if isinstance(state, torch.Tensor) and state.shape == master.shape:
                found[f"{key} of {name}"] = safe_get_full_optimizer_state(parameter, key)
                expected[f"{key} of {name}"] = state
    return found, expected


@covering(
    stage=STAGES,
    build=(build_adam, build_signed, build_rprop),
    how=("instance", "callable"),
    dtype=("fp32", "bf16"),
    clipping=(0.0, 0.02),
    world=(2, 1),
    where=lambda clipping, world, **_: world == 2 or clipping > 0,
    strength=1,
    always=[(2, build_signed, "instance", "bf16", 0.02, 1)],  # where gradients have 16 bits until they are scaled
)
def test_a_users_optimizer_equals_torch(on_ranks, stage, build, how, dtype, clipping, world):
    for mine, theirs in on_ranks(world, beside_own_optimizer, stage, build, how, dtype, clipping):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", [build_adafactor, build_muon])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (1, 3)])
def test_optimizers_of_whole_matrices_work_where_states_are_whole(on_ranks, build, dtype, world, stage):
    for mine, theirs in on_ranks(world, beside_own_optimizer, stage, build, "instance", dtype):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)


def refused_optimizers(stage: int) -> None:
    for build, name in ((build_adafactor, "Adafactor"), (build_lamb, "Lamb")):
        for allowed in (False, True):
            settings = config(stage, zero_allow_untested_optimizer=allowed)
            with pytest.raises(ConfigError, match=f"{name} .*stage 0"):
                start(Matrices(), settings, optimizer=build)
    with pytest.raises(ConfigError, match=r"Adafactor .*stage 0"):
        start(Matrices(), config(stage, optimizer={"type": "Adafactor", "params": {"lr": 0.1}}))
    with pytest.raises(ConfigError, match=r"Signed.*zero_allow_untested_optimizer"):
        start(Matrices(), config(stage), optimizer=build_signed)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_that_need_whole_parameters_are_refused(on_ranks, stage):
    on_ranks(2, refused_optimizers, stage)


def refused_in_every_stage() -> None:
    with pytest.raises(ConfigError, match="SparseAdam"):
        start(Matrices(), config(0, optimizer={"type": "SparseAdam", "params": {}}))
    with pytest.raises(ConfigError, match="LBFGS"):
        start(Matrices(), config(0), optimizer=torch.optim.LBFGS)


def test_optimizers_that_fit_no_stage_are_refused(on_ranks):
    on_ranks(1, refused_in_every_stage)


# -- loading, copies, end ----------------------------------------------------------------------------------------------


def loaded(stage: int, what: str, overlap: bool) -> bool:
    """Weights loaded into the module are what training goes on from, also in 16 bits."""
    more = {"bf16": {"enabled": True}, "zero_optimization": {"overlap_comm": overlap}}
    # A rate so small that a master which was not refreshed shows at once.
    engine = start(net(), config(stage, optimizer=sgd(1e-6), **more))
    other = start(net(seed=77), config(stage, optimizer=sgd(1e-6), **more))
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    engine.step()
    target, source = (engine.module, other.module)
    if what == "block":
        target, source = target.blocks[1], source.blocks[1]
    expected = weights_of(source)
    target.load_state_dict(expected)
    engine.backward(engine(x, y))
    engine.step()
    found = weights_of(engine.module if what == "module" else engine.module.blocks[1])
    return all(torch.allclose(found[name].float(), expected[name].float(), atol=1e-3) for name in expected)


@covering(stage=FIRST_STAGES, what=("module", "block"), overlap=(True, False), strength=1)
def test_load_state_dict_refreshes_the_masters(on_ranks, stage, what, overlap):
    assert on_ranks(2, loaded, stage, what, overlap) == [True, True]


def copy_that_loads(stage: int, loads: bool) -> Weights:
    """A copy of the module that loads weights must not round the engine's masters."""
    engine = start(net(), config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-4}}, bf16={"enabled": True}))
    with onefold.zero.GatheredParameters(engine.module.parameters()):
        other = copy.deepcopy(engine.module)
    for x, y in batches(12):
        engine.backward(engine(x, y))
        engine.step()
        if loads:
            other.load_state_dict(weights_of(engine.module))
    return {"masters": torch.cat([piece.master.tensor for piece in engine.state.step.stores])}


@covering(stage=FIRST_STAGES)
def test_a_copy_that_loads_weights_leaves_the_engine_alone(on_ranks, stage):
    with_loads, without = (on_ranks(2, copy_that_loads, stage, loads) for loads in (True, False))
    for mine, expected in zip(with_loads, without, strict=True):
        assert first_difference(mine, expected) is None


def after_destroy(stage: int, overlap: bool, dtype: str) -> None:
    """The model is plain torch again: it trains, pickles and copies, and no byte moves."""
    model = net()
    engine = start(model, config(stage, zero_optimization={"overlap_comm": overlap}, **precision(dtype)))
    train(engine, 2)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    weights = weights_of(model)
    calls = sum(row.calls for row in engine.ledger.rows())
    engine.destroy()
    assert first_difference(weights_of(model), weights) is None
    onefold.zero.gather_distributed_parameters(model)
    assert first_difference({name: value.clone() for name, value in model.state_dict().items()}, weights) is None
    assert not any(handle_of(parameter) for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x, y).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert not equal(weights, weights_of(model))
    assert sum(row.calls for row in engine.ledger.rows()) == calls or stage == 3
    assert all(type(module._parameters) is dict for module in model.modules())
    again = pickle.loads(pickle.dumps(model))
    assert first_difference(weights_of(again), weights_of(model)) is None
    buffer = io.BytesIO()
    torch.save(model, buffer)
    engine.destroy()


@covering(stage=FIRST_STAGES, overlap=(True, False), dtype=("fp32", "bf16"), strength=1)
def test_destroy_leaves_a_plain_model(on_ranks, stage, overlap, dtype):
    on_ranks(2, after_destroy, stage, overlap, dtype)


# -- data and reports --------------------------------------------------------------------------------------------------


def shares(size: int, drop_last: bool) -> tuple[list[int], list[int], int]:
    settings = config(0, train_micro_batch_size_per_gpu=3, dataloader_drop_last=drop_last, log_level="warning")
    data = TensorDataset(torch.arange(size))
    _, _, loader, _ = onefold.initialize(model=net(), config=settings, training_data=data, collate_fn=collate)
    assert len({len(batch) for batch in loader} - {3}) <= 1
    first = [index for batch in loader for index in batch]
    loader.sampler.set_epoch(1)
    second = [index for batch in loader for index in batch]
    return first, second, len(loader)


def collate(items: list[tuple[torch.Tensor]]) -> list[int]:
    return [item[0].item() for item in items]


def test_the_loader_shares_the_data_out(on_ranks):
    results = on_ranks(2, shares, 24, False)
    first = [index for found in results for index in found[0]]
    assert sorted(first) == list(range(24))
    assert results[0][0] != results[0][1], "a new epoch is shuffled anew"
    assert sorted(index for found in results for index in found[1]) == list(range(24))
    assert [found[2] for found in results] == [4, 4]
    results = on_ranks(2, shares, 25, True)
    assert [len(found[0]) for found in results] == [12, 12]
    assert not set(results[0][0]) & set(results[1][0])


def reported(breakdown: bool) -> list[str]:
    engine = start(net(), config(1, steps_per_print=2, wall_clock_breakdown=breakdown, gradient_accumulation_steps=2))
    with log_lines() as lines:
        train(engine, 8)
    return lines


@pytest.mark.parametrize("breakdown", [False, True])
def test_progress_is_printed_every_so_many_steps(on_ranks, breakdown):
    first, second = on_ranks(2, reported, breakdown)
    assert second == []
    assert [line.split(",")[0] for line in first] == ["step 2", "step 4"]
    for line in first:
        assert "lr [0.01]" in line
        assert "grad norm" in line
        for phase in ("forward", "backward", "step"):
            assert (f", {phase} " in line and " ms" in line) == breakdown


def memory_reported() -> tuple[list[str], list[str], list[str]]:
    engine = start(net(), config(1, memory_breakdown=True))
    with log_lines() as lines:
        train(engine, 1)
    with log_lines() as forced:
        see_memory_usage("quiet")
        see_memory_usage("loud", force=True)
        memory_status("status", reset_max=True)
    with log_lines() as other:
        memory_status("from rank 1", print_rank=1)
    return lines, forced, other


def test_memory_is_reported(on_ranks):
    (lines, forced, other), (second, _, second_other) = on_ranks(2, memory_reported)
    assert any("after forward" in line for line in lines)
    assert any("after backward" in line for line in lines)
    assert second == []
    assert [line.split(" | ")[0] for line in forced] == ["loud", "status"]
    assert all("GiB" in line for line in forced)
    assert other == []
    assert len(second_other) == 1


def profiled(trace: str) -> tuple[str, dict[str, float], list[str]]:
    engine = start(net(), config(2))
    with log_lines() as lines, onefold.Profiling(trace=trace) as profile:
        train(engine, 3)
        with pytest.raises(RuntimeError, match="already active"):
            onefold.Profiling().__enter__()
    train(engine, 1)
    assert len(profile.spans) == 9
    return profile.table(), profile.by_phase(), lines


def test_profiling_gives_a_table_and_a_trace(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    results = on_ranks(2, profiled, str(path))
    for table, phases, _ in results:
        assert set(phases) == {"forward", "backward", "step"}
        assert all(seconds > 0 for seconds in phases.values())
        for word in ("forward", "backward", "step", "outside", "reduce-scatter", "gather", "memory"):
            assert word in table
    assert any("profile" in line for line in results[0][2])
    assert results[1][2] == []
    events = json.loads(path.read_text())["traceEvents"]
    for index in range(2):
        phases = [event for event in events if event["pid"] == index and event.get("cat") == "phases"]
        assert len(phases) == 9
        assert all(event["ph"] == "X" and event["ts"] >= 0 and event["dur"] > 0 for event in phases)


# -- arithmetic of gradients -------------------------------------------------------------------------------------------


def moved_by(stage: int, more: dict[str, Any], accumulation: int) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """One SGD step at rate 1 moves the weights by the combined gradient: that, and the sum over ranks by hand."""
    engine = tiny(stage, optimizer=sgd(), gradient_accumulation_steps=accumulation, **more)
    before = weight_of(engine)
    total = torch.zeros(8, 8)
    for step in range(accumulation):
        values = [
            torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(engine.world_size)
        ]
        engine.backward(engine(values[rank()]))
        engine.step()
        total += sum(values) / accumulation
    return before - weight_of(engine), total, engine.get_global_grad_norm(), total.norm().item()


COMBINED: dict[str, dict[str, Any]] = {
    "mean": {},
    "prescaled": {"prescale_gradients": True},
    "predivided": {"gradient_predivide_factor": 4.0},
    "prescaled and predivided": {"prescale_gradients": True, "gradient_predivide_factor": 4.0},
    "sum": {"gradient_allreduce_op": "sum"},
}


@covering(stage=STAGES, how=COMBINED, accumulation=(1, 2), world=(2, 3), strength=1)
def test_how_gradients_are_combined(on_ranks, stage, how, accumulation, world):
    divisor = 1 if how == "sum" else world
    for moved, total, norm, expected_norm in on_ranks(world, moved_by, stage, COMBINED[how], accumulation):
        torch.testing.assert_close(moved, total / divisor, rtol=1e-5, atol=1e-6)
        assert norm == pytest.approx(expected_norm / divisor, rel=1e-5)


def travelled(stage: int, wire: str) -> tuple[torch.Tensor, torch.Tensor, int, torch.dtype]:
    engine = tiny(stage, optimizer=sgd(), communication_data_type=wire)
    before = weight_of(engine)
    values = [torch.randn(8, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    engine.backward(engine(values[rank()]))
    sent = engine.ledger.bytes("reduce-scatter")
    engine.step()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wire]
    expected = before - (values[0].to(kind).float() + values[1].to(kind).float()) / 2
    return weight_of(engine), expected, sent, engine.plan.precision.of_wire(torch.float32)


@covering(stage=STAGES, wire=("fp32", "bf16", "fp16"), strength=1)
def test_gradients_travel_in_the_communication_data_type(on_ranks, stage, wire):
    for mine, expected, sent, kind in on_ranks(2, travelled, stage, wire):
        assert torch.equal(mine, expected)
        # One aligned shard of 2048 elements to the one peer.
        assert sent == 2048 * kind.itemsize
        assert str(kind) == {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[wire]


def accumulated_in(stage: int, dtype: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Small gradients on top of a large one: bf16 swallows them, fp32 does not. A wire in fp32 rounds nothing."""
    more: dict[str, Any] = {"data_types": {"grad_accum_dtype": dtype}} if dtype else {}
    more["communication_data_type"] = "fp32"
    engine = tiny(stage, optimizer=sgd(), bf16={"enabled": True}, gradient_accumulation_steps=4, **more)
    with torch.no_grad():
        engine.module.load_state_dict({"weight": torch.zeros(8, 8)})
    for value in (1024.0, 1.0, 1.0, 1.0):
        engine.backward(engine(value))
        engine.step()
    masters = [piece.master.tensor for piece in engine.state.step.stores]
    return masters[0][:1].clone(), torch.tensor(engine.plan.precision.accumulate.itemsize)


@covering(stage=FIRST_STAGES)
@pytest.mark.parametrize(("dtype", "total", "width"), [(None, 1027.0, 4), ("fp32", 1027.0, 4), ("bf16", 1024.0, 2)])
def test_gradients_accumulate_in_the_chosen_dtype(on_ranks, stage, dtype, total, width):
    master, itemsize = on_ranks(2, accumulated_in, stage, dtype)[0]
    assert master.item() == -total / 4
    assert itemsize.item() == width


def dtypes_of_buffers(kind: str) -> tuple[str, str]:
    more = {"data_types": {"buffer_dtype": "bf16"}} if kind == "bf16" else {}
    engine = start(net(), config(1, **more))
    return str(engine.module.scale.dtype), str(next(engine.module.parameters()).dtype)


@pytest.mark.parametrize(("kind", "expected"), [("kept", "torch.float32"), ("bf16", "torch.bfloat16")])
def test_buffers_are_cast_where_asked(on_ranks, kind, expected):
    for buffers, parameters in on_ranks(2, dtypes_of_buffers, kind):
        assert buffers == expected
        assert parameters == "torch.float32"


def auto_cast() -> None:
    engine = start(nn.Linear(8, 8, bias=False), config(1, fp16={"enabled": True, "auto_cast": True}))
    assert engine(torch.ones(2, 8)).dtype == torch.float16


def test_fp16_auto_cast_takes_fp32_inputs(on_ranks):
    on_ranks(2, auto_cast)


def counters_that_programs_set() -> tuple[int, int, object]:
    engine = start(net(), config(2))
    engine.global_steps, engine.lr_scheduler = 5, None
    train(engine, 1)
    return engine.global_steps, engine.state.global_steps, engine.lr_scheduler


def test_programs_may_set_counters_and_the_scheduler(on_ranks):
    assert on_ranks(1, counters_that_programs_set) == [(6, 6, None)]
