"""Checkpoints: saved by any plan, taken up by any other to the bit, and exact to go on from."""

from __future__ import annotations

import logging
import math
import os
import random
import resource
import signal
import subprocess
import sys
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from covering import covering
from models import VOCABULARY, batches, config, net, precision, rank, start
from ranks import RankPool
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import Dataset, IterableDataset

import onefold
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import RANGE_BYTES
from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.plan import layout
from onefold.runtime import unsharded
from onefold.utils import (
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

OnRanks = Callable[..., list[Any]]
Arrays = dict[str, np.ndarray]

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)
# A layer's line is cut inside its weight on 2, 3 and 4 ranks.
WIDTH = 83
PLANS = [(stage, world) for world in WORLDS for stage in STAGES]


def slower(*cases: Any) -> list[Any]:
    """Cases of the slower tier; a tuple is several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


class Odd(nn.Module):
    """Sizes that divide by nothing, a tied head, a frozen layer, a buffer, a parameter without elements."""

    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.frozen(self.embed(x))
        for layer in self.layers:
            h = h + self.dropout(torch.tanh(layer(h)))
        if self.training:
            with torch.no_grad():
                self.seen += h.detach().float().mean()  # another number on every rank
        logits = self.head(self.norm(h)).float() + self.nothing.sum()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def odd(seed: int = 5, **more: Any) -> Odd:
    torch.manual_seed(seed + rank())
    return Odd(**more)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def odd_engine(stage: int, kind: str = "fp32", seed: int = 5, **more: Any) -> onefold.Engine:
    model = odd(seed)
    return start(model, config(stage, **precision(kind), **more), model_parameters=two_groups(model))


def learn(engine: onefold.Engine, num_micro_steps: int, seed: int = 0, factor: float = 1.0) -> list[float]:
    losses = []
    for x, y in batches(num_micro_steps, seed=seed):
        loss = engine(x, y) * factor
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -- what an engine holds ----------------------------------------------------------------------------------------


def held(engine: onefold.Engine) -> Arrays:
    """This rank's part of all masters and states, and the whole model as it computes. All ranks call this."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in engine.module.named_parameters():
        if safe_get_local_fp32_param(parameter) is not None:
            found[name] = safe_get_local_fp32_param(parameter)
            for state in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "square_avg"):
                found[f"{name}/{state}"] = safe_get_local_optimizer_state(parameter, state)
    with unsharded(engine.module.parameters()):
        found |= {f"as computed/{name}": tensor.clone() for name, tensor in engine.module.state_dict().items()}
    return {name: value.detach().view(-1).float().numpy() for name, value in found.items() if value is not None}


def joined(of_ranks: list[Arrays]) -> Arrays:
    """The parts of all ranks in one."""
    first = of_ranks[0]
    is_whole = {name: name.startswith("as computed/") for name in first}
    return {n: first[n] if is_whole[n] else np.concatenate([part[n] for part in of_ranks if n in part]) for n in first}


def differing(one: Arrays, other: Arrays) -> list[str]:
    """The names of what is not the same to the bit."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or one[n].tobytes() != other[n].tobytes()]


# -- every plan to every plan ------------------------------------------------------------------------------------


def save_each(folder: str, kind: str, factors: list[float]) -> list[Arrays]:
    """One checkpoint a stage, all different; what each holds."""
    world, found = dist.get_world_size(), []
    for stage in STAGES:
        engine = odd_engine(stage, kind)
        for number, factor in enumerate(factors):
            learn(engine, 1, seed=10 * stage + number, factor=factor)
        scale = engine.optimizer.loss_scale if kind == "fp16" else 1.0
        engine.save_checkpoint(folder, f"{stage}-on-{world}", {"from": (stage, world), "scale": scale})
        found.append(held(engine))
    return found


def load_each(folder: str, kind: str, stage: int, tags: list[str]) -> list[tuple[Any, Arrays]]:
    """All of them in turn on one engine that has trained: there is something to lose."""
    engine = odd_engine(stage, kind, seed=77)
    learn(engine, 1)
    found = []
    for tag in tags:
        path, client_state = engine.load_checkpoint(folder, tag)
        assert path == f"{folder}/{tag}"
        if kind == "fp16":
            assert client_state["scale"] == engine.optimizer.loss_scale
        found.append(((engine.global_steps, client_state["from"]), held(engine)))
    return found


def whole(stage: int, of_ranks: list[Arrays]) -> Arrays:
    """At stage 0 every rank holds everything, and all of them the same."""
    if stage == 0:
        own = {"as computed/seen"}  # another on every rank
        assert all(set(differing(of_ranks[0], other)) <= own for other in of_ranks)
        return of_ranks[0]
    return joined(of_ranks)


class Saved:
    """Checkpoints of every plan in one folder, and what they hold."""

    def __init__(self, on_ranks: OnRanks, folder: str, kind: str, worlds: tuple[int, ...], factors: list[float]):
        self.folder, self.kind = folder, kind
        self.held: dict[tuple[int, int], Arrays] = {}
        for world in worlds:
            of_ranks = on_ranks(world, save_each, folder, kind, factors)
            for stage in STAGES:
                self.held[stage, world] = whole(stage, [parts[stage] for parts in of_ranks])

    def differences(self, on_ranks: OnRanks, stage: int, world: int) -> dict[tuple[int, int], list[str]]:
        """What of each is another after this plan has loaded it."""
        tags = [f"{there}-on-{ranks}" for there, ranks in self.held]
        of_ranks = on_ranks(world, load_each, self.folder, self.kind, stage, tags)
        found = {}
        for index, (plan, expected) in enumerate(self.held.items()):
            assert [loaded[index][0][1] for loaded in of_ranks] == [plan] * world
            parts = [loaded[index][1] for loaded in of_ranks]
            found[plan] = differing(whole(stage, parts), expected)
            if plan[1] != world:  # a rank's own buffers are of the ranks that there were: all take the first one's
                found[plan] += [
                    f"{name} of rank {rank}"
                    for rank, part in enumerate(parts)
                    for name in part
                    if name.startswith("as computed/") and part[name].tobytes() != expected[name].tobytes()
                ]
        return found


@pytest.fixture(scope="module")
def of_all_plans(on_ranks: OnRanks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(on_ranks, str(tmp_path_factory.mktemp("all")), "bf16", WORLDS, [1.0, 1.0])


@covering(stage=(3, 1, 2, *slower(0)), world=(2, 1, 3, *slower(4)), strength=1)
def test_every_plan_takes_up_every_other_plans_checkpoint(
    on_ranks: OnRanks, of_all_plans: Saved, stage: int, world: int
) -> None:
    assert of_all_plans.differences(on_ranks, stage, world) == {plan: [] for plan in of_all_plans.held}


@pytest.mark.parametrize("kind", ["fp16", *slower("fp32")])
def test_every_precision_takes_up_its_own(on_ranks: OnRanks, tmp_path: Path, kind: str) -> None:
    # In fp16 a step overflows before the save: the scale is in the middle of its search.
    saved = Saved(on_ranks, str(tmp_path), kind, (2,), [1.0, 1e30 if kind == "fp16" else 1.0, 1.0])
    for stage, world in [(1, 1), (0, 2), (3, 3)]:
        assert saved.differences(on_ranks, stage, world) == {plan: [] for plan in saved.held}
    if kind == "fp16":
        assert all(np.isfinite(value).all() for found in saved.held.values() for value in found.values())


# -- going on ----------------------------------------------------------------------------------------------------


class Drawn(Dataset[Any]):
    """Samples that are drawn anew whenever they are asked for, from every generator there is."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, VOCABULARY, (7,))
        x[0], x[1], x[2] = index, random.randrange(VOCABULARY), int(np.random.randint(VOCABULARY))
        return x, x.roll(-1)


class Matrices(nn.Module):
    """Only matrices, for optimizers that take nothing else."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(2))
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + self.dropout(torch.tanh(layer(h)))
        return F.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


class FlatMomentum(torch.optim.Optimizer):
    """A user's own, whose states have other shapes than the parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(flat=torch.zeros(p.numel()), largest=torch.zeros(p.shape[-1]), seen=(0, "steps"))
                state["flat"].mul_(0.9).add_(p.grad.flatten())
                torch.maximum(state["largest"], p.grad.abs().flatten(0, -2).amax(0), out=state["largest"])
                state["seen"] = (state["seen"][0] + 1, "steps")
                p.add_(state["flat"].view(p.shape) / (1 + state["largest"]), alpha=-group["lr"] / state["seen"][0])


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-2, **params}}}


WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}}

# What differs from AdamW in fp32 at a fixed rate: the config, and what `initialize` is given.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw, warm-up": (WARMUP, {}),
    "bf16": ({**precision("bf16"), **WARMUP}, {}),
    "fp16 in mid-scaling": (
        {
            "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 2},
            **WARMUP,
        },
        {},
    ),
    "clipped": ({"gradient_clipping": 0.1}, {}),
    "amsgrad": (optimizer("Adam", amsgrad=True), {}),
    "sgd, momentum": (optimizer("SGD", momentum=0.9, nesterov=True), {}),
    "adagrad": (optimizer("Adagrad", initial_accumulator_value=0.1), {}),
    "lion": (optimizer("Lion"), {}),
    "nadam by name": (optimizer("NAdam"), {}),
    "rmsprop instance": ({}, {"optimizer": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True)}),
    "asgd instance": ({}, {"optimizer": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2)}),
    "lambda rates": ({}, {"lr_scheduler": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step))}),
    "one cycle": (
        {},
        {
            "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2),
            "lr_scheduler": lambda o: schedulers.OneCycleLR(o, max_lr=1e-2, total_steps=20),
        },
    ),
    "milestones": ({}, {"lr_scheduler": lambda o: schedulers.MultiStepLR(o, [1, 3, 3, 4], gamma=0.5)}),
    "sequential": (
        {},
        {
            "lr_scheduler": lambda o: schedulers.SequentialLR(
                o, [schedulers.LinearLR(o), schedulers.CosineAnnealingLR(o, 5)], [3]
            )
        },
    ),
}
# Where every rank steps everything, optimizers may look at whole matrices.
WHOLE_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adafactor": ({}, {"optimizer": lambda p: torch.optim.Adafactor(p, lr=1e-2)}),
    "muon": ({}, {"optimizer": lambda p: torch.optim.Muon(p, lr=1e-2)}),
    "a class of one's own": ({}, {"optimizer": FlatMomentum}),
}
# The others run in the slower tier.
FIRST = [
    (3, "bf16"),
    (2, "adamw, warm-up"),
    (1, "fp16 in mid-scaling"),
    (2, "sgd, momentum"),
    (1, "adagrad"),
    (3, "lion"),
    (0, "nadam by name"),
    (3, "rmsprop instance"),
    (3, "one cycle"),
    (1, "milestones"),
    *((0, name) for name in WHOLE_RUNS),
]


def build_run(stage: int, name: str, seed: int) -> onefold.Engine:
    more, given = {**RUNS, **WHOLE_RUNS}[name]
    torch.manual_seed(seed + rank())
    model: nn.Module = Matrices(0.2) if name in WHOLE_RUNS else Odd(0.2)
    settings = {**config(stage), "gradient_accumulation_steps": 2, **more}
    settings["train_micro_batch_size_per_gpu"] = 2
    if "optimizer" in given:
        del settings["optimizer"]
    return start(model, settings, training_data=Drawn(), **given)


def endless(engine: onefold.Engine, epoch: int, at: dict[str, int]) -> Iterator[Any]:
    while True:
        at["epoch"] = epoch
        engine.training_dataloader.sampler.set_epoch(epoch)
        yield from engine.training_dataloader
        epoch += 1


def advance(engine: onefold.Engine, data: Iterator[Any], num_steps: int, bad_step: int = -1) -> list[Any]:
    """Everything a person would look at, step by step."""
    seen = []
    for step in range(num_steps):
        for x, y in islice(data, engine.batch.accumulation):
            loss = engine(x, y)
            engine.backward(loss * (1e30 if step == bad_step else 1))
            engine.step()
            seen.append((x.tolist(), loss.item()))
        scale = engine.optimizer.loss_scale
        seen.append((engine.global_steps, engine.get_lr(), engine.get_global_grad_norm(), scale, engine.skipped_steps))
    return seen


def scatter(seed: int) -> None:
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(seed + 10 * rank())


def resumes(folder: str, stage: int, name: str) -> list[str]:
    """A run that goes on, and one that is saved and taken up by another engine: what differs."""
    scatter(1)
    engine, at = build_run(stage, name, seed=5), {"epoch": 0}
    data = endless(engine, 0, at)
    advance(engine, data, 2, bad_step=1 if "fp16" in name else -1)
    assert engine.skipped_steps == ("fp16" in name)
    engine.save_checkpoint(folder, client_state=at)
    expected, expected_held = advance(engine, data, 3), held(engine)

    scatter(2)
    other = build_run(stage, name, seed=6)
    advance(other, endless(other, 0, {}), 1)
    _, found = other.load_checkpoint(folder)
    assert found is not None
    seen = advance(other, endless(other, found["epoch"], {}), 3)
    unlike = [f"seen {index}: {a} {b}" for index, (a, b) in enumerate(zip(expected, seen, strict=True)) if a != b]
    return unlike[:2] + differing(expected_held, held(other))


@pytest.mark.parametrize(("stage", "name"), FIRST)
def test_a_run_that_is_taken_up_is_the_run_that_went_on(
    on_ranks: OnRanks, tmp_path: Path, stage: int, name: str
) -> None:
    assert on_ranks(2, resumes, str(tmp_path), stage, name) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("stage", "world"), [plan for plan in PLANS if plan[1] != 4])
def test_a_run_that_is_taken_up_elsewhere_is_the_run_that_went_on(
    on_ranks: OnRanks, tmp_path: Path, stage: int, world: int, name: str
) -> None:
    assert on_ranks(world, resumes, str(tmp_path), stage, name) == [[]] * world


# -- other layouts, other questions ------------------------------------------------------------------------------


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    """Groups that cut across those of `two_groups`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name.startswith("layers.0")], "weight_decay": 0.3},
        {"params": [p for name, p in named if name.startswith("layers.1")], "weight_decay": 0.2},
        {"params": [p for name, p in named if not name.startswith("layers")], "weight_decay": 0.1},
    ]


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], list[dict[str, Any]]]]] = {
    "the same": ({}, two_groups),
    "layers in the root": ({"onefold": {"units": ["norm"]}}, two_groups),
    "a unit a linear": ({"onefold": {"units": ["Linear", "Embedding"]}}, two_groups),
    "one group": ({}, one_group),
    "groups by layer": ({}, by_layer),
    "fp32": ({"bf16": {"enabled": False}}, two_groups),
    "small ones rest whole": ({"zero_optimization": {"stage3_param_persistence_threshold": 4000}}, two_groups),
    "accumulation": ({"gradient_accumulation_steps": 3}, two_groups),
}


def between_layouts(folder: str, stage: int) -> list[str]:
    """The plain layout to every other and back, and each to the next: names of what differs."""
    unlike, expected, engines = [], {}, {}
    for name, (extra, groups) in LAYOUTS.items():
        model = odd()
        engine = start(model, config(stage, **{**precision("bf16"), **extra}), model_parameters=groups(model))
        learn(engine, engine.batch.accumulation, seed=len(engines))
        engine.save_checkpoint(folder, name)
        expected[name], engines[name] = trained_values(folder, name), engine
    names = list(LAYOUTS)
    pairs = {(names[0], name) for name in names} | {(name, names[0]) for name in names}
    for theirs, mine in sorted(pairs | set(pairwise(names))):
        engines[mine].load_checkpoint(folder, theirs)
        engines[mine].save_checkpoint(folder, "again")
        again = trained_values(folder, "again")
        unlike += [f"{theirs} by {mine}: {key}" for key in differing(again, expected[theirs])]
    return unlike


def trained_values(folder: str, tag: str) -> Arrays:
    """All masters and states of a checkpoint, whole, read from its files."""
    dist.barrier()
    with CheckpointReader.open(folder, tag) as checkpoint:
        trained = {name for name, group in checkpoint.manifest.parameters.items() if group is not None}
        found = {f"model/{name}": checkpoint.tensor(f"model/{name}") for name in trained}
        found |= {f"optimizer/{key}": checkpoint.tensor(f"optimizer/{key}") for key in checkpoint.names("optimizer/")}
    dist.barrier()
    return {name: tensor.numpy() for name, tensor in found.items()}


@covering(stage=(3, *slower(0, 1, 2)))
def test_units_groups_and_precision_may_change(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, between_layouts, str(tmp_path), stage) == [[], []]


def saved_with_narrow_alignment(folder: str, stage: int, alignment: int) -> list[str]:
    """A checkpoint from when parameters started at other places, taken up today."""
    today, layout.PARAMETER_ALIGNMENT = layout.PARAMETER_ALIGNMENT, alignment
    try:
        engine = odd_engine(stage, "bf16")
        starts = [member.start for param in engine.state.schedule.trained_params() for member in param.layout.members]
        assert any(start % today for start in starts)
        learn(engine, 2)
        engine.save_checkpoint(folder, "old")
    finally:
        layout.PARAMETER_ALIGNMENT = today
    engine = odd_engine(stage, "bf16", seed=77)
    engine.load_checkpoint(folder, "old")
    engine.save_checkpoint(folder, "new")
    return differing(trained_values(folder, "new"), trained_values(folder, "old"))


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_may_have_started_at_other_places(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, saved_with_narrow_alignment, str(tmp_path), stage, 64) == [[], []]


def rates(folder: str) -> Any:
    """Hyperparameters go with the parameters where a new group's had the same, and stay where they had not."""
    model = odd()
    engine = start(model, config(1, **precision("bf16")), model_parameters=two_groups(model))
    engine.optimizer.param_groups[0]["lr"], engine.optimizer.param_groups[1]["lr"] = 0.25, 0.5
    learn(engine, 1)
    engine.save_checkpoint(folder)
    found = []
    for groups in (two_groups, lambda model: two_groups(model)[::-1], one_group, by_layer):
        model = odd()
        engine = start(model, config(1, **precision("bf16")), model_parameters=groups(model))
        engine.load_checkpoint(folder)
        found.append([(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups])
    return found


def test_a_groups_hyperparameters_follow_its_parameters(on_ranks: OnRanks, tmp_path: Path) -> None:
    same, turned, one, layers = on_ranks(1, rates, str(tmp_path))[0]
    assert same == [(0.25, 0.1), (0.5, 0.0)]
    assert turned == [(0.5, 0.0), (0.25, 0.1)]
    assert one == [(0.01, 0.1)]
    assert layers == [(0.01, 0.3), (0.01, 0.2), (0.01, 0.1)]


def parts_of_a_load(folder: str, stage: int) -> dict[str, Any]:
    """What each switch of load_checkpoint takes over; True is the checkpoint's, False the engine's own."""
    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-2}}}
    engine = odd_engine(stage, "bf16", **warm)
    learn(engine, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    saved, its_rate = held(engine), engine.get_lr()

    def custom(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        assert src["head.weight"] is src["embed.weight"]
        dst.load_state_dict({name: tensor + 1 for name, tensor in src.items()})

    found = {}
    for name, switches in {
        "all": {},
        "module only": {"load_module_only": True},
        "no optimizer": {"load_optimizer_states": False},
        "no scheduler": {"load_lr_scheduler_states": False},
        "custom": {"custom_load_fn": custom},
    }.items():
        other = odd_engine(stage, "bf16", seed=6, **warm)
        learn(other, 1, seed=5)
        before = held(other)
        path, client_state = other.load_checkpoint(folder, **switches)
        assert (path, client_state) == (f"{folder}/global_step3", {"epoch": 3})
        now = held(other)

        def which(ending: str, now: Arrays = now, before: Arrays = before) -> Any:
            keys = [key for key in now if key.endswith(ending) and (ending or "/" not in key) and now[key].size]
            theirs, ours = ({key: whose[key] for key in keys} for whose in (saved, before))
            mine = {key: now[key] for key in keys}
            return True if not differing(mine, theirs) else False if not differing(mine, ours) else None

        found[name] = (which(""), which("exp_avg"), other.lr_scheduler.last_batch_iteration == 2, other.global_steps)
        if name == "custom":
            weights = [key for key in now if key.startswith("as computed/layers")]
            found["added"] = all(np.allclose(now[key], saved[key] + 1, atol=1e-2) for key in weights)
            masters = [key for key in now if key.startswith("layers") and "/" not in key]
            found["masters"] = all(np.allclose(now[key], saved[key] + 1, atol=1e-2) for key in masters)
        learn(other, 1)
    found["rate"] = its_rate == engine.get_lr()
    return found


@covering(stage=(3, 1, *slower(0, 2)))
def test_the_switches_of_load_checkpoint(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    for found in on_ranks(2, parts_of_a_load, str(tmp_path), stage):
        assert found == {
            "all": (True, True, True, 3),
            "module only": (True, False, False, 1),
            "no optimizer": (True, False, True, 3),
            "no scheduler": (True, True, False, 3),
            "custom": (None, True, True, 3),
            "added": True,
            "masters": True,
            "rate": True,
        }


def without_frozen(folder: str, stage: int) -> Any:
    engine = odd_engine(stage, "bf16")
    learn(engine, 1)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved = held(engine)
    other = odd_engine(stage, "bf16", seed=6)
    mine = held(other)
    other.load_checkpoint(folder)
    with CheckpointReader.open(folder) as checkpoint:
        stored = [name for name in checkpoint.names("model/") if name.startswith("frozen")]
    now = held(other)
    frozen = [key for key in now if key.startswith("as computed/frozen")]
    assert len(frozen) == 2
    return (
        stored,
        all(not differing({key: now[key]}, {key: mine[key]}) for key in frozen),
        sorted(set(differing(now, saved)) - set(frozen)),
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_may_stay_out(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, without_frozen, str(tmp_path), stage) == [([], True, [])] * 2


def adapted(folder: str, stage: int) -> Any:
    """An adapter's checkpoint holds the adapter, and resumes."""
    import peft

    def build(seed: int) -> onefold.Engine:
        model = odd(seed)
        settings = peft.LoraConfig(r=4, target_modules=["layers.0", "layers.1"], lora_dropout=0.1)
        torch.manual_seed(5 + seed)
        adapted = peft.get_peft_model(model, settings)
        with torch.no_grad():  # the pretrained part is the same in every job
            torch.manual_seed(9)
            for name, parameter in adapted.named_parameters():
                if "lora" not in name:
                    parameter.normal_(std=0.1)
        return start(adapted, config(stage, **precision("bf16")))

    engine = build(5)
    learn(engine, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    expected = learn(engine, 2, seed=1)
    with CheckpointReader.open(folder) as checkpoint:
        stored = list(checkpoint.names("model/"))
    other = build(6)
    other.load_checkpoint(folder)
    return all("lora" in name or name.endswith("seen") for name in stored), learn(other, 2, seed=1) == expected


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@covering(stage=(3, *slower(0, 1, 2)))
def test_an_adapter_resumes_from_itself_alone(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, adapted, str(tmp_path), stage) == [(True, True)] * 2


def evaluated(folder: str, stage: int) -> Any:
    """An engine without an optimizer loads the weights."""
    engine = odd_engine(stage, "bf16")
    learn(engine, 1)
    engine.save_checkpoint(folder)
    settings = {**config(stage, **precision("bf16"))}
    del settings["optimizer"]
    other = start(odd(6), settings)
    other.load_checkpoint(folder)
    saved, now = held(engine), held(other)
    return [name for name in differing(now, saved) if name.startswith("as computed")], other.global_steps


@covering(stage=(1, 3, *slower(0)))
def test_an_engine_that_only_evaluates_loads_too(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, evaluated, str(tmp_path), stage) == [([], 1)] * 2


def whole_states(stage: int) -> list[tuple[int, ...]]:
    """Of an optimizer that only torch knows, also where a rank holds nothing of a parameter."""
    engine = small_engine(stage, **optimizer("RMSprop"))
    learn(engine, 1)
    found = [safe_get_full_optimizer_state(parameter, "square_avg") for parameter in engine.module.parameters()]
    return [tuple(state.shape) for state in found if state is not None]


def test_whole_states_of_any_optimizer_are_read_on_all_ranks(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, whole_states, 1)
    assert first == second
    assert len(first) == 17


# -- what does not fit -------------------------------------------------------------------------------------------


class Grown(Odd):
    """One layer has another shape, one is gone, one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.extra = nn.Linear(WIDTH, 2)
        self.embed = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)
        self.head.weight = self.embed.weight


def told(work: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the words of the error that must come."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


def misfit(folder: str, stage: int) -> Any:
    engine = odd_engine(stage)
    learn(engine, 1)
    engine.save_checkpoint(folder)
    torch.manual_seed(3)
    other = start(Grown(), config(stage))
    before = held(other)
    error = told(lambda: other.load_checkpoint(folder))
    loose = told(lambda: other.load_checkpoint(folder, load_module_strict=False))
    return error, loose, differing(before, held(other)), len(learn(other, 1))


@covering(stage=(3, *slower(1)))
def test_another_model_is_refused_with_every_difference(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    for (kind, text), (_, loose), changed, steps in on_ranks(2, misfit, str(tmp_path), stage):
        assert kind == "MisfitError"
        for line in (
            "missing in the checkpoint: extra.weight [2, 83]",
            "missing in the checkpoint: extra.bias [2]",
            "different shape: embed.weight is [32, 83] in the model, [31, 83] in the checkpoint",
            "not in the model: norm.bias",
        ):
            assert line in text
        assert text.count("different shape") == 1
        assert "different shape: embed.weight" in loose
        assert "missing" not in loose
        assert changed == []
        assert steps == 1


class Longer(Odd):
    """One layer more, and one norm less."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, 2)
        self.norm = nn.LayerNorm(WIDTH, bias=False)


def loosely(folder: str, stage: int) -> Any:
    engine = odd_engine(stage, "bf16")
    learn(engine, 2)
    engine.save_checkpoint(folder)
    torch.manual_seed(3)
    other = start(Longer(), config(stage, **precision("bf16")))
    before, saved = held(other), held(engine)
    other.load_checkpoint(folder, load_module_strict=False)
    now = held(other)
    new = {key for key in now if "extra" in key}
    kept = {key: before[key] for key in new if key in before}
    return differing({k: v for k, v in now.items() if k not in new}, {k: v for k, v in saved.items() if k in now}), (
        differing({key: now[key] for key in kept}, kept)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_without_strictness_what_both_have_is_loaded(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, loosely, str(tmp_path), stage) == [([], [])] * 2


class Shared(nn.Module):
    """One layer under several names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        for name in names:
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x).square().mean()


def under_other_names(folder: str, stage: int) -> list[str]:
    """Save a layer under some names and load it under others, of which one is the same."""
    unlike = []
    for tag, (theirs, mine) in enumerate([(["head"], ["embed", "head"]), (["embed", "head"], ["head"])]):
        engines = [start(Shared(*names), config(stage)) for names in (theirs, mine)]
        engines[0].backward(engines[0](torch.ones(2, WIDTH)))
        engines[0].step()
        engines[0].save_checkpoint(folder, str(tag))
        engines[1].load_checkpoint(folder, str(tag))
        saved, loaded = ({name.replace("embed", "head"): v for name, v in held(e).items()} for e in engines)
        unlike += differing(saved, loaded)
    return unlike


@pytest.mark.parametrize("stage", [1, 3])
def test_tied_weights_are_found_under_any_of_their_names(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, under_other_names, str(tmp_path), stage) == [[]] * 2


OTHERS = {
    "adam to rmsprop": (optimizer("Adam"), optimizer("RMSprop")),
    "rmsprop to adam": (optimizer("RMSprop"), optimizer("Adam")),
    "adam to sgd": (optimizer("Adam"), optimizer("SGD")),
    "sgd to adam": (optimizer("SGD"), optimizer("Adam")),
    "adam to lion": (optimizer("Adam"), optimizer("Lion")),
    "adam to nadam": (optimizer("Adam"), optimizer("NAdam")),
    "nadam to radam": (optimizer("NAdam"), optimizer("RAdam")),
}


def of_another_kind(folder: str, name: str) -> Any:
    theirs, ours = OTHERS[name]
    engine = odd_engine(1, **theirs)
    learn(engine, 1)
    engine.save_checkpoint(folder)
    other = odd_engine(1, seed=6, **ours)
    learn(other, 1)
    before = held(other)
    error = told(lambda: other.load_checkpoint(folder))
    changed = differing(before, held(other))
    learn(other, 1)
    other.load_checkpoint(folder, load_optimizer_states=False)
    return error, changed, len(learn(other, 1))


@pytest.mark.parametrize("name", [*list(OTHERS)[:4], *slower(*list(OTHERS)[4:])])
def test_states_of_another_optimizer_are_refused(on_ranks: OnRanks, tmp_path: Path, name: str) -> None:
    for (kind, text), changed, steps in on_ranks(2, of_another_kind, str(tmp_path), name):
        assert kind == "MisfitError"
        assert "load_optimizer_states=False" in text
        assert (changed, steps) == ([], 1)


SETTINGS = {
    "momentum": (optimizer("SGD", momentum=0.9), optimizer("SGD")),
    "amsgrad": (optimizer("Adam", amsgrad=True), optimizer("Adam")),
}


def other_settings(folder: str, name: str) -> Any:
    """The checkpoint's optimizer keeps a state that this one's config does without."""
    engine = odd_engine(1, **SETTINGS[name][0])
    learn(engine, 1)
    engine.save_checkpoint(folder)
    other = odd_engine(1, **SETTINGS[name][1])
    try:
        other.load_checkpoint(folder)
    except ValueError as error:
        return "load_optimizer_states=False" in str(error)
    return len(learn(other, 1)) == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_an_optimizer_with_fewer_states_is_refused_or_goes_on(on_ranks: OnRanks, tmp_path: Path, name: str) -> None:
    assert on_ranks(2, other_settings, str(tmp_path), name) == [True, True]


def fails_to_load(folder: str, name: str, why: str) -> Any:
    """An engine that has trained, and a checkpoint that it cannot take: nothing has changed."""
    engine = build_run(2, name, seed=5)
    advance(engine, endless(engine, 0, {}), 1)
    if why == "damage":
        engine.save_checkpoint(folder, "bad")
        dist.barrier()
        if rank() == 0:
            path = max(Path(folder, "bad").glob("data-*/*.safetensors"), key=lambda path: path.stat().st_size)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        dist.barrier()
    else:
        other = start(Odd(width=WIDTH + 1), config(2))
        learn(other, 1)
        other.save_checkpoint(folder, "bad")
    advance(engine, endless(engine, 0, {}), 1)
    before, rates, steps = held(engine), engine.get_lr(), engine.global_steps
    error = told(lambda: engine.load_checkpoint(folder, "bad"))
    after = differing(before, held(engine)), engine.get_lr() == rates, engine.global_steps == steps
    advance(engine, endless(engine, 0, {}), 1)
    return error[0], *after


@covering(name=("rmsprop instance", "bf16"), why=("damage", "misfit"), strength=1)
def test_a_load_that_fails_leaves_everything_as_it_was(on_ranks: OnRanks, tmp_path: Path, name: str, why: str) -> None:
    kind = "CheckpointError" if why == "damage" else "MisfitError"
    assert on_ranks(2, fails_to_load, str(tmp_path), name, why) == [(kind, [], True, True)] * 2


# -- how much is read --------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A few megabytes, in tensors of several ranges of checksums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1500, 1001, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).square().mean() for layer in self.layers)


def save_wide(folder: str) -> None:
    engine = start(Wide(), config(1))
    engine.backward(engine(torch.ones(1, 1500)))
    engine.step()
    engine.save_checkpoint(folder)


def read_wide(folder: str, stage: int) -> int:
    """Bytes of tensors that this rank reads, as the kernel counts them."""
    engine = start(Wide(), config(stage))
    before = kernel_reads()
    engine.load_checkpoint(folder)
    return kernel_reads() - before


def kernel_reads() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
def test_a_rank_reads_its_share_and_at_most_two_ranges_more_of_each_tensor(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(3, save_wide, str(tmp_path))
    whole = 3 * 2 * 1500 * 1001 * 4
    for stage, world in [(1, 2), (3, 2), (2, 4)]:
        for nbytes in on_ranks(world, read_wide, str(tmp_path), stage):
            assert whole / world * 0.9 < nbytes < whole / world + 6 * 2 * RANGE_BYTES + 500_000


# -- folders and tags --------------------------------------------------------------------------------------------


def tags_in(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir() if entry.is_dir())


def small_engine(stage: int = 1, seed: int = 5, **more: Any) -> onefold.Engine:
    return start(net(seed), config(stage, **more))


def kept(folder: str, section: dict[str, int], steps: int) -> Any:
    engine = small_engine(checkpoint=section)
    for _ in range(steps):
        learn(engine, 1)
        engine.save_checkpoint(folder)
    dist.barrier()
    return tags_in(folder)


@pytest.mark.parametrize(
    ("section", "steps"),
    [
        ({"keep_last": 2}, [6, 7]),
        ({"keep_last": 2, "keep_every": 3}, [3, 6, 7]),
        *slower(
            ({}, [1, 2, 3, 4, 5, 6, 7]), ({"keep_last": 1}, [7]), ({"keep_last": 1, "keep_every": 2}, [2, 4, 6, 7])
        ),
    ],
)
def test_old_checkpoints_go_and_those_of_every_so_many_steps_stay(
    on_ranks: OnRanks, tmp_path: Path, section: dict[str, int], steps: list[int]
) -> None:
    expected = [f"global_step{step}" for step in steps]
    found = on_ranks(2, kept, str(tmp_path), section, 7)[0]
    assert found == expected
    for tag in expected:
        CheckpointReader.open(tmp_path, tag).close()


def kept_aside(folder: str) -> Any:
    """What `latest` names stays, however old; files that are not ours stay too."""
    engine = small_engine(checkpoint={"keep_last": 1})
    Path(folder, "mine").mkdir(exist_ok=True)
    engine.save_checkpoint(folder, "named")
    if rank() == 0:
        Path(folder, "named", "notes.txt").write_text("mine")
        Path(folder, "mine", "notes.txt").write_text("mine")
    for _ in range(3):
        learn(engine, 1)
        engine.save_checkpoint(folder, save_latest=False)
    path, _ = small_engine(seed=6).load_checkpoint(folder)
    first = tags_in(folder)
    dist.barrier()
    learn(engine, 1)
    engine.save_checkpoint(folder)
    dist.barrier()
    return path, first, tags_in(folder), sorted(entry.name for entry in Path(folder, "named").iterdir())


def test_what_latest_names_and_other_peoples_files_stay(on_ranks: OnRanks, tmp_path: Path) -> None:
    path, first, then, inside = on_ranks(2, kept_aside, str(tmp_path))[0]
    assert path == str(tmp_path / "named")
    assert first == ["global_step3", "mine", "named"]
    assert then == ["global_step4", "mine", "named"]
    assert inside == ["notes.txt"]


def used_again(folder: str) -> Any:
    engine = small_engine()
    weights = []
    for number in range(3):
        learn(engine, 1, seed=number)
        engine.save_checkpoint(folder, "last", {"number": number})
        weights.append(held(engine))
    dist.barrier()
    inside = sorted(entry.name[:4] for entry in Path(folder, "last").iterdir())
    other = small_engine(seed=6)
    _, client_state = other.load_checkpoint(folder)
    return inside, client_state, differing(held(other), weights[-1])


def test_a_tag_that_is_used_again_holds_the_newest(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, used_again, str(tmp_path)) == [(["data", "mani"], {"number": 2}, [])] * 2


def there_and_back(folder: str, stage: int) -> Any:
    """Save, train on, load the earlier one on the same engine, train again."""
    engine = odd_engine(stage, "bf16")
    learn(engine, 1)
    engine.save_checkpoint(folder, "early")
    early = held(engine)
    first = learn(engine, 3, seed=1)
    late = held(engine)
    engine.save_checkpoint(folder, "late", save_latest=False)
    engine.load_checkpoint(folder)  # latest is "early"
    back = differing(held(engine), early), engine.global_steps
    again = learn(engine, 3, seed=1)
    engine.load_checkpoint(folder, "late")
    return back, first == again, differing(held(engine), late), engine.global_steps


@covering(stage=(3, 1, *slower(0, 2)))
def test_an_engine_goes_back_to_its_own_checkpoint(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, there_and_back, str(tmp_path), stage) == [(([], 1), True, [], 4)] * 2


def before_any_step(folder: str, stage: int, name: str) -> Any:
    """Saved before the first step; loaded by an engine that has taken some."""
    engine = build_run(stage, name, seed=5)
    engine.save_checkpoint(folder)
    scatter(3)
    expected = advance(engine, endless(engine, 0, {}), 2)
    other = build_run(stage, name, seed=6)
    advance(other, endless(other, 0, {}), 2)
    other.load_checkpoint(folder)
    scatter(3)
    return advance(other, endless(other, 0, {}), 2) == expected, differing(held(other), held(engine))


@pytest.mark.parametrize("name", ["adamw, warm-up", "rmsprop instance", *slower("adagrad", "fp16 in mid-scaling")])
def test_the_state_before_the_first_step_is_a_state_too(on_ranks: OnRanks, tmp_path: Path, name: str) -> None:
    assert on_ranks(2, before_any_step, str(tmp_path), 1, name) == [(True, [])] * 2


def nothing_there(folder: str) -> Any:
    engine = small_engine()
    before = held(engine)
    with heard() as words:
        found = [engine.load_checkpoint(f"{folder}/absent"), engine.load_checkpoint(folder)]
    with pytest.raises(CheckpointError, match=r"absent.*has no manifest\.json"):
        engine.load_checkpoint(folder, "absent")
    return found, differing(before, held(engine)), len(words)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the library logs, from warnings up."""
    words: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    try:
        yield words
    finally:
        logger.removeHandler(handler)


def test_where_nothing_was_saved_there_is_a_warning_unless_a_tag_was_asked_for(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    first, second = on_ranks(2, nothing_there, str(tmp_path))
    assert first == ([(None, None)] * 2, [], 2)
    assert second == ([(None, None)] * 2, [], 0)


BAD_TAGS = ["", ".", "..", "a/b", "/tmp/a", "latest", "a\0b", "x" * 201]
ODD_TAGS = [" a", "a ", "a\nb", "a b", "\t", "é", "\ud800", "data-20200101T000000-00000000", "manifest.json"]


def badly_tagged(folder: str) -> Any:
    engine = small_engine()
    errors = [told(lambda tag=tag: engine.save_checkpoint(folder, tag)) for tag in BAD_TAGS]
    loads = [told(lambda tag=tag: engine.load_checkpoint(folder, tag)) for tag in BAD_TAGS]
    engine.save_checkpoint(folder, 7)
    return errors, loads, engine.load_checkpoint(folder), tags_in(folder)


def test_a_tag_is_the_plain_name_of_a_folder(on_ranks: OnRanks, tmp_path: Path) -> None:
    for errors, loads, found, tags in on_ranks(2, badly_tagged, str(tmp_path)):
        assert all("tag" in text for _, text in errors + loads)
        assert found == (f"{tmp_path}/7", {})
        assert tags == ["7"]


def oddly_tagged(folder: str, tag: str) -> Any:
    """Refused, or as good as any other tag."""
    engine = small_engine()
    try:
        engine.save_checkpoint(folder, tag)
    except Exception:
        return "refused"
    with heard() as words:
        paths = [engine.load_checkpoint(folder)[0], engine.load_checkpoint(folder, tag)[0]]
    return paths, words


@pytest.mark.parametrize("tag", [*ODD_TAGS[:3], *slower(*ODD_TAGS[3:])])
def test_a_tag_that_is_taken_is_found_again(on_ranks: OnRanks, tmp_path: Path, tag: str) -> None:
    for found in on_ranks(2, oddly_tagged, str(tmp_path), tag):
        assert found == "refused" or found == ([f"{tmp_path}/{tag}"] * 2, [])


def tagged_apart(folder: str, mode: str, delay: float) -> Any:
    engine = small_engine(checkpoint={"tag_validation": mode})
    learn(engine, 1)
    sleep(delay * rank())
    with heard() as words:
        try:
            saved: Any = engine.save_checkpoint(folder, f"of-rank-{rank()}")
        except Exception as error:
            saved = str(error)
    learn(engine, 1)
    engine.save_checkpoint(folder, "after")
    dist.barrier()
    return saved, words, tags_in(folder)


# A rank that comes late finds that its part was done for it.
@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_ranks_that_disagree_on_the_tag_are_warned(on_ranks: OnRanks, tmp_path: Path, delay: float) -> None:
    first, second = on_ranks(2, tagged_apart, str(tmp_path), "Warn", delay)
    assert first == (True, [], ["after", "of-rank-0"])
    assert second[0] is True
    assert any("'of-rank-1'" in word and "'of-rank-0'" in word for word in second[1])


def test_ranks_that_disagree_on_the_tag_are_refused_or_ignored(on_ranks: OnRanks, tmp_path: Path) -> None:
    for saved, _, tags in on_ranks(2, tagged_apart, str(tmp_path / "fail"), "Fail", 0.0):
        assert "'of-rank-1'" in saved
        assert "'of-rank-0'" in saved
        assert tags[0] == "after"
    assert not list((tmp_path / "fail").glob("of-rank*/manifest.json"))
    ignored = on_ranks(2, tagged_apart, str(tmp_path / "ignore"), "Ignore", 0.0)
    assert [(saved, words) for saved, words, _ in ignored] == [(True, []), (True, [])]


def in_a_window(folder: str, stage: int) -> Any:
    """In the middle of an accumulation window a save is refused, and the window goes on."""
    engine = odd_engine(stage, gradient_accumulation_steps=2)
    plain = odd_engine(stage, gradient_accumulation_steps=2)
    learn(plain, 4)
    errors = []
    for number, (x, y) in enumerate(batches(4)):
        engine.backward(engine(x, y))
        errors.append(told(lambda: engine.save_checkpoint(folder, "early")))
        engine.step()
        if number % 2 == 0:
            errors.append(told(lambda: engine.save_checkpoint(folder, "early")))
    engine.save_checkpoint(folder, "late")
    dist.barrier()
    return errors, differing(held(engine), held(plain)), sorted(path.parent.name for path in manifests(folder))


def manifests(folder: str | Path) -> list[Path]:
    return list(Path(folder).glob("*/manifest.json"))


@covering(stage=(0, 3, *slower(2)))
def test_a_save_inside_a_window_is_refused_with_the_reason(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    for errors, unlike, published in on_ranks(2, in_a_window, str(tmp_path), stage):
        assert len(errors) == 6
        assert all(kind == "SaveError" and "accumulated" in text for kind, text in errors)
        assert (unlike, published) == ([], ["late"])


# -- the user's own state ----------------------------------------------------------------------------------------


class Unsaveable:
    pass


def client_state() -> dict[str, Any]:
    return {
        "tuple": (1, (2.5, "x"), None),
        "keys": {1: "a", None: "b", (1, 2): "c", "$tuple": "d"},
        "set": {1, 2, 3},
        "frozen": frozenset({"a"}),
        "floats": [math.inf, -math.inf, 0.1, -0.0],
        "big": 2**80,
        "numpy": [np.float32(0.1), np.int64(-5), np.bool_(True), np.arange(5, dtype=np.uint16)],
        "arguments": vars(Namespace(lr=0.1, names=["a", "b"])),
        "tensors": {"b": torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "i": torch.arange(3), "e": torch.empty(0, 2)},
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "counter": Counter("aab"),
        "bytes": b"\x00\xff",
        "text": "ü",
        "dtype": torch.bfloat16,
        "none": None,
        "nested": [[[{"a": ({"b": [1]},)}]]],
    }


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and str(one) == str(other)


def client_states(folder: str) -> Any:
    engine = small_engine()
    given = client_state()
    engine.save_checkpoint(folder, client_state={**given, "nan": math.nan, "rank": rank()})
    _, found = small_engine().load_checkpoint(folder)
    assert found is not None
    return (
        math.isnan(found.pop("nan")),
        found.pop("rank"),
        [k for k in given if not same(given[k], found.pop(k))],
        found,
    )


def test_client_state_comes_back_as_it_was(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, client_states, str(tmp_path)) == [(True, 0, [], {})] * 2


def bad_client_state(folder: str) -> Any:
    engine = small_engine()
    learn(engine, 1)
    engine.save_checkpoint(folder, "good", {"number": 1})
    state = {"a": {"b": [1, Unsaveable()]}, "c": lambda: None, "d": 3}
    error = told(lambda: engine.save_checkpoint(folder, "bad", state))
    dist.barrier()
    tags = [path.parent.name for path in manifests(folder)], Path(folder, "latest").read_text()
    dist.barrier()
    learn(engine, 1)
    engine.save_checkpoint(folder, "next")
    return error, tags, engine.load_checkpoint(folder, "good")[1]


def test_client_state_that_is_code_is_refused_on_all_ranks_and_nothing_is_published(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for (_, text), tags, good in on_ranks(2, bad_client_state, str(tmp_path)):
        assert "client_state" in text
        assert '["a"]["b"][1]' in text
        assert '["c"]' in text
        assert "Unsaveable" in text
        assert tags == (["good"], "good")
        assert good == {"number": 1}


# -- in the background -------------------------------------------------------------------------------------------


def while_training(folder: str, stage: int, kind: str) -> Any:
    """Training goes on at once: what was saved is what there was at the call."""
    engine = odd_engine(stage, kind, checkpoint={"async": True})
    learn(engine, 1)
    at_the_call = []
    for number in range(3):
        at_the_call.append(held(engine))
        given = {"number": number, "tensor": torch.full((3,), number)}
        engine.save_checkpoint(folder, f"number-{number}", given)
        given["tensor"].fill_(-1)
        given["number"] = -1
        learn(engine, 1, seed=number)
    engine.wait_for_checkpoint()
    other, unlike = odd_engine(stage, kind, seed=6), []
    for number, expected in enumerate(at_the_call):
        _, found = other.load_checkpoint(folder, f"number-{number}")
        unlike += differing(held(other), expected)
        assert (found["number"], found["tensor"].tolist()) == (number, [number] * 3)
        assert other.global_steps == 1 + number
    return unlike


@covering(stage=(3, 2, *slower(0, 1)), kind=("fp32", "bf16"), strength=1)
def test_a_save_in_the_background_holds_what_there_was_at_the_call(
    on_ranks: OnRanks, tmp_path: Path, stage: int, kind: str
) -> None:
    assert on_ranks(2, while_training, str(tmp_path), stage, kind) == [[], []]


def one_at_a_time(folder: str) -> Any:
    """When the second call returns, the first checkpoint is published."""
    engine = small_engine()
    published = []
    for number in range(3):
        engine.save_checkpoint(folder, str(number), background=True)
        published.append(sorted(path.parent.name for path in manifests(folder)))
    engine.wait_for_checkpoint()
    published.append(sorted(path.parent.name for path in manifests(folder)))
    return published


def test_one_save_is_under_way_at_a_time(on_ranks: OnRanks, tmp_path: Path) -> None:
    for found in on_ranks(2, one_at_a_time, str(tmp_path)):
        assert set(found[1]) >= {"0"}
        assert set(found[2]) >= {"0", "1"}
        assert found[3] == ["0", "1", "2"]


def until(happened: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = monotonic() + seconds
    while not happened() and monotonic() < deadline:
        sleep(0.01)
    return happened()


def failing(folder: str, how: str, whose: int) -> Any:
    """One rank cannot write; every rank is told, at once or at the next step, and the next save works."""
    engine = small_engine()
    learn(engine, 1)
    engine.save_checkpoint(folder, "good")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == whose:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    errors = []
    try:
        for number in range(3):
            try:
                if number == 0:
                    engine.save_checkpoint(folder, "bad", background=how != "at once")
                elif how == "when waited for":
                    engine.wait_for_checkpoint()
                else:
                    # The step after the failure, and none that was too early to hear of it.
                    assert until(lambda: bool(errors) or engine._saver.failed)
                    learn(engine, 1)
            except Exception as error:
                errors.append((type(error).__name__, str(error)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    left = (
        [str(path.relative_to(folder)) for path in Path(folder, "bad").rglob("*")],
        Path(folder, "latest").read_text(),
    )
    dist.barrier()
    learn(engine, 1)
    engine.save_checkpoint(folder, "next")
    other = small_engine(seed=6)
    path, _ = other.load_checkpoint(folder)
    return errors, left, path, differing(held(other), held(engine))


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("how", ["at a step", *slower("at once", "when waited for")])
def test_a_rank_that_cannot_write_is_named_on_every_rank(
    on_ranks: OnRanks, tmp_path: Path, how: str, whose: int
) -> None:
    for errors, left, path, unlike in on_ranks(2, failing, str(tmp_path), how, whose):
        kind, text = errors[0]
        assert kind == "SaveError"
        assert f"rank {whose}: " in text
        assert "File too large" in text
        assert left == ([], "good")
        assert (path, unlike) == (f"{tmp_path}/next", [])


def written_by_hand(folder: str) -> Any:
    """Weights and states are set by hand right after the call: none of that is in the checkpoint."""
    engine, beside = odd_engine(2), odd_engine(2)
    learn(engine, 1)
    learn(beside, 1)
    beside.save_checkpoint(f"{folder}/beside")
    engine.save_checkpoint(f"{folder}/saved", background=True)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            safe_set_full_fp32_param(parameter, torch.zeros(parameter.shape))
            safe_set_full_optimizer_state(parameter, torch.zeros(parameter.shape), "exp_avg")
    engine.wait_for_checkpoint()
    return differing(
        trained_values(f"{folder}/saved", "global_step1"), trained_values(f"{folder}/beside", "global_step1")
    )


def test_what_is_written_by_hand_after_the_call_is_not_saved(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, written_by_hand, str(tmp_path)) == [[], []]


# -- on rank 0 alone ---------------------------------------------------------------------------------------------


def on_rank_0(folder: str, stage: int, background: bool) -> Any:
    """Rank 0 saves while the others go on into the next step, twice; each is what all ranks would have saved."""
    engine, beside = odd_engine(stage), odd_engine(stage)
    for number in range(2):
        learn(engine, 1, seed=number)
        learn(beside, 1, seed=number)
        if rank() == 0:
            engine.save_checkpoint(f"{folder}/alone", background=background)
        beside.save_checkpoint(f"{folder}/together")
    learn(engine, 1)
    engine.wait_for_checkpoint()
    unlike = []
    for tag in ("global_step1", "global_step2"):
        alone, together = trained_values(f"{folder}/alone", tag), trained_values(f"{folder}/together", tag)
        unlike += differing(alone, together)
    engine.load_checkpoint(f"{folder}/alone")
    beside.load_checkpoint(f"{folder}/together")
    return unlike, set(differing(held(engine), held(beside))) - {"as computed/seen"}


@covering(stage=(3, 1, *slower(0, 2)), background=(False, True), strength=1)
def test_saved_on_rank_0_alone_a_checkpoint_is_the_same(
    on_ranks: OnRanks, tmp_path: Path, stage: int, background: bool
) -> None:
    assert on_ranks(2, on_rank_0, str(tmp_path), stage, background) == [([], set())] * 2


def resumes_where_rank_0_saved(folder: str, stage: int) -> Any:
    """Random numbers and data of the others are those after the step, though their programs went on."""
    scatter(1)
    engine, at = build_run(stage, "adamw, warm-up", seed=5), {"epoch": 0}
    engine.module.register_buffer("seen", torch.zeros(3), persistent=False)  # each rank's own: not saved for others
    data = endless(engine, 0, at)
    advance(engine, data, 2)
    if rank() == 0:
        engine.save_checkpoint(folder, client_state=at)
    expected, expected_held = advance(engine, data, 3), held(engine)
    scatter(2)
    other = build_run(stage, "adamw, warm-up", seed=6)
    other.module.register_buffer("seen", torch.zeros(3), persistent=False)
    _, found = other.load_checkpoint(folder)
    assert found is not None
    return advance(other, endless(other, found["epoch"], {}), 3) == expected, differing(expected_held, held(other))


@covering(stage=(3, 0, *slower(1, 2)))
def test_a_run_that_rank_0_alone_has_saved_resumes_exactly(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, resumes_where_rank_0_saved, str(tmp_path), stage) == [(True, [])] * 2


class Slow(IterableDataset[Any]):
    """It takes its time to say where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((7,), self.at % VOCABULARY)

    def state_dict(self) -> dict[str, int]:
        found = {"at": self.at}
        sleep(1.2 * rank())
        return found

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def slow_position(folder: str) -> list[Any]:
    engine = start(net(), config(1), training_data=Slow())
    for x in islice(engine.training_dataloader, 2):
        engine.backward(engine(x, x))
        engine.step()
        if rank() == 0:
            engine.save_checkpoint(folder)
    dist.barrier()
    with CheckpointReader.open(folder) as checkpoint:
        return [checkpoint.own(number)["data"]["samples"] for number in range(2)]


def test_the_data_of_a_rank_that_joins_is_that_of_the_step(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, slow_position, str(tmp_path))[0] == [16, 16]


def late_twice(folder: str, delay: float) -> Any:
    """Two saves in a row, which one rank comes to late."""
    engine = small_engine()
    learn(engine, 1)
    sleep(delay * rank())
    engine.save_checkpoint(folder, "best")
    engine.save_checkpoint(folder, "last")
    learn(engine, 1)
    return len(manifests(folder))


@pytest.mark.parametrize("delay", [*slower(0.0, 0.6), 2.5])
def test_a_rank_may_come_late_to_two_saves_in_a_row(on_ranks: OnRanks, tmp_path: Path, delay: float) -> None:
    assert on_ranks(2, late_twice, str(tmp_path), delay) == [2, 2]


def refused_then_taken(folder: str, delay: float) -> Any:
    """A save that rank 0 refuses does not put the next one out of step, however late the others come."""
    engine = small_engine()
    learn(engine, 1)
    sleep(delay * rank())
    errors = [told(lambda: engine.save_checkpoint(folder, "tag", {"bad": Unsaveable()})) for _ in range(2)]
    engine.save_checkpoint(folder, "tag", {"good": 1})
    learn(engine, 1)
    return all("Unsaveable" in text for _, text in errors), engine.load_checkpoint(folder)[1]


@pytest.mark.parametrize("delay", [0.0, *slower(0.2, 1.5)])
def test_a_refused_save_leaves_the_ranks_in_step(on_ranks: OnRanks, tmp_path: Path, delay: float) -> None:
    assert on_ranks(2, refused_then_taken, str(tmp_path), delay) == [(True, {"good": 1})] * 2


def rank_1_alone(folder: str) -> Any:
    engine = small_engine()
    learn(engine, 1)
    begun = monotonic()
    try:
        if rank() == 1:
            engine.save_checkpoint(folder)
        else:
            learn(engine, 1)
    except Exception as error:
        return str(error), monotonic() - begun
    return None


def test_a_save_on_rank_1_alone_is_an_error_on_every_rank(tmp_path: Path) -> None:
    pool = RankPool(2)  # it is of no use afterwards
    try:
        for text, seconds in pool.run(rank_1_alone, str(tmp_path)):
            assert "save_checkpoint" in text
            assert seconds < 20
    finally:
        pool.stop()


# -- whole programs ----------------------------------------------------------------------------------------------

# As programs for DeepSpeed are written: rank 0 saves after each epoch, the others never call it, and end.
EPOCHS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
import onefold as deepspeed

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 60)
        self.layers = nn.ModuleList(nn.Linear(60, 60) for _ in range(2))
        self.head = nn.Linear(60, 31)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

class Sentences(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.randint(0, 31, (5,), generator=torch.Generator().manual_seed(index))
        return x, x

def train(stage, folder, alone):
    torch.manual_seed(0)
    model = Language()
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "log_level": "warning",
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Sentences(), config=config
    )
    for epoch in range(2):
        for inputs, targets in loader:
            outputs = engine(inputs)
            loss = nn.CrossEntropyLoss()(outputs.view(-1, outputs.size(-1)), targets.view(-1))
            engine.backward(loss)
            engine.step()
        if engine.local_rank == 0 or not alone:
            engine.save_checkpoint(folder, tag=f"epoch_{epoch}")

folder, *stages = sys.argv[1:]
for stage in stages:
    train(int(stage), f"{folder}/together-{stage}", alone=False)
    train(int(stage), f"{folder}/alone-{stage}", alone=True)
"""


def launch(folder: Path, program: str, *arguments: str, nproc: int = 2, timeout: float = 60) -> tuple[int, str]:
    """Run a program on real ranks; its exit code and everything it said."""
    path = folder / "program.py"
    path.write_text(program)
    starter = ["-m", "onefold.tools.cli.main", "launch", "--nproc", str(nproc)] if nproc > 1 else []
    command = [sys.executable, *starter, str(path), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **told)
    try:
        words, _ = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    first, _, rest = words.partition("\n")
    return process.returncode, rest if first.startswith("onefold: starting") else words


def whole_of(folder: Path, tag: str) -> Arrays:
    with CheckpointReader.open(folder, tag) as checkpoint:
        names = [n for n in checkpoint.manifest.tensors if n.startswith(("model/", "optimizer/"))]
        return {name: checkpoint.tensor(name).numpy() for name in names}


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.parametrize("stages", [["0", "3"], *slower(["1"], ["2"])])
def test_a_program_that_saves_on_rank_0_alone_runs_to_its_end(tmp_path: Path, stages: list[str]) -> None:
    code, words = launch(tmp_path, EPOCHS, str(tmp_path), *stages)
    assert (code, words) == (0, "")
    for stage in stages:
        for tag in ("epoch_0", "epoch_1"):
            alone, together = (whole_of(tmp_path / f"{how}-{stage}", tag) for how in ("alone", "together"))
            assert len(alone) == 3 * 7
            assert differing(alone, together) == []


LATE = """
import sys
import time
import torch
import onefold

engine = onefold.initialize(
    model=torch.nn.Linear(4, 4),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        "log_level": "warning",
    },
)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
if engine.global_rank == 0:
    time.sleep(6)  # it evaluates, alone
    engine.save_checkpoint(sys.argv[1])
"""


@pytest.mark.program
@pytest.mark.slow
def test_a_rank_does_not_leave_before_rank_0s_last_save(tmp_path: Path) -> None:
    assert launch(tmp_path, LATE, str(tmp_path / "saved")) == (0, "")
    CheckpointReader.open(tmp_path / "saved").close()


LEAVING = """
import sys
import torch
import onefold

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(4)))
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"async": True},
    "log_level": "warning",
}
engine = onefold.initialize(model=model, config=settings)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(1, 400)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1])
if sys.argv[2] == "raises":
    raise ValueError("the end")
"""


@pytest.mark.program
@pytest.mark.parametrize(("nproc", "how"), [(1, "returns"), *slower((2, "returns"), (1, "raises"), (2, "raises"))])
def test_the_end_of_a_program_waits_for_its_save(tmp_path: Path, nproc: int, how: str) -> None:
    code, words = launch(tmp_path, LEAVING, str(tmp_path / "saved"), how, nproc=nproc)
    if how == "returns":
        assert (code, words) == (0, "")
    with CheckpointReader.open(tmp_path / "saved") as checkpoint:
        assert checkpoint.manifest.global_steps == 3
        for name in checkpoint.manifest.tensors:
            checkpoint.verify(name)
    assert not list(tmp_path.rglob("*.partial"))


ONLY_RANK_1 = """
import sys
import torch
import onefold

engine = onefold.initialize(
    model=torch.nn.Linear(4, 4),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        "log_level": "warning",
    },
)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
if engine.global_rank == 1:
    engine.save_checkpoint(sys.argv[1])
"""


@pytest.mark.program
@pytest.mark.slow
def test_a_save_on_rank_1_alone_is_an_error_when_rank_0_has_ended(tmp_path: Path) -> None:
    code, words = launch(tmp_path, ONLY_RANK_1, str(tmp_path), timeout=40)
    assert code != 0
    assert "save_checkpoint" in words
